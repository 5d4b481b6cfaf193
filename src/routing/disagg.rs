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
    /// All of them.
    pub const ALL: [Step; 3] = [Step::Prefill, Step::Decode, Step::Unified];

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
    /// Tokens of the prompt that the chosen decode worker would have to compute, counting only copies
    /// that an event or a completed prefill has confirmed; none when no decode worker can serve.
    pub uncached_at_decode: Option<u64>,
    /// Whether some prefill worker can serve.
    pub has_prefill: bool,
    /// Whether some unified worker can serve.
    pub has_unified: bool,
}

/// The path of a request that may be split.
///
/// # Errors
/// The step that nobody can serve.
pub fn path(rules: &SplitRules, situation: &Situation) -> Result<Path, Step> {
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
    /// Workers are being chosen.
    Choosing,
    Prefilling,
    Decoding,
    Unified,
    Over,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Workers were chosen for this path: its first leg is being sent.
    Begun(Path),
    /// Prefill has answered well, with what the connector needs, or nothing where it needs nothing; or it is not
    /// waited for.
    PrefillDone,
    /// A byte of the answer has come, and goes to the client.
    FirstByte,
    /// A step failed before that; `again` says whether other workers might do better.
    Failed {
        /// Which one.
        step: Step,
        /// See the event.
        again: bool,
    },
    /// An engine says that the request itself is wrong, as every other would.
    Refused,
    /// Nothing may take longer.
    OutOfTime,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Send the prefill leg.
    Prefill,
    /// Send the decode leg, or what one worker serves whole.
    Answer,
    /// Begin again with other workers: a hand-off is never used twice, so both legs are sent anew, with a
    /// transfer id of their own.
    Restart,
    /// Let a unified worker serve all of it.
    FallBack,
    /// Pass the answer on.
    Stream,
    /// Tell the client which step failed.
    GiveUp(Step),
}

/// One split request on its way.
#[derive(Debug, Clone)]
pub struct HandOff {
    fallback: bool,
    stage: Stage,
    /// Legs that were sent, by step.
    sent: [u32; 3],
}

impl HandOff {
    /// Nothing has been sent. `fallback`: unified workers stand in for failed steps.
    pub fn new(fallback: bool) -> Self {
        HandOff {
            fallback,
            stage: Stage::Choosing,
            sent: [0; 3],
        }
    }

    /// The step that is under way.
    fn step(&self) -> Step {
        match self.stage {
            Stage::Choosing | Stage::Prefilling => Step::Prefill,
            Stage::Decoding | Stage::Over => Step::Decode,
            Stage::Unified => Step::Unified,
        }
    }

    /// Takes in what happened; none when it changes nothing, as it came too late.
    pub fn on(&mut self, event: Event) -> Option<Next> {
        use Event::*;
        Some(match (self.stage, event) {
            (Stage::Over, _) => return None,
            (Stage::Choosing, Begun(Path::PrefillThenDecode)) => {
                self.send(Step::Prefill);
                Next::Prefill
            }
            (Stage::Choosing, Begun(Path::FastDecode)) => {
                self.send(Step::Decode);
                Next::Answer
            }
            (Stage::Choosing, Begun(Path::Unified | Path::Fallback)) => {
                self.send(Step::Unified);
                Next::Answer
            }
            (Stage::Prefilling, PrefillDone) => {
                self.send(Step::Decode);
                Next::Answer
            }
            (Stage::Decoding | Stage::Unified, FirstByte) => {
                self.stage = Stage::Over;
                Next::Stream
            }
            // with both legs under way at once, prefill may fail while decode is waited for
            (
                Stage::Prefilling | Stage::Decoding,
                Failed {
                    step: step @ (Step::Prefill | Step::Decode),
                    again,
                },
            )
            | (
                Stage::Unified,
                Failed {
                    step: step @ Step::Unified,
                    again,
                },
            ) => self.failed(step, again),
            (Stage::Choosing, Failed { step, .. }) => self.failed(step, false),
            (_, Refused | OutOfTime) => {
                let step = self.step();
                self.stage = Stage::Over;
                Next::GiveUp(step)
            }
            _ => return None,
        })
    }

    fn send(&mut self, step: Step) {
        self.sent[step as usize] += 1;
        self.stage = match step {
            Step::Prefill => Stage::Prefilling,
            Step::Decode => Stage::Decoding,
            Step::Unified => Stage::Unified,
        };
    }

