//! The object store's connections and requests: how they look, how they end, how often they are made.

use crate::scripted::{Reply, Scripted};
use crate::support::{PATIENCE, SOON, errors_of_all_calls, key, s3_settings, value};
use futures_util::future::join_all;
use std::time::Instant;
use storage::{ErrorKind, S3Settings, S3Store, Store};
use tokio::net::TcpListener;
use tokio::task::yield_now;

/// What a successful put gets.
fn done() -> Reply {
    Reply::answer(200, "", "")
}

#[tokio::test]
async fn requests_go_to_the_endpoint_with_the_bucket_in_their_path() {
    let server = Scripted::start([done()]).await;
    let endpoint = format!("http://localhost:{}", server.address.port());
    let store = S3Store::open(s3_settings(&endpoint)).unwrap();
    store.put(&key("v1/a b+é/0f"), value("x")).await.unwrap();
    let head = &server.heads()[0];
    assert!(
        head.starts_with("PUT /tidegate/response-cache/v1/a%20b%2B%C3%A9/0f HTTP/1.1\r\n"),
        "{head}"
    );
    let host = format!("host: localhost:{}\r\n", server.address.port());
    assert!(head.to_ascii_lowercase().contains(&host), "{head}");
}

#[tokio::test]
async fn writes_carry_no_checksum_headers_and_no_chunk_signatures() {
    let server = Scripted::start([done()]).await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    store.put(&key("a"), value("x")).await.unwrap();
    let head = server.heads()[0].to_ascii_lowercase();
    for unwanted in [
        "x-amz-checksum",
        "x-amz-sdk",
        "x-amz-trailer",
        "aws-chunked",
        "streaming-",
        "transfer-encoding",
        "expect:",
    ] {
        assert!(!head.contains(unwanted), "{unwanted} in {head}");
    }
    assert_eq!(head.matches("content-length").count(), 1, "{head}");
}

#[tokio::test]
async fn calls_one_after_another_share_a_connection() {
    let server = Scripted::start([done()]).await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    for _ in 0..5 {
        store.put(&key("a"), value("x")).await.unwrap();
    }
    assert_eq!((server.heads().len(), server.connections()), (5, 1));
}

#[tokio::test]
async fn a_connection_that_the_server_closed_while_idle_costs_no_call() {
    let server = Scripted::start([done().then_close()]).await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    for _ in 0..20 {
        store.put(&key("a"), value("x")).await.unwrap();
    }
}

#[tokio::test]
async fn a_server_that_closes_without_an_answer_is_asked_twice_and_then_unavailable() {
    let server = Scripted::start([Reply::cut("")]).await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    let error = store.get(&key("a")).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error}");
    assert_eq!(server.heads().len(), 2);
}

#[tokio::test]
async fn a_port_where_nobody_listens_is_unavailable() {
    let port = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let store = S3Store::open(s3_settings(&format!("http://127.0.0.1:{port}"))).unwrap();
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::Unavailable, "{call}: {error}");
    }
}

#[tokio::test]
async fn a_server_that_hangs_costs_a_call_its_time_and_no_more() {
    let mut server = Scripted::start([Reply::hang("")]).await;
    let settings = S3Settings {
        request_timeout: SOON,
        ..s3_settings(&server.url())
    };
    let store = S3Store::open(settings).unwrap();
    let began = Instant::now();
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::TooSlow, "{call}: {error}");
    }
    assert!(began.elapsed() < PATIENCE / 2);
    server.client_left().await;
}

#[tokio::test]
async fn a_server_that_never_shakes_hands_costs_the_time_of_a_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!(
        "https://127.0.0.1:{}",
        listener.local_addr().unwrap().port()
    );
    let settings = S3Settings {
        connect_timeout: SOON,
        ..s3_settings(&endpoint)
    };
    let error = S3Store::open(settings)
        .unwrap()
        .get(&key("a"))
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooSlow, "{error}");
}

#[tokio::test]
async fn a_call_that_is_given_up_closes_its_connection() {
    let mut server = Scripted::start([Reply::hang("HTTP/1.1 200 OK\r\n")]).await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    let sought = key("a");
    tokio::select! {
        _ = store.get(&sought) => panic!("the server never answers"),
        _ = async { while server.heads().is_empty() { yield_now().await } } => {}
    }
    server.client_left().await;
}

#[tokio::test]
async fn calls_beyond_the_limit_wait_within_their_time() {
    let server = Scripted::start([Reply::hang("")]).await;
    let settings = S3Settings {
        requests_max: 2,
        request_timeout: SOON,
        ..s3_settings(&server.url())
    };
    let store = S3Store::open(settings).unwrap();
    let sought = key("a");
    let calls = join_all((0..6).map(|_| store.get(&sought)));
    let connections = async {
        while server.heads().len() < 2 {
            yield_now().await;
        }
        // all six had their turn, and the others many more
        for _ in 0..1000 {
            yield_now().await;
        }
        server.connections()
    };
    let (done, connections) = tokio::join!(calls, connections);
    assert_eq!(connections, 2);
    for done in done {
        assert_eq!(done.unwrap_err().kind, ErrorKind::TooSlow);
    }
}
