//! The rungs: each is the one before plus one thing, the last is the gateway itself.

use actix::{Actor, Addr, Context, Handler, Message};
use actix_rt::Arbiter;
use actix_web::body::{BodySize, MessageBody};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, web};
use actors::backend::{BackendUrl, ConnectionCounts};
use bytes::{Bytes, BytesMut};
use clap::ValueEnum;
use futures_util::{StreamExt, TryStreamExt};
use gateway::settings::{self, Environment, Source};
use gateway::upstream::{Client, ClientSettings, Outgoing, ReplyBody};
use http_body_util::Full;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use routing::prefix_key::{PrefixParts, prefix_key};
use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context as Poller, Poll};
use std::time::{Duration, Instant};
use wire::request::{PromptField, RequestView};

/// A step of the ladder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Rung {
    /// nginx, without any LLM logic
    Nginx,
    /// actix-web and awc
    Awc,
    /// actix-web and hyper connections, each driven by a task of its own
    HyperTasks,
    /// actix-web and hyper connections, driven by their readers
    Bare,
    /// ... and an ask to an actor on the same thread
    Ask,
    /// ... and an ask to an actor on another thread
    Hop,
    /// ... and counters and a histogram
    Metrics,
    /// ... and one log line
    AccessLog,
    /// ... and the body parsed and its prefix hashed
    Parse,
    /// The gateway
    Gateway,
}

impl Rung {
    /// For the table.
    pub fn title(self) -> &'static str {
        match self {
            Rung::Nginx => "nginx",
            Rung::Awc => "bare: actix-web + awc",
            Rung::HyperTasks => "bare: actix-web + hyper, a task per connection",
            Rung::Bare => "bare: actix-web + hyper, driven by the reader",
            Rung::Ask => "+ ask on the same thread",
            Rung::Hop => "+ ask across threads",
            Rung::Metrics => "+ metrics",
            Rung::AccessLog => "+ access log",
            Rung::Parse => "+ parse and hash",
            Rung::Gateway => "the gateway, all of it",
        }
    }
}

#[derive(Message)]
#[rtype(result = "u64")]
struct Add(u64);

struct Counter(u64);

impl Actor for Counter {
    type Context = Context<Self>;
}

impl Handler<Add> for Counter {
    type Result = u64;
    fn handle(&mut self, add: Add, _: &mut Self::Context) -> u64 {
        self.0 += add.0;
        self.0
    }
}

struct State {
    rung: Rung,
    url: BackendUrl,
    client: Client,
    awc: awc::Client,
    idle: RefCell<Vec<SendRequest<Full<Bytes>>>>,
    counts: ConnectionCounts,
    near: Addr<Counter>,
    far: Addr<Counter>,
}

/// Serves until it is killed.
pub fn serve(rung: Rung, port: u16, engine: u16) -> io::Result<()> {
    if rung == Rung::Gateway {
        return serve_gateway(port, engine);
    }
    let logging = settings_for(port, engine).logging;
    let _guard = gateway::telemetry::log::start(&logging).map_err(io::Error::other)?;
    let _recorder = gateway::telemetry::export::recorder(&[0.1, 1.0, 10.0]);
    actix_rt::System::new().block_on(async {
        let arbiter = Arbiter::new();
        let far = Counter::start_in_arbiter(&arbiter.handle(), |_| Counter(0));
        HttpServer::new(move || {
            let state = Rc::new(state(rung, engine, far.clone()));
            App::new().app_data(state).default_service(web::to(proxy))
        })
        .tcp_nodelay(true)
        .h1_allow_half_closed(false)
        .bind(("127.0.0.1", port))?
        .run()
        .await
    })
}

fn settings_for(port: u16, engine: u16) -> settings::Settings {
    let text = format!(
        "server: {{host: 127.0.0.1, port: {port}}}\nbackends: [{{name: e, url: 'http://127.0.0.1:{engine}', models: [m]}}]\nhealth_checks: {{enabled: false}}"
    );
    let source = Source {
        name: "cost-ladder".into(),
        text,
    };
    settings::load(&[source], &Environment::new())
        .expect("the settings are ours")
        .settings
}

fn serve_gateway(port: u16, engine: u16) -> io::Result<()> {
    std::process::exit(gateway::startup::run(settings_for(port, engine)));
}

fn state(rung: Rung, engine: u16, far: Addr<Counter>) -> State {
    State {
        rung,
        url: BackendUrl::parse(&format!("http://127.0.0.1:{engine}")).expect("is well formed"),
        client: Client::new(ClientSettings {
            connect_timeout: Duration::from_secs(2),
            pool_idle_timeout: Duration::from_secs(4),
            connection_max_age: Duration::from_secs(60),
            max_idle_per_backend: 64,
        }),
        awc: awc_client(),
        idle: RefCell::default(),
        counts: ConnectionCounts::default(),
        near: Counter(0).start(),
        far,
    }
}

/// As much tuned as awc allows without a connector of our own.
fn awc_client() -> awc::Client {
    let connector = awc::Connector::new()
        .limit(0)
        .conn_keep_alive(Duration::from_secs(4));
    awc::Client::builder()
        .connector(connector)
        .disable_timeout()
        .no_default_headers()
        .finish()
}

