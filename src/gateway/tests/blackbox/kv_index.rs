//! With engines that announce what they hold: prompts go to where their blocks are, over every
//! transport, and nothing about it can fail a request.

use crate::support::client::Answer;
use crate::support::tls::{self, Authority};
use crate::support::{Client, DEADLINE, Gateway, ms, wait_until};
use engine_sim::{EventEncoding, HashForm, ReplayFraming, Sim, SimConfig, SimHandle, SimStats};
use std::sync::mpsc;
use std::thread::JoinHandle;

/// Simulated engines on a system of their own; stopped when dropped.
pub struct Engines {
    pub urls: Vec<String>,
    /// Further settings of gateways in front of them.
    more: String,
    zmq: Vec<Option<(String, Option<String>)>>,
    commands: tokio::sync::mpsc::UnboundedSender<Command>,
    thread: Option<JoinHandle<()>>,
}

enum Command {
    Restart(usize, mpsc::Sender<()>),
    Stats(usize, mpsc::Sender<SimStats>),
    KvPort(usize, mpsc::Sender<u16>),
    Kill(usize, mpsc::Sender<()>),
    Stop,
}

impl Engines {
    pub fn start(configs: Vec<SimConfig>) -> Self {
        let (ready, started) = mpsc::channel();
        let (commands, mut inbox) = tokio::sync::mpsc::unbounded_channel();
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async move {
                let start = |config| Some(Sim::start(config).unwrap());
                let mut engines: Vec<Option<SimHandle>> = configs.into_iter().map(start).collect();
                let here = |engine: &Option<SimHandle>| {
                    let engine = engine.as_ref().unwrap();
                    let zmq = engine
                        .kv_endpoint()
                        .map(|live| (live, engine.replay_endpoint()));
                    (engine.url(), zmq)
                };
                ready
                    .send(engines.iter().map(here).collect::<Vec<_>>())
                    .unwrap();
                while let Some(command) = inbox.recv().await {
                    match command {
                        Command::Restart(at, done) => {
                            engines[at].as_ref().unwrap().restart_events().await;
                            done.send(()).unwrap();
                        }
                        Command::Stats(at, answer) => {
                            answer.send(engines[at].as_ref().unwrap().stats()).unwrap();
                        }
                        Command::KvPort(at, answer) => {
                            answer
                                .send(engines[at].as_ref().unwrap().kv_port())
                                .unwrap();
                        }
                        Command::Kill(at, done) => {
                            engines[at].take().unwrap().stop().await;
                            done.send(()).unwrap();
                        }
                        Command::Stop => return,
                    }
                }
            });
        });
        let (urls, zmq) = started.recv_timeout(DEADLINE).unwrap().into_iter().unzip();
        Engines {
            urls,
            more: String::new(),
            zmq,
            commands,
            thread: Some(thread),
        }
    }

    fn ask<T>(&self, command: impl FnOnce(mpsc::Sender<T>) -> Command) -> T {
        let (answer, answered) = mpsc::channel();
        self.commands.send(command(answer)).ok().unwrap();
        answered.recv_timeout(DEADLINE).unwrap()
    }

    /// Where its ZeroMQ events come from.
    pub fn live_endpoint(&self, at: usize) -> &str {
        &self.zmq[at].as_ref().unwrap().0
    }

    /// What it counts.
    pub fn stats(&self, at: usize) -> SimStats {
        self.ask(|answer| Command::Stats(at, answer))
    }

    /// Where it meets other engines.
    pub fn kv_port(&self, at: usize) -> u16 {
        self.ask(|answer| Command::KvPort(at, answer))
    }

    fn cached(&self, at: usize) -> u64 {
        self.stats(at).cached_tokens
    }

    fn gateway(&self, http: &str) -> Gateway {
        self.gateway_with(http, false, "")
    }

    /// With or without the probe prompt, and further keys of `kv_cache_index`.
    fn gateway_with(&self, http: &str, parity: bool, extra: &str) -> Gateway {
        let (backends, settings) = self.settings(self.urls.len(), (http, parity, extra));
        let gateway = Gateway::with(&backends, &settings);
        until_streams_are_open(&gateway, self.urls.len());
        gateway
    }

    /// The first so many engines, as `backends`, and the rest.
    fn settings(
        &self,
        count: usize,
        (http, parity, extra): (&str, bool, &str),
    ) -> (String, String) {
        let (mut backends, mut sources) = (String::new(), String::new());
        for (at, url) in self.urls.iter().enumerate().take(count) {
            backends += &format!("  - {{ name: e{at}, url: '{url}', models: [sim-model] }}\n");
            let (endpoint, replay) = match &self.zmq[at] {
                Some((live, replay)) => {
                    let replay = replay
                        .as_ref()
                        .map(|at| format!(", replay_endpoint: '{at}'"));
                    (live.clone(), replay.unwrap_or_default())
                }
                None => (url.replace("http", http) + "/v1/kv_events", String::new()),
            };
            sources += &format!(
                "  - {{ backend_name: e{at}, endpoint: '{endpoint}', reconnect_interval_ms: 50{replay} }}\n"
            );
        }
        let settings = format!(
            "selection_strategy: RoundRobin\nprefix_routing: {{ enabled: false }}\nkv_cache_index:\n  enabled: true\n  parity_check: {parity}\n{extra}  event_sources:\n{}",
            sources.replace("  - ", "    - ")
        );
        (backends, settings + &self.more)
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn until_streams_are_open(gateway: &Gateway, count: usize) {
    wait_until("every event stream is open", DEADLINE, || {
        let sources = gateway.inner.kv.as_ref().unwrap().sources.load();
        let mut all = sources.iter();
        sources.len() == count && all.all(|source| source.state.load().connected)
    });
}

fn http_engines(n: usize) -> Engines {
    Engines::start(vec![SimConfig::default(); n])
}

/// A prompt of token ids: `n` blocks of 16, and a little.
pub fn prompt(seed: u32, blocks: u32) -> String {
    let ids: Vec<String> = (0..blocks * 16 + 5)
        .map(|i| ((seed * 977 + i * 31) % 5000 + 10).to_string())
        .collect();
    format!(
        r#"{{"model":"sim-model","max_tokens":2,"temperature":0,"prompt":[{}]}}"#,
        ids.join(",")
    )
}

fn complete(gateway: &Gateway, body: &str) -> Answer {
    let answer = Client::connect(gateway).post("/v1/completions", "", body);
    assert_eq!(answer.status, 200, "{answer:?}");
    answer
}

fn applied(gateway: &Gateway) -> u64 {
    gateway.inner.kv.as_ref().unwrap().gauges.load().applied
}

/// Sends a new prompt and waits until its blocks are known; answers who has them.
fn teach(gateway: &Gateway, body: &str, blocks: u64) -> String {
    let before = applied(gateway);
    let holder = complete(gateway, body).backend().to_owned();
    wait_until("the prompt's blocks are known", DEADLINE, || {
        applied(gateway) >= before + blocks
    });
    holder
}

/// Four prompts, each again and again: always where it was first.
fn prompts_return_to_their_holders(gateway: &Gateway) {
    // gateways of one process share its counters
    let sum = |name: &str| gateway.metric(&format!("tidegate_kv_{name}_total"), &[]);
    let before = (sum("predicted_tokens"), sum("actual_tokens"));
    let holders: Vec<String> = (0..4).map(|n| teach(gateway, &prompt(n, 20), 20)).collect();
    assert!(
        holders.iter().any(|h| *h != holders[0]),
        "round robin spreads new prompts: {holders:?}"
    );
    for _ in 0..3 {
        for (n, holder) in holders.iter().enumerate() {
            let answer = complete(gateway, &prompt(n as u32, 20));
            assert_eq!(answer.backend(), holder, "{answer:?}");
            assert_eq!(answer.header("x-tidegate-route"), Some("kv_index"));
            assert_eq!(answer.header("x-tidegate-overlap"), Some("20/20"));
        }
    }
    gateway.assert_idle();
    // what the index said of 12 repeated prompts is what the engines say they had cached
    let grown = (
        sum("predicted_tokens") - before.0,
        sum("actual_tokens") - before.1,
    );
    assert_eq!(grown, (12.0 * 20.0 * 16.0, 12.0 * 20.0 * 16.0));
    assert_eq!(sum("prediction_error_tokens"), 0.0);
    let snapshot = gateway.inner.directory.load();
    assert!(
        snapshot
            .entries
            .iter()
            .all(|e| e.backend.live.queued_tokens() == 0)
    );
}

#[test]
fn prompts_go_where_their_blocks_are_by_websocket() {
    let engines = http_engines(2);
    prompts_return_to_their_holders(&engines.gateway("ws"));
    assert!(engines.cached(0) + engines.cached(1) >= 12 * 20 * 16);
}

#[test]
fn prompts_go_where_their_blocks_are_by_websocket_within_tls() {
    let mut engines = http_engines(2);
    let authority = Authority::new();
    for url in &mut engines.urls {
        let plain = url.trim_start_matches("http://").parse().unwrap();
        let address = tls::front(plain, &authority.sign(&["127.0.0.1"]));
        *url = format!("https://{address}");
    }
    let file = tls::shown(&authority.file());
    engines.more = format!("upstream: {{ tls: {{ ca_file: {file} }} }}\n");
    prompts_return_to_their_holders(&engines.gateway("ws")); // https becomes wss
}

#[test]
fn prompts_go_where_their_blocks_are_by_http() {
    let engines = http_engines(2);
    prompts_return_to_their_holders(&engines.gateway("http"));
}

pub fn zmq_config(change: impl Fn(&mut SimConfig)) -> SimConfig {
    let mut config = SimConfig::default();
    config.kv_events.enable_kv_cache_events = true;
    config.kv_events.endpoint = "tcp://127.0.0.1:0".into();
    config.kv_events.replay_endpoint = Some("tcp://127.0.0.1:0".into());
    change(&mut config);
    config
}

#[test]
fn prompts_go_where_their_blocks_are_by_zeromq_in_every_encoding() {
    for (encoding, hashes, framing) in [
        (EventEncoding::Oldest, HashForm::Int, ReplayFraming::Old),
        (EventEncoding::Array, HashForm::Bytes, ReplayFraming::New),
        (EventEncoding::Map, HashForm::Int, ReplayFraming::New),
    ] {
        let config = zmq_config(|config| {
            config.kv_event_quirks.encoding = encoding;
            config.kv_event_quirks.hashes = hashes;
            config.kv_event_quirks.replay_framing = framing;
        });
        let engines = Engines::start(vec![config.clone(), config]);
        prompts_return_to_their_holders(&engines.gateway("tcp"));
    }
}

/// Two free ports side by side, below those that the system hands out, so that nobody else takes one
/// of them meanwhile.
fn neighbouring_ports() -> (u16, u16) {
    let is_free = |port: u16| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
    let mut ports = std::iter::repeat_with(|| fastrand::u16(12_000..32_000)).take(1000);
    let free = ports.find(|port| is_free(*port) && is_free(port + 1));
    let first = free.expect("two ports side by side are free");
    (first, first + 1)
}

#[test]
fn every_ranks_stream_is_read_and_a_silent_one_shows() {
    let (first, second) = neighbouring_ports();
    let rank = |port: u16| {
        zmq_config(|config| {
            config.kv_events.endpoint = format!("tcp://*:{port}"); // one without * would connect
            config.kv_events.replay_endpoint = None;
        })
    };
    // one backend whose ranks are two engines; only the first one serves requests
    let engines = Engines::start(vec![rank(first), rank(second)]);
    let gateway = Gateway::with(
        &format!(
            "  - {{ name: e, url: '{}', models: [sim-model] }}\n",
            engines.urls[0]
        ),
        &format!(
            "kv_cache_index:\n  enabled: true\n  parity_check: false\n  event_sources:\n    - {{ backend_name: e, endpoint: 'tcp://127.0.0.1:{first}', dp_size: 2, reconnect_interval_ms: 50 }}"
        ),
    );
    let metric = |name: &str, rank: &str| {
        gateway.metric(name, &["backend=\"e\"", &format!("rank=\"{rank}\"")])
    };
    wait_until("both streams are open", DEADLINE, || {
        ["0", "1"]
            .iter()
            .all(|rank| metric("tidegate_kv_stream_connected", rank) == 1.0)
    });
    teach(&gateway, &prompt(1, 10), 10);
    assert!(metric("tidegate_kv_stream_last_event_seconds", "0") > 0.0);
    assert_eq!(metric("tidegate_kv_stream_last_event_seconds", "1"), 0.0);
}

#[test]
fn a_gateway_that_comes_late_learns_from_the_replay() {
    let engines = Engines::start(vec![zmq_config(|_| {}), zmq_config(|_| {})]);
    let early = engines.gateway("tcp");
    let holder = teach(&early, &prompt(7, 30), 30);
    let late = engines.gateway("tcp");
    wait_until("the late one knows", DEADLINE, || applied(&late) >= 30);
    let answer = complete(&late, &prompt(7, 30));
    assert_eq!(
        (answer.backend(), answer.header("x-tidegate-overlap")),
        (&*holder, Some("30/30"))
    );
}

#[test]
fn events_that_get_lost_on_the_way_are_replayed() {
    let lossy = zmq_config(|config| config.kv_event_quirks.drop_every = Some(3));
    let engines = Engines::start(vec![lossy.clone(), lossy]);
    let gateway = engines.gateway("tcp");
    let holders: Vec<String> = (0..12)
        .map(|n| complete(&gateway, &prompt(n, 10)).backend().to_owned())
        .collect();
    // the last may wait for a successor to show the gap
    wait_until("all but the last are known", DEADLINE, || {
        applied(&gateway) >= 10 * 10
    });
    let known = (0..10).filter(|n| {
        let answer = complete(&gateway, &prompt(*n, 10));
        answer.backend() == holders[*n as usize]
    });
    assert_eq!(known.count(), 10);
    assert!(gateway.metric("tidegate_kv_stream_gaps_total", &["kind=\"gap\""]) > 0.0);
    assert_eq!(
        gateway.metric("tidegate_kv_stream_gaps_total", &["kind=\"lost\""]),
        0.0
    );
}

/// Blocks of a prompt that a backend has announced, as the router explains it.
fn announced_blocks(gateway: &Gateway, backend: &str, body: &str) -> u64 {
    let told = Client::connect(gateway)
        .post("/admin/explain", "", body)
        .json();
    let mut candidates = told["candidates"].as_array().unwrap().iter();
    let overlap = &candidates.find(|c| c["backend"] == *backend).unwrap()["overlap"];
    match overlap["by"] == "tokens" && overlap["just_sent"] == false {
        true => overlap["blocks"].as_u64().unwrap(),
        false => 0,
    }
}

#[test]
fn a_restarted_engine_is_not_believed_to_hold_what_it_held() {
    let engines = Engines::start(vec![zmq_config(|_| {}), zmq_config(|_| {})]);
    let gateway = engines.gateway("tcp");
    let holder = teach(&gateway, &prompt(1, 20), 20);
    // so many frames that the new numbers fall below the old ones
    for n in 0..10 {
        teach(&gateway, &prompt(50 + n, 5), 5);
    }
    let at: usize = holder[1..].parse().unwrap();
    engines.ask(|done| Command::Restart(at, done));
    // its next event shows the fall of the numbers; round robin reaches it with one of two
    for n in 0..4 {
        complete(&gateway, &prompt(100 + n, 5));
    }
    wait_until("the restart is noticed", DEADLINE, || {
        gateway.metric("tidegate_kv_stream_gaps_total", &["kind=\"restart\""]) > 0.0
    });
    wait_until("the old blocks are forgotten", DEADLINE, || {
        announced_blocks(&gateway, &holder, &prompt(1, 20)) == 0
    });
}

/// Where the simulator's own vocabulary and chat template lie.
const VOCABULARY: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../load-tests/engine-sim/assets"
);

