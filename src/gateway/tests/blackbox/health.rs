//! Probes take backends out and bring them back; neither a shallow probe nor a busy engine fools
//! the gateway.

use crate::support::sse;
use crate::support::{
    Client, DEADLINE, Gateway, Health, Signal, Upstream, chat, chat_stream, client, ms, user,
    wait_until,
};

const GOOD: &str = r#"{"id":"1","choices":[]}"#;

#[test]
fn an_engine_that_only_answers_probes_loses_its_traffic() {
    // silent at once, and silent after a head
    for head_first in [false, true] {
        let hangs = Upstream::start(move |_, wire| {
            if head_first {
                wire.stream_head();
            }
            wire.hang();
        });
        let serves = Upstream::sse(sse::stream(&["ok"]));
        let settings = "
upstream: { first_byte_timeout: 300ms }
selection_strategy: RoundRobin
prefix_routing: { enabled: false }
circuit_breaker: { failure_threshold: 3, recovery_timeout: 60s }
";
        let gateway = Gateway::start(&[("a", &hangs), ("b", &serves)], settings);
        let mut timeouts = 0;
        for _ in 0..20 {
            let answer = gateway.chat(&chat_stream(&user("hi")));
            assert!([200, 504].contains(&answer.status), "{answer:?}");
            timeouts += usize::from(answer.status == 504);
        }
        // the threshold, and what was sent before the breaker had heard of it
        assert!((3..=6).contains(&timeouts), "{timeouts} timeouts");
        assert_eq!(hangs.count(), timeouts);
        gateway.wait_for_breaker("a", "open");
        let probes = hangs.probes();
        wait_until("more probes succeed", DEADLINE, || {
            hangs.probes() > probes + 3
        });
        assert_eq!(gateway.breaker("a"), "open", "a probe proves nothing here");
        assert_eq!(gateway.chat(&chat_stream(&user("hi"))).status, 200);
    }
}

#[test]
fn failures_in_a_row_take_a_backend_out_and_successes_in_a_row_bring_it_back() {
    let engine = Upstream::json(GOOD);
    let settings = "health_checks: { unhealthy_threshold: 3, healthy_threshold: 2 }";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let sequence: Vec<u8> = b"FSFFSFFFSS".to_vec();
    let (told, seen) = std::sync::mpsc::channel();
    let length = sequence.len();
    engine.health(move |n| {
        let _ = told.send(n);
        match sequence.get(n) {
            Some(b'F') => Health::Status(500),
            _ => Health::Status(200),
        }
    });
    let mut states = Vec::new();
    for n in seen {
        // what earlier probes led to; one probe is not over before the next begins
        let serving = client::get(&gateway, "/ready").status == 200;
        if states.last() != Some(&(serving)) {
            states.push(serving);
        }
        if n > length + 3 {
            break;
        }
    }
    assert_eq!(states, [true, false, true]);
    let flaps = gateway.metric("tidegate_backend_flaps_total", &["backend=\"a\""]);
    assert_eq!(flaps, 2.0);
    let failed = ["backend=\"a\"", "result=\"bad_status\""];
    assert_eq!(gateway.metric("tidegate_health_probes_total", &failed), 6.0);
}

#[test]
fn a_backend_that_goes_and_returns_is_left_and_found_again() {
    let engines = [Upstream::json(GOOD), Upstream::json(GOOD)];
    let settings = "selection_strategy: RoundRobin\nprefix_routing: { enabled: false }";
    let gateway = Gateway::start(&[("a", &engines[0]), ("b", &engines[1])], settings);
    engines[0].stop_listening();
    gateway.wait_for_state("a", "unhealthy");
    for _ in 0..10 {
        assert_eq!(gateway.chat(&chat(&user("hi"))).backend(), "b");
    }
    engines[0].listen_again();
    gateway.wait_for_state("a", "healthy");
    let served: Vec<_> = (0..4).map(|_| gateway.chat(&chat(&user("hi")))).collect();
    assert!(served.iter().any(|answer| answer.backend() == "a"));
}

const IMPATIENT: &str = "
health_checks: { timeout: 30ms, unhealthy_threshold: 2 }
selection_strategy: RoundRobin
prefix_routing: { enabled: false }
";

#[test]
fn probes_that_time_out_everywhere_do_not_empty_the_pool() {
    let engines = [(); 4].map(|()| Upstream::json(GOOD));
    let names = ["a", "b", "c", "d"];
    let backends: Vec<_> = names.into_iter().zip(&engines).collect();
    let gateway = Gateway::start(&backends, IMPATIENT);
    for name in names {
        gateway.wait_for_state(name, "healthy");
    }
    for engine in &engines {
        engine.health(|_| Health::Hang);
    }
    wait_until("every backend missed ten probes", DEADLINE, || {
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!(answer.status, 200, "{answer:?}");
        names.iter().all(|name| {
            let of = format!("backend=\"{name}\"");
            let of = |result| gateway.metric("tidegate_health_probes_total", &[&of, result]);
            of("result=\"timeout\"") + of("result=\"neutral\"") >= 10.0
        })
    });
    let healthy = gateway.metric("tidegate_backend_state", &["state=\"healthy\""]);
    assert!(healthy >= 2.0, "{healthy} of 4 are left");
}

#[test]
fn an_engine_that_sends_tokens_is_not_taken_out_for_slow_probes() {
    let busy = Upstream::start(|_, wire| {
        wire.stream_head();
        while wire.chunk(sse::delta("x")) {
            wire.pause(ms(5));
        }
    });
    let idle = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &busy), ("b", &idle)], IMPATIENT);
    gateway.wait_for_state("a", "healthy");
    let (mut client, mut answer) = loop {
        let mut client = Client::connect(&gateway);
        client.start_chat(chat_stream(&user("hi")));
        let answer = client.head();
        if answer.backend() == "a" {
            break (client, answer);
        }
    };
    let enough = Signal::new();
    let done = enough.clone();
    let reading = std::thread::spawn(
        move || {
            while !done.is_raised() && client.next_piece(&mut answer) {}
        },
    );
    busy.health(|_| Health::Hang);
    let neutral = ["backend=\"a\"", "result=\"neutral\""];
    wait_until("probes miss while tokens flow", DEADLINE, || {
        gateway.metric("tidegate_health_probes_total", &neutral) >= 5.0
    });
    gateway.wait_for_state("a", "healthy");
    let flaps = gateway.metric("tidegate_backend_flaps_total", &["backend=\"a\""]);
    assert_eq!(flaps, 0.0);
    enough.raise();
    reading.join().unwrap();
}

#[test]
fn readiness_follows_the_backends_and_liveness_does_not() {
    let engine = Upstream::json(GOOD);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let status = |path| client::get(&gateway, path).status;
    assert_eq!((status("/health"), status("/ready")), (200, 200));
    engine.health(|_| Health::Close);
    wait_until("not ready", DEADLINE, || status("/ready") == 503);
    assert_eq!(status("/health"), 200);
    let refused = gateway.chat(&chat(&user("hi")));
    assert_eq!(refused.status, 503);
    assert!(refused.header("retry-after").is_some());
    engine.health(|_| Health::Status(204));
    wait_until("ready again", DEADLINE, || status("/ready") == 200);
}
