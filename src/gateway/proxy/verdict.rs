//! What an engine's answer says about the engine: pure, from status, headers and body.

use actors::backend::Outcome;
use hyper::StatusCode;
use routing::retry::Setback;
use serde::Deserialize;
use serde_json::value::RawValue;
use wire::answer::{Dialect, of_json};
use wire::openai::Usage;
use wire::sse::data_of;

/// What to make of an answer that is no success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// For the breaker.
    pub outcome: Outcome,
    /// Whether another backend might do better.
    pub retry: Option<Setback>,
}

/// Judges a status that is not 2xx. `says_more`: the body is a JSON object, so the engine itself
/// speaks and not something in front of it.
pub fn of_status(status: StatusCode, has_retry_after: bool, says_more: bool) -> Verdict {
    let verdict = |outcome, retry| Verdict { outcome, retry };
    match status.as_u16() {
        429 => verdict(Outcome::Backpressure, Some(Setback::RateLimited)),
        503 if has_retry_after || says_more => {
            verdict(Outcome::Backpressure, Some(Setback::Unavailable))
        }
        502 | 503 if !says_more => verdict(Outcome::Failure, Some(Setback::BadGateway)),
        400..=499 => verdict(Outcome::ClientError, None),
        _ => verdict(Outcome::Failure, None),
    }
}

/// Judges an error within a 200 by the status that it names itself; without one the engine failed.
pub fn of_code(code: Option<StatusCode>) -> Outcome {
    match code.map(|code| code.as_u16()) {
        Some(429 | 503) => Outcome::Backpressure,
        Some(400..=499) => Outcome::ClientError,
        _ => Outcome::Failure,
    }
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(default)]
    usage: Option<Usage>,
}

/// What a whole JSON body says.
#[derive(Debug, PartialEq, Eq)]
pub enum Body {
    /// An answer, perhaps with token counts.
    Good(Option<Usage>),
    /// An error within a success, with its own idea of a status.
    Error(Option<StatusCode>),
    /// Not what the path answers with.
    NotJson,
}

/// Reads a whole answer. `is_openai`: the path answers with an object, in which `error` means that
/// there is no answer; other paths have their own shapes, and need only be JSON.
pub fn of_body(body: &[u8], is_openai: bool) -> Body {
    if !is_openai {
        let usage = serde_json::from_slice::<Answer<'_>>(body).ok();
        return match serde_json::from_slice::<serde::de::IgnoredAny>(body) {
            Ok(_) => Body::Good(usage.and_then(|answer| answer.usage)),
            Err(_) => Body::NotJson,
        };
    }
    if body.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return Body::NotJson; // a struct would also be read from a list
    }
    match serde_json::from_slice::<Answer<'_>>(body) {
        Ok(Answer {
            error: Some(error), ..
        }) => Body::Error(code(error.get())),
        Ok(answer) => Body::Good(answer.usage),
        // a usage of an unknown shape is no reason to refuse the answer
        Err(_) if is_object(body) => Body::Good(None),
        Err(_) => Body::NotJson,
    }
}

/// Whether an engine gave a choice of its answer up: it says so in a finish reason, and 200 all the same.
pub fn gave_up(body: &[u8]) -> bool {
    let find = |needle: &[u8]| memchr::memmem::find(body, needle).is_some();
    if !find(b"\"abort\"") && !find(b"\"error\"") {
        return false;
    }
    let said = of_json(body, Dialect::Chat);
    let mut reasons = said.reasons.iter().flatten();
    reasons.any(|reason| matches!(reason.as_str(), "abort" | "error"))
}

/// Whether a text is one JSON object.
pub fn is_object(body: &[u8]) -> bool {
    let opens = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    opens && serde_json::from_slice::<serde::de::IgnoredAny>(body).is_ok()
}

/// What an event of a stream says, beyond text.
#[derive(Debug, PartialEq, Eq)]
pub enum Said {
    /// `[DONE]`.
    Done,
    /// A finish reason, perhaps with token counts.
    Finished(Option<Usage>),
    /// A finish reason that says that the engine gave up.
    GaveUp,
    /// Token counts.
    Counted(Usage),
    /// An error of the engine's, with its own idea of a status.
    Error(Option<StatusCode>),
    /// Nothing of note.
    Nothing,
}

/// Reads an event. Most are text deltas: they are told by their bytes, without parsing.
pub fn of_event(event: &[u8]) -> Said {
    let find = |needle: &[u8]| memchr::memmem::find(event, needle).is_some();
    let noted =
        find(b"\"usage\"") || find(b"\"finish_reason\"") || find(b"error") || find(b"[DONE]");
    if !noted {
        return Said::Nothing;
    }
    let Some(data) = data_of(event) else {
        return Said::Nothing;
    };
    if data.trim_ascii() == b"[DONE]" {
        return Said::Done;
    }
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow, default)]
        finish_reason: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Event<'a> {
        #[serde(borrow, default)]
        error: Option<&'a RawValue>,
        #[serde(borrow, default)]
        object: Option<&'a RawValue>,
        #[serde(borrow, default)]
        choices: Option<Vec<Choice<'a>>>,
        #[serde(default)]
        usage: Option<Usage>,
        #[serde(borrow, default)]
        code: Option<&'a RawValue>,
    }
    let Ok(event) = serde_json::from_slice::<Event<'_>>(&data) else {
        return Said::Nothing;
    };
    if let Some(error) = event.error {
        return Said::Error(code(error.get()));
    }
    if event
        .object
        .is_some_and(|object| object.get() == "\"error\"")
    {
        return Said::Error(event.code.and_then(|raw| status(raw.get())));
    }
    let choices = event.choices.unwrap_or_default();
    let gave_up = |choice: &Choice<'_>| {
        let reason = choice.finish_reason.map(RawValue::get);
        matches!(reason, Some("\"abort\"" | "\"error\""))
    };
    if choices.iter().any(gave_up) {
        return Said::GaveUp;
    }
    if choices.iter().any(|choice| choice.finish_reason.is_some()) {
        return Said::Finished(event.usage);
    }
    event.usage.map_or(Said::Nothing, Said::Counted)
}

