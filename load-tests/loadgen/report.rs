//! What a run says: quantiles of what clients waited for, tokens, balance, errors. Pure.

use crate::client::Seen;
use crate::pace::Ran;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

/// Latencies up to this are told apart; longer ones count as this.
const MICROS_MAX: u64 = 3_600_000_000;
/// Digits that are right.
const DIGITS: u8 = 3;

/// Durations in microseconds.
pub type Micros = Histogram<u64>;

/// Without durations yet.
pub fn micros() -> Micros {
    Histogram::new_with_bounds(1, MICROS_MAX, DIGITS).expect("the bounds are constants")
}

fn add(to: &mut Micros, duration: Duration) {
    to.saturating_record((duration.as_micros() as u64).max(1));
}

/// Quantiles in milliseconds.
#[derive(Debug, Clone, Serialize, PartialEq)]
pub struct Quantiles {
    /// Samples.
    pub count: u64,
    /// Their mean.
    pub mean_ms: f64,
    /// The median, and so on.
    pub p50_ms: f64,
    /// See above.
    pub p90_ms: f64,
    /// See above.
    pub p99_ms: f64,
    /// See above.
    pub p999_ms: f64,
    /// The longest.
    pub max_ms: f64,
}

impl Quantiles {
    fn of(all: &Micros) -> Self {
        let ms = |us: u64| us as f64 / 1e3;
        let at = |share| {
            if all.is_empty() {
                0.0
            } else {
                ms(all.value_at_quantile(share))
            }
        };
        Quantiles {
            count: all.len(),
            mean_ms: if all.is_empty() {
                0.0
            } else {
                all.mean() / 1e3
            },
            p50_ms: at(0.5),
            p90_ms: at(0.9),
            p99_ms: at(0.99),
            p999_ms: at(0.999),
            max_ms: if all.is_empty() { 0.0 } else { ms(all.max()) },
        }
    }
}

/// One backend's part.
#[derive(Debug, Clone, Default, Serialize, PartialEq)]
pub struct Part {
    /// Requests.
    pub requests: u64,
    /// Prompt tokens that it had to compute, and tokens that it generated.
    pub computed_tokens: u64,
}

/// Everything that was measured, as it stands in the JSON.
#[derive(Debug, Serialize)]
pub struct Report {
    /// From the first request to the last end, in seconds.
    pub seconds: f64,
    /// Requests that have ended.
    pub requests: usize,
    /// Due before the end of the run, and not begun.
    pub unsent: usize,
    /// Ends by kind.
    pub ends: BTreeMap<String, usize>,
    /// Whole answers a second.
    pub answers_per_second: f64,
    /// To the first token, from when the request was due (open loop) or sent (closed loop).
    pub ttft: Quantiles,
    /// The same from when it was sent: without what it waited for its turn here.
    pub ttft_from_sent: Quantiles,
    /// Between the events of a stream.
    pub inter_token: Quantiles,
    /// To the end of a whole answer, counted as the first.
    pub end_to_end: Quantiles,
    /// Of a closed loop: the same, with the requests that would have been sent meanwhile.
    pub end_to_end_corrected: Option<Quantiles>,
    /// Prompt tokens, those from an engine's cache, and generated ones; as engines counted.
    pub tokens: Tokens,
    /// By backend, as the router says.
    pub backends: BTreeMap<String, Part>,
    /// The busiest backend over the mean, by requests and by tokens to compute; none with one backend.
    pub imbalance: Option<(f64, f64)>,
    /// What the router believed to be cached against what was.
    pub prediction: Option<Prediction>,
    /// Answers from the response cache.
    pub response_cache_hits: usize,
    /// Whether latencies count from when requests were due.
    pub is_open_loop: bool,
}

/// See [`Report::tokens`].
#[derive(Debug, Clone, Copy, Default, Serialize, PartialEq, Eq)]
pub struct Tokens {
    /// Of prompts.
    pub prompt: u64,
    /// Of these from a cache.
    pub cached: u64,
    /// Generated.
    pub completion: u64,
}

