//! The command line, and what follows from it.

use crate::client::Target;
use crate::pace::{Bounds, Pace};
use crate::workload::burst::{self, Bursts};
use crate::workload::conversations::{self, Talk};
use crate::workload::mooncake::{self, Scale};
use crate::workload::{Ask, people};
use clap::{Parser, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// What is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Conversations of several turns behind a few popular system prompts
    Conversations,
    /// A trace in Mooncake's format: --trace, or a synthetic one with the statistics of the public conversation trace
    Mooncake,
    /// Unrelated prompts, and now and then many at once about one new document
    Bursts,
}

/// Asks a router or an engine as many clients would, and reports time to first token, time between tokens, whole answers, cached
/// tokens, balance between backends and errors. The same seed asks the same. Exits with 1 when a client did not get what it
/// asked for, with 2 when the run could not be made.
#[derive(Debug, Clone, Parser)]
#[command(after_help = "Examples:
  loadgen --model m --rate 20 --duration 60                         20 requests a second (open loop), conversations
  loadgen --model m --concurrency 64 --json-answers                 64 clients, each asks when it has its answer (closed loop)
  loadgen --model m --workload mooncake --trace FILE --speed-up 10  a recorded trace, ten times as fast
  loadgen --model m --workload bursts --rate 50 --leave-share 0.05 --json out.json --svg out.svg

In an open loop latencies count from the moment at which a request was due, so a target that cannot keep up shows it. A closed
loop sends nothing while it waits; its report says besides what the percentiles are with the requests that were kept back.")]
pub struct Args {
    /// Base URL of the target; only http:// is spoken
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// Model to ask for
    #[arg(long)]
    pub model: String,
    /// API keys, one for each tenant, with commas between
    #[arg(
        long,
        value_delimiter = ',',
        hide_env_values = true,
        env = "LOADGEN_API_KEYS"
    )]
    pub api_keys: Vec<String>,
    /// What is asked
    #[arg(long, value_enum, default_value = "conversations")]
    pub workload: Kind,
    /// Open loop: requests a second, at random times
    #[arg(long, group = "pacing", value_parser = positive)]
    pub rate: Option<f64>,
    /// Closed loop: clients that ask one request after the other
    #[arg(long, group = "pacing", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub concurrency: Option<u32>,
    /// No request is begun after so many seconds
    #[arg(long, default_value_t = 60.0, value_parser = positive)]
    pub duration: f64,
    /// Requests in all, at most
    #[arg(long, default_value_t = 1200)]
    pub requests: usize,
    /// A request that lasts longer, in seconds, is given up and counted
    #[arg(long, default_value_t = 120.0, value_parser = positive)]
    pub request_timeout: f64,
    /// Open loop: requests at one time, at most; what is due beyond waits, and its wait counts
    #[arg(long, default_value_t = 2048)]
    pub in_flight: usize,
    /// Ask for JSON answers instead of streams
    #[arg(long)]
    pub json_answers: bool,
    /// Ask engines to go on to the full length of an answer (vLLM, SGLang)
    #[arg(long)]
    pub ignore_eos: bool,
    /// Share of clients that leave: half of them before the first byte, half in the middle of the answer
    #[arg(long, default_value_t = 0.0, value_parser = share)]
    pub leave_share: f64,
    /// Tenants, of which the first asks most
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub tenants: u32,
    /// How popularity falls from one tenant (one system prompt) to the next: 0 all alike, 1 as in nature
    #[arg(long, default_value_t = 1.0)]
    pub zipf: f64,
    /// Seed of everything that is drawn by chance
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Conversations: turns of each
    #[arg(long, default_value_t = 6)]
    pub turns: usize,
    /// Conversations: how many are open at one time
    #[arg(long, default_value_t = 32)]
    pub open: usize,
    /// Conversations: different system prompts; 0 for none
    #[arg(long, default_value_t = 20)]
    pub systems: usize,
    /// Words of a system prompt, and of a burst's document
    #[arg(long, default_value_t = 600)]
    pub system_words: usize,
    /// Words of a user's message
    #[arg(long, default_value_t = 60)]
    pub user_words: usize,
    /// Tokens of an answer
    #[arg(long, default_value_t = 64)]
    pub answer_tokens: usize,
    /// Bursts: unrelated requests between two of them
    #[arg(long, default_value_t = 100)]
    pub burst_every: usize,
    /// Bursts: requests of one
    #[arg(long, default_value_t = 20)]
    pub burst_size: usize,
    /// Mooncake: the trace; without it a synthetic one
    #[arg(long)]
    pub trace: Option<PathBuf>,
    /// Mooncake: words that stand for a block of 512 tokens; lengths of answers shrink alike
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=512))]
    pub block_words: u32,
    /// Mooncake: so many times faster than recorded
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub speed_up: f64,
    /// Writes all figures to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Draws the run into this file
    #[arg(long)]
    pub svg: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text
        .parse::<f64>()
        .ok()
        .filter(|number| *number > 0.0 && number.is_finite());
    number.ok_or_else(|| "a number above 0 is expected".into())
}

fn share(text: &str) -> Result<f64, String> {
    let number = text
        .parse::<f64>()
        .ok()
        .filter(|number| (0.0..=1.0).contains(number));
    number.ok_or_else(|| "a number from 0 to 1 is expected".into())
}

