//! What clients may ask for: per minute and at one time, by key, tenant, model and address.

use crate::reload::held;
use crate::support::client::Answer;
use crate::support::sse::{DONE, delta, finish, usage};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, chat, chat_stream, user, wait_until,
};
use serde_json::json;

const KEYS: &str = "api_keys:
  keys:
    - {name: one, key: key-of-number-one, tenant: red}
    - {name: two, key: key-of-number-two, tenant: red}
    - {name: three, key: key-of-number-three, tenant: blue, priority: high}
    - {name: four, key: key-of-number-four, tenant: blue, priority: low, limits: {requests_per_minute: 1}}
";

fn engine() -> Upstream {
    Upstream::json(r#"{"choices":[],"model":"m"}"#)
}

fn with_keys(engine: &Upstream, quotas: &str) -> Gateway {
    Gateway::start(&[("a", engine)], &format!("{KEYS}quotas: {quotas}\n"))
}

fn ask(gateway: &Gateway, key: &str, body: &str) -> Answer {
    let key = format!("authorization: Bearer key-of-number-{key}\r\n");
    Client::connect(gateway).post("/v1/chat/completions", &key, body)
}

fn hi() -> String {
    chat(&user("hi"))
}

fn number(answer: &Answer, header: &str) -> u64 {
    let value = answer.header(header);
    let value = value.unwrap_or_else(|| panic!("no {header}: {answer:?}"));
    value.trim_end_matches('s').parse().unwrap()
}

fn is_refused(answer: &Answer, of: &str, scope: &str) {
    assert_eq!(answer.status, 429, "{}", answer.text());
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "rate_limit_exceeded");
    assert_eq!(error["type"], of);
    assert!(
        error["message"].as_str().unwrap().contains(scope),
        "{error}"
    );
    assert!(number(answer, "retry-after") >= 1);
    assert!(number(answer, &format!("x-ratelimit-limit-{of}")) >= 1);
    // of tokens too few are left for this request, of the others none
    let left = number(answer, &format!("x-ratelimit-remaining-{of}"));
    assert!(left == 0 || of == "tokens");
    assert!(number(answer, &format!("x-ratelimit-reset-{of}")) >= 1);
}

fn running(gateway: &Gateway) -> (u32, usize) {
    gateway.inner.quotas.permits.counts()
}

fn until_idle(gateway: &Gateway) {
    wait_until("every permit is back", DEADLINE, || {
        running(gateway) == (0, 0)
    });
    gateway.assert_idle();
}

#[test]
fn requests_are_counted_by_key_and_by_tenant_and_answers_say_what_is_left() {
    let engine = engine();
    let gateway = with_keys(
        &engine,
        "{key: {requests_per_minute: 2}, tenant: {requests_per_minute: 3}}",
    );
    let first = ask(&gateway, "one", &hi());
    assert_eq!(
        number(&first, "x-ratelimit-limit-requests"),
        2,
        "the tightest is told"
    );
    assert_eq!(number(&first, "x-ratelimit-remaining-requests"), 1);
    assert_eq!(ask(&gateway, "one", &hi()).status, 200);
    is_refused(&ask(&gateway, "one", &hi()), "requests", "this key");
    // the other key of the tenant has its own, but the tenant's is used up after it
    assert_eq!(ask(&gateway, "two", &hi()).status, 200);
    is_refused(&ask(&gateway, "two", &hi()), "requests", "this tenant");
    assert_eq!(ask(&gateway, "three", &hi()).status, 200);
    // and one has a limit of its own
    assert_eq!(ask(&gateway, "four", &hi()).status, 200);
    is_refused(&ask(&gateway, "four", &hi()), "requests", "this key");
    let refused = |scope| gateway.metric("tidegate_quota_refusals_total", &["requests", scope]);
    assert_eq!((refused("key"), refused("tenant")), (2.0, 1.0));
}

