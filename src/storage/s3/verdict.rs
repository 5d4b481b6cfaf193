//! What an answer of an object store means, judged by its status first: servers differ in codes, and some say 200 and mean an
//! error. Pure: same answer, same verdict.

use super::transport::Failure;
use crate::error::{Act, ErrorKind, StoreError};
use bytes::Bytes;
use chrono::DateTime;
use http::{HeaderMap, Response, header};
use std::time::{Duration, SystemTime};
use xml::reader::{EventReader, ParserConfig};

/// The status that an error within a 200 counts as.
const ERROR_IN_SUCCESS: u16 = 503;
/// How far into a document its error code is looked for.
const CODE_WITHIN_BYTES: usize = 4096;
/// The longest error code that is repeated in a log.
const CODE_BYTES_MAX: usize = 64;

/// Codes of a 403 that say who asks is unknown, whatever is asked for.
const CREDENTIAL_CODES: [&str; 7] = [
    "AccountProblem",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidSecurity",
    "InvalidToken",
    "NotSignedUp",
    "SignatureDoesNotMatch",
];

/// Why a request has not done what it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Setback {
    /// The store said so.
    Answered(Refusal),
    /// There was no whole answer.
    Failed(Failure),
}

/// An answer that is no success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    status: u16,
    /// S3's code, or nothing if there was none to be found.
    code: String,
    /// The store's clock.
    date: Option<SystemTime>,
}

/// The refusal in an answer, if it is one.
pub(super) fn refusal(answer: &Response<Bytes>) -> Option<Refusal> {
    let status = match answer.status() {
        status if !status.is_success() => status.as_u16(),
        _ if is_error_document(answer.body()) => ERROR_IN_SUCCESS,
        _ => return None,
    };
    let (code, date) = (error_code(answer.body()), date(answer.headers()));
    Some(Refusal { status, code, date })
}

/// Whether a document is XML from its beginning to its end. In one that is not, rusoto's reader never stops: it skips what it
/// cannot read until an element ends, and there may be none. Reads with the reader and the settings that rusoto has.
pub(super) fn is_well_formed(document: &[u8]) -> bool {
    let config = ParserConfig::new().trim_whitespace(false);
    let mut events = EventReader::new_with_config(document, config).into_iter();
    events.all(|event| event.is_ok())
}

/// Whether a document's root is `<Error>`.
fn is_error_document(body: &[u8]) -> bool {
    let body = body
        .strip_prefix(b"\xef\xbb\xbf")
        .unwrap_or(body)
        .trim_ascii_start();
    let root = match body.strip_prefix(b"<?xml") {
        Some(declared) => declared
            .splitn(2, |byte| *byte == b'>')
            .nth(1)
            .unwrap_or_default(),
        None => body,
    };
    let root = root.trim_ascii_start();
    root.starts_with(b"<Error>") || root.starts_with(b"<Error ")
}

/// What stands in `<Code>`, if it looks like a code: anything else is not repeated.
fn error_code(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(CODE_WITHIN_BYTES)]);
    let inner = text
        .split_once("<Code>")
        .and_then(|(_, rest)| rest.split_once("</Code>"));
    let code = inner.map_or("", |(code, _)| code.trim());
    let plain =
        code.len() <= CODE_BYTES_MAX && code.chars().all(|c| c.is_ascii_alphanumeric() || c == '.');
    if plain {
        code.to_owned()
    } else {
        String::new()
    }
}

fn date(headers: &HeaderMap) -> Option<SystemTime> {
    let text = headers.get(header::DATE)?.to_str().ok()?;
    DateTime::parse_from_rfc2822(text)
        .ok()
        .map(SystemTime::from)
}

impl Setback {
    /// Whether it says no more than that there is no such value.
    pub(super) fn is_absence(&self, act: Act) -> bool {
        let Setback::Answered(refusal) = self else {
            return false;
        };
        let absent = refusal.status == 404 && refusal.code != "NoSuchBucket";
        absent && matches!(act, Act::Get | Act::Delete)
    }

