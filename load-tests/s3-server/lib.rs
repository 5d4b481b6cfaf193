//! An S3 server on this machine, for tests and load tests: keeps objects as files, checks signatures, and can be made slow.
//!
//! A thin shell over the crates `s3s` (the protocol) and `s3s-fs` (the files). Not for data that anybody wants to keep.

mod access;

use access::ExistingBuckets;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s_fs::FileSystem;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// What a server is to be.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address to listen on.
    pub host: String,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// Where buckets are kept, as directories; none: a directory that vanishes with the server.
    pub root: Option<PathBuf>,
    /// The key that requests must be signed with.
    pub access_key: String,
    /// Its secret.
    pub secret_key: String,
    /// A bucket that is there from the start.
    pub bucket: Option<String>,
    /// How long each request waits before it is worked on.
    pub delay: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            host: "127.0.0.1".into(),
            port: 0,
            root: None,
            access_key: "test-access-key".into(),
            secret_key: "test-secret-key".into(),
            bucket: Some("tidegate".into()),
            delay: Duration::ZERO,
        }
    }
}

/// A running server. Dropped, it stops: connections are closed, and a directory of its own is removed.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    root: PathBuf,
    task: JoinHandle<()>,
    _own_root: Option<TempDir>,
}

impl Server {
    /// Starts a server on the current tokio runtime.
    pub async fn start(config: Config) -> io::Result<Self> {
        let (root, own_root) = match &config.root {
            Some(root) => (root.clone(), None),
            None => {
                let own = tempfile::tempdir()?;
                (own.path().to_owned(), Some(own))
            }
        };
        std::fs::create_dir_all(&root)?;
        if let Some(bucket) = &config.bucket {
            make_bucket(&root, bucket)?;
        }
        let service = service(&root, &config)?;
        let listener = TcpListener::bind((config.host.as_str(), config.port)).await?;
        Ok(Server {
            address: listener.local_addr()?,
            root,
            task: tokio::spawn(accept(listener, service, config.delay)),
            _own_root: own_root,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What a client calls the endpoint: `http://127.0.0.1:40123`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Where buckets are kept.
    pub fn root(&self) -> &Path {
        &self.root
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort(); // and with it the JoinSet of its connections
    }
}

/// A bucket is a directory right below the root; a name with a slash would be somewhere else.
fn make_bucket(root: &Path, bucket: &str) -> io::Result<()> {
    if bucket.is_empty() || bucket.starts_with('.') || bucket.contains(['/', '\\']) {
        let fault = format!("{bucket:?} is no name for a bucket");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, fault));
    }
    std::fs::create_dir_all(root.join(bucket))
}

fn service(root: &Path, config: &Config) -> io::Result<S3Service> {
    let files = FileSystem::new(root).map_err(|fault| io::Error::other(format!("{fault:?}")))?;
    let mut builder = S3ServiceBuilder::new(files);
    let key = config.access_key.as_str();
    builder.set_auth(SimpleAuth::from_single(key, config.secret_key.as_str()));
    builder.set_access(ExistingBuckets {
        root: root.to_owned(),
    });
    Ok(builder.build())
}

async fn accept(listener: TcpListener, service: S3Service, delay: Duration) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(stream, service.clone(), delay));
                }
                // too many open files: wait for one to be closed
                Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// How long nothing is accepted after a failure to accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

async fn serve(stream: TcpStream, service: S3Service, delay: Duration) {
    let _ = stream.set_nodelay(true); // a slower server is still a server
    let answer = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let service = service.clone();
        async move {
            if !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            service.call(request.map(s3s::Body::from)).await
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new());
    // a client that goes away is no fault of the server
    let _ = builder.serve_connection(TokioIo::new(stream), answer).await;
}
