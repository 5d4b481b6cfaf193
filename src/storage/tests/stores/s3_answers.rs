//! The object store and answers that are not what they should be.

use crate::scripted::{Reply, Scripted, error_document};
use crate::support::{SOON, errors_of_all_calls, key, s3_settings, value};
use std::time::Duration;
use storage::{ErrorKind, Page, S3Settings, S3Store, Store};

async fn scripted(script: impl IntoIterator<Item = Reply>) -> (Scripted, S3Store) {
    let server = Scripted::start(script).await;
    let store = S3Store::open(s3_settings(&server.url())).unwrap();
    (server, store)
}

async fn kinds(reply: Reply) -> Vec<(&'static str, ErrorKind)> {
    let (_server, store) = scripted([reply]).await;
    let errors = errors_of_all_calls(&store).await;
    errors
        .into_iter()
        .map(|(call, error)| (call, error.kind))
        .collect()
}

#[tokio::test]
async fn servers_that_fail_are_unavailable_whatever_they_were_asked() {
    for (status, code) in [
        (500, "InternalError"),
        (503, "SlowDown"),
        (502, ""),
        (429, "TooManyRequests"),
    ] {
        for (call, kind) in kinds(Reply::error(status, code)).await {
            assert_eq!(kind, ErrorKind::Unavailable, "{call}, {status} {code}");
        }
    }
}

#[tokio::test]
async fn an_error_within_a_200_is_an_error_for_every_call() {
    for (call, kind) in kinds(Reply::error(200, "SlowDown")).await {
        assert_eq!(kind, ErrorKind::Unavailable, "{call}");
    }
}

#[tokio::test]
async fn a_404_for_a_value_is_absence_whatever_its_body() {
    for body in [
        "",
        "<html>gone</html>",
        &error_document("Unknown"),
        &error_document("NoSuchKey"),
    ] {
        let (_server, store) = scripted([Reply::answer(404, "", body)]).await;
        assert_eq!(store.get(&key("a")).await.unwrap(), None, "{body}");
        store.delete(&key("a")).await.unwrap();
        assert_eq!(
            store.put(&key("a"), value("x")).await.unwrap_err().kind,
            ErrorKind::Misconfigured,
            "{body}"
        );
    }
}

#[tokio::test]
async fn a_403_for_a_value_may_mean_absent_but_a_403_for_a_write_is_a_refusal() {
    for (call, kind) in kinds(Reply::error(403, "AccessDenied")).await {
        let expected = if call == "get" {
            ErrorKind::RefusedOrAbsent
        } else {
            ErrorKind::Refused
        };
        assert_eq!(kind, expected, "{call}");
    }
    for (call, kind) in kinds(Reply::error(403, "SignatureDoesNotMatch")).await {
        assert_eq!(kind, ErrorKind::Refused, "{call}");
    }
}

#[tokio::test]
async fn a_skewed_clock_is_told_with_the_time_of_the_store() {
    let body = error_document("RequestTimeTooSkewed");
    let skewed = Reply::answer(403, "date: Tue, 01 Jan 2030 10:20:30 GMT\r\n", &body);
    let (_server, store) = scripted([skewed]).await;
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::ClockSkew, "{call}");
        assert!(error.detail.contains("2030-01-01T10:20:30"), "{error}");
    }
}

#[tokio::test]
async fn a_body_that_ends_early_is_told_as_cut_short_and_is_never_a_value() {
    let cut = |framing: &str, body: &str| {
        Reply::cut(format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\n{body}"))
    };
    let replies = [
        cut("content-length: 10000", &"x".repeat(6000)),
        cut("transfer-encoding: chunked", "5\r\nhello\r\n"),
        cut("transfer-encoding: chunked", "ff\r\nhello"),
    ];
    let reset = Reply::reset("HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\nhalf of it");
    for reply in replies.into_iter().chain([reset]) {
        let (_server, store) = scripted([reply.clone()]).await;
        let error = store.get(&key("a")).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::CutShort, "{error}");
    }
}

#[tokio::test]
async fn a_body_that_stops_without_an_end_is_too_slow() {
    let head = "HTTP/1.1 200 OK\r\ncontent-length: 10000\r\n\r\nhalf of it";
    let server = Scripted::start([Reply::hang(head)]).await;
    let store = S3Store::open(S3Settings {
        request_timeout: SOON,
        ..s3_settings(&server.url())
    })
    .unwrap();
    assert_eq!(
        store.get(&key("a")).await.unwrap_err().kind,
        ErrorKind::TooSlow
    );
}

#[tokio::test]
async fn a_body_that_is_not_what_was_stored_is_broken() {
    for body in [
        "",
        "not what was stored",
        "TGS1",
        "{\"error\": \"sign in first\"}",
    ] {
        let (_server, store) = scripted([Reply::answer(200, "", body)]).await;
        let error = store.get(&key("a")).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Broken, "{body}: {error}");
    }
}

