//! Each way of handing over, against engines that say what they were sent.

use super::*;
use crate::support::{DEADLINE, wait_until};

#[test]
fn nixl_parameters_go_from_prefill_to_decode_digit_by_digit() {
    let fleet = Fleet::new(&[("p", prefills_and_keeps), ("d", answers)]);
    let gateway = fleet.gateway("connector: nixl");
    assert_eq!(path(&chat(&gateway, &ask_stream())), "prefill_then_decode");
    let prefill = fleet.engine("p").only_request().json();
    assert_eq!(prefill["kv_transfer_params"]["do_remote_decode"], true);
    let decode = fleet.engine("d").only_request();
    let params = r#""kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"e","remote_block_ids":[18446744073709551615],"remote_host":"h","remote_port":1.50}"#;
    assert!(decode.text().contains(params), "{}", decode.text());
    assert_eq!(decode.json()["stream"], true);
}

#[test]
fn without_parameters_decode_computes_the_prompt_itself() {
    let fleet = Fleet::new(&[("p", prefills), ("d", answers)]);
    let gateway = fleet.gateway("connector: nixl");
    assert_eq!(chat(&gateway, &ask_stream()).status, 200);
    assert_eq!(fleet.engine("d").only_request().text(), ask_stream());
}

#[test]
fn parameters_that_cannot_be_used_are_an_error_of_the_prefill_worker() {
    fn text(_: &Request, wire: &mut Wire) {
        whole(wire, "", r#","kv_transfer_params":"x""#);
    }
    fn empty(_: &Request, wire: &mut Wire) {
        whole(wire, "", r#","kv_transfer_params":{}"#);
    }
    fn no_engine(_: &Request, wire: &mut Wire) {
        whole(
            wire,
            "",
            r#","kv_transfer_params":{"remote_block_ids":[1]}"#,
        );
    }
    for script in [text as Script, empty, no_engine] {
        let fleet = Fleet::new(&[("p", script), ("d", answers), ("u", answers)]);
        let strict = fleet.gateway("connector: nixl, fallback_to_unified: false");
        let before = strict.metric("tidegate_split_params_faults_total", &[]);
        let answer = chat(&strict, &ask_stream());
        assert_eq!(
            (answer.status, &*code(&answer)),
            (502, "prefill_failed"),
            "{answer:?}"
        );
        assert!(answer.text().contains("kv_transfer_params"), "{answer:?}");
        assert_eq!(
            strict.metric("tidegate_split_params_faults_total", &[]),
            before + 1.0
        );
        let gateway = fleet.gateway("connector: nixl");
        assert_eq!(path(&chat(&gateway, &ask_stream())), "fallback");
        assert_eq!(fleet.engine("d").count(), 0, "no half-built hand-off");
    }
}

#[test]
fn mooncake_and_sglang_send_both_legs_at_once() {
    fn waits_for_decode(request: &Request, wire: &mut Wire) {
        wait_until("decode was asked as well", DEADLINE, || {
            *ASKED.lock().unwrap()
        });
        prefills(request, wire);
    }
    static ASKED: std::sync::Mutex<bool> = std::sync::Mutex::new(false);
    fn decode(request: &Request, wire: &mut Wire) {
        *ASKED.lock().unwrap() = true;
        answers(request, wire);
    }
    for connector in ["mooncake", "sglang"] {
        *ASKED.lock().unwrap() = false;
        let fleet = Fleet::new(&[("p", waits_for_decode), ("d", decode)]);
        let gateway = fleet.gateway(&format!("connector: {connector}"));
        let answer = chat(&gateway, &ask(json!({"max_tokens": 50})));
        assert_eq!((answer.status, answer.backend()), (200, "d"), "{answer:?}");
        fleet.engine("p").wait_for_requests(1);
        let [p, d] = ["p", "d"].map(|name| fleet.engine(name).only_request().json());
        if connector == "sglang" {
            assert_eq!(p, d, "both get the same");
            assert_eq!(
                (&d["bootstrap_host"], &d["bootstrap_port"], &d["max_tokens"]),
                (&json!("127.0.0.1"), &json!(9), &json!(50))
            );
        } else {
            let [p, d] = [&p, &d].map(|leg| &leg["kv_transfer_params"]);
            assert_eq!(p["transfer_id"], d["transfer_id"]);
            assert_eq!(
                (&d["remote_engine_id"], &d["remote_bootstrap_addr"]),
                (&json!("id-p"), &json!("127.0.0.1:9"))
            );
        }
        gateway.assert_idle();
    }
}

#[test]
fn where_both_legs_go_at_once_a_failed_prefill_ends_decode_as_well() {
    for connector in ["mooncake", "sglang"] {
        let fleet = Fleet::new(&[("p", dies), ("d", hangs), ("u", answers)]);
        let gateway = fleet.gateway(&format!("connector: {connector}"));
        let answer = chat(&gateway, &ask_stream());
        assert_eq!((answer.status, path(&answer)), (200, "fallback"));
        gateway.assert_idle();
    }
}

#[test]
fn p2p_nccl_names_both_engines_in_the_request_id() {
    let fleet = Fleet::new(&[("p", prefills), ("d", answers)]);
    let gateway = fleet.gateway("connector: p2p_nccl");
    assert_eq!(chat(&gateway, &ask_stream()).status, 200);
    let id = |name: &str| {
        let request = fleet.engine(name).only_request();
        String::from_utf8(request.header("x-request-id").unwrap().to_vec()).unwrap()
    };
    assert_eq!(id("p"), id("d"));
    assert!(
        id("p").starts_with("___prefill_addr_p:1___decode_addr_d:1_"),
        "{}",
        id("p")
    );
}

#[test]
fn only_workers_of_one_connector_and_one_namespace_are_paired() {
    let fleet = Fleet::new(&[
        ("p1", prefills),
        ("p2", prefills),
        ("d1", answers),
        ("d2", answers),
    ]);
    let pools = ["a", "b", "a", "b"];
    let backends = fleet.engines.iter().zip(pools).map(|((name, role, engine), pool)| {
        format!(
            "  - {{ name: {name}, role: {role}, url: 'http://{}', models: [{MODEL}], external_storage: {{ endpoint: 'http://v', kv_namespace: {pool}, kv_transfer_params: {{ pool: {pool}, n: 9007199254740993 }} }} }}\n",
            engine.address
        )
    });
    let gateway = Gateway::with(
        &backends.collect::<String>(),
        "disaggregated_serving: { enabled: true }",
    );
    for _ in 0..20 {
        let answer = chat(&gateway, &ask_stream());
        let pair = (
            answer.header("x-tidegate-prefill-backend").unwrap(),
            answer.backend(),
        );
        assert!(matches!(pair, ("p1", "d1") | ("p2", "d2")), "{pair:?}");
    }
    for (name, pool) in [("p1", "a"), ("d1", "a"), ("p2", "b"), ("d2", "b")] {
        for request in fleet.engine(name).requests() {
            let expected =
                format!(r#""kv_transfer_params":{{"n":9007199254740993,"pool":"{pool}"}}"#);
            let other = format!(r#""kv_transfer_params":{{"pool":"{pool}","n":9007199254740993}}"#);
            assert!(
                request.text().contains(&expected) || request.text().contains(&other),
                "{}",
                request.text()
            );
        }
    }
}
