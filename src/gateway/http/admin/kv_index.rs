//! `GET /admin/kv-index`: what the index holds, how its streams are doing, and how far each
//! backend's cache is known.

use crate::gateway::Gateway;
use actix_web::HttpResponse;
use actors::kv_index::{KvIndexHandle, Member, SourceHandle};
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) fn show(gateway: &Gateway) -> HttpResponse {
    let Some(kv) = &gateway.kv else {
        return HttpResponse::Ok().json(json!({"enabled": false}));
    };
    let gauges = kv.gauges.load();
    let settings = gateway.settings();
    let index = &settings.kv_cache_index;
    HttpResponse::Ok().json(json!({
        "enabled": true,
        "index": {
            "alive": kv.shard.load().is_some(),
            "entries": gauges.entries,
            "max_entries": index.max_entries,
            "blocks": gauges.blocks,
            "bytes": gauges.bytes,
            "blocks_applied": gauges.applied,
            "blocks_unknown": gauges.unknown,
        },
        "shared": gateway.sharing.as_ref().map(|sharing| json!({
            "connected": sharing.connected.load(Relaxed) == 1,
            "streams_led": sharing.leads.load(Relaxed),
        })),
        "backends": kv.members.load().iter().map(|of| backend(of, kv)).collect::<Vec<Value>>(),
    }))
}

fn backend(member: &Member, kv: &KvIndexHandle) -> Value {
    let (mode, why) = member.standing.mode();
    let sources = kv.sources.load();
    let own = sources.iter().filter(|s| s.backend == member.backend);
    json!({
        "name": &*member.backend,
        "mode": mode.as_str(),
        "why": why.as_str(),
        "parity": member.standing.parity().as_str(),
        "block_size": member.standing.block_size(),
        "streams": own.map(stream).collect::<Vec<Value>>(),
    })
}

fn stream(source: &SourceHandle) -> Value {
    let state = source.state.load();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let age = (state.last_ts > 0.0).then(|| {
        let age = now.unwrap_or_default().as_secs_f64() - state.last_ts;
        (age.max(0.0) * 1000.0).round() / 1000.0
    });
    json!({
        "rank": source.rank,
        "connected": state.connected,
        "last_seq": state.last_seq,
        "last_event_seconds_ago": age,
        "connections": state.connections,
        "resyncs": state.resyncs,
        "snapshots_taken_over": state.snapshots,
        "gaps": state.tally.gaps,
        "lost": state.tally.lost,
        "restarts": state.tally.restarts,
        "undecodable": state.undecodable,
        "ranks_seen": &*state.ranks,
        "adapters": state.adapters.iter().map(|name| &**name).collect::<Vec<&str>>(),
    })
}
