//! From fields to events and batches.

use super::field::{Any, ExtraKeys, FromAny, Hash, Hashes, Tail, Text, Tokens, Whole};
use super::{Batch, KvEvent, Medium, Odd, Stored};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// All fields that any encoding has.
#[derive(Debug, Default)]
struct Fields {
    kind: Option<String>,
    hashes: Option<Vec<u64>>,
    parent: Option<u64>,
    tokens: Option<Vec<u32>>,
    block_size: Option<u64>,
    medium: Option<String>,
    lora_id: Option<u64>,
    lora_name: Option<String>,
    cache_salt: Option<String>,
    extra_keys: ExtraKeys,
    group: Option<u64>,
    attention: Option<String>,
}

/// Kinds of cache groups whose blocks stand for the whole prefix before them.
const WHOLE_PREFIX_KINDS: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];
/// Other kinds that do not end in `attention`.
const OTHER_KINDS: [&str; 5] = [
    "sliding_window",
    "sliding_window_mla",
    "chunked_local",
    "mamba",
    "unknown",
];
/// Events of one batch; more is no engine's.
const EVENTS_PER_BATCH_MAX: usize = 65_536;

impl Fields {
    fn event(self) -> KvEvent {
        match self.kind.as_deref() {
            Some("BlockStored" | "cache_created") => self.stored(),
            Some("BlockRemoved" | "cache_evicted") => self.removed(),
            Some("cache_offloaded") => match self.hashes {
                Some(hashes) => KvEvent::Offloaded { hashes },
                None => KvEvent::Odd(Odd::Field),
            },
            Some("AllBlocksCleared" | "cache_cleared") => KvEvent::Cleared,
            _ => KvEvent::Odd(Odd::Kind),
        }
    }

    /// Hybrid models announce the same tokens once per group; only one stands for the prefix.
    fn is_other_group(&self) -> bool {
        match &self.attention {
            Some(kind) if WHOLE_PREFIX_KINDS.contains(&kind.as_str()) => false,
            Some(kind) if kind != "unknown" => true,
            _ => self.group.is_some_and(|group| group > 0),
        }
    }

    fn medium(&self) -> Result<Medium, Odd> {
        match &self.medium {
            None => Ok(Medium::Gpu),
            Some(name) => Medium::parse(name).ok_or(Odd::Medium),
        }
    }

    fn removed(self) -> KvEvent {
        if self.is_other_group() {
            return KvEvent::Odd(Odd::Group);
        }
        match (self.medium(), self.hashes) {
            (Ok(medium), Some(hashes)) => KvEvent::Removed { hashes, medium },
            (Err(odd), _) => KvEvent::Odd(odd),
            (_, None) => KvEvent::Odd(Odd::Field),
        }
    }

    fn stored(self) -> KvEvent {
        if self.is_other_group() {
            return KvEvent::Odd(Odd::Group);
        }
        let medium = match self.medium() {
            Ok(medium) => medium,
            Err(odd) => return KvEvent::Odd(odd),
        };
        let cache_salt = self.salt();
        let lora_id = self.lora_id.filter(|id| *id > 0).map(|id| id.to_string());
        let lora = self.lora_name.or(lora_id);
        let block_size = self.block_size.and_then(|n| u32::try_from(n).ok());
        let tokens = self.tokens.unwrap_or_default();
        let (Some(hashes), Some(block_size)) = (self.hashes, block_size) else {
            return KvEvent::Odd(Odd::Field);
        };
        // older engines announce copies outside of the GPU without their tokens
        let named = tokens.is_empty() && medium != Medium::Gpu;
        let full = hashes.len() as u64 * u64::from(block_size) == tokens.len() as u64;
        if block_size == 0 || hashes.is_empty() || !(full || named) {
            return KvEvent::Odd(Odd::TokenCount);
        }
        KvEvent::Stored(Stored {
            hashes,
            parent: self.parent,
            tokens,
            block_size,
            medium,
            lora,
            cache_salt,
        })
    }

    /// The salt, where it is said; else the first block's extra text that is not the adapter.
    fn salt(&self) -> Option<String> {
        let extra = || {
            let mut texts = self.extra_keys.0.iter();
            texts
                .find(|text| self.lora_name.as_ref() != Some(text))
                .cloned()
        };
        self.cache_salt.clone().or_else(extra)
    }

    /// `[kind, hashes, parent, tokens, block_size, tail…]` or `[kind, hashes, tail…]`.
    fn positional<'de, A: SeqAccess<'de>>(&mut self, seq: &mut A) -> Result<(), A::Error> {
        self.kind = next::<Text, A>(seq)?.0;
        match self.kind.as_deref() {
            Some("BlockStored") => {
                self.hashes = next::<Hashes, A>(seq)?.0;
                self.parent = next::<Hash, A>(seq)?.0;
                self.tokens = next::<Tokens, A>(seq)?.0;
                self.block_size = next::<Whole, A>(seq)?.0;
                self.tail(seq, true)
            }
            Some("BlockRemoved") => {
                self.hashes = next::<Hashes, A>(seq)?.0;
                self.tail(seq, false)
            }
            _ => {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(())
            }
        }
    }

