//! One answer for callers of both forms: each gets the one it asked for, with what it asked for.

use bytes::Bytes;
use std::borrow::Cow;
use wire::answer::{Dialect, Form, fold, unfold};
use wire::splice::AnswerEdit;
use wire::sse::EventEditor;

/// An answer in the form that is wanted. None when it cannot be brought there.
pub fn formed(body: &Bytes, (is, wanted): (Form, Form), dialect: Dialect) -> Option<Bytes> {
    match (is, wanted) {
        (Form::Json, Form::Events) => unfold(body, dialect).map(Bytes::from),
        (Form::Events, Form::Json) => fold(body, dialect).map(Bytes::from),
        _ => Some(body.clone()),
    }
}

/// A whole answer with one caller's changes: its name for the model, usage only if it asked for it.
pub fn edited(body: Bytes, form: Form, edit: &AnswerEdit) -> Bytes {
    if edit.is_none() {
        return body;
    }
    match form {
        Form::Json => edit.json(&body),
        Form::Events => {
            let mut editor = EventEditor::new(usize::MAX);
            let edited = editor.feed(&body, |event| edit.event(event));
            let rest = editor.finish();
            if rest.is_empty() {
                edited
            } else {
                [&edited[..], &rest[..]].concat().into()
            }
        }
    }
}

/// What a form is called, when the engine did not say it.
pub fn content_type<'a>(said: &'a str, (is, wanted): (Form, Form)) -> Cow<'a, str> {
    match (is == wanted && !said.is_empty(), wanted) {
        (true, _) => said.into(),
        (false, Form::Json) => "application/json".into(),
        (false, Form::Events) => "text/event-stream; charset=utf-8".into(),
    }
}
