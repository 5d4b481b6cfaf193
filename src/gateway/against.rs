//! `tidegate check --running URL`: what differs between settings and a gateway that runs.

use crate::healthcheck::get;
use crate::settings::Known;
use crate::settings::difference::{Difference, by_name, compare};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Settings of some thousand backends.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

#[derive(Deserialize)]
struct InEffect {
    version: String,
    settings: BTreeMap<String, Value>,
}

/// Prints it; answers the exit code.
pub fn print(url: &str, token: Option<&str>, wanted: &[Known]) -> i32 {
    let in_effect = match ask(url, token) {
        Ok(in_effect) => in_effect,
        Err(reason) => {
            eprintln!("{url}: {reason}");
            return 1;
        }
    };
    if in_effect.version != env!("CARGO_PKG_VERSION") {
        let own = env!("CARGO_PKG_VERSION");
        println!(
            "the running gateway is {}, this is {own}: defaults may differ",
            in_effect.version
        );
    }
    // marks tell masked values apart within one process only
    let unmarked = |of: (String, Value)| (of.0, (of.1, 0));
    let from = in_effect.settings.into_iter().map(unmarked).collect();
    let to = by_name(wanted)
        .into_iter()
        .map(|(path, (value, _))| (path, (value, 0)))
        .collect();
    let all = compare(&from, &to);
    if all.is_empty() {
        println!("the running gateway has the same settings (values of secrets are not compared)");
        return 0;
    }
    println!("a reload of the running gateway would change (values of secrets are not compared):");
    for of in &all {
        println!("{}", line(of));
    }
    0
}

fn line(of: &Difference) -> String {
    let change = match (&of.from, &of.to) {
        (None, Some(to)) => format!("+ {}: {to}", of.path),
        (Some(from), None) => format!("- {}: {from}", of.path),
        (Some(from), Some(to)) => format!("~ {}: {from} -> {to}", of.path),
        (None, None) => of.path.clone(),
    };
    match of.needs_restart {
        true => format!("{change}   (needs a restart)"),
        false => change,
    }
}

fn ask(url: &str, token: Option<&str>) -> Result<InEffect, String> {
    let url = format!("{}/admin/config", url.trim_end_matches('/'));
    let header = token.map(|token| format!("authorization: Bearer {token}\r\n"));
    let (status, body) = get(
        &url,
        header.as_deref().unwrap_or_default(),
        ANSWER_BYTES_MAX,
    )
    .map_err(|error| error.to_string())?;
    match status {
        200 => serde_json::from_slice(&body)
            .map_err(|_| "does not answer as a gateway does".to_owned()),
        401 | 403 => Err(format!(
            "answered {status}: pass its admin token with --token, or in TIDEGATE_ADMIN_TOKEN"
        )),
        404 => {
            Err("answered 404: /admin may be on a listener of its own (admin.listen)".to_owned())
        }
        status => Err(format!("answered {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_was_and_what_will_be_and_when() {
        let of = |from: Option<i32>, to: Option<i32>, needs_restart| {
            line(&Difference {
                path: "a.b".into(),
                from: from.map(Value::from),
                to: to.map(Value::from),
                needs_restart,
            })
        };
        assert_eq!(of(None, Some(1), false), "+ a.b: 1");
        assert_eq!(of(Some(1), None, false), "- a.b: 1");
        assert_eq!(
            of(Some(1), Some(2), true),
            "~ a.b: 1 -> 2   (needs a restart)"
        );
    }
}
