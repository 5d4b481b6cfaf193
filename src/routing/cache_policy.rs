//! Which requests may be answered from a cache, and which answers may be kept: by default only what
//! an engine would answer the same again.

/// What kind of answer a path gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Chats and completions.
    Generation,
    /// Embeddings, which are the same each time.
    Embedding,
    /// `/v1/responses`, which may refer to what a server remembers.
    Response,
    /// Everything else: never kept.
    Other,
}

/// What the client says in `Cache-Control`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Control {
    /// `no-cache`: it wants a fresh answer, which may be kept.
    pub no_cache: bool,
    /// `no-store`: nothing is read or kept.
    pub no_store: bool,
}

impl Control {
    /// Reads the header, which may stand more than once; directives that are not known count for nothing.
    pub fn of_all<'a>(values: impl IntoIterator<Item = &'a str>) -> Self {
        let mut control = Control::default();
        let directives = values.into_iter().flat_map(|value| value.split(','));
        for directive in directives.map(str::trim) {
            control.no_cache |= directive.eq_ignore_ascii_case("no-cache");
            control.no_store |= directive.eq_ignore_ascii_case("no-store");
        }
        control
    }
}

/// What a decision needs to know of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Request {
    /// What kind of answer it asks for.
    pub kind: Kind,
    /// As given; absent is not 0, since engines have defaults of their own.
    pub temperature: Option<f64>,
    /// What the client says of caching.
    pub control: Control,
    /// Whether the client asks for caching though the answer may differ the next time.
    pub forced: bool,
    /// Whether the operator lets clients ask so.
    pub may_force: bool,
    /// Whether it names media at URLs, whose content may change.
    pub remote_media: bool,
    /// Whether it has a server remember it, or refers to what one remembers.
    pub remembered: bool,
    /// Whether it asks for a stream whose chunks are of another kind than others'.
    pub shapes_stream: bool,
}

/// What a request may do with the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Read, and keep what is not there.
    ReadAndKeep,
    /// Keep the fresh answer only.
    KeepOnly,
    /// Neither, and why.
    Bypass(Why),
}

/// Why a request passes the cache by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// Its path gives nothing to keep.
    Path,
    /// `Cache-Control: no-store`.
    NoStore,
    /// Its `temperature` is not given as 0.
    NotDeterministic,
    /// It names media at URLs.
    RemoteMedia,
    /// A server is to remember it, or it refers to what one remembers.
    Remembered,
    /// Its stream is to have chunks of another kind than others'.
    StreamOptions,
    /// Its body could be read in two ways.
    Body,
}

impl Why {
    /// All of them, in order.
    pub const ALL: [Why; 7] = [
        Why::Path,
        Why::NoStore,
        Why::NotDeterministic,
        Why::RemoteMedia,
        Why::Remembered,
        Why::StreamOptions,
        Why::Body,
    ];

    /// The word used in metrics and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Why::Path => "path",
            Why::NoStore => "no_store",
            Why::NotDeterministic => "not_deterministic",
            Why::RemoteMedia => "remote_media",
            Why::Remembered => "remembered",
            Why::StreamOptions => "stream_options",
            Why::Body => "body",
        }
    }
}

impl Why {
    /// For an operator who wonders.
    pub fn in_words(self) -> &'static str {
        match self {
            Why::Path => "answers of this path are not cached",
            Why::NoStore => "the request says Cache-Control: no-store",
            Why::NotDeterministic => {
                "temperature is not given as 0 (x-tidegate-cache: force caches all the same, where the settings allow it)"
            }
            Why::RemoteMedia => "it refers to media or files that stand elsewhere and may change",
            Why::Remembered => {
                "a server is to remember the answer, or it refers to what one remembers"
            }
            Why::StreamOptions => "its stream_options change the chunks of the stream",
            Why::Body => {
                "the body could be read in two ways: a key stands twice, or it nests too deeply"
            }
        }
    }
}

/// What a request may do with the cache.
pub fn of_request(request: &Request) -> Use {
    if request.control.no_store {
        return Use::Bypass(Why::NoStore);
    }
    if request.kind == Kind::Other {
        return Use::Bypass(Why::Path);
    }
    if request.remembered {
        return Use::Bypass(Why::Remembered);
    }
    if request.remote_media {
        return Use::Bypass(Why::RemoteMedia);
    }
    if request.shapes_stream {
        return Use::Bypass(Why::StreamOptions);
    }
    let same_again = request.kind == Kind::Embedding || request.temperature == Some(0.0);
    if !(same_again || request.forced && request.may_force) {
        return Use::Bypass(Why::NotDeterministic);
    }
    if request.control.no_cache {
        Use::KeepOnly
    } else {
        Use::ReadAndKeep
    }
}

/// What is known of an answer at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer<'a> {
    /// As the engine gave it.
    pub status: u16,
    /// Whether all of it came: of a stream, up to `[DONE]`; of a body, up to its announced end.
    pub whole: bool,
    /// Whether it is an error, or has one within.
    pub error: bool,
    /// The finish reason of each choice, in any order; none for one that did not finish.
    pub finish_reasons: &'a [Option<&'a str>],
    /// Bytes of it, and how many may be kept.
    pub bytes: (u64, u64),
    /// Whether one that ended at its limit of tokens may be kept.
    pub keep_truncated: bool,
}

/// Why an answer is not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Skip {
    /// No 2xx, or an error within.
    Error,
    /// It broke off, or a choice did not finish.
    Incomplete,
    /// The engine gave it up.
    Aborted,
    /// It is too large.
    TooLarge,
    /// It ended at its limit of tokens, and the operator keeps no such answers.
    Truncated,
    /// It is not what its path answers with.
    Unreadable,
    /// What was kept was removed while it was being made.
    Purged,
}

