//! Several gateways with one Redis: what one has learned serves the next, they see each other's
//! load, and each goes on alone while Redis is away. Gateways here are processes of their own.

use crate::kv_index::{Engines, prompt, zmq_config};
use crate::support::client::Answer;
use crate::support::process::Process;
use crate::support::sse::delta;
use crate::support::{Client, DEADLINE, MODEL, Upstream, chat, chat_stream, user, wait_until};
use redis_servers::{Cluster, Single};
use serde_json::Value;
use std::time::Instant;

/// Engines that keep nothing for those who come late.
fn forgetful_engines() -> Engines {
    let config = zmq_config(|config| config.kv_events.replay_endpoint = None);
    Engines::start(vec![config.clone(), config])
}

fn gateway(engines: &Engines, redis_url: &str) -> Process {
    let (mut backends, mut sources) = (String::new(), String::new());
    for (at, url) in engines.urls.iter().enumerate() {
        let live = engines.live_endpoint(at);
        backends += &format!("  - {{ name: e{at}, url: '{url}', models: [sim-model] }}\n");
        sources += &format!(
            "    - {{ backend_name: e{at}, endpoint: '{live}', reconnect_interval_ms: 50 }}\n"
        );
    }
    let sources = format!("  event_sources:\n{sources}");
    let process = sharing((&backends, &sources), redis_url);
    wait_until(
        "both event streams are open and both engines serve",
        DEADLINE,
        || {
            let index = admin(&process);
            let backends = index["backends"].as_array().unwrap();
            let open = |b: &Value| b["streams"][0]["connected"] == true;
            backends.iter().all(open) && serves(&process, "sim-model")
        },
    );
    process
}

fn serves(process: &Process, model: &str) -> bool {
    let body = format!(r#"{{"model":"{model}","prompt":[1]}}"#);
    let told = Client::connect_to_port(process.port)
        .post("/admin/explain", "", body)
        .json();
    told["candidates"]
        .as_array()
        .is_some_and(|able| able.len() == 2)
}

/// A gateway of these backends and event sources that shares through Redis.
fn sharing((backends, sources): (&str, &str), redis_url: &str) -> Process {
    Process::start(&format!(
        "server: {{ workers: 1 }}
prefix_routing: {{ enabled: false }}
health_checks: {{ interval: 50ms, timeout: 2s }}
response_cache: {{ redis: {{ url: '{redis_url}', command_timeout_ms: 500, connect_timeout_ms: 500 }} }}
kv_cache_index:
  enabled: true
  backend: redis
  parity_check: false
{sources}backends:
{backends}"
    ))
}

fn admin(process: &Process) -> Value {
    process.get("/admin/kv-index").json()
}

fn complete(process: &Process, body: &str) -> Answer {
    Client::connect_to_port(process.port).post("/v1/completions", "", body)
}

/// Requests in flight at a backend, as this gateway sees them.
fn seen_load(process: &Process, backend: &str) -> u64 {
    let told = Client::connect_to_port(process.port).post("/admin/explain", "", chat(&user("hi")));
    let told = told.json();
    let mut candidates = told["candidates"].as_array().unwrap().iter();
    let candidate = candidates.find(|c| c["backend"] == *backend);
    candidate.unwrap()["in_flight"].as_u64().unwrap()
}

fn is_shared(process: &Process) -> bool {
    admin(process)["shared"]["connected"] == true
}

fn applied(process: &Process) -> u64 {
    admin(process)["index"]["blocks_applied"].as_u64().unwrap()
}

/// Sends a new prompt and waits until its blocks are known; answers who has them.
fn teach(process: &Process, seed: u32) -> String {
    let before = applied(process);
    let answer = complete(process, &prompt(seed, 30));
    assert_eq!(answer.status, 200, "{answer:?}");
    wait_until("the prompt's blocks are known", DEADLINE, || {
        applied(process) >= before + 30
    });
    answer.backend().to_owned()
}

fn until_found(process: &Process, seed: u32, holder: &str) {
    wait_until("the prompt is found where it is held", DEADLINE, || {
        let told =
            Client::connect_to_port(process.port).post("/admin/explain", "", prompt(seed, 30));
        let told = told.json();
        let mut candidates = told["candidates"].as_array().unwrap().iter();
        let of = candidates.find(|c| c["backend"] == *holder).unwrap();
        of["overlap"]["blocks"] == 30 && of["overlap"]["by"] == "tokens"
    });
}

#[test]
fn a_gateway_that_comes_late_routes_by_what_the_first_has_learned() {
    let redis = Single::start();
    a_late_gateway_knows_all(&redis.url());
}

#[test]
fn a_gateway_that_comes_late_routes_by_what_the_first_has_left_in_a_cluster() {
    let redis = Cluster::start();
    a_late_gateway_knows_all(&redis.url());
}

fn a_late_gateway_knows_all(redis_url: &str) {
    let engines = forgetful_engines();
    let first = gateway(&engines, redis_url);
    // nothing is left of a stream that has told nothing, and chance may send six prompts to one engine
    let mut holders: Vec<String> = Vec::new();
    while holders.len() < 6 || holders.iter().all(|holder| *holder == holders[0]) {
        holders.push(teach(&first, holders.len() as u32));
    }
    // who leads a stream may have left nothing of it yet, if its shard was busy when it was asked
    wait_until("the first one has left snapshots", DEADLINE, || {
        first_leads(&first) == 2 && snapshots_left(&first) >= 2
    });
    let late = gateway(&engines, redis_url);
    let ready = Instant::now();
    for (seed, holder) in holders.iter().enumerate() {
        until_found(&late, seed as u32, holder);
    }
    println!("known after {:?}", ready.elapsed());
    for (seed, holder) in holders.iter().enumerate() {
        let answer = complete(&late, &prompt(seed as u32, 30));
        assert_eq!(answer.backend(), holder);
        assert_eq!(answer.header("x-tidegate-overlap"), Some("30/30"));
    }
    assert!(admin(&late)["backends"][0]["streams"][0]["snapshots_taken_over"].as_u64() >= Some(1));
    // and both go on hearing the engines themselves
    let holder = teach(&late, 1_000);
    until_found(&first, 1_000, &holder);
}

fn snapshots_left(process: &Process) -> u64 {
    let mut client = Client::connect_to_port(process.port);
    client.send("GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n");
    let metrics = client.answer();
    let name = "tidegate_kv_share_snapshots_total ";
    let mut lines = metrics.text().lines();
    let count = lines.find_map(|line| line.strip_prefix(name));
    count.unwrap().parse().unwrap()
}

fn first_leads(process: &Process) -> u64 {
    admin(process)["shared"]["streams_led"].as_u64().unwrap()
}

/// An engine that begins a stream and never ends it.
fn endless() -> Upstream {
    Upstream::start(|_, wire| {
        wire.stream_head();
        wire.chunk(delta("x"));
        wire.hang();
    })
}

#[test]
fn gateways_see_what_the_others_have_sent_until_those_are_gone() {
    let redis = Single::start();
    let engines = [endless(), endless()];
    let backends = engines[0].yaml("e0") + &engines[1].yaml("e1");
    let start = || {
        let process = sharing((&backends, ""), &redis.url());
        wait_until("both engines serve", DEADLINE, || serves(&process, MODEL));
        process
    };
    let (one, two) = (start(), start());
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut client = Client::connect_to_port(one.port);
        client.start_chat(chat_stream(&user("hi")));
        streams.push((client.head().backend().to_owned(), client));
    }
    for backend in ["e0", "e1"] {
        let sent = streams.iter().filter(|(at, _)| at == backend).count() as u64;
        wait_until("the other sees the load", DEADLINE, || {
            seen_load(&two, backend) == sent
        });
    }
    drop(one);
    wait_until("loads of a gateway that is gone lapse", DEADLINE, || {
        seen_load(&two, "e0") + seen_load(&two, "e1") == 0
    });
}

