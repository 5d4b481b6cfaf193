//! Sends a request to the workers that wait for it, up to where the answer can be trusted.

use super::Request;
use super::hand_over::{self, Failed, HandOver, Side};
use super::leaving::{Decoding, OnLeave};
use super::reserve::Reservation;
use crate::handoff::connector;
use crate::kv::{Dispatch, Stored};
use crate::proxy::answer::Opened;
use crate::proxy::attempt::{self, Sending, first_byte_limit};
use crate::proxy::patience::Silence;
use crate::proxy::setback::Setback;
use crate::settings::ConnectorKind;
use actors::backend::Outcome;
use actors::disagg_coordinator::Lease;
use actors::placement::Placement;
use routing::disagg::{Path, Step};
use std::time::Duration;
use tokio::time::Instant;

impl Request<'_> {
    pub(super) async fn attempt(&self, reserved: Reservation) -> Result<Opened, Failed> {
        let lease = match (reserved.prefill, reserved.lease) {
            (Some(prefill), Some(lease)) => {
                return self.hand_over((prefill, reserved.worker), lease).await;
            }
            (_, lease) => lease,
        };
        let mut sending = Sending::whole(self.call, self.worker);
        let step = match reserved.path {
            Path::FastDecode | Path::PrefillThenDecode => Step::Decode,
            Path::Unified | Path::Fallback => Step::Unified,
        };
        let mut within = (sending.first_byte.1, Silence::Fails);
        if step == Step::Decode {
            sending.leg = Some("decode");
            within = self.decode_within();
        }
        (sending.first_byte, sending.silence) = by(within, self.deadline);
        let placed = (self.dispatch(&reserved.worker), reserved.worker);
        let opened = attempt::run(sending, self.worker.clone(), (placed.1, placed.0)).await;
        let mut opened = opened.map_err(|setback| Failed { step, setback })?;
        if let (Opened::Stream(parts), Some(lease)) = (&mut opened, lease) {
            parts.attempt.hold(lease);
        }
        Ok(opened)
    }

    async fn hand_over(
        &self,
        (prefill, decode): (Placement, Placement),
        lease: Lease,
    ) -> Result<Opened, Failed> {
        let (splitting, worker) = (self.splitting, self.worker);
        let name = |of: &Placement| of.in_flight.backend().spec.name.clone();
        let backend = name(&prefill);
        let lacks = |what| Failed {
            step: Step::Prefill,
            setback: Setback::lacking(&backend, what),
        };
        // workers that came with other settings while this request waited have a seat in these
        let latest = worker.gateway.splitting();
        let seat_of = |name: &std::sync::Arc<str>| {
            let own = splitting.seats.get(name);
            own.or_else(|| latest.as_ref()?.seats.get(name))
        };
        let seats = (seat_of(&backend), seat_of(&name(&decode)));
        let (Some(seat), Some(other)) = seats else {
            return Err(lacks("its seat in split serving"));
        };
        let mut peer = seat.peer.clone();
        if seat.connector == ConnectorKind::Mooncake && peer.engine_id.is_none() {
            peer.engine_id = splitting.engine_ids.of(worker, &backend, &peer).await;
            if peer.engine_id.is_none() {
                prefill.in_flight.finish(Outcome::Failure);
                return Err(lacks(
                    "an engine id, which it does not say at its bootstrap port",
                ));
            }
        }
        let connector = connector(seat, other);
        let pins = connector.pins();
        let decoding = Decoding::default();
        let writes = seat.connector == ConnectorKind::SharedStorage;
        let counts = worker
            .gateway
            .settings
            .load()
            .kv_cache_index
            .storage_offloading;
        let stored = self.found.filter(|_| writes && counts);
        let work = hand_over::run(HandOver {
            worker: worker.clone(),
            route: self.call.route,
            headers: (*self.call.headers).clone(),
            body: self.call.body.clone(),
            trace: self.call.trace.clone(),
            request_id: self.call.request_id.clone(),
            connector: connector.into(),
            stored: stored.and_then(|found| Stored::new(found, &prefill)),
            writes_storage: writes,
            decode: Side {
                dispatch: self.dispatch(&decode),
                placement: decode,
                peer: other.peer.clone(),
            },
            prefill: Side {
                dispatch: self.dispatch(&prefill),
                placement: prefill,
                peer,
            },
            lease,
            prefill_within: (splitting.prefill_timeout, Silence::Fails),
            decode_within: self.decode_within(),
            deadline: self.deadline,
            decoding: decoding.clone(),
        });
        let ended = OnLeave::new(Box::pin(work), pins.then_some(decoding)).await;
        if ended
            .as_ref()
            .is_err_and(|failed| !failed.setback.is_refusal())
        {
            splitting.engine_ids.forget(&backend);
        }
        ended
    }

    /// A streamed answer begins once the KV is there; one that is not streamed only when all of it is made.
    fn decode_within(&self) -> (Duration, Silence) {
        match self.call.wants_stream {
            true => (self.splitting.transfer_timeout, Silence::Stalls),
            false => (first_byte_limit(self.call, self.worker), Silence::Fails),
        }
    }

    fn dispatch(&self, placement: &Placement) -> Option<Dispatch> {
        let backend = placement.in_flight.backend();
        Dispatch::new(self.found?, backend, placement.reach.as_ref())
    }
}

/// When a first byte that is waited for from now on must have come, and what it says if it has not: nothing of
/// the worker, where the deadline of the whole request has cut the wait short.
pub(super) fn by(
    (limit, silence): (Duration, Silence),
    deadline: Instant,
) -> ((Instant, Duration), Silence) {
    let until = Instant::now() + limit;
    match until <= deadline {
        true => ((until, limit), silence),
        false => ((deadline, limit), Silence::Ours),
    }
}
