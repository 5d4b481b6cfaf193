//! Server-sent events: writing them, and finding where one ends in a stream of arbitrary chunks.

use bytes::{BufMut, Bytes, BytesMut};

/// The event that ends an OpenAI stream.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// Frames one JSON text (without line ends) as an event: `data: {json}\n\n`.
pub fn data_event(json: &[u8]) -> Bytes {
    let mut event = BytesMut::with_capacity(json.len() + 8);
    event.put_slice(b"data: ");
    event.put_slice(json);
    event.put_slice(b"\n\n");
    event.freeze()
}
