//! Split serving, as far as it is decided and not done: which path a request takes, and what follows
//! when a leg of it fails. Pure: whoever sends the legs says what happened and is told what to do.

/// How a request is served; a label, and `x-tidegate-path`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// The decode worker has, or can load, nearly all of the prompt.
    FastDecode,
    /// One worker computes the prompt, another generates.
    PrefillThenDecode,
    /// One worker does both, since the request cannot be split.
    Unified,
    /// One worker does both, since a leg could not be served.
    Fallback,
}

impl Path {
    /// The word used in metrics and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Path::FastDecode => "fast_decode",
            Path::PrefillThenDecode => "prefill_then_decode",
            Path::Unified => "unified",
            Path::Fallback => "fallback",
        }
    }
}

/// A step of a split request: what an error names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// Computing the prompt.
    Prefill,
    /// Generating, which begins with getting the prompt's KV.
    Decode,
    /// Both at once.
    Unified,
}

impl Step {
    /// The word used in errors and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Step::Prefill => "prefill",
            Step::Decode => "decode",
            Step::Unified => "unified",
        }
    }
}

/// The settings that a path depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitRules {
    /// Fewer uncached tokens than this are computed where the answer is generated.
    pub min_prefill_tokens: u64,
    /// Whether unified workers stand in.
    pub fallback_to_unified: bool,
}

/// What is known when the path is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Situation {
    /// Whether the request may be split at all: one prompt, one choice, a path that generates.
    pub can_be_split: bool,
    /// Tokens of the prompt that the chosen decode worker would have to compute, counting only copies
    /// that an event or a completed prefill has confirmed; none when no decode worker can serve.
    pub uncached_at_decode: Option<u64>,
    /// Whether some prefill worker can serve.
    pub has_prefill: bool,
    /// Whether some unified worker can serve.
    pub has_unified: bool,
}

/// The path of a request.
///
/// # Errors
/// The step that nobody can serve.
pub fn path(rules: &SplitRules, situation: &Situation) -> Result<Path, Step> {
    if !situation.can_be_split {
        return if situation.has_unified {
            Ok(Path::Unified)
        } else {
            Err(Step::Unified)
        };
    }
    let missing = match (situation.uncached_at_decode, situation.has_prefill) {
        (Some(uncached), _) if uncached < rules.min_prefill_tokens => return Ok(Path::FastDecode),
        (Some(_), true) => return Ok(Path::PrefillThenDecode),
        (Some(_), false) => Step::Prefill,
        (None, _) => Step::Decode,
    };
    if rules.fallback_to_unified && situation.has_unified {
        Ok(Path::Fallback)
    } else {
        Err(missing)
    }
}

/// Workers that are tried for each step of one request, the first included.
pub const TRIES_PER_STEP: u32 = 2;

/// Where a split request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Prefilling,
    Decoding,
    FellBack,
    Over,
}

/// What happened to a leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Prefill has answered well, with what the connector needs, or nothing where it needs nothing.
    PrefillDone,
    /// Prefill failed; `again` says whether another worker might do better.
    PrefillFailed {
        /// See the event.
        again: bool,
    },
    /// Prefill did not answer within `prefill_timeout`.
    PrefillTimedOut,
    /// A byte of the answer has come, and goes to the client.
    FirstByte,
    /// Decode failed before that; `again` as above.
    DecodeFailed {
        /// See the event.
        again: bool,
    },
    /// No byte came within `kv_transfer_timeout`.
    TransferTimedOut,
    /// The unified worker failed before the first byte.
    UnifiedFailed,
    /// The client has left.
    ClientLeft,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Send the decode leg.
    Decode,
    /// Begin again with other workers: a hand-off is never used twice, so both legs are sent anew, with a
    /// transfer id of their own.
    Restart {
        /// Whose worker failed, and is not asked again.
        avoid: Step,
    },
    /// Let a unified worker serve all of it.
    FallBack,
    /// Pass the answer on.
    Stream,
    /// Tell the client which step failed.
    GiveUp(Step),
    /// Stop all legs. `release`: prefill has something pinned for a decode leg that never began, which must
    /// still be sent, and then cancelled, where the connector has no other way to free it.
    Abort {
        /// See the variant.
        release: bool,
    },
}

