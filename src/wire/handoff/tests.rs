use super::*;
use serde_json::{Value, json};

fn peer(host: &str) -> Peer {
    Peer {
        host: host.into(),
        zmq_address: Some(format!("{host}:14579")),
        bootstrap_port: Some(8998),
        engine_id: Some(format!("engine-{host}")),
    }
}

fn legs(
    connector: &dyn Connector,
    body: &str,
    prefilled: Prefilled<'_>,
) -> (Value, Value, [String; 2]) {
    let (prefill, decode) = (peer("p"), peer("d"));
    let split = Split {
        body: &Bytes::copy_from_slice(body.as_bytes()),
        request_id: "req-1",
        transfer_id: (1 << 62) + 1,
        prefill: &prefill,
        decode: &decode,
    };
    let (first, second) = (
        connector.prefill(&split).unwrap(),
        connector.decode(&split, prefilled).unwrap(),
    );
    let json = |leg: &Leg| serde_json::from_slice(&leg.body).unwrap();
    (
        json(&first),
        json(&second),
        [first.request_id, second.request_id],
    )
}

const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":500,"min_tokens":100,"max_completion_tokens":800,"min_completion_tokens":2,"stream":true,"stream_options":{"include_usage":true,"x_new":{"deep":[1.0]}},"x_vendor":{"a":9007199254740993}}"#;

fn all() -> Vec<Box<dyn Connector>> {
    vec![
        Box::new(SharedStorage::default()),
        Box::new(Nixl),
        Box::new(Mooncake),
        Box::new(P2pNccl),
        Box::new(SgLang),
    ]
}

#[test]
fn prefill_makes_one_token_and_decode_has_all_that_the_client_asked_for() {
    let original: Value = serde_json::from_str(BODY).unwrap();
    for connector in all() {
        let (prefill, decode, _) = legs(&*connector, BODY, Prefilled::WithoutParams);
        for (name, value) in original.as_object().unwrap() {
            assert_eq!(
                &decode[name],
                value,
                "{}: decode's {name}",
                connector.name()
            );
        }
        if connector.name() == "sglang" {
            assert_eq!(prefill, decode, "both get the same");
            continue;
        }
        assert_eq!(prefill["max_tokens"], 1);
        assert_eq!(prefill["max_completion_tokens"], 1);
        assert_eq!(prefill["stream"], false);
        for gone in ["stream_options", "min_tokens", "min_completion_tokens"] {
            assert!(prefill.get(gone).is_none(), "{}: {gone}", connector.name());
        }
        assert_eq!(prefill["x_vendor"], original["x_vendor"]);
        assert_eq!(prefill["messages"], original["messages"]);
    }
}

#[test]
fn what_the_client_left_out_stays_out_on_the_decode_leg() {
    let body = r#"{"model":"m","prompt":[1,2,3],"max_tokens":null}"#;
    for connector in all() {
        let (prefill, decode, _) = legs(&*connector, body, Prefilled::WithoutParams);
        assert_eq!(decode["max_tokens"], Value::Null);
        assert!(decode.get("stream").is_none() && decode.get("max_completion_tokens").is_none());
        assert!(
            prefill.get("max_completion_tokens").is_none(),
            "a name that it did not use"
        );
    }
}

#[test]
fn every_connector_speaks_as_its_engines_expect() {
    let (prefill, decode, ids) = legs(&SharedStorage::default(), BODY, Prefilled::WithoutParams);
    assert!(
        prefill.get("kv_transfer_params").is_none() && decode.get("kv_transfer_params").is_none()
    );
    assert_eq!(ids, ["req-1", "req-1"]);
    let (prefill, ..) = legs(&Nixl, BODY, Prefilled::WithoutParams);
    assert_eq!(
        prefill["kv_transfer_params"],
        json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null})
    );
    let (prefill, decode, _) = legs(&Mooncake, BODY, Prefilled::NotAwaited);
    let id = ((1u64 << 62) + 1).to_string();
    assert_eq!(
        prefill["kv_transfer_params"],
        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id})
    );
    assert_eq!(
        decode["kv_transfer_params"],
        json!({"do_remote_prefill": true, "do_remote_decode": false, "transfer_id": id, "remote_bootstrap_addr": "p:8998", "remote_engine_id": "engine-p"})
    );
    let (.., ids) = legs(&P2pNccl, BODY, Prefilled::WithoutParams);
    assert_eq!(ids[0], ids[1]);
    assert!(ids[0].starts_with("___prefill_addr_p:14579___decode_addr_d:14579_"));
    let (prefill, ..) = legs(&SgLang, BODY, Prefilled::NotAwaited);
    assert_eq!(
        (&prefill["bootstrap_host"], &prefill["bootstrap_port"]),
        (&json!("p"), &json!(8998))
    );
    assert_eq!(prefill["bootstrap_room"], json!((1u64 << 62) + 1));
}

