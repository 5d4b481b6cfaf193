//! What may never be printed, and what must be.

use crate::support::process::{Process, SettingsFile, run};
use crate::support::{Client, DEADLINE, Upstream, chat, user, wait_until};

const ENGINE_KEY: &str = "K9-mrk"; // short: masking must not depend on length
const CLIENT_KEY: &str = "sk-client-marker-7f3a";

#[test]
fn no_secret_is_in_any_output_at_any_level() {
    let engine = Upstream::start(|request, wire| {
        match request.number {
            0 => wire.json("200 OK", r#"{"choices":[]}"#),
            1 => wire.json(
                "401 Unauthorized",
                r#"{"error":{"message":"bad key K9-mrk"}}"#,
            ),
            _ => wire.json("500 Internal Server Error", r#"{"error":{"message":"x"}}"#),
        };
    });
    let dead = Upstream::nobody();
    let yaml = format!(
        "logging: {{level: trace}}
health_checks: {{interval: 50ms}}
retry: {{max_attempts: 1}}
response_cache: {{redis: {{url: 'redis://user:REDIS-marker@127.0.0.1:1'}}, l2: {{access_key: AK-marker, secret_key: SK-marker}}}}
disaggregated_serving: {{default_external_storage: {{endpoint: 'http://u:ST-marker@v', kv_namespace: n, credentials: CR-marker}}}}
backends:
  - {{name: a, url: 'http://{}', models: [m], api_key: {ENGINE_KEY}}}
  - {{name: dead, url: 'http://{}', models: [n], api_key: {ENGINE_KEY}}}
",
        engine.address, dead.address
    );
    let mut process = Process::start(&yaml);
    let ask = |path: &str, body: &str| {
        let mut client = Client::connect_to_port(process.port);
        let header = format!("authorization: Bearer {CLIENT_KEY}\r\n");
        client.post(path, &header, body)
    };
    let chat_body = chat(&user("hi"));
    let mut bodies = String::new();
    wait_until("the engine is healthy", DEADLINE, || {
        ask("/v1/chat/completions", &chat_body).status == 200 || engine.count() > 0
    });
    for _ in 0..3 {
        bodies += ask("/v1/chat/completions", &chat_body).text();
    }
    bodies += ask("/v1/chat/completions", r#"{"model":"n","messages":[]}"#).text();
    bodies += ask("/v1/chat/completions", "{").text();
    let mut client = Client::connect_to_port(process.port);
    client.send("GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n");
    bodies += client.answer().text();
    process.signal("TERM");
    assert_eq!(process.exit_code(), Some(0));
    let seen = bodies + &process.output();
    assert!(seen.contains("TRACE"), "the level was not trace");
    for secret in [
        ENGINE_KEY,
        CLIENT_KEY,
        "REDIS-marker",
        "AK-marker",
        "SK-marker",
        "ST-marker",
        "CR-marker",
    ] {
        let at = seen.find(secret);
        assert!(
            at.is_none(),
            "{secret} is in: {}",
            &seen[at.unwrap_or(0).saturating_sub(200)..at.unwrap_or(0)]
        );
    }
    // and the engine got its own key, never the client's
    for request in engine.requests() {
        assert_eq!(
            request.header("authorization"),
            Some(format!("Bearer {ENGINE_KEY}").as_bytes())
        );
    }
}

#[test]
fn urls_with_credentials_are_refused_or_masked_never_echoed() {
    let settings = SettingsFile::new(
        "backends: [{name: a, url: 'http://user:SECRET1@h:1'}]\nresponse_cache: {redis: {url: 'gopher://:SECRET2@h'}, l2: {endpoint: 'ftp://u:SECRET3@h'}}",
    );
    let refused = run(&["check", "--config", settings.0.to_str().unwrap()], &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        refused
            .stderr
            .contains("backends[0].url: must not hold a user or password"),
        "{}",
        refused.stderr
    );
    assert!(!refused.stderr.contains("SECRET"), "{}", refused.stderr);
}

#[test]
fn one_line_per_request_says_how_it_went() {
    let engine = Upstream::json(
        r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}}"#,
    );
    let yaml = format!("logging: {{format: json}}\nbackends:\n{}", engine.yaml("a"));
    let mut process = Process::start(&yaml);
    wait_until("the engine is healthy", DEADLINE, || {
        process.output().contains("backend is healthy")
    });
    let mut client = Client::connect_to_port(process.port);
    client.post(
        "/v1/chat/completions",
        "x-request-id: caf\u{e9}\r\n",
        chat(&user("hi")),
    );
    let mut client = Client::connect_to_port(process.port);
    client.post(
        "/v1/chat/completions",
        "x-request-id: id-7\r\n",
        chat(&user("hi")),
    );
    process.signal("TERM");
    assert_eq!(process.exit_code(), Some(0));
    let output = process.output();
    let lines: Vec<serde_json::Value> = output
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter(|line: &serde_json::Value| line["target"] == "access")
        .collect();
    assert_eq!(lines.len(), 2, "{output}");
    let line = &lines[1];
    assert_eq!(line["request_id"], "id-7");
    assert_eq!(
        (&line["status"], &line["backend"], &line["outcome"]),
        (&200.into(), &"a".into(), &"ok".into())
    );
    assert_eq!(
        (&line["prompt_tokens"], &line["completion_tokens"]),
        (&7.into(), &2.into())
    );
    let odd = lines[0]["request_id"].as_str().unwrap();
    assert!(
        odd.starts_with("req-"),
        "an id that is no plain ASCII is replaced: {odd}"
    );
}

#[test]
fn no_secret_is_in_what_reloads_and_operators_pages_say() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let yaml = |key: &str, more: &str| {
        format!(
            "logging: {{level: trace}}\nadmin: {{token: ADMIN-marker}}\napi_keys: {{keys: [{{name: k, key: {key}}}]}}\nbackends:\n  - {{name: a, url: 'http://{}', models: [m], api_key: {ENGINE_KEY}}}\n{more}",
            engine.address
        )
    };
    let mut process = Process::start(&yaml("FIRST-marker-of-a-key", ""));
    let port = process.port;
    let ask = |method: &str, path: &str, token: &str| {
        let mut client = Client::connect_to_port(port);
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-length: 0\r\n\r\n"
        );
        client.send(head);
        client.answer().text().to_owned()
    };
    let pages = [
        "/admin/config",
        "/admin/backends",
        "/admin/decisions",
        "/admin/info",
        "/admin/",
        "/metrics",
    ];
    let mut seen = String::new();
    let changes = [
        yaml("OTHER-marker-of-a-key", ""),
        yaml("OTHER-marker-of-a-key", "model_aliases: [THIS-is-no-map]\n"),
    ];
    for change in changes {
        for page in pages {
            seen += &ask("GET", page, "ADMIN-marker");
            seen += &ask("GET", page, "WRONG-marker");
        }
        std::fs::write(process.settings_file(), change).unwrap();
        seen += &ask("POST", "/admin/reload", "ADMIN-marker");
    }
    assert!(
        seen.contains("api_keys.keys[k].key"),
        "a changed key is named: {seen}"
    );
    assert!(seen.contains("model_aliases"), "and so is a faulty one");
    process.signal("TERM");
    assert_eq!(process.exit_code(), Some(0));
    seen += &process.output();
    for secret in [
        ENGINE_KEY,
        "ADMIN-marker",
        "WRONG-marker",
        "FIRST-marker",
        "OTHER-marker",
    ] {
        assert!(!seen.contains(secret), "{secret} is in: {seen}");
    }
}
