//! Other event sources for a running index: streams that did not change go on, and what they told stays.

use super::{KvIndex, KvIndexSettings, SourceHandle, SourceSettings};
use crate::index_shard::SetSources;
use crate::kv_subscriber::Retire;
use actix::{Context, Handler, Message};
use routing::prefix_index::HolderId;
use std::sync::Arc;
use tracing::info;

/// The index is to be fed from now on by what was laid into [`super::Next`]; its room and time stay as they are.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct ReconcileSources;

pub(super) fn seen(sources: &[SourceSettings]) -> Vec<SourceHandle> {
    let seen = sources.iter().map(|source| SourceHandle {
        key: source.key.clone(),
        backend: source.backend.clone(),
        rank: source.rank,
        state: source.state.clone(),
    });
    seen.collect()
}

/// Blocks of these are forgotten: no source and no backend has them any more.
fn gone(before: &KvIndexSettings, after: &KvIndexSettings) -> Vec<HolderId> {
    let holders = |settings: &KvIndexSettings| -> Vec<HolderId> {
        let members = settings.members.iter().flat_map(|m| m.memories.iter());
        members.map(|memory| memory.holder).collect()
    };
    let kept = holders(after);
    let mut gone = holders(before);
    gone.retain(|holder| !kept.contains(holder));
    gone
}

impl Handler<ReconcileSources> for KvIndex {
    type Result = ();

    fn handle(&mut self, _: ReconcileSources, ctx: &mut Context<Self>) {
        let before = self.settings.borrow().clone();
        let Some(mut wanted) = before.next.take() else {
            return;
        };
        wanted.next = before.next.clone();
        wanted.limits = before.limits;
        // the stream that runs is the one that knows how it is doing
        for source in &mut wanted.sources {
            if let Some(known) = before.sources.iter().find(|of| of.key == source.key) {
                *source = known.clone();
            }
        }
        let has = |all: &[SourceSettings], key: &Arc<str>| all.iter().any(|of| of.key == *key);
        let ended = before
            .sources
            .iter()
            .filter(|of| !has(&wanted.sources, &of.key));
        for source in ended {
            info!(backend = %source.backend, "event source is no longer in the settings");
            if let Some(subscriber) = self.subscribers.remove(&source.key) {
                subscriber.do_send(Retire);
            }
        }
        let fresh = wanted
            .sources
            .iter()
            .filter(|of| !has(&before.sources, &of.key));
        let fresh: Vec<SourceSettings> = fresh.cloned().collect();
        let gone = gone(&before, &wanted);
        self.handle.sources.publish(seen(&wanted.sources));
        self.handle.members.publish(wanted.members.clone());
        let specs = wanted.specs();
        *self.settings.borrow_mut() = wanted;
        if let Some(shard) = self.handle.shard.load().as_ref() {
            // before the first event of a fresh source, which is sent by whoever starts below
            shard.do_send(SetSources { specs, gone });
        }
        for source in fresh {
            self.start_subscriber(&source.key, ctx);
        }
    }
}
