//! The owner's six commands and the flags of real ones.

use super::*;
use crate::config::KvRole;

const COMMANDS: &str = include_str!("../../config/seed/5-engine-commands.txt");

/// Splits a shell script of simple commands into words: backslash before a line end, single quotes, blank lines between commands.
fn commands(script: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quoted = false;
    let mut letters = script.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            _ if quoted => word.get_or_insert_default().push(letter),
            '\\' if letters.peek() == Some(&'\n') => {
                letters.next();
            }
            _ if letter.is_whitespace() => {
                let command = commands.last_mut().unwrap();
                command.extend(word.take());
                if letter == '\n' && !command.is_empty() {
                    commands.push(Vec::new());
                }
            }
            _ => word.get_or_insert_default().push(letter),
        }
    }
    commands.last_mut().unwrap().extend(word);
    commands.retain(|command| !command.is_empty());
    commands
}

fn seed_configs() -> Vec<SimConfig> {
    commands(COMMANDS)
        .into_iter()
        .map(|words| SimConfig::from_args(words).unwrap())
        .collect()
}

fn parse(line: &str) -> Result<SimConfig, clap::Error> {
    SimConfig::from_args(line.split_whitespace())
}

#[test]
fn the_six_seed_commands_run_unchanged() {
    let configs = seed_configs();
    assert_eq!(configs.len(), 6);
    for config in &configs {
        assert_eq!(config.model(), "meta-llama/Llama-3.1-70B-Instruct");
        assert_eq!((config.host.as_str(), config.port), ("0.0.0.0", 8000));
        assert!(config.prefix_caching && config.prompt_tokens_details);
    }
    let lengths: Vec<usize> = configs.iter().map(|config| config.max_model_len).collect();
    assert_eq!(lengths, [32768, 131_072, 131_072, 32768, 32768, 32768]);
}

#[test]
fn the_seed_commands_keep_roles_and_floats() {
    let configs = seed_configs();
    let roles: Vec<Option<KvRole>> = configs
        .iter()
        .map(|config| config.kv_transfer.as_ref().map(|kv| kv.kv_role))
        .collect();
    use KvRole::{KvBoth, KvConsumer, KvProducer};
    assert_eq!(
        roles,
        [
            Some(KvBoth),
            Some(KvProducer),
            Some(KvConsumer),
            Some(KvProducer),
            Some(KvConsumer),
            None
        ]
    );
    let first = configs[0].kv_transfer.as_ref().unwrap();
    assert_eq!(first.kv_buffer_size, Some(4e9));
    assert_eq!(
        first.kv_connector_extra_config["kv_namespace"],
        "inference/kv-cache"
    );
    assert_eq!(
        configs[3].kv_transfer.as_ref().unwrap().kv_buffer_size,
        Some(8e9)
    );
    assert!(
        configs[3].num_blocks < configs[4].num_blocks,
        "0.85 of the memory holds fewer blocks than 0.90"
    );
}

#[test]
fn strict_vllm_omits_cached_tokens_unless_asked() {
    assert!(
        !parse("vllm serve m --strict-vllm")
            .unwrap()
            .prompt_tokens_details
    );
    assert!(
        parse("vllm serve m --strict-vllm --enable-prompt-tokens-details")
            .unwrap()
            .prompt_tokens_details
    );
}

#[test]
fn flags_of_real_commands_are_taken() {
    let config = parse(
        "vllm serve Qwen/Qwen2.5-7B --trust-remote-code --dtype bfloat16 --swap-space 4 --served-model-name qwen alias --api-key k1 \
         --enable-auto-tool-choice --tool-call-parser hermes --block-size 32 --max-num-seqs 64 --max_num_batched_tokens=4096 \
         --num-gpu-blocks-override 500 --enable-chunked-prefill --max-model-len 8K --kv-events-config {\"buffer_steps\":7}",
    )
    .unwrap();
    assert_eq!(config.models, ["qwen", "alias"]);
    assert_eq!(config.api_keys, ["k1"]);
    assert_eq!(
        (
            config.block_size,
            config.num_blocks,
            config.max_num_seqs,
            config.max_num_batched_tokens
        ),
        (32, 500, 64, 4096)
    );
    assert_eq!(
        (config.max_model_len, config.kv_events.buffer_steps),
        (8192, 7)
    );
}

#[test]
fn the_last_of_equal_flags_counts() {
    let config = parse("vllm serve m --port 1 --dtype auto --port 2 --dtype half").unwrap();
    assert_eq!(config.port, 2);
    assert!(
        !parse("vllm serve m --enable-prefix-caching --no-enable-prefix-caching")
            .unwrap()
            .prefix_caching
    );
    assert!(
        parse("vllm serve m --no-enable-prefix-caching --enable-prefix-caching")
            .unwrap()
            .prefix_caching
    );
}

#[test]
fn faults_in_a_command_are_named() {
    let told = |line: &str| parse(line).unwrap_err().to_string();
    assert!(
        told("vllm serve m --kv-transfer-config {\"kv_role\":\"kv_maybe\"}")
            .contains("--kv-transfer-config")
    );
    assert!(
        told("vllm serve m --max-model-len 4000 --num-gpu-blocks-override 10")
            .contains("160 tokens")
    );
    assert!(told("vllm serve m --max-num-seqs 9000").contains("max_num_batched_tokens"));
    assert!(told("vllm serve m --sim-fail-rate 2").contains("from 0 to 1"));
    assert!(told("vllm serve m --max-modle-len 4000").contains("--max-model-len"));
    assert!(told("vllm serve").contains("MODEL"));
}

