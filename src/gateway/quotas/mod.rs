//! What a client may ask for: looked at before a request is served, and given back when its answer has
//! ended. Every gateway counts by itself.

mod asker;
mod note;
mod permits;
mod rates;

pub use asker::Asker;
pub use note::{Exceeded, RateNote};
pub use permits::{Permit, Permits};
use rates::{Charge, Rates};

use crate::gateway::Gateway;
use crate::http::error::Refusal;
use crate::http::routes::ApiRoute;
use crate::settings::Settings;
use crate::telemetry::names;
use metrics::{counter, histogram};
use note::Weighed;
use permits::NoPermit;
use routing::quota::{Limited, Limits, Need, Scope};
use std::sync::Arc;
use std::time::Instant;
use wire::request::RequestView;

/// What the body of a request counts for, in bytes per token: fewer than in most texts, so that nobody is
/// charged too little before an engine has counted.
const BYTES_PER_TOKEN: u64 = 4;
/// What an answer is taken for whose client names no limit.
const ANSWER_TOKENS_ASSUMED: u64 = 256;

/// See the module.
#[derive(Debug, Default)]
pub struct Quotas {
    rates: Rates,
    /// Who runs and who waits.
    pub permits: Arc<Permits>,
}

/// What a request was given; all of it goes back when this is dropped.
#[derive(Debug, Default)]
pub struct Grant {
    /// For the answer's headers.
    pub note: RateNote,
    charges: Vec<Charge>,
    _permit: Option<Permit>,
}

impl Grant {
    /// The request has used so many tokens; none: nobody counted, and what was charged stays.
    pub fn used(&mut self, tokens: Option<u64>) {
        for charge in &mut self.charges {
            charge.used(tokens);
        }
    }
}

/// A limit of somebody.
type Limit = (Scope, Arc<str>, Limits);

/// Tokens that a request is charged before anybody has counted.
pub fn estimate(route: ApiRoute, view: &RequestView<'_>, body_bytes: usize) -> u64 {
    if !route.generates() {
        return 0;
    }
    let prompt = (body_bytes as u64).div_ceil(BYTES_PER_TOKEN);
    let answers = match route.has_answer_tokens() {
        true => {
            let each = view.answer_tokens().unwrap_or(ANSWER_TOKENS_ASSUMED);
            each.saturating_mul(view.choices() as u64)
        }
        false => 0,
    };
    prompt.saturating_add(answers)
}

impl Quotas {
    /// Counts a request by who asks, before its body is read.
    ///
    /// # Errors
    /// Which limit it is over.
    pub fn knock(&self, settings: &Settings, asker: &Asker) -> Result<Grant, Refusal> {
        let mut grant = Grant::default();
        for limit in asker.limits(settings) {
            self.count_request(&limit, &mut grant)?;
        }
        Ok(grant)
    }

    fn count_request(&self, limit: &Limit, grant: &mut Grant) -> Result<(), Refusal> {
        let (scope, name, limits) = limit;
        if limits.requests_per_minute.is_none() {
            return Ok(());
        }
        let weighed = self.rates.of(*scope, name, *limits).count_request();
        self.weigh(weighed, (Limited::Requests, *scope), grant)
    }

    fn weigh(
        &self,
        weighed: Result<Weighed, Weighed>,
        (limited, scope): (Limited, Scope),
        grant: &mut Grant,
    ) -> Result<(), Refusal> {
        match weighed {
            Ok(weighed) => {
                grant.note.add(limited, weighed);
                Ok(())
            }
            Err(weighed) => {
                refused(limited.as_str(), scope);
                Err(Refusal::Quota(Exceeded {
                    limited,
                    scope,
                    weighed,
                }))
            }
        }
    }

    /// Charges a request's tokens, and waits until it may run. It knows its model now.
    ///
    /// # Errors
    /// Which limit it is over.
    pub async fn admit(
        &self,
        (gateway, settings): (&Gateway, &Settings),
        asker: &Asker,
        (model, tokens): (&Arc<str>, u64),
        grant: &mut Grant,
    ) -> Result<(), Refusal> {
        let mut limits = asker.limits(settings);
        // names that clients make up are nobody's
        let is_served = || gateway.directory.load().view.pools.contains_key(model);
        if let Some(of_model) = asker::of_model(settings, model).filter(|_| is_served()) {
            self.count_request(&of_model, grant)?;
            limits.push(of_model);
        }
        for (scope, name, limits) in &limits {
            if limits.tokens_per_minute.is_some() && tokens > 0 {
                let rate = self.rates.of(*scope, name, *limits);
                let weighed = rate.charge(tokens, &mut grant.charges);
                self.weigh(weighed, (Limited::Tokens, *scope), grant)?;
            }
        }
        let needs = needs(settings, &limits);
        if !needs.is_empty() {
            grant._permit = Some(self.permit(settings, asker, needs).await?);
        }
        Ok(())
    }

    async fn permit(
        &self,
        settings: &Settings,
        asker: &Asker,
        needs: Vec<Need>,
    ) -> Result<Permit, Refusal> {
        let queue = (settings.quotas.queue_size, settings.quotas.queue_timeout);
        let began = Instant::now();
        let who = (&asker.tenant(), asker.priority());
        let taken = self.permits.take(who, needs, queue).await;
        match taken {
            Ok((permit, waited)) => {
                if waited {
                    histogram!(names::QUEUE_WAIT).record(began.elapsed().as_secs_f64());
                }
                Ok(permit)
            }
            Err(NoPermit::NoQueue(need)) if need.scope != Scope::Gateway => {
                refused(Limited::Concurrency.as_str(), need.scope);
                Err(Refusal::Quota(Exceeded {
                    limited: Limited::Concurrency,
                    scope: need.scope,
                    weighed: Weighed::places(need.limit),
                }))
            }
            Err(NoPermit::NoQueue(need)) => {
                refused(Limited::Concurrency.as_str(), need.scope);
                Err(Refusal::TooManyRequests)
            }
            Err(NoPermit::QueueFull(scope)) => {
                refused("queue", scope);
                Err(Refusal::QueueFull)
            }
            Err(NoPermit::TimedOut(scope)) => {
                refused("queue", scope);
                Err(Refusal::QueueTimeout)
            }
        }
    }

    /// Whether tokens of this asker are limited, so that engines should count them.
    pub fn counts_tokens(settings: &Settings, asker: &Asker, model: &Arc<str>) -> bool {
        let mut limits = asker.limits(settings);
        limits.extend(asker::of_model(settings, model));
        limits
            .iter()
            .any(|(_, _, of)| of.tokens_per_minute.is_some())
    }
}

fn refused(limit: &'static str, scope: Scope) {
    counter!(names::QUOTA_REFUSALS, "limit" => limit, "scope" => scope.as_str()).increment(1);
}

fn needs(settings: &Settings, limits: &[Limit]) -> Vec<Need> {
    let all = settings.quotas.concurrent.map(|limit| Need {
        scope: Scope::Gateway,
        name: Arc::from(""),
        limit,
    });
    let of = limits.iter().filter_map(|(scope, name, limits)| {
        Some(Need {
            scope: *scope,
            name: name.clone(),
            limit: limits.concurrent?,
        })
    });
    all.into_iter().chain(of).collect()
}