#[test]
fn clients_without_a_key_are_counted_by_their_address() {
    let engine = engine();
    let settings = "quotas: {address: {requests_per_minute: 1}, address_header: x-forwarded-for}";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let from = |address: &str| {
        let header = format!("x-forwarded-for: 1.1.1.1, {address}\r\n");
        Client::connect(&gateway).post("/v1/chat/completions", &header, hi())
    };
    assert_eq!(from("10.0.0.1").status, 200);
    is_refused(&from("10.0.0.1"), "requests", "this address");
    assert_eq!(from("10.0.0.2").status, 200);
    // without the header, or with nonsense in it, the peer's own address counts
    assert_eq!(from("nobody").status, 200);
    is_refused(&gateway.chat(&hi()), "requests", "this address");
}

#[test]
fn models_have_limits_under_their_own_names_and_made_up_ones_have_none() {
    let engine = engine();
    let settings = "model_aliases: {short: m}\nquotas: {model: {requests_per_minute: 1}}";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let of = |model: &str| {
        let body = json!({"model": model, "messages": []}).to_string();
        gateway.chat(&body)
    };
    assert_eq!(of("short").status, 200);
    is_refused(&of("m"), "requests", "this model");
    for n in 0..3 {
        assert_eq!(of(&format!("made-up-{n}")).status, 404);
        assert_eq!(of("made-up").status, 404);
    }
}

