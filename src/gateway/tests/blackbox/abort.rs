//! Drops a request at every point where it waits, one after the other, and looks whether anything
//! of it is left: counts, permits, the half-open probe.

use crate::support::sse::{DONE, delta, finish};
use crate::support::{Upstream, Wire, chat_stream, ms, user};
use actix_web::body::MessageBody;
use actix_web::dev::{Service, ServiceResponse};
use actix_web::test::{TestRequest, init_service};
use actix_web::{App, http::StatusCode};
use gateway::settings::{Environment, Source, load};
use gateway::startup::{self, Running};
use routing::view::Passage;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

/// More waits than any request here has; reaching it means that the harness does not converge.
const WAITS_MAX: usize = 400;

/// Lets a future or body wait `left` more times; then it is to be dropped.
struct Waits {
    left: usize,
}

enum Step<T> {
    Done(T),
    Abort,
}

impl Waits {
    async fn run<F: Future>(&mut self, future: F) -> Step<F::Output> {
        let mut future = pin!(future);
        std::future::poll_fn(|cx| self.count(future.as_mut().poll(cx))).await
    }

    fn count<T>(&mut self, poll: Poll<T>) -> Poll<Step<T>> {
        match poll {
            Poll::Ready(value) => Poll::Ready(Step::Done(value)),
            Poll::Pending if self.left == 0 => Poll::Ready(Step::Abort),
            Poll::Pending => {
                self.left -= 1;
                Poll::Pending
            }
        }
    }
}

async fn start(yaml: &str) -> Running {
    let source = Source {
        name: "test".into(),
        text: yaml.into(),
    };
    let loaded = load(&[source], &Environment::new()).unwrap_or_else(|faults| panic!("{faults}"));
    startup::start(loaded.settings).await.unwrap()
}

async fn healthy(running: &Running) {
    let all = || {
        let snapshot = running.gateway.directory.load();
        snapshot.entries.len() == 2
    };
    for _ in 0..2000 {
        if all() {
            return;
        }
        actix_web::rt::time::sleep(ms(2)).await;
    }
    panic!("the cluster did not start");
}

fn leftovers(running: &Running) -> (u32, usize, usize) {
    let gateway = &running.gateway;
    let snapshot = gateway.directory.load();
    let in_flight = snapshot.entries.iter().map(|e| e.backend.live.in_flight());
    (
        in_flight.sum(),
        gateway.requests.count(),
        gateway.buffered.bytes(),
    )
}

/// A dead backend and one that streams with pauses, so that a request waits for: the router's
/// answer, a refused connection, the back-off, a connection, the head, every event.
fn yaml(dead: &Upstream, engine: &Upstream) -> String {
    format!(
        "server: {{host: 127.0.0.1, port: 0, workers: 1}}
logging: {{access: false}}
health_checks: {{enabled: false}}
prefix_routing: {{enabled: false}}
selection_strategy: RoundRobin
upstream: {{pool_idle_timeout: 1ms}}
retry: {{backoff_max: 3ms, budget_ratio: 1.0}}
circuit_breaker: {{failure_threshold: 1000}}
backends:
{}{}",
        dead.yaml("a"),
        engine.yaml("b")
    )
}

fn streaming_engine() -> Upstream {
    Upstream::start(|_, wire| stream_slowly(wire))
}

fn stream_slowly(wire: &mut Wire) {
    wire.pause(ms(2));
    wire.stream_head();
    for text in ["one", "two", "three"] {
        wire.pause(ms(2));
        wire.chunk(delta(text));
    }
    wire.pause(ms(2));
    wire.chunk(finish("stop"));
    wire.chunk(DONE);
    wire.end();
}

