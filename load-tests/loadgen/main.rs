//! `loadgen`: asks a router or an engine as many clients would, and says what they saw.

mod args;
mod client;
mod pace;
mod picture;
mod progress;
mod report;
mod workload;
mod zipf;

use args::Args;
use bytes::Bytes;
use clap::Parser;
use client::Client;
use std::process::ExitCode;
use workload::Ask;

/// The body of a request.
fn body(args: &Args, ask: &Ask) -> Bytes {
    let messages = ask.messages.iter();
    let messages = messages.map(|m| serde_json::json!({"role": m.role, "content": &*m.text}));
    let mut body = serde_json::json!({
        "model": args.model,
        "messages": messages.collect::<Vec<_>>(),
        "max_tokens": ask.answer_tokens,
        "stream": !args.json_answers,
    });
    if !args.json_answers {
        body["stream_options"] = serde_json::json!({"include_usage": true});
    }
    if args.ignore_eos {
        body["ignore_eos"] = true.into();
    }
    Bytes::from(body.to_string())
}

fn run(args: Args) -> Result<bool, String> {
    let asks = args.asks()?;
    let (pace, bounds) = (args.pace(), args.bounds());
    let client = Client::new(args.target()?, args.request_limit());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = runtime.map_err(|error| format!("start: {error}"))?;
    let seed = args.seed;
    let (title, outputs) = (
        args.title(asks.len()),
        (args.json.clone(), args.svg.clone()),
    );
    let body = Box::new(move |ask: &Ask| body(&args, ask));
    let local = tokio::task::LocalSet::new();
    let ran = local.block_on(
        &runtime,
        pace::run((client, body), asks, (pace, bounds, seed)),
    );
    let (report, distributions) = report::report(&ran, pace.is_open());
    println!("{title}\n\n{}", report.markdown());
    let (json, svg) = outputs;
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?;
        std::fs::write(&path, text + "\n")
            .map_err(|error| format!("--json {}: {error}", path.display()))?;
    }
    if let Some(path) = svg {
        let picture = picture::picture(&title, &ran, &distributions, pace.is_open());
        std::fs::write(&path, picture)
            .map_err(|error| format!("--svg {}: {error}", path.display()))?;
    }
    if report.requests == 0 {
        return Err("no request was sent".into());
    }
    Ok(!report.has_errors())
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("loadgen: {error}");
            ExitCode::from(2)
        }
    }
}
