//! Starts processes, drives them, reads their CPU time, prints the table.

use crate::rungs::Rung;
use clap::ValueEnum;
use cost_ladder::load::{Shape, drive};
use cost_ladder::process::Process;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

const ENGINE_PORT: u16 = 18_901;
const RUNG_PORT: u16 = 18_902;
const CONNECTIONS: usize = 32;
const SHAPES: [(&str, Shape); 4] = [
    ("json", Shape::Json(64)),
    ("stream", Shape::Stream),
    ("8k", Shape::Json(8 << 10)),
    ("64k", Shape::Json(64 << 10)),
];
/// Measures and prints microseconds of CPU per request, and requests per second.
pub fn run(secs: u64, rounds: usize, only: &[Rung]) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let _engine = Process::again(&["engine".into(), "--port".into(), ENGINE_PORT.to_string()])?;
    let rungs: Vec<Rung> = Rung::value_variants()
        .iter()
        .copied()
        .filter(|r| only.is_empty() || only.contains(r))
        .collect();
    let mut results: BTreeMap<(Rung, &str), Vec<(f64, f64)>> = BTreeMap::new();
    for round in 1..=rounds {
        for rung in &rungs {
            let Some(process) = start_rung(*rung)? else {
                continue;
            };
            for (name, shape) in SHAPES {
                runtime.block_on(until_up(shape))?;
                let before = process.cpu();
                let answered = runtime.block_on(drive(
                    RUNG_PORT,
                    shape,
                    CONNECTIONS,
                    Duration::from_secs(secs),
                ))?;
                let used = process.cpu() - before;
                let (us, rate) = (used * 1e6 / answered as f64, answered as f64 / secs as f64);
                eprintln!("round {round} of {rounds}: {rung:?} {name}: {us:.1} us, {rate:.0}/s");
                results.entry((*rung, name)).or_default().push((us, rate));
            }
        }
    }
    print(&rungs, &mut results);
    Ok(())
}

fn start_rung(rung: Rung) -> io::Result<Option<Process>> {
    // fails when something listens there: that would be measured in the rung's place
    drop(std::net::TcpListener::bind(("127.0.0.1", RUNG_PORT))?);
    if rung == Rung::Nginx {
        return start_nginx();
    }
    let name = rung
        .to_possible_value()
        .map(|v| v.get_name().to_owned())
        .unwrap_or_default();
    let words = [
        "serve",
        "--rung",
        &name,
        "--port",
        &RUNG_PORT.to_string(),
        "--engine",
        &ENGINE_PORT.to_string(),
    ];
    Process::again(&words.map(str::to_owned)).map(Some)
}

/// nginx with the same task; left out where it is not installed.
fn start_nginx() -> io::Result<Option<Process>> {
    let dir: PathBuf = std::env::temp_dir().join(format!("cost-ladder-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let text = format!(
        "daemon off; worker_processes {workers}; pid {d}/pid; error_log {d}/err;
events {{ worker_connections 1024; }}
http {{ access_log off; client_body_temp_path {d}/b; proxy_temp_path {d}/p; fastcgi_temp_path {d}/f; uwsgi_temp_path {d}/u; scgi_temp_path {d}/s;
client_max_body_size 64m; client_body_buffer_size 256k; keepalive_requests 1000000;
upstream e {{ server 127.0.0.1:{ENGINE_PORT}; keepalive 256; keepalive_requests 1000000; }}
server {{ listen 127.0.0.1:{RUNG_PORT}; location / {{ proxy_pass http://e; proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_buffering off; }} }} }}",
        d = dir.display()
    );
    let config = dir.join("nginx.conf");
    std::fs::write(&config, text)?;
    match Command::new("/usr/sbin/nginx")
        .arg("-p")
        .arg(&dir)
        .arg("-c")
        .arg(&config)
        .stderr(Stdio::null())
        .spawn()
    {
        Ok(child) => Ok(Some(Process::of(child))),
        Err(_) => {
            eprintln!("nginx is not installed: its row is left out");
            Ok(None)
        }
    }
}

async fn until_up(shape: Shape) -> io::Result<()> {
    let mut last = None;
    for _ in 0..200 {
        match drive(RUNG_PORT, shape, CONNECTIONS, Duration::from_millis(200)).await {
            Ok(n) if n > 0 => return Ok(()),
            Ok(_) => {}
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    Err(last.unwrap_or_else(|| io::Error::other("no answer")))
}

fn median(values: &mut [(f64, f64)]) -> (f64, f64) {
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    values[values.len() / 2]
}

fn print(rungs: &[Rung], results: &mut BTreeMap<(Rung, &str), Vec<(f64, f64)>>) {
    println!("CPU per request in us (requests/s), median:\n");
    println!("| rung | small JSON | 64-chunk stream | 8 KiB prompt | 64 KiB prompt |");
    println!("|---|---|---|---|---|");
    for rung in rungs {
        let mut cells = Vec::new();
        for (name, _) in SHAPES {
            if let Some(values) = results.get_mut(&(*rung, name)) {
                let (us, rate) = median(values);
                cells.push(format!("{us:.1} ({rate:.0})"));
            }
        }
        if !cells.is_empty() {
            println!("| {} | {} |", rung.title(), cells.join(" | "));
        }
    }
}
