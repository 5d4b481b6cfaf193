//! Workers for a request: a pair or one of them by the coordinator, a unified one by this thread's own router.

use super::Request;
use crate::http::error::Refusal;
use crate::proxy::{place, route};
use actors::disagg_coordinator::{Lease, ReservePair};
use actors::placement::Placement;
use actors::support::mailbox::Mailbox;
use routing::choose::NoBackend;
use routing::disagg::{Path, Step};
use routing::ids::BackendId;
use routing::pairing::Unserved;
use routing::view::Role;
use std::time::Duration;
use std::time::Instant;

/// For the coordinator to answer: it is asked like the index, and what goes on without it costs more.
pub(super) const COORDINATOR_DEADLINE: Duration = Duration::from_millis(100);

/// Workers that wait for the request.
pub(super) struct Reservation {
    /// How they serve it.
    pub path: Path,
    /// Who computes the prompt, when that is not the one who answers.
    pub prefill: Option<Placement>,
    /// Who answers.
    pub worker: Placement,
    /// Holds them.
    pub lease: Option<Lease>,
    /// For which step a unified worker stands in, and why.
    pub stands_in: Option<(Step, &'static str)>,
}

impl Request<'_> {
    /// Workers that have not failed it; `whole`: only unified ones.
    pub(super) async fn reserve(
        &self,
        tokens: u64,
        (tried, whole): (&[BackendId], bool),
    ) -> Result<Reservation, Refusal> {
        if whole {
            return self.unified(tried, None).await;
        }
        let ask = ReservePair {
            route: route(self.call, self.found, None, tried),
            tokens,
            queued: Mailbox::DisaggCoordinator.enter(),
        };
        let start = Instant::now();
        let address = self.splitting.coordinator.address.load();
        let answer = match address.as_ref() {
            Some(address) => tokio::time::timeout(COORDINATOR_DEADLINE, address.send(ask))
                .await
                .ok(),
            None => None,
        };
        let asked = (
            Mailbox::DisaggCoordinator.as_str(),
            start.elapsed().as_secs_f64(),
        );
        self.worker.handles.asked(asked.0, asked.1);
        let model = || self.call.model.to_string();
        match answer.and_then(Result::ok) {
            Some(Ok(reserved)) => Ok(Reservation {
                path: reserved.path,
                prefill: reserved.prefill,
                worker: reserved.worker,
                lease: Some(reserved.lease),
                stands_in: reserved.missing.map(|(step, suspended)| {
                    (step, if suspended { "suspended" } else { "no_worker" })
                }),
            }),
            Some(Err(Unserved { why, step })) => Err(match why {
                NoBackend::NoneServing => Refusal::NoWorker(step, model()),
                why => Refusal::NoBackend(why, model()),
            }),
            None if self.splitting.fallback => {
                let stands_in = (Step::Prefill, "no_coordinator");
                self.unified(tried, Some(stands_in)).await
            }
            None => Err(Refusal::NoCoordinator),
        }
    }

    async fn unified(
        &self,
        tried: &[BackendId],
        stands_in: Option<(Step, &'static str)>,
    ) -> Result<Reservation, Refusal> {
        let route = route(self.call, self.found, Some(Role::Unified), tried);
        let worker = place(self.worker, route).await?;
        Ok(Reservation {
            path: Path::Fallback,
            prefill: None,
            worker,
            lease: None,
            stands_in,
        })
    }
}
