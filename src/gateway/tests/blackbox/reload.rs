//! Other settings for a gateway that runs: by request, by signal, and by a file that changes.

use crate::support::client::Answer;
use crate::support::process::{Process, SettingsFile, run};
use crate::support::sse::{DONE, delta, finish};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, chat, chat_stream, client, user, wait_until,
};
use serde_json::Value;

fn engine() -> Upstream {
    Upstream::json(r#"{"choices":[],"model":"m"}"#)
}

/// Streams one event, and goes on when the signal is raised.
pub fn held(go: Signal) -> Upstream {
    Upstream::start(move |_, wire| {
        wire.stream_head();
        wire.chunk(delta("first"));
        go.wait();
        wire.chunk(finish("stop"));
        wire.chunk(DONE);
        wire.end();
    })
}

fn ask(gateway: &Gateway) -> Answer {
    gateway.chat(&chat(&user("hi")))
}

fn names(value: &Value) -> Vec<&str> {
    let all = value.as_array().unwrap().iter();
    all.map(|name| name.as_str().unwrap()).collect()
}

fn opened(gateway: &Gateway, count: usize) -> Vec<(Client, Answer)> {
    let streams = (0..count).map(|_| {
        let mut client = Client::connect(gateway);
        client.start_chat(chat_stream(&user("hi")));
        let mut answer = client.head();
        assert!(client.read_until(&mut answer, "first"));
        (client, answer)
    });
    streams.collect()
}

fn all_end_well(streams: Vec<(Client, Answer)>) {
    for (mut client, mut answer) in streams {
        assert!(
            client.read_until(&mut answer, "[DONE]"),
            "{}",
            answer.text()
        );
    }
}

#[test]
fn an_added_backend_serves_and_a_removed_one_finishes_what_it_began() {
    let go = Signal::new();
    let (old, new) = (held(go.clone()), engine());
    let gateway = Gateway::start(&[("old", &old)], "");
    let streams = opened(&gateway, 3);
    let reloaded = gateway.reload(&new.yaml("new"), "");
    assert_eq!(reloaded.status, 200, "{}", reloaded.text());
    let said = reloaded.json();
    assert_eq!(said["result"], "applied");
    assert_eq!(names(&said["backends"]["added"]), ["new"]);
    assert_eq!(names(&said["backends"]["removed"]), ["old"]);
    gateway.wait_for_state("new", "healthy");
    for _ in 0..4 {
        assert_eq!(ask(&gateway).backend(), "new");
    }
    go.raise();
    all_end_well(streams);
    gateway.assert_idle();
    assert_eq!(old.count(), 3);
}

#[test]
fn what_did_not_change_keeps_its_counts_its_breaker_and_its_drain() {
    let go = Signal::new();
    let (busy, failing, drained) = (
        held(go.clone()),
        Upstream::start(|_, wire| {
            wire.json("500 Oh", "{}");
        }),
        engine(),
    );
    let backends = busy.yaml_for("busy", &["m"])
        + &failing.yaml_for("failing", &["other"])
        + &drained.yaml_for("drained", &["third"]);
    let settings = "circuit_breaker: {failure_threshold: 2, recovery_timeout: 1h}\n";
    let gateway = Gateway::with(&backends, settings);
    for name in ["busy", "failing", "drained"] {
        gateway.wait_for_state(name, "healthy");
    }
    for _ in 0..2 {
        client::post(
            &gateway,
            "/v1/chat/completions",
            r#"{"model":"other","messages":[]}"#,
        );
    }
    gateway.wait_for_breaker("failing", "open");
    gateway.set_draining("drained", true);
    let streams = opened(&gateway, 50);
    assert_eq!(gateway.in_flight("busy"), 50);
    // another weight for the busy one, and a setting that is of none
    let heavier = backends.replace("name: busy", "name: busy, weight: 3");
    assert_ne!(heavier, backends);
    let reloaded = gateway.reload(
        &heavier,
        &(settings.to_owned() + "retry: {max_attempts: 1}\n"),
    );
    let said = reloaded.json();
    assert_eq!(
        names(&said["applied"]),
        ["backends[busy].weight", "retry.max_attempts"]
    );
    assert_eq!(names(&said["backends"]["changed"]), ["busy"]);
    assert_eq!(gateway.in_flight("busy"), 50);
    assert_eq!(gateway.breaker("failing"), "open");
    gateway.wait_for_state("drained", "draining");
    gateway.wait_for_state("busy", "healthy");
    go.raise();
    all_end_well(streams);
    gateway.assert_idle();
}

#[test]
fn a_backend_at_another_url_is_another_engine() {
    let (before, after) = (engine(), engine());
    let gateway = Gateway::start(&[("a", &before)], "");
    let reloaded = gateway.reload(&after.yaml("a"), "");
    assert_eq!(names(&reloaded.json()["backends"]["added"]), ["a"]);
    gateway.wait_for_state("a", "healthy");
    assert_eq!(ask(&gateway).status, 200);
    assert_eq!((before.count(), after.count()), (0, 1));
}

#[test]
fn faulty_settings_change_nothing_and_name_the_key() {
    let a = engine();
    let gateway = Gateway::start(&[("a", &a)], "");
    let refused = gateway.reload(&a.yaml("a"), "retry: {max_attemps: 3}");
    assert_eq!(refused.status, 400);
    let error = &refused.json()["error"];
    assert_eq!(error["code"], "invalid_settings");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("retry.max_attemps: unknown key, did you mean `retry.max_attempts`?"),
        "{message}"
    );
    assert_eq!(ask(&gateway).status, 200);
    assert!(gateway.metric("tidegate_reloads_total", &["rejected"]) == 1.0);
    let same = gateway.reload(&a.yaml("a"), "");
    assert_eq!(same.json()["result"], "unchanged");
}

