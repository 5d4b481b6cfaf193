//! Split serving: a prompt is computed by one engine and answered by another.

mod connectors;
mod engines;
mod failures;
mod legs;
mod paths;

use crate::support::client::Answer;
use crate::support::{Client, Gateway, MODEL, Request, Upstream, Wire, sse};
use serde_json::{Value, json};

/// A prompt that is long enough to be split, by the length of its text.
fn long() -> String {
    "tide ".repeat(1_000)
}

/// A body with that prompt, and these members.
fn ask(members: Value) -> String {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": long()}]});
    let body_members = body.as_object_mut().unwrap();
    body_members.extend(members.as_object().unwrap().clone());
    body.to_string()
}

/// The same, as a stream.
fn ask_stream() -> String {
    ask(json!({"stream": true}))
}

/// Engines by name and role.
struct Fleet {
    engines: Vec<(&'static str, &'static str, Upstream)>,
}

type Script = fn(&Request, &mut Wire);

impl Fleet {
    /// Roles go by the first letter of the names: p, d, u.
    fn new(scripts: &[(&'static str, Script)]) -> Self {
        let engines = scripts.iter().map(|(name, script)| {
            let script = *script;
            Self::member(name, Upstream::start(script))
        });
        Fleet {
            engines: engines.collect(),
        }
    }

    fn member(name: &'static str, engine: Upstream) -> (&'static str, &'static str, Upstream) {
        let role = match name.as_bytes()[0] {
            b'p' => "prefill",
            b'd' => "decode",
            _ => "unified",
        };
        (name, role, engine)
    }

    fn of(members: Vec<(&'static str, Upstream)>) -> Self {
        let engines = members
            .into_iter()
            .map(|(name, engine)| Self::member(name, engine));
        Fleet {
            engines: engines.collect(),
        }
    }

    fn engine(&self, name: &str) -> &Upstream {
        let mut engines = self.engines.iter();
        &engines.find(|(other, ..)| *other == name).unwrap().2
    }

    /// A gateway with these keys of `disaggregated_serving`, and these of the settings.
    fn gateway_with(&self, keys: &str, overrides: &str) -> Gateway {
        let backends = self.engines.iter().map(|(name, role, engine)| {
            format!(
                "  - {{ name: {name}, role: {role}, url: 'http://{}', models: [{MODEL}], kv_peer: {{ zmq_address: '{name}:1', bootstrap_port: 9 , engine_id: id-{name} }} }}\n",
                engine.address
            )
        });
        Gateway::with(
            &backends.collect::<String>(),
            &format!("disaggregated_serving: {{ enabled: true, {keys} }}\n{overrides}"),
        )
    }

    fn gateway(&self, keys: &str) -> Gateway {
        self.gateway_with(keys, "")
    }

    /// How many requests each engine has had.
    fn counts(&self) -> Vec<(&'static str, usize)> {
        let asked = self
            .engines
            .iter()
            .map(|(name, _, engine)| (*name, engine.count()));
        asked.filter(|(_, count)| *count > 0).collect()
    }
}

fn path(answer: &Answer) -> &str {
    answer.header("x-tidegate-path").unwrap_or_default()
}

fn code(answer: &Answer) -> String {
    answer.json()["error"]["code"].as_str().unwrap().to_owned()
}

/// A whole answer, in which so many of 100 prompt tokens were cached.
fn whole(wire: &mut Wire, cached: &str, more: &str) {
    wire.json(
        "200 OK",
        &format!(
            r#"{{"id":"c1","model":"m","choices":[{{"index":0,"message":{{"role":"assistant","content":"x"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":100,"completion_tokens":1,"total_tokens":101{cached}}}{more}}}"#
        ),
    );
}

/// Computes prompts; 20 tokens were cached.
fn prefills(_: &Request, wire: &mut Wire) {
    whole(wire, r#","prompt_tokens_details":{"cached_tokens":20}"#, "");
}

/// Computes prompts and keeps the blocks for who fetches them.
fn prefills_and_keeps(_: &Request, wire: &mut Wire) {
    let params = r#","kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[18446744073709551615],"remote_host":"h","remote_port":1.50}"#;
    whole(
        wire,
        r#","prompt_tokens_details":{"cached_tokens":20}"#,
        params,
    );
}

/// Answers as it is asked; counts all of the prompt as cached.
fn answers(request: &Request, wire: &mut Wire) {
    let body = request.json();
    if body["stream"] != true {
        return whole(
            wire,
            r#","prompt_tokens_details":{"cached_tokens":100}"#,
            "",
        );
    }
    let mut events = sse::delta("a") + &sse::delta("b") + &sse::finish("stop");
    if body["stream_options"]["include_usage"] == true {
        let usage = sse::usage(100, 2);
        events += &usage.replace(
            "\"total_tokens\"",
            "\"prompt_tokens_details\":{\"cached_tokens\":100},\"total_tokens\"",
        );
    }
    wire.stream(&[events + sse::DONE]);
}

/// Breaks the connection off.
fn dies(_: &Request, wire: &mut Wire) {
    wire.reset();
}

/// Never answers.
fn hangs(_: &Request, wire: &mut Wire) {
    wire.hang();
}

fn chat(gateway: &Gateway, body: &str) -> Answer {
    Client::connect(gateway).chat(body)
}
