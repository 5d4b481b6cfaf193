//! When a step fails: other workers, then a unified one, then the truth.

use super::*;
use crate::support::{DEADLINE, ms, wait_until};

/// Breaks the first so many requests off, and serves the others.
fn first_dies(times: usize, then: Script) -> Upstream {
    Upstream::start(move |request, wire| {
        if request.number < times {
            dies(request, wire)
        } else {
            then(request, wire)
        }
    })
}

#[test]
fn a_hand_off_whose_decode_worker_dies_is_made_anew_as_a_whole_with_another_one() {
    let fleet = Fleet::of(vec![
        ("p", Upstream::start(prefills_and_keeps)),
        ("d1", Upstream::start(dies)),
        ("d2", Upstream::start(dies)),
        ("d3", Upstream::start(answers)),
    ]);
    let gateway = fleet.gateway_with(
        "connector: nixl",
        "retry: { max_attempts: 3, budget_ratio: 1.0 }\n",
    );
    // whichever is asked first
    let answer = loop {
        let answer = chat(&gateway, &ask_stream());
        if fleet.engine("d1").count() + fleet.engine("d2").count() > 0 {
            break answer;
        }
    };
    let failed = fleet.engine("d1").count() + fleet.engine("d2").count();
    if answer.status == 200 {
        assert_eq!(answer.backend(), "d3");
    } else {
        assert_eq!(
            (failed, &*code(&answer)),
            (2, "decode_failed"),
            "both that die were asked"
        );
    }
    let mut ids: Vec<_> = fleet
        .engine("p")
        .requests()
        .iter()
        .map(|r| r.header("x-request-id").unwrap().to_vec())
        .collect();
    let all = ids.len();
    ids.dedup();
    assert_eq!(ids.len(), all, "never one id twice");
    let decodes = failed + fleet.engine("d3").count();
    assert_eq!(all, decodes, "a prefill of its own for each");
    let failures = |backend: &str| {
        let labels = [&*format!("backend=\"{backend}\""), "outcome=\"failure\""];
        gateway.metric("tidegate_backend_requests_total", &labels)
    };
    assert_eq!(failures("d1") + failures("d2"), failed as f64);
    assert_eq!(failures("p"), 0.0, "it is not charged");
    assert_eq!(
        gateway.metric("tidegate_split_restarts_total", &["step=\"decode\""]),
        1.0
    );
    gateway.assert_idle();
}

#[test]
fn a_dead_prefill_worker_costs_another_try_and_no_error() {
    let fleet = Fleet::of(vec![
        ("p1", Upstream::start(dies)),
        ("p2", Upstream::start(prefills)),
        ("d", Upstream::start(answers)),
    ]);
    let gateway = fleet.gateway("");
    for _ in 0..20 {
        let answer = chat(&gateway, &ask_stream());
        assert_eq!((answer.status, path(&answer)), (200, "prefill_then_decode"));
    }
    assert!(fleet.engine("p1").count() > 0);
    gateway.assert_idle();
}

#[test]
fn when_all_of_a_step_fail_a_unified_worker_stands_in_or_the_step_is_named() {
    for (scripts, step) in [
        (
            [("p", dies as Script), ("d", answers), ("u", answers)],
            "prefill",
        ),
        ([("p", prefills), ("d", dies), ("u", answers)], "decode"),
    ] {
        let fleet = Fleet::new(&scripts);
        let gateway = fleet.gateway("");
        let answer = chat(&gateway, &ask_stream());
        assert_eq!(
            (answer.status, path(&answer), answer.backend()),
            (200, "fallback", "u")
        );
        assert_eq!(answer.header("x-tidegate-prefill-backend"), None);
        let labels = [&*format!("step=\"{step}\""), "reason=\"failed\""];
        assert_eq!(
            gateway.metric("tidegate_split_fallbacks_total", &labels),
            1.0
        );
        let strict = fleet.gateway("fallback_to_unified: false");
        let answer = chat(&strict, &ask_stream());
        assert_eq!(
            (answer.status, code(&answer)),
            (503, format!("{step}_failed"))
        );
        assert!(
            answer
                .text()
                .contains(&format!("the {step} step failed: backend `")),
            "{answer:?}"
        );
        gateway.assert_idle();
        strict.assert_idle();
    }
}

