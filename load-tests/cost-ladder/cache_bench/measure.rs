//! Drives the programs and prints what came of it.

use crate::programs::{ENGINE_PORT, PORT, TEXT_BYTES, settings};
use cost_ladder::engine::json_body;
use cost_ladder::load::{Driven, chat, drive_with};
use cost_ladder::process::Process;
use s3_server::{Config, Server};
use std::io;
use std::time::{Duration, Instant, SystemTime};
use storage::{Credentials, Key, RedisSettings, RedisStore, S3Settings, S3Store, Store, Value};

const CONNECTIONS: usize = 32;
/// Answers that are put into memory to see what they take there.
const FILLED: u64 = 60_000;
/// Reads of a raw client.
const RAW_READS: usize = 2000;

const MEMORY: &str = "response_cache: {enabled: true, l1: {max_bytes: 1GiB}}";

/// One measured row.
struct Row {
    rate: f64,
    p50: Duration,
    p99: Duration,
    cpu_us: f64,
}

struct Bench {
    runtime: tokio::runtime::Runtime,
    time: Duration,
    rounds: usize,
    _engine: Process,
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

fn hit(_: usize, _: u64) -> Vec<u8> {
    chat(
        r#"{"model":"m","temperature":0,"messages":[{"role":"user","content":"word and word and word"}],"max_tokens":64}"#,
    )
}

/// One prompt for each connection, so that no two share a lookup.
fn own_hit(connection: usize, _: u64) -> Vec<u8> {
    chat(&format!(
        r#"{{"model":"m","temperature":0,"messages":[{{"role":"user","content":"word and word {connection}"}}],"max_tokens":64}}"#
    ))
}

/// A prompt that nobody has sent before.
fn miss(connection: usize, number: u64) -> Vec<u8> {
    let text = format!(
        "word and word {connection:04}-{number:08}-{:08x}",
        fastrand::u32(..)
    );
    chat(&format!(
        r#"{{"model":"m","temperature":0,"messages":[{{"role":"user","content":"{text}"}}],"max_tokens":64}}"#
    ))
}

/// The same, of a kind that is never cached.
fn bypass(connection: usize, number: u64) -> Vec<u8> {
    let text = format!(
        "word and word {connection:04}-{number:08}-{:08x}",
        fastrand::u32(..)
    );
    chat(&format!(
        r#"{{"model":"m","temperature":1,"messages":[{{"role":"user","content":"{text}"}}],"max_tokens":64}}"#
    ))
}

type Ask = fn(usize, u64) -> Vec<u8>;

/// Measures everything.
pub fn run(secs: u64, rounds: usize) -> io::Result<()> {
    let bench = Bench {
        runtime: tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?,
        time: Duration::from_secs(secs),
        rounds,
        _engine: Process::again(&words(&["engine", "--port", &ENGINE_PORT.to_string()]))?,
    };
    println!(
        "Answers of {} bytes, {CONNECTIONS} connections, medians of {rounds} rounds of {secs} s.\n",
        json_body(TEXT_BYTES).len()
    );
    bench.memory_hits()?;
    bench.misses()?;
    bench.redis()?;
    bench.object_store()?;
    bench.memory_per_byte()
}

impl Bench {
    fn router(&self, cache: &str) -> io::Result<Process> {
        Process::again(&words(&["router", "--settings", &settings(cache)]))
    }

