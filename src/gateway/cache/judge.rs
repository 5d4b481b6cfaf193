//! Whether an answer that a backend has given is kept.

use super::Rules;
use super::wish::Wish;
use bytes::Bytes;
use hyper::HeaderMap;
use routing::cache_policy::{Answer, Skip, of_answer};
use std::time::{SystemTime, UNIX_EPOCH};
use wire::answer::{Form, fold, of_events, of_json};
use wire::cache_entry::Entry;

/// The entry to keep.
///
/// # Errors
/// Why the answer is not kept.
pub fn entry(
    rules: &Rules,
    wish: &Wish,
    (status, headers): (u16, &HeaderMap),
    (form, body): (Form, Bytes),
) -> Result<Entry, Skip> {
    let limit = match form {
        Form::Json => rules.response_max,
        Form::Events => rules.stream_max,
    };
    if body.len() > limit {
        return Err(Skip::TooLarge); // not worth reading
    }
    let said = match form {
        Form::Json => of_json(&body, wish.dialect),
        Form::Events => of_events(&body, wish.dialect),
    };
    // who asks for the other form must get it; where there is none, the key is of one form
    let can_be_given = match wish.dialect.converts() {
        true => form == Form::Json || fold(&body, wish.dialect).is_some(),
        false => form == wish.form,
    };
    if !said.readable || !can_be_given {
        return Err(Skip::Unreadable);
    }
    let reasons: Vec<Option<&str>> = said.reasons.iter().map(Option::as_deref).collect();
    let answer = Answer {
        status,
        whole: said.whole,
        error: said.error,
        finish_reasons: &reasons,
        bytes: (body.len() as u64, limit as u64),
        keep_truncated: rules.keep_truncated,
    };
    of_answer(&answer, wish.choices)?;
    let content_type = headers
        .get("content-type")
        .and_then(|value| value.to_str().ok());
    let usage = said.usage;
    Ok(Entry {
        form,
        made_ms: unix_ms(),
        tokens: usage.map(|usage| (usage.prompt_tokens, usage.completion_tokens.unwrap_or(0))),
        content_type: content_type.unwrap_or_default().into(),
        // on its own: the buffer that it was read into is several times as large
        body: Bytes::copy_from_slice(&body),
    })
}

/// Now, in Unix milliseconds.
pub fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(now.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}
