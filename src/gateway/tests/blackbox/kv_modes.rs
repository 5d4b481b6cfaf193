//! What is believed of engines that announce nothing, or whose announcements are wrong: guesses by
//! text, demotion, ranks. Engines here follow scripts, so that they can be wrong on purpose.

use crate::reload::held;
use crate::support::client::Answer;
use crate::support::{Client, DEADLINE, Gateway, Request, Signal, Upstream, Wire, ms, wait_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub const GUESSING: &str = "selection_strategy: RoundRobin
prefix_routing: { enabled: false }
kv_cache_index: { enabled: true }
";

/// Answers a completion that took so many tokens of a prompt of 1000 from its cache.
pub fn completion(wire: &mut Wire, cached: u64) {
    wire.json(
        "200 OK",
        &format!(
            r#"{{"object":"text_completion","choices":[{{"index":0,"text":"x","finish_reason":"stop"}}],"usage":{{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001,"prompt_tokens_details":{{"cached_tokens":{cached}}}}}}}"#
        ),
    );
}

/// A chat of so many turns after a system prompt, each long enough to count.
pub fn conversation(name: &str, turns: usize) -> String {
    let turn = |n: usize| {
        format!(
            r#",{{"role":"user","content":"{name} {n} {}"}}"#,
            "says more ".repeat(100)
        )
    };
    let turns: String = (0..turns).map(turn).collect();
    format!(
        r#"{{"model":"m","messages":[{{"role":"system","content":"You are {name}."}}{turns}]}}"#
    )
}

fn mode(gateway: &Gateway, backend: &str) -> &'static str {
    let kv = gateway.inner.kv.as_ref().unwrap();
    let members = kv.members.load();
    let member = members.iter().find(|m| *m.backend == *backend);
    member.unwrap().standing.mode().0.as_str()
}

fn two(script: impl Fn(&Request, &mut Wire) + Clone + Send + Sync + 'static) -> [Upstream; 2] {
    [Upstream::start(script.clone()), Upstream::start(script)]
}

#[test]
pub fn conversations_stay_where_they_were_though_the_engines_announce_nothing() {
    let [a, b] = two(|_, wire| completion(wire, 0));
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    assert_eq!(mode(&gateway, "a"), "approximate");
    let names = ["anna", "bert", "cleo", "dora"];
    let first: Vec<String> = names
        .iter()
        .map(|name| gateway.chat(&conversation(name, 2)).backend().to_owned())
        .collect();
    assert_ne!(first[0], first[1], "new ones take turns: {first:?}");
    for turns in 3..8 {
        for (name, home) in names.iter().zip(&first) {
            let answer = gateway.chat(&conversation(name, turns));
            assert_eq!(answer.backend(), home, "{name}: {answer:?}");
            assert_eq!(answer.header("x-tidegate-route"), Some("kv_index"));
        }
    }
}

#[test]
fn a_prompt_is_believed_to_be_cached_from_its_first_token_on_however_long_its_answer_takes() {
    let go = Signal::new();
    let [a, b] = [held(go.clone()), held(go.clone())];
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    let body = conversation("anna", 3).replacen('{', r#"{"stream":true,"#, 1);
    let mut client = Client::connect(&gateway);
    client.start_chat(body.clone());
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "first"));
    let home = answer.backend().to_owned();
    wait_until("more than that it was just sent is known", DEADLINE, || {
        let told = Client::connect(&gateway).post("/admin/explain", "", body.clone());
        let told = told.json();
        let mut candidates = told["candidates"].as_array().unwrap().iter();
        let overlap = &candidates.find(|c| c["backend"] == *home).unwrap()["overlap"];
        overlap["by"] == "text" && overlap["just_sent"] == false && overlap["blocks"] != 0
    });
    go.raise();
    assert!(client.read_until(&mut answer, "[DONE]"));
}

#[test]
fn without_leave_to_guess_backends_are_blind_and_take_turns() {
    let [a, b] = two(|_, wire| completion(wire, 0));
    let off = GUESSING.replace("enabled: true", "enabled: true, approximate: false");
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], &off);
    assert_eq!(mode(&gateway, "a"), "blind");
    let asked = |n| gateway.chat(&conversation("anna", n)).backend().to_owned();
    assert_ne!(asked(2), asked(3));
}

#[test]
fn a_request_that_failed_leaves_no_belief_behind() {
    let refuses = Upstream::start(|_, wire| wire.reset());
    let works = Upstream::start(|_, wire| completion(wire, 0));
    let gateway = Gateway::start(
        &[("bad", &refuses), ("good", &works)],
        &format!("{GUESSING}circuit_breaker: {{ enabled: false }}"),
    );
    for turns in 2..6 {
        let answer = gateway.chat(&conversation("anna", turns));
        assert_eq!((answer.status, answer.backend()), (200, "good"));
    }
    assert!(
        refuses.count() <= 1,
        "only the first turn may have tried it"
    );
}