async fn proxy(request: HttpRequest, mut payload: web::Payload) -> HttpResponse {
    let state = request
        .app_data::<Rc<State>>()
        .expect("serve() put it there")
        .clone();
    let started = Instant::now();
    let mut body = BytesMut::new();
    while let Some(Ok(chunk)) = payload.next().await {
        body.extend_from_slice(&chunk);
    }
    let body = body.freeze();
    if state.rung >= Rung::Ask {
        let _ = state.near.send(Add(1)).await;
    }
    if state.rung >= Rung::Hop {
        let _ = state.far.send(Add(1)).await;
    }
    if state.rung >= Rung::Parse {
        let _ = std::hint::black_box(parse(&body));
    }
    let response = match state.rung {
        Rung::Awc => by_awc(&state, body).await,
        Rung::HyperTasks => by_tasks(&state, body).await,
        _ => by_reader(&state, body).await,
    };
    if state.rung >= Rung::Metrics {
        metrics::counter!("ladder_requests_total", "route" => "chat").increment(1);
        metrics::histogram!("ladder_seconds", "route" => "chat")
            .record(started.elapsed().as_secs_f64());
    }
    if state.rung >= Rung::AccessLog {
        let ms = started.elapsed().as_secs_f64() * 1000.0;
        tracing::info!(target: "access", route = "chat", status = 200, backend = "e", ms, "request");
    }
    response
}

fn parse(body: &[u8]) -> Option<u64> {
    let view = RequestView::parse(body).ok()?;
    let model = view.model().ok()?;
    let opening = view.opening(PromptField::Messages);
    let parts = PrefixParts {
        model: &model,
        system: opening.system,
        tools: opening.tools,
        opening: opening.first,
    };
    prefix_key(parts, 2048).map(|key| key.0)
}

const JSON: (&str, &str) = ("content-type", "application/json");

async fn by_awc(state: &State, body: Bytes) -> HttpResponse {
    let url = format!("{}/v1/chat/completions", state.url);
    match state
        .awc
        .post(url)
        .insert_header(JSON)
        .no_decompress()
        .send_body(body)
        .await
    {
        Ok(answer) => HttpResponse::Ok()
            .content_type("application/json")
            .streaming(
                answer
                    .map_err(|_| io::ErrorKind::Other)
                    .map_err(io::Error::from),
            ),
        Err(error) => HttpResponse::BadGateway().body(error.to_string()),
    }
}

async fn by_reader(state: &State, body: Bytes) -> HttpResponse {
    let mut headers = hyper::HeaderMap::new();
    headers.insert(
        "content-type",
        hyper::header::HeaderValue::from_static(JSON.1),
    );
    let outgoing = Outgoing {
        method: hyper::Method::POST,
        path: state.url.path("/v1/chat/completions"),
        headers,
        body,
    };
    match state
        .client
        .send(&state.url, &outgoing, &state.counts)
        .await
    {
        Ok(reply) => HttpResponse::Ok()
            .content_type("application/json")
            .body(Reading(reply.body)),
        Err(error) => HttpResponse::BadGateway().body(error.to_string()),
    }
}

struct Reading(ReplyBody);

impl MessageBody for Reading {
    type Error = io::Error;
    fn size(&self) -> BodySize {
        self.0.length().map_or(BodySize::Stream, BodySize::Sized)
    }
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Poller<'_>) -> Poll<Option<io::Result<Bytes>>> {
        self.0
            .poll_chunk(cx)
            .map(|chunk| chunk.map(|c| c.map_err(io::Error::other)))
    }
}

async fn by_tasks(state: &Rc<State>, body: Bytes) -> HttpResponse {
    match send_by_task(state, body).await {
        Ok(answer) => answer,
        Err(error) => HttpResponse::BadGateway().body(error.to_string()),
    }
}

async fn send_by_task(state: &Rc<State>, body: Bytes) -> io::Result<HttpResponse> {
    let pooled = {
        let mut idle = state.idle.borrow_mut();
        let ready = idle.iter().rposition(SendRequest::is_ready);
        ready.map(|at| idle.swap_remove(at))
    };
    let mut sender = match pooled {
        Some(sender) => sender,
        None => {
            let stream =
                tokio::net::TcpStream::connect((state.url.host(), state.url.port())).await?;
            stream.set_nodelay(true)?;
            let (sender, connection) = handshake(TokioIo::new(stream))
                .await
                .map_err(io::Error::other)?;
            actix_rt::spawn(async move {
                let _ = connection.await;
            });
            sender
        }
    };
    let request = hyper::Request::post("/v1/chat/completions")
        .header("host", state.url.authority())
        .header(JSON.0, JSON.1)
        .body(Full::from(body))
        .map_err(io::Error::other)?;
    let answer = sender
        .send_request(request)
        .await
        .map_err(io::Error::other)?;
    let body = TaskBody {
        incoming: answer.into_body(),
        sender: Some(sender),
        state: state.clone(),
    };
    Ok(HttpResponse::Ok()
        .content_type("application/json")
        .body(body))
}

struct TaskBody {
    incoming: hyper::body::Incoming,
    sender: Option<SendRequest<Full<Bytes>>>,
    state: Rc<State>,
}

impl MessageBody for TaskBody {
    type Error = io::Error;
    fn size(&self) -> BodySize {
        use hyper::body::Body;
        self.incoming
            .size_hint()
            .exact()
            .map_or(BodySize::Stream, BodySize::Sized)
    }
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Poller<'_>) -> Poll<Option<io::Result<Bytes>>> {
        use hyper::body::Body;
        loop {
            return match std::task::ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => Poll::Ready(Some(Ok(data))),
                    Err(_) => continue,
                },
                Some(Err(error)) => Poll::Ready(Some(Err(io::Error::other(error)))),
                None => {
                    let sender = self.sender.take();
                    self.state.idle.borrow_mut().extend(sender);
                    Poll::Ready(None)
                }
            };
        }
    }
}
