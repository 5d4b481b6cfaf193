//! The owner's examples load unchanged; faults name their paths, all at once.

use super::*;
use std::time::Duration;

fn source(text: &str) -> Source {
    Source {
        name: "test.yaml".into(),
        text: text.into(),
    }
}

fn environment(pairs: &[(&str, &str)]) -> Environment {
    pairs
        .iter()
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .collect()
}

fn load_text(text: &str) -> Result<Loaded, Faults> {
    load(&[source(text)], &Environment::new())
}

fn faults(text: &str) -> Vec<String> {
    let faults = load_text(text).expect_err("should have faults");
    faults.0.iter().map(Fault::to_string).collect()
}

const ONE: &str = "backends: [{name: a, url: 'http://a:8000'}]\n";
const FULL: &str = include_str!("../../../config/seed/4-full-example.yaml");

fn keys() -> Environment {
    environment(&[
        ("VAST_ACCESS_KEY", "AK-marker"),
        ("VAST_SECRET_KEY", "SK-marker"),
    ])
}

#[test]
fn the_full_example_loads_unchanged_with_its_meaning() {
    let loaded = load(&[source(FULL)], &keys()).unwrap();
    let s = &loaded.settings;
    assert_eq!((s.server.host.as_str(), s.server.port), ("0.0.0.0", 8080));
    assert_eq!(s.selection_strategy, Strategy::LeastLatency);
    assert!(s.prefix_routing.enabled);
    assert_eq!(s.prefix_routing.virtual_nodes, 200);
    assert_eq!(s.response_cache.l1_max_value_size, 524_288);
    assert_eq!(
        s.response_cache.redis.command_timeout,
        Duration::from_secs(1)
    );
    assert_eq!(
        s.response_cache.l2.ttl_override,
        Some(Duration::from_secs(7 * 86_400))
    );
    assert_eq!(
        &*s.response_cache.l2.access_key.as_ref().unwrap().0,
        "AK-marker"
    );
    assert!(s.kv_cache_index.shared);
    assert_eq!(s.kv_cache_index.event_sources.len(), 5);
    assert_eq!(s.kv_cache_index.scoring.min_overlap_threshold, 0.25);
    assert!(s.disaggregated_serving.enabled);
    assert_eq!(s.backends.len(), 6);
    assert_eq!(
        (s.backends[2].weight, s.backends[2].role),
        (2, routing::view::Role::Decode)
    );
    assert_eq!(
        &*s.backends[0].models[0],
        "meta-llama/Llama-3.1-70B-Instruct"
    );
    assert_eq!(s.health_checks.interval, Duration::from_secs(15));
    assert_eq!(s.circuit_breaker.recovery_timeout, Duration::from_secs(30));
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
}

#[test]
fn the_fragments_load_over_a_file_that_names_their_backends() {
    let names = "backends: [{name: vllm-1, url: 'http://vllm-1:8000'}, {name: vllm-2, url: 'http://vllm-2:8000'}]";
    for fragment in [
        include_str!("../../../config/seed/1-response-cache.yaml"),
        include_str!("../../../config/seed/2-kv-cache-index.yaml"),
        include_str!("../../../config/seed/3-disaggregated-serving.yaml"),
    ] {
        let loaded = load(&[source(names), source(fragment)], &keys());
        loaded.unwrap_or_else(|faults| panic!("{faults}\n{fragment}"));
    }
}

#[test]
fn secrets_are_in_no_printed_form() {
    let text = "\
backends: [{name: a, url: 'http://a', api_key: KEY-marker}]
response_cache: {redis: {url: 'redis://user:PW-marker@host:1'}, l2: {access_key: AK-marker, secret_key: SK-marker}}
disaggregated_serving: {default_external_storage: {endpoint: 'http://v', kv_namespace: n, credentials: CR-marker}}";
    let loaded = load_text(text).unwrap();
    for printed in [
        effective_yaml(&loaded.effective),
        format!("{loaded:?}"),
        format!("{:#?}", loaded.settings),
    ] {
        assert!(!printed.contains("marker"), "{printed}");
    }
    assert!(effective_yaml(&loaded.effective).contains("redis://***@host:1"));
}

#[test]
fn what_is_printed_loads_again_to_the_same() {
    let loaded = load(&[source(FULL)], &keys()).unwrap();
    let printed = effective_yaml(&loaded.effective);
    let again = load_text(&printed).unwrap_or_else(|faults| panic!("{faults}\n{printed}"));
    assert_eq!(effective_yaml(&again.effective), printed);
}

