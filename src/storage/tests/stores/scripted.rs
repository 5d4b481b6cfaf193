//! A server that does to each request what a script says: answers in part, hangs, or closes.

use socket2::SockRef;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

/// What is done to one request.
#[derive(Debug, Clone)]
pub struct Reply {
    bytes: Vec<u8>,
    then: Then,
}

/// What follows the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Then {
    NextRequest,
    Close,
    Reset,
    Hang,
}

impl Reply {
    /// An answer with a body of the right length, on a connection that stays.
    pub fn answer(status: u16, headers: &str, body: &str) -> Self {
        let length = body.len();
        let bytes =
            format!("HTTP/1.1 {status} Said\r\n{headers}content-length: {length}\r\n\r\n{body}");
        Reply {
            bytes: bytes.into(),
            then: Then::NextRequest,
        }
    }

    /// An error as S3 says it.
    pub fn error(status: u16, code: &str) -> Self {
        Reply::answer(
            status,
            "content-type: application/xml\r\n",
            &error_document(code),
        )
    }

    /// These bytes, and the end of the connection.
    pub fn cut(bytes: impl Into<Vec<u8>>) -> Self {
        Reply {
            bytes: bytes.into(),
            then: Then::Close,
        }
    }

    /// These bytes, and a connection that breaks.
    pub fn reset(bytes: impl Into<Vec<u8>>) -> Self {
        Reply {
            bytes: bytes.into(),
            then: Then::Reset,
        }
    }

    /// These bytes, and nothing more while the client waits.
    pub fn hang(bytes: impl Into<Vec<u8>>) -> Self {
        Reply {
            bytes: bytes.into(),
            then: Then::Hang,
        }
    }

    /// The same, but the connection ends with the last byte.
    pub fn then_close(self) -> Self {
        Reply {
            then: Then::Close,
            ..self
        }
    }
}

pub fn error_document(code: &str) -> String {
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Error><Code>{code}</Code><Message>no</Message></Error>"
    )
}

/// A running script. The last reply is repeated.
pub struct Scripted {
    pub address: SocketAddr,
    heard: Arc<Heard>,
    gone: watch::Receiver<usize>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Heard {
    reads_bodies: bool,
    script: Mutex<VecDeque<Reply>>,
    heads: Mutex<Vec<String>>,
    connections: Mutex<usize>,
}

impl Scripted {
    pub async fn start(script: impl IntoIterator<Item = Reply>) -> Self {
        Self::start_with(script, true).await
    }

    /// Replies once it has the head of a request, without reading the body.
    pub async fn start_answering_early(reply: Reply) -> Self {
        Self::start_with([reply], false).await
    }

    async fn start_with(script: impl IntoIterator<Item = Reply>, reads_bodies: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let heard = Arc::new(Heard {
            script: Mutex::new(script.into_iter().collect()),
            reads_bodies,
            ..Default::default()
        });
        let (tell, gone) = watch::channel(0);
        let task = tokio::spawn(accept(listener, heard.clone(), tell));
        Scripted {
            address,
            heard,
            gone,
            task,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The heads of the requests so far.
    pub fn heads(&self) -> Vec<String> {
        self.heard.heads.lock().unwrap().clone()
    }

    /// How many connections were made.
    pub fn connections(&self) -> usize {
        *self.heard.connections.lock().unwrap()
    }

    /// Waits until the client has closed a connection in the middle of a hanging reply.
    pub async fn client_left(&mut self) {
        self.gone.wait_for(|left| *left > 0).await.unwrap();
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, heard: Arc<Heard>, gone: watch::Sender<usize>) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        *heard.connections.lock().unwrap() += 1;
        connections.spawn(talk(stream, heard.clone(), gone.clone()));
    }
}

async fn talk(mut stream: TcpStream, heard: Arc<Heard>, gone: watch::Sender<usize>) {
    while let Some(head) = read_request(&mut stream, heard.reads_bodies).await {
        heard.heads.lock().unwrap().push(head);
        let reply = {
            let mut script = heard.script.lock().unwrap();
            if script.len() > 1 {
                script.pop_front()
            } else {
                script.front().cloned()
            }
        };
        let Some(reply) = reply else { return };
        if stream.write_all(&reply.bytes).await.is_err() {
            return;
        }
        match reply.then {
            Then::NextRequest => {}
            Then::Close => return,
            Then::Reset => {
                let socket = SockRef::from(&stream);
                socket.set_linger(Some(Duration::ZERO)).unwrap();
                return;
            }
            Then::Hang => {
                let _ = stream.read(&mut [0; 1]).await; // ends when the client leaves
                gone.send_modify(|left| *left += 1);
                return;
            }
        }
    }
}

/// The head of the next request, once its body is read too if it is to be.
async fn read_request(stream: &mut TcpStream, reads_body: bool) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| {
        line.to_ascii_lowercase()
            .strip_prefix("content-length: ")?
            .parse()
            .ok()
    });
    let mut body = vec![0; length.filter(|_| reads_body).unwrap_or(0)];
    stream.read_exact(&mut body).await.ok()?;
    Some(head)
}
