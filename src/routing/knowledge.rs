//! How far what is believed of a backend's KV cache goes: told by its own events, guessed from
//! what was sent there, or nothing; and when a belief is given up because engines say otherwise.

/// Where the knowledge of a backend's cache comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Mode {
    /// From its own events, by tokens.
    #[default]
    Exact,
    /// From what was sent there, by text.
    Approximate,
    /// From nowhere: it is chosen by load and health alone.
    Blind,
}

impl Mode {
    /// All of them, from the best on.
    pub const ALL: [Mode; 3] = [Mode::Exact, Mode::Approximate, Mode::Blind];

    /// The word used in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Exact => "exact",
            Mode::Approximate => "approximate",
            Mode::Blind => "blind",
        }
    }
}

/// Why a backend has its mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// Its events come, and what they say was not found wrong.
    EventsCome,
    /// It has no event source.
    NoEventSource,
    /// Its event stream is not open.
    StreamClosed,
    /// Its stream has not announced a block yet, so that its block size is not known.
    NoEventYet,
    /// Prompts of its model are not tokenised: `tokenizers` says none.
    NoTokenizer,
    /// A probe prompt has other tokens there than here.
    TokensDiffer,
    /// A probe prompt was computed there, and its blocks were not announced as expected.
    BlocksDiffer,
    /// What was predicted was wrong too often.
    Mispredicted,
    /// `approximate: false`.
    SwitchedOff,
}

impl Why {
    /// For logs and for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Why::EventsCome => "events come",
            Why::NoEventSource => "no event source is configured",
            Why::StreamClosed => "the event stream is not open",
            Why::NoEventYet => "the event stream has announced no block yet",
            Why::NoTokenizer => "prompts of this model are not tokenised",
            Why::TokensDiffer => "a probe prompt has other tokens there than here",
            Why::BlocksDiffer => "the blocks of a probe prompt were not announced as expected",
            Why::Mispredicted => "predictions were wrong too often",
            Why::SwitchedOff => "kv_cache_index.approximate is off",
        }
    }
}

/// What came of comparing a probe prompt with what the engine says of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Parity {
    /// It was not compared yet, or could not be.
    #[default]
    Unknown,
    /// Tokens and blocks are as expected.
    Holds,
    /// The engine's tokens are others.
    TokensDiffer,
    /// The engine's events do not have its blocks.
    BlocksDiffer,
}

impl Parity {
    /// The word used in answers and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Parity::Unknown => "unknown",
            Parity::Holds => "holds",
            Parity::TokensDiffer => "tokens_differ",
            Parity::BlocksDiffer => "blocks_differ",
        }
    }
}

/// How a backend's events are doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Events {
    /// There is no source.
    #[default]
    None,
    /// The stream is not open.
    Closed,
    /// It is open and has announced no block.
    Silent,
    /// They come.
    Live,
}

/// All that a mode depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Facts {
    /// Its events.
    pub events: Events,
    /// Whether prompts of its model can be tokenised.
    pub tokens: bool,
    /// The comparison at the start.
    pub parity: Parity,
    /// Whether guesses are allowed at all.
    pub approximate: bool,
    /// Whether predictions from events, and from text, were wrong too often.
    pub distrusted: [bool; 2],
}

/// The mode of a backend, and why.
pub fn mode(facts: &Facts) -> (Mode, Why) {
    let against = match (facts.events, facts.parity) {
        (Events::None, _) => Why::NoEventSource,
        _ if !facts.tokens => Why::NoTokenizer,
        (Events::Closed, _) => Why::StreamClosed,
        (_, Parity::TokensDiffer) => Why::TokensDiffer,
        (_, Parity::BlocksDiffer) => Why::BlocksDiffer,
        (Events::Silent, _) => Why::NoEventYet,
        _ if facts.distrusted[0] => Why::Mispredicted,
        _ => return (Mode::Exact, Why::EventsCome),
    };
    if !facts.approximate {
        (Mode::Blind, Why::SwitchedOff)
    } else if facts.distrusted[1] {
        (Mode::Blind, Why::Mispredicted)
    } else {
        (Mode::Approximate, against)
    }
}

