//! A scripted engine on threads of its own: records what it is asked and answers as the test says.
//! Answers `GET /health` by itself.

use super::wire::{Closed, Wire};
use super::{DEADLINE, MODEL, wait_until};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

/// One request as the engine got it.
#[derive(Debug, Clone)]
pub struct Request {
    /// The request line, for example `POST /v1/chat/completions HTTP/1.1`.
    pub line: String,
    /// In order, names in lower case.
    pub headers: Vec<(String, Vec<u8>)>,
    /// Empty when the script reads it.
    pub body: Vec<u8>,
    /// Counts connections from 0, those of probes included.
    pub connection: usize,
    /// Counts requests from 0, over all connections, probes not included.
    pub number: usize,
    /// When its head was complete.
    pub at: Instant,
}

impl Request {
    pub fn path(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }

    pub fn header(&self, name: &str) -> Option<&[u8]> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_slice())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn content_length(&self) -> usize {
        let length = self.header("content-length");
        length.map_or(0, |v| std::str::from_utf8(v).unwrap().parse().unwrap())
    }
}

/// How probes are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// With this status.
    Status(u16),
    /// Not at all.
    Hang,
    /// By closing the connection.
    Close,
}

type Script = dyn Fn(&Request, &mut Wire) + Send + Sync;

struct Shared {
    script: Box<Script>,
    reads_body: bool,
    health: Mutex<Box<dyn FnMut(usize) -> Health + Send>>,
    probes: AtomicUsize,
    requests: Mutex<Vec<Request>>,
    connections: AtomicUsize,
    numbers: AtomicUsize,
    closed: Closed,
    written: Arc<AtomicU64>,
    stopped: AtomicBool,
}

/// See the module. Stops listening when dropped.
pub struct Upstream {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    listening: Mutex<Option<JoinHandle<()>>>,
}

impl Upstream {
    /// Answers every request by calling `script`.
    pub fn start(script: impl Fn(&Request, &mut Wire) + Send + Sync + 'static) -> Self {
        Self::launch(true, script)
    }

    /// Calls `script` as soon as a head has come; the body is the script's to read.
    pub fn before_body(script: impl Fn(&Request, &mut Wire) + Send + Sync + 'static) -> Self {
        Self::launch(false, script)
    }

    /// Answers every request with this JSON.
    pub fn json(body: &'static str) -> Self {
        Self::start(move |_, wire| {
            wire.json("200 OK", body);
        })
    }

    /// Answers every request with this stream, in one chunk.
    pub fn sse(stream: String) -> Self {
        Self::start(move |_, wire| {
            wire.stream(&[&stream]);
        })
    }

    /// An address where nobody listens.
    pub fn nobody() -> Self {
        let upstream = Self::start(|_, _| {});
        upstream.stop_listening();
        upstream
    }

