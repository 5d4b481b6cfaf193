//! Six simulated engines and the gateway in one process: something to try without a GPU, Redis,
//! S3 or Docker. Settings: config/demo.yaml.

use clap::Parser;
use engine_sim::{Sim, SimConfig, SimHandle};
use gateway::settings::{self, Environment, Source};
use gateway::startup;
use gateway::telemetry::log;
use std::net::SocketAddr;
use std::process::ExitCode;

const SETTINGS: &str = include_str!("../../config/demo.yaml");
const MODEL: &str = "meta-llama/Llama-3.1-70B-Instruct";
/// The KV roles of the seed's six workers, in the order of config/demo.yaml.
const KV_ROLES: [&str; 6] = [
    "kv_producer",
    "kv_producer",
    "kv_consumer",
    "kv_consumer",
    "kv_consumer",
    "kv_both",
];

/// Starts six simulated engines and Tidegate in front of them, in one process.
#[derive(Debug, Parser)]
struct Args {
    /// Address that the gateway listens on; the engines stay on 127.0.0.1
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port of the gateway
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Port of the first engine; the others follow
    #[arg(long, default_value_t = 9101)]
    engine_port_base: u16,
    /// Speed of the engines: 1 is that of a 70B model on four H100, 0.1 ten times as fast
    #[arg(long, default_value_t = 0.5)]
    time_scale: f64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(code) => ExitCode::from(u8::try_from(code).unwrap_or(1)),
        Err(message) => {
            eprintln!("demo: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<i32, String> {
    let mut environment = Environment::new();
    environment.insert("DEMO_HOST".into(), args.host.clone());
    environment.insert("DEMO_PORT".into(), args.port.to_string());
    let last = args.engine_port_base.checked_add(5);
    let last = last.ok_or("--engine-port-base leaves no room for six ports")?;
    let ports: Vec<u16> = (args.engine_port_base..=last).collect();
    for (i, port) in ports.iter().enumerate() {
        environment.insert(format!("DEMO_ENGINE_{}", i + 1), port.to_string());
    }
    let source = Source {
        name: "config/demo.yaml".into(),
        text: SETTINGS.into(),
    };
    let settings = settings::load(&[source], &environment)
        .map_err(|faults| faults.to_string())?
        .settings;
    let guard = log::start(&settings.logging)?;
    let code = actix_rt::System::new().block_on(async {
        let engines = start_engines(args, &ports)?;
        let code = startup::serve(settings, |running| {
            print_what_to_try(running.address, args.engine_port_base);
        })
        .await;
        for engine in engines {
            engine.stop().await;
        }
        Ok(code)
    });
    drop(guard);
    code
}

fn start_engines(args: &Args, ports: &[u16]) -> Result<Vec<SimHandle>, String> {
    let mut engines = Vec::new();
    for (port, role) in ports.iter().zip(KV_ROLES) {
        let transfer = format!(
            r#"{{"kv_connector":"VastKVConnector","kv_role":"{role}","kv_connector_extra_config":{{"vast_endpoint":"http://vast-cluster.prod.example.com:8080","kv_namespace":"prod/inference/kv-cache"}}}}"#
        );
        let words = [
            "engine-sim",
            "serve",
            MODEL,
            "--host",
            "127.0.0.1",
            "--port",
            &port.to_string(),
            "--tensor-parallel-size",
            "4",
            "--enable-prefix-caching",
            "--max-model-len",
            "32768",
            "--kv-transfer-config",
            &transfer,
            "--sim-kv-store",
            "in-process",
            "--sim-time-scale",
            &args.time_scale.to_string(),
        ]
        .map(str::to_owned);
        let config = SimConfig::from_args(words).map_err(|error| error.to_string())?;
        let engine = Sim::start(config);
        engines.push(engine.map_err(|error| format!("engine on port {port}: {error}"))?);
    }
    Ok(engines)
}

fn print_what_to_try(address: SocketAddr, first_engine: u16) {
    let last_engine = first_engine + 5;
    println!(
        r#"
Tidegate serves on http://{address}, six simulated engines on ports {first_engine} to {last_engine}.

Stream an answer:
  curl -N http://{address}/v1/chat/completions -H 'content-type: application/json' -d '
    {{"model": "{MODEL}", "stream": true,
     "messages": [{{"role": "user", "content": "Tell me about the tides."}}]}}'

See which engine answers, and that the same beginning goes to the same one (x-tidegate-backend):
  curl -s -D - -o /dev/null http://{address}/v1/completions -H 'content-type: application/json' -d '
    {{"model": "{MODEL}", "prompt": "The moon pulls", "max_tokens": 16}}'

See a long prompt computed by one engine and answered by another (x-tidegate-path, x-tidegate-prefill-backend), and
the second time answered from storage alone:
  python3 -c "import json; print(json.dumps({{'model': '{MODEL}', 'prompt': 'The sea is wide. ' * 500, 'max_tokens': 16}}))" > /tmp/long.json
  curl -s -D - -o /dev/null http://{address}/v1/completions -H 'content-type: application/json' -d @/tmp/long.json

See an answer come out of the cache: send this twice (x-cache, x-cache-tier, age):
  curl -s -D - http://{address}/v1/chat/completions -H 'content-type: application/json' -d '
    {{"model": "{MODEL}", "temperature": 0, "max_tokens": 16,
     "messages": [{{"role": "user", "content": "How deep is the sea?"}}]}}'

Look inside:
  curl http://{address}/v1/models
  curl http://{address}/ready
  curl http://{address}/metrics
  curl http://{address}/admin/cache

Ctrl-C stops it all."#
    );
}