#[test]
fn what_prefill_refuses_is_refused_in_its_own_words_and_decode_is_not_asked() {
    fn refuses(_: &Request, wire: &mut Wire) {
        wire.json(
            "400 Bad Request",
            r#"{"error":{"message":"too long","type":"BadRequestError","code":400}}"#,
        );
    }
    let fleet = Fleet::new(&[("p", refuses), ("d", answers), ("u", answers)]);
    let gateway = fleet.gateway("");
    let answer = chat(&gateway, &ask_stream());
    assert_eq!(
        (answer.status, &answer.json()["error"]["message"]),
        (400, &json!("too long"))
    );
    assert_eq!(answer.backend(), "p", "decode has said nothing");
    assert_eq!(answer.header("x-tidegate-prefill-backend"), None);
    assert_eq!(fleet.counts(), [("p", 1)]);
    assert_eq!(gateway.metric("tidegate_split_failures_total", &[]), 0.0);
}

#[test]
fn a_prefill_that_takes_too_long_is_given_up_and_the_rest_waits_no_longer_than_it_may() {
    let fleet = Fleet::new(&[("p", hangs), ("d", answers), ("u", answers)]);
    let gateway = fleet.gateway("prefill_timeout: 200ms");
    let answer = chat(&gateway, &ask_stream());
    assert_eq!((answer.status, path(&answer)), (200, "fallback"));
    let labels = ["step=\"prefill\"", "reason=\"timeout\""];
    assert_eq!(
        gateway.metric("tidegate_split_fallbacks_total", &labels),
        1.0
    );
    let strict = fleet.gateway("prefill_timeout: 200ms, fallback_to_unified: false");
    let answer = chat(&strict, &ask_stream());
    assert_eq!((answer.status, &*code(&answer)), (504, "prefill_timeout"));
    fleet.engine("p").wait_for_close(0);
}

#[test]
fn a_transfer_that_hangs_is_tried_elsewhere_and_is_no_fault_of_the_worker() {
    let fleet = Fleet::new(&[
        ("p", prefills),
        ("d1", hangs),
        ("d2", hangs),
        ("u", answers),
    ]);
    let gateway = fleet.gateway("kv_transfer_timeout: 150ms");
    let answer = chat(&gateway, &ask_stream());
    assert_eq!((answer.status, path(&answer)), (200, "fallback"));
    assert_eq!(fleet.counts(), [("p", 2), ("d1", 1), ("d2", 1), ("u", 1)]);
    let failures = gateway.metric("tidegate_backend_requests_total", &["outcome=\"failure\""]);
    assert_eq!(failures, 0.0);
    let strict = fleet.gateway("kv_transfer_timeout: 150ms, fallback_to_unified: false");
    let answer = chat(&strict, &ask_stream());
    assert_eq!((answer.status, &*code(&answer)), (504, "decode_timeout"));
}

#[test]
fn where_hand_offs_fail_in_a_row_nobody_waits_for_them_until_one_works_again() {
    let fleet = Fleet::new(&[("p", prefills), ("d", hangs), ("u", answers)]);
    let gateway = fleet.gateway("kv_transfer_timeout: 50ms");
    let suspended = || gateway.metric("tidegate_split_groups_suspended", &[]);
    for _ in 0..5 {
        assert_eq!(suspended(), 0.0);
        assert_eq!(path(&chat(&gateway, &ask_stream())), "fallback");
    }
    wait_until("the group is left alone", DEADLINE, || suspended() == 1.0);
    let asked = fleet.engine("p").count();
    for _ in 0..10 {
        assert_eq!(path(&chat(&gateway, &ask_stream())), "fallback");
    }
    assert_eq!(fleet.engine("p").count(), asked);
    let labels = ["reason=\"suspended\""];
    assert_eq!(
        gateway.metric("tidegate_split_fallbacks_total", &labels),
        10.0
    );
}