/// One split request on its way.
#[derive(Debug, Clone)]
pub struct HandOff {
    rules: SplitRules,
    has_unified: bool,
    stage: Stage,
    prefills: u32,
    decodes: u32,
    /// Whether prefill holds something for decode.
    pinned: bool,
}

impl HandOff {
    /// The prefill leg is being sent.
    pub fn begin(rules: SplitRules, has_unified: bool) -> Self {
        HandOff {
            rules,
            has_unified,
            stage: Stage::Prefilling,
            prefills: 1,
            decodes: 0,
            pinned: false,
        }
    }

    /// Legs that were sent so far.
    pub fn legs(&self) -> u32 {
        self.prefills + self.decodes + u32::from(self.stage == Stage::FellBack)
    }

    /// Takes in what happened; none when it changes nothing, as it came too late.
    pub fn on(&mut self, event: Event) -> Option<Next> {
        use Event::*;
        let next = match (self.stage, event) {
            (Stage::Over, _) => return None,
            (_, ClientLeft) => {
                let release = self.stage == Stage::Decoding && self.pinned;
                self.stage = Stage::Over;
                Next::Abort { release }
            }
            (Stage::Prefilling, PrefillDone) => {
                self.stage = Stage::Decoding;
                self.decodes += 1;
                self.pinned = true;
                Next::Decode
            }
            (Stage::Prefilling, PrefillFailed { again }) => self.failed(Step::Prefill, again),
            // the work may be under way, and would be done twice
            (Stage::Prefilling, PrefillTimedOut) => self.failed(Step::Prefill, false),
            (Stage::Decoding | Stage::FellBack, FirstByte) => {
                self.stage = Stage::Over;
                self.pinned = false;
                Next::Stream
            }
            (Stage::Decoding, DecodeFailed { again }) => self.failed(Step::Decode, again),
            (Stage::Decoding, TransferTimedOut) => self.failed(Step::Decode, true),
            (Stage::FellBack, UnifiedFailed) => {
                self.stage = Stage::Over;
                Next::GiveUp(Step::Unified)
            }
            _ => return None,
        };
        Some(next)
    }

