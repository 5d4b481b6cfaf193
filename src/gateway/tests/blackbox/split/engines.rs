//! With simulated engines, which notice a wrong hand-off and load a right one.

use crate::kv_index::Engines;
use crate::support::client::Answer;
use crate::support::{Client, DEADLINE, Gateway, sse, wait_until};
use engine_sim::kv_store::{StoreFault, StoreSettings, in_process};
use engine_sim::{KvSharing, SimConfig, Speed, StoreAt};
use serde_json::{Value, json};
use std::time::Duration;

/// Blocks of 16 tokens of the prompts here.
const BLOCKS: u32 = 100;

fn engine(connector: &str, role: &str, store: &str) -> SimConfig {
    let transfer = json!({"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": {
        "vast_endpoint": format!("http://{store}"), "kv_namespace": "n",
    }});
    let needs_port = connector != "VastKVConnector";
    SimConfig {
        kv_transfer: Some(serde_json::from_value(transfer).unwrap()),
        kv_sharing: KvSharing {
            store: (!needs_port).then_some(StoreAt::InProcess),
            port: needs_port.then_some(0),
            lease: Duration::from_secs(3600),
            ..KvSharing::default()
        },
        time_scale: 0.05,
        speed: Speed {
            prefill_ms_per_token: 1.0,
            itl_ms: 1.0,
            itl_ms_per_sequence: 0.0,
            overhead_ms: 0.0,
        },
        ..SimConfig::default()
    }
}

/// Two prefill workers, two decode workers, one that does both.
struct Fleet {
    engines: Engines,
    ports: Vec<u16>,
}

const ROLES: [(&str, &str, &str); 5] = [
    ("p1", "prefill", "kv_producer"),
    ("p2", "prefill", "kv_producer"),
    ("d1", "decode", "kv_consumer"),
    ("d2", "decode", "kv_consumer"),
    ("u", "unified", "kv_both"),
];

impl Fleet {
    fn start(connector: &str, store: &str) -> Self {
        let configs = ROLES
            .iter()
            .map(|(_, _, role)| engine(connector, role, store));
        let engines = Engines::start(configs.collect());
        let ports = (0..ROLES.len()).map(|at| engines.kv_port(at)).collect();
        Fleet { engines, ports }
    }

    fn gateway(&self, keys: &str) -> Gateway {
        let (mut backends, mut sources) = (String::new(), String::new());
        for (at, (name, role, _)) in ROLES.iter().enumerate() {
            let (url, port) = (&self.engines.urls[at], self.ports[at]);
            backends += &format!(
                "  - {{ name: {name}, role: {role}, url: '{url}', models: [sim-model], kv_peer: {{ zmq_address: '127.0.0.1:{port}', bootstrap_port: {port} }} }}\n"
            );
            sources += &format!(
                "    - {{ backend_name: {name}, endpoint: '{url}/v1/kv_events', reconnect_interval_ms: 50 }}\n"
            );
        }
        let gateway = Gateway::with(
            &backends,
            &format!(
                "disaggregated_serving: {{ enabled: true, default_external_storage: {{ endpoint: 'http://v', kv_namespace: n }}, {keys} }}\nkv_cache_index:\n  enabled: true\n  parity_check: false\n  event_sources:\n{sources}"
            ),
        );
        wait_until("all event streams are open", DEADLINE, || {
            gateway.metric("tidegate_kv_stream_connected", &[]) == ROLES.len() as f64
        });
        gateway
    }
}

fn body(number: u32) -> Value {
    let prompt: Vec<u32> = (0..BLOCKS * 16)
        .map(|token| (number * 7919 + token) % 500 + 1)
        .collect();
    json!({
        "model": "sim-model", "prompt": prompt, "max_tokens": 5, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true},
    })
}

fn complete(gateway: &Gateway, number: u32) -> Answer {
    let answer = Client::connect(gateway).post("/v1/completions", "", body(number).to_string());
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(!answer.text().contains("\"error\""), "{answer:?}");
    assert!(answer.text().ends_with(sse::DONE), "{answer:?}");
    answer
}

fn path(answer: &Answer) -> &str {
    answer.header("x-tidegate-path").unwrap_or_default()
}

