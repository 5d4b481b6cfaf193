//! A raw HTTP/1.1 client that takes the framing at its word: a chunked body without its last
//! chunk, or one byte too many anywhere, is an error that a test can see.

use super::wire::is_timeout;
use super::{DEADLINE, Gateway};
use rustls::{ClientConnection, Stream};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// How a body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// As its framing says.
    Clean,
    /// The connection closed or broke before.
    Cut,
}

/// An answer.
#[derive(Clone)]
pub struct Answer {
    pub status: u16,
    /// In order, names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// When each chunk was complete, and its length.
    pub chunks: Vec<(Instant, usize)>,
    pub ended: Ended,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let body = String::from_utf8_lossy(&self.body[..self.body.len().min(2000)]);
        let (status, ended, headers) = (self.status, self.ended, &self.headers);
        write!(f, "{status} {ended:?} {headers:?} {body}")
    }
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(n, _)| n == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Who answered; empty when no backend did.
    pub fn backend(&self) -> &str {
        self.header("x-tidegate-backend").unwrap_or_default()
    }
}

/// A POST of JSON on a connection of its own.
pub fn post(gateway: &Gateway, path: &str, body: impl AsRef<[u8]>) -> Answer {
    Client::connect(gateway).post(path, "", body)
}

/// A GET on a connection of its own.
pub fn get(gateway: &Gateway, path: &str) -> Answer {
    let mut client = Client::connect(gateway);
    client.send(format!("GET {path} HTTP/1.1\r\nhost: gateway\r\n\r\n"));
    client.answer()
}