    fn failed(&mut self, step: Step, again: bool) -> Next {
        if again && self.sent[step as usize] < TRIES_PER_STEP {
            self.stage = Stage::Choosing;
            return Next::Restart;
        }
        if step != Step::Unified && self.fallback {
            self.stage = Stage::Choosing;
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
        assert_eq!(path(&RULES, &ALL), Ok(Path::PrefillThenDecode));
        assert_eq!(path(&RULES, &little), Ok(Path::FastDecode));
        assert_eq!(path(&RULES, &just), Ok(Path::PrefillThenDecode));
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

    const SPLIT: Event = Event::Begun(Path::PrefillThenDecode);

    fn failed(step: Step, again: bool) -> Event {
        Event::Failed { step, again }
    }

    #[test]
    fn a_failed_leg_is_tried_elsewhere_once_as_a_whole_and_then_unified() {
        let mut hand_off = HandOff::new(true);
        assert_eq!(hand_off.on(SPLIT), Some(Next::Prefill));
        assert_eq!(
            hand_off.on(failed(Step::Prefill, true)),
            Some(Next::Restart)
        );
        assert_eq!(hand_off.on(SPLIT), Some(Next::Prefill));
        assert_eq!(hand_off.on(Event::PrefillDone), Some(Next::Answer));
        assert_eq!(hand_off.on(failed(Step::Decode, true)), Some(Next::Restart));
        assert_eq!(hand_off.on(SPLIT), Some(Next::Prefill));
        assert_eq!(hand_off.on(Event::PrefillDone), Some(Next::Answer));
        assert_eq!(
            hand_off.on(failed(Step::Decode, true)),
            Some(Next::FallBack)
        );
        let unified = Event::Begun(Path::Fallback);
        assert_eq!(hand_off.on(unified), Some(Next::Answer));
        assert_eq!(hand_off.on(Event::FirstByte), Some(Next::Stream));
        assert_eq!(
            hand_off.on(failed(Step::Unified, true)),
            None,
            "the body looks after that"
        );
        assert_eq!(hand_off.sent.iter().sum::<u32>(), 6);
    }

    #[test]
    fn without_a_fallback_the_step_that_failed_is_named() {
        let mut hand_off = HandOff::new(false);
        hand_off.on(SPLIT);
        let gone = hand_off.on(failed(Step::Prefill, false));
        assert_eq!(gone, Some(Next::GiveUp(Step::Prefill)));
        let mut hand_off = HandOff::new(false);
        hand_off.on(Event::Begun(Path::FastDecode));
        let gone = hand_off.on(failed(Step::Decode, false));
        assert_eq!(gone, Some(Next::GiveUp(Step::Decode)));
    }

    #[test]
    fn what_an_engine_refuses_is_refused_and_time_ends_everything() {
        for event in [Event::Refused, Event::OutOfTime] {
            let mut hand_off = HandOff::new(true);
            hand_off.on(SPLIT);
            assert_eq!(hand_off.on(event), Some(Next::GiveUp(Step::Prefill)));
            assert_eq!(hand_off.on(Event::PrefillDone), None);
        }
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let step = || prop_oneof![Just(Step::Prefill), Just(Step::Decode), Just(Step::Unified)];
        let path = prop_oneof![
            Just(Path::FastDecode),
            Just(Path::PrefillThenDecode),
            Just(Path::Unified),
            Just(Path::Fallback)
        ];
        let event = prop_oneof![
            path.prop_map(Event::Begun),
            Just(Event::PrefillDone),
            Just(Event::FirstByte),
            (step(), any::<bool>()).prop_map(|(step, again)| Event::Failed { step, again }),
            Just(Event::Refused),
            Just(Event::OutOfTime),
        ];
        proptest::collection::vec(event, 0..60)
    }

    proptest! {
        #[test]
        fn whatever_happens_few_legs_are_sent_and_it_ends_once(
            events in events(),
            fallback in any::<bool>(),
        ) {
            let mut hand_off = HandOff::new(fallback);
            let mut ended = false;
            for event in events {
                let next = hand_off.on(event);
                prop_assert!(!(ended && next.is_some()), "something follows the end");
                match next {
                    Some(Next::Stream | Next::GiveUp(_)) => ended = true,
                    Some(Next::FallBack) => prop_assert!(fallback),
                    _ => {}
                }
                prop_assert!(hand_off.sent.iter().all(|sent| *sent <= 2 * TRIES_PER_STEP), "{hand_off:?}");
            }
        }
    }
}