impl Skip {
    /// All of them, in order.
    pub const ALL: [Skip; 7] = [
        Skip::Error,
        Skip::Incomplete,
        Skip::Aborted,
        Skip::TooLarge,
        Skip::Truncated,
        Skip::Unreadable,
        Skip::Purged,
    ];

    /// The word used in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Skip::Error => "error",
            Skip::Incomplete => "incomplete",
            Skip::Aborted => "aborted",
            Skip::TooLarge => "too_large",
            Skip::Truncated => "truncated",
            Skip::Unreadable => "not_json",
            Skip::Purged => "purged",
        }
    }
}

/// Whether an answer may be kept. `choices` is how many the request asked for; 0 for embeddings.
///
/// # Errors
/// Why it is not.
pub fn of_answer(answer: &Answer<'_>, choices: usize) -> Result<(), Skip> {
    if !(200..300).contains(&answer.status) || answer.error {
        return Err(Skip::Error);
    }
    let unfinished = answer.finish_reasons.iter().any(Option::is_none);
    if !answer.whole || unfinished || answer.finish_reasons.len() < choices {
        return Err(Skip::Incomplete);
    }
    let given_up = |reason: &Option<&str>| matches!(reason, Some("abort" | "error"));
    if answer.finish_reasons.iter().any(given_up) {
        return Err(Skip::Aborted);
    }
    if !answer.keep_truncated && answer.finish_reasons.contains(&Some("length")) {
        return Err(Skip::Truncated);
    }
    if answer.bytes.0 > answer.bytes.1 {
        return Err(Skip::TooLarge);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Request = Request {
        kind: Kind::Generation,
        temperature: Some(0.0),
        control: Control {
            no_cache: false,
            no_store: false,
        },
        forced: false,
        may_force: true,
        remote_media: false,
        remembered: false,
        shapes_stream: false,
    };

    #[test]
    fn only_what_comes_out_the_same_again_is_kept_unless_the_client_insists() {
        assert_eq!(of_request(&PLAIN), Use::ReadAndKeep);
        for temperature in [None, Some(0.9), Some(1e-9)] {
            let request = Request {
                temperature,
                ..PLAIN
            };
            assert_eq!(of_request(&request), Use::Bypass(Why::NotDeterministic));
            let insists = Request {
                forced: true,
                ..request
            };
            assert_eq!(of_request(&insists), Use::ReadAndKeep);
            let forbidden = Request {
                may_force: false,
                ..insists
            };
            assert_eq!(of_request(&forbidden), Use::Bypass(Why::NotDeterministic));
        }
        let embedding = Request {
            kind: Kind::Embedding,
            temperature: None,
            ..PLAIN
        };
        assert_eq!(of_request(&embedding), Use::ReadAndKeep);
        let other = Request {
            kind: Kind::Other,
            ..PLAIN
        };
        assert_eq!(of_request(&other), Use::Bypass(Why::Path));
    }

    #[test]
    fn cache_control_media_and_memory_are_heeded_even_when_forced() {
        let says = |value| Request {
            control: Control::of_all([value]),
            forced: true,
            ..PLAIN
        };
        assert_eq!(of_request(&says("No-Cache")), Use::KeepOnly);
        assert_eq!(
            of_request(&says("max-age=0, no-store, no-cache")),
            Use::Bypass(Why::NoStore)
        );
        assert_eq!(of_request(&says("no-cached")), Use::ReadAndKeep);
        let media = Request {
            remote_media: true,
            forced: true,
            ..PLAIN
        };
        assert_eq!(of_request(&media), Use::Bypass(Why::RemoteMedia));
        let remembered = Request {
            kind: Kind::Response,
            remembered: true,
            forced: true,
            ..PLAIN
        };
        assert_eq!(of_request(&remembered), Use::Bypass(Why::Remembered));
        let shaped = Request {
            shapes_stream: true,
            forced: true,
            ..PLAIN
        };
        assert_eq!(of_request(&shaped), Use::Bypass(Why::StreamOptions));
    }

    #[test]
    fn only_whole_answers_whose_choices_all_finished_are_kept() {
        let good = Answer {
            status: 200,
            whole: true,
            error: false,
            finish_reasons: &[Some("stop"), Some("length")],
            bytes: (10, 10),
            keep_truncated: true,
        };
        assert_eq!(of_answer(&good, 2), Ok(()));
        assert_eq!(
            of_answer(&good, 3),
            Err(Skip::Incomplete),
            "one choice is missing"
        );
        for (answer, why) in [
            (
                Answer {
                    status: 503,
                    ..good
                },
                Skip::Error,
            ),
            (
                Answer {
                    error: true,
                    ..good
                },
                Skip::Error,
            ),
            (
                Answer {
                    whole: false,
                    ..good
                },
                Skip::Incomplete,
            ),
            (
                Answer {
                    finish_reasons: &[Some("stop"), None],
                    ..good
                },
                Skip::Incomplete,
            ),
            (
                Answer {
                    finish_reasons: &[Some("stop"), Some("abort")],
                    ..good
                },
                Skip::Aborted,
            ),
            (
                Answer {
                    finish_reasons: &[Some("error"), Some("stop")],
                    ..good
                },
                Skip::Aborted,
            ),
            (
                Answer {
                    bytes: (11, 10),
                    ..good
                },
                Skip::TooLarge,
            ),
            (
                Answer {
                    keep_truncated: false,
                    ..good
                },
                Skip::Truncated,
            ),
        ] {
            assert_eq!(of_answer(&answer, 2), Err(why), "{answer:?}");
        }
        let embedding = Answer {
            finish_reasons: &[],
            ..good
        };
        assert_eq!(of_answer(&embedding, 0), Ok(()));
    }
}