fn until_parity(gateway: &Gateway, expected: &str) {
    wait_until("every engine was compared", DEADLINE, || {
        let kv = gateway.inner.kv.as_ref().unwrap();
        let members = kv.members.load();
        let members = members.iter();
        members
            .map(|m| m.standing.parity().as_str())
            .all(|parity| parity == expected)
    });
}

fn modes(gateway: &Gateway) -> Vec<&'static str> {
    let members = gateway.inner.kv.as_ref().unwrap().members.load();
    let members = members.iter();
    members.map(|m| m.standing.mode().0.as_str()).collect()
}

#[test]
fn a_probe_prompt_shows_that_tokens_and_blocks_are_as_expected() {
    let by_http = http_engines(2);
    let gateway = by_http.gateway_with("http", true, "");
    until_parity(&gateway, "holds");
    assert_eq!(modes(&gateway), ["exact"; 2]);
    let own = format!("  tokenizers: {{ sim-model: '{VOCABULARY}' }}\n");
    let by_zmq = Engines::start(vec![zmq_config(|_| {}), zmq_config(|_| {})]);
    let gateway = by_zmq.gateway_with("tcp", true, &own);
    until_parity(&gateway, "holds");
    assert_eq!(modes(&gateway), ["exact"; 2]);
}

#[test]
fn an_engine_that_left_the_settings_and_returned_is_compared_anew() {
    let engines = http_engines(2);
    let gateway = engines.gateway_with("http", true, "");
    until_parity(&gateway, "holds");
    for count in [1, 2] {
        let (backends, settings) = engines.settings(count, ("http", true, ""));
        let reloaded = gateway.reload(&backends, &settings);
        assert_eq!(reloaded.status, 200, "{}", reloaded.text());
        until_streams_are_open(&gateway, count);
    }
    until_parity(&gateway, "holds");
    assert_eq!(modes(&gateway), ["exact"; 2]);
}

