//! What clients are told of their limits.

use routing::quota::{Limited, Scope};
use std::time::Duration;

/// How a limit stands after a request was held against it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weighed {
    /// What there is in a minute, or at one time.
    pub limit: u64,
    /// What is left.
    pub remaining: u64,
    /// When all of it will be there again.
    pub reset: Duration,
    /// When a refused request would be served.
    pub retry_after: Duration,
}

/// When a place may be free again: nobody knows.
const PLACE_AFTER: Duration = Duration::from_secs(1);

impl Weighed {
    /// All places are taken.
    pub fn places(limit: u32) -> Self {
        Weighed {
            limit: u64::from(limit),
            remaining: 0,
            reset: PLACE_AFTER,
            retry_after: PLACE_AFTER,
        }
    }

    /// Whether less is left than there, as a share.
    fn is_tighter_than(&self, other: &Weighed) -> bool {
        let share = |of: &Weighed| of.remaining as f64 / of.limit.max(1) as f64;
        share(self) < share(other)
    }

    /// Whole seconds, never 0.
    pub fn retry_seconds(&self) -> u64 {
        seconds(self.retry_after).max(1)
    }
}

fn seconds(of: Duration) -> u64 {
    of.as_secs() + u64::from(of.subsec_nanos() > 0)
}

/// A limit that a request is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    /// Of what.
    pub limited: Limited,
    /// Whose.
    pub scope: Scope,
    /// How it stands.
    pub weighed: Weighed,
}

impl Exceeded {
    /// One sentence for the client.
    pub fn message(&self) -> String {
        let (limit, scope) = (self.weighed.limit, self.scope.as_str());
        let what = match self.limited {
            Limited::Requests => format!("{limit} requests per minute"),
            Limited::Tokens => format!("{limit} tokens per minute"),
            Limited::Concurrency => format!("{limit} requests at one time"),
        };
        let after = self.weighed.retry_seconds();
        format!("the limit of this {scope}, {what}, is reached; try again in {after} s")
    }

    /// The headers of the refusal.
    pub fn note(&self) -> RateNote {
        let mut note = RateNote::default();
        note.add(self.limited, self.weighed);
        note
    }
}

/// The tightest of a request's limits of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateNote {
    requests: Option<Weighed>,
    tokens: Option<Weighed>,
    places: Option<Weighed>,
}

impl RateNote {
    /// Another limit that the request is under.
    pub fn add(&mut self, limited: Limited, weighed: Weighed) {
        let place = match limited {
            Limited::Requests => &mut self.requests,
            Limited::Tokens => &mut self.tokens,
            Limited::Concurrency => &mut self.places,
        };
        if place.is_none_or(|of| weighed.is_tighter_than(&of)) {
            *place = Some(weighed);
        }
    }

    /// Says it as headers: limit, what remains, and in how many seconds all of it is there again.
    pub fn tell(&self, mut tell: impl FnMut(&'static str, &str)) {
        let names = [
            (
                &self.requests,
                "x-ratelimit-limit-requests",
                "x-ratelimit-remaining-requests",
                "x-ratelimit-reset-requests",
            ),
            (
                &self.tokens,
                "x-ratelimit-limit-tokens",
                "x-ratelimit-remaining-tokens",
                "x-ratelimit-reset-tokens",
            ),
            (
                &self.places,
                "x-ratelimit-limit-concurrency",
                "x-ratelimit-remaining-concurrency",
                "x-ratelimit-reset-concurrency",
            ),
        ];
        for (weighed, limit, remaining, reset) in names {
            if let Some(weighed) = weighed {
                tell(limit, &weighed.limit.to_string());
                tell(remaining, &weighed.remaining.to_string());
                tell(reset, &format!("{}s", seconds(weighed.reset)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_is_told_in_whole_seconds_and_a_refusal_never_says_0() {
        let weighed = |limit, remaining, millis| Weighed {
            limit,
            remaining,
            reset: Duration::from_millis(millis),
            retry_after: Duration::ZERO,
        };
        let mut note = RateNote::default();
        note.add(Limited::Requests, weighed(100, 50, 1500));
        note.add(Limited::Requests, weighed(10, 1, 900));
        note.add(Limited::Requests, weighed(1000, 999, 1));
        let mut told = Vec::new();
        note.tell(|name, value| told.push(format!("{name}: {value}")));
        assert_eq!(
            told,
            [
                "x-ratelimit-limit-requests: 10",
                "x-ratelimit-remaining-requests: 1",
                "x-ratelimit-reset-requests: 1s"
            ]
        );
        assert_eq!(weighed(1, 0, 0).retry_seconds(), 1);
    }
}