    /// By type, since forks insert elements: a known medium is the medium, the text behind it the
    /// adapter's name, a text that ends in `attention` or names a state the group's kind; the
    /// first number of a stored event is `lora_id`, a later one `group_idx`.
    fn tail<'de, A: SeqAccess<'de>>(&mut self, seq: &mut A, stored: bool) -> Result<(), A::Error> {
        let mut medium_at = None;
        let mut at = 0usize;
        while let Some(Any(tail)) = seq.next_element::<Any<Tail>>()? {
            match tail {
                Tail::Whole(n) if stored && at == 0 => self.lora_id = Some(n),
                Tail::Whole(n) => {
                    self.group.get_or_insert(n);
                }
                Tail::Text(text) if is_group_kind(&text) => self.attention = Some(text),
                Tail::Text(text)
                    if medium_at.is_none() && (at <= 1 || Medium::parse(&text).is_some()) =>
                {
                    self.medium = Some(text);
                    medium_at = Some(at);
                }
                Tail::Text(text) if medium_at.is_some_and(|medium| medium + 1 == at) => {
                    self.lora_name = Some(text);
                }
                Tail::Keys(keys) => self.extra_keys = keys,
                Tail::Salt(salt) => self.cache_salt = Some(salt),
                Tail::Text(_) | Tail::Nothing => {}
            }
            at += 1;
        }
        Ok(())
    }

    fn named<'de, A: MapAccess<'de>>(&mut self, map: &mut A) -> Result<(), A::Error> {
        while let Some(Any(Text(key))) = map.next_key::<Any<Text>>()? {
            match key.as_deref().unwrap_or_default() {
                "type" => self.kind = value::<Text, A>(map)?.0,
                "block_hashes" => self.hashes = value::<Hashes, A>(map)?.0,
                "parent_block_hash" => self.parent = value::<Hash, A>(map)?.0,
                "token_ids" => self.tokens = value::<Tokens, A>(map)?.0,
                "block_size" => self.block_size = value::<Whole, A>(map)?.0,
                "medium" => self.medium = value::<Text, A>(map)?.0,
                "lora_id" => self.lora_id = value::<Whole, A>(map)?.0,
                "lora_name" => self.lora_name = value::<Text, A>(map)?.0,
                "cache_salt" => self.cache_salt = value::<Text, A>(map)?.0,
                "extra_keys" => self.extra_keys = value::<ExtraKeys, A>(map)?,
                "group_idx" => self.group = value::<Whole, A>(map)?.0,
                "kv_cache_spec_kind" => self.attention = value::<Text, A>(map)?.0,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

fn is_group_kind(text: &str) -> bool {
    text.ends_with("attention") || OTHER_KINDS.contains(&text)
}

fn next<'de, T: FromAny, A: SeqAccess<'de>>(seq: &mut A) -> Result<T, A::Error> {
    Ok(seq
        .next_element::<Any<T>>()?
        .map(|Any(value)| value)
        .unwrap_or_default())
}

fn value<'de, T: FromAny, A: MapAccess<'de>>(map: &mut A) -> Result<T, A::Error> {
    map.next_value::<Any<T>>().map(|Any(value)| value)
}

#[derive(Default)]
struct AnyEvent(Option<KvEvent>);

impl FromAny for AnyEvent {
    fn from_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        let mut fields = Fields::default();
        fields.positional(&mut seq)?;
        Ok(AnyEvent(Some(fields.event())))
    }
    fn from_map<'de, A: MapAccess<'de>>(mut map: A) -> Result<Self, A::Error> {
        let mut fields = Fields::default();
        fields.named(&mut map)?;
        Ok(AnyEvent(Some(fields.event())))
    }
}

#[derive(Default)]
struct Events(Option<Vec<KvEvent>>);

impl FromAny for Events {
    fn from_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        let mut too_many = false;
        let mut events = Vec::new();
        while let Some(Any(AnyEvent(event))) = seq.next_element()? {
            if events.len() < EVENTS_PER_BATCH_MAX {
                events.push(event.unwrap_or(KvEvent::Odd(Odd::Kind)));
            } else {
                too_many = true;
            }
        }
        Ok(Events((!too_many).then_some(events)))
    }
}

impl<'de> Deserialize<'de> for Batch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BatchVisitor)
    }
}

struct BatchVisitor;

impl<'de> Visitor<'de> for BatchVisitor {
    type Value = Batch;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a batch of KV cache events")
    }

    /// `[ts, events, rank?, …]`.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Batch, A::Error> {
        let ts = next::<Seconds, A>(&mut seq)?.0;
        let Events(events) = next::<Events, A>(&mut seq)?;
        let Whole(rank) = next::<Whole, A>(&mut seq)?;
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        batch::<A::Error>(None, ts, rank, events)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Batch, A::Error> {
        let (mut seq, mut ts, mut rank, mut events) = (None, 0.0, None, None);
        while let Some(Any(Text(key))) = map.next_key::<Any<Text>>()? {
            match key.as_deref().unwrap_or_default() {
                "seq" => seq = value::<Whole, A>(&mut map)?.0,
                "ts" => ts = value::<Seconds, A>(&mut map)?.0,
                "dp_rank" | "data_parallel_rank" | "attn_dp_rank" => {
                    rank = value::<Whole, A>(&mut map)?.0;
                }
                "events" => events = value::<Events, A>(&mut map)?.0,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        batch::<A::Error>(seq, ts, rank, events)
    }
}

fn batch<E: Error>(
    seq: Option<u64>,
    ts: f64,
    rank: Option<u64>,
    events: Option<Vec<KvEvent>>,
) -> Result<Batch, E> {
    Ok(Batch {
        seq,
        ts,
        rank: rank.and_then(|rank| u32::try_from(rank).ok()),
        events: events.ok_or_else(|| E::custom("there is no list of events"))?,
    })
}

/// A point in time: whole or broken seconds.
#[derive(Debug, Default, Clone, Copy)]
struct Seconds(f64);

impl FromAny for Seconds {
    fn from_u64(n: u64) -> Self {
        Seconds(n as f64)
    }
    fn from_f64(n: f64) -> Self {
        Seconds(n)
    }
}