#[test]
fn what_only_a_restart_can_change_is_named_and_stays_named() {
    let a = engine();
    let gateway = Gateway::start(&[("a", &a)], "");
    let other = "server: {max_request_body: 1KiB}\nresponse_cache: {enabled: true}\nretry: {max_attempts: 1}";
    let waiting = ["response_cache.enabled", "server.max_request_body"];
    let said = gateway.reload(&a.yaml("a"), other).json();
    assert_eq!(names(&said["needs_restart"]), waiting);
    assert_eq!(names(&said["applied"]), ["retry.max_attempts"]);
    // and it is not in effect
    assert_eq!(gateway.chat(&chat(&user(&"x".repeat(4096)))).status, 200);
    assert_eq!(ask(&gateway).header("x-cache"), None);
    let again = gateway.reload(&a.yaml("a"), other).json();
    assert_eq!(again["result"], "unchanged");
    assert_eq!(names(&again["needs_restart"]), waiting);
}

#[test]
fn keys_and_aliases_and_strategies_are_taken_over() {
    let (a, b) = (engine(), engine());
    let backends = a.yaml("a") + &b.yaml("b");
    let gateway = Gateway::with(&backends, "prefix_routing: {enabled: false}");
    let with_keys = "api_keys: {keys: [{name: k, key: secret-of-sixteen-and-more}]}\nadmin: {token: admin-token}\nmodel_aliases: {short: m}\nselection_strategy: RoundRobin\nprefix_routing: {enabled: false}\n";
    assert_eq!(gateway.reload(&backends, with_keys).status, 200);
    assert_eq!(ask(&gateway).status, 401);
    let key = "authorization: Bearer secret-of-sixteen-and-more\r\n";
    let body = r#"{"model":"short","messages":[]}"#;
    let answers: Vec<Answer> = (0..4)
        .map(|_| Client::connect(&gateway).post("/v1/chat/completions", key, body))
        .collect();
    let backends_asked: Vec<&str> = answers.iter().map(|answer| answer.backend()).collect();
    assert!(
        backends_asked == ["a", "b", "a", "b"] || backends_asked == ["b", "a", "b", "a"],
        "{backends_asked:?}"
    );
    // the admin token holds from now on, too
    assert_eq!(client::post(&gateway, "/admin/reload", "").status, 401);
}