/// What an open loop sends when neither --rate nor --concurrency is given, and the workload has no times of its own.
const RATE_DEFAULT: f64 = 10.0;

impl Args {
    /// All requests.
    ///
    /// # Errors
    /// A trace that cannot be read.
    pub fn asks(&self) -> Result<Vec<Ask>, String> {
        let mut asks = match self.workload {
            Kind::Conversations => conversations::turns(&self.talk(), self.seed),
            Kind::Bursts => burst::requests(&self.bursts(), self.seed),
            Kind::Mooncake => {
                let mut lines = match &self.trace {
                    Some(path) => {
                        mooncake::read(path).map_err(|error| format!("--trace: {error}"))?
                    }
                    None => mooncake::synthetic(self.requests, self.seed),
                };
                lines.truncate(self.requests);
                let block_words = self.block_words as usize;
                mooncake::requests(
                    &lines,
                    Scale {
                        block_words,
                        speed_up: self.speed_up,
                    },
                )
            }
        };
        asks.truncate(self.requests);
        people(
            &mut asks,
            (self.tenants as usize, self.zipf),
            self.leave_share,
            self.seed,
        );
        Ok(asks)
    }

    fn talk(&self) -> Talk {
        Talk {
            conversations: self.requests.div_ceil(self.turns.max(1)),
            turns: self.turns.max(1),
            open: self.open,
            systems: self.systems,
            zipf: self.zipf,
            system_words: self.system_words,
            user_words: self.user_words,
            answer_tokens: self.answer_tokens,
        }
    }

    fn bursts(&self) -> Bursts {
        Bursts {
            requests: self.requests,
            every: self.burst_every.max(1),
            size: self.burst_size.max(1),
            document_words: self.system_words,
            own_words: self.user_words,
            answer_tokens: self.answer_tokens,
        }
    }

    /// How the load is paced.
    pub fn pace(&self) -> Pace {
        match (self.rate, self.concurrency) {
            (Some(rate), _) => Pace::Rate(rate),
            (None, Some(clients)) => Pace::Closed(clients as usize),
            (None, None) if self.workload == Kind::Mooncake => Pace::Recorded,
            (None, None) => Pace::Rate(RATE_DEFAULT),
        }
    }

    /// Its bounds.
    pub fn bounds(&self) -> Bounds {
        Bounds {
            lasts: Duration::from_secs_f64(self.duration),
            in_flight: self.in_flight.max(1),
        }
    }

    /// How long one request may last.
    pub fn request_limit(&self) -> Duration {
        Duration::from_secs_f64(self.request_timeout)
    }

    /// Whom to ask.
    ///
    /// # Errors
    /// An address that is not spoken.
    pub fn target(&self) -> Result<Target, String> {
        let rest = self
            .url
            .strip_prefix("http://")
            .ok_or("--url: only http:// is spoken")?;
        let (authority, prefix) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let authority = match authority.contains(':') {
            true => authority.to_owned(),
            false => format!("{authority}:80"),
        };
        let path = format!("{}/v1/chat/completions", prefix.trim_end_matches('/'));
        Ok(Target {
            authority,
            path,
            keys: self.api_keys.clone(),
        })
    }

    /// One line that says what is run.
    pub fn title(&self, requests: usize) -> String {
        let pace = match self.pace() {
            Pace::Rate(rate) => format!("{rate} requests/s, open loop"),
            Pace::Recorded => format!("recorded times, {} times as fast", self.speed_up),
            Pace::Closed(clients) => format!("{clients} clients, closed loop"),
        };
        let kind = self.workload.to_possible_value();
        let kind = kind.map_or_else(String::new, |kind| kind.get_name().to_owned());
        format!(
            "{kind}: up to {requests} requests, {pace}, seed {}",
            self.seed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &str) -> Args {
        Args::try_parse_from(format!("loadgen --model m {words}").split_whitespace()).unwrap()
    }

    #[test]
    fn a_rate_opens_the_loop_a_number_of_clients_closes_it_and_a_trace_has_its_own_times() {
        assert_eq!(args("--rate 5").pace(), Pace::Rate(5.0));
        assert_eq!(args("--concurrency 3").pace(), Pace::Closed(3));
        assert_eq!(args("--workload mooncake").pace(), Pace::Recorded);
        assert_eq!(args("").pace(), Pace::Rate(RATE_DEFAULT));
        let both = "loadgen --model m --rate 1 --concurrency 1".split(' ');
        assert!(Args::try_parse_from(both).is_err());
    }

    #[test]
    fn a_target_is_a_host_a_port_and_perhaps_a_prefix() {
        let target = args("--url http://h:1/api/").target().unwrap();
        assert_eq!(
            (&*target.authority, &*target.path),
            ("h:1", "/api/v1/chat/completions")
        );
        assert_eq!(args("--url http://h").target().unwrap().authority, "h:80");
        assert!(args("--url https://h").target().is_err());
    }

    #[test]
    fn every_workload_gives_as_many_requests_as_are_asked_for() {
        for kind in ["conversations", "mooncake", "bursts"] {
            let asks = args(&format!("--workload {kind} --requests 50"))
                .asks()
                .unwrap();
            assert_eq!(asks.len(), 50, "{kind}");
        }
    }
}
