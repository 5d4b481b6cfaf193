//! The transfer parameters of a prefill answer: opaque, and passed on digit by digit.

use serde::Deserialize;
use serde_json::value::RawValue;

/// Parameters that are there and cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParamsFault {
    /// The answer is no JSON object.
    NotAnAnswer,
    /// `kv_transfer_params` is no object.
    NotAnObject,
}

/// The top-level `kv_transfer_params` of an answer, as they stand there; none when missing or null.
///
/// # Errors
/// When what is there cannot be what an engine hands over.
pub fn transfer_params(answer: &[u8]) -> Result<Option<&str>, ParamsFault> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow, default)]
        kv_transfer_params: Option<&'a RawValue>,
    }
    if answer.iter().find(|byte| !byte.is_ascii_whitespace()) != Some(&b'{') {
        return Err(ParamsFault::NotAnAnswer); // a struct may also be read from a list
    }
    let read = serde_json::from_slice::<Answer<'_>>(answer);
    let params = read
        .map_err(|_| ParamsFault::NotAnAnswer)?
        .kv_transfer_params;
    match params.map(RawValue::get) {
        None => Ok(None),
        Some(params) if params.starts_with('{') => Ok(Some(params)),
        Some(_) => Err(ParamsFault::NotAnObject),
    }
}