#[test]
fn all_faults_are_reported_at_once_with_paths_and_near_misses() {
    let found = faults(
        "\
server: {prot: 8080, keep_alive: 75, host: '${NOPE}'}
logging: {level: 'nonsense=='}
circuit_breaker: {recovery_timeout: 0s}
session_header: 'x session'
selection_strategy: Fastest
redis: {url: 'redis://x'}
retry: 5
backends: [{name: a, url: 'http://a'}, {nme: b, url: 'ftp://b', weight: 0, role: chef}]",
    );
    for expected in [
        "server.host: needs the environment variable NOPE, which is not set",
        "logging.level: error parsing level filter: expected one of \"off\", \"error\", \"warn\", \"info\", \"debug\", \"trace\", or a number 0-5",
        "circuit_breaker.recovery_timeout: must be at least 1ms",
        "session_header: is not a header name",
        "server.prot: unknown key, did you mean `server.port`?",
        "server.keep_alive: must be a duration with a unit (ms, s, m, h, d), for example \"15s\"",
        "selection_strategy: must be one of RoundRobin, WeightedRoundRobin, Random, LeastConnections, LeastLatency, ConsistentHash, PowerOfTwo",
        "redis: unknown key, did you mean `response_cache.redis`?",
        "retry: must be a section with keys of its own, not a number",
        "backends[1].name: is required",
        "backends[1].nme: unknown key, did you mean `backends[].name`?",
        "backends[1].url: must begin with http:// or https://, for example http://vllm-1:8000",
        "backends[1].weight: must be a whole number from 1 to 1000",
        "backends[1].role: must be one of unified, prefill, decode",
    ] {
        assert!(
            found.iter().any(|f| f == expected),
            "missing: {expected}\n{found:#?}"
        );
    }
    assert_eq!(found.len(), 14, "{found:#?}");
}

#[test]
fn duplicate_names_and_spellings_of_one_url_are_refused() {
    let found =
        faults("backends: [{name: a, url: 'http://a:8000'}, {name: a, url: 'http://A:8000/v1/'}]");
    assert_eq!(
        found,
        [
            "backends[1].name: `a` is also the name of backends[0]",
            "backends[1].url: is the same backend as backends[0]",
        ]
    );
    assert!(faults("server: {port: 1}")[0].starts_with("backends: needs at least one"));
}