    /// The error that a caller gets.
    pub(super) fn error(&self, act: Act, connect_timeout: Duration, now: SystemTime) -> StoreError {
        match self {
            Setback::Answered(refusal) => refusal.error(act, now),
            Setback::Failed(failure) => failed(act, failure, connect_timeout),
        }
    }
}

impl Refusal {
    fn error(&self, act: Act, now: SystemTime) -> StoreError {
        let mut detail = match self.code.as_str() {
            "" => format!("status {}", self.status),
            code => format!("status {}, {code}", self.status),
        };
        let kind = self.kind(act);
        if kind == ErrorKind::ClockSkew {
            detail += &self.clocks(now);
        }
        StoreError::new(act, kind, detail)
    }

    fn kind(&self, act: Act) -> ErrorKind {
        let code = self.code.as_str();
        match (self.status, code) {
            (_, "RequestTimeTooSkewed") => ErrorKind::ClockSkew,
            (401, _) => ErrorKind::Refused,
            (403, code) if CREDENTIAL_CODES.contains(&code) => ErrorKind::Refused,
            (403, _) if act == Act::Get => ErrorKind::RefusedOrAbsent,
            (403, _) => ErrorKind::Refused,
            (400, "RequestTimeout") | (408 | 409 | 425 | 429, _) => ErrorKind::Unavailable,
            (501, _) => ErrorKind::Misconfigured,
            (500.., _) => ErrorKind::Unavailable,
            // another region, no such bucket, a request that this store does not take
            _ => ErrorKind::Misconfigured,
        }
    }

    fn clocks(&self, now: SystemTime) -> String {
        let shown = |time: SystemTime| DateTime::<chrono::Utc>::from(time).to_rfc3339();
        match self.date {
            Some(date) => format!(
                "; the store's clock says {}, ours {}",
                shown(date),
                shown(now)
            ),
            None => format!("; our clock says {}", shown(now)),
        }
    }
}

