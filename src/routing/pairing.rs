//! Which workers serve a request when serving is split: a prefill worker and a decode worker of one
//! hand-off group, a decode worker alone, or a unified one.
//!
//! The decode worker is chosen first, by room for KV and load, each per unit of weight, and by what it
//! has of the prompt already; then a prefill worker by the same rules as any backend, so that equal
//! prefixes and sessions meet.

use crate::choose::{Ask, ChoiceRules, NoBackend, Plan, Reason, able, choose, pool_of};
use crate::disagg::{Path, Situation, SplitRules, Step, path};
use crate::ids::Slot;
use crate::score::{Known, Reach, TOKENS_PER_REQUEST, reach};
use crate::strategy::{Candidate, Chance, Rotation};
use crate::view::{ClusterView, HandOffGroup, Live, Role};
use std::sync::Arc;

/// A backend that often fails counts as no less than this share of a sound one: it must be asked to be
/// seen well.
const SOUNDNESS_MIN: f64 = 0.1;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct PairAsk<'a> {
    /// The request; `role` and `group` are not looked at.
    pub ask: Ask<'a>,
    /// Tokens of its prompt, as well as is known.
    pub tokens: u64,
    /// Groups whose hand-offs fail at present: they are not paired, and what their storage holds does
    /// not count.
    pub suspended: &'a [HandOffGroup],
    /// Groups whose decode workers cannot compute a prompt, however short it is.
    pub pairs_only: &'a [HandOffGroup],
}

/// Who serves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pairing {
    /// How.
    pub path: Path,
    /// Who computes the prompt, when that is not the same.
    pub prefill: Option<Plan>,
    /// Who answers.
    pub worker: Plan,
    /// The step that nobody can serve, when a unified worker stands in for it.
    pub missing: Option<Step>,
    /// Whether somebody could, if hand-offs had not failed there.
    pub suspended: bool,
    /// Tokens of the prompt that the decode worker lacks; of all when there is none.
    pub uncached: u64,
}

/// Nobody can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unserved {
    /// Which step.
    pub step: Step,
    /// Why not.
    pub why: NoBackend,
}

/// Whether a model has prefill and decode workers at all, able to serve at present or not. One that has not
/// said yet what it serves may serve this one.
pub fn is_split(view: &ClusterView, model: &str) -> bool {
    let serves = |models: &[Arc<str>]| models.iter().any(|other| **other == *model);
    let has = |role| {
        let mut of_role = view.backends.iter().filter(|backend| backend.role == role);
        of_role.any(|backend| backend.models.as_deref().is_none_or(serves))
    };
    view.pools.contains_key(model) && has(Role::Prefill) && has(Role::Decode)
}

