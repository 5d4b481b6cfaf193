//! W3C trace context: which trace a request belongs to, as its headers say it. Pure.
//! <https://www.w3.org/TR/trace-context/>

use std::fmt;

/// A trace, over all services. Never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceId(pub u128);

/// A part of a trace. Never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpanId(pub u64);

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What `traceparent` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace.
    pub trace: TraceId,
    /// The sender's span.
    pub span: SpanId,
    /// Whether the sender records.
    pub sampled: bool,
}

impl TraceParent {
    /// Reads the header; none when it is not as the standard says.
    pub fn parse(header: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(header).ok()?;
        let mut fields = text.split('-');
        let version = hex(fields.next()?, 2)?;
        let trace = hex(fields.next()?, 32)?;
        let span = hex(fields.next()?, 16)?;
        let flags = hex(fields.next()?, 2)?;
        // later versions may add fields; this one has none, and 255 is none
        let has_more = fields.next().is_some();
        let is_valid = version != 0xff && !(version == 0 && has_more) && trace != 0 && span != 0;
        is_valid.then_some(TraceParent {
            trace: TraceId(trace),
            span: SpanId(span as u64),
            sampled: flags & 1 == 1,
        })
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = u8::from(self.sampled);
        write!(f, "00-{}-{}-{flags:02x}", self.trace, self.span)
    }
}

/// Digits in lower case, exactly so many.
fn hex(text: &str, digits: usize) -> Option<u128> {
    let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let fits = text.len() == digits && text.bytes().all(is_hex);
    fits.then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

/// Whether a trace that nobody has decided on is recorded: the same answer wherever it is asked.
pub fn is_sampled(trace: TraceId, ratio: f64) -> bool {
    let lot = trace.0 as u64 >> 1;
    (lot as f64) < ratio * (1u64 << 63) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn what_the_standard_allows_is_read_and_written_the_same() {
        let read = TraceParent::parse(GOOD.as_bytes()).unwrap();
        assert_eq!(read.to_string(), GOOD);
        assert!(read.sampled);
        let unsampled = GOOD.replace("-01", "-02");
        assert!(!TraceParent::parse(unsampled.as_bytes()).unwrap().sampled);
        let later = GOOD.replacen("00", "cc", 1) + "-more";
        assert_eq!(TraceParent::parse(later.as_bytes()), Some(read));
    }

    #[test]
    fn what_it_does_not_allow_is_none() {
        for wrong in [
            "",
            "00",
            &GOOD.to_uppercase(),
            &GOOD[1..],
            &(GOOD.to_owned() + "-more"),
            &GOOD.replacen("00", "ff", 1),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473+-00f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceParent::parse(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn about_the_share_that_is_asked_for_is_sampled() {
        let traces = (0..10_000u128).map(|n| TraceId((n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)));
        let count = |ratio| traces.clone().filter(|t| is_sampled(*t, ratio)).count();
        assert_eq!((count(0.0), count(1.0)), (0, 10_000));
        assert!((2_300..2_700).contains(&count(0.25)), "{}", count(0.25));
    }
}