/// Cached tokens, as the client is told.
fn cached(answer: &Answer) -> u64 {
    let events = sse::parse(&answer.body);
    let mut counted = events
        .iter()
        .filter(|event| event.data != "[DONE]")
        .map(sse::Event::json);
    let usage = counted.rfind(|json| json["usage"].is_object()).unwrap();
    usage["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

#[test]
fn a_prompt_is_computed_once_and_then_found_in_storage_by_whoever_decodes() {
    let fleet = Fleet::start("VastKVConnector", "a");
    let gateway = fleet.gateway("");
    for number in 0..4 {
        let answer = complete(&gateway, number);
        assert_eq!((path(&answer), cached(&answer)), ("prefill_then_decode", 0));
        let holder = answer
            .header("x-tidegate-prefill-backend")
            .unwrap()
            .to_owned();
        assert!(holder.starts_with('p'), "{holder}");
    }
    for number in 0..4 {
        let again = complete(&gateway, number);
        assert_eq!(path(&again), "fast_decode");
        assert!(cached(&again) >= u64::from(BLOCKS - 1) * 16, "{again:?}");
    }
    let never = fleet.gateway("min_prefill_tokens: 1000000");
    assert_eq!(path(&complete(&never, 9)), "fast_decode");
    gateway.assert_idle();
}

#[test]
fn a_right_hand_off_goes_well_with_every_connector() {
    for (connector, named) in [
        ("NixlConnector", "nixl"),
        ("MooncakeConnector", "mooncake"),
        ("P2pNcclConnector", "p2p_nccl"),
        ("SGLang", "sglang"),
    ] {
        let fleet = Fleet::start(connector, "b");
        let gateway = fleet.gateway(&format!("connector: {named}"));
        for number in 0..3 {
            let answer = complete(&gateway, number);
            assert_eq!(path(&answer), "prefill_then_decode", "{named}");
        }
        assert_eq!(
            gateway.metric("tidegate_split_fallbacks_total", &[]),
            0.0,
            "{named}"
        );
        let loaded: u64 = [2, 3]
            .map(|at| fleet.engines.stats(at).kv_loaded_tokens)
            .iter()
            .sum();
        assert!(
            loaded >= 3 * u64::from(BLOCKS - 1) * 16,
            "{named}: {loaded}"
        );
        gateway.assert_idle();
    }
}

#[test]
fn whenever_clients_leave_prefill_is_left_with_no_blocks_that_nobody_fetches() {
    let fleet = Fleet::start("NixlConnector", "c");
    let gateway = fleet.gateway("connector: nixl");
    for number in 0..40 {
        let mut client = Client::connect(&gateway);
        client.start("/v1/completions", body(number).to_string());
        std::thread::sleep(Duration::from_millis(u64::from(number) * 4)); // an input: when it leaves
        client.leave();
    }
    gateway.assert_idle();
    wait_until(
        "nothing is pinned, long before its lease ends",
        DEADLINE,
        || {
            [0, 1]
                .iter()
                .all(|at| fleet.engines.stats(*at).kv_blocks_pinned == 0)
        },
    );
    assert_eq!(path(&complete(&gateway, 100)), "prefill_then_decode");
}

#[test]
fn with_its_storage_gone_the_fleet_serves_on_and_splits_again_when_it_is_back() {
    let fleet = Fleet::start("VastKVConnector", "d");
    let store = in_process("http://d", StoreSettings::default());
    let gateway = fleet.gateway("prefill_timeout: 500ms, kv_transfer_timeout: 300ms");
    assert_eq!(path(&complete(&gateway, 0)), "prefill_then_decode");
    for (at, fault) in [
        StoreFault {
            hang: true,
            ..StoreFault::default()
        },
        StoreFault {
            refuse: Some(503),
            ..StoreFault::default()
        },
    ]
    .into_iter()
    .enumerate()
    {
        store.set_fault(fault);
        for number in 0..8 {
            complete(&gateway, 10 * (at as u32 + 1) + number);
        }
        complete(&gateway, 0); // which storage had
    }
    let fallbacks = gateway.metric("tidegate_split_fallbacks_total", &[]);
    println!("{fallbacks} of 18 fell back");
    assert!(fallbacks > 0.0, "the faults reach the engines");
    store.set_fault(StoreFault::default());
    let mut number = 100;
    // a group that is left alone is tried every ten seconds, and the second try may be the one
    wait_until("prompts are split again", DEADLINE * 2, || {
        number += 1;
        path(&complete(&gateway, number)) == "prefill_then_decode"
    });
    let again = complete(&gateway, number);
    assert_eq!(path(&again), "fast_decode", "{again:?}");
    gateway.assert_idle();
}