#[test]
fn a_chat_template_that_is_not_the_engines_is_found_out_at_the_start() {
    let other = std::env::temp_dir().join(format!("tidegate-vocabulary-{}", std::process::id()));
    std::fs::create_dir_all(&other).unwrap();
    let copied = std::fs::copy(
        format!("{VOCABULARY}/tokenizer.json"),
        other.join("tokenizer.json"),
    );
    let template = "{{ messages[0].content }}<|eot_id|>";
    copied
        .and_then(|_| std::fs::write(other.join("chat_template.jinja"), template))
        .unwrap();
    let own = format!("  tokenizers: {{ sim-model: '{}' }}\n", other.display());
    let engines = http_engines(2);
    let gateway = engines.gateway_with("http", true, &own);
    until_parity(&gateway, "tokens_differ");
    assert_eq!(modes(&gateway), ["approximate"; 2]);
    std::fs::remove_dir_all(&other).unwrap();
}

/// A chat of so many turns, each long enough to fill blocks.
fn long_chat(turns: usize) -> String {
    let text = "The tide comes in and the tide goes out again. ".repeat(30);
    let turn = |n: usize| {
        let role = ["user", "assistant"][n % 2];
        format!(r#"{{"role":"{role}","content":"{n} {text}"}}"#)
    };
    let messages: Vec<String> = (0..turns).map(turn).collect();
    format!(
        r#"{{"model":"sim-model","max_tokens":2,"temperature":0,"messages":[{}]}}"#,
        messages.join(",")
    )
}

#[test]
fn chats_are_tokenised_here_by_the_models_own_vocabulary_and_template() {
    let engines = http_engines(2);
    let own = format!("  tokenizers: {{ sim-model: '{VOCABULARY}' }}\n");
    let gateway = engines.gateway_with("http", true, &own);
    until_parity(&gateway, "holds");
    let chat = |turns| {
        let answer = Client::connect(&gateway).post("/v1/chat/completions", "", long_chat(turns));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer
    };
    let home = chat(1).backend().to_owned();
    let mut held = 0;
    for turns in [3, 5, 7] {
        // what the engine has announced of the last turn is found in this one, before it is sent
        wait_until(
            "the last turn's blocks are found in this one",
            DEADLINE,
            || announced_blocks(&gateway, &home, &long_chat(turns)) > held,
        );
        held = announced_blocks(&gateway, &home, &long_chat(turns));
        let before = gateway.metric("tidegate_kv_prediction_error_tokens_total", &[]);
        let answer = chat(turns);
        assert_eq!(answer.backend(), home);
        let overlap = answer.header("x-tidegate-overlap").unwrap().to_owned();
        assert!(overlap.starts_with(&format!("{held}/")), "{overlap}");
        let error = gateway.metric("tidegate_kv_prediction_error_tokens_total", &[]) - before;
        assert!(
            error < 32.0,
            "what was predicted was cached: {error} tokens off"
        );
    }
}

#[test]
fn a_long_chat_is_tokenised_by_an_engine_and_its_next_turn_returns() {
    let engines = http_engines(2);
    let gateway = engines.gateway("http");
    let text = "The tide comes in and the tide goes out again. ".repeat(60);
    let body = |turns: &str| {
        format!(
            r#"{{"model":"sim-model","max_tokens":2,"temperature":0,"messages":[{{"role":"user","content":"{text}"}}{turns}]}}"#
        )
    };
    let chat = |body: &str| Client::connect(&gateway).post("/v1/chat/completions", "", body);
    let before = applied(&gateway);
    let first = chat(&body(""));
    assert_eq!(first.status, 200, "{first:?}");
    wait_until("its blocks are known", DEADLINE, || {
        applied(&gateway) > before + 20
    });
    let next = body(r#",{"role":"assistant","content":"Yes."},{"role":"user","content":"Why?"}"#);
    // an engine may take longer than a request waits for tokens: then they are there for the next
    wait_until(
        "the first turn's blocks are found in the next",
        DEADLINE,
        || announced_blocks(&gateway, first.backend(), &next) > 20,
    );
    let answer = chat(&next);
    assert_eq!(answer.header("x-tidegate-route"), Some("kv_index"));
    assert_eq!(answer.backend(), first.backend());
    gateway.assert_idle();
}

#[test]
fn an_index_that_dies_costs_no_request_and_learns_everything_again() {
    use actors::support::fault::Panic;
    let engines = Engines::start(vec![zmq_config(|_| {}), zmq_config(|_| {})]);
    let gateway = engines.gateway("tcp");
    let holder = teach(&gateway, &prompt(1, 20), 20);
    let shard = gateway
        .inner
        .kv
        .as_ref()
        .unwrap()
        .shard
        .load()
        .as_ref()
        .clone()
        .unwrap();
    shard.do_send(Panic);
    for _ in 0..20 {
        complete(&gateway, &prompt(1, 20));
        std::thread::sleep(ms(2));
    }
    wait_until("the fresh shard was fed", DEADLINE, || {
        announced_blocks(&gateway, &holder, &prompt(1, 20)) == 20
    });
    let restarts = ["actor=\"index_shard\""];
    assert_eq!(
        gateway.metric("tidegate_actor_restarts_total", &restarts),
        1.0
    );
    assert!(holder.starts_with('e'));
    gateway.assert_idle();
}

#[test]
fn an_engine_that_dies_takes_its_stream_along_and_no_request() {
    let engines = http_engines(2);
    let gateway = engines.gateway("http");
    let holder = teach(&gateway, &prompt(1, 20), 20);
    let at: usize = holder[1..].parse().unwrap();
    engines.ask(|done| Command::Kill(at, done));
    for _ in 0..10 {
        assert_ne!(complete(&gateway, &prompt(1, 20)).backend(), holder);
    }
    let series = format!("backend=\"{holder}\"");
    wait_until("its stream is seen as closed", DEADLINE, || {
        gateway.metric("tidegate_kv_stream_connected", &[&series]) == 0.0
    });
}

#[test]
fn a_reload_forgets_nothing_of_engines_that_stay_and_everything_of_those_that_leave() {
    let engines = http_engines(3);
    let gateway = engines.gateway("http");
    let holders: Vec<String> = (0..6)
        .map(|n| teach(&gateway, &prompt(n, 20), 20))
        .collect();
    let routed = |n: u32| {
        let answer = complete(&gateway, &prompt(n, 20));
        let route = answer.header("x-tidegate-route").unwrap().to_owned();
        (answer.backend().to_owned(), route)
    };
    let entries = || gateway.inner.kv.as_ref().unwrap().gauges.load().entries;
    let before = entries();
    // something else changes, and an engine leaves
    let (backends, settings) = engines.settings(2, ("http", false, ""));
    let settings = settings + "retry: {max_attempts: 1}\n";
    let said = gateway.reload(&backends, &settings).json();
    assert_eq!(said["backends"]["removed"][0], "e2", "{said}");
    until_streams_are_open(&gateway, 2);
    wait_until("what it held is forgotten", DEADLINE, || entries() < before);
    for (n, holder) in holders.iter().enumerate() {
        let (backend, route) = routed(n as u32);
        if holder == "e2" {
            assert_ne!(backend, "e2");
        } else {
            assert_eq!(
                (backend.as_str(), route.as_str()),
                (holder.as_str(), "kv_index")
            );
        }
    }
    assert!(holders.iter().any(|holder| holder == "e2"), "{holders:?}");
    // it comes back, and tells all that it holds
    let (backends, settings) = engines.settings(3, ("http", false, ""));
    gateway.reload(&backends, &settings);
    gateway.wait_for_state("e2", "healthy");
    until_streams_are_open(&gateway, 3);
    wait_until("what it tells is known", DEADLINE, || entries() >= before);
    assert_eq!(
        gateway.metric("tidegate_kv_stream_resyncs_total", &["e0"]),
        1.0
    );
    gateway.assert_idle();
}
