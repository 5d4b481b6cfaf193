//! The command line.

use crate::reload::{self, Origin};
use crate::settings::{self, Environment, Loaded, Source};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Tidegate, an inference router: speaks the OpenAI API in front of a fleet of vLLM, SGLang or
/// other OpenAI-compatible engines, keeps prompts that begin alike together, and routes around
/// engines that fail.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:
  tidegate --config tidegate.yaml             serve
  tidegate check --config tidegate.yaml       say what is wrong with the settings, and exit
  tidegate check --config tidegate.yaml --running http://127.0.0.1:8080
                                              and what differs from a running gateway
  tidegate print-config --reference           every setting with its default and meaning
  TIDEGATE__SERVER__PORT=9000 tidegate ...    override one setting

Signals: SIGTERM and SIGINT drain (see `drain` in the settings); a second one ends at once.
SIGHUP reads the settings again."
)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    files: Files,
}

#[derive(Debug, Clone, Args)]
struct Files {
    /// A settings file; may be repeated, later files override earlier ones
    #[arg(long = "config", value_name = "FILE", global = true)]
    config: Vec<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check the settings: print each fault with the path of its key, exit with 1 if there is any
    Check {
        /// Also print what differs from this running gateway, such as http://127.0.0.1:8080: what a
        /// reload would bring about there, and what only a restart would. Exits with 0 all the same
        #[arg(long, value_name = "URL")]
        running: Option<String>,
        /// The gateway's admin token, where it has one
        #[arg(
            long,
            env = "TIDEGATE_ADMIN_TOKEN",
            hide_env_values = true,
            requires = "running"
        )]
        token: Option<String>,
    },
    /// Print the settings in effect as YAML, secrets masked
    PrintConfig {
        /// Print every key with its default and meaning instead
        #[arg(long)]
        reference: bool,
    },
    /// Ask a running gateway whether it is alive, for containers without curl; exits with 0 or 1
    Healthcheck {
        /// What to ask
        #[arg(long, default_value = "http://127.0.0.1:8080/health")]
        url: String,
        /// Take any answer of HTTP for a sign of life, such as 403 of an S3 server
        #[arg(long)]
        any_status: bool,
    },
}

/// Exit code for faults in settings; wrong arguments exit with 2.
const FAULTY: i32 = 1;

impl Cli {
    /// Does what was asked and answers the exit code.
    pub fn run(self) -> i32 {
        match &self.command {
            Some(Command::PrintConfig { reference: true }) => {
                print!("{}", settings::reference_yaml());
                0
            }
            Some(Command::Healthcheck { url, any_status }) => {
                crate::healthcheck::ask(url, *any_status)
            }
            Some(Command::PrintConfig { .. }) => self.with_settings(|loaded| {
                print!("{}", settings::effective_yaml(&loaded.effective));
                0
            }),
            Some(Command::Check { running, token }) => self.with_settings(|loaded| {
                if let Err(fault) = crate::cache::wiring::check(&loaded.settings.response_cache) {
                    eprintln!("{fault}");
                    return FAULTY;
                }
                if let Err(fault) = crate::access::ring(&loaded.settings.api_keys) {
                    eprintln!("{fault}");
                    return FAULTY;
                }
                if let Err(fault) = crate::tls::Tls::load(&loaded.settings) {
                    eprintln!("{fault}");
                    return FAULTY;
                }
                let count = loaded.settings.backends.len();
                println!("ok: {count} backend{}", if count == 1 { "" } else { "s" });
                running.as_ref().map_or(0, |url| {
                    crate::against::print(url, token.as_deref(), &loaded.effective)
                })
            }),
            None => {
                let watched = reload::Files::new(self.files.config.clone());
                self.with_settings(|loaded| {
                    let files = self.files.clone();
                    let origin = Origin {
                        files: watched,
                        read: Box::new(move || files.load()),
                    };
                    crate::startup::run_from(loaded.settings, Some((origin, loaded.effective)))
                })
            }
        }
    }

    fn with_settings(&self, then: impl FnOnce(Loaded) -> i32) -> i32 {
        match self.files.load() {
            Ok(loaded) => {
                for warning in &loaded.warnings {
                    eprintln!("warning: {warning}");
                }
                then(loaded)
            }
            Err(message) => {
                eprintln!("{message}");
                FAULTY
            }
        }
    }
}

impl Files {
    /// Reads and checks them, and the environment.
    fn load(&self) -> Result<Loaded, String> {
        let environment: Environment = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
            .collect();
        if self.config.is_empty() && !environment.keys().any(|k| k.starts_with("TIDEGATE__")) {
            return Err("no settings: pass --config FILE (`tidegate print-config --reference` shows what goes in it)".into());
        }
        let mut sources = Vec::new();
        for path in &self.config {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path).map_err(|e| format!("{name}: {e}"))?;
            sources.push(Source { name, text });
        }
        settings::load(&sources, &environment).map_err(|faults| {
            let count = faults.0.len();
            format!(
                "{faults}\n{count} fault{} in the settings",
                if count == 1 { "" } else { "s" }
            )
        })
    }
}