/// Over the requests for which both are known.
#[derive(Debug, Clone, Copy, Serialize, PartialEq)]
pub struct Prediction {
    /// How many.
    pub requests: usize,
    /// Tokens believed to be cached.
    pub predicted_tokens: u64,
    /// Tokens that were.
    pub actual_tokens: u64,
    /// The mean of the distances, as a share of the prompt.
    pub mean_error: f64,
}

/// Distributions, for the picture.
pub struct Distributions {
    /// As [`Report::ttft`].
    pub ttft: Micros,
    /// As [`Report::inter_token`].
    pub inter_token: Micros,
    /// As [`Report::end_to_end`].
    pub end_to_end: Micros,
}

/// Puts a run together.
pub fn report(ran: &Ran, is_open_loop: bool) -> (Report, Distributions) {
    let [mut ttft, mut from_sent, mut inter_token, mut end_to_end] = [(); 4].map(|()| micros());
    let mut ends = BTreeMap::new();
    let mut tokens = Tokens::default();
    let mut backends: BTreeMap<String, Part> = BTreeMap::new();
    for seen in &ran.seen {
        *ends.entry(seen.end.word()).or_default() += 1;
        let begin = if is_open_loop { seen.due } else { seen.sent };
        if let Some(first) = seen.first.filter(|_| seen.end.is_good()) {
            add(&mut ttft, first - begin);
            add(&mut from_sent, first - seen.sent);
        }
        seen.gaps.iter().for_each(|gap| add(&mut inter_token, *gap));
        if seen.end == crate::client::End::Whole {
            add(&mut end_to_end, seen.done - begin);
        }
        count(seen, &mut tokens, &mut backends);
    }
    let last = ran.seen.iter().map(|seen| seen.done).max();
    let seconds = last.map_or(0.0, |last| (last - ran.began).as_secs_f64());
    let corrected = (!is_open_loop && !end_to_end.is_empty()).then(|| corrected(&end_to_end));
    let report = Report {
        seconds,
        requests: ran.seen.len(),
        unsent: ran.unsent,
        ends,
        answers_per_second: end_to_end.len() as f64 / seconds.max(f64::MIN_POSITIVE),
        ttft: Quantiles::of(&ttft),
        ttft_from_sent: Quantiles::of(&from_sent),
        inter_token: Quantiles::of(&inter_token),
        end_to_end: Quantiles::of(&end_to_end),
        end_to_end_corrected: corrected,
        tokens,
        imbalance: imbalance(&backends),
        backends,
        prediction: prediction(&ran.seen),
        response_cache_hits: ran.seen.iter().filter(|seen| seen.is_hit).count(),
        is_open_loop,
    };
    let distributions = Distributions {
        ttft,
        inter_token,
        end_to_end,
    };
    (report, distributions)
}

fn count(seen: &Seen, tokens: &mut Tokens, backends: &mut BTreeMap<String, Part>) {
    if seen.is_hit {
        return; // nobody computed anything
    }
    let usage = seen.usage.unwrap_or_default();
    let cached = usage.cached_tokens().unwrap_or(0);
    let completion = usage.completion_tokens.unwrap_or(0);
    tokens.prompt += usage.prompt_tokens;
    tokens.cached += cached;
    tokens.completion += completion;
    if let Some(backend) = &seen.backend {
        let part = backends.entry(backend.clone()).or_default();
        part.requests += 1;
        part.computed_tokens += usage.prompt_tokens.saturating_sub(cached) + completion;
    }
}

/// A closed loop sends nothing while it waits, so a long stall counts once. Corrected as HdrHistogram does: a latency
/// above the usual one stands for all requests that would have been sent meanwhile.
fn corrected(measured: &Micros) -> Quantiles {
    let usual = measured.value_at_quantile(0.5);
    let mut all = micros();
    for value in measured.iter_recorded() {
        let at = value.value_iterated_to();
        let _ = all.record_n(at, value.count_at_value());
        let mut missing = at.saturating_sub(usual);
        while missing >= usual.max(1) {
            let _ = all.record_n(missing, value.count_at_value());
            missing -= usual.max(1);
        }
    }
    Quantiles::of(&all)
}

