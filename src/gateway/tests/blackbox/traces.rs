//! Traces: what engines are told of them, and what a collector gets. The collector is a scripted server.

use crate::support::{Client, DEADLINE, Gateway, Upstream, chat, user, wait_until};
use serde_json::Value;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

fn parent(flags: &str) -> String {
    format!("traceparent: 00-{TRACE}-{SPAN}-{flags}\r\ntracestate: vendor=1\r\n")
}

fn settings(collector: &Upstream) -> String {
    format!(
        "tracing: {{ otlp_endpoint: 'http://{}', service_name: gate }}\n",
        collector.address
    )
}

fn ask(gateway: &Gateway, headers: &str, text: &str) -> u16 {
    let body = chat(&format!("\"temperature\":0,{}", user(text)));
    let mut client = Client::connect(gateway);
    client.post("/v1/chat/completions", headers, body).status
}

/// Name, and all of it, of every span so far.
fn spans(collector: &Upstream) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    for request in collector.requests() {
        assert_eq!(request.path(), "/v1/traces");
        let document = request.json();
        let resource = &document["resourceSpans"][0];
        let service = &resource["resource"]["attributes"][0]["value"]["stringValue"];
        assert_eq!(service, "gate");
        for span in resource["scopeSpans"][0]["spans"].as_array().unwrap() {
            all.push((span["name"].as_str().unwrap().to_owned(), span.clone()));
        }
    }
    all
}

fn wait_for(collector: &Upstream, names: &[&str]) -> Vec<(String, Value)> {
    wait_until(&format!("{names:?} are exported"), DEADLINE, || {
        let found = spans(collector);
        names
            .iter()
            .all(|name| found.iter().any(|(of, _)| of == name))
    });
    spans(collector)
}

fn header<'a>(request: &'a crate::support::Request, name: &str) -> Option<&'a str> {
    let value = request.header(name)?;
    Some(std::str::from_utf8(value).unwrap())
}

#[test]
fn a_request_is_told_as_spans_of_the_clients_trace() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let collector = Upstream::json("{}");
    let more = "response_cache: { enabled: true }\nkv_cache_index: { enabled: true }\n";
    let gateway = Gateway::start(&[("a", &engine)], &(settings(&collector) + more));
    assert_eq!(ask(&gateway, &parent("01"), "hi"), 200);
    let names = [
        "request",
        "cache_lookup",
        "kv_lookup",
        "route",
        "upstream_call",
    ];
    let found = wait_for(&collector, &names);
    let of = |name: &str| found.iter().find(|(of, _)| of == name).unwrap().1.clone();
    let root = of("request");
    assert_eq!(root["parentSpanId"], SPAN);
    assert_eq!(
        (&root["kind"], &root["status"]["code"]),
        (&2.into(), &0.into())
    );
    for name in &names[1..] {
        let span = of(name);
        assert_eq!(span["traceId"], TRACE, "{name}");
        assert_eq!(span["parentSpanId"], root["spanId"], "{name}");
        let at = |key: &str| -> u64 { span[key].as_str().unwrap().parse().unwrap() };
        assert!(at("startTimeUnixNano") <= at("endTimeUnixNano"), "{name}");
    }
    // the engine goes on from the call, not from the client
    let asked = engine.only_request();
    let call = of("upstream_call")["spanId"].as_str().unwrap().to_owned();
    assert_eq!(
        header(&asked, "traceparent"),
        Some(&*format!("00-{TRACE}-{call}-01"))
    );
    assert_eq!(header(&asked, "tracestate"), Some("vendor=1"));
    let text = collector.requests()[0].text().to_owned();
    assert!(!text.contains("hi\\\""), "no prompts");
    wait_until("it is counted", DEADLINE, || {
        gateway.metric("tidegate_spans_total", &["result=\"exported\""]) >= 5.0
    });
}