fn code(error: &str) -> Option<StatusCode> {
    #[derive(Deserialize)]
    struct Error<'a> {
        #[serde(borrow, default)]
        code: Option<&'a RawValue>,
    }
    let error = serde_json::from_str::<Error<'_>>(error).ok()?;
    status(error.code?.get())
}

fn status(raw: &str) -> Option<StatusCode> {
    let number: u16 = raw.trim_matches('"').parse().ok()?;
    StatusCode::from_u16(number)
        .ok()
        .filter(|status| status.is_client_error() || status.is_server_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(status: u16, retry_after: bool, json: bool) -> (Outcome, Option<Setback>) {
        let verdict = of_status(StatusCode::from_u16(status).unwrap(), retry_after, json);
        (verdict.outcome, verdict.retry)
    }

    #[test]
    fn client_errors_are_not_the_backends_fault_and_are_not_repeated() {
        for status in [400, 401, 404, 413, 422] {
            assert_eq!(judged(status, false, true), (Outcome::ClientError, None));
        }
    }

    #[test]
    fn backpressure_is_told_from_death() {
        use Setback::*;
        assert_eq!(
            judged(429, false, false),
            (Outcome::Backpressure, Some(RateLimited))
        );
        assert_eq!(
            judged(503, true, false),
            (Outcome::Backpressure, Some(Unavailable))
        );
        assert_eq!(
            judged(503, false, true),
            (Outcome::Backpressure, Some(Unavailable))
        );
        assert_eq!(
            judged(503, false, false),
            (Outcome::Failure, Some(BadGateway))
        );
        assert_eq!(
            judged(502, true, false),
            (Outcome::Failure, Some(BadGateway))
        );
        assert_eq!(judged(502, false, true), (Outcome::Failure, None));
        assert_eq!(
            judged(500, false, true),
            (Outcome::Failure, None),
            "the work may have been done"
        );
    }

    #[test]
    fn an_answer_is_a_json_object_without_an_error() {
        let of_body = |body| of_body(body, true);
        assert_eq!(of_body(b"{\"choices\":[]}"), Body::Good(None));
        assert_eq!(of_body(b"{\"usage\":7}"), Body::Good(None));
        assert_eq!(
            of_body(b"{\"error\":{\"code\":502}}"),
            Body::Error(Some(StatusCode::BAD_GATEWAY))
        );
        assert_eq!(of_body(b"{\"error\":\"no\"}"), Body::Error(None));
        for body in [&b"<html>"[..], b"{", b"", b"[]", b"null"] {
            assert_eq!(of_body(body), Body::NotJson);
        }
        let Body::Good(Some(usage)) =
            of_body(br#"{"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}"#)
        else {
            panic!()
        };
        assert_eq!(
            (usage.prompt_tokens, usage.prompt_tokens_details),
            (3, None)
        );
    }

    #[test]
    fn other_paths_need_only_answer_with_json() {
        for body in [
            &b"[{\"score\":0.5}]"[..],
            b"{\"error\":null}",
            b"{\"error\":{}}",
        ] {
            assert_eq!(of_body(body, false), Body::Good(None));
        }
        assert_eq!(of_body(b"<html>", false), Body::NotJson);
    }

    #[test]
    fn an_error_within_a_success_is_judged_by_its_own_code() {
        let outcome = |code: u16| of_code(StatusCode::from_u16(code).ok());
        assert_eq!(outcome(400), Outcome::ClientError);
        assert_eq!(outcome(429), Outcome::Backpressure);
        assert_eq!(outcome(500), Outcome::Failure);
        assert_eq!(of_code(None), Outcome::Failure);
    }

    #[test]
    fn events_are_read_for_ends_errors_and_counts_only() {
        let said = |json: &str| of_event(format!("data: {json}\n\n").as_bytes());
        assert_eq!(said("[DONE]"), Said::Done);
        assert_eq!(
            said(
                r#"{"choices":[{"delta":{"content":"an error occurred, \"usage\""},"finish_reason":null}]}"#
            ),
            Said::Nothing
        );
        assert_eq!(
            said(r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#),
            Said::Finished(None)
        );
        assert_eq!(
            said(r#"{"choices":[{"delta":{},"finish_reason":"abort"}]}"#),
            Said::GaveUp
        );
        assert!(gave_up(br#"{"choices":[{"finish_reason":"error"}]}"#));
        assert!(!gave_up(br#"{"choices":[{"message":{"content":"\"abort\""},"finish_reason":"stop"}],"x":"error"}"#));
        assert!(matches!(
            said(r#"{"choices":[],"usage":{"prompt_tokens":1,"total_tokens":1}}"#),
            Said::Counted(_)
        ));
        assert_eq!(
            said(r#"{"error":{"message":"x","code":400}}"#),
            Said::Error(Some(StatusCode::BAD_REQUEST))
        );
        assert_eq!(
            said(r#"{"object":"error","message":"x","code":500}"#),
            Said::Error(Some(StatusCode::INTERNAL_SERVER_ERROR))
        );
        assert_eq!(said("{not json, \"usage\""), Said::Nothing);
        assert_eq!(of_event(b": ping error\n\n"), Said::Nothing);
    }
}