#[test]
fn after_the_first_byte_a_failure_is_an_error_event_and_nothing_is_sent_again() {
    fn breaks(_: &Request, wire: &mut Wire) {
        wire.stream_head();
        wire.chunk(sse::delta("a"));
        wire.reset();
    }
    let fleet = Fleet::new(&[("p", prefills), ("d", breaks), ("u", answers)]);
    let gateway = fleet.gateway("");
    let answer = chat(&gateway, &ask_stream());
    let events = sse::parse(&answer.body);
    let last = events.last().unwrap().json();
    assert_eq!(last["error"]["code"], "stream_cut", "{answer:?}");
    assert_eq!(fleet.counts(), [("p", 1), ("d", 1)]);
    gateway.assert_idle();
}

#[test]
fn a_decode_that_fails_in_its_first_event_has_not_begun() {
    fn fails(_: &Request, wire: &mut Wire) {
        wire.stream(&[
            r#"data: {"error":{"message":"blocks are gone","code":500}}"#,
            "\n\ndata: [DONE]\n\n",
        ]);
    }
    let fleet = Fleet::new(&[
        ("p", prefills),
        ("d1", fails),
        ("d2", fails),
        ("u", answers),
    ]);
    let gateway = fleet.gateway("");
    let answer = chat(&gateway, &ask_stream());
    assert_eq!(
        (answer.status, path(&answer)),
        (200, "fallback"),
        "{answer:?}"
    );
}

#[test]
fn a_fallback_that_fails_as_well_is_told_with_what_it_failed_of() {
    let fleet = Fleet::new(&[("p", dies), ("d", answers), ("u", dies)]);
    let gateway = fleet.gateway("");
    let answer = chat(&gateway, &ask_stream());
    assert_eq!((answer.status, &*code(&answer)), (502, "stream_cut"));
    assert!(answer.text().contains("backend `u`"), "{answer:?}");
    assert_eq!(
        gateway.metric("tidegate_split_failures_total", &["step=\"unified\""]),
        1.0
    );
}

#[test]
fn a_coordinator_that_dies_is_replaced_and_a_unified_worker_serves_meanwhile() {
    use actors::support::fault::Panic;
    let fleet = Fleet::new(&[("p", prefills), ("d", answers), ("u", answers)]);
    let gateway = fleet.gateway("");
    let splitting = gateway.inner.splitting().unwrap();
    let address = splitting
        .coordinator
        .address
        .load()
        .as_ref()
        .clone()
        .unwrap();
    address.do_send(Panic);
    wait_until("it is dead", DEADLINE, || !address.connected());
    let answer = chat(&gateway, &ask_stream());
    assert_eq!(answer.status, 200, "{answer:?}");
    wait_until("there is another one", DEADLINE, || {
        path(&chat(&gateway, &ask_stream())) == "prefill_then_decode"
    });
    let labels = ["actor=\"disagg_coordinator\""];
    assert_eq!(
        gateway.metric("tidegate_actor_restarts_total", &labels),
        1.0
    );
    gateway.assert_idle();
}

#[test]
fn a_client_that_leaves_stops_whichever_leg_is_under_way() {
    fn begins(_: &Request, wire: &mut Wire) {
        wire.stream_head();
        wire.chunk(sse::delta("a"));
        wire.hang();
    }
    for (scripts, engine) in [
        ([("p", hangs as Script), ("d", hangs)], "p"),
        ([("p", prefills), ("d", hangs)], "d"),
        ([("p", prefills), ("d", begins)], "d"),
    ] {
        for keys in [
            "",
            "connector: nixl",
            "connector: sglang",
            "connector: mooncake",
        ] {
            let fleet = Fleet::new(&scripts);
            let gateway = fleet.gateway(keys);
            let mut client = Client::connect(&gateway);
            client.start_chat(ask_stream());
            fleet.engine(engine).wait_for_requests(1);
            client.leave();
            fleet.engine(engine).wait_for_close(0);
            gateway.assert_idle();
        }
    }
}