#[test]
fn a_prompt_without_a_full_block_is_counted_as_too_short_and_not_as_one_without_events() {
    let [a, b] = two(|_, wire| completion(wire, 0));
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    let counted = |result| {
        gateway.metric(
            "tidegate_kv_lookups_total",
            &[&format!("result=\"{result}\"")],
        )
    };
    gateway.chat(r#"{"model":"m","messages":[{"role":"user","content":"short"}]}"#);
    assert_eq!((counted("too_short"), counted("no_events")), (1.0, 0.0));
}

#[test]
fn an_engine_that_throws_prompts_out_is_believed_to_hold_less_of_them() {
    let [a, b] = two(|_, wire| completion(wire, 0));
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    let known = |name: &str, home: &str| {
        let body = conversation(name, 6);
        let told = Client::connect(&gateway).post("/admin/explain", "", body);
        let told = told.json();
        let mut candidates = told["candidates"].as_array().unwrap().iter();
        let overlap = &candidates.find(|c| c["backend"] == *home).unwrap()["overlap"];
        overlap["blocks"].as_u64()
    };
    let names: Vec<String> = (0..30).map(|n| format!("client {n}")).collect();
    let ask = |name: &String| gateway.chat(&conversation(name, 6)).backend().to_owned();
    let homes: Vec<String> = names.iter().map(ask).collect();
    let (first, home) = (&names[0], &homes[0]);
    let of_home = names.iter().zip(&homes).filter(|(_, of)| *of == home);
    let last = of_home.map(|(name, _)| name).next_back().unwrap();
    wait_until("all of them are believed", DEADLINE, || {
        known(first, home) > Some(5) && known(last, home) > Some(5)
    });
    // the last of them is found nowhere, again and again; fifty times would end all guesses
    for _ in 0..30 {
        assert_eq!(ask(last), *home);
    }
    wait_until("what was used longest ago is given up", DEADLINE, || {
        known(first, home) == Some(0)
    });
    assert!(known(last, home) > Some(5), "what was just used is not");
}

#[test]
fn guesses_that_are_wrong_fifty_times_are_given_up() {
    let [a, b] = two(|_, wire| completion(wire, 0)); // nothing is ever cached
    let gateway = Gateway::start(&[("a", &a), ("b", &b)], GUESSING);
    let body = conversation("anna", 6);
    let home = gateway.chat(&body).backend().to_owned();
    let mut asked = 1;
    wait_until("the guesses are given up", DEADLINE, || {
        gateway.chat(&body);
        asked += 1;
        mode(&gateway, &home) == "blind"
    });
    assert!(asked > 50, "after {asked} requests");
    let backend = format!(r#"backend="{home}""#);
    let labels = [&*backend, r#"mode="blind""#];
    assert_eq!(gateway.metric("tidegate_kv_mode", &labels), 1.0);
}

/// Eight blocks of 16 tokens, as an engine announces them and as a client asks for them.
fn tokens() -> Vec<u32> {
    (0..128).map(|i| i * 7 % 1000 + 10).collect()
}

pub fn token_prompt() -> String {
    format!(r#"{{"model":"m","max_tokens":1,"prompt":{:?}}}"#, tokens())
}

/// Serves the event stream: one frame of this rank, and then silence.
fn announce(wire: &mut Wire, rank: u32, events: &str) {
    let frame = format!(r#"{{"seq":0,"ts":1.0,"dp_rank":{rank},"events":[{events}]}}"#);
    wire.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n");
    wire.write(format!("id: 0\ndata: {frame}\n\n"));
    wire.hang();
}

fn stored() -> String {
    let hashes: Vec<u32> = (1..9).collect();
    format!(
        r#"{{"type":"cache_created","block_hashes":{hashes:?},"parent_block_hash":null,"token_ids":{:?},"block_size":16,"medium":"GPU"}}"#,
        tokens()
    )
}

/// An engine that announces the prompt on a rank, and claims to have so many of its tokens cached.
pub fn announcing(rank: u32, cached: Arc<AtomicU64>) -> Upstream {
    Upstream::start(move |request, wire| {
        let upgrade = request.header("upgrade").is_some();
        match request.path() {
            "/v1/kv_events" if upgrade => {
                wire.json("404 Not Found", "{}");
            }
            "/v1/kv_events" => announce(wire, rank, &stored()),
            _ => completion(wire, cached.load(Relaxed)),
        }
    })
}

fn gateway_with_events(
    announcer: &Upstream,
    other: &Upstream,
    source: &str,
    parity: bool,
) -> Gateway {
    let events = format!("http://{}/v1/kv_events", announcer.address);
    let index = format!("\n  enabled: true\n  parity_check: {parity}");
    let settings = format!(
        "{}  event_sources:\n    - {{ backend_name: a, endpoint: '{events}', {source} }}\n",
        GUESSING.replace("{ enabled: true }", &index)
    );
    Gateway::start(&[("a", announcer), ("b", other)], &settings)
}

pub fn exact_gateway(announcer: &Upstream, other: &Upstream, dp_size: u32) -> Gateway {
    let gateway = gateway_with_events(announcer, other, &format!("dp_size: {dp_size}"), false);
    wait_until("the announced blocks are known", DEADLINE, || {
        gateway.inner.kv.as_ref().unwrap().gauges.load().applied >= 8
    });
    gateway
}

fn ask(gateway: &Gateway) -> Answer {
    Client::connect(gateway).post("/v1/completions", "", token_prompt())
}

#[test]
fn the_rank_that_holds_a_prompt_is_asked_for_and_no_other_is_named() {
    let cached = Arc::new(AtomicU64::new(0));
    let (a, b) = (
        announcing(1, cached),
        Upstream::start(|_, wire| completion(wire, 0)),
    );
    let gateway = exact_gateway(&a, &b, 2);
    assert_eq!(mode(&gateway, "a"), "exact");
    let answer = ask(&gateway);
    assert_eq!(answer.backend(), "a", "{answer:?}");
    let completions = |engine: &Upstream| -> Vec<Request> {
        let requests = engine.requests().into_iter();
        requests.filter(|r| r.path() == "/v1/completions").collect()
    };
    let rank = |request: &Request| request.header("x-data-parallel-rank").map(<[u8]>::to_vec);
    assert_eq!(rank(&completions(&a)[0]), Some(b"1".to_vec()));
    for n in 0..4 {
        let body = format!(r#"{{"model":"m","max_tokens":1,"prompt":[{n},2,3]}}"#);
        Client::connect(&gateway).post("/v1/completions", "", body);
    }
    let others = completions(&a).into_iter().skip(1).chain(completions(&b));
    assert!(others.into_iter().all(|request| rank(&request).is_none()));
}

#[test]
fn events_that_predict_wrongly_are_no_longer_believed() {
    let cached = Arc::new(AtomicU64::new(120));
    let a = announcing(0, cached.clone());
    let b = Upstream::start(|_, wire| completion(wire, 0));
    let gateway = exact_gateway(&a, &b, 1);
    for _ in 0..60 {
        assert_eq!(ask(&gateway).backend(), "a");
    }
    assert_eq!(
        mode(&gateway, "a"),
        "exact",
        "right within a tenth of the prompt"
    );
    cached.store(900, Relaxed);
    wait_until("the events are no longer believed", DEADLINE, || {
        ask(&gateway);
        mode(&gateway, "a") != "exact"
    });
    gateway.assert_idle();
}

/// An engine that announces something after each prompt that it computed, and never what it computed.
fn lying() -> Upstream {
    let computed = Arc::new(AtomicU64::new(0));
    Upstream::start(move |request, wire| match request.path() {
        "/v1/kv_events" if request.header("upgrade").is_some() => {
            wire.json("404 Not Found", "{}");
        }
        "/v1/kv_events" => {
            wire.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n");
            let mut announced = 0;
            while wire.is_open() {
                wire.look(ms(5));
                while announced < computed.load(Relaxed) {
                    let event = stored();
                    let frame = format!(r#"{{"seq":{announced},"ts":1.0,"events":[{event}]}}"#);
                    wire.write(format!("id: {announced}\ndata: {frame}\n\n"));
                    announced += 1;
                }
            }
        }
        "/tokenize" => {
            let tokens: Vec<u32> = (0..200).collect();
            wire.json("200 OK", &format!(r#"{{"tokens":{tokens:?}}}"#));
        }
        _ => {
            computed.fetch_add(1, Relaxed);
            completion(wire, 0);
        }
    })
}

#[test]
fn an_engine_whose_events_lack_what_it_computed_is_not_believed() {
    let (a, b) = (lying(), Upstream::start(|_, wire| completion(wire, 0)));
    let gateway = gateway_with_events(&a, &b, "dp_size: 1", true);
    wait_until("the probe prompt was compared", DEADLINE, || {
        let kv = gateway.inner.kv.as_ref().unwrap();
        kv.members.load()[0].standing.parity().as_str() == "blocks_differ"
    });
    assert_eq!(mode(&gateway, "a"), "approximate");
    let computed = |request: &Request| request.path() == "/v1/completions";
    let probes: Vec<Request> = a.requests().into_iter().filter(computed).collect();
    assert_eq!(probes.len(), 2, "asked twice before it is acted on");
    let prompt = probes[0].json()["prompt"].as_array().unwrap().len();
    assert_eq!(prompt, 200, "what its own /tokenize made");
}
