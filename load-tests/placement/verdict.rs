//! `--check`: what the router's defaults have to fulfil.

use crate::policies::OURS;
use crate::table::Row;

/// TTFT p99 may be so many times round robin's.
const P99_RATIO_MAX: f64 = 1.05;
/// The share of time with a queue at one worker and another one idle.
const WASTED_MAX: f64 = 0.01;
/// Hit tokens against the oracle's, up to this load.
const HITS_MIN: f64 = 0.95;
const HITS_LOAD_MAX: u32 = 70;

/// What is not fulfilled, a line each.
pub fn faults(rows: &[Row]) -> Vec<String> {
    let ours = rows.iter().filter(|row| OURS.contains(&row.policy));
    ours.flat_map(faults_of).collect()
}

fn faults_of(row: &Row) -> Vec<String> {
    let at = format!("{}, {}", row.scenario(), row.policy);
    let mut faults = Vec::new();
    if row.p99_ratio > P99_RATIO_MAX {
        faults.push(format!(
            "{at}: TTFT p99 is {:.2} times round robin's, more than {P99_RATIO_MAX}",
            row.p99_ratio
        ));
    }
    let wasted = row.median(|of| of.wasted);
    if wasted > WASTED_MAX {
        faults.push(format!(
            "{at}: in {:.1} % of the time a queue stands beside an idle worker, more than {:.0} %",
            100.0 * wasted,
            100.0 * WASTED_MAX
        ));
    }
    if row.load <= HITS_LOAD_MAX && row.hits_of_oracle < HITS_MIN {
        faults.push(format!(
            "{at}: {:.1} % of the oracle's hit tokens, less than {:.0} %",
            100.0 * row.hits_of_oracle,
            100.0 * HITS_MIN
        ));
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Outcome;
    use crate::table::row;

    #[test]
    fn each_condition_is_named_when_the_defaults_miss_it() {
        assert!(faults(&[row("exact", 70, 1.05, 0.95)]).is_empty());
        assert_eq!(faults(&[row("exact", 70, 1.06, 0.94)]).len(), 2);
        assert!(
            faults(&[row("approximate", 90, 1.0, 0.5)]).is_empty(),
            "hits count up to 70 %"
        );
        let mut wasteful = row("approximate", 90, 1.0, 1.0);
        wasteful.outcomes = vec![Outcome {
            wasted: 0.02,
            ..Outcome::default()
        }];
        assert_eq!(faults(&[wasteful]).len(), 1);
    }

    #[test]
    fn other_policies_may_be_as_bad_as_they_are() {
        assert!(faults(&[row("sglang", 50, 9.0, 0.1)]).is_empty());
    }
}
