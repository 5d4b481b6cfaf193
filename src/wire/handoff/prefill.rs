//! What every prefill leg has in common: the same prompt, one token, no stream.

use crate::splice::{append_member, remove_member};
use bytes::Bytes;

/// Members that only mean something to who generates.
const NOT_FOR_PREFILL: [&str; 3] = ["stream_options", "min_tokens", "min_completion_tokens"];

/// The body with its output bounded to one token under whichever name the client used, and not
/// streamed. Every other member stays as it is.
pub(super) fn prefill_body(body: &[u8]) -> Bytes {
    let mut out = Bytes::copy_from_slice(body);
    for name in NOT_FOR_PREFILL {
        out = remove_member(&out, name);
    }
    let has_other_name = remove_member(&out, "max_completion_tokens").len() != out.len();
    if has_other_name {
        out = with_member(&out, "max_completion_tokens", "1");
    }
    out = with_member(&out, "max_tokens", "1");
    with_member(&out, "stream", "false")
}

/// The body with this member, in place of any of that name.
pub(super) fn with_member(body: &[u8], name: &str, value: &str) -> Bytes {
    append_member(&remove_member(body, name), name, value)
}