#[test]
fn help_groups_the_simulators_flags() {
    let help = parse("vllm serve --help").unwrap_err().to_string();
    assert!(
        help.contains("Simulator:") && help.contains("--sim-time-scale"),
        "{help}"
    );
    let simulator = help.split("Simulator:").nth(1).unwrap_or_default();
    assert!(
        simulator.contains("--sim-kv-events-encoding") && simulator.contains("--sim-kv-offload"),
        "{help}"
    );
}

#[test]
fn kv_event_flags_are_taken() {
    use crate::kv_events::{EventEncoding, HashForm, KvPublisher, ReplayFraming};
    let config = parse(
        "vllm serve m --kv-events-config {\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:7557\",\
         \"replay_endpoint\":\"tcp://*:7558\",\"buffer_steps\":9,\"hwm\":8,\"max_queue_size\":7,\"topic\":\"kv\"} \
         --sim-kv-events-encoding map --sim-kv-events-hash bytes --sim-kv-events-replay-framing old --sim-kv-events-drop-every 3 \
         --sim-kv-events-lose-seq 4 --sim-kv-events-reorder-every 5 --sim-kv-events-restart-after 6 --sim-kv-events-duplicate --sim-kv-offload",
    )
    .unwrap();
    assert_eq!(
        config.kv_events,
        KvEvents {
            enable_kv_cache_events: true,
            publisher: KvPublisher::Zmq,
            endpoint: "tcp://*:7557".to_owned(),
            replay_endpoint: Some("tcp://*:7558".to_owned()),
            buffer_steps: 9,
            hwm: 8,
            max_queue_size: 7,
            topic: "kv".to_owned(),
        }
    );
    assert_eq!(
        config.kv_event_quirks,
        crate::KvEventQuirks {
            encoding: EventEncoding::Map,
            hashes: HashForm::Bytes,
            replay_framing: ReplayFraming::Old,
            drop_every: Some(3),
            lose_seq: Some(4),
            reorder_every: Some(5),
            restart_after: Some(6),
            offload: true,
            duplicate: true,
        }
    );
    let plain = parse("vllm serve m").unwrap();
    assert_eq!(plain.kv_events, KvEvents::default());
    assert_eq!(plain.kv_event_quirks, crate::KvEventQuirks::default());
}

#[test]
fn kv_event_faults_are_named_and_the_null_publisher_has_no_endpoint() {
    let told = |line: &str| parse(line).unwrap_err().to_string();
    let events =
        "vllm serve m --kv-events-config {\"enable_kv_cache_events\":true,\"endpoint\":\"ipc://x\"";
    assert!(told(&format!("{events}}}")).contains("ipc://x"));
    assert!(parse(&format!("{events},\"publisher\":\"null\"}}")).is_ok());
    assert!(told("vllm serve m --kv-events-config {\"topic\":1}").contains("--kv-events-config"));
    assert!(told("vllm serve m --sim-kv-events-drop-every 0").contains("drop-every"));
}

#[test]
fn kv_transfer_flags_are_taken() {
    use crate::kv_transfer::{KvSharing, LoadFailurePolicy, StoreAt};
    let config = parse(
        "vllm serve meta-llama/Llama-3.1-70B-Instruct -t 4 --kv-cache-dtype fp8 --sim-kv-store http://127.0.0.1:8080/ \
         --sim-kv-store-bandwidth 1e9 --sim-kv-store-latency-ms 3 --sim-kv-link-bandwidth 2e9 --sim-kv-link-latency-ms 4 \
         --sim-kv-load-timeout 5 --sim-kv-lease 6 --sim-kv-partner-timeout 7 --sim-kv-load-failure-policy recompute \
         --sim-kv-advertise-host prefill-1 --sim-kv-port 8998",
    )
    .unwrap();
    let sharing = &config.kv_sharing;
    let speed =
        |link: crate::kv_store::link::LinkSpeed| (link.bytes_per_second, link.latency.as_millis());
    assert_eq!(
        sharing.store,
        Some(StoreAt::Url("http://127.0.0.1:8080".to_owned()))
    );
    assert_eq!(speed(sharing.store_settings.link), (1e9, 3));
    assert_eq!(speed(sharing.link), (2e9, 4));
    let seconds = [sharing.load_timeout, sharing.lease, sharing.partner_timeout];
    assert_eq!(seconds.map(|time| time.as_secs()), [5, 6, 7]);
    assert_eq!(sharing.load_failure, LoadFailurePolicy::Recompute);
    assert_eq!(sharing.advertise_host.as_deref(), Some("prefill-1"));
    assert_eq!(sharing.port, Some(8998));
    assert_eq!(
        (config.kv_bytes_per_token, config.tensor_parallel_size),
        (160 << 10, 4)
    );
    assert_eq!(
        parse("vllm serve m").unwrap().kv_sharing,
        KvSharing::default()
    );
    let in_process = parse("vllm serve m --sim-kv-store in-process").unwrap();
    assert_eq!(in_process.kv_sharing.store, Some(StoreAt::InProcess));
    let told = |line: &str| parse(line).unwrap_err().to_string();
    assert!(told("vllm serve m --sim-kv-store vast-cluster").contains("in-process"));
    assert!(told("vllm serve m --sim-kv-link-bandwidth 0").contains("more than 0"));
}
