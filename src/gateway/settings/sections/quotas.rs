//! `quotas`: what clients may ask for within a minute and at one time.

use crate::settings::fault::Fault;
use crate::settings::reader::Section;
use actix_web::http::header::HeaderName;
use routing::quota::Limits;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Each one that waits is looked at whenever another ends.
const QUEUE_SIZE_MAX: u64 = 10_000;

/// `quotas`.
#[derive(Debug, Clone)]
pub struct QuotaSettings {
    /// Requests at one time in all.
    pub concurrent: Option<u32>,
    /// Of every key that says nothing else.
    pub key: Limits,
    /// Of every tenant that is not named.
    pub tenant: Limits,
    /// Of every model that is not named.
    pub model: Limits,
    /// Of every address of clients without a key.
    pub address: Limits,
    /// Of tenants by name.
    pub tenants: BTreeMap<Arc<str>, Limits>,
    /// Of models by name.
    pub models: BTreeMap<Arc<str>, Limits>,
    /// Requests that may wait.
    pub queue_size: usize,
    /// For how long.
    pub queue_timeout: Duration,
    /// Where a proxy says whose request it is.
    pub address_header: Option<HeaderName>,
}

impl QuotaSettings {
    pub(in crate::settings) fn read(s: &Section<'_>) -> Self {
        let concurrent = s.int(
            "concurrent",
            (0, 0..=u64::from(u32::MAX)),
            "Requests at one time in all, from their heads to the ends of their answers; 0: any number.",
        );
        let of = |name, doc| limits(&s.section(name, doc));
        let key = of("key", "Of each API key that has no limits of its own.");
        let tenant = of("tenant", "Of each tenant: all of its keys together.");
        let model = of("model", "Of each model, under its own name.");
        let address = of(
            "address",
            "Of each address (of IPv6 each /64) of clients without a key.",
        );
        let tenants = named(s, "tenants", "Of some tenants, in place of those above.");
        let models = named(s, "models", "Of some models, likewise.");
        let address_header = s.text_or_none("address_header", "The header in which a proxy of yours appends the client's address, such as x-forwarded-for: its last entry counts. Without it the peer's address counts. Clients can write it themselves where no proxy stands before the router.");
        let queue = s.section("queue", "Requests that wait where too many run. Without it they are refused at once: with 429, and for `concurrent` with 503.");
        QuotaSettings {
            concurrent: at_most(concurrent),
            key,
            tenant,
            model,
            address,
            tenants,
            models,
            queue_size: queue.int("size", (0, 0..=QUEUE_SIZE_MAX), "Requests that may wait; beyond it they are refused with 503. First go those of the highest priority, then of the tenant with the fewest running.") as usize,
            queue_timeout: queue.duration("timeout", "10s", "How long one waits at most; then 503."),
            address_header: address_header.and_then(|name| {
                let header = HeaderName::from_bytes(name.as_bytes());
                if header.is_err() {
                    s.fault("address_header", "is not a header name");
                }
                header.ok()
            }),
        }
    }

    /// Whether nobody has a limit but keys that say so themselves.
    pub fn is_off(&self) -> bool {
        let all = [&self.key, &self.tenant, &self.model, &self.address];
        self.concurrent.is_none()
            && all.into_iter().all(Limits::is_none)
            && self.tenants.is_empty()
            && self.models.is_empty()
    }

    pub(in crate::settings) fn check(&self, warnings: &mut Vec<Fault>, has_keys: bool) {
        let of_keys = !self.key.is_none() || !self.tenant.is_none() || !self.tenants.is_empty();
        if of_keys && !has_keys {
            warnings.push(Fault::new(
                "quotas",
                "limits keys or tenants, but there are no api_keys: these limits are nobody's",
            ));
        }
    }
}

/// The three limits of anybody.
pub(super) fn limits(s: &Section<'_>) -> Limits {
    let int = |key, most, doc| s.int(key, (0, 0..=most), doc);
    let requests = int("requests_per_minute", u64::from(u32::MAX), "0: any number.");
    let tokens = int(
        "tokens_per_minute",
        u64::from(u32::MAX),
        "Of prompts and answers. Charged at the start by the body's length and max_tokens, and put right at the end by what the engine counted; 0: any number.",
    );
    let concurrent = int(
        "concurrent",
        u64::from(u32::MAX),
        "Requests at one time; 0: any number.",
    );
    Limits {
        requests_per_minute: at_most(requests),
        tokens_per_minute: (tokens > 0).then_some(tokens),
        concurrent: at_most(concurrent),
    }
}

fn at_most(limit: u64) -> Option<u32> {
    u32::try_from(limit).ok().filter(|limit| *limit > 0)
}

fn named(s: &Section<'_>, key: &'static str, doc: &'static str) -> BTreeMap<Arc<str>, Limits> {
    let items = s.list(key, doc);
    let items = items.iter().map(|item| {
        let name = item.required("name", "Which.");
        (Arc::from(name), limits(item))
    });
    items.collect()
}