#[test]
fn what_does_not_go_together_with_what_waits_for_a_restart_is_refused_whole() {
    let (p, d, u) = (engine(), engine(), engine());
    let role = |name: &str, role: &str, of: &Upstream| {
        of.yaml(name).replace(
            &format!("name: {name}"),
            &format!("name: {name}, role: {role}"),
        )
    };
    let split = role("p", "prefill", &p) + &role("d", "decode", &d) + &u.yaml("u");
    let storage = "default_external_storage: {endpoint: 'http://v', kv_namespace: n}";
    let on = format!("disaggregated_serving: {{enabled: true, {storage}}}");
    let gateway = Gateway::with(&split, &on);
    // right by itself: but serving stays split until a restart, and nobody would prefill
    let refused = gateway.reload(&u.yaml("u"), "disaggregated_serving: {enabled: false}");
    assert_eq!(refused.status, 400);
    let said = refused.text();
    assert!(
        said.contains("needs a restart first") && said.contains("role: prefill"),
        "{said}"
    );
    assert_eq!(gateway.inner.directory.load().view.backends.len(), 3);
}

#[test]
fn nothing_of_backends_that_are_gone_is_left_in_the_metrics() {
    let a = engine();
    let gateway = Gateway::start(&[("a", &a)], "");
    ask(&gateway);
    let lines = |gateway: &Gateway| {
        gateway
            .metrics()
            .lines()
            .filter(|line| line.contains("backend="))
            .count()
    };
    let before = lines(&gateway);
    for round in 0..5 {
        let more: String = (0..20)
            .map(|i| {
                format!(
                    "  - {{name: gone-{round}-{i}, url: 'http://127.0.0.1:{}', models: [x]}}\n",
                    2 + round * 20 + i
                )
            })
            .collect();
        assert_eq!(gateway.reload(&(a.yaml("a") + &more), "").status, 200);
        assert!(lines(&gateway) > before);
    }
    assert_eq!(gateway.reload(&a.yaml("a"), "").status, 200);
    assert!(!gateway.metrics().contains("gone-"));
    assert_eq!(lines(&gateway), before);
    // one that comes back is told of again
    let back = a.yaml("a") + "  - {name: gone-0-0, url: 'http://127.0.0.1:2', models: [x]}\n";
    gateway.reload(&back, "");
    assert!(gateway.metrics().contains("gone-0-0"));
}

#[test]
fn requests_are_served_without_a_gap_while_backends_come_and_go() {
    let (a, b) = (engine(), engine());
    let one = a.yaml("a");
    let both = one.clone() + &b.yaml("b");
    let gateway = Gateway::with(&one, "");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut count = 0;
            let mut client = Client::connect(&gateway);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let answer = client.chat(chat(&user("hi")));
                assert_eq!(answer.status, 200, "{}", answer.text());
                count += 1;
            }
            count
        });
        for round in 0..40 {
            let backends = if round % 2 == 0 { &both } else { &one };
            assert_eq!(gateway.reload(backends, "").status, 200);
            if round % 2 == 0 {
                gateway.wait_for_state("b", "healthy");
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(asking.join().unwrap() > 40);
    });
    gateway.assert_idle();
}

fn yaml(engine: &Upstream, more: &str) -> String {
    format!(
        "{more}\nhealth_checks: {{interval: 50ms}}\nbackends:\n{}",
        engine.yaml("a")
    )
}

fn said(process: &Process, what: &str) {
    wait_until(what, DEADLINE, || process.output().contains(what));
}

#[test]
fn a_file_that_changes_is_taken_in_and_a_broken_one_is_not() {
    let a = engine();
    let process = Process::start(&yaml(&a, ""));
    let file = process.settings_file().to_owned();
    // in place, and half of it
    std::fs::write(&file, "backends:\n  - {name: a, url: 'http").unwrap();
    said(
        &process,
        "settings are faulty, those of before stay in effect",
    );
    wait_until("it goes on as before", DEADLINE, || {
        process.chat(&chat(&user("hi"))).status == 200
    });
    // by renaming another file over it
    let other = SettingsFile::new(&yaml(&a, "model_aliases: {short: m}"));
    std::fs::rename(&other.0, &file).unwrap();
    wait_until("the alias is known", DEADLINE, || {
        process.get("/v1/models").text().contains("short")
    });
}