    fn failed(&mut self, step: Step, again: bool) -> Next {
        self.pinned = false;
        let tries = match step {
            Step::Prefill => self.prefills,
            Step::Decode | Step::Unified => self.decodes,
        };
        // a request that an engine refuses is refused by all
        if again && tries < TRIES_PER_STEP {
            self.stage = Stage::Prefilling;
            self.prefills += 1;
            return Next::Restart { avoid: step };
        }
        if self.rules.fallback_to_unified && self.has_unified {
            self.stage = Stage::FellBack;
            return Next::FallBack;
        }
        self.stage = Stage::Over;
        Next::GiveUp(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RULES: SplitRules = SplitRules {
        min_prefill_tokens: 256,
        fallback_to_unified: true,
    };
    const STRICT: SplitRules = SplitRules {
        fallback_to_unified: false,
        ..RULES
    };
    const ALL: Situation = Situation {
        can_be_split: true,
        uncached_at_decode: Some(5000),
        has_prefill: true,
        has_unified: true,
    };

    #[test]
    fn the_path_follows_from_what_is_cached_and_who_is_there() {
        let little = Situation {
            uncached_at_decode: Some(255),
            ..ALL
        };
        let just = Situation {
            uncached_at_decode: Some(256),
            ..ALL
        };
        let whole = Situation {
            can_be_split: false,
            ..ALL
        };
        assert_eq!(path(&RULES, &ALL), Ok(Path::PrefillThenDecode));
        assert_eq!(path(&RULES, &little), Ok(Path::FastDecode));
        assert_eq!(path(&RULES, &just), Ok(Path::PrefillThenDecode));
        assert_eq!(path(&STRICT, &whole), Ok(Path::Unified));
        let no_decode = Situation {
            uncached_at_decode: None,
            ..ALL
        };
        let no_prefill = Situation {
            has_prefill: false,
            ..ALL
        };
        for (situation, step) in [(no_decode, Step::Decode), (no_prefill, Step::Prefill)] {
            assert_eq!(path(&RULES, &situation), Ok(Path::Fallback));
            assert_eq!(path(&STRICT, &situation), Err(step), "never in silence");
            let nobody = Situation {
                has_unified: false,
                ..situation
            };
            assert_eq!(path(&RULES, &nobody), Err(step));
        }
        // what is cached needs no prefill worker
        let cached = Situation {
            has_prefill: false,
            ..little
        };
        assert_eq!(path(&STRICT, &cached), Ok(Path::FastDecode));
    }

    #[test]
    fn a_failed_leg_is_tried_elsewhere_once_and_then_unified() {
        let mut hand_off = HandOff::begin(RULES, true);
        let again = Event::PrefillFailed { again: true };
        let avoid = Step::Prefill;
        assert_eq!(hand_off.on(again), Some(Next::Restart { avoid }));
        assert_eq!(hand_off.on(Event::PrefillDone), Some(Next::Decode));
        let failed = Event::DecodeFailed { again: true };
        let avoid = Step::Decode;
        assert_eq!(
            hand_off.on(failed),
            Some(Next::Restart { avoid }),
            "as a whole"
        );
        assert_eq!(hand_off.on(Event::PrefillDone), Some(Next::Decode));
        assert_eq!(hand_off.on(Event::TransferTimedOut), Some(Next::FallBack));
        assert_eq!(hand_off.on(Event::FirstByte), Some(Next::Stream));
        assert_eq!(
            hand_off.on(Event::ClientLeft),
            None,
            "the body looks after that"
        );
    }

    #[test]
    fn without_a_fallback_the_step_that_failed_is_named() {
        let mut hand_off = HandOff::begin(STRICT, true);
        let step = Step::Prefill;
        assert_eq!(
            hand_off.on(Event::PrefillTimedOut),
            Some(Next::GiveUp(step))
        );
        let mut hand_off = HandOff::begin(STRICT, true);
        hand_off.on(Event::PrefillDone);
        let refused = Event::DecodeFailed { again: false };
        assert_eq!(hand_off.on(refused), Some(Next::GiveUp(Step::Decode)));
    }

    #[test]
    fn a_client_that_leaves_between_the_legs_leaves_nothing_pinned() {
        let mut early = HandOff::begin(RULES, true);
        assert_eq!(
            early.on(Event::ClientLeft),
            Some(Next::Abort { release: false })
        );
        let mut between = HandOff::begin(RULES, true);
        between.on(Event::PrefillDone);
        assert_eq!(
            between.on(Event::ClientLeft),
            Some(Next::Abort { release: true })
        );
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let event = prop_oneof![
            Just(Event::PrefillDone),
            any::<bool>().prop_map(|again| Event::PrefillFailed { again }),
            Just(Event::PrefillTimedOut),
            Just(Event::FirstByte),
            any::<bool>().prop_map(|again| Event::DecodeFailed { again }),
            Just(Event::TransferTimedOut),
            Just(Event::UnifiedFailed),
            Just(Event::ClientLeft),
        ];
        proptest::collection::vec(event, 0..40)
    }

    proptest! {
        #[test]
        fn whatever_happens_few_legs_are_sent_and_it_ends_once(
            events in events(),
            fallback in any::<bool>(),
            has_unified in any::<bool>(),
        ) {
            let rules = SplitRules { fallback_to_unified: fallback, ..RULES };
            let mut hand_off = HandOff::begin(rules, has_unified);
            let mut ended = false;
            for event in events {
                let next = hand_off.on(event);
                prop_assert!(!(ended && next.is_some()), "something follows the end");
                match next {
                    Some(Next::Stream | Next::GiveUp(_) | Next::Abort { .. }) => ended = true,
                    Some(Next::FallBack) => prop_assert!(fallback && has_unified),
                    _ => {}
                }
                // two prefill workers fail, or one does and then two decode workers: and a unified one
                prop_assert!(hand_off.legs() <= 2 * TRIES_PER_STEP + 2, "{hand_off:?}");
            }
        }
    }
}
