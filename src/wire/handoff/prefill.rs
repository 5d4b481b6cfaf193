//! What every prefill leg has in common: the same prompt, one token, no stream.

use crate::splice::{Change, change_members};
use bytes::Bytes;

/// The body with its output bounded to one token under whichever name the client used, and not streamed, and without
/// what only means something to who generates; with these transfer parameters, if any. Every other member stays as it
/// is.
pub(super) fn prefill_body(body: &[u8], transfer_params: Option<&str>) -> Bytes {
    let changes = [
        ("stream_options", Change::Remove),
        ("min_tokens", Change::Remove),
        ("min_completion_tokens", Change::Remove),
        ("max_completion_tokens", Change::Replace("1")),
        ("max_tokens", Change::Put("1")),
        ("stream", Change::Put("false")),
        (
            "kv_transfer_params",
            transfer_params.map_or(Change::Remove, Change::Put),
        ),
    ];
    change_members(body, &changes)
}

/// The client's body with these transfer parameters, if any.
pub(super) fn decode_body(body: &Bytes, transfer_params: Option<&str>) -> Bytes {
    match transfer_params {
        Some(params) => change_members(body, &[("kv_transfer_params", Change::Put(params))]),
        None => body.clone(),
    }
}