#[test]
fn parameters_of_prefill_pass_digit_by_digit() {
    let params = r#"{"remote_block_ids": [18446744073709551615, 1.0, 1e3], "x": "\u00e9" , "nested":{"b":2,"a":1}}"#;
    let answer = format!(r#"{{"id":"c","choices":[],"kv_transfer_params": {params} }}"#);
    let found = transfer_params(answer.as_bytes()).unwrap().unwrap();
    assert_eq!(found, params);
    let split = Split {
        body: &Bytes::from_static(BODY.as_bytes()),
        request_id: "r",
        transfer_id: 1,
        prefill: &peer("p"),
        decode: &peer("d"),
    };
    let leg = Nixl.decode(&split, Prefilled::Params(found)).unwrap();
    let text = std::str::from_utf8(&leg.body).unwrap();
    assert!(
        text.ends_with(&format!(r#","kv_transfer_params":{params}}}"#)),
        "{text}"
    );
}

#[test]
fn parameters_that_cannot_be_used_are_told_from_none() {
    for none in [r#"{"choices":[]}"#, r#"{"kv_transfer_params":null}"#] {
        assert_eq!(transfer_params(none.as_bytes()), Ok(None));
    }
    for (odd, fault) in [
        (r#"{"kv_transfer_params":"x"}"#, ParamsFault::NotAnObject),
        (r#"{"kv_transfer_params":[1]}"#, ParamsFault::NotAnObject),
        ("<html>", ParamsFault::NotAnAnswer),
        ("[1]", ParamsFault::NotAnAnswer),
    ] {
        assert_eq!(transfer_params(odd.as_bytes()), Err(fault), "{odd}");
    }
}

#[test]
fn a_pair_that_lacks_something_is_named_and_nothing_half_built_is_sent() {
    let bare = Peer::default();
    let split = Split {
        body: &Bytes::from_static(BODY.as_bytes()),
        request_id: "r",
        transfer_id: 1,
        prefill: &bare,
        decode: &bare,
    };
    assert!(Mooncake.decode(&split, Prefilled::NotAwaited).is_err());
    assert!(P2pNccl.prefill(&split).is_err());
    assert!(SgLang.prefill(&split).is_ok(), "it has a usual port");
}

#[test]
fn operators_parameters_go_with_each_leg_of_shared_storage() {
    let connector = SharedStorage {
        prefill_params: Some(r#"{"ns":"a","n":1.0}"#.into()),
        decode_params: Some(r#"{"ns":"b"}"#.into()),
    };
    let (prefill, decode, _) = legs(&connector, BODY, Prefilled::WithoutParams);
    assert_eq!(
        (
            &prefill["kv_transfer_params"]["ns"],
            &decode["kv_transfer_params"]["ns"]
        ),
        (&json!("a"), &json!("b"))
    );
}

#[test]
fn nixl_parameters_without_an_engine_are_no_hand_off_and_none_at_all_is_a_plain_one() {
    for odd in [
        "{}",
        r#"{"remote_block_ids":[1]}"#,
        r#"{"remote_engine_id":"e","remote_block_ids":null}"#,
    ] {
        assert!(Nixl.fault_of(Prefilled::Params(odd)).is_some(), "{odd}");
    }
    let whole = r#"{"remote_engine_id":"e","remote_block_ids":[1],"new":[{}]}"#;
    assert_eq!(Nixl.fault_of(Prefilled::Params(whole)), None);
    assert_eq!(Nixl.fault_of(Prefilled::WithoutParams), None);
}
