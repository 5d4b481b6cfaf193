//! The command line and the settings, as an operator meets them.

use crate::support::process::{SettingsFile, run};
use crate::support::{Gateway, Upstream, chat, client, user};

const SEED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../config/seed");
const S3_KEYS: [(&str, &str); 2] = [
    ("VAST_ACCESS_KEY", "AK-marker"),
    ("VAST_SECRET_KEY", "SK-marker"),
];

#[test]
fn the_full_example_passes_the_check_and_prints_without_its_secrets() {
    let full = format!("{SEED}/4-full-example.yaml");
    let checked = run(&["check", "--config", &full], &S3_KEYS);
    assert_eq!(
        (checked.status.code(), checked.stdout.as_str()),
        (Some(0), "ok: 6 backends\n")
    );
    let printed = run(&["print-config", "--config", &full], &S3_KEYS);
    assert_eq!(printed.status.code(), Some(0));
    assert!(
        printed.stdout.contains("secret_key: \"***\""),
        "{}",
        printed.stdout
    );
    assert!(!printed.stdout.contains("marker"), "{}", printed.stdout);
}

#[test]
fn fragments_are_layered_over_a_file_that_names_their_backends() {
    let names = SettingsFile::new(
        "backends: [{name: vllm-1, url: 'http://vllm-1:8000'}, {name: vllm-2, url: 'http://vllm-2:8000'}]",
    );
    for fragment in [
        "1-response-cache",
        "2-kv-cache-index",
        "3-disaggregated-serving",
    ] {
        let fragment = format!("{SEED}/{fragment}.yaml");
        let checked = run(
            &[
                "check",
                "--config",
                names.0.to_str().unwrap(),
                "--config",
                &fragment,
            ],
            &S3_KEYS,
        );
        assert_eq!(
            checked.status.code(),
            Some(0),
            "{fragment}: {}",
            checked.stderr
        );
    }
}

#[test]
fn the_settings_of_the_stack_pass_the_check_with_simulated_engines_and_with_real_ones() {
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../config");
    let (stack, real) = (
        format!("{config}/compose.yaml"),
        format!("{config}/real-engines.yaml"),
    );
    for (files, backends) in [(vec![&stack], 6), (vec![&stack, &real], 2)] {
        let mut arguments = vec!["check"];
        arguments.extend(
            files
                .into_iter()
                .flat_map(|file| ["--config", file.as_str()]),
        );
        let checked = run(&arguments, &[]);
        assert!(checked.status.success(), "{}", checked.stderr);
        assert!(checked.stderr.is_empty(), "{}", checked.stderr);
        assert_eq!(checked.stdout, format!("ok: {backends} backends\n"));
    }
}

#[test]
fn every_fault_is_named_with_its_path_before_anything_starts() {
    let settings = SettingsFile::new(
        "server: {prot: 1}\nbackends: [{name: a, url: '${ENGINE_HOST}', weight: none}]",
    );
    let path = settings.0.to_str().unwrap();
    for arguments in [&["check", "--config", path][..], &["--config", path]] {
        let refused = run(arguments, &[]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(
            refused.stderr.contains(
                "backends[0].url: needs the environment variable ENGINE_HOST, which is not set"
            ),
            "{}",
            refused.stderr
        );
    }
    let refused = run(&["check", "--config", path], &[("ENGINE_HOST", "http://a")]);
    for line in [
        "server.prot: unknown key, did you mean `server.port`?",
        "backends[0].weight: must be a whole number from 1 to 1000",
        "2 faults in the settings",
    ] {
        assert!(
            refused.stderr.lines().any(|l| l == line),
            "{line}\n{}",
            refused.stderr
        );
    }
}

#[test]
fn a_missing_file_no_file_and_a_taken_port_are_explained() {
    let missing = run(&["check", "--config", "/nowhere.yaml"], &[]);
    assert!(
        missing.stderr.starts_with("/nowhere.yaml: "),
        "{}",
        missing.stderr
    );
    let none = run(&[], &[]);
    assert_eq!(none.status.code(), Some(1));
    assert!(none.stderr.contains("--config FILE"), "{}", none.stderr);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let settings = SettingsFile::new(&format!(
        "server: {{host: 127.0.0.1, port: {port}}}\nbackends: [{{name: a, url: 'http://a'}}]"
    ));
    let refused = run(&["--config", settings.0.to_str().unwrap()], &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        refused
            .stderr
            .contains(&format!("cannot listen on 127.0.0.1:{port}")),
        "{}",
        refused.stderr
    );
}

#[test]
fn help_teaches() {
    let help = run(&["--help"], &[]).stdout;
    for word in [
        "check",
        "print-config",
        "healthcheck",
        "--config",
        "TIDEGATE__SERVER__PORT",
        "SIGTERM",
    ] {
        assert!(help.contains(word), "{word}\n{help}");
    }
}

#[test]
fn the_health_check_command_answers_by_its_exit_code() {
    let engine = Upstream::json("{}");
    let gateway = Gateway::start(&[("a", &engine)], "");
    let ask = |path: &str| {
        run(
            &[
                "healthcheck",
                "--url",
                &format!("http://{}{path}", gateway.address),
            ],
            &[],
        )
    };
    assert_eq!(ask("/health").status.code(), Some(0));
    let wrong = ask("/nowhere");
    assert_eq!(wrong.status.code(), Some(1));
    assert!(wrong.stderr.contains("404"), "{}", wrong.stderr);
    let url = format!("http://{}/nowhere", gateway.address);
    let any = run(&["healthcheck", "--any-status", "--url", &url], &[]);
    assert_eq!(any.status.code(), Some(0));
}

#[test]
fn probes_discovery_and_requests_ask_under_the_same_url_however_it_is_spelt() {
    for (spelling, prefix) in [
        ("", ""),
        ("/", ""),
        ("//", ""),
        ("/v1", ""),
        ("/v1/", ""),
        ("/prefix/v1beta", "/prefix/v1beta"),
    ] {
        let engine = Upstream::start(move |request, wire| {
            match request.path().strip_prefix(prefix).unwrap_or_default() {
                "/v1/models" => wire.json("200 OK", r#"{"object":"list","data":[{"id":"m"}]}"#),
                "/v1/chat/completions" => wire.json("200 OK", r#"{"choices":[]}"#),
                "/health" => wire.json("200 OK", "{}"),
                _ => wire.json("404 Not Found", "{}"),
            };
        });
        let backends = format!(
            "  - {{ name: a, url: 'http://{}{spelling}' }}\n",
            engine.address
        );
        let gateway = Gateway::with(&backends, "");
        crate::support::wait_until("the model is discovered", crate::support::DEADLINE, || {
            client::get(&gateway, "/v1/models").text().contains("\"m\"")
        });
        let answer = gateway.chat(&chat(&user("hi")));
        assert_eq!(answer.status, 200, "{spelling}: {answer:?}");
        let last = engine.requests().last().unwrap().path().to_owned();
        assert_eq!(last, format!("{prefix}/v1/chat/completions"), "{spelling}");
    }
}
