//! The gateway in this process, on a thread of its own, with settings from YAML.

use super::client::{self, Answer};
use super::{DEADLINE, Upstream, wait_until};
use actors::cluster::SetDraining;
use gateway::reload::{Files, Origin};
use gateway::settings::{Environment, Source, load};
use gateway::startup;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Quick where the defaults are slow; everything else is the default.
const BASE: &str = "
server: { host: 127.0.0.1, port: 0, workers: 1 }
logging: { access: false }
health_checks: { interval: 50ms, timeout: 2s }
";

enum Command {
    Drain,
    SetDraining(String, bool),
    ReloadCertificates,
    Stop,
}

/// A running gateway. Stops when dropped.
pub struct Gateway {
    pub address: SocketAddr,
    /// Where `/admin` is, when it has a listener of its own.
    pub admin_address: Option<SocketAddr>,
    pub inner: Arc<gateway::gateway::Gateway>,
    commands: UnboundedSender<Command>,
    thread: Option<JoinHandle<()>>,
    sources: Arc<Mutex<Vec<Source>>>,
}

fn sources(backends: &str, overrides: &str) -> Vec<Source> {
    let texts = [
        BASE.to_owned(),
        format!("backends:\n{backends}"),
        overrides.to_owned(),
    ];
    let texts = texts.into_iter().filter(|text| !text.trim().is_empty());
    texts
        .map(|text| Source {
            name: "test".into(),
            text,
        })
        .collect()
}

impl Gateway {
    /// In front of these engines, all serving the test model; ready. `overrides` is YAML.
    pub fn start(backends: &[(&str, &Upstream)], overrides: &str) -> Self {
        let backends: String = backends.iter().map(|(name, up)| up.yaml(name)).collect();
        Self::with(&backends, overrides)
    }

    /// The same with entries of `backends` as YAML.
    pub fn with(backends: &str, overrides: &str) -> Self {
        let gateway = Self::not_ready(backends, overrides);
        wait_until("every backend has been probed", DEADLINE, || {
            let snapshot = gateway.inner.directory.load();
            let starting = routing::health::HealthState::Starting;
            let mut backends = snapshot.view.backends.iter();
            // the first snapshot comes after the listener; and a backend that nobody can reach
            // stays in its first state
            backends.len() > 0
                && backends.all(|b| b.health != starting || probed(&gateway, &b.name))
        });
        gateway
    }

    /// The same, without waiting for anything but the listener.
    pub fn not_ready(backends: &str, overrides: &str) -> Self {
        let sources = Arc::new(Mutex::new(sources(backends, overrides)));
        let loaded = load(&sources.lock().unwrap(), &Environment::new());
        let loaded = loaded.unwrap_or_else(|faults| panic!("{faults}"));
        let read = sources.clone();
        let (ready, started) = mpsc::channel();
        let (commands, inbox) = unbounded_channel();
        let thread = std::thread::spawn(move || {
            actix_rt::System::new().block_on(async move {
                let origin = Origin {
                    read: Box::new(move || {
                        let sources = read.lock().unwrap();
                        load(&sources, &Environment::new()).map_err(|faults| faults.to_string())
                    }),
                    files: Files::new(Vec::new()),
                };
                let origin = Some((origin, loaded.effective));
                let running = startup::start_from(loaded.settings, origin).await.unwrap();
                ready
                    .send((
                        running.address,
                        running.admin_address,
                        running.gateway.clone(),
                    ))
                    .unwrap();
                obey(running, inbox).await;
            });
        });
        let (address, admin_address, inner) = started.recv_timeout(DEADLINE).unwrap();
        Gateway {
            address,
            admin_address,
            inner,
            commands,
            thread: Some(thread),
            sources,
        }
    }

    /// Other settings from the next reload on.
    pub fn settings(&self, backends: &str, overrides: &str) {
        *self.sources.lock().unwrap() = sources(backends, overrides);
    }

    /// Reads the settings again, which are these now.
    pub fn reload(&self, backends: &str, overrides: &str) -> Answer {
        self.settings(backends, overrides);
        client::post(self, "/admin/reload", "")
    }