/// Predictions that are judged together.
pub const SAMPLES_JUDGED: u32 = 50;
/// The mean error, in thousandths of the prompt, beyond which a kind of prediction is given up.
pub const ERROR_PERMILLE_MAX: u64 = 300;

/// The error of one prediction in thousandths of the prompt, at most 1000.
pub fn error_permille(predicted: u64, actual: u64, prompt: u64) -> u64 {
    (predicted.abs_diff(actual).saturating_mul(1000) / prompt.max(1)).min(1000)
}

/// Whether a prompt found about what was predicted: at least three quarters of it. Less says that the engine has thrown out
/// what it was believed to hold.
pub fn is_found(predicted: u64, actual: u64) -> bool {
    actual.saturating_mul(4) >= predicted.saturating_mul(3)
}

/// Whether so many predictions with so much error in all are wrong too often; none while there
/// are too few of them to say.
pub fn is_wrong(samples: u32, error_permille_sum: u64) -> Option<bool> {
    let mean = error_permille_sum / u64::from(samples.max(1));
    (samples >= SAMPLES_JUDGED).then_some(mean > ERROR_PERMILLE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Facts = Facts {
        events: Events::Live,
        tokens: true,
        parity: Parity::Unknown,
        approximate: true,
        distrusted: [false, false],
    };

    #[test]
    fn events_and_tokens_make_it_exact_and_each_thing_missing_is_named() {
        assert_eq!(mode(&GOOD), (Mode::Exact, Why::EventsCome));
        for (facts, why) in [
            (
                Facts {
                    events: Events::None,
                    ..GOOD
                },
                Why::NoEventSource,
            ),
            (
                Facts {
                    events: Events::Closed,
                    ..GOOD
                },
                Why::StreamClosed,
            ),
            (
                Facts {
                    events: Events::Silent,
                    ..GOOD
                },
                Why::NoEventYet,
            ),
            (
                Facts {
                    tokens: false,
                    ..GOOD
                },
                Why::NoTokenizer,
            ),
            (
                Facts {
                    parity: Parity::TokensDiffer,
                    ..GOOD
                },
                Why::TokensDiffer,
            ),
            (
                Facts {
                    parity: Parity::BlocksDiffer,
                    events: Events::Silent,
                    ..GOOD
                },
                Why::BlocksDiffer,
            ),
            (
                Facts {
                    distrusted: [true, false],
                    ..GOOD
                },
                Why::Mispredicted,
            ),
        ] {
            assert_eq!(mode(&facts), (Mode::Approximate, why), "{facts:?}");
        }
    }

    #[test]
    fn guesses_that_are_wrong_or_not_allowed_leave_nothing() {
        let none = Facts {
            events: Events::None,
            ..GOOD
        };
        let wrong = Facts {
            distrusted: [false, true],
            ..none
        };
        assert_eq!(mode(&wrong), (Mode::Blind, Why::Mispredicted));
        let off = Facts {
            approximate: false,
            ..none
        };
        assert_eq!(mode(&off), (Mode::Blind, Why::SwitchedOff));
        let exact = Facts {
            distrusted: [false, true],
            ..GOOD
        };
        assert_eq!(
            mode(&exact).0,
            Mode::Exact,
            "wrong guesses do not speak against events"
        );
    }

    #[test]
    fn a_mean_error_above_three_tenths_of_the_prompt_is_too_much_once_there_are_samples() {
        assert_eq!(error_permille(100, 0, 400), 250);
        assert_eq!(error_permille(0, 900, 300), 1000);
        assert_eq!(error_permille(0, 0, 0), 0);
        assert_eq!(is_wrong(49, 49_000), None);
        assert_eq!(is_wrong(50, 50 * 301), Some(true));
        assert_eq!(is_wrong(50, 50 * 300), Some(false));
    }

    #[test]
    fn three_quarters_of_what_was_predicted_are_found_and_less_is_not() {
        assert!(is_found(400, 300) && is_found(400, 900) && is_found(0, 0));
        assert!(!is_found(400, 299));
    }
}