fn failed(act: Act, failure: &Failure, connect_timeout: Duration) -> StoreError {
    let (kind, detail) = match failure {
        Failure::ConnectTimeout => (
            ErrorKind::TooSlow,
            format!("no connection within {connect_timeout:?}"),
        ),
        Failure::Connection(what) | Failure::Closed(what) => (ErrorKind::Unavailable, what.clone()),
        Failure::Certificate(what) => (
            ErrorKind::Misconfigured,
            format!("certificate not trusted: {what}"),
        ),
        Failure::Broken(what) => (ErrorKind::Broken, what.clone()),
        Failure::CutShort(what) => (ErrorKind::CutShort, what.clone()),
        Failure::TooLarge(max) => (
            ErrorKind::TooLarge,
            format!("an answer of more than {max} bytes"),
        ),
    };
    StoreError::new(act, kind, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Response<Bytes> {
        let body = Bytes::copy_from_slice(body.as_bytes());
        let builder = Response::builder()
            .status(status)
            .header("date", "Mon, 30 Nov 2026 12:00:00 GMT");
        builder.body(body).unwrap()
    }

    fn document(code: &str) -> String {
        format!(
            "<?xml version=\"1.0\"?>\n<Error><Code>{code}</Code><Message>SECRET</Message></Error>"
        )
    }

    fn error(act: Act, status: u16, code: &str) -> StoreError {
        let refusal = refusal(&answer(status, &document(code))).unwrap();
        let now = DateTime::parse_from_rfc3339("2026-11-30T11:40:00Z")
            .unwrap()
            .into();
        Setback::Answered(refusal).error(act, Duration::from_secs(1), now)
    }

    #[test]
    fn a_404_is_absence_whatever_its_code_unless_the_bucket_is_missing() {
        for body in ["", "gone", &document("NoSuchKey"), &document("Unknown")] {
            let setback = Setback::Answered(refusal(&answer(404, body)).unwrap());
            assert!(
                setback.is_absence(Act::Get) && setback.is_absence(Act::Delete),
                "{body}"
            );
            assert!(
                !setback.is_absence(Act::Put) && !setback.is_absence(Act::List),
                "{body}"
            );
        }
        let setback = Setback::Answered(refusal(&answer(404, &document("NoSuchBucket"))).unwrap());
        assert!(!setback.is_absence(Act::Get));
        assert_eq!(
            error(Act::Get, 404, "NoSuchBucket").kind,
            ErrorKind::Misconfigured
        );
    }

    #[test]
    fn a_403_on_a_read_may_mean_absent_unless_it_names_the_credentials() {
        assert_eq!(
            error(Act::Get, 403, "AccessDenied").kind,
            ErrorKind::RefusedOrAbsent
        );
        assert_eq!(
            error(Act::Get, 403, "Unknown").kind,
            ErrorKind::RefusedOrAbsent
        );
        assert_eq!(
            error(Act::Put, 403, "AccessDenied").kind,
            ErrorKind::Refused
        );
        for code in CREDENTIAL_CODES {
            assert_eq!(
                error(Act::Get, 403, code).kind,
                ErrorKind::Refused,
                "{code}"
            );
        }
    }

    #[test]
    fn a_skewed_clock_is_named_with_both_times() {
        let error = error(Act::Get, 403, "RequestTimeTooSkewed");
        assert_eq!(error.kind, ErrorKind::ClockSkew);
        assert!(error.detail.contains("2026-11-30T12:00:00"), "{error}");
        assert!(error.detail.contains("2026-11-30T11:40:00"), "{error}");
    }

    #[test]
    fn what_passes_by_itself_is_told_from_what_somebody_must_change() {
        for (status, code) in [
            (500, "InternalError"),
            (503, "SlowDown"),
            (429, ""),
            (400, "RequestTimeout"),
            (507, ""),
        ] {
            assert_eq!(
                error(Act::Put, status, code).kind,
                ErrorKind::Unavailable,
                "{status}"
            );
        }
        for (status, code) in [
            (301, "PermanentRedirect"),
            (400, "InvalidArgument"),
            (501, "NotImplemented"),
            (405, ""),
        ] {
            assert_eq!(
                error(Act::Put, status, code).kind,
                ErrorKind::Misconfigured,
                "{status}"
            );
        }
    }

    #[test]
    fn an_error_document_within_a_200_is_an_error() {
        for body in [
            document("SlowDown"),
            "<Error><Code>SlowDown</Code></Error>".into(),
        ] {
            let refusal = refusal(&answer(200, &body)).unwrap();
            assert_eq!(
                (refusal.status, refusal.code.as_str()),
                (ERROR_IN_SUCCESS, "SlowDown")
            );
        }
    }

    #[test]
    fn other_documents_are_no_errors() {
        for body in [
            "",
            "{}",
            "<?xml",
            "<Errors/>",
            "<ListBucketResult><Error></Error></ListBucketResult>",
        ] {
            assert_eq!(refusal(&answer(200, body)), None, "{body}");
        }
    }

    #[test]
    fn a_document_is_well_formed_only_as_a_whole() {
        let whole = "<?xml version=\"1.0\"?>\n<a b=\"c\">d &amp; <e/></a>";
        assert!(is_well_formed(whole.as_bytes()));
        for length in 0..whole.len() {
            assert!(!is_well_formed(&whole.as_bytes()[..length]), "{length}");
        }
    }

    #[test]
    fn nothing_of_an_answer_is_repeated_but_a_plain_code() {
        assert!(
            !error(Act::Put, 403, "SignatureDoesNotMatch")
                .to_string()
                .contains("SECRET")
        );
        assert_eq!(error_code(document("a b\u{1b}[31m").as_bytes()), "");
        assert_eq!(
            error_code(document(&"x".repeat(CODE_BYTES_MAX + 1)).as_bytes()),
            ""
        );
    }
}
