//! A TCP proxy that does harm when it is told to: what a network, a firewall or a sick server does between
//! the gateway and a store.

use super::wire::{find, is_timeout};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a thread that waits for bytes looks whether the fault has changed.
const LOOK_EVERY: Duration = Duration::from_millis(5);

type Script = dyn Fn(&str) -> Option<String> + Send + Sync;

/// What is done to every connection from now on.
#[derive(Clone)]
pub enum Fault {
    /// Nothing.
    Pass,
    /// Nobody listens; open connections go on.
    RefuseNew,
    /// Connections are accepted and nothing is forwarded, until another fault lets what has come go on.
    Hang,
    /// All connections are reset, and each new one.
    Cut,
    /// Bytes of replies come so much later.
    Delay(Duration),
    /// So many bytes of replies pass on each connection, then it is reset.
    CutAfterBytes(usize),
    /// For HTTP, to be set between requests: what this makes of a request's head is the reply; none: the
    /// request is forwarded. The connection ends with a reply that is not whole.
    Reply(Arc<Script>),
}

impl Fault {
    /// The same reply to every request.
    pub fn reply(text: String) -> Self {
        Fault::Reply(Arc::new(move |_| Some(text.clone())))
    }
}

/// A whole HTTP reply with this body; `headers` end with an end of line.
pub fn http(status: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\n{headers}content-length: {length}\r\n\r\n{body}")
}

/// An error as S3 says it.
pub fn s3_error(status: &str, code: &str) -> String {
    let document = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>no</Message></Error>"
    );
    http(status, "content-type: application/xml\r\n", &document)
}

/// One connection, from the gateway's side to the store's.
struct Link {
    client: TcpStream,
    target: TcpStream,
    is_cut: AtomicBool,
    is_stranded: AtomicBool,
    replied: AtomicUsize,
}

struct Shared {
    target: SocketAddr,
    fault: Mutex<Fault>,
    links: Mutex<Vec<Arc<Link>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    accepted: AtomicUsize,
    refuses: AtomicBool,
    stopped: AtomicBool,
}

/// See the module. All its connections and threads end when it is dropped.
pub struct FaultProxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    accepting: Mutex<Option<JoinHandle<()>>>,
}

impl FaultProxy {
    /// In front of this address, doing no harm.
    pub fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let proxy = FaultProxy {
            address: listener.local_addr().unwrap(),
            shared: Arc::new(Shared {
                target,
                fault: Mutex::new(Fault::Pass),
                links: Mutex::default(),
                threads: Mutex::default(),
                accepted: AtomicUsize::new(0),
                refuses: AtomicBool::new(false),
                stopped: AtomicBool::new(false),
            }),
            accepting: Mutex::default(),
        };
        proxy.listen(listener);
        proxy
    }

    /// The same, in front of a port of this machine.
    pub fn to_port(port: u16) -> Self {
        Self::start(([127, 0, 0, 1], port).into())
    }

    /// From now on it does this.
    pub fn set(&self, fault: Fault) {
        let refuses = matches!(fault, Fault::RefuseNew);
        let cuts = matches!(fault, Fault::Cut);
        *self.shared.fault.lock().unwrap() = fault;
        for link in self.shared.links.lock().unwrap().iter() {
            link.replied.store(0, Relaxed);
            link.is_cut.fetch_or(cuts, Relaxed);
        }
        if refuses {
            self.stop_listening();
        } else if self.accepting.lock().unwrap().is_none() {
            self.listen(TcpListener::bind(self.address).unwrap());
        }
    }

    /// Open connections never pass a byte again, and do not end; new ones do as the fault says. So does a
    /// firewall that has forgotten them.
    pub fn strand(&self) {
        for link in self.shared.links.lock().unwrap().iter() {
            link.is_stranded.store(true, Relaxed);
        }
    }

    /// Connections so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Relaxed)
    }

    fn listen(&self, listener: TcpListener) {
        let shared = self.shared.clone();
        shared.refuses.store(false, Relaxed);
        let accepting = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.refuses.load(Relaxed) {
                    return;
                }
                accept(&shared, stream);
            }
        });
        *self.accepting.lock().unwrap() = Some(accepting);
    }

    fn stop_listening(&self) {
        let Some(accepting) = self.accepting.lock().unwrap().take() else {
            return;
        };
        self.shared.refuses.store(true, Relaxed);
        let _ = TcpStream::connect(self.address);
        let _ = accepting.join();
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Relaxed);
        self.stop_listening();
        let threads = std::mem::take(&mut *self.shared.threads.lock().unwrap());
        for thread in threads {
            let _ = thread.join();
        }
    }
}