/// Sends `body` again and again, dropped after one more wait each time, until five got through.
async fn drop_at_every_wait(running: &Running, body: &str) {
    let worker = Rc::new(startup::worker(&running.gateway));
    let app = App::new().configure(|config| gateway::http::configure(config, &worker));
    let service = init_service(app).await;
    let (mut in_handler, mut in_body, mut completed) = (0, 0, 0);
    for allowed in 0..WAITS_MAX {
        let mut waits = Waits { left: allowed };
        let request = TestRequest::post()
            .uri("/v1/chat/completions")
            .set_payload(body.to_owned())
            .to_request();
        let answer = waits.run(service.call(request)).await;
        match answer {
            Step::Abort => in_handler += 1,
            Step::Done(answer) => match read(answer.unwrap(), &mut waits).await {
                Step::Abort => in_body += 1,
                Step::Done(text) => {
                    assert!(text.ends_with(DONE), "{text}");
                    completed += 1;
                }
            },
        }
        // a call that requests share ends by itself, once nobody waits for it
        for _ in 0..1000 {
            if running.gateway.flights() == 0 {
                break;
            }
            actix_web::rt::time::sleep(ms(1)).await;
        }
        assert_eq!(
            (leftovers(running), running.gateway.flights()),
            ((0, 0, 0), 0),
            "dropped after {allowed} waits"
        );
        if completed == 5 {
            break;
        }
    }
    assert_eq!(completed, 5, "no request completed");
    assert!(
        in_handler >= 3 && in_body >= 1,
        "{in_handler} in the handler, {in_body} in the body"
    );
    let passages = running.gateway.directory.load();
    let mut backends = passages.view.backends.iter();
    assert!(backends.all(|b| b.passage == Passage::Closed));
}

#[actix_web::test]
async fn a_request_dropped_at_any_wait_leaves_nothing_behind() {
    let (dead, engine) = (Upstream::nobody(), streaming_engine());
    let running = start(&yaml(&dead, &engine)).await;
    healthy(&running).await;
    drop_at_every_wait(&running, &chat_stream(&user("hi"))).await;
}

#[actix_web::test]
async fn a_request_whose_call_others_may_share_leaves_nothing_behind_wherever_it_is_dropped() {
    let (dead, engine) = (Upstream::nobody(), streaming_engine());
    let disk = tempfile::tempdir().unwrap();
    // nothing that is kept can still be used by the next request
    let settings = format!(
        "response_cache: {{enabled: true, backend: tiered, ttl: 1ms, l2: {{type: disk, directory: '{}'}}}}\n",
        disk.path().display()
    );
    let running = start(&(settings + &yaml(&dead, &engine))).await;
    healthy(&running).await;
    let body = chat_stream(&(user("hi") + ", \"temperature\": 0"));
    drop_at_every_wait(&running, &body).await;
    let cache = running.gateway.cache.clone().unwrap();
    assert_eq!(cache.flights.held(), 0);
}

#[actix_web::test]
async fn a_request_dropped_while_it_is_looked_up_leaves_nothing_behind_either() {
    let (dead, engine) = (Upstream::nobody(), announcing_engine());
    let settings = format!(
        "kv_cache_index: {{enabled: true, event_sources: [{{backend_name: b, endpoint: 'http://{}/v1/kv_events'}}]}}\n",
        engine.address
    );
    let running = start(&(settings + &yaml(&dead, &engine))).await;
    healthy(&running).await;
    let kv = running.gateway.kv.clone().unwrap();
    for _ in 0..2000 {
        if kv.sources.load()[0].state.load().block_size.is_some() {
            break;
        }
        actix_web::rt::time::sleep(ms(2)).await;
    }
    assert_eq!(kv.sources.load()[0].state.load().block_size, Some(4));
    drop_at_every_wait(&running, &chat_stream(&user(&"word ".repeat(400)))).await;
    let queued = running.gateway.directory.load();
    let mut entries = queued.entries.iter();
    assert!(entries.all(|e| e.backend.live.queued_tokens() == 0));
    // the index holds the one announced block, and nothing that was only dispatched: withdrawn,
    // or, where it was served, until its time is over
    let entries = kv.gauges.load().entries;
    let by_text = 2040 / 512; // the same prompt once more, for turns whose tokens come too late
    assert!(entries <= 1 + 100 + by_text, "{entries} entries");
}

