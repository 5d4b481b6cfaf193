//! Every encoding of the table decodes to the same events, and no input does harm.

use super::*;
use proptest::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};

/// JSON as msgpack; `{"$bytes": "hex"}` becomes a byte string.
fn pack(value: &Value) -> Vec<u8> {
    struct Packed<'a>(&'a Value);
    struct Bytes(Vec<u8>);
    impl Serialize for Bytes {
        fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
            s.serialize_bytes(&self.0)
        }
    }
    impl Serialize for Packed<'_> {
        fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
            match self.0 {
                Value::Array(items) => s.collect_seq(items.iter().map(Packed)),
                Value::Object(map) if map.contains_key("$bytes") => {
                    let hex = map["$bytes"].as_str().unwrap();
                    let byte = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
                    Bytes((0..hex.len()).step_by(2).map(byte).collect()).serialize(s)
                }
                Value::Object(map) => s.collect_map(map.iter().map(|(k, v)| (k, Packed(v)))),
                other => other.serialize(s),
            }
        }
    }
    rmp_serde::to_vec_named(&Packed(value)).unwrap()
}

fn only(value: Value) -> KvEvent {
    let mut batch = from_msgpack(&pack(&json!([1.5, [value], 3]))).unwrap();
    assert_eq!(
        (batch.ts, batch.rank, batch.events.len()),
        (1.5, Some(3), 1)
    );
    batch.events.remove(0)
}

fn stored() -> Stored {
    Stored {
        hashes: vec![11, 12],
        parent: Some(10),
        tokens: vec![1, 2, 3, 4],
        block_size: 2,
        medium: Medium::Gpu,
        lora: None,
        cache_salt: None,
    }
}

#[test]
fn stored_events_of_every_age_say_the_same() {
    let head = [
        json!("BlockStored"),
        json!([11, 12]),
        json!(10),
        json!([1, 2, 3, 4]),
        json!(2),
    ];
    let with = |tail: Value| {
        let tail = tail.as_array().unwrap().clone();
        Value::Array(head.iter().cloned().chain(tail).collect())
    };
    for tail in [
        json!([null]),
        json!([null, "GPU"]),
        json!([null, "GPU", null]),
        json!([null, "GPU", null, null]),
        json!([null, "GPU", null, [[], []], 0]),
        json!([null, "GPU", null, null, 0, "full_attention", null]),
        json!([null, "GPU", null, null, 0, "full_attention", null, {"x": 1}, "unknown", 7.5]),
        json!([]),
    ] {
        assert_eq!(
            only(with(tail.clone())),
            KvEvent::Stored(stored()),
            "{tail}"
        );
    }
    let map = json!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": 10, "token_ids": [1, 2, 3, 4],
        "block_size": 2, "lora_id": null, "medium": null, "locality": "LOCAL", "skipped_blocks": [1]});
    assert_eq!(only(map), KvEvent::Stored(stored()));
    let http = json!({"block_hashes": [11, 12], "parent_block_hash": 10, "token_ids": [1, 2, 3, 4], "block_size": 2, "type": "cache_created", "medium": "GPU", "lora_name": null});
    assert_eq!(only(http), KvEvent::Stored(stored()));
}