#[test]
fn wrong_references_between_sections_are_faults() {
    let found = faults("\
backends: [{name: a, url: 'http://a'}]
kv_cache_index: {enabled: true, backend: redis, event_sources: [{backend_name: b, endpoint: 'http://a/e'}, {backend_name: a, endpoint: 'gopher://a'}, {backend_name: a, endpoint: 'wss://a'}]}
response_cache: {enabled: true, backend: tiered, l1: {type: redis}}
disaggregated_serving: {enabled: true}
model_aliases: {x: y, y: z}
fallback_chains: {m: [x, m]}");
    for expected in [
        "kv_cache_index.event_sources[0].backend_name: no backend is named `b`; there are: a",
        "kv_cache_index.event_sources[1].endpoint: must begin with one of tcp://, ws://, wss://, http://, https://",
        "kv_cache_index.event_sources[2].backend_name: has a source already; for several data-parallel ranks behind one backend set dp_size",
        "response_cache.redis.url: is required by kv_cache_index.backend: redis",
        "response_cache.redis.url: is required by the chosen backend",
        "response_cache.l2.endpoint: is required by backend tiered",
        "response_cache.l2.bucket: is required by backend tiered",
        "disaggregated_serving.enabled: needs at least one backend with role: prefill",
        "disaggregated_serving.enabled: needs at least one backend with role: decode",
        "model_aliases.x: points to `y`, which is an alias itself",
        "fallback_chains.m: `x` is an alias, name the model: `y`",
        "fallback_chains.m: has the model itself in its chain",
    ] {
        assert!(
            found.iter().any(|f| f == expected),
            "missing: {expected}\n{found:#?}"
        );
    }
}

#[test]
fn an_unset_variable_is_a_fault_of_its_key_in_every_section() {
    let text = "\
server: {host: '${A}'}
response_cache: {redis: {url: 'redis://:${B}@r'}, l2: {secret_key: '${C}'}}
backends: [{name: a, url: '${D}', api_key: '${E}'}]
upstream: {connect_timeout: '${F:-3s}'}";
    let found = faults(text);
    for (path, name) in [
        ("server.host", "A"),
        ("response_cache.redis.url", "B"),
        ("response_cache.l2.secret_key", "C"),
        ("backends[0].url", "D"),
        ("backends[0].api_key", "E"),
    ] {
        let expected = format!("{path}: needs the environment variable {name}, which is not set");
        assert!(found.contains(&expected), "missing: {expected}\n{found:#?}");
    }
    assert_eq!(found.len(), 5, "{found:#?}");
    let set = environment(&[
        ("A", "h"),
        ("B", "p"),
        ("C", "c"),
        ("D", "http://d"),
        ("E", "e"),
    ]);
    load(&[source(text)], &set).unwrap_or_else(|faults| panic!("{faults}"));
}

#[test]
fn an_empty_secret_is_a_fault_and_defaults_and_escapes_work() {
    let text = "backends: [{name: a, url: 'http://a', api_key: '${K}'}]";
    let empty = load(&[source(text)], &environment(&[("K", "")])).unwrap_err();
    assert_eq!(
        empty.to_string(),
        "backends[0].api_key: is empty; remove the key to use none"
    );
    let text = "backends: [{name: a, url: 'http://a', api_key: '${K:-dflt}'}, {name: b, url: 'http://b', api_key: '$${K}'}]";
    let loaded = load_text(text).unwrap().settings;
    assert_eq!(&*loaded.backends[0].api_key.as_ref().unwrap().0, "dflt");
    assert_eq!(&*loaded.backends[1].api_key.as_ref().unwrap().0, "${K}");
}

#[test]
fn what_is_no_plain_variable_is_a_fault_and_not_a_wrong_value() {
    for value in ["${A:-${B}}", "${}", "${A B}", "${A", "${1A}"] {
        let text = format!("backends: [{{name: a, url: 'http://a', api_key: '{value}'}}]");
        let loaded = load(&[source(&text)], &environment(&[("A", "x"), ("B", "y")]));
        let faults = loaded.expect_err(value);
        assert_eq!(faults.0[0].path, "backends[0].api_key", "{value}");
    }
}

#[test]
fn a_backend_whose_models_nobody_would_ask_for_is_a_fault() {
    let found = faults(&format!("{ONE}health_checks: {{enabled: false}}"));
    assert!(
        found[0].starts_with("backends[0].models: is required"),
        "{found:?}"
    );
}

#[test]
fn what_a_connector_must_be_told_of_its_workers_is_missed_by_its_path() {
    let workers = |connector: &str, more: &str| {
        format!(
            "disaggregated_serving: {{enabled: true, connector: {connector}}}
backends:
  - {{name: p, url: 'http://p', role: prefill, models: [m]{more}}}
  - {{name: d, url: 'http://d', role: decode, models: [m]{more}}}
  - {{name: u, url: 'http://u', models: [m]}}"
        )
    };
    let missing = |key: &str, at: usize| {
        format!("backends[{at}].kv_peer.{key}: is required for this backend's connector")
    };
    let found = faults(&workers("p2p_nccl", ""));
    assert_eq!(
        found,
        [missing("zmq_address", 0), missing("zmq_address", 1)]
    );
    assert_eq!(
        faults(&workers("mooncake", "")),
        [missing("bootstrap_port", 0)]
    );
    for (connector, more) in [
        ("shared_storage", ""),
        ("nixl", ""),
        ("sglang", ""),
        ("mooncake", ", kv_peer: {bootstrap_port: 8998}"),
        ("p2p_nccl", ", kv_peer: {zmq_address: 'h:1'}"),
        ("p2p_nccl", ", connector: nixl"),
    ] {
        let loaded = load_text(&workers(connector, more));
        loaded.unwrap_or_else(|faults| panic!("{connector}: {faults}"));
    }
    let wrong = faults(&workers(
        "nxil",
        ", external_storage: {endpoint: 'http://v', kv_namespace: n, kv_transfer_params: x}",
    ));
    assert!(
        wrong[0].contains("disaggregated_serving.connector: must be one of shared_storage, nixl"),
        "{wrong:?}"
    );
    assert!(
        wrong
            .iter()
            .any(|fault| fault.contains("kv_transfer_params: must be a map")),
        "{wrong:?}"
    );
}

#[test]
fn keys_are_hashed_as_they_are_read_and_their_slips_are_named() {
    let loaded = load_text(&format!(
        "{ONE}api_keys: {{keys: [{{name: k, key: 'a-very-secret-key', expires: '2027-01-31'}}]}}"
    ))
    .unwrap();
    let key = &loaded.settings.api_keys.keys[0];
    assert_eq!((&*key.tenant, key.expires), ("k", Some(1_801_353_600)));
    assert!(!format!("{:?}", loaded.settings).contains("a-very-secret"));
    assert!(!effective_yaml(&loaded.effective).contains("a-very-secret"));
    let found = faults(&format!(
        "{ONE}api_keys:
  keys:
    - {{name: k, key: short}}
    - {{name: k, sha256: xyz}}
    - {{name: both, key: 'a-very-secret-key', sha256: '{}'}}
    - {{name: none}}
    - {{name: odd, key: 'another-secret-key', scopes: [everything], expires: tomorrow}}
    - {{name: again, key: 'another-secret-key'}}",
        "ab".repeat(32)
    ));
    for expected in [
        "api_keys.keys[0].key: must have at least 16 characters",
        "api_keys.keys[1].sha256: must be 64 hexadecimal digits",
        "api_keys.keys[2].key: is required, or sha256 in its place, and not both",
        "api_keys.keys[3].key: is required, or sha256 in its place, and not both",
        "api_keys.keys[4].scopes: `everything` is not one of inference, models, admin",
        "api_keys.keys[4].expires: must be a day",
        "api_keys.keys[1].name: `k` is also the name of api_keys.keys[0]",
        "api_keys.keys[5]: is the same key as api_keys.keys[4]",
    ] {
        assert!(
            found.iter().any(|fault| fault.starts_with(expected)),
            "missing: {expected}\n{found:#?}"
        );
    }
    let file = keys_of("k.yaml", "keys: [{name: a, sha: x}]\nmode: blocking", &[]).unwrap_err();
    assert!(file.to_string().contains("keys[0].sha"), "{file}");
}

#[test]
fn a_variables_value_arrives_byte_for_byte_whatever_it_holds() {
    for value in [
        "p@ss: #1 \"q\" {x}",
        "two\nlines",
        "00123",
        "true",
        "${OTHER}",
        "- a\n- b",
    ] {
        let text = "backends: [{name: a, url: 'http://a', api_key: '${V}'}]";
        let loaded = load(&[source(text)], &environment(&[("V", value)])).unwrap();
        assert_eq!(
            &*loaded.settings.backends[0].api_key.as_ref().unwrap().0,
            value
        );
    }
    let unquoted = faults("backends: [{name: a, url: 'http://a', api_key: 00123}]");
    assert_eq!(
        unquoted,
        ["backends[0].api_key: must be a text, not a number; put it in quotes"]
    );
}

#[test]
fn the_environment_overrides_files_and_later_files_earlier_ones() {
    let first = source(&format!("{ONE}server: {{port: 1, host: first}}\n"));
    let second = source("server: {port: 2}");
    let loaded = load(&[first.clone(), second.clone()], &Environment::new()).unwrap();
    assert_eq!(
        (
            loaded.settings.server.port,
            loaded.settings.server.host.as_str()
        ),
        (2, "first")
    );
    let env = environment(&[
        ("TIDEGATE__SERVER__PORT", "3"),
        ("TIDEGATE__UPSTREAM__IDLE_TIMEOUT", "9s"),
        ("TIDEGATE_TEST_X", "1"),
    ]);
    let loaded = load(&[first.clone(), second], &env).unwrap();
    assert_eq!(loaded.settings.server.port, 3);
    assert_eq!(
        loaded.settings.upstream.idle_timeout,
        Duration::from_secs(9)
    );
    let slip = load(&[first], &environment(&[("TIDEGATE__SERVER__PROT", "3")])).unwrap_err();
    assert_eq!(
        slip.to_string(),
        "server.prot: unknown key, did you mean `server.port`?"
    );
}

#[test]
fn merge_keys_are_refused_and_extension_blocks_allowed() {
    let text = "x-defaults: &d {role: unified}\nbackends: [{name: a, url: 'http://a', <<: *d}]";
    let found = faults(text);
    assert!(
        found
            .iter()
            .any(|f| f.starts_with("backends[0].<<: YAML merge keys")),
        "{found:?}"
    );
    let text = "x-defaults: &u 'http://a'\nbackends: [{name: a, url: *u}]";
    assert_eq!(
        load_text(text).unwrap().settings.backends[0].url.host(),
        "a"
    );
}

#[test]
fn broken_yaml_names_its_file() {
    let found = faults("server: {port: 1");
    assert!(found[0].starts_with("test.yaml: "), "{found:?}");
}

#[test]
fn model_names_keep_their_dots_slashes_and_case() {
    let text =
        format!("{ONE}model_aliases: {{GPT-4.1: meta-llama/Llama-3.1-70B-Instruct, a.b: c}}");
    let aliases = load_text(&text).unwrap().settings.model_aliases;
    assert_eq!(&*aliases["GPT-4.1"], "meta-llama/Llama-3.1-70B-Instruct");
    assert_eq!(&*aliases["a.b"], "c");
}

#[test]
fn the_reference_file_is_what_the_code_says() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../config/tidegate.yaml");
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == reference_yaml(),
        "config/tidegate.yaml differs from the code: run `cargo run -- print-config --reference > config/tidegate.yaml`"
    );
    let with_backend = [source(&written), source(ONE)];
    let loaded = load(&with_backend, &Environment::new()).unwrap_or_else(|f| panic!("{f}"));
    let bare = load_text(ONE).unwrap();
    assert_eq!(
        effective_yaml(&loaded.effective),
        effective_yaml(&bare.effective),
        "the file holds the defaults"
    );
}
