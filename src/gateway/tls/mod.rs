//! Encrypted connections: the certificates that clients are shown, and whom backends must prove to be. Their files are read
//! again when they change, without a restart; what cannot be used is told and not taken over.

mod accept;
mod certificate;
mod trust;

pub use accept::{Accepting, accept};
pub use certificate::Certificate;
pub use trust::Trust;

use crate::settings::Settings;
use crate::telemetry::names;
use metrics::counter;
use std::sync::Arc;
use std::time::Duration;
use tracing::{error, info};
use xxhash_rust::xxh3::xxh3_128;

/// How often files are looked at.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// What one look at a file came to.
type Looked = Result<bool, String>;

/// All certificates of a gateway.
#[derive(Clone)]
pub struct Tls {
    /// Shown to clients of the API, when `server.tls` is set.
    pub server: Option<Arc<Certificate>>,
    /// Shown to operators, when `admin.tls` is set.
    pub admin: Option<Arc<Certificate>>,
    /// Whom backends must prove to be.
    pub trust: Arc<Trust>,
}

impl Tls {
    /// Reads all files that the settings name.
    ///
    /// # Errors
    /// Which key names a file that cannot be used, and why.
    pub fn load(settings: &Settings) -> Result<Self, String> {
        let load = |key, files: &Option<_>| {
            let loaded = files
                .as_ref()
                .map(|files| Certificate::load(key, files).map(Arc::new));
            loaded.transpose()
        };
        Ok(Tls {
            server: load("server.tls", &settings.server.tls)?,
            admin: load("admin.tls", &settings.admin.tls)?,
            trust: Arc::new(Trust::load(settings)?),
        })
    }

    /// Reads files again that have changed. New connections go by what they hold; those that stand go on. A file that cannot
    /// be used changes nothing: that is logged, once for each content, and counted. Blocks for as long as reading takes.
    pub fn reload(&self) {
        let certificates = [("server", &self.server), ("admin", &self.admin)];
        for (of, certificate) in certificates {
            if let Some(certificate) = certificate {
                tell(of, certificate.reload());
            }
        }
        tell("upstream", self.trust.reload());
    }

    /// Reads them again whenever they change.
    pub async fn watch(self) {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let tls = self.clone();
            // files may be on a share that hangs
            let _ = actix_rt::task::spawn_blocking(move || tls.reload()).await;
        }
    }
}

fn tell(of: &'static str, looked: Looked) {
    let result = match looked {
        Ok(false) => return,
        Ok(true) => {
            info!(of, "certificates read again");
            "ok"
        }
        Err(error) => {
            error!(of, %error, "changed certificates cannot be used, the former ones stay");
            "failed"
        }
    };
    counter!(names::CERTIFICATE_RELOADS, "of" => of, "result" => result).increment(1);
}

/// Stands for contents; so that no key stays in memory for comparisons.
fn digest(contents: &[&[u8]]) -> u128 {
    let digests: Vec<u8> = contents
        .iter()
        .flat_map(|content| xxh3_128(content).to_le_bytes())
        .collect();
    xxh3_128(&digests)
}