/// Answers with this usage.
fn counting(prompt: u64, completion: u64) -> Upstream {
    Upstream::start(move |request, wire| {
        if request.json()["stream"] == true {
            wire.stream_head();
            wire.chunk(delta("a"));
            wire.chunk(finish("stop"));
            if request.text().contains("include_usage") {
                wire.chunk(usage(prompt, completion));
            }
            wire.chunk(DONE);
            wire.end();
            return;
        }
        let counted = json!({"prompt_tokens": prompt, "completion_tokens": completion});
        let choice = json!({"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}});
        let body =
            json!({"object": "chat.completion", "choices": [choice], "usage": counted}).to_string();
        wire.json("200 OK", &body);
    })
}

#[test]
fn tokens_are_charged_before_they_are_known_and_put_right_at_the_end() {
    for stream in [false, true] {
        let engine = counting(100, 50);
        let gateway = with_keys(&engine, "{key: {tokens_per_minute: 10000}}");
        let members = format!("{}, \"max_tokens\": 4000", user("hi"));
        let body = if stream {
            chat_stream(&members)
        } else {
            chat(&members)
        };
        let first = ask(&gateway, "one", &body);
        assert!(
            number(&first, "x-ratelimit-remaining-tokens") < 6000,
            "{first:?}"
        );
        assert!(
            !first.text().contains("usage") || !stream,
            "asked for by us, and not shown"
        );
        until_idle(&gateway);
        // 150 are gone in the end, and what came back within the time of the test
        let second = ask(&gateway, "one", &chat(&user("hi")));
        let left = number(&second, "x-ratelimit-remaining-tokens");
        assert!((9400..9860).contains(&left), "{left}");
    }
}

#[test]
fn what_nobody_counts_stays_charged_whatever_its_shape() {
    // no usage in any answer
    let engine = Upstream::start(|_, wire| {
        wire.json("200 OK", r#"{"choices":[]}"#);
    });
    let image = "data:image/png;base64,".to_owned() + &"A".repeat(4000);
    let contents = [
        json!([{"type": "text", "text": "x".repeat(4000)}]),
        json!([{"type": "image_url", "image_url": {"url": image}}]),
        json!([{"type": "odd", "of": ["x".repeat(4000)]}]),
    ];
    for content in contents {
        let gateway = with_keys(&engine, "{key: {tokens_per_minute: 3000}}");
        let body = json!({"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": content}]});
        let mut served = 0;
        while ask(&gateway, "one", &body.to_string()).status == 200 {
            served += 1;
            assert!(served < 10, "the limit does not bite");
        }
        assert!((1..=2).contains(&served), "{served}");
    }
    let gateway = with_keys(&engine, "{key: {tokens_per_minute: 3000}}");
    let ids: Vec<u32> = (0..1000).collect();
    let body = json!({"model": "m", "prompt": ids, "max_tokens": 10}).to_string();
    let key = "authorization: Bearer key-of-number-one\r\n";
    let mut client = Client::connect(&gateway);
    let mut served = 0;
    while client.post("/v1/completions", key, &body).status == 200 {
        served += 1;
    }
    assert!((1..=3).contains(&served), "{served}");
    let again = ask(&gateway, "one", &chat(&user(&"x".repeat(8000))));
    is_refused(&again, "tokens", "this key");
}

#[test]
fn whatever_a_client_says_it_might_want_others_are_shut_out_for_a_minute_at_most() {
    let engine = Upstream::start(|_, wire| wire.hang());
    let gateway = with_keys(&engine, "{tenant: {tokens_per_minute: 50}}");
    let body = chat_stream(&(user("hi") + r#", "n": 2, "max_tokens": 18446744073709551615"#));
    let mut greedy = Client::connect(&gateway);
    let key = "authorization: Bearer key-of-number-one\r\n";
    greedy.send(crate::support::client::request(
        "/v1/chat/completions",
        key,
        body,
    ));
    engine.wait_for_requests(1);
    greedy.leave(); // before anybody has counted: what was charged stays
    until_idle(&gateway);
    let other = ask(&gateway, "two", &hi());
    is_refused(&other, "tokens", "this tenant");
    assert!(number(&other, "retry-after") <= 60, "{other:?}");
}

#[test]
fn answers_of_the_cache_and_errors_cost_no_tokens() {
    let engine = counting(100, 50);
    let settings = format!(
        "{KEYS}quotas: {{key: {{tokens_per_minute: 2000}}}}\nresponse_cache: {{enabled: true}}\n"
    );
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let body = chat(&(user("hi") + r#", "temperature": 0, "max_tokens": 200"#));
    for n in 0..20 {
        let answer = ask(&gateway, "one", &body);
        assert_eq!(answer.status, 200, "{n}: {}", answer.text());
        until_idle(&gateway);
    }
    assert_eq!(engine.count(), 1);
    for _ in 0..20 {
        let unknown = ask(&gateway, "one", r#"{"model":"unknown","messages":[]}"#);
        assert_eq!(unknown.status, 404);
    }
    assert_eq!(ask(&gateway, "one", &body).status, 200);
}

fn opened(gateway: &Gateway, key: &str) -> (Client, Answer) {
    let mut client = asking(gateway, key);
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "first"), "{answer:?}");
    (client, answer)
}

fn asking(gateway: &Gateway, key: &str) -> Client {
    let mut client = Client::connect(gateway);
    let header = format!("authorization: Bearer key-of-number-{key}\r\n");
    let body = chat_stream(&user("hi"));
    client.send(crate::support::client::request(
        "/v1/chat/completions",
        &header,
        body,
    ));
    client
}

#[test]
fn a_permit_lives_as_long_as_the_stream_and_a_refusal_hints_when_to_come_back() {
    let go = Signal::new();
    let engine = held(go.clone());
    let gateway = with_keys(&engine, "{key: {concurrent: 1}}");
    let (mut client, mut answer) = opened(&gateway, "one");
    is_refused(&ask(&gateway, "one", &hi()), "concurrency", "this key");
    assert_eq!(running(&gateway), (1, 0));
    let (_other, _) = opened(&gateway, "two");
    go.raise();
    assert!(client.read_until(&mut answer, "[DONE]"));
    until_idle(&gateway);
    opened(&gateway, "one");
}

#[test]
fn a_client_that_leaves_before_the_head_gives_its_permit_back() {
    // says nothing until its connection is closed
    let engine = Upstream::start(|_, wire| wire.hang());
    let gateway = with_keys(&engine, "{key: {concurrent: 2}}");
    for round in 1..=100 {
        let clients = [asking(&gateway, "one"), asking(&gateway, "one")];
        engine.wait_for_requests(2 * round);
        is_refused(&ask(&gateway, "one", &hi()), "concurrency", "this key");
        for client in clients {
            client.leave();
        }
        until_idle(&gateway);
    }
}

#[test]
fn waiting_requests_go_on_by_priority_and_a_full_queue_is_503() {
    let go = Signal::new();
    let engine = held(go.clone());
    let gateway = with_keys(&engine, "{concurrent: 1, queue: {size: 2, timeout: 60s}}");
    let first = opened(&gateway, "one");
    let mut low = asking(&gateway, "four");
    wait_until("one waits", DEADLINE, || running(&gateway) == (1, 1));
    let mut high = asking(&gateway, "three");
    wait_until("two wait", DEADLINE, || running(&gateway) == (1, 2));
    assert_eq!(gateway.metric("tidegate_quota_queue_depth", &[]), 2.0);
    let over = ask(&gateway, "one", &hi());
    assert_eq!(over.status, 503);
    assert_eq!(over.json()["error"]["code"], "queue_full");
    assert!(number(&over, "retry-after") >= 1);
    // the stream that runs is given up by its client
    first.0.leave();
    let mut answer = high.head();
    assert!(high.read_until(&mut answer, "first"));
    assert_eq!(running(&gateway), (1, 1));
    go.raise();
    let answer = low.answer();
    assert!(answer.text().contains("[DONE]"), "{answer:?}");
    until_idle(&gateway);
    assert_eq!(
        gateway.metric("tidegate_quota_queue_wait_seconds_count", &[]),
        2.0
    );
}

#[test]
fn a_request_that_waits_too_long_is_told_so_and_one_that_leaves_is_forgotten() {
    let go = Signal::new();
    let engine = held(go.clone());
    let gateway = with_keys(
        &engine,
        "{key: {concurrent: 1}, queue: {size: 5, timeout: 200ms}}",
    );
    let _first = opened(&gateway, "one");
    let leaves = asking(&gateway, "one");
    wait_until("it waits", DEADLINE, || running(&gateway) == (1, 1));
    leaves.leave();
    wait_until("it waits no longer", DEADLINE, || {
        running(&gateway) == (1, 0)
    });
    let late = ask(&gateway, "one", &hi());
    assert_eq!(
        (late.status, late.json()["error"]["code"].as_str()),
        (503, Some("queue_timeout"))
    );
    go.raise();
    until_idle(&gateway);
}

#[test]
fn without_a_queue_the_gateways_own_limit_is_503() {
    let go = Signal::new();
    let engine = held(go.clone());
    let gateway = Gateway::start(&[("a", &engine)], "quotas: {concurrent: 1}");
    let mut client = Client::connect(&gateway);
    client.start_chat(chat_stream(&user("hi")));
    let mut answer = client.head();
    assert!(client.read_until(&mut answer, "first"));
    let over = gateway.chat(&hi());
    assert_eq!(
        (over.status, over.json()["error"]["code"].as_str()),
        (503, Some("too_many_requests"))
    );
    go.raise();
    until_idle(&gateway);
}

#[test]
fn a_reload_keeps_what_was_used_and_takes_other_limits_over() {
    let engine = engine();
    let gateway = with_keys(&engine, "{key: {requests_per_minute: 2}}");
    let settings = |quotas: &str| format!("{KEYS}quotas: {quotas}\n");
    ask(&gateway, "one", &hi());
    gateway.reload(
        &engine.yaml("a"),
        &(settings("{key: {requests_per_minute: 2}}") + "retry: {max_attempts: 1}\n"),
    );
    assert_eq!(ask(&gateway, "one", &hi()).status, 200);
    is_refused(&ask(&gateway, "one", &hi()), "requests", "this key");
    gateway.reload(
        &engine.yaml("a"),
        &settings("{key: {requests_per_minute: 100}}"),
    );
    assert_eq!(ask(&gateway, "one", &hi()).status, 200);
}

#[test]
fn an_engines_own_429_keeps_its_retry_after_and_its_words() {
    for body in [chat(&user("hi")), chat_stream(&user("hi"))] {
        let engine = Upstream::start(|_, wire| {
            let headers = "retry-after: 30\r\nx-ratelimit-limit-requests: 7\r\nset-cookie: a=b\r\n";
            let body = r#"{"error":{"message":"slow","code":429}}"#;
            wire.answer("429 Too Many Requests", headers, body);
        });
        let gateway = Gateway::start(&[("a", &engine)], "");
        let answer = gateway.chat(&body);
        assert_eq!(answer.status, 429);
        assert_eq!(answer.header("retry-after"), Some("30"));
        assert_eq!(answer.header("x-ratelimit-limit-requests"), Some("7"));
        assert_eq!(answer.json()["error"]["message"], "slow");
        assert_eq!(answer.header("set-cookie"), None);
    }
}