    /// Waits until nothing of any request is left: no count, no byte.
    pub fn assert_idle(&self) {
        wait_until("every counter is back at zero", DEADLINE, || {
            let snapshot = self.inner.directory.load();
            let in_flight = snapshot.entries.iter().map(|e| e.backend.live.in_flight());
            let held = snapshot
                .entries
                .iter()
                .map(|e| e.backend.live.held_tokens());
            in_flight.sum::<u32>() == 0
                && held.sum::<u64>() == 0
                && self.inner.requests.count() == 0
                && self.inner.buffered.bytes() == 0
                && self.inner.flights() == 0
        });
    }

    /// Requests that were sent to this backend and have not ended.
    pub fn in_flight(&self, backend: &str) -> u32 {
        let snapshot = self.inner.directory.load();
        let entry = snapshot
            .entries
            .iter()
            .find(|e| &*e.backend.spec.name == backend);
        entry.unwrap().backend.live.in_flight()
    }

    /// Waits until this backend is in this state, as `/metrics` says.
    pub fn wait_for_state(&self, backend: &str, state: &str) {
        let series = format!("tidegate_backend_state{{backend=\"{backend}\",state=\"{state}\"}} 1");
        wait_until(&series, DEADLINE, || self.metrics().contains(&series));
    }

    /// Waits until this backend's breaker is in this state, as `/metrics` says.
    pub fn wait_for_breaker(&self, backend: &str, state: &str) {
        wait_until(&format!("{backend} is {state}"), DEADLINE, || {
            self.breaker(backend) == state
        });
    }

    /// The state of this backend's breaker, as `/metrics` says.
    pub fn breaker(&self, backend: &str) -> &'static str {
        let metrics = self.metrics();
        let is = |state: &&str| {
            let series =
                format!("tidegate_breaker_state{{backend=\"{backend}\",state=\"{state}\"}} 1");
            metrics.lines().any(|line| line == series)
        };
        ["closed", "open", "half_open"]
            .into_iter()
            .find(is)
            .unwrap()
    }

    /// The text of `/metrics`.
    pub fn metrics(&self) -> String {
        client::get(self, "/metrics").text().to_owned()
    }

    /// The sum of all series of this name that hold every one of these labels, written
    /// `label="value"`.
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        sum(&self.metrics(), name, labels)
    }

    /// Sends a chat request.
    pub fn chat(&self, body: &str) -> Answer {
        client::post(self, "/v1/chat/completions", body)
    }

    /// Takes a backend out of rotation, or back in.
    pub fn set_draining(&self, backend: &str, draining: bool) {
        let command = Command::SetDraining(backend.to_owned(), draining);
        self.commands.send(command).ok().unwrap();
    }

    /// Takes over changed certificates now.
    pub fn reload_certificates(&self) {
        self.commands
            .send(Command::ReloadCertificates)
            .ok()
            .unwrap();
    }

    /// What SIGTERM does.
    pub fn drain(&self) {
        self.commands.send(Command::Drain).ok().unwrap();
    }
}

/// The sum of all series of this name that hold every one of these labels.
pub fn sum(metrics: &str, name: &str, labels: &[&str]) -> f64 {
    let lines = metrics.lines().filter(|line| {
        let rest = line.strip_prefix(name);
        rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|label| line.contains(label))
    });
    let values = lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    values.sum()
}

fn probed(gateway: &Gateway, backend: &str) -> bool {
    use std::sync::atomic::Ordering::Relaxed;
    let snapshot = gateway.inner.directory.load();
    let mut entries = snapshot.entries.iter();
    let entry = entries.find(|e| &*e.backend.spec.name == backend);
    let probes = &entry.unwrap().backend.live.counters.probes;
    probes[1..].iter().any(|count| count.load(Relaxed) > 0)
}

async fn obey(running: startup::Running, mut inbox: UnboundedReceiver<Command>) {
    while let Some(command) = inbox.recv().await {
        match command {
            Command::Drain => running.drain().await,
            Command::SetDraining(backend, draining) => {
                let set = SetDraining {
                    backend: backend.into(),
                    draining,
                };
                assert!(running.cluster.addr().send(set).await.unwrap());
            }
            Command::ReloadCertificates => running.reload_certificates(),
            // the process of a test ends without ceremony; so does its gateway
            Command::Stop => return,
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.unwrap();
            }
        }
    }
}
