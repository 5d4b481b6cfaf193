//! Every metric that the router exports: name, type, labels, unit. docs/metrics.md explains them,
//! and a test holds the two equal. No label is made from what a client sends, but for models that
//! a backend serves.

/// What kind of number it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts by size.
    Histogram,
}

/// A metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// As Prometheus sees it.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// For the `HELP` line.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($constant:ident = $kind:ident $name:literal $labels:expr, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $constant: &str = $name;
        )*
        /// All of them.
        pub const ALL: &[Metric] = &[
            $(Metric { name: $name, kind: Kind::$kind, labels: &$labels, help: $help },)*
        ];
    };
}

metrics! {
    REQUESTS = Counter "tidegate_requests_total" ["route", "model", "status"], "Requests that ended, by the class of the status.";
    REQUEST_DURATION = Histogram "tidegate_request_duration_seconds" ["route"], "From the head of a request to the end of its answer.";
    TTFT = Histogram "tidegate_time_to_first_token_seconds" ["backend"], "From a streamed request to the first byte of its answer.";
    ITL = Histogram "tidegate_inter_token_latency_seconds" ["backend"], "Between two chunks of a stream.";
    HTTP_IN_FLIGHT = Gauge "tidegate_http_in_flight_requests" [], "Requests being served.";
    BUFFERED = Gauge "tidegate_buffered_request_bytes" [], "Request bodies held in memory.";
    CLIENT_WRITE_TIMEOUTS = Counter "tidegate_client_write_timeouts_total" [], "Answers given up because the client stopped reading.";
    ERRORS = Counter "tidegate_errors_total" ["by", "kind"], "Requests that ended in an error, by who failed.";
    RETRIES = Counter "tidegate_retries_total" ["reason"], "Second attempts, by what the first one failed of.";
    RETRY_BUDGET_EXHAUSTED = Counter "tidegate_retry_budget_exhausted_total" [], "Failures not retried because retries had used up their share.";
    TLS_HANDSHAKE_FAILURES = Counter "tidegate_tls_handshake_failures_total" ["listener"], "Clients that connected and came to no TLS handshake.";
    CERTIFICATE_RELOADS = Counter "tidegate_certificate_reloads_total" ["of", "result"], "Changed certificate files, and whether they were taken over.";
    SPANS = Counter "tidegate_spans_total" ["result"], "Spans of traces that ended, by what became of them.";
    IN_FLIGHT = Gauge "tidegate_in_flight_requests" ["backend"], "Requests sent to the backend and not yet ended.";
    BACKEND_REQUESTS = Counter "tidegate_backend_requests_total" ["backend", "outcome"], "Attempts that ended at the backend.";
    BACKEND_STATE = Gauge "tidegate_backend_state" ["backend", "state"], "1 for the state that the backend is in.";
    BACKEND_FLAPS = Counter "tidegate_backend_flaps_total" ["backend"], "Changes between healthy and unhealthy.";
    BREAKER_STATE = Gauge "tidegate_breaker_state" ["backend", "state"], "1 for the state that the circuit breaker is in.";
    HEALTH_PROBES = Counter "tidegate_health_probes_total" ["backend", "result"], "Health probes that ended.";
    UPSTREAM_CONNECTIONS = Counter "tidegate_upstream_connections_total" ["backend", "kind"], "How attempts came by their connection.";
    ROUTE_DECISIONS = Counter "tidegate_route_decisions_total" ["route"], "How the backend was chosen.";
    PREFIX_SPILLS = Counter "tidegate_prefix_spills_total" [], "Decisions by prefix that left the first backend for its load.";
    KV_LOOKUPS = Counter "tidegate_kv_lookups_total" ["result"], "Requests looked up in the KV index, by what came of it.";
    KV_PREDICTED = Counter "tidegate_kv_predicted_tokens_total" ["backend"], "Prompt tokens that the index took for cached, where the engine then said how many were.";
    KV_ACTUAL = Counter "tidegate_kv_actual_tokens_total" ["backend"], "Prompt tokens that the engine said were cached, for the same requests.";
    KV_ERROR = Counter "tidegate_kv_prediction_error_tokens_total" ["backend"], "Absolute difference of the two, summed over requests.";
    KV_UNCHECKED = Counter "tidegate_kv_unchecked_predictions_total" ["backend"], "Predictions that the engine did not allow to check.";
    KV_ASK = Histogram "tidegate_kv_index_ask_seconds" [], "How long requests waited for the KV index.";
    KV_OVERLAP = Histogram "tidegate_kv_overlap_ratio" [], "Share of the prompt's blocks that the chosen backend was known to have; of requests that were looked up.";
    KV_MODE = Gauge "tidegate_kv_mode" ["backend", "mode"], "1 for where the knowledge of the backend's KV cache comes from: exact (its events), approximate (what was sent there), blind.";
    KV_RESYNCS = Counter "tidegate_kv_stream_resyncs_total" ["backend", "rank"], "How often what the backend announced was made void, to be learned anew.";
    KV_SHARE_CONNECTED = Gauge "tidegate_kv_share_connected" [], "Whether what is known is shared with other gateways at this moment; 0 also while sharing is off.";
    KV_SHARE_LEADS = Gauge "tidegate_kv_share_streams_led" [], "Event streams of which this gateway leaves snapshots.";
    KV_SHARE_SNAPSHOTS = Counter "tidegate_kv_share_snapshots_total" [], "Snapshots of event streams that were left for other gateways.";
    KV_SHARE_BYTES = Counter "tidegate_kv_share_bytes_total" [], "Bytes of these snapshots.";
    KV_SHARE_FAILURES = Counter "tidegate_kv_share_failures_total" [], "Turns of sharing that failed.";
    KV_FRUITLESS = Gauge "tidegate_kv_fruitless_lookups" [], "Lookups by tokens in a row that found nothing anywhere.";
    KV_ENTRIES = Gauge "tidegate_kv_index_entries" [], "Pairs of block and holder in the KV index.";
    KV_BLOCKS = Gauge "tidegate_kv_index_blocks" [], "Different blocks in the KV index.";
    KV_BYTES = Gauge "tidegate_kv_index_bytes" [], "Memory that the KV index takes.";
    KV_EVICTED = Counter "tidegate_kv_index_evictions_total" ["why"], "Pairs of block and holder that went by themselves.";
    KV_APPLIED = Counter "tidegate_kv_blocks_applied_total" [], "Blocks that engines stored or removed.";
    KV_UNKNOWN = Counter "tidegate_kv_blocks_unknown_total" [], "Blocks of which the parent, or the block itself, was not known.";
    KV_ODD = Counter "tidegate_kv_events_odd_total" ["why"], "Events that were of no use.";
    KV_CONNECTED = Gauge "tidegate_kv_stream_connected" ["backend", "rank"], "Whether the backend's event stream is open.";
    KV_LAST_EVENT = Gauge "tidegate_kv_stream_last_event_seconds" ["backend", "rank"], "When the backend made its last event, in Unix time.";
    KV_LAG = Gauge "tidegate_kv_stream_lag_seconds" ["backend", "rank"], "How long after the backend made it its last event was taken in, by both clocks.";
    KV_REPLAYS = Counter "tidegate_kv_stream_replays_total" ["backend", "rank"], "Replays that the backend was asked for.";
    KV_GAPS = Counter "tidegate_kv_stream_gaps_total" ["backend", "kind", "rank"], "Breaks in the backend's event stream.";
    CACHE_REQUESTS = Counter "tidegate_cache_requests_total" ["result"], "Requests by what the response cache did.";
    CACHE_BYPASS = Counter "tidegate_cache_bypass_total" ["why"], "Requests that passed the response cache by.";
    CACHE_LOOKUPS = Counter "tidegate_cache_lookups_total" ["tier", "result"], "Lookups in a tier of the response cache.";
    CACHE_LOOKUP = Histogram "tidegate_cache_lookup_seconds" ["tier"], "How long lookups took in a tier outside of the process.";
    CACHE_STORES = Counter "tidegate_cache_stores_total" ["tier", "result"], "Answers that were to be kept in a tier.";
    CACHE_UNKEPT = Counter "tidegate_cache_unkept_answers_total" ["why"], "Answers to cacheable requests that were not kept.";
    CACHE_BYTES = Gauge "tidegate_cache_bytes" ["tier"], "Bytes in a tier, where that is known.";
    CACHE_ENTRIES = Gauge "tidegate_cache_entries" ["tier"], "Answers in a tier, where that is known.";
    CACHE_EVICTIONS = Counter "tidegate_cache_evictions_total" ["tier", "why"], "Answers that went by themselves.";
    CACHE_PROMOTIONS = Counter "tidegate_cache_promotions_total" [], "Answers of L2 that were put into L1.";
    CACHE_TIER_UP = Gauge "tidegate_cache_tier_up" ["tier"], "Whether a tier is asked; 0 while it fails.";
    CACHE_TIER_CHANGES = Counter "tidegate_cache_tier_changes_total" ["tier"], "How often a tier went away or came back.";
    CACHE_FLIGHTS = Gauge "tidegate_cache_flights" [], "Calls being made for cacheable requests.";
    CACHE_FLIGHT_BYTES = Gauge "tidegate_cache_flight_bytes" [], "Bytes of their answers in memory.";
    CACHE_HANDOVERS = Counter "tidegate_cache_handovers_total" [], "Failed calls that were made again for another waiter.";
    CACHE_LOCK_WAITS = Counter "tidegate_cache_lock_waits_total" ["result"], "Waits for the equal call of another gateway.";
    CACHE_SAVED_TOKENS = Counter "tidegate_cache_saved_tokens_total" ["model", "kind"], "Tokens of answers that no engine had to make.";
    CACHE_HIT_BYTES = Counter "tidegate_cache_hit_bytes_total" ["tier"], "Bytes of answers from a tier.";
    SPLIT_REQUESTS = Counter "tidegate_split_requests_total" ["path"], "Requests by how they were served, where serving is split.";
    SPLIT_LEGS = Counter "tidegate_split_legs_total" ["leg", "outcome"], "Legs of hand-offs that ended.";
    SPLIT_LEG = Histogram "tidegate_split_leg_seconds" ["leg"], "From sending a leg to prefill's whole answer, or to decode's first event.";
    SPLIT_RESTARTS = Counter "tidegate_split_restarts_total" ["step"], "Hand-offs begun anew with other workers, by the step that failed.";
    SPLIT_FALLBACKS = Counter "tidegate_split_fallbacks_total" ["step", "reason"], "Requests that a unified worker served because a step could not be.";
    SPLIT_FAILURES = Counter "tidegate_split_failures_total" ["step"], "Requests that were given up, by the step that failed.";
    SPLIT_PARAMS_FAULTS = Counter "tidegate_split_params_faults_total" [], "Prefill answers whose kv_transfer_params could not be used.";
    SPLIT_RELEASES = Counter "tidegate_split_releases_total" ["result"], "Decode legs that went on for a client that had left, to free what prefill held.";
    SPLIT_PAIRS = Gauge "tidegate_split_pairs" ["step"], "Requests in their prefill step and in their decode step.";
    SPLIT_SUSPENDED = Gauge "tidegate_split_groups_suspended" [], "Groups of workers that are not paired for now, since hand-offs between them failed in a row.";
    HELD_KV = Gauge "tidegate_backend_held_kv_tokens" ["backend"], "KV tokens that running requests hold at a decode worker, as far as this gateway knows.";
    FALLBACKS = Counter "tidegate_model_fallbacks_total" ["from", "to"], "Requests that another model served, since nobody could serve theirs.";
    PROMPT_TOKENS = Counter "tidegate_prompt_tokens_total" ["model"], "Prompt tokens, cached ones included.";
    COMPLETION_TOKENS = Counter "tidegate_completion_tokens_total" ["model"], "Generated tokens.";
    CACHED_PROMPT_TOKENS = Counter "tidegate_cached_prompt_tokens_total" ["model"], "Prompt tokens from the engine's KV cache.";
    ACTOR_RESTARTS = Counter "tidegate_actor_restarts_total" ["actor"], "Actors that died and were replaced.";
    ACTOR_MAILBOX = Gauge "tidegate_actor_mailbox_depth" ["actor"], "Messages sent to actors of this kind and not yet handled.";
    ACTOR_ASK = Histogram "tidegate_actor_ask_seconds" ["actor"], "From asking an actor to its answer, time in its mailbox included.";
    QUOTA_REFUSALS = Counter "tidegate_quota_refusals_total" ["limit", "scope"], "Requests refused because somebody is over a limit.";
    QUEUE_DEPTH = Gauge "tidegate_quota_queue_depth" [], "Requests that wait for their turn.";
    QUEUE_WAIT = Histogram "tidegate_quota_queue_wait_seconds" [], "How long requests waited that then ran.";
    PERMITS = Gauge "tidegate_quota_running_requests" [], "Requests that run under a limit of requests at one time.";
    RELOADS = Counter "tidegate_reloads_total" ["result"], "How often settings were read again.";
    LAST_RELOAD = Gauge "tidegate_last_reload_seconds" [], "When the settings in effect were read, in Unix time.";
    LOG_LINES_DROPPED = Counter "tidegate_log_lines_dropped_total" [], "Log lines lost because they could not be written fast enough.";
    BUILD_INFO = Gauge "tidegate_build_info" ["version"], "Always 1.";
    PROCESS_START = Gauge "process_start_time_seconds" [], "When the process started, in Unix time.";
    PROCESS_MEMORY = Gauge "process_resident_memory_bytes" [], "Resident memory.";
    PROCESS_CPU = Counter "process_cpu_seconds_total" [], "CPU time used, user and system.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_document_lists_exactly_these_with_their_types_and_labels() {
        let document = include_str!("../../../docs/metrics.md");
        let rows: Vec<Vec<&str>> = document
            .lines()
            .filter(|line| line.starts_with("| `") && !line.contains("`vllm:"))
            .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
            .collect();
        for metric in ALL {
            let row = rows
                .iter()
                .find(|row| row[0].trim_matches('`') == metric.name);
            let row = row.unwrap_or_else(|| panic!("{} is not documented", metric.name));
            assert_eq!(
                row[1],
                format!("{:?}", metric.kind).to_lowercase(),
                "{}",
                metric.name
            );
            let labels: Vec<&str> = row[2]
                .split(',')
                .map(|l| l.trim().trim_matches('`'))
                .filter(|l| !l.is_empty())
                .collect();
            assert_eq!(labels, metric.labels, "{}", metric.name);
        }
        assert_eq!(rows.len(), ALL.len(), "a documented metric does not exist");
    }
}