    fn until_up(&self, ask: Ask) -> io::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let drive = drive_with(PORT, 1, Duration::from_millis(50), ask);
            match self.runtime.block_on(drive) {
                Ok(driven) if !driven.latencies.is_empty() => return Ok(()),
                Err(error) if Instant::now() > deadline => return Err(error),
                _ => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn drive(&self, process: &Process, connections: usize, ask: Ask) -> io::Result<Row> {
        let before = process.cpu();
        let mut driven: Driven =
            self.runtime
                .block_on(drive_with(PORT, connections, self.time, ask))?;
        let used = process.cpu() - before;
        let count = driven.latencies.len() as f64;
        Ok(Row {
            rate: count / self.time.as_secs_f64(),
            p50: driven.quantile(0.5),
            p99: driven.quantile(0.99),
            cpu_us: used * 1e6 / count,
        })
    }

    /// Rows of several programs, taken in turns so that all of them see the same machine.
    fn rows(&self, programs: &[(&str, Option<&str>, Ask)]) -> io::Result<()> {
        let mut rows: Vec<Vec<Row>> = programs.iter().map(|_| Vec::new()).collect();
        for _ in 0..self.rounds {
            for ((_, cache, ask), rows) in programs.iter().zip(&mut rows) {
                let process = match cache {
                    Some(cache) => self.router(cache)?,
                    None => Process::again(&words(&["constant", "--port", &PORT.to_string()]))?,
                };
                self.until_up(*ask)?;
                rows.push(self.drive(&process, CONNECTIONS, *ask)?);
            }
        }
        println!("| | requests/s | of the first | p50 us | p99 us | CPU us per request |");
        println!("|---|---|---|---|---|---|");
        let mut first = None;
        for ((name, ..), rows) in programs.iter().zip(&mut rows) {
            rows.sort_by(|a, b| a.rate.total_cmp(&b.rate));
            let row = &rows[rows.len() / 2];
            let first = *first.get_or_insert(row.rate);
            println!(
                "| {name} | {:.0} | {:.0} % | {} | {} | {:.1} |",
                row.rate,
                100.0 * row.rate / first,
                row.p50.as_micros(),
                row.p99.as_micros(),
                row.cpu_us
            );
        }
        println!();
        Ok(())
    }

    fn memory_hits(&self) -> io::Result<()> {
        println!("## Hits in memory\n");
        let quiet = format!("logging: {{access: false}}\n{MEMORY}");
        self.rows(&[
            ("constant answer", None, hit as Ask),
            ("hit in memory", Some(MEMORY), hit),
            ("hit in memory, no access log", Some(&quiet), hit),
        ])
    }

    fn misses(&self) -> io::Result<()> {
        println!("## What a miss adds\n");
        self.rows(&[
            ("cache off", Some(""), miss as Ask),
            ("cache on, never cacheable", Some(MEMORY), bypass),
            ("cache on, every request a miss", Some(MEMORY), miss),
        ])
    }

    fn redis(&self) -> io::Result<()> {
        println!("## Redis\n");
        let redis = redis_servers::Single::start();
        let store = RedisStore::open(
            &RedisSettings {
                url: redis.url(),
                pool_size: 16,
                connect_timeout: Duration::from_secs(3),
                command_timeout: Duration::from_secs(1),
                connection_max_age: Duration::from_secs(600),
                ca_file: None,
            },
            "raw:",
            1 << 20,
        );
        self.raw(&store.map_err(io::Error::other)?)?;
        let cache = format!(
            "response_cache: {{enabled: true, backend: redis, redis: {{url: '{}', fallback_to_memory: false}}}}",
            redis.url()
        );
        self.tier(&cache)
    }

    fn object_store(&self) -> io::Result<()> {
        println!("## S3\n");
        let config = Config::default();
        let server = self.runtime.block_on(Server::start(config.clone()))?;
        let endpoint = server.url();
        let bucket = config.bucket.clone().unwrap_or_default();
        let store = {
            let _inside = self.runtime.enter();
            S3Store::open(S3Settings {
                endpoint: endpoint.clone(),
                bucket: bucket.clone(),
                key_prefix: "raw/".into(),
                region: "us-east-1".into(),
                credentials: Credentials::new(&config.access_key, &config.secret_key),
                ca_file: None,
                connect_timeout: Duration::from_secs(3),
                request_timeout: Duration::from_secs(5),
                value_bytes_max: 1 << 20,
                requests_max: 64,
            })
        };
        self.raw(&store.map_err(io::Error::other)?)?;
        // too large for L1, so that every hit is one of L2
        let cache = format!(
            "response_cache: {{enabled: true, backend: tiered, l1: {{max_value_size: 1}}, l2: {{endpoint: '{endpoint}', bucket: {bucket}, access_key: {}, secret_key: {}}}}}",
            config.access_key, config.secret_key
        );
        self.tier(&cache)
    }

    /// How long a read takes without a router.
    fn raw(&self, store: &dyn Store) -> io::Result<()> {
        let body = json_body(TEXT_BYTES);
        let read = async {
            let key = Key::new("v1/m/t/0123456789abcdef").map_err(io::Error::other)?;
            let expires_at = SystemTime::now() + Duration::from_secs(600);
            let value = Value {
                bytes: body.into(),
                expires_at,
            };
            store.put(&key, value).await.map_err(io::Error::other)?;
            let mut driven = Driven::default();
            for _ in 0..RAW_READS {
                let begun = Instant::now();
                let found = store.get(&key).await.map_err(io::Error::other)?;
                assert!(found.is_some(), "it was just put");
                driven.latencies.push(begun.elapsed());
            }
            Ok::<_, io::Error>(driven)
        };
        let mut driven = self.runtime.block_on(read)?;
        println!(
            "raw client, one read after the other: p50 {} us, p99 {} us\n",
            driven.quantile(0.5).as_micros(),
            driven.quantile(0.99).as_micros()
        );
        Ok(())
    }

    fn tier(&self, cache: &str) -> io::Result<()> {
        let process = self.router(cache)?;
        self.until_up(hit)?;
        let one = self.drive(&process, 1, own_hit)?;
        let many = self.drive(&process, CONNECTIONS, own_hit)?;
        println!("| hits through the router | requests/s | p50 us | p99 us | CPU us |");
        println!("|---|---|---|---|---|");
        for (name, row) in [("1 connection", one), ("32 connections", many)] {
            println!(
                "| {name} | {:.0} | {} | {} | {:.1} |",
                row.rate,
                row.p50.as_micros(),
                row.p99.as_micros(),
                row.cpu_us
            );
        }
        println!();
        Ok(())
    }

    fn memory_per_byte(&self) -> io::Result<()> {
        println!("## Memory\n");
        let quiet = format!("logging: {{access: false}}\n{MEMORY}");
        let process = self.router(&quiet)?;
        self.until_up(bypass)?;
        self.drive(&process, CONNECTIONS, bypass)?; // so that buffers are there before
        let before = process.resident();
        let mut kept = 0;
        while kept < FILLED {
            let drive = drive_with(PORT, CONNECTIONS, Duration::from_millis(500), miss);
            kept += self.runtime.block_on(drive)?.latencies.len() as u64;
        }
        std::thread::sleep(Duration::from_secs(2)); // its sizes are told once a second
        let grown = process.resident().saturating_sub(before);
        let payload = kept * json_body(TEXT_BYTES).len() as u64;
        println!(
            "{kept} answers, {payload} bytes of answers: resident memory grew by {grown}, {:.2} for each byte",
            grown as f64 / payload as f64
        );
        Ok(())
    }
}