#[test]
fn without_redis_each_gateway_goes_on_alone_and_they_meet_again_when_it_is_back() {
    let engines = forgetful_engines();
    let mut redis = Single::start();
    let (one, two) = (
        gateway(&engines, &redis.url()),
        gateway(&engines, &redis.url()),
    );
    let holder = teach(&one, 1);
    wait_until("both share", DEADLINE, || {
        is_shared(&one) && is_shared(&two)
    });
    redis.kill();
    wait_until("both notice", DEADLINE, || {
        !is_shared(&one) && !is_shared(&two)
    });
    for process in [&one, &two] {
        assert_eq!(complete(process, &prompt(1, 30)).backend(), holder);
        let said = process.output();
        assert_eq!(said.matches("going on alone").count(), 1, "{said}");
    }
    let later = teach(&two, 2);
    until_found(&one, 2, &later);
    let left = || snapshots_left(&one) + snapshots_left(&two);
    let before = left();
    redis.start_again();
    wait_until("both share again", DEADLINE, || {
        is_shared(&one) && is_shared(&two)
    });
    let told = if holder == later { 1 } else { 2 };
    wait_until("all that was told is left again", DEADLINE, || {
        first_leads(&one) + first_leads(&two) == 2 && left() >= before + told
    });
    let third = gateway(&engines, &redis.url());
    until_found(&third, 1, &holder);
    until_found(&third, 2, &later);
}

#[test]
fn a_gateway_starts_and_serves_while_redis_is_away() {
    let engines = forgetful_engines();
    let mut redis = Single::start();
    redis.kill();
    let alone = gateway(&engines, &redis.url());
    let holder = teach(&alone, 1);
    assert_eq!(complete(&alone, &prompt(1, 30)).backend(), holder);
    assert!(!is_shared(&alone));
}
