//! The simulator's own flags about KV transfer. The defaults are those of [`KvSharing`].

use super::settings::{KvSharing, LoadFailurePolicy, StoreAt};
use crate::flag_values::not_negative;
use crate::kv_store::link::LinkSpeed;
use std::time::Duration;

/// What the command line says.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Simulator")]
pub struct KvTransferArgs {
    /// Where the storage behind a shared-storage connector is, instead of its endpoint: the URL of a kv-store, or in-process for
    /// one that engines of this process share. Without it such a connector does nothing
    #[arg(long, value_name = "URL")]
    sim_kv_store: Option<StoreAt>,
    /// Bytes per second of an in-process store [default: 20e9]
    #[arg(long, value_name = "BYTES/S", value_parser = rate)]
    sim_kv_store_bandwidth: Option<f64>,
    /// Milliseconds that an in-process store adds to each transfer [default: 2]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    sim_kv_store_latency_ms: Option<f64>,
    /// Bytes per second from this engine to others [default: 40e9]
    #[arg(long, value_name = "BYTES/S", value_parser = rate)]
    sim_kv_link_bandwidth: Option<f64>,
    /// Milliseconds that are added to each transfer to another engine [default: 1]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    sim_kv_link_latency_ms: Option<f64>,
    /// Seconds that a request waits for KV blocks from storage or another engine; scaled, but at least half a real second
    /// [default: 15]
    #[arg(long, value_name = "SECONDS", value_parser = not_negative)]
    sim_kv_load_timeout: Option<f64>,
    /// Seconds that KV blocks are kept for another engine that does not fetch them; scaled, but at least half a real second
    /// [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = not_negative)]
    sim_kv_lease: Option<f64>,
    /// Seconds that the legs of one request wait for each other (SGLang's rooms, Mooncake's transfers); scaled, but at least half a
    /// real second [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = not_negative)]
    sim_kv_partner_timeout: Option<f64>,
    /// What follows when another engine's KV blocks are missing, expired or those of another prompt; kv_load_failure_policy in
    /// --kv-transfer-config can say recompute as well
    #[arg(long, value_enum, default_value_t, value_name = "POLICY")]
    sim_kv_load_failure_policy: LoadFailurePolicy,
    /// Host by which other engines reach this one [default: --host, or 127.0.0.1 when that is a wildcard]
    #[arg(long, value_name = "HOST")]
    sim_kv_advertise_host: Option<String>,
    /// A second port for other engines, as SGLang's and Mooncake's bootstrap port or P2P NCCL's kv_port; 0 takes a free one. Without
    /// it they come to --port
    #[arg(long, value_name = "PORT")]
    sim_kv_port: Option<u16>,
}

impl From<KvTransferArgs> for KvSharing {
    fn from(args: KvTransferArgs) -> Self {
        let defaults = Self::default();
        let mut store_settings = defaults.store_settings;
        store_settings.link = link(
            store_settings.link,
            args.sim_kv_store_bandwidth,
            args.sim_kv_store_latency_ms,
        );
        Self {
            store: args.sim_kv_store,
            store_settings,
            link: link(
                defaults.link,
                args.sim_kv_link_bandwidth,
                args.sim_kv_link_latency_ms,
            ),
            load_timeout: seconds(args.sim_kv_load_timeout, defaults.load_timeout),
            lease: seconds(args.sim_kv_lease, defaults.lease),
            partner_timeout: seconds(args.sim_kv_partner_timeout, defaults.partner_timeout),
            load_failure: args.sim_kv_load_failure_policy,
            advertise_host: args.sim_kv_advertise_host,
            port: args.sim_kv_port,
        }
    }
}

fn link(default: LinkSpeed, bandwidth: Option<f64>, latency_ms: Option<f64>) -> LinkSpeed {
    LinkSpeed {
        bytes_per_second: bandwidth.unwrap_or(default.bytes_per_second),
        latency: seconds(latency_ms.map(|ms| ms / 1000.0), default.latency),
    }
}

fn seconds(given: Option<f64>, default: Duration) -> Duration {
    given.map_or(default, |seconds| {
        Duration::try_from_secs_f64(seconds).unwrap_or(default)
    })
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("give a number that is more than 0".to_owned()),
    }
}
