//! Reads a backend's answer with limits on its silence, never on its length in time.

use crate::http::error::ErrorKind;
use crate::upstream::Reply;
use bytes::{Bytes, BytesMut};
use std::time::Duration;
use tokio::time::Instant;

/// How long a backend may be silent: before its answer begins, and within it. A long answer that
/// flows is never cut.
pub struct Patience {
    /// When the first byte must have come, and the limit that this follows from.
    pub first_byte: (Instant, Duration),
    /// Between two chunks.
    pub idle: Duration,
    /// What silence before the first byte says.
    pub silence: Silence,
}

/// What it says of a backend that its first byte does not come in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// That it fails.
    Fails,
    /// That it waits for somebody else, as for the KV of a prompt: no failure, but others may do better.
    Stalls,
    /// Nothing: we did not wait as long as it may take.
    Ours,
}

/// Why an answer could not be read on.
pub enum Interrupted {
    /// The connection broke.
    Broken(hyper::Error),
    /// Nothing came in time.
    Silent(ErrorKind, Duration),
}

/// What was read of an answer.
pub struct Collected {
    /// Its bytes so far.
    pub bytes: Bytes,
    /// Whether that is all.
    pub end: End,
}

/// Why reading stopped.
pub enum End {
    /// The answer is whole.
    Whole,
    /// There is more than the limit.
    More,
    /// It broke off.
    Interrupted(Interrupted),
}

impl Patience {
    /// For an answer whose head has come: the rest must not be waited for as long as a head.
    pub fn after_head(&self) -> Self {
        let soon = Instant::now() + self.idle;
        let first_byte = if soon < self.first_byte.0 {
            (soon, self.idle)
        } else {
            self.first_byte
        };
        Patience {
            first_byte,
            idle: self.idle,
            silence: self.silence,
        }
    }

    /// A chunk of what counts as the beginning; none at the end.
    pub async fn first(&self, reply: &mut Reply) -> Result<Option<Bytes>, Interrupted> {
        let (deadline, limit) = self.first_byte;
        let silent = Interrupted::Silent(ErrorKind::FirstByteTimeout, limit);
        chunk_by(deadline, reply).await.ok_or(silent)?
    }

    async fn next(&self, reply: &mut Reply) -> Result<Option<Bytes>, Interrupted> {
        let deadline = Instant::now() + self.idle;
        let silent = Interrupted::Silent(ErrorKind::IdleTimeout, self.idle);
        chunk_by(deadline, reply).await.ok_or(silent)?
    }

    /// Reads up to about `limit` bytes. Most answers are one chunk, which is not copied.
    pub async fn collect(&self, reply: &mut Reply, limit: usize) -> Collected {
        let mut bytes = Bytes::new();
        let mut more: Option<BytesMut> = None;
        let mut chunk = self.first(reply).await;
        let end = loop {
            match chunk {
                Ok(None) => break End::Whole,
                Err(interrupted) => break End::Interrupted(interrupted),
                Ok(Some(next)) if bytes.is_empty() && more.is_none() => bytes = next,
                Ok(Some(next)) => more
                    .get_or_insert_with(|| BytesMut::from(&bytes[..]))
                    .extend_from_slice(&next),
            }
            if more.as_ref().map_or(bytes.len(), BytesMut::len) >= limit {
                break End::More;
            }
            chunk = self.next(reply).await;
        };
        Collected {
            bytes: more.map_or(bytes, BytesMut::freeze),
            end,
        }
    }
}

async fn chunk_by(
    deadline: Instant,
    reply: &mut Reply,
) -> Option<Result<Option<Bytes>, Interrupted>> {
    let chunk = tokio::time::timeout_at(deadline, reply.body.chunk()).await;
    Some(chunk.ok()?.transpose().map_err(Interrupted::Broken))
}
