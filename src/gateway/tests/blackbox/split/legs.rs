//! What each leg is sent, and what the client sees of both.

use super::*;
use crate::support::{DEADLINE, wait_until};
use std::collections::HashSet;

/// Refuses what a strict engine refuses.
fn strict(request: &Request, wire: &mut Wire) {
    let body = request.json();
    let fault = if body["stream"] != true && body.get("stream_options").is_some() {
        Some("stream_options without stream")
    } else if body["min_tokens"].as_u64() > body["max_tokens"].as_u64()
        && body["max_tokens"].is_u64()
    {
        Some("min_tokens over max_tokens")
    } else if body["max_tokens"] == 0 {
        Some("no tokens")
    } else {
        None
    };
    match fault {
        Some(fault) => {
            wire.json(
                "400 Bad Request",
                &format!(r#"{{"error":{{"message":"{fault}"}}}}"#),
            );
        }
        None => answers(request, wire),
    }
}

#[test]
fn prefill_is_asked_for_one_token_and_decode_for_all_that_the_client_wants() {
    let fleet = Fleet::new(&[("p", strict), ("d", strict)]);
    let gateway = fleet.gateway("");
    let members = json!({
        "stream": true, "stream_options": {"include_usage": true, "x_engine": 1},
        "max_tokens": 500, "max_completion_tokens": 800, "min_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"x": 1.0}},
        "tools": [{"type": "function", "unknown": {"b": 1, "a": 2}}],
    });
    let answer = chat(&gateway, &ask(members.clone()));
    assert_eq!(
        (answer.status, path(&answer)),
        (200, "prefill_then_decode"),
        "{answer:?}"
    );
    assert_eq!(answer.backend(), "d");
    assert_eq!(answer.header("x-tidegate-prefill-backend"), Some("p"));
    let prefill = fleet.engine("p").only_request().json();
    assert_eq!(
        (
            &prefill["max_tokens"],
            &prefill["max_completion_tokens"],
            &prefill["stream"]
        ),
        (&json!(1), &json!(1), &json!(false))
    );
    assert_eq!(prefill["tools"], members["tools"]);
    let decode = fleet.engine("d").only_request();
    assert_eq!(decode.text(), ask(members), "byte for byte");
    gateway.assert_idle();
}

#[test]
fn what_the_client_leaves_out_stays_out() {
    let fleet = Fleet::new(&[("p", strict), ("d", strict)]);
    let gateway = fleet.gateway("");
    for members in [
        json!({}),
        json!({"max_tokens": null}),
        json!({"max_completion_tokens": null}),
    ] {
        let answer = chat(&gateway, &ask(members.clone()));
        assert_eq!(answer.status, 200, "{answer:?}");
        let decode = fleet.engine("d").requests().pop().unwrap();
        assert_eq!(decode.text(), ask(members));
    }
}

#[test]
fn both_legs_have_one_request_id_and_no_other_request_has_it() {
    let fleet = Fleet::new(&[
        ("p1", prefills),
        ("p2", prefills),
        ("d1", answers),
        ("d2", answers),
    ]);
    let (one, two) = (
        fleet.gateway("connector: sglang"),
        fleet.gateway("connector: sglang"),
    );
    let threads: Vec<_> = (0..8)
        .map(|at| {
            let address = if at % 2 == 0 {
                one.address
            } else {
                two.address
            };
            std::thread::spawn(move || {
                for _ in 0..25 {
                    let mut client = Client::connect_to_port(address.port());
                    // engines take the id for theirs, and clients may give the same one twice
                    let answer = client.post(
                        "/v1/chat/completions",
                        "x-request-id: same\r\n",
                        ask_stream(),
                    );
                    assert_eq!(answer.status, 200);
                    assert_eq!(answer.header("x-request-id"), Some("same"));
                }
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    let ids = |names: [&str; 2]| -> Vec<(String, i64)> {
        let requests = names.iter().flat_map(|name| fleet.engine(name).requests());
        let id = |request: Request| {
            let header = String::from_utf8(request.header("x-request-id").unwrap().to_vec());
            (
                header.unwrap(),
                request.json()["bootstrap_room"].as_i64().unwrap(),
            )
        };
        requests.map(id).collect()
    };
    let (prefill, decode) = (ids(["p1", "p2"]), ids(["d1", "d2"]));
    assert_eq!(prefill.len(), 200);
    let sets = [&prefill, &decode].map(|ids| ids.iter().cloned().collect::<HashSet<_>>());
    assert_eq!(sets[0].len(), 200, "no id twice");
    assert_eq!(sets[0], sets[1], "pairs match");
    assert!(prefill.iter().all(|(_, room)| *room >= 0));
}

#[test]
fn cached_tokens_are_those_that_prefill_found_cached() {
    fn silent(_: &Request, wire: &mut Wire) {
        whole(wire, "", "");
    }
    for (prefill, expected) in [(prefills as Script, json!(20)), (silent, json!(null))] {
        let fleet = Fleet::new(&[("p", prefill), ("d", answers)]);
        let gateway = fleet.gateway("");
        let answer = chat(&gateway, &ask(json!({}))).json();
        assert_eq!(
            answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            expected
        );
        assert_eq!(answer["usage"]["prompt_tokens"], 100);
        let body = ask(json!({"stream": true, "stream_options": {"include_usage": true}}));
        let answer = chat(&gateway, &body);
        let events = sse::parse(&answer.body);
        let usage = events.iter().rev().nth(1).unwrap().json()["usage"].clone();
        assert_eq!(
            usage["prompt_tokens_details"]["cached_tokens"], expected,
            "{usage}"
        );
    }
}

#[test]
fn load_is_held_at_both_while_prefill_works_and_at_decode_until_the_last_byte() {
    static GO: [std::sync::Mutex<bool>; 2] =
        [std::sync::Mutex::new(false), std::sync::Mutex::new(false)];
    fn wait_for(at: usize) {
        wait_until("the test says so", DEADLINE, || *GO[at].lock().unwrap());
    }
    fn slow_prefill(request: &Request, wire: &mut Wire) {
        wait_for(0);
        prefills(request, wire);
    }
    fn slow_decode(_: &Request, wire: &mut Wire) {
        wire.stream_head();
        wire.chunk(sse::delta("a"));
        wait_for(1);
        wire.chunk(sse::finish("stop") + sse::DONE);
        wire.end();
    }
    let fleet = Fleet::new(&[("p", slow_prefill), ("d", slow_decode)]);
    let gateway = fleet.gateway("");
    let mut client = Client::connect(&gateway);
    client.start_chat(ask_stream());
    fleet.engine("p").wait_for_requests(1);
    let load = || (gateway.in_flight("p"), gateway.in_flight("d"));
    let pairs = |step: &str| gateway.metric("tidegate_split_pairs", &[&format!("step=\"{step}\"")]);
    assert_eq!(
        (load(), pairs("prefill"), pairs("decode")),
        ((1, 1), 1.0, 0.0)
    );
    assert!(gateway.metric("tidegate_backend_held_kv_tokens", &["backend=\"d\""]) > 1000.0);
    *GO[0].lock().unwrap() = true;
    let mut answer = client.head();
    assert!(
        client.read_until(&mut answer, "\"a\""),
        "it comes as it is made"
    );
    assert_eq!(
        (load(), pairs("prefill"), pairs("decode")),
        ((0, 1), 0.0, 1.0)
    );
    *GO[1].lock().unwrap() = true;
    while client.next_piece(&mut answer) {}
    assert!(answer.text().ends_with(sse::DONE));
    gateway.assert_idle();
    assert_eq!(pairs("decode"), 0.0);
    assert_eq!(gateway.metric("tidegate_backend_held_kv_tokens", &[]), 0.0);
    for (leg, backend) in [("prefill", "p"), ("decode", "d")] {
        let labels = [&*format!("leg=\"{leg}\""), "outcome=\"success\""];
        assert_eq!(gateway.metric("tidegate_split_legs_total", &labels), 1.0);
        let labels = [&*format!("backend=\"{backend}\""), "outcome=\"success\""];
        assert_eq!(
            gateway.metric("tidegate_backend_requests_total", &labels),
            1.0
        );
        let labels = [&*format!("leg=\"{leg}\"")];
        assert_eq!(
            gateway.metric("tidegate_split_leg_seconds_count", &labels),
            1.0
        );
    }
}

#[test]
fn time_to_first_token_covers_both_legs() {
    fn slow(request: &Request, wire: &mut Wire) {
        wire.pause(std::time::Duration::from_millis(300));
        prefills(request, wire);
    }
    let fleet = Fleet::new(&[("p", slow), ("d", answers)]);
    let gateway = fleet.gateway("");
    assert_eq!(chat(&gateway, &ask_stream()).status, 200);
    let ttft = gateway.metric(
        "tidegate_time_to_first_token_seconds_sum",
        &["backend=\"d\""],
    );
    assert!(ttft >= 0.3, "{ttft}");
    let decode = gateway.metric("tidegate_split_leg_seconds_sum", &["leg=\"decode\""]);
    assert!(decode < ttft);
}

#[test]
fn an_answer_that_was_kept_is_given_without_either_leg() {
    let fleet = Fleet::new(&[("p", prefills), ("d", answers)]);
    let gateway = fleet.gateway_with("", "response_cache: { enabled: true, backend: memory }\n");
    let body =
        ask(json!({"temperature": 0, "stream": true, "stream_options": {"include_usage": true}}));
    let first = chat(&gateway, &body);
    assert_eq!(
        (path(&first), first.header("x-cache")),
        ("prefill_then_decode", Some("MISS"))
    );
    wait_until("it is kept", DEADLINE, || gateway.inner.flights() == 0);
    let again = chat(&gateway, &body);
    assert_eq!((path(&again), again.header("x-cache")), ("", Some("HIT")));
    assert_eq!(again.body, first.body);
    assert!(first.text().contains(r#""cached_tokens":20"#), "{first:?}");
    assert_eq!(fleet.counts(), [("p", 1), ("d", 1)]);
}
