//! One connection as a scripted engine holds it: what it writes, byte for byte, and how it ends.

use super::DEADLINE;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// When peers closed their connections, by connection number.
pub type Closed = Arc<Mutex<Vec<(usize, Instant)>>>;

/// The engine's end of a connection.
pub struct Wire {
    /// Counts accepted connections from 0, those of probes included.
    pub connection: usize,
    stream: TcpStream,
    unread: Vec<u8>,
    closed: Closed,
    written: Arc<AtomicU64>,
    open: bool,
}

impl Wire {
    pub(super) fn new(
        connection: usize,
        stream: TcpStream,
        closed: Closed,
        written: Arc<AtomicU64>,
    ) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        Wire {
            connection,
            stream,
            unread: Vec::new(),
            closed,
            written,
            open: true,
        }
    }

    /// Whether neither side has closed it, as far as was noticed.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Writes these bytes; false when the peer has closed.
    pub fn write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        let mut rest = bytes.as_ref();
        while self.open && !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(n) => {
                    self.written.fetch_add(n as u64, Relaxed);
                    rest = &rest[n..];
                }
                Err(_) => self.peer_closed(),
            }
        }
        self.open
    }

    /// A whole answer with this body.
    pub fn answer(&mut self, status: &str, headers: &str, body: impl AsRef<[u8]>) -> bool {
        let body = body.as_ref();
        let mut bytes = format!(
            "HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(body);
        self.write(bytes)
    }

    /// A whole JSON answer.
    pub fn json(&mut self, status: &str, body: &str) -> bool {
        self.answer(status, "content-type: application/json\r\n", body)
    }

    /// The head of a chunked event stream.
    pub fn stream_head(&mut self) -> bool {
        self.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    }

    /// One chunk of a chunked body.
    pub fn chunk(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        let bytes = bytes.as_ref();
        let mut framed = format!("{:x}\r\n", bytes.len()).into_bytes();
        framed.extend_from_slice(bytes);
        framed.extend_from_slice(b"\r\n");
        self.write(framed)
    }

    /// The end of a chunked body.
    pub fn end(&mut self) -> bool {
        self.write("0\r\n\r\n")
    }

    /// A whole stream, one chunk for each piece.
    pub fn stream<T: AsRef<[u8]>>(&mut self, pieces: &[T]) -> bool {
        self.stream_head();
        for piece in pieces {
            self.chunk(piece);
        }
        self.end()
    }

    /// A scripted silence.
    pub fn pause(&self, duration: Duration) {
        std::thread::sleep(duration);
    }

    /// Ends the connection with a reset.
    pub fn reset(&mut self) {
        let socket = socket2::SockRef::from(&self.stream);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
        // reading what is there does not matter; dropping the last handle sends the reset
        self.open = false;
    }

    /// Ends the connection in good order.
    pub fn fin(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Write);
        self.open = false;
    }

    /// Says nothing until the peer closes, or the test is over.
    pub fn hang(&mut self) {
        let end = Instant::now() + DEADLINE;
        while self.open && Instant::now() < end {
            self.look(Duration::from_millis(20));
        }
    }

    /// Reads what is there within `wait`, and notices a close.
    pub fn look(&mut self, wait: Duration) {
        self.stream.set_read_timeout(Some(wait)).unwrap();
        let mut buffer = [0; 64 << 10];
        match self.stream.read(&mut buffer) {
            Ok(0) => self.peer_closed(),
            Ok(n) => self.unread.extend_from_slice(&buffer[..n]),
            Err(e) if is_timeout(&e) => {}
            Err(_) => self.peer_closed(),
        }
    }

    /// The next head, up to its blank line; none when the peer closed.
    pub(super) fn read_head(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(at) = find(&self.unread, b"\r\n\r\n") {
                let rest = self.unread.split_off(at + 4);
                return Some(std::mem::replace(&mut self.unread, rest));
            }
            if !self.open {
                return None;
            }
            self.look(Duration::from_secs(1));
        }
    }

    /// Reads `length` bytes; none when the peer closed.
    pub fn read_body(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.unread.len() < length {
            if !self.open {
                return None;
            }
            self.look(Duration::from_secs(1));
        }
        let rest = self.unread.split_off(length);
        Some(std::mem::replace(&mut self.unread, rest))
    }

    fn peer_closed(&mut self) {
        if self.open {
            let mut closed = self.closed.lock().unwrap();
            closed.push((self.connection, Instant::now()));
        }
        self.open = false;
    }
}

pub fn is_timeout(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

/// Where `needle` begins in `bytes`.
pub fn find(bytes: &[u8], needle: &[u8]) -> Option<usize> {
    bytes.windows(needle.len()).position(|w| w == needle)
}