#[test]
fn adapters_salts_and_media_are_found_wherever_they_stand() {
    let stored_with = |tail: Value| {
        let mut event = vec![
            json!("BlockStored"),
            json!([11, 12]),
            json!(10),
            json!([1, 2, 3, 4]),
            json!(2),
        ];
        event.extend(tail.as_array().unwrap().clone());
        match only(Value::Array(event)) {
            KvEvent::Stored(stored) => stored,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(stored_with(json!([7, "CPU"])).lora.as_deref(), Some("7"));
    let named = stored_with(json!([
        7,
        "CPU_PINNED",
        "sql-adapter",
        [["sql-adapter", "salty"], null],
        0
    ]));
    assert_eq!(
        (named.lora.as_deref(), named.cache_salt.as_deref()),
        (Some("sql-adapter"), Some("salty"))
    );
    assert_eq!(named.medium, Medium::Cpu);
    assert_eq!(
        stored_with(json!([null, "EXTERNAL", {"cache_salt": "s"}]))
            .cache_salt
            .as_deref(),
        Some("s")
    );
    let copies = json!(["BlockStored", [5], null, [], 16, null, "STORAGE"]);
    assert!(
        matches!(only(copies), KvEvent::Stored(s) if s.tokens.is_empty() && s.medium == Medium::Storage)
    );
}

#[test]
fn hashes_may_be_signed_unsigned_or_digests() {
    let digest =
        json!({"$bytes": "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"});
    let removed = only(json!(["BlockRemoved", [-1, u64::MAX, 7, digest], "GPU"]));
    let hashes = vec![u64::MAX, u64::MAX, 7, 0x1819_1a1b_1c1d_1e1f];
    assert_eq!(
        removed,
        KvEvent::Removed {
            hashes,
            medium: Medium::Gpu
        }
    );
    assert_eq!(
        only(json!(["BlockRemoved", ["no hash"]])),
        KvEvent::Odd(Odd::Field)
    );
}

#[test]
fn removals_offloads_and_clears_of_both_forms_decode() {
    let removed = |medium| KvEvent::Removed {
        hashes: vec![5],
        medium,
    };
    assert_eq!(only(json!(["BlockRemoved", [5]])), removed(Medium::Gpu));
    assert_eq!(
        only(json!(["BlockRemoved", [5], "CPU", 0])),
        removed(Medium::Cpu)
    );
    assert_eq!(
        only(json!({"type": "cache_evicted", "block_hashes": [5], "medium": "GPU"})),
        removed(Medium::Gpu)
    );
    assert_eq!(
        only(json!({"type": "cache_offloaded", "block_hashes": [7], "medium": "STORAGE"})),
        KvEvent::Offloaded { hashes: vec![7] }
    );
    assert_eq!(only(json!(["AllBlocksCleared"])), KvEvent::Cleared);
    assert_eq!(only(json!({"type": "cache_cleared"})), KvEvent::Cleared);
}

#[test]
fn pairs_of_tokens_count_once_and_wrong_counts_are_odd() {
    let pairs = json!([
        "BlockStored",
        [11, 12],
        10,
        [[1, 2], [2, 3], [3, 4], [4, 5]],
        2,
        null
    ]);
    assert_eq!(only(pairs), KvEvent::Stored(stored()));
    for event in [
        json!(["BlockStored", [11, 12], 10, [1, 2, 3], 2]),
        json!(["BlockStored", [11], 10, [], 0]),
        json!(["BlockStored", [], 10, [], 2]),
    ] {
        assert_eq!(
            only(event.clone()),
            KvEvent::Odd(Odd::TokenCount),
            "{event}"
        );
    }
}

#[test]
fn groups_that_do_not_cover_the_prefix_are_left_out() {
    let windowed = json!([
        "BlockStored",
        [11],
        null,
        [1, 2],
        2,
        null,
        "GPU",
        null,
        null,
        1,
        "sliding_window",
        4096
    ]);
    assert_eq!(only(windowed), KvEvent::Odd(Odd::Group));
    assert_eq!(
        only(json!(["BlockRemoved", [5], "GPU", 2])),
        KvEvent::Odd(Odd::Group)
    );
    let mla = json!([
        "BlockStored",
        [11],
        null,
        [1, 2],
        2,
        null,
        "GPU",
        null,
        null,
        0,
        "mla_attention",
        null
    ]);
    assert!(
        matches!(only(mla), KvEvent::Stored(_)),
        "models with latent attention cover the prefix too"
    );
    let many: Vec<Value> = vec![Value::Null; 70_000];
    assert!(
        from_msgpack(&pack(&json!([1.0, many]))).is_err(),
        "no engine sends so many events at once"
    );
    let full = json!({"type": "BlockRemoved", "block_hashes": [5], "group_idx": 1, "kv_cache_spec_kind": "full_attention"});
    assert!(matches!(only(full), KvEvent::Removed { .. }));
}

#[test]
fn one_odd_event_costs_no_other() {
    let batch = json!([
        1.0,
        [
            ["NewKind", 1],
            7,
            null,
            ["BlockRemoved", [5], "HOLOGRAM"],
            ["AllBlocksCleared"]
        ]
    ]);
    let batch = from_msgpack(&pack(&batch)).unwrap();
    use KvEvent::Odd as O;
    assert_eq!(
        batch.events,
        [
            O(Odd::Kind),
            O(Odd::Kind),
            O(Odd::Kind),
            O(Odd::Medium),
            KvEvent::Cleared
        ]
    );
    assert_eq!(batch.rank, None, "the oldest batches have two elements");
}

#[test]
fn batches_may_be_maps_and_the_http_form_carries_its_sequence() {
    let map = json!({"ts": 2, "events": [["AllBlocksCleared"]], "data_parallel_rank": 1});
    let batch = from_msgpack(&pack(&map)).unwrap();
    assert_eq!((batch.ts, batch.rank, batch.seq), (2.0, Some(1), None));
    let http = r#"{"seq":41,"ts":1767225600.25,"dp_rank":0,"events":[{"type":"cache_offloaded","block_hashes":[7],"medium":"STORAGE"}]}"#;
    let batch = from_json(http.as_bytes()).unwrap();
    assert_eq!((batch.seq, batch.rank), (Some(41), Some(0)));
    for nothing in ["{}", "7", "[]", "null", "[1.0]", "{\"events\":7}"] {
        assert!(from_json(nothing.as_bytes()).is_err(), "{nothing}");
    }
}

#[test]
fn hostile_lengths_and_depths_are_refused_without_memory() {
    // an array that claims four billion elements, in every place where one may stand
    let claim = [0xdd, 0xff, 0xff, 0xff, 0xff];
    assert!(from_msgpack(&claim).is_err());
    assert!(from_msgpack(&[&[0x92, 0x01][..], &claim].concat()).is_err());
    let tokens = [
        &[0x92, 0x01, 0x91, 0x95, 0xab][..],
        b"BlockStored",
        &[0x91, 0x05, 0xc0],
        &claim,
    ]
    .concat();
    assert!(from_msgpack(&tokens).is_err());
    let bytes = [
        &[0x92, 0x01, 0x91, 0x92, 0xac][..],
        b"BlockRemoved",
        &[0x91, 0xc6, 0xff, 0xff, 0xff, 0xff],
    ]
    .concat();
    assert!(from_msgpack(&bytes).is_err());
    let deep = vec![0x91; 100_000];
    assert!(from_msgpack(&deep).is_err());
    let deep = "[".repeat(100_000);
    assert!(from_json(deep.as_bytes()).is_err());
}

fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let good = json!([1.5, [
        ["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, null, "GPU", null, [["k"]], 0],
        {"type": "BlockRemoved", "block_hashes": [5, -5], "medium": "CPU"},
        ["AllBlocksCleared"]
    ], 0]);
    let bytes = pack(&good);
    let flips = proptest::collection::vec((0..bytes.len(), any::<u8>()), 0..12);
    (flips, 0..=bytes.len()).prop_map(move |(flips, end)| {
        let mut bytes = bytes.clone();
        for (at, byte) in flips {
            bytes[at] = byte;
        }
        bytes.truncate(end);
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn no_mutation_of_a_frame_panics_or_breaks_a_rule(bytes in mutated()) {
        if let Ok(batch) = from_msgpack(&bytes) {
            for event in batch.events {
                if let KvEvent::Stored(stored) = event {
                    let full = stored.tokens.len() == stored.hashes.len() * stored.block_size as usize;
                    prop_assert!(full || stored.tokens.is_empty() && stored.medium != Medium::Gpu);
                }
            }
        }
    }

    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = from_msgpack(&bytes);
        let _ = from_json(&bytes);
    }
}