/// The bytes of a POST of JSON.
pub fn request(path: &str, headers: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// One connection to the gateway.
pub struct Client {
    stream: TcpStream,
    tls: Option<Box<ClientConnection>>,
    unread: Vec<u8>,
    at: usize,
    broken: bool,
}

impl Client {
    pub fn connect(gateway: &Gateway) -> Self {
        Self::over(TcpStream::connect(gateway.address).unwrap())
    }

    /// To this address.
    pub fn connect_to(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).unwrap())
    }

    /// To a gateway in a process of its own.
    pub fn connect_to_port(port: u16) -> Self {
        Self::over(TcpStream::connect(("127.0.0.1", port)).unwrap())
    }

    /// The same within TLS; fails when the handshake does.
    pub fn connect_tls(address: SocketAddr, tls: ClientConnection) -> std::io::Result<Self> {
        Self::over(TcpStream::connect(address)?).encrypted(tls)
    }

    /// Goes on within TLS.
    pub fn encrypted(mut self, mut tls: ClientConnection) -> std::io::Result<Self> {
        while tls.is_handshaking() {
            tls.complete_io(&mut self.stream)?;
        }
        self.tls = Some(Box::new(tls));
        Ok(self)
    }

    /// What the other end showed, and what was agreed on.
    pub fn tls(&self) -> &ClientConnection {
        self.tls.as_ref().unwrap()
    }

    /// With a small receive buffer, so that a reader that stops is noticed soon.
    pub fn connect_small(gateway: &Gateway, receive_buffer: usize) -> Self {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let socket = socket.unwrap();
        socket.set_recv_buffer_size(receive_buffer).unwrap();
        socket.connect(&gateway.address.into()).unwrap();
        Self::over(socket.into())
    }

    fn over(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        Client {
            stream,
            tls: None,
            unread: Vec::new(),
            at: 0,
            broken: false,
        }
    }

    /// Sends bytes as they are; true when the kernel took them all.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        let bytes = bytes.as_ref();
        match &mut self.tls {
            None => self.stream.write_all(bytes).is_ok(),
            Some(tls) => {
                let mut stream = Stream::new(&mut **tls, &mut self.stream);
                stream
                    .write_all(bytes)
                    .and_then(|()| stream.flush())
                    .is_ok()
            }
        }
    }

    /// Sends a GET, with these header lines, and reads the whole answer.
    pub fn get(&mut self, path: &str, headers: &str) -> Answer {
        self.send(format!(
            "GET {path} HTTP/1.1\r\nhost: gateway\r\n{headers}\r\n"
        ));
        self.answer()
    }

    /// Sends a POST of JSON and waits for nothing.
    pub fn start(&mut self, path: &str, body: impl AsRef<[u8]>) {
        assert!(self.send(request(path, "", body)));
    }

    /// Sends a chat request and waits for nothing.
    pub fn start_chat(&mut self, body: impl AsRef<[u8]>) {
        self.start("/v1/chat/completions", body);
    }

    /// Sends a POST of JSON and reads the whole answer.
    pub fn post(&mut self, path: &str, headers: &str, body: impl AsRef<[u8]>) -> Answer {
        self.send(request(path, headers, body));
        self.answer()
    }

    /// Sends a chat request and reads the whole answer.
    pub fn chat(&mut self, body: impl AsRef<[u8]>) -> Answer {
        self.post("/v1/chat/completions", "", body)
    }

    /// Closes the sending side only.
    pub fn half_close(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Leaves in good order, with a FIN.
    pub fn leave(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Leaves with a reset.
    pub fn reset(self) {
        let socket = socket2::SockRef::from(&self.stream);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// Reads a head and the whole body.
    pub fn answer(&mut self) -> Answer {
        let mut answer = self.head();
        while answer.ended == Ended::Cut && self.next_piece(&mut answer) {}
        answer
    }

    /// Reads a head; the body is read piece by piece with [`Client::read_until`].
    pub fn head(&mut self) -> Answer {
        let head = loop {
            let head = self.until_blank_line();
            if !head.starts_with("HTTP/1.1 1") {
                break head;
            }
        };
        let mut lines = head.split("\r\n");
        let line = lines.next().unwrap();
        let status = line.strip_prefix("HTTP/1.1 ").map(|rest| &rest[..3]);
        let status = status.and_then(|s| s.parse().ok());
        let status = status.unwrap_or_else(|| panic!("not a status line: {line:?}"));
        let headers = lines.filter(|line| !line.is_empty()).map(|line| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_ascii_lowercase(), value.trim().to_owned())
        });
        let mut answer = Answer {
            status,
            headers: headers.collect(),
            body: Vec::new(),
            chunks: Vec::new(),
            ended: Ended::Cut,
        };
        if answer.header("content-length") == Some("0") || status == 204 {
            answer.ended = Ended::Clean;
        }
        answer
    }

    /// Reads on until the body holds `what` (true) or has ended (false).
    pub fn read_until(&mut self, answer: &mut Answer, what: &str) -> bool {
        loop {
            if super::wire::find(&answer.body, what.as_bytes()).is_some() {
                return true;
            }
            if answer.ended == Ended::Clean || !self.next_piece(answer) {
                return false;
            }
        }
    }

    /// Reads the next chunk, or the rest of a body of known length; false when there is none.
    pub fn next_piece(&mut self, answer: &mut Answer) -> bool {
        if answer.header("transfer-encoding") == Some("chunked") {
            return self.next_chunk(answer);
        }
        let length = answer.header("content-length");
        let length: usize = length.expect("a body has a length").parse().unwrap();
        let Some(body) = self.take(length - answer.body.len(), true) else {
            answer.body.extend_from_slice(&self.unread[self.at..]);
            self.at = self.unread.len();
            return false;
        };
        answer.body.extend_from_slice(&body);
        answer.ended = Ended::Clean;
        true
    }

    fn next_chunk(&mut self, answer: &mut Answer) -> bool {
        let Some(line) = self.line() else {
            return false;
        };
        let digits = !line.is_empty() && line.bytes().all(|b| b.is_ascii_hexdigit());
        assert!(digits, "not a chunk size: {line:?}");
        let size = usize::from_str_radix(&line, 16).unwrap();
        let Some(chunk) = self.take(size, true) else {
            return false;
        };
        let Some(end) = self.take(2, true) else {
            return false;
        };
        assert_eq!(end, b"\r\n", "a chunk is longer than it says");
        if size == 0 {
            answer.ended = Ended::Clean;
            return false;
        }
        answer.chunks.push((Instant::now(), size));
        answer.body.extend_from_slice(&chunk);
        true
    }

    fn until_blank_line(&mut self) -> String {
        let mut head = String::new();
        loop {
            let line = self.line().unwrap_or_else(|| {
                let rest = String::from_utf8_lossy(&self.unread[self.at..]);
                panic!("the connection closed within a head: {head:?} {rest:?}")
            });
            if line.is_empty() {
                return head;
            }
            head.push_str(&line);
            head.push_str("\r\n");
        }
    }

    fn line(&mut self) -> Option<String> {
        let mut length = 0;
        loop {
            let unread = &self.unread[self.at + length..];
            if let Some(end) = super::wire::find(unread, b"\r\n") {
                let line = self.take(length + end, false).unwrap();
                self.take(2, false);
                return Some(String::from_utf8(line).unwrap());
            }
            length = (self.unread.len() - self.at).saturating_sub(1);
            if !self.more() {
                return None;
            }
        }
    }

    fn take(&mut self, count: usize, wait: bool) -> Option<Vec<u8>> {
        while self.unread.len() - self.at < count {
            if !wait || !self.more() {
                return None;
            }
        }
        let taken = self.unread[self.at..self.at + count].to_vec();
        self.at += count;
        Some(taken)
    }

    fn more(&mut self) -> bool {
        if self.broken {
            return false;
        }
        self.unread.drain(..self.at);
        self.at = 0;
        let mut buffer = [0; 64 << 10];
        let read = match &mut self.tls {
            None => self.stream.read(&mut buffer),
            Some(tls) => Stream::new(&mut **tls, &mut self.stream).read(&mut buffer),
        };
        match read {
            Ok(n) if n > 0 => self.unread.extend_from_slice(&buffer[..n]),
            Err(e) if is_timeout(&e) => panic!("the gateway said nothing for {DEADLINE:?}"),
            _ => self.broken = true,
        }
        !self.broken
    }
}