async fn read(answer: ServiceResponse<impl MessageBody>, waits: &mut Waits) -> Step<String> {
    assert_eq!(answer.status(), StatusCode::OK);
    let mut body = Box::pin(answer.into_body());
    let mut text = String::new();
    loop {
        let next = std::future::poll_fn(|cx: &mut Context<'_>| {
            let poll = Pin::as_mut(&mut body).poll_next(cx);
            waits.count(poll)
        });
        match next.await {
            Step::Abort => return Step::Abort,
            Step::Done(None) => return Step::Done(text),
            Step::Done(Some(chunk)) => {
                let chunk = chunk
                    .map_err(Into::into)
                    .unwrap_or_else(|e: Box<dyn std::error::Error>| panic!("{e}"));
                text += std::str::from_utf8(&chunk).unwrap();
            }
        }
    }
}

/// The same, and it announces one block, and tokenises.
fn announcing_engine() -> Upstream {
    Upstream::start(|request, wire| match request.path() {
        "/v1/kv_events" => {
            wire.stream_head();
            let event = r#"{"seq":0,"ts":1.0,"events":[{"type":"cache_created","block_hashes":[1],"token_ids":[1,2,3,4],"block_size":4}]}"#;
            wire.chunk(format!("id: 0\ndata: {event}\n\n"));
            wire.hang();
        }
        "/tokenize" => {
            wire.pause(ms(2));
            let tokens: Vec<String> = (0..400).map(|n| n.to_string()).collect();
            wire.json("200 OK", &format!(r#"{{"tokens":[{}]}}"#, tokens.join(",")));
        }
        _ => stream_slowly(wire),
    })
}

#[actix_web::test]
async fn a_half_open_probe_dropped_at_any_wait_is_free_again() {
    let (dead, engine) = (Upstream::nobody(), streaming_engine());
    let yaml = yaml(&dead, &engine).replace(
        "circuit_breaker: {failure_threshold: 1000}",
        "circuit_breaker: {failure_threshold: 1, recovery_timeout: 200ms}",
    );
    let running = start(&yaml).await;
    healthy(&running).await;
    let worker = Rc::new(startup::worker(&running.gateway));
    let app = App::new().configure(|config| gateway::http::configure(config, &worker));
    let service = init_service(app).await;
    let entry = |name: &str| {
        let snapshot = running.gateway.directory.load();
        let at = snapshot
            .view
            .backends
            .iter()
            .position(|b| &*b.name == name)
            .unwrap();
        (
            snapshot.view.backends[at].passage,
            snapshot.entries[at].clone(),
        )
    };
    let (mut put_back, mut told_something) = (0, 0);
    for allowed in 0..40 {
        // a failure opens b; the engine itself is fine, so that its probe waits at every point
        let (_, b) = entry("b");
        let link = b.breaker.clone().unwrap();
        link.failed.do_send(actors::circuit_breaker::RequestFailed {
            era: b.era,
            successes: b.backend.live.successes(),
        });
        let mut half_open = false;
        for _ in 0..1000 {
            half_open = entry("b").0 == Passage::HalfOpen;
            if half_open {
                break;
            }
            actix_web::rt::time::sleep(ms(2)).await;
        }
        assert!(half_open, "b did not half-open");
        let request = TestRequest::post()
            .uri("/v1/chat/completions")
            .set_payload(chat_stream(&user("hi")))
            .to_request();
        let mut waits = Waits { left: allowed };
        let (_, before) = entry("b");
        if let Step::Done(answer) = waits.run(service.call(request)).await {
            drop(answer);
        }
        assert_eq!(leftovers(&running), (0, 0, 0));
        // either it told something (a new era comes), or the ticket is back
        let told = || entry("b").1.era != before.era;
        let mut settled = before.ticket.is_free() || told();
        for _ in 0..1000 {
            if settled {
                break;
            }
            actix_web::rt::time::sleep(ms(1)).await;
            settled = before.ticket.is_free() || told();
        }
        assert!(settled, "the probe is stuck after {allowed} waits");
        if told() {
            told_something += 1;
        } else {
            put_back += 1;
        }
    }
    // a request that waits little is dropped before it said anything, one that waits long is not
    assert!(
        put_back >= 2 && told_something >= 2,
        "{put_back} put back, {told_something} told"
    );
}