fn imbalance(backends: &BTreeMap<String, Part>) -> Option<(f64, f64)> {
    let over_mean = |of: fn(&Part) -> u64| {
        let all: Vec<f64> = backends.values().map(|part| of(part) as f64).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        if mean > 0.0 {
            all.iter().copied().fold(0.0, f64::max) / mean
        } else {
            1.0
        }
    };
    (backends.len() > 1).then(|| {
        (
            over_mean(|part| part.requests),
            over_mean(|part| part.computed_tokens),
        )
    })
}

fn prediction(seen: &[Seen]) -> Option<Prediction> {
    let known = seen.iter().filter_map(|seen| {
        let usage = seen
            .usage
            .filter(|usage| usage.prompt_tokens > 0 && !seen.is_hit)?;
        let prompt = usage.prompt_tokens as f64;
        Some((
            seen.believed? * prompt,
            usage.cached_tokens()? as f64,
            prompt,
        ))
    });
    let known: Vec<(f64, f64, f64)> = known.collect();
    let errors = known
        .iter()
        .map(|(predicted, actual, prompt)| (predicted - actual).abs() / prompt);
    (!known.is_empty()).then(|| Prediction {
        requests: known.len(),
        predicted_tokens: known.iter().map(|of| of.0).sum::<f64>() as u64,
        actual_tokens: known.iter().map(|of| of.1).sum::<f64>() as u64,
        mean_error: errors.sum::<f64>() / known.len() as f64,
    })
}

