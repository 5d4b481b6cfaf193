//! Whose limits a request is under.

use super::Limit;
use crate::settings::Settings;
use actix_web::HttpRequest;
use routing::access::ApiKey;
use routing::quota::{Limits, Priority, Scope};
use std::net::IpAddr;
use std::sync::Arc;

/// Who asks: the holder of a key, or whoever is at an address.
#[derive(Debug, Clone)]
pub enum Asker {
    /// By a key of ours.
    Key(Arc<ApiKey>),
    /// Without one.
    Address(Arc<str>),
    /// Without one, where addresses have no limits.
    Nobody,
}

impl Asker {
    /// Of a request with or without a key.
    pub fn of(request: &HttpRequest, key: Option<&Arc<ApiKey>>, settings: &Settings) -> Self {
        if let Some(key) = key {
            return Asker::Key(key.clone());
        }
        if settings.quotas.address.is_none() {
            return Asker::Nobody; // who it is, is of no interest
        }
        let header = settings.quotas.address_header.as_ref();
        let told = header.and_then(|name| last_address(request, name.as_str()));
        let peer = || request.peer_addr().map(|peer| peer.ip());
        let address = told.or_else(peer).map_or_else(String::new, network);
        Asker::Address(address.into())
    }

    /// What it may do, but for the model's limits.
    pub(super) fn limits(&self, settings: &Settings) -> Vec<Limit> {
        let quotas = &settings.quotas;
        if quotas.is_off() && !matches!(self, Asker::Key(key) if !key.limits.is_none()) {
            return Vec::new(); // as mostly: nothing is made for it
        }
        let all = match self {
            Asker::Key(key) => vec![
                (Scope::Key, key.name.clone(), key.limits.or(quotas.key)),
                (
                    Scope::Tenant,
                    key.tenant.clone(),
                    own(quotas.tenants.get(&key.tenant), quotas.tenant),
                ),
            ],
            Asker::Address(address) => vec![(Scope::Address, address.clone(), quotas.address)],
            Asker::Nobody => Vec::new(),
        };
        all.into_iter()
            .filter(|(_, _, limits)| !limits.is_none())
            .collect()
    }

    /// Among whom it shares what is short.
    pub(super) fn tenant(&self) -> Arc<str> {
        match self {
            Asker::Key(key) => key.tenant.clone(),
            Asker::Address(address) => address.clone(),
            Asker::Nobody => Arc::from(""),
        }
    }

    /// Who goes first.
    pub(super) fn priority(&self) -> Priority {
        match self {
            Asker::Key(key) => key.priority,
            Asker::Address(_) | Asker::Nobody => Priority::Normal,
        }
    }
}

fn own(named: Option<&Limits>, others: Limits) -> Limits {
    named.copied().unwrap_or(others)
}

/// The limits of a model, if it has any.
pub(super) fn of_model(settings: &Settings, model: &Arc<str>) -> Option<Limit> {
    let quotas = &settings.quotas;
    let limits = own(quotas.models.get(model), quotas.model);
    (!limits.is_none()).then(|| (Scope::Model, model.clone(), limits))
}

/// What the nearest proxy appended.
fn last_address(request: &HttpRequest, header: &str) -> Option<IpAddr> {
    let last = request.headers().get_all(header).last()?;
    let last = last.to_str().ok()?.rsplit(',').next()?.trim();
    last.parse().ok()
}

/// Of IPv6 the network that one customer has.
fn network(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            format!("{a:x}:{b:x}:{c:x}:{d:x}::/64")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::test::TestRequest;

    #[test]
    fn the_last_proxys_word_counts_and_nonsense_does_not() {
        let of = |value: &str| {
            let request = TestRequest::default().insert_header(("x-forwarded-for", value));
            last_address(&request.to_http_request(), "x-forwarded-for").map(network)
        };
        assert_eq!(of("6.6.6.6, 10.0.0.7").as_deref(), Some("10.0.0.7"));
        assert_eq!(
            of("2001:db8:1:2:3:4:5:6").as_deref(),
            Some("2001:db8:1:2::/64")
        );
        assert_eq!(of("::ffff:10.0.0.7").as_deref(), Some("10.0.0.7"));
        assert_eq!(of("unknown"), None);
    }
}