    fn launch(
        reads_body: bool,
        script: impl Fn(&Request, &mut Wire) + Send + Sync + 'static,
    ) -> Self {
        let shared = Arc::new(Shared {
            script: Box::new(script),
            reads_body,
            health: Mutex::new(Box::new(|_| Health::Status(200))),
            probes: AtomicUsize::new(0),
            requests: Mutex::default(),
            connections: AtomicUsize::new(0),
            numbers: AtomicUsize::new(0),
            closed: Closed::default(),
            written: Arc::default(),
            stopped: AtomicBool::new(false),
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let upstream = Upstream {
            address,
            shared,
            listening: Mutex::new(None),
        };
        upstream.listen(listener);
        upstream
    }

    fn listen(&self, listener: TcpListener) {
        let shared = self.shared.clone();
        shared.stopped.store(false, Relaxed);
        let accepting = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.stopped.load(Relaxed) {
                    return;
                }
                let shared = shared.clone();
                std::thread::spawn(move || serve(&shared, stream));
            }
        });
        *self.listening.lock().unwrap() = Some(accepting);
    }

    /// From now on connections are refused; open ones go on.
    pub fn stop_listening(&self) {
        let Some(accepting) = self.listening.lock().unwrap().take() else {
            return;
        };
        self.shared.stopped.store(true, Relaxed);
        let _ = TcpStream::connect(self.address);
        accepting.join().unwrap();
    }

    /// Listens again at the same address.
    pub fn listen_again(&self) {
        self.listen(TcpListener::bind(self.address).unwrap());
    }

    /// From now on probes are answered so; the argument counts probes from now on.
    pub fn health(&self, mut health: impl FnMut(usize) -> Health + Send + 'static) {
        let base = self.probes();
        *self.shared.health.lock().unwrap() = Box::new(move |n| health(n - base));
    }

    /// Probes so far.
    pub fn probes(&self) -> usize {
        self.shared.probes.load(Relaxed)
    }

    /// Requests so far, probes not included.
    pub fn requests(&self) -> Vec<Request> {
        self.shared.requests.lock().unwrap().clone()
    }

    /// How many requests there were.
    pub fn count(&self) -> usize {
        self.shared.requests.lock().unwrap().len()
    }

    /// The only request.
    pub fn only_request(&self) -> Request {
        let mut requests = self.requests();
        assert_eq!(requests.len(), 1, "{requests:?}");
        requests.remove(0)
    }

    /// Waits until there have been `n` requests.
    pub fn wait_for_requests(&self, n: usize) {
        wait_until(&format!("{n} requests at the engine"), DEADLINE, || {
            self.count() >= n
        });
    }

    /// Bytes that the kernel took for the gateway so far.
    pub fn written(&self) -> u64 {
        self.shared.written.load(Relaxed)
    }

    /// When the gateway closed the connection of this number, if it has.
    pub fn closed_at(&self, connection: usize) -> Option<Instant> {
        let closed = self.shared.closed.lock().unwrap();
        closed
            .iter()
            .find(|(c, _)| *c == connection)
            .map(|(_, at)| *at)
    }

    /// Waits until the gateway has closed the connection of its `n`th request.
    pub fn wait_for_close(&self, n: usize) {
        let connection = self.requests()[n].connection;
        wait_until("the gateway closes the connection", DEADLINE, || {
            self.closed_at(connection).is_some()
        });
    }

    /// Its entry in `backends`, serving the test model.
    pub fn yaml(&self, name: &str) -> String {
        self.yaml_for(name, &[MODEL])
    }

    /// Its entry in `backends`, serving these models.
    pub fn yaml_for(&self, name: &str, models: &[&str]) -> String {
        format!(
            "  - {{ name: {name}, url: \"http://{}\", models: {models:?} }}\n",
            self.address
        )
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop_listening();
    }
}

fn serve(shared: &Shared, stream: TcpStream) {
    let connection = shared.connections.fetch_add(1, Relaxed);
    let (closed, written) = (shared.closed.clone(), shared.written.clone());
    let mut wire = Wire::new(connection, stream, closed, written);
    while let Some(head) = wire.read_head() {
        let mut request = parse(&head, connection);
        if request.path() == "/health" {
            probe(shared, &mut wire);
            continue;
        }
        if shared.reads_body {
            let Some(body) = wire.read_body(request.content_length()) else {
                return;
            };
            request.body = body;
        }
        request.number = shared.numbers.fetch_add(1, Relaxed);
        shared.requests.lock().unwrap().push(request.clone());
        (shared.script)(&request, &mut wire);
        if !wire.is_open() {
            return;
        }
    }
}

fn probe(shared: &Shared, wire: &mut Wire) {
    let number = shared.probes.fetch_add(1, Relaxed);
    let health = (shared.health.lock().unwrap())(number);
    match health {
        Health::Status(200) => {
            wire.answer("200 OK", "", "");
        }
        Health::Status(status) => {
            wire.answer(&format!("{status} Unwell"), "", "");
        }
        Health::Hang => wire.hang(),
        Health::Close => wire.reset(),
    }
}

fn parse(head: &[u8], connection: usize) -> Request {
    let mut lines = head.split(|b| *b == b'\n').map(<[u8]>::trim_ascii);
    let line = String::from_utf8(lines.next().unwrap().to_vec()).unwrap();
    let headers = lines.filter(|line| !line.is_empty()).map(|line| {
        let colon = line.iter().position(|b| *b == b':').unwrap();
        let name = String::from_utf8(line[..colon].to_ascii_lowercase()).unwrap();
        (name, line[colon + 1..].trim_ascii().to_vec())
    });
    Request {
        line,
        headers: headers.collect(),
        body: Vec::new(),
        connection,
        number: 0,
        at: Instant::now(),
    }
}
