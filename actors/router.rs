//! Decides for one HTTP worker, on that worker's own thread: reads the directory once per
//! request, runs the pure choice and answers at once. It never waits.

use crate::directory::Directory;
pub use crate::placement::Placement;
use crate::support::published::Published;
use crate::support::watch::Intensity;
use actix::{Actor, Addr, Context, Handler, Message, MessageResult};
use routing::choose::{Ask, ChoiceRules, NoBackend, choose};
use routing::explain::{Explanation, explain};
use routing::ids::{BackendId, PrefixKey, SessionKey};
use routing::score::Known;
use routing::strategy::{Chance, Rotation};
use routing::view::Role;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tracing::{error, warn};

/// Asks where a request goes. The answer holds the backend's in-flight count.
#[derive(Debug, Clone, Message)]
#[rtype(result = "Result<Placement, NoBackend>")]
pub struct Route {
    /// The model, as backends name it.
    pub model: Arc<str>,
    /// What is known of the prompt's blocks, if anything.
    pub known: Option<Arc<Known>>,
    /// Equal for requests that begin alike.
    pub prefix: Option<PrefixKey>,
    /// Equal for requests of one session.
    pub session: Option<SessionKey>,
    /// Only backends of this role; none: any.
    pub role: Option<Role>,
    /// Backends that already failed this request; at most the attempts allowed.
    pub tried: Vec<BackendId>,
}

/// See the module.
pub struct Router {
    directory: Directory,
    rules: Published<ChoiceRules>,
    rotation: Rotation,
    chance: Chance,
}

impl Router {
    /// A router with a rotation of its own.
    pub fn new(directory: Directory, rules: Published<ChoiceRules>) -> Self {
        Router {
            directory,
            rules,
            rotation: Rotation::default(),
            chance: Chance(fastrand::u64(..)),
        }
    }
}

impl Route {
    /// As the choice reads it.
    pub(crate) fn ask(&self) -> Ask<'_> {
        Ask {
            model: &self.model,
            known: self.known.as_deref(),
            prefix: self.prefix,
            session: self.session,
            role: self.role,
            group: None,
            tried: &self.tried,
        }
    }
}

/// Asks where a request would go, and why; nothing is counted or taken.
#[derive(Debug, Message)]
#[rtype(result = "Explained")]
pub struct Explain(pub Route);

/// An [`Explanation`] with the names that its slots stand for.
#[derive(Debug)]
pub struct Explained {
    /// What speaks for and against everybody.
    pub explanation: Explanation,
    /// The backends' names, by slot.
    pub names: Vec<Arc<str>>,
}

impl Handler<Explain> for Router {
    type Result = MessageResult<Explain>;

    fn handle(&mut self, Explain(route): Explain, _: &mut Self::Context) -> Self::Result {
        let snapshot = self.directory.load();
        let live = snapshot.live(tokio::time::Instant::now().into_std());
        let backends = snapshot.view.backends.iter();
        MessageResult(Explained {
            explanation: explain(
                &self.rules.load(),
                &snapshot.view,
                &live,
                &route.ask(),
                &self.rotation,
                &self.chance,
            ),
            names: backends.map(|backend| backend.name.clone()).collect(),
        })
    }
}

impl Actor for Router {
    type Context = Context<Self>;
}

impl Handler<Route> for Router {
    type Result = Result<Placement, NoBackend>;

    fn handle(&mut self, route: Route, _: &mut Self::Context) -> Self::Result {
        let snapshot = self.directory.load();
        let live = snapshot.live(tokio::time::Instant::now().into_std());
        let (ask, rules) = (route.ask(), self.rules.load());
        loop {
            let plan = choose(
                &rules,
                &snapshot.view,
                &live,
                &ask,
                &mut self.rotation,
                &mut self.chance,
            )?;
            // another worker thread may take the half-open probe first; then it is no longer
            // free, and the next round does not see it
            let weights = &rules.weights;
            if let Some(placed) =
                Placement::take(&snapshot, &live, &plan, (ask.known, weights), true)
            {
                return Ok(placed);
            }
        }
    }
}

crate::support::fault::panics_on_request!(Router);

/// Starts of routers beyond the first, over all threads, for `/metrics`.
#[derive(Debug, Default)]
pub struct RouterRestarts(AtomicU64);

impl RouterRestarts {
    /// The count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Everything needed to start a router on the present thread.
#[derive(Clone)]
pub struct RouterSeed {
    gateway: u64,
    directory: Directory,
    rules: Published<ChoiceRules>,
    restarts: Arc<RouterRestarts>,
}

thread_local! {
    // per thread, not per app: the app factory runs once per bound address on the same thread
    static ROUTERS: RefCell<HashMap<u64, Slot>> = RefCell::default();
}

struct Slot {
    addr: Addr<Router>,
    intensity: Intensity,
    given_up: bool,
}

impl RouterSeed {
    /// For one gateway; several in one process keep apart.
    pub fn new(directory: Directory, rules: ChoiceRules) -> Self {
        static GATEWAYS: AtomicU64 = AtomicU64::new(0);
        RouterSeed {
            gateway: GATEWAYS.fetch_add(1, Ordering::Relaxed),
            directory,
            rules: Published::new(rules),
            restarts: Arc::default(),
        }
    }

    /// All routers choose by these rules from now on.
    pub fn set_rules(&self, rules: ChoiceRules) {
        self.rules.publish(rules);
    }

    /// Restarts over all threads.
    pub fn restarts(&self) -> Arc<RouterRestarts> {
        self.restarts.clone()
    }

    /// This thread's router: started at the first call, replaced when it has died. None when it
    /// keeps dying.
    pub fn router(&self) -> Option<Addr<Router>> {
        let start = || Router::new(self.directory.clone(), self.rules.clone()).start();
        ROUTERS.with_borrow_mut(|routers| {
            let slot = routers.entry(self.gateway).or_insert_with(|| Slot {
                addr: start(),
                intensity: Intensity::default(),
                given_up: false,
            });
            if slot.addr.connected() {
                return Some(slot.addr.clone());
            }
            let now = tokio::time::Instant::now().into_std();
            if slot.intensity.next_start(now).is_none() {
                if !std::mem::replace(&mut slot.given_up, true) {
                    let what = "actor keeps dying, not starting it again for now";
                    error!(actor = "router", what);
                }
                return None;
            }
            slot.given_up = false;
            warn!(actor = "router", "actor died, starting a fresh one");
            self.restarts.0.fetch_add(1, Ordering::Relaxed);
            slot.addr = start();
            Some(slot.addr.clone())
        })
    }
}