/// Chooses for a request that may be split, of a model for which [`is_split`] holds. Half-open probes
/// that it names are not taken yet, as with [`choose`].
///
/// # Errors
/// The step that nobody can serve.
pub fn pair(
    (rules, split): (&ChoiceRules, &SplitRules),
    view: &ClusterView,
    live: &impl Live,
    asked: &PairAsk<'_>,
    (rotation, chance): (&mut Rotation, &mut Chance),
) -> Result<Pairing, Unserved> {
    let as_role = |role, group| Ask {
        role: Some(role),
        group,
        ..asked.ask
    };
    let none = |step, why| Unserved { step, why };
    let pool = pool_of(view, asked.ask.model).map_err(|why| none(Step::Decode, why))?;
    let able_to = |role| able(view, live, pool, &as_role(role, None));
    let prefills = able_to(Role::Prefill);
    let group = |slot: Slot| view.backend(slot).group;
    let (suspended, groups): (Vec<_>, Vec<_>) = prefills
        .slots()
        .map(group)
        .partition(|group| asked.suspended.contains(group));
    let decoders = able_to(Role::Decode);
    let confirmed = [false, true].map(|storage| {
        let known = asked.ask.known.map(|known| known.confirmed(storage));
        known.unwrap_or_default()
    });
    let rate = |candidate: &Candidate| {
        let storage = !asked.suspended.contains(&group(candidate.slot));
        rate(
            (rules, view),
            asked,
            &confirmed[usize::from(storage)],
            candidate,
        )
    };
    let mut rated: Vec<Rated> = decoders.candidates.iter().map(rate).collect();
    // one that waits to be tried comes first, whatever it costs
    rated.extend(decoders.probe.map(|slot| {
        let load = live.load(slot);
        Rated {
            cost: f64::NEG_INFINITY,
            reason: Reason::Probe,
            ..rate(&Candidate { slot, load })
        }
    }));
    let best = cheapest(rated.iter(), chance);
    let fitting = rated.iter().filter(|of| groups.contains(&group(of.slot)));
    let paired = cheapest(fitting, chance);
    let lacks = |of: Rated| match asked.pairs_only.contains(&group(of.slot)) {
        true => u64::MAX,
        false => of.uncached,
    };
    let situation = Situation {
        can_be_split: true,
        uncached_at_decode: best.map(lacks),
        has_prefill: paired.is_some(),
        has_unified: able_to(Role::Unified).slots().next().is_some(),
    };
    let uncached = best.map_or(asked.tokens, |best| best.uncached);
    let chosen = path(split, &situation);
    match (chosen, best, paired) {
        (Ok(Path::FastDecode), Some(best), _) => Ok(Pairing {
            path: Path::FastDecode,
            prefill: None,
            worker: best.plan(),
            missing: None,
            suspended: false,
            uncached,
        }),
        (Ok(Path::PrefillThenDecode), _, Some(decode)) => {
            let ask = as_role(Role::Prefill, Some(group(decode.slot)));
            let prefill = choose(rules, view, live, &ask, rotation, chance);
            Ok(Pairing {
                path: Path::PrefillThenDecode,
                prefill: Some(prefill.map_err(|why| none(Step::Prefill, why))?),
                worker: decode.plan(),
                missing: None,
                suspended: false,
                uncached: decode.uncached,
            })
        }
        (Ok(path), ..) => {
            let ask = as_role(Role::Unified, None);
            let worker = choose(rules, view, live, &ask, rotation, chance);
            Ok(Pairing {
                path,
                prefill: None,
                worker: worker.map_err(|why| none(Step::Unified, why))?,
                missing: Some(if best.is_some() {
                    Step::Prefill
                } else {
                    Step::Decode
                }),
                suspended: !suspended.is_empty(),
                uncached,
            })
        }
        (Err(step), ..) => Err(none(step, NoBackend::NoneServing)),
    }
}

/// What a decode worker would have to bear for this request.
#[derive(Debug, Clone, Copy)]
struct Rated {
    slot: Slot,
    /// In tokens per unit of weight.
    cost: f64,
    /// Of the prompt.
    uncached: u64,
    reason: Reason,
}

impl Rated {
    fn plan(&self) -> Plan {
        Plan {
            slot: self.slot,
            reason: self.reason,
        }
    }
}

/// (KV held + running requests + what is missing of the prompt) / weight, where a running request counts as
/// [`TOKENS_PER_REQUEST`], and a block that is there counts as missing by as much as its tier's weight falls
/// short of 1. Failing workers cost more.
fn rate(
    (rules, view): (&ChoiceRules, &ClusterView),
    asked: &PairAsk<'_>,
    confirmed: &Known,
    candidate: &Candidate,
) -> Rated {
    let backend = view.backend(candidate.slot);
    let load = &candidate.load;
    let found: Reach = reach(confirmed, backend, load, &rules.weights);
    let is_known = found.of_blocks > 0;
    let missing = asked.tokens as f64 * (1.0 - found.overlap.weighted);
    let requests = f64::from(load.in_flight) * TOKENS_PER_REQUEST;
    let soundness = load.success.unwrap_or(1.0).max(SOUNDNESS_MIN);
    let bears = load.held_tokens as f64 + requests + missing;
    Rated {
        slot: candidate.slot,
        cost: bears / f64::from(backend.weight.max(1)) / soundness,
        uncached: if is_known {
            found.uncached
        } else {
            asked.tokens
        },
        reason: match found.overlap.blocks {
            0 => Reason::Strategy,
            blocks => Reason::KvIndex { blocks },
        },
    }
}

