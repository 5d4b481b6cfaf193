//! Under which conditions policies are compared: a mix, a fleet, a load, a seed.

use crate::draw::exponential;
use crate::engine::Engine;
use crate::mixes::Mix;
use crate::outcome::Outcome;
use crate::policies::{self, Policy};
use crate::request::{BLOCK_SIZE, Request};
use crate::router::Router;
use crate::trace::{self, Line};
use crate::world::{Arrivals, Loss, World};
use engine_sim::Speed;
use engine_sim::speed::figures_for;
use routing::strategy::Chance;
use std::collections::HashSet;
use std::time::Duration;

/// Engines of the fleet.
pub const WORKERS: usize = 8;
/// Requests at one time, for each engine, that show what the fleet can do.
const SATURATING: usize = 12;
/// A cache holds at least so many of the longest prompts.
const PROMPTS_MIN: usize = 3;
/// The worker that is lost, or slow.
const SPECIAL: usize = 3;
/// A slow worker takes so many times as long.
const SLOWER: f64 = 2.0;

/// A fleet and what it is asked, at no load yet.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Its name in the tables.
    pub name: &'static str,
    mix: Mix,
    /// The share of all different blocks that all caches hold together.
    room: f64,
    lost: bool,
    slow: bool,
}

const fn kind(name: &'static str, mix: Mix) -> Kind {
    Kind {
        name,
        mix,
        room: 1.5,
        lost: false,
        slow: false,
    }
}

/// All of them.
pub const KINDS: [Kind; 8] = [
    kind("conversations", Mix::Conversations),
    kind("one system prompt", Mix::OneSystem),
    kind("nothing shared", Mix::NothingShared),
    kind("burst", Mix::Burst),
    kind("mooncake", Mix::Mooncake),
    Kind {
        room: 1.0 / 3.0,
        ..kind("small caches", Mix::Conversations)
    },
    Kind {
        lost: true,
        ..kind("lost worker", Mix::Conversations)
    },
    Kind {
        slow: true,
        ..kind("slow worker", Mix::Conversations)
    },
];

/// Requests of one seed, with the caches that they are to meet.
pub struct Case {
    kind: Kind,
    seed: u64,
    /// In order.
    pub requests: Vec<Request>,
    blocks: usize,
}

impl Kind {
    /// `count` requests; of the trace where there is one for this kind.
    pub fn case(self, seed: u64, count: usize, trace: Option<&[Line]>) -> Case {
        let mut chance = Chance(seed.wrapping_mul(0x9E37_79B9).wrapping_add(self.mix as u64));
        let requests = match trace.filter(|_| self.mix == Mix::Mooncake) {
            Some(trace) => trace::requests(trace, count, &mut chance),
            None => self.mix.requests(count, &mut chance),
        };
        let different: HashSet<_> = requests.iter().flat_map(|of| &of.names).collect();
        let longest = requests
            .iter()
            .map(|of| of.prompt.len() + of.answer.len())
            .max();
        let least = PROMPTS_MIN * (longest.unwrap_or(0) / BLOCK_SIZE + 1);
        let share = (different.len() as f64 * self.room) as usize / WORKERS;
        Case {
            kind: self,
            seed,
            blocks: share.max(least),
            requests,
        }
    }
}

fn slowed(speed: Speed) -> Speed {
    Speed {
        prefill_ms_per_token: speed.prefill_ms_per_token * SLOWER,
        itl_ms: speed.itl_ms * SLOWER,
        itl_ms_per_sequence: speed.itl_ms_per_sequence * SLOWER,
        ..speed
    }
}

impl Case {
    fn fleet(&self, policy: Box<dyn Policy>) -> (Vec<Engine>, Router) {
        let fast = figures_for("small").speed;
        let engines = (0..WORKERS).map(|worker| {
            let slow = self.kind.slow && worker == SPECIAL;
            Engine::new(self.blocks, if slow { slowed(fast) } else { fast })
        });
        (engines.collect(), Router::new(WORKERS, policy, self.seed))
    }

    /// Requests a second that the fleet serves when it is never without, placed by the oracle.
    pub fn capacity(&self) -> f64 {
        let Some(oracle) = policies::make(policies::ORACLE) else {
            return 0.0;
        };
        let arrivals = Arrivals::Closed(SATURATING * WORKERS);
        let world = World::new(&self.requests, &arrivals, self.fleet(oracle));
        world.run().1.throughput
    }

    /// One run under a policy, at so many requests a second.
    pub fn run(&self, policy: Box<dyn Policy>, per_second: f64) -> Outcome {
        let mut chance = Chance(!self.seed);
        let mut at = 0.0;
        let times = self.requests.iter().map(|_| {
            at += exponential(&mut chance) / per_second;
            Duration::from_secs_f64(at)
        });
        let times: Vec<Duration> = times.collect();
        let end = times.last().copied().unwrap_or_default();
        let world = World::new(&self.requests, &Arrivals::Open(times), self.fleet(policy));
        let world = match self.kind.lost {
            false => world,
            true => world.with_loss(Loss {
                worker: SPECIAL,
                from: end.mul_f64(0.4),
                to: end.mul_f64(0.6),
            }),
        };
        world.run().1
    }
}