#[tokio::test]
async fn an_answer_beyond_the_limit_is_not_read_to_its_end() {
    let announced = "HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n";
    let mut endless = Vec::from("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
    for _ in 0..5 {
        endless.extend_from_slice(b"100000\r\n");
        endless.resize(endless.len() + (1 << 20), b'x');
        endless.extend_from_slice(b"\r\n");
    }
    for reply in [Reply::hang(announced), Reply::hang(endless)] {
        let server = Scripted::start([reply]).await;
        let settings = S3Settings {
            value_bytes_max: 1000,
            ..s3_settings(&server.url())
        };
        let store = S3Store::open(settings).unwrap();
        assert_eq!(
            store.get(&key("a")).await.unwrap_err().kind,
            ErrorKind::TooLarge
        );
    }
}

#[tokio::test]
async fn what_is_not_http_is_broken() {
    let (_server, store) = scripted([Reply::cut("+PONG\r\n+PONG\r\n\r\n")]).await;
    for (call, error) in errors_of_all_calls(&store).await {
        assert_eq!(error.kind, ErrorKind::Broken, "{call}: {error}");
    }
}

#[tokio::test]
async fn a_listing_that_makes_no_sense_is_broken() {
    let listing = |inner: &str| {
        format!("<?xml version=\"1.0\"?><ListBucketResult>{inner}</ListBucketResult>")
    };
    let bodies = [
        "no document at all".to_owned(),
        "<html><body>sign in here</body></html>".to_owned(),
        listing("<Contents><Key>response-cache/a</Key><Size>many</Size></Contents>"),
        listing("<MaxKeys>-</MaxKeys>"),
        listing("<IsTruncated>true</IsTruncated>"),
        listing("<Contents>"),
    ];
    for body in bodies {
        let (_server, store) = scripted([Reply::answer(200, "", &body)]).await;
        let error = store.list("", Page::first()).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Broken, "{body}: {error}");
    }
}

#[tokio::test]
async fn a_listing_that_is_cut_anywhere_is_broken() {
    let whole = "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult xmlns=\"http://s3.example/\">\
        <Name>tidegate</Name><IsTruncated>true</IsTruncated><Contents><Key>response-cache/a &amp; b</Key>\
        <Size>90</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>\
        <NextContinuationToken>t</NextContinuationToken></ListBucketResult>";
    let cut = (0..whole.len()).map(|length| Reply::answer(200, "", &whole[..length]));
    let (_server, store) = scripted(cut.chain([Reply::answer(200, "", whole)])).await;
    for length in 0..whole.len() {
        let error = store.list("", Page::first()).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Broken, "{length} bytes: {error}");
    }
    let listing = store.list("", Page::first()).await.unwrap();
    assert_eq!(listing.values[0].key, key("a & b"));
    assert!(listing.next.is_some());
}

#[tokio::test]
async fn objects_that_a_page_deletion_could_not_remove_are_counted() {
    let name = |i| {
        format!(
            "<Contents><Key>response-cache/{i}</Key><Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
        )
    };
    let contents: String = (0..3).map(name).collect();
    let listing =
        format!("<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>");
    let done = "<DeleteResult><Deleted><Key>response-cache/0</Key></Deleted>\
        <Error><Key>response-cache/1</Key><Code>AccessDenied</Code></Error>\
        <Deleted><Key>response-cache/2</Key></Deleted></DeleteResult>";
    let (server, store) = scripted([
        Reply::answer(200, "", &listing),
        Reply::answer(200, "", done),
    ])
    .await;
    let deleted = store.delete_prefix("", Page::first()).await.unwrap();
    assert_eq!((deleted.removed, deleted.kept), (2, 1));
    assert!(
        server.heads()[1].starts_with("POST /tidegate?delete"),
        "{:?}",
        server.heads()
    );
}

#[tokio::test]
async fn one_call_is_one_request_even_if_it_fails() {
    let (server, store) = scripted([Reply::error(503, "SlowDown")]).await;
    store.get(&key("a")).await.unwrap_err();
    store.put(&key("a"), value("x")).await.unwrap_err();
    assert_eq!(server.heads().len(), 2);
}

#[tokio::test]
async fn a_refusal_in_the_middle_of_a_large_write_ends_the_call() {
    let refusal = Reply::error(403, "AccessDenied").then_close();
    let server = Scripted::start_answering_early(refusal).await;
    let settings = S3Settings {
        request_timeout: Duration::from_secs(5),
        ..s3_settings(&server.url())
    };
    let store = S3Store::open(settings).unwrap();
    let error = store
        .put(&key("a"), value(vec![0; 8 << 20]))
        .await
        .unwrap_err();
    // the refusal, if it was still there to be read when the connection broke
    assert!(
        [ErrorKind::Refused, ErrorKind::Unavailable].contains(&error.kind),
        "{error}"
    );
}