#[test]
fn a_trace_begins_here_where_the_client_has_none_and_what_is_not_sampled_is_only_passed_on() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let collector = Upstream::json("{}");
    let none = settings(&collector).replace(" }", ", sample_ratio: 0.0 }");
    let gateway = Gateway::start(&[("a", &engine)], &none);
    assert_eq!(ask(&gateway, &parent("00"), "one"), 200);
    assert_eq!(ask(&gateway, "", "two"), 200);
    assert_eq!(
        ask(
            &gateway,
            "traceparent: nonsense\r\ntracestate: vendor=1\r\n",
            "three"
        ),
        200
    );
    let asked = engine.requests();
    let told: Vec<&str> = asked
        .iter()
        .map(|r| header(r, "traceparent").unwrap())
        .collect();
    assert!(
        told[0].starts_with(&format!("00-{TRACE}-")) && told[0].ends_with("-00"),
        "{told:?}"
    );
    assert!(!told[0].contains(SPAN), "{told:?}");
    assert_ne!(told[1][3..35], told[2][3..35], "traces of their own");
    assert_eq!(
        header(&asked[2], "tracestate"),
        None,
        "of a trace that nobody goes on with"
    );
    let all = Gateway::start(&[("a", &engine)], &settings(&collector));
    assert_eq!(ask(&all, "", "four"), 200);
    let found = wait_for(&collector, &["request"]);
    let (_, root) = found.iter().find(|(name, _)| name == "request").unwrap();
    assert!(root.get("parentSpanId").is_none(), "{root}");
    let told = engine.requests();
    let told = header(told.last().unwrap(), "traceparent")
        .unwrap()
        .to_owned();
    assert!(told.contains(root["traceId"].as_str().unwrap()), "{told}");
    let requests = found.iter().filter(|(name, _)| name == "request");
    assert_eq!(requests.count(), 1, "the others were not sampled");
}

#[test]
fn without_a_collector_headers_pass_as_they_came() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let gateway = Gateway::start(&[("a", &engine)], "");
    assert_eq!(ask(&gateway, &parent("01"), "hi"), 200);
    assert_eq!(ask(&gateway, "", "hi"), 200);
    let asked = engine.requests();
    assert_eq!(
        header(&asked[0], "traceparent"),
        Some(&*format!("00-{TRACE}-{SPAN}-01"))
    );
    assert_eq!(header(&asked[0], "tracestate"), Some("vendor=1"));
    assert_eq!(header(&asked[1], "traceparent"), None);
}

#[test]
fn a_collector_that_fails_costs_a_counter_and_no_request() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    for collector in [
        Upstream::nobody(),
        Upstream::start(|_, wire| {
            wire.json("503 Service Unavailable", "{}");
        }),
    ] {
        let gateway = Gateway::start(&[("a", &engine)], &settings(&collector));
        let failed = || gateway.metric("tidegate_spans_total", &["result=\"failed\""]);
        let before = failed();
        assert_eq!(ask(&gateway, "", "hi"), 200);
        wait_until("the failure is counted", DEADLINE, || failed() > before);
        assert_eq!(ask(&gateway, "", "hi"), 200);
    }
}

#[test]
fn a_failed_call_is_told_as_one_and_so_is_the_next() {
    let (broken, good) = (
        Upstream::start(|_, wire| wire.reset()),
        Upstream::json(r#"{"choices":[]}"#),
    );
    let collector = Upstream::json("{}");
    let more = "selection_strategy: RoundRobin\nprefix_routing: { enabled: false }\n";
    let backends = [("broken", &broken), ("good", &good)];
    let gateway = Gateway::start(&backends, &(settings(&collector) + more));
    for _ in 0..2 {
        assert_eq!(ask(&gateway, "", "hi"), 200);
    }
    wait_until("both requests are exported", DEADLINE, || {
        spans(&collector)
            .iter()
            .filter(|(name, _)| name == "request")
            .count()
            == 2
    });
    let found = spans(&collector);
    let calls = found.iter().filter(|(name, _)| name == "upstream_call");
    let codes: Vec<u64> = calls
        .map(|(_, span)| span["status"]["code"].as_u64().unwrap())
        .collect();
    let count = |code| codes.iter().filter(|of| **of == code).count();
    assert_eq!((count(0), count(2) > 0), (2, true), "{found:#?}");
}