#[test]
fn blocks_that_prefill_keeps_are_fetched_although_the_client_has_left() {
    static LEFT: std::sync::Mutex<bool> = std::sync::Mutex::new(false);
    fn keeps_when_the_client_has_left(request: &Request, wire: &mut Wire) {
        wait_until("the client has left", DEADLINE, || *LEFT.lock().unwrap());
        prefills_and_keeps(request, wire);
    }
    fn begins(_: &Request, wire: &mut Wire) {
        wire.stream_head();
        wire.chunk(sse::delta("a"));
        wire.hang();
    }
    let fleet = Fleet::new(&[("p", keeps_when_the_client_has_left), ("d", begins)]);
    let gateway = fleet.gateway("connector: nixl");
    let mut client = Client::connect(&gateway);
    client.start_chat(ask_stream());
    fleet.engine("p").wait_for_requests(1);
    client.leave();
    wait_until("the gateway knows", DEADLINE, || {
        gateway.inner.requests.count() == 0
    });
    *LEFT.lock().unwrap() = true;
    fleet.engine("d").wait_for_requests(1);
    assert_eq!(
        fleet.engine("d").requests()[0].json()["kv_transfer_params"]["remote_engine_id"],
        "e"
    );
    fleet.engine("d").wait_for_close(0);
    gateway.assert_idle();
    wait_until("it is counted", DEADLINE, || {
        gateway.metric("tidegate_split_releases_total", &["result=\"done\""]) == 1.0
    });
}

#[test]
fn whoever_leaves_at_whatever_moment_nothing_is_left_behind() {
    fn slow(request: &Request, wire: &mut Wire) {
        wire.pause(ms(2));
        prefills_and_keeps(request, wire);
    }
    fn slow_decode(_: &Request, wire: &mut Wire) {
        wire.pause(ms(2));
        wire.stream_head();
        for _ in 0..5 {
            wire.chunk(sse::delta("a"));
            wire.pause(ms(1));
        }
        wire.chunk(sse::finish("stop") + sse::DONE);
        wire.end();
    }
    for connector in ["shared_storage", "nixl", "sglang"] {
        let fleet = Fleet::new(&[("p", slow), ("d", slow_decode)]);
        let gateway = fleet.gateway(&format!("connector: {connector}"));
        for at in 0..100 {
            let mut client = Client::connect(&gateway);
            client.start_chat(ask_stream());
            std::thread::sleep(ms(at) / 8); // an input: when it leaves
            client.leave();
        }
        let answer = chat(&gateway, &ask_stream());
        assert_eq!(answer.status, 200);
        gateway.assert_idle();
        assert_eq!(gateway.metric("tidegate_split_pairs", &[]), 0.0);
    }
}

#[test]
fn one_prefill_worker_that_fails_now_and_then_is_enough() {
    let fleet = Fleet::of(vec![
        ("p1", first_dies(1, prefills)),
        ("p2", first_dies(1, prefills)),
        ("d", Upstream::start(answers)),
        ("u", Upstream::start(answers)),
    ]);
    let gateway = fleet.gateway("");
    for _ in 0..6 {
        assert_eq!(chat(&gateway, &ask_stream()).status, 200);
    }
    gateway.assert_idle();
}