/// The one that costs least; equals by chance.
fn cheapest<'r>(rated: impl Iterator<Item = &'r Rated>, chance: &mut Chance) -> Option<Rated> {
    let mut best: Option<&Rated> = None;
    let mut equals = 0;
    for of in rated {
        match best.map(|best| of.cost.total_cmp(&best.cost)) {
            None | Some(std::cmp::Ordering::Less) => (best, equals) = (Some(of), 1),
            Some(std::cmp::Ordering::Equal) => {
                equals += 1;
                if chance.below(equals) == 0 {
                    best = Some(of);
                }
            }
            Some(std::cmp::Ordering::Greater) => {}
        }
    }
    best.copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::HealthState;
    use crate::ids::BackendId;
    use crate::knowledge::Mode;
    use crate::prefix_index::{HolderId, Run, Tier};
    use crate::score::{Basis, PromptOverlap, Weights};
    use crate::strategy::Strategy as Selection;
    use crate::view::{BackendView, Load, Memory, Passage};
    use proptest::prelude::*;
    use std::collections::HashMap;

    const STORAGE: HolderId = HolderId(100);
    const RULES: ChoiceRules = ChoiceRules {
        strategy: Selection::LeastConnections,
        prefix_routing: false,
        load_factor_epsilon: 0.2,
        weights: Weights {
            overlap: 0.6,
            load: 0.3,
            health: 0.1,
            min_overlap: 0.3,
            gpu: 1.0,
            cpu: 0.8,
            storage: 0.6,
        },
    };
    const SPLIT: SplitRules = SplitRules {
        min_prefill_tokens: 512,
        fallback_to_unified: true,
    };

    /// A backend by its name: p, d or u, and further letters.
    fn backend(at: usize, name: &str, group: u32) -> BackendView {
        let role = match name.as_bytes()[0] {
            b'p' => Role::Prefill,
            b'd' => Role::Decode,
            _ => Role::Unified,
        };
        BackendView {
            id: BackendId(at as u32),
            name: name.into(),
            role,
            weight: 1,
            models: Some(Arc::from([Arc::from("m")])),
            health: HealthState::Healthy,
            passage: Passage::Closed,
            draining: false,
            memories: Arc::from([Memory {
                rank: None,
                holder: HolderId(at as u32),
            }]),
            reads: if role == Role::Decode {
                Arc::from([STORAGE])
            } else {
                Arc::from([])
            },
            group: HandOffGroup(group),
        }
    }

    fn view(names: &[&str]) -> ClusterView {
        let backends = names
            .iter()
            .enumerate()
            .map(|(at, name)| backend(at, name, 0));
        ClusterView::new(backends.collect(), 10, &ClusterView::default())
    }

    #[derive(Default)]
    struct Loads(HashMap<usize, Load>);

    impl Live for Loads {
        fn load(&self, slot: Slot) -> Load {
            let mode = Mode::Exact;
            Load {
                mode,
                ..self.0.get(&slot.0).copied().unwrap_or_default()
            }
        }
        fn probe_free(&self, _: Slot) -> bool {
            true
        }
    }

    const ASK: PairAsk<'static> = PairAsk {
        ask: Ask {
            model: "m",
            known: None,
            prefix: None,
            session: None,
            role: None,
            group: None,
            tried: &[],
        },
        tokens: 1600,
        suspended: &[],
        pairs_only: &[],
    };

    fn pairs(view: &ClusterView, loads: &Loads, ask: &PairAsk<'_>) -> Result<Pairing, Unserved> {
        let chance = (&mut Rotation::default(), &mut Chance(7));
        pair((&RULES, &SPLIT), view, loads, ask, chance)
    }

    fn known(runs: &[(u32, Tier, u32)]) -> Known {
        let runs = runs.iter().map(|(holder, tier, to)| Run {
            holder: HolderId(*holder),
            tier: *tier,
            from: 0,
            to: *to,
        });
        Known(vec![PromptOverlap {
            basis: Basis::Tokens,
            runs: runs.collect(),
            blocks: 100,
            tokens: 1600,
            block_size: 16,
        }])
    }

    fn names(view: &ClusterView, pairing: &Pairing) -> (Option<String>, String) {
        let name = |plan: &Plan| view.backend(plan.slot).name.to_string();
        (pairing.prefill.as_ref().map(name), name(&pairing.worker))
    }

    #[test]
    fn only_confirmed_copies_spare_the_prefill() {
        let view = view(&["p", "d1", "d2", "u"]);
        for (runs, path, worker) in [
            (vec![(2, Tier::Gpu, 90)], Path::FastDecode, Some("d2")),
            (vec![(100, Tier::Storage, 90)], Path::FastDecode, None),
            (
                vec![(2, Tier::Speculative, 90)],
                Path::PrefillThenDecode,
                None,
            ),
            (
                vec![(100, Tier::Assumed, 90)],
                Path::PrefillThenDecode,
                None,
            ),
            (vec![(0, Tier::Gpu, 90)], Path::PrefillThenDecode, None),
            (
                vec![(100, Tier::Storage, 50)],
                Path::PrefillThenDecode,
                None,
            ),
        ] {
            let known = known(&runs);
            let ask = Ask {
                known: Some(&known),
                ..ASK.ask
            };
            let found = pairs(&view, &Loads::default(), &PairAsk { ask, ..ASK }).unwrap();
            assert_eq!(found.path, path, "{runs:?}");
            let (_, who) = names(&view, &found);
            assert!(worker.is_none_or(|worker| worker == who), "{runs:?}: {who}");
        }
    }

    #[test]
    fn what_the_storage_of_a_suspended_group_holds_does_not_count() {
        let view = view(&["p", "d", "u"]);
        let known = known(&[(100, Tier::Storage, 100)]);
        let ask = Ask {
            known: Some(&known),
            ..ASK.ask
        };
        let suspended = [HandOffGroup(0)];
        let found = pairs(
            &view,
            &Loads::default(),
            &PairAsk {
                ask,
                suspended: &suspended,
                ..ASK
            },
        );
        let found = found.unwrap();
        assert_eq!(
            (found.path, found.missing),
            (Path::Fallback, Some(Step::Prefill))
        );
        let own = self::known(&[(1, Tier::Gpu, 100)]);
        let ask = Ask {
            known: Some(&own),
            ..ASK.ask
        };
        let found = pairs(
            &view,
            &Loads::default(),
            &PairAsk {
                ask,
                suspended: &suspended,
                ..ASK
            },
        );
        assert_eq!(
            found.unwrap().path,
            Path::FastDecode,
            "its own memory is no matter of storage"
        );
    }

    #[test]
    fn a_decode_worker_is_chosen_by_room_and_load_for_its_weight_and_by_what_it_has() {
        let mut view = view(&["p", "d1", "d2"]);
        let load = |held, in_flight| Load {
            held_tokens: held,
            in_flight,
            ..Load::default()
        };
        let chosen = |view: &ClusterView, first, second, runs: &[(u32, Tier, u32)]| {
            let loads = Loads([(1, first), (2, second)].into());
            let known = known(runs);
            let ask = Ask {
                known: Some(&known),
                ..ASK.ask
            };
            let found = pairs(view, &loads, &PairAsk { ask, ..ASK }).unwrap();
            names(view, &found).1
        };
        assert_eq!(chosen(&view, load(9000, 1), load(5000, 1), &[]), "d2");
        assert_eq!(chosen(&view, load(5000, 2), load(5000, 1), &[]), "d2");
        let half = [(1, Tier::Gpu, 50)];
        assert_eq!(
            chosen(&view, load(5000, 1), load(5000, 1), &half),
            "d1",
            "half of it is there"
        );
        assert_eq!(
            chosen(&view, load(9000, 1), load(5000, 1), &half),
            "d2",
            "not at any price"
        );
        view.backends[1].weight = 2;
        assert_eq!(chosen(&view, load(9000, 1), load(5500, 1), &[]), "d1");
    }

    #[test]
    fn workers_of_different_groups_are_never_paired() {
        let mut view = view(&["p1", "p2", "d1", "d2", "u"]);
        view.backends[1].group = HandOffGroup(1);
        view.backends[3].group = HandOffGroup(1);
        view.backends[0].health = HealthState::Unhealthy;
        // d1 would be cheaper, and has nobody to get it from
        let loads = Loads(
            [(
                3,
                Load {
                    held_tokens: 50_000,
                    ..Load::default()
                },
            )]
            .into(),
        );
        let found = pairs(&view, &loads, &ASK).unwrap();
        assert_eq!(names(&view, &found), (Some("p2".into()), "d2".into()));
        view.backends[3].draining = true;
        let found = pairs(&view, &loads, &ASK).unwrap();
        assert_eq!(
            (found.path, found.missing),
            (Path::Fallback, Some(Step::Prefill))
        );
    }

    #[test]
    fn a_decode_worker_that_cannot_compute_is_always_paired() {
        let view = view(&["p", "d", "u"]);
        let short = PairAsk { tokens: 3, ..ASK };
        let found = pairs(&view, &Loads::default(), &short).unwrap();
        assert_eq!(found.path, Path::FastDecode);
        let groups = [HandOffGroup(0)];
        let found = pairs(
            &view,
            &Loads::default(),
            &PairAsk {
                pairs_only: &groups,
                ..short
            },
        );
        assert_eq!(found.unwrap().path, Path::PrefillThenDecode);
    }

    #[test]
    fn a_worker_that_has_not_said_what_it_serves_may_be_the_missing_half() {
        let mut backends: Vec<BackendView> = ["p", "d", "u"]
            .iter()
            .enumerate()
            .map(|(at, name)| backend(at, name, 0))
            .collect();
        backends[0].models = None;
        let view = ClusterView::new(backends.clone(), 10, &ClusterView::default());
        assert!(is_split(&view, "m"));
        backends[0].models = Some(Arc::from([Arc::from("other")]));
        let view = ClusterView::new(backends, 10, &ClusterView::default());
        assert!(!is_split(&view, "m") && !is_split(&view, "other") && !is_split(&view, "unknown"));
    }

    #[test]
    fn a_decode_worker_that_waits_to_be_tried_is_tried() {
        let mut view = view(&["p", "d1", "d2"]);
        view.backends[1].passage = Passage::HalfOpen;
        let found = pairs(&view, &Loads::default(), &ASK).unwrap();
        assert_eq!(
            (names(&view, &found).1.as_str(), found.worker.reason),
            ("d1", Reason::Probe)
        );
        let tried = [BackendId(0)];
        let again = PairAsk {
            ask: Ask {
                tried: &tried,
                ..ASK.ask
            },
            ..ASK
        };
        let nobody = pairs(&view, &Loads::default(), &again).unwrap_err();
        assert_eq!(nobody.step, Step::Prefill, "and not by a second attempt");
    }

    proptest! {
        #[test]
        fn whoever_is_chosen_can_serve_in_its_role_and_the_pair_fits(
            members in proptest::collection::vec((0usize..3, any::<bool>(), 0u32..2, 0u64..5000), 1..9),
            tokens in 0u64..5000,
            suspended in any::<bool>(),
        ) {
            let backends: Vec<BackendView> = members.iter().enumerate().map(|(at, (role, healthy, group, _))| BackendView {
                health: if *healthy { HealthState::Healthy } else { HealthState::Unhealthy },
                ..backend(at, ["p", "d", "u"][*role], *group)
            }).collect();
            let view = ClusterView::new(backends, 10, &ClusterView::default());
            let loads = Loads(members.iter().enumerate().map(|(at, of)| (at, Load { held_tokens: of.3, ..Load::default() })).collect());
            let groups = [HandOffGroup(0)];
            let ask = PairAsk { tokens, suspended: if suspended { &groups } else { &[] }, ..ASK };
            let Ok(found) = pairs(&view, &loads, &ask) else {
                let unified = view.backends.iter().any(|b| b.role == Role::Unified && b.can_serve());
                prop_assert!(!unified, "a unified worker could have served");
                return Ok(());
            };
            let worker = view.backend(found.worker.slot);
            prop_assert!(worker.can_serve());
            match (found.path, found.prefill) {
                (Path::PrefillThenDecode, Some(prefill)) => {
                    let prefill = view.backend(prefill.slot);
                    prop_assert!(prefill.can_serve() && prefill.role == Role::Prefill);
                    prop_assert_eq!(worker.role, Role::Decode);
                    prop_assert_eq!(prefill.group, worker.group);
                    prop_assert!(!ask.suspended.contains(&worker.group));
                    prop_assert!(tokens >= SPLIT.min_prefill_tokens);
                }
                (Path::FastDecode, None) => {
                    prop_assert_eq!(worker.role, Role::Decode);
                    prop_assert!(tokens < SPLIT.min_prefill_tokens);
                }
                (Path::Fallback, None) => prop_assert_eq!(worker.role, Role::Unified),
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