#[test]
fn a_hangup_reads_the_settings_again_where_files_are_not_watched() {
    let a = engine();
    let mut process = Process::start(&yaml(&a, "reload: {watch: false}"));
    std::fs::write(
        process.settings_file(),
        yaml(&a, "reload: {watch: false}\nmodel_aliases: {short: m}"),
    )
    .unwrap();
    process.signal("HUP");
    said(&process, "settings read again");
    assert!(process.is_running());
    assert!(process.get("/v1/models").text().contains("short"));
}

#[test]
fn keys_in_a_file_of_their_own_are_read_again_when_it_changes() {
    let a = engine();
    let keys = SettingsFile::new("keys: [{name: k, key: first-of-sixteen-letters}]");
    let settings = yaml(&a, &format!("api_keys: {{file: '{}'}}", keys.0.display()));
    let process = Process::start(&settings);
    let with = |key: &str| {
        let mut client = Client::connect_to_port(process.port);
        client
            .post(
                "/v1/chat/completions",
                &format!("x-api-key: {key}\r\n"),
                chat(&user("hi")),
            )
            .status
    };
    wait_until("the first key opens", DEADLINE, || {
        with("first-of-sixteen-letters") == 200
    });
    assert_eq!(with("other-of-sixteen-letters"), 401);
    std::fs::write(&keys.0, "keys: [{name: k, key: other-of-sixteen-letters}]").unwrap();
    wait_until("the other key opens", DEADLINE, || {
        with("other-of-sixteen-letters") == 200
    });
    assert_eq!(with("first-of-sixteen-letters"), 401);
}

#[test]
fn a_check_against_a_running_gateway_says_what_would_change() {
    let a = engine();
    let secret = "key-of-the-engine";
    let process = Process::start(&yaml(&a, "admin: {token: the-admin-token}"));
    let wanted = yaml(
        &a,
        "admin: {token: the-admin-token}\nretry: {max_attempts: 1}\nserver: {workers: 1}",
    )
    .replace("name: a", &format!("name: a, api_key: {secret}"));
    let file = SettingsFile::new(&wanted);
    let url = format!("http://127.0.0.1:{}", process.port);
    let arguments = [
        "check",
        "--config",
        file.0.to_str().unwrap(),
        "--running",
        &url,
    ];
    let denied = run(&arguments, &[]);
    assert!(!denied.status.success());
    assert!(denied.stderr.contains("--token"), "{}", denied.stderr);
    let port = process.port.to_string();
    let same_place = [
        ("TIDEGATE_ADMIN_TOKEN", "the-admin-token"),
        ("TIDEGATE__SERVER__HOST", "127.0.0.1"),
        ("TIDEGATE__SERVER__PORT", port.as_str()),
    ];
    let told = run(&arguments, &same_place);
    assert!(told.status.success(), "{}", told.stderr);
    let lines: Vec<&str> = told
        .stdout
        .lines()
        .filter(|line| line.starts_with(['+', '-', '~']))
        .collect();
    assert_eq!(
        lines,
        [
            "+ backends[a].api_key: \"***\"",
            "~ retry.max_attempts: 2 -> 1",
            "~ server.workers: 0 -> 1   (needs a restart)",
        ]
    );
    assert!(!told.stdout.contains(secret));
}

#[test]
fn the_level_of_the_log_changes_while_it_runs() {
    let a = engine();
    let process = Process::start(&yaml(&a, "logging: {level: warn, access: true}"));
    wait_until("it serves", DEADLINE, || {
        process.chat(&chat(&user("quiet"))).status == 200
    });
    assert!(
        !process.output().contains("request_id"),
        "{}",
        process.output()
    );
    let louder = yaml(&a, "logging: {level: info, access: true}");
    std::fs::write(process.settings_file(), louder).unwrap();
    wait_until("a request is logged", DEADLINE, || {
        process.chat(&chat(&user("loud")));
        process.output().contains("request_id")
    });
}