#[test]
fn a_step_that_is_asked_for_patience_says_so_in_the_engines_words() {
    fn busy(_: &Request, wire: &mut Wire) {
        let headers = "content-type: application/json\r\nretry-after: 7\r\n";
        wire.answer(
            "429 Too Many Requests",
            headers,
            r#"{"error":{"message":"queue is full"}}"#,
        );
    }
    for scripts in [
        [("p", busy as Script), ("d", answers)],
        [("p", prefills), ("d", busy)],
    ] {
        let fleet = Fleet::new(&scripts);
        let gateway = fleet.gateway("fallback_to_unified: false");
        let answer = chat(&gateway, &ask_stream());
        assert_eq!(
            (answer.status, answer.header("retry-after")),
            (429, Some("7")),
            "{answer:?}"
        );
        let failures = gateway.metric("tidegate_backend_requests_total", &["outcome=\"failure\""]);
        assert_eq!(failures, 0.0);
    }
}

#[test]
fn with_one_attempt_allowed_nothing_is_tried_again() {
    let fleet = Fleet::new(&[("p1", dies), ("p2", dies), ("d", answers), ("u", answers)]);
    let gateway = fleet.gateway_with("", "retry: { max_attempts: 1 }\n");
    assert_eq!(path(&chat(&gateway, &ask_stream())), "fallback");
    assert_eq!(fleet.engine("p1").count() + fleet.engine("p2").count(), 1);
    assert_eq!(gateway.metric("tidegate_retries_total", &[]), 0.0);
}

#[test]
fn a_worker_whose_transfers_hang_is_spared_while_others_serve() {
    let fleet = Fleet::new(&[("p", prefills), ("d1", hangs), ("d2", answers)]);
    let gateway = fleet.gateway("kv_transfer_timeout: 200ms");
    for _ in 0..40 {
        assert_eq!(chat(&gateway, &ask_stream()).status, 200);
    }
    assert!(fleet.engine("d1").count() <= 2, "{:?}", fleet.counts());
    let failures = gateway.metric("tidegate_backend_requests_total", &["outcome=\"failure\""]);
    assert_eq!(failures, 0.0, "and no failure of its own");
}

#[test]
fn an_answer_that_takes_all_its_time_is_not_made_a_second_time() {
    let fleet = Fleet::new(&[("p", prefills), ("d", hangs), ("u", answers)]);
    let gateway = fleet.gateway_with(
        "",
        "upstream: { first_byte_timeout_non_streaming: 300ms }\n",
    );
    let answer = chat(&gateway, &ask(json!({})));
    assert_eq!((answer.status, &*code(&answer)), (504, "decode_timeout"));
    assert_eq!(fleet.engine("u").count(), 0);
}

#[test]
fn a_mooncake_worker_that_does_not_say_its_id_is_passed_over() {
    let fleet = Fleet::new(&[("p1", prefills), ("p2", prefills), ("d", answers)]);
    let says = Upstream::json(r#"{"0":{"engine_id":"id-of-p2"}}"#);
    let ports = [1, says.address.port(), 0];
    let backends = fleet.engines.iter().zip(ports).map(|((name, role, engine), port)| {
        format!(
            "  - {{ name: {name}, role: {role}, url: 'http://{}', models: [{MODEL}], kv_peer: {{ bootstrap_port: {port} }} }}\n",
            engine.address
        )
    });
    let gateway = Gateway::with(
        &backends.collect::<String>(),
        "disaggregated_serving: { enabled: true, connector: mooncake }",
    );
    for _ in 0..10 {
        let answer = chat(&gateway, &ask_stream());
        assert_eq!(
            (answer.status, answer.header("x-tidegate-prefill-backend")),
            (200, Some("p2"))
        );
    }
    assert_eq!(fleet.engine("p1").count(), 0);
    let decode = fleet.engine("d").requests().pop().unwrap().json();
    assert_eq!(decode["kv_transfer_params"]["remote_engine_id"], "id-of-p2");
    assert_eq!(says.count(), 1, "asked once");
    assert!(gateway.metric("tidegate_backend_requests_total", &["backend=\"p1\""]) == 0.0);
}