impl Report {
    /// For people, as Markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        let from = if self.is_open_loop {
            "due (open loop)"
        } else {
            "sent (closed loop)"
        };
        let _ = writeln!(
            text,
            "{} requests in {:.1} s, {:.1} whole answers/s; latencies from when a request was {from}\n",
            self.requests, self.seconds, self.answers_per_second
        );
        let _ = writeln!(
            text,
            "| | samples | mean | p50 | p90 | p99 | p99.9 | longest |\n|---|--:|--:|--:|--:|--:|--:|--:|"
        );
        let mut row = |name: &str, q: &Quantiles| {
            let _ = writeln!(
                text,
                "| {name} | {} | {:.2} ms | {:.2} ms | {:.2} ms | {:.2} ms | {:.2} ms | {:.2} ms |",
                q.count, q.mean_ms, q.p50_ms, q.p90_ms, q.p99_ms, q.p999_ms, q.max_ms
            );
        };
        row("time to first token", &self.ttft);
        if self.is_open_loop {
            row("the same, from when it was sent", &self.ttft_from_sent);
        }
        row("between tokens", &self.inter_token);
        row("whole answer", &self.end_to_end);
        if let Some(corrected) = &self.end_to_end_corrected {
            row(
                "whole answer, with what a stall kept from being sent",
                corrected,
            );
        }
        let ends: Vec<String> = self
            .ends
            .iter()
            .map(|(end, count)| format!("{end} {count}"))
            .collect();
        let _ = writeln!(text, "\n* ends: {}", ends.join(", "));
        if self.unsent > 0 {
            let _ = writeln!(
                text,
                "* **{} requests were due and could not be begun**: the rate is more than the target takes",
                self.unsent
            );
        }
        let t = &self.tokens;
        let share = 100.0 * t.cached as f64 / t.prompt.max(1) as f64;
        let _ = writeln!(
            text,
            "* tokens: {} of prompts, {} of these cached ({share:.1} %), {} generated",
            t.prompt, t.cached, t.completion
        );
        if let Some((requests, work)) = self.imbalance {
            let _ = writeln!(
                text,
                "* busiest of {} backends over the mean: {requests:.2} by requests, {work:.2} by tokens to compute",
                self.backends.len()
            );
        }
        if let Some(p) = &self.prediction {
            let _ = writeln!(
                text,
                "* predicted {} cached tokens, were {} ({} requests; mean error {:.1} % of the prompt)",
                p.predicted_tokens,
                p.actual_tokens,
                p.requests,
                100.0 * p.mean_error
            );
        }
        if self.response_cache_hits > 0 {
            let _ = writeln!(
                text,
                "* from the response cache: {}",
                self.response_cache_hits
            );
        }
        text
    }

    /// Whether a client did not get what it asked for.
    pub fn has_errors(&self) -> bool {
        self.ends.keys().any(|end| end != "whole" && end != "left")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::End;
    use std::time::Instant;
    use wire::openai::{PromptTokensDetails, Usage};

    fn seen(late_ms: u64, ttft_ms: u64, backend: &str, cached: u64) -> Seen {
        let due = Instant::now();
        let sent = due + Duration::from_millis(late_ms);
        let first = sent + Duration::from_millis(ttft_ms);
        Seen {
            due,
            sent,
            first: Some(first),
            done: first + Duration::from_millis(10),
            gaps: vec![Duration::from_millis(5); 2],
            end: End::Whole,
            usage: Some(Usage {
                prompt_tokens: 100,
                completion_tokens: Some(3),
                total_tokens: 103,
                prompt_tokens_details: Some(PromptTokensDetails {
                    cached_tokens: Some(cached),
                }),
            }),
            backend: Some(backend.into()),
            believed: Some(0.5),
            is_hit: false,
        }
    }

    fn ran(seen: Vec<Seen>) -> Ran {
        let began = seen
            .iter()
            .map(|s| s.due)
            .min()
            .unwrap_or_else(Instant::now);
        Ran {
            began,
            seen,
            unsent: 0,
        }
    }

    #[test]
    fn an_open_loop_counts_the_wait_for_its_turn_and_a_closed_one_does_not() {
        let run = ran(vec![seen(400, 20, "a", 0); 10]);
        let (open, _) = report(&run, true);
        assert!((open.ttft.p50_ms - 420.0).abs() < 1.0, "{:?}", open.ttft);
        assert!((open.ttft_from_sent.p50_ms - 20.0).abs() < 1.0);
        let (closed, _) = report(&run, false);
        assert!((closed.ttft.p50_ms - 20.0).abs() < 1.0);
    }

    #[test]
    fn a_stall_of_a_closed_loop_stands_for_what_it_kept_from_being_sent() {
        let mut all = vec![seen(0, 0, "a", 0); 99];
        all.push(seen(0, 990, "a", 0));
        let (closed, _) = report(&ran(all), false);
        let corrected = closed.end_to_end_corrected.unwrap();
        assert!(closed.end_to_end.p90_ms < 11.0);
        // 1,000 ms at 10 ms a request: 990, 980 and so on down to 10
        assert!((195..=200).contains(&corrected.count), "{corrected:?}");
        assert!((750.0..850.0).contains(&corrected.p90_ms), "{corrected:?}");
    }

    #[test]
    fn tokens_balance_and_predictions_are_added_up() {
        let (report, _) = report(
            &ran(vec![
                seen(0, 1, "a", 40),
                seen(0, 1, "a", 60),
                seen(0, 1, "b", 50),
                seen(0, 1, "a", 50),
            ]),
            true,
        );
        assert_eq!(
            report.tokens,
            Tokens {
                prompt: 400,
                cached: 200,
                completion: 12
            }
        );
        assert_eq!(report.imbalance.unwrap().0, 1.5);
        let prediction = report.prediction.unwrap();
        assert_eq!(
            (prediction.predicted_tokens, prediction.actual_tokens),
            (200, 200)
        );
        assert!((prediction.mean_error - 0.05).abs() < 1e-9);
        assert!(!report.has_errors());
    }

    #[test]
    fn what_failed_is_an_error_and_has_no_time_to_first_token() {
        let failed = Seen {
            end: End::Cut,
            ..seen(0, 1, "a", 0)
        };
        let (report, _) = report(&ran(vec![failed, seen(0, 1, "b", 0)]), true);
        assert!(report.has_errors());
        assert_eq!((report.ttft.count, report.ends["cut"]), (1, 1));
    }
}