fn accept(shared: &Arc<Shared>, client: TcpStream) {
    shared.accepted.fetch_add(1, Relaxed);
    let cuts = matches!(*shared.fault.lock().unwrap(), Fault::Cut);
    let target = TcpStream::connect(shared.target);
    let (false, Ok(target)) = (cuts, target) else {
        return reset(&client);
    };
    for stream in [&client, &target] {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(LOOK_EVERY)).unwrap();
    }
    let link = Arc::new(Link {
        client,
        target,
        is_cut: AtomicBool::new(false),
        is_stranded: AtomicBool::new(false),
        replied: AtomicUsize::new(0),
    });
    let mut threads = shared.threads.lock().unwrap();
    threads.retain(|thread| !thread.is_finished());
    for pump in [requests, replies] {
        let (shared, link) = (shared.clone(), link.clone());
        threads.push(std::thread::spawn(move || {
            pump(&shared, &link);
            link.is_cut.store(true, Relaxed); // the other way ends too
            shared
                .links
                .lock()
                .unwrap()
                .retain(|l| !Arc::ptr_eq(l, &link));
        }));
    }
    shared.links.lock().unwrap().push(link);
}

/// Whoever holds the stream last sends the reset by closing it.
fn reset(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

impl Shared {
    /// What is done to a connection now, once it is not held up; none: it has ended.
    fn fault_of(&self, link: &Link) -> Option<Fault> {
        loop {
            if self.stopped.load(Relaxed) || link.is_cut.load(Relaxed) {
                return None;
            }
            let fault = self.fault.lock().unwrap().clone();
            if !link.is_stranded.load(Relaxed) && !matches!(fault, Fault::Hang) {
                return Some(fault);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// The next bytes, and what is done to them.
    fn read(&self, from: &TcpStream, link: &Link) -> Option<(Vec<u8>, Fault)> {
        let mut buffer = [0; 16 << 10];
        loop {
            self.fault_of(link)?;
            match (&*from).read(&mut buffer) {
                Ok(0) => return None,
                Ok(n) => return Some((buffer[..n].to_vec(), self.fault_of(link)?)),
                Err(error) if is_timeout(&error) => {}
                Err(_) => return None,
            }
        }
    }
}

fn requests(shared: &Shared, link: &Link) {
    let mut held = Vec::new();
    while let Some((bytes, fault)) = shared.read(&link.client, link) {
        held.extend_from_slice(&bytes);
        if let Fault::Reply(script) = fault {
            let Some(length) = request_length(&held) else {
                continue; // its head is not whole
            };
            if let Some(reply) = script(&String::from_utf8_lossy(&held)) {
                let answered = take_request(shared, link, &mut held, length)
                    && (&link.client).write_all(reply.as_bytes()).is_ok();
                if answered && is_whole(&reply) {
                    continue;
                }
                return;
            }
        }
        if (&link.target).write_all(&held).is_err() {
            return;
        }
        held.clear();
    }
    if link.is_cut.load(Relaxed) {
        reset(&link.client);
    }
}

/// Reads on until the whole request is there, and drops it.
fn take_request(shared: &Shared, link: &Link, held: &mut Vec<u8>, length: usize) -> bool {
    while held.len() < length {
        let Some((bytes, _)) = shared.read(&link.client, link) else {
            return false;
        };
        held.extend_from_slice(&bytes);
    }
    held.drain(..length);
    true
}

fn replies(shared: &Shared, link: &Link) {
    while let Some((bytes, fault)) = shared.read(&link.target, link) {
        let mut passes = bytes.len();
        match fault {
            Fault::Delay(by) => wait(shared, by),
            Fault::CutAfterBytes(most) => {
                passes = passes.min(most - link.replied.load(Relaxed).min(most));
            }
            _ => {}
        }
        link.replied.fetch_add(passes, Relaxed);
        let sent = (&link.client).write_all(&bytes[..passes]);
        if sent.is_err() {
            return;
        }
        if passes < bytes.len() {
            return reset(&link.client);
        }
    }
    if link.is_cut.load(Relaxed) {
        reset(&link.client);
    }
}

/// A scripted delay, which the end of the proxy cuts short.
fn wait(shared: &Shared, by: Duration) {
    let end = Instant::now() + by;
    while Instant::now() < end && !shared.stopped.load(Relaxed) {
        std::thread::sleep(LOOK_EVERY.min(by));
    }
}

fn content_length(head: &[u8]) -> usize {
    let head = String::from_utf8_lossy(head).to_ascii_lowercase();
    let mut lines = head.lines();
    let length = lines.find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    length.unwrap_or(0)
}

/// Bytes of the request that these begin, once its head is there.
fn request_length(bytes: &[u8]) -> Option<usize> {
    let body = find(bytes, b"\r\n\r\n")? + 4;
    Some(body + content_length(&bytes[..body]))
}

fn is_whole(reply: &str) -> bool {
    let is_chunked = reply.contains("transfer-encoding: chunked");
    !is_chunked && request_length(reply.as_bytes()).is_some_and(|length| reply.len() >= length)
}
