//! Whole answers in their two forms, one JSON object or a stream of events: what is in them, and one
//! form made of the other, so that callers of both can share an answer.

mod fold;
mod said;
mod unfold;

pub use fold::fold;
pub use said::{Said, of_events, of_json};
pub use unfold::unfold;

/// The shape of an answer's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// One JSON object.
    Json,
    /// Server-sent events.
    Events,
}

/// Whose words an answer uses: the paths differ in how they say the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
    /// `/v1/embeddings`: JSON alone.
    Embeddings,
    /// `/v1/responses`.
    Responses,
    /// `/v1/messages`.
    Messages,
}

impl Dialect {
    /// Whether each form can be made of the other.
    pub fn converts(self) -> bool {
        matches!(self, Dialect::Chat | Dialect::Completions)
    }
}

/// Calls `each` with the data of every event in a whole stream; comments and the like have none.
fn each_data(events: &[u8], mut each: impl FnMut(&[u8])) {
    let mut scanner = crate::sse::EventScanner::new(usize::MAX);
    let mut tell = |event: crate::sse::Event<'_>| {
        if let crate::sse::Event::Whole(event) = event
            && let Some(data) = crate::sse::data_of(event)
        {
            each(&data);
        }
    };
    scanner.feed(events, &mut tell);
    if !scanner.boundaries().between_events() {
        scanner.feed(b"\n\n", &mut tell); // a last event whose blank line is missing
    }
}

#[cfg(test)]
mod tests;
