//! Pairs prefill and decode workers for requests that are split, and knows which pairs are at work: a pair is
//! leased from the moment when it is chosen until the answer has ended, in whichever way. Where hand-offs of a
//! group fail in a row, as when the storage between its workers is gone, that group is left alone for a while,
//! so that not every request waits for a timeout.
//!
//! One for the process, on a thread of its own; those who ask wait with a deadline and go on without it.

mod lease;
mod suspension;

pub use lease::{Learned, Lease, LeaseInfo, LeasedStep, Release, StepsIn};
pub use suspension::{HANDOFF_FAILURES, HANDOFF_RECOVERY};

use crate::directory::Directory;
use crate::placement::Placement;
use crate::router::Route;
use crate::support::mailbox::Queued;
use crate::support::published::Published;
use crate::support::supervise::{Root, RootExited, supervise};
use crate::support::watch::Watch;
use actix::{Actor, Addr, AsyncContext, Context, Handler, Message, MessageResult};
use actix_rt::Arbiter;
use lease::Leases;
use routing::choose::ChoiceRules;
use routing::disagg::{Path, SplitRules, Step};
use routing::pairing::{PairAsk, Pairing, Unserved, pair};
use routing::strategy::{Chance, Rotation};
use routing::view::HandOffGroup;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use suspension::Suspensions;

/// What an answer is taken to add to the KV of its prompt, in tokens.
const ANSWER_TOKENS: u64 = 256;
/// Leases that [`ListLeases`] answers with.
pub const LEASES_LISTED_MAX: usize = 1000;

/// What pairing follows from.
#[derive(Debug, Clone)]
pub struct CoordinatorSettings {
    /// As for any choice.
    pub rules: ChoiceRules,
    /// Those of splitting.
    pub split: SplitRules,
    /// What is known of the groups; a group's number is its place.
    pub groups: Arc<[GroupSpec]>,
}

/// A group of workers that can hand over to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    /// What it is, for people.
    pub name: String,
    /// Whether its decode workers cannot compute a prompt, however short it is.
    pub pairs_only: bool,
    /// How many decode workers it has in the settings.
    pub decoders: usize,
}

/// Asks who serves a request, and counts it in there.
#[derive(Debug, Message)]
#[rtype(result = "Result<Reserved, Unserved>")]
pub struct ReservePair {
    /// The request; its role is not looked at.
    pub route: Route,
    /// Tokens of its prompt, as well as is known.
    pub tokens: u64,
    /// Its place in the mailbox.
    pub queued: Queued,
}

/// Workers that wait for a request.
pub struct Reserved {
    /// How they serve it.
    pub path: Path,
    /// Who computes the prompt, when that is not the one who answers.
    pub prefill: Option<Placement>,
    /// Who answers.
    pub worker: Placement,
    /// The step that nobody can serve, when a unified worker stands in; and whether that is so because hand-offs
    /// have failed.
    pub missing: Option<(Step, bool)>,
    /// Holds the pair.
    pub lease: Lease,
}

/// The leased pairs of this moment; at most [`LEASES_LISTED_MAX`].
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "Vec<LeaseInfo>")]
pub struct ListLeases;

/// Asks what [`ReservePair`] would answer; nothing is counted or taken.
#[derive(Debug, Message)]
#[rtype(result = "Result<(Pairing, Vec<Arc<str>>), Unserved>")]
pub struct ExplainPair(pub ReservePair);

/// How splitting is doing, for metrics.
#[derive(Debug, Default)]
pub struct SplitState {
    /// Requests in each step.
    pub steps: StepsIn,
    /// Groups that are left alone.
    pub suspended: AtomicU64,
    /// Fresh starts of the actor.
    pub restarts: AtomicU64,
}

/// The coordinator as everybody sees it; clones are the same one.
#[derive(Clone)]
pub struct CoordinatorHandle {
    /// Whom to ask.
    pub address: Published<Option<Addr<DisaggCoordinator>>>,
    /// How it is doing.
    pub state: Arc<SplitState>,
    settings: Published<CoordinatorSettings>,
}

impl CoordinatorHandle {
    /// It pairs by these from now on. Groups keep their numbers; others may follow them.
    pub fn configure(&self, settings: CoordinatorSettings) {
        self.settings.publish(settings);
    }
}

/// See the module.
pub struct DisaggCoordinator {
    directory: Directory,
    settings: Published<CoordinatorSettings>,
    rotation: Rotation,
    chance: Chance,
    leases: Leases,
    suspensions: Suspensions,
    state: Arc<SplitState>,
    _watch: Watch<RootExited>,
}

impl DisaggCoordinator {
    /// Starts a coordinator that is kept alive, and what everybody may know of it.
    pub fn supervised(
        settings: CoordinatorSettings,
        directory: Directory,
    ) -> (Root<Self>, CoordinatorHandle) {
        let handle = CoordinatorHandle {
            address: Published::new(None),
            state: Arc::default(),
            settings: Published::new(settings),
        };
        let arbiter = Rc::new(Arbiter::new());
        let (seen, counted) = (handle.clone(), handle.state.clone());
        let root = supervise(
            "disagg_coordinator",
            move |warden| {
                let watch = Watch::new(warden.recipient(), RootExited);
                let (settings, directory) = (seen.settings.clone(), directory.clone());
                let state = seen.state.clone();
                let address = DisaggCoordinator::start_in_arbiter(&arbiter.handle(), move |_| {
                    DisaggCoordinator {
                        directory,
                        suspensions: Suspensions::new(settings.load().groups.clone()),
                        settings,
                        rotation: Rotation::default(),
                        chance: Chance(fastrand::u64(..)),
                        leases: Leases::new(state.clone()),
                        state,
                        _watch: watch,
                    }
                });
                seen.address.publish(Some(address.clone()));
                address
            },
            move || {
                counted.restarts.fetch_add(1, Relaxed);
            },
        );
        (root, handle)
    }
}

