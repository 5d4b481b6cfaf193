//! Whole runs, small.

use super::*;
use crate::mixes::Mix;
use crate::policies::{self, Policy, Sight};
use engine_sim::speed::figures_for;
use routing::ids::Slot;
use routing::knowledge::Mode;
use routing::strategy::Chance;

const WORKERS: usize = 4;

fn engines() -> Vec<Engine> {
    let engine = |_| Engine::new(4000, figures_for("small").speed);
    (0..WORKERS).map(engine).collect()
}

fn arrivals(count: usize, ms_apart: u64) -> Arrivals {
    let at = |index| Duration::from_millis(index as u64 * ms_apart);
    Arrivals::Open((0..count).map(at).collect())
}

fn world<'a>(requests: &'a [Request], policy: Box<dyn Policy>, ms_apart: u64) -> World<'a> {
    let router = Router::new(WORKERS, policy, 1);
    World::new(
        requests,
        &arrivals(requests.len(), ms_apart),
        (engines(), router),
    )
}

fn requests(mix: Mix) -> Vec<Request> {
    mix.requests(150, &mut Chance(5))
}

struct ToTheFirst;

impl Policy for ToTheFirst {
    fn knowledge(&self) -> Mode {
        Mode::Blind
    }
    fn place(&mut self, _: &Sight<'_>, _: &mut Chance) -> Option<Slot> {
        Some(Slot(0))
    }
}

#[test]
fn the_same_seed_gives_the_same_result_under_every_policy() {
    let requests = requests(Mix::Burst);
    for (name, make) in policies::ALL {
        let run = || world(&requests, make(), 20).run();
        assert_eq!(run(), run(), "{name}");
    }
}

#[test]
fn every_request_is_served_once_under_every_policy() {
    let requests = requests(Mix::Conversations);
    for (name, make) in policies::ALL {
        let (_, outcome) = world(&requests, make(), 30).run();
        assert_eq!((outcome.served, outcome.errors), (150, 0), "{name}");
    }
}

#[test]
fn a_policy_that_sends_all_to_one_worker_shows_in_balance_and_wasted_time() {
    let requests = requests(Mix::NothingShared);
    let (_, outcome) = world(&requests, Box::new(ToTheFirst), 30).run();
    assert_eq!(outcome.imbalance, WORKERS as f64);
    assert!(outcome.wasted > 0.9, "{}", outcome.wasted);
    let fair = policies::make(policies::BASE).unwrap();
    let (_, fair) = world(&requests, fair, 30).run();
    assert!(fair.imbalance < 1.5 && fair.wasted < outcome.wasted);
    assert!(fair.ttft_p99_ms < outcome.ttft_p99_ms);
}

#[test]
fn a_lost_worker_fails_what_had_begun_and_hands_on_the_rest() {
    let requests = requests(Mix::Conversations);
    let loss = Loss {
        worker: 1,
        from: Duration::from_secs(1),
        to: Duration::from_secs(3),
    };
    for name in [policies::BASE, "exact", "approximate", policies::ORACLE] {
        let policy = policies::make(name).unwrap();
        let (_, outcome) = world(&requests, policy, 20).with_loss(loss).run();
        assert_eq!(outcome.served + outcome.errors, 150, "{name}");
        assert!(outcome.errors < 75, "{name}: {}", outcome.errors);
    }
}

#[test]
fn exact_knowledge_predicts_what_engines_have() {
    let requests = requests(Mix::Conversations);
    let exact = policies::make("exact").unwrap();
    let (_, outcome) = world(&requests, exact, 100).run();
    let (predicted, actual) = (outcome.predicted_tokens, outcome.predicted_hit_tokens);
    let apart = predicted.abs_diff(actual) as f64 / actual as f64;
    assert!(apart < 0.03, "{predicted} predicted, {actual} found");
    let fair = policies::make(policies::BASE).unwrap();
    assert!(outcome.hit_tokens > world(&requests, fair, 100).run().1.hit_tokens);
}

#[test]
fn a_closed_loop_keeps_the_fleet_busy_to_the_last_request() {
    let requests = requests(Mix::OneSystem);
    let router = Router::new(WORKERS, policies::make("oracle").unwrap(), 1);
    let (end, outcome) = World::new(&requests, &Arrivals::Closed(24), (engines(), router)).run();
    assert_eq!(outcome.served, 150);
    assert!(outcome.throughput > 0.8 * 150.0 / end.as_secs_f64());
}
