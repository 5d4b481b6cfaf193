//! Who serves a request, among eight backends of one model; and whether it may run.

use super::Run;
use routing::choose::{Ask, ChoiceRules, choose};
use routing::health::HealthState;
use routing::ids::{BackendId, PrefixKey, Slot};
use routing::knowledge::Mode;
use routing::prefix_index::{HolderId, Run as Held, Tier};
use routing::quota::{Admission, Need, Scope};
use routing::score::{Basis, Known, PromptOverlap, Weights};
use routing::strategy::{Chance, Rotation, Strategy};
use routing::view::{BackendView, ClusterView, HandOffGroup, Live, Load, Memory, Passage, Role};
use std::sync::Arc;

const BACKENDS: u32 = 8;
const BLOCKS: u32 = 128;
const RULES: ChoiceRules = ChoiceRules {
    strategy: Strategy::LeastConnections,
    prefix_routing: true,
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

struct Busy;

impl Live for Busy {
    fn load(&self, slot: Slot) -> Load {
        Load {
            in_flight: 1 + slot.0 as u32 % 3,
            queued_tokens: 500 * (slot.0 as u64 % 4),
            success: Some(1.0),
            mode: Mode::Exact,
            block_size: Some(16),
            ..Load::default()
        }
    }

    fn probe_free(&self, _: Slot) -> bool {
        true
    }
}

fn view() -> ClusterView {
    let backends = (0..BACKENDS).map(|n| BackendView {
        id: BackendId(n),
        name: format!("backend-{n}").into(),
        role: Role::Unified,
        weight: 1,
        models: Some(Arc::from([Arc::from("m")])),
        health: HealthState::Healthy,
        passage: Passage::Closed,
        draining: false,
        memories: Arc::from([Memory {
            rank: None,
            holder: HolderId(n),
        }]),
        reads: Arc::from([]),
        group: HandOffGroup::default(),
    });
    ClusterView::new(backends.collect(), 200, &ClusterView::default())
}

fn chosen(known: Option<Known>, prefix: bool) -> Run {
    let view = view();
    let (mut rotation, mut chance) = (Rotation::default(), Chance(7));
    let mut key = 0;
    Box::new(move || {
        key += 1;
        let ask = Ask {
            model: "m",
            known: known.as_ref(),
            prefix: prefix.then_some(PrefixKey(key * 0x9E37_79B9_7F4A_7C15)),
            session: None,
            role: None,
            group: None,
            tried: &[],
        };
        let plan = choose(&RULES, &view, &Busy, &ask, &mut rotation, &mut chance);
        plan.expect("all can serve").slot.0
    })
}

pub fn by_strategy() -> Run {
    chosen(None, false)
}

pub fn by_prefix() -> Run {
    chosen(None, true)
}

pub fn by_overlap() -> Run {
    let runs = (0..BACKENDS).map(|n| Held {
        holder: HolderId(n),
        tier: Tier::Gpu,
        from: 0,
        to: BLOCKS * (n + 1) / BACKENDS,
    });
    let prompt = PromptOverlap {
        basis: Basis::Tokens,
        runs: runs.collect(),
        blocks: BLOCKS,
        tokens: BLOCKS * 16,
        block_size: 16,
    };
    chosen(Some(Known(vec![prompt])), true)
}

pub fn admit() -> Run {
    let need = |scope, name: &str| Need {
        scope,
        name: name.into(),
        limit: 10,
    };
    let needs = vec![
        need(Scope::Gateway, ""),
        need(Scope::Key, "key"),
        need(Scope::Tenant, "tenant"),
    ];
    let tenant: Arc<str> = "tenant".into();
    let mut admission = Admission::default();
    Box::new(move || {
        admission.enter(&tenant, &needs).expect("there is room");
        admission.leave(&tenant, &needs).len()
    })
}