fn pairs_only(groups: &[GroupSpec]) -> Vec<HandOffGroup> {
    let all = groups.iter().enumerate();
    let only = all.filter(|(_, group)| group.pairs_only);
    only.map(|(at, _)| HandOffGroup(at as u32)).collect()
}

fn now() -> std::time::Instant {
    tokio::time::Instant::now().into_std()
}

impl Actor for DisaggCoordinator {
    type Context = Context<Self>;
}

impl Handler<ReservePair> for DisaggCoordinator {
    type Result = Result<Reserved, Unserved>;

    fn handle(&mut self, of: ReservePair, ctx: &mut Self::Context) -> Self::Result {
        let now = now();
        let settings = self.settings.load();
        let pairs_only = pairs_only(&settings.groups);
        let snapshot = self.directory.load();
        let live = snapshot.live(now);
        let suspended = self.suspended(now);
        let asked = PairAsk {
            ask: of.route.ask(),
            tokens: of.tokens,
            suspended: &suspended,
            pairs_only: &pairs_only,
        };
        let (rules, split) = (&settings.rules, &settings.split);
        let known = (asked.ask.known, &rules.weights);
        loop {
            let chance = (&mut self.rotation, &mut self.chance);
            let pairing = pair((rules, split), &snapshot.view, &live, &asked, chance)?;
            let take = |plan, computes| Placement::take(&snapshot, &live, plan, known, computes);
            let prefill = pairing.prefill.as_ref().map(|plan| take(plan, true));
            let is_split = prefill.is_some();
            // another request may be faster at a half-open worker; the next round does not see that one
            let Some(mut worker) = take(&pairing.worker, !is_split) else {
                continue;
            };
            let prefill = match prefill {
                Some(None) => continue,
                Some(prefill) => prefill,
                None => None,
            };
            if pairing.path != Path::Fallback {
                worker.in_flight.hold_tokens(of.tokens + ANSWER_TOKENS);
            }
            let group = worker.in_flight.backend().spec.group;
            let names = (
                prefill
                    .as_ref()
                    .map(|of| of.in_flight.backend().spec.name.clone()),
                worker.in_flight.backend().spec.name.clone(),
            );
            let coordinator = ctx.address();
            let told = (coordinator.clone().recipient(), coordinator.recipient());
            let of = (pairing.path, group, self.suspensions.era(group));
            let lease = self.leases.grant(of, names, told);
            if is_split {
                self.suspensions.tries(group, lease.id());
            }
            return Ok(Reserved {
                path: pairing.path,
                prefill,
                worker,
                missing: pairing.missing.map(|step| (step, pairing.suspended)),
                lease,
            });
        }
    }
}

impl Handler<Learned> for DisaggCoordinator {
    type Result = ();

    fn handle(&mut self, of: Learned, _: &mut Self::Context) {
        let now = now();
        self.suspensions.learned(&of, now);
        self.suspended(now);
    }
}

impl Handler<Release> for DisaggCoordinator {
    type Result = ();

    fn handle(&mut self, Release(lease): Release, _: &mut Self::Context) {
        self.leases.end(lease);
        self.suspensions.ended(lease);
        self.suspended(now());
    }
}

impl DisaggCoordinator {
    /// Groups that take no hand-off now; tells how many.
    fn suspended(&mut self, now: std::time::Instant) -> Vec<HandOffGroup> {
        self.suspensions.follow(&self.settings.load().groups);
        let suspended = self.suspensions.suspended(now);
        self.state.suspended.store(suspended.len() as u64, Relaxed);
        suspended
    }
}

impl Handler<ListLeases> for DisaggCoordinator {
    type Result = Vec<LeaseInfo>;

    fn handle(&mut self, _: ListLeases, _: &mut Self::Context) -> Self::Result {
        self.leases.list(LEASES_LISTED_MAX)
    }
}

impl Handler<ExplainPair> for DisaggCoordinator {
    type Result = MessageResult<ExplainPair>;

    fn handle(&mut self, ExplainPair(of): ExplainPair, _: &mut Self::Context) -> Self::Result {
        let now = now();
        let settings = self.settings.load();
        let pairs_only = pairs_only(&settings.groups);
        let snapshot = self.directory.load();
        let suspended = self.suspended(now);
        let asked = PairAsk {
            ask: of.route.ask(),
            tokens: of.tokens,
            suspended: &suspended,
            pairs_only: &pairs_only,
        };
        let rules = (&settings.rules, &settings.split);
        let (mut rotation, mut chance) = (self.rotation.clone(), self.chance.clone());
        let chance = (&mut rotation, &mut chance);
        let live = snapshot.live(now);
        let pairing = pair(rules, &snapshot.view, &live, &asked, chance);
        let names = snapshot
            .view
            .backends
            .iter()
            .map(|backend| backend.name.clone());
        MessageResult(pairing.map(|pairing| (pairing, names.collect())))
    }
}

crate::support::fault::panics_on_request!(DisaggCoordinator);
