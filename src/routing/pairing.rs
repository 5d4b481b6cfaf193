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
#[path = "pairing_test.rs"]
mod tests;
