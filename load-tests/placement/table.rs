//! Results of all seeds, and Markdown of them.

use crate::outcome::{Outcome, median};
use crate::policies::{self, BASE, ORACLE};
use serde::Serialize;
use std::fmt::Write;

/// A policy in one scenario, over all seeds.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Which kind of scenario.
    pub kind: String,
    /// In percent of capacity.
    pub load: u32,
    /// The policy.
    pub policy: &'static str,
    /// The median of each seed's TTFT p99 against round robin's of that seed.
    pub p99_ratio: f64,
    /// The median of each seed's hit tokens against the oracle's.
    pub hits_of_oracle: f64,
    /// Per seed.
    pub outcomes: Vec<Outcome>,
}

impl Row {
    /// The median of a number over seeds.
    pub fn median(&self, of: impl Fn(&Outcome) -> f64) -> f64 {
        median(self.outcomes.iter().map(of))
    }

    /// `kind load %`.
    pub fn scenario(&self) -> String {
        format!("{} {} %", self.kind, self.load)
    }

    fn errors(&self) -> usize {
        self.outcomes.iter().map(|of| of.errors).sum()
    }
}

/// Outcomes of one scenario, by policy and seed, as rows.
pub fn rows(kind: &str, load: u32, outcomes: Vec<(&'static str, Vec<Outcome>)>) -> Vec<Row> {
    let of = |policy: &str| {
        let found = outcomes.iter().find(|(name, _)| *name == policy);
        found.map_or(&[][..], |(_, outcomes)| outcomes)
    };
    let (base, oracle) = (of(BASE), of(ORACLE));
    let ratio = |own: &[Outcome], others: &[Outcome], number: fn(&Outcome) -> f64| {
        let pairs = own.iter().zip(others);
        // where there is nothing to find, nothing is missed
        median(pairs.map(|(own, other)| match number(other) {
            0.0 => 1.0,
            other => number(own) / other,
        }))
    };
    let rows = outcomes.iter().map(|(policy, own)| Row {
        kind: kind.to_owned(),
        load,
        policy,
        p99_ratio: ratio(own, base, |of| of.ttft_p99_ms),
        hits_of_oracle: ratio(own, oracle, |of| of.hit_tokens as f64),
        outcomes: own.clone(),
    });
    rows.collect()
}

/// Two overviews, scenario by policy, and the numbers of each scenario.
pub fn markdown(rows: &[Row], details: bool) -> String {
    let mut text = String::new();
    let p99 = "TTFT p99 against round robin's (median over seeds)";
    overview(&mut text, p99, rows, |row| format!("{:.2}", row.p99_ratio));
    let hits = "Hit tokens, in percent of the oracle's";
    overview(&mut text, hits, rows, |row| {
        format!("{:.0}", 100.0 * row.hits_of_oracle)
    });
    let wasted = "Percent of time with a queue at one worker and another one idle";
    overview(&mut text, wasted, rows, |row| {
        format!("{:.1}", 100.0 * row.median(|of| of.wasted))
    });
    if details {
        detail(&mut text, rows);
    }
    text
}

fn overview(text: &mut String, title: &str, rows: &[Row], cell: impl Fn(&Row) -> String) {
    let names = || policies::ALL.iter().map(|(name, _)| *name);
    let shown: Vec<&str> = names()
        .filter(|name| rows.iter().any(|row| row.policy == *name))
        .collect();
    let _ = writeln!(text, "## {title}\n\n| scenario | {} |", shown.join(" | "));
    let _ = writeln!(text, "|---{}|", "|---:".repeat(shown.len()));
    for scenario in rows.chunk_by(|a, b| a.scenario() == b.scenario()) {
        let cells = scenario.iter().map(&cell).collect::<Vec<_>>().join(" | ");
        let _ = writeln!(text, "| {} | {cells} |", scenario[0].scenario());
    }
    text.push('\n');
}

fn detail(text: &mut String, rows: &[Row]) {
    for scenario in rows.chunk_by(|a, b| a.scenario() == b.scenario()) {
        let _ = writeln!(
            text,
            "### {}\n\n| policy | TTFT p50 ms | p99 ms | p99 ratio | hits % | of oracle's % | busiest/mean | wasted % | predicted/found | errors |\n|---{}|",
            scenario[0].scenario(),
            "|---:".repeat(9)
        );
        for row in scenario {
            let predicted = row.median(|of| match of.predicted_hit_tokens {
                0 => 0.0,
                found => of.predicted_tokens as f64 / found as f64,
            });
            let _ = writeln!(
                text,
                "| {} | {:.0} | {:.0} | {:.2} | {:.1} | {:.1} | {:.2} | {:.2} | {} | {} |",
                row.policy,
                row.median(|of| of.ttft_p50_ms),
                row.median(|of| of.ttft_p99_ms),
                row.p99_ratio,
                100.0 * row.median(Outcome::hit_rate),
                100.0 * row.hits_of_oracle,
                row.median(|of| of.imbalance),
                100.0 * row.median(|of| of.wasted),
                if predicted > 0.0 {
                    format!("{predicted:.3}")
                } else {
                    "-".to_owned()
                },
                row.errors(),
            );
        }
        text.push('\n');
    }
}

#[cfg(test)]
pub fn row(policy: &'static str, load: u32, p99_ratio: f64, hits_of_oracle: f64) -> Row {
    Row {
        kind: "burst".to_owned(),
        load,
        policy,
        p99_ratio,
        hits_of_oracle,
        outcomes: vec![Outcome::default()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_pair_seeds_before_the_middle_is_taken() {
        let of = |ms: [f64; 3]| {
            let outcome = |ms| Outcome {
                ttft_p99_ms: ms,
                hit_tokens: ms as u64,
                ..Outcome::default()
            };
            ms.map(outcome).to_vec()
        };
        let made = rows(
            "burst",
            50,
            vec![
                (BASE, of([10.0, 100.0, 1000.0])),
                (ORACLE, of([5.0, 90.0, 100.0])),
            ],
        );
        assert_eq!(made[1].p99_ratio, 0.5, "of 0.5, 0.9 and 0.1");
        assert_eq!(made[1].hits_of_oracle, 1.0);
        assert!(markdown(&made, true).contains("| burst 50 % | 1.00 | 0.50 |"));
    }
}
