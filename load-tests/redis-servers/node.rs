//! One `redis-server` process, on ports of its own.

use crate::{DEADLINE, wait_until};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Somebody else may take a port between our looking for it and the server's using it.
const STARTS_MAX: usize = 5;

/// Where it says that it is up, in its directory.
const LOG: &str = "redis.log";

/// Files of a server that speaks TLS, beside plain TCP on another port.
#[derive(Debug, Clone)]
pub struct Tls {
    /// Certificate of the server, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// The authority that signed it, PEM.
    pub authority: PathBuf,
}

/// A process, killed when dropped.
#[derive(Debug)]
pub(crate) struct Node {
    /// For plain TCP.
    pub(crate) port: u16,
    /// For TLS, if it is spoken.
    pub(crate) tls_port: u16,
    /// Where nodes of a cluster meet.
    pub(crate) bus_port: u16,
    arguments: Vec<String>,
    directory: TempDir,
    child: Option<Child>,
}

impl Node {
    /// Starts one that answers. `arguments` may differ by ports.
    pub(crate) fn start(arguments: impl Fn(&Node) -> Vec<String>) -> Self {
        for _ in 0..STARTS_MAX {
            let [port, tls_port, bus_port] = free_ports();
            let mut node = Node {
                port,
                tls_port,
                bus_port,
                arguments: Vec::new(),
                directory: tempfile::tempdir().expect("a directory for the server"),
                child: None,
            };
            node.arguments = arguments(&node);
            if node.spawn() {
                return node;
            }
        }
        panic!("redis-server ended {STARTS_MAX} times at its start");
    }

    /// The same one, with what it kept on disk.
    pub(crate) fn start_again(&mut self) {
        let mut started = false;
        wait_until("the port is free again", || {
            started = self.child.is_none() && self.spawn();
            started
        });
    }

    /// Whether it came up, rather than ended.
    fn spawn(&mut self) -> bool {
        let port = self.port.to_string();
        let log = self.directory.path().join(LOG);
        let _ = std::fs::remove_file(&log); // of an earlier start, if there was one
        let started = Command::new("redis-server")
            .args(["--port", &port, "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no", "--daemonize", "no"])
            .args(["--logfile", LOG])
            .args(&self.arguments)
            .current_dir(self.directory.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut child = started.expect("redis-server is installed, test.sh sees to it");
        let (mut up, mut ended) = (false, false);
        wait_until("redis-server answers", || {
            // that somebody accepts connections at the port would not say who
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            up = said.contains("Ready to accept connections");
            ended = matches!(child.try_wait(), Ok(Some(_)));
            up || ended
        });
        if up && !ended {
            self.child = Some(child);
        }
        self.child.is_some()
    }

    /// From the next start on.
    pub(crate) fn replace_arguments(&mut self, arguments: Vec<String>) {
        self.arguments = arguments;
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let child = self.child.as_ref().expect("the server runs");
        let sent = Command::new("kill")
            .args([name, &child.id().to_string()])
            .status();
        assert!(sent.is_ok_and(|status| status.success()), "kill {name}");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Ports that nobody uses now.
fn free_ports() -> [u16; 3] {
    let bind = |_| TcpListener::bind("127.0.0.1:0").expect("a free port");
    let held: [TcpListener; 3] = std::array::from_fn(bind);
    held.map(|listener| listener.local_addr().expect("is bound").port())
}

/// Arguments that make a server speak TLS on `port`.
pub(crate) fn tls_arguments(tls: &Tls, port: u16) -> Vec<String> {
    let shown = |path: &PathBuf| path.display().to_string();
    let (certificate, key) = (shown(&tls.certificate), shown(&tls.key));
    let pairs = [
        ("--tls-port", port.to_string()),
        ("--tls-cert-file", certificate),
        ("--tls-key-file", key),
        ("--tls-ca-cert-file", shown(&tls.authority)),
        ("--tls-auth-clients", "no".into()),
    ];
    let pairs = pairs.into_iter();
    pairs.flat_map(|(name, of)| [name.into(), of]).collect()
}

/// Asks the server at a port of this machine, over a connection of its own, as text: what a reply begins with (`+OK`, `-ERR …`,
/// `:3`), or the text itself, or the parts of a list on lines of their own. An absent value is `(nil)`.
///
/// # Panics
/// When the server is away or answers nothing.
pub fn command(port: u16, words: &[&str]) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("the server listens");
    let limited = stream.set_read_timeout(Some(DEADLINE));
    limited.expect("a limit is set");
    let mut request = format!("*{}\r\n", words.len());
    for word in words {
        request += &format!("${}\r\n{word}\r\n", word.len());
    }
    let sent = stream.write_all(request.as_bytes());
    sent.expect("the server listens");
    reply(&mut BufReader::new(stream))
}

fn reply(from: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    from.read_line(&mut line).expect("the server answers");
    let line = line.trim_end();
    let count = || line[1..].parse::<i64>().expect("a length");
    match line.as_bytes().first() {
        Some(b'$') if count() >= 0 => {
            let mut text = vec![0; count() as usize + 2];
            from.read_exact(&mut text).expect("the rest of the answer");
            text.truncate(text.len() - 2);
            String::from_utf8_lossy(&text).into_owned()
        }
        Some(b'*') if count() >= 0 => {
            let parts: Vec<String> = (0..count()).map(|_| reply(from)).collect();
            parts.join("\n")
        }
        Some(b'$' | b'*') => "(nil)".into(),
        _ => line.into(),
    }
}
