//! Starting, leaving, load, stopping.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod support;

use engine_sim::{SimConfig, Speed};
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::time::Duration;
use support::{PATIENCE, fast, get, open, post, slow, start, until};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

fn endless(stream: bool) -> String {
    json!({"prompt": "Go on", "max_tokens": 4000, "ignore_eos": true, "stream": stream}).to_string()
}

#[actix_web::test]
async fn a_client_that_leaves_a_stream_is_noticed() {
    let sim = start(slow());
    let mut socket = open(sim.addr(), "POST", "/v1/completions", "", &endless(true)).await;
    let mut some = [0; 64];
    timeout(PATIENCE, socket.read_exact(&mut some))
        .await
        .unwrap()
        .unwrap();
    until("the request runs", || sim.stats().running == 1).await;
    drop(socket);
    until("the request is aborted", || {
        sim.stats().aborted_total == 1 && sim.stats().running == 0
    })
    .await;
    assert_eq!(sim.stats().kv_blocks_used, 0);
}

#[actix_web::test]
async fn a_client_that_leaves_before_a_whole_answer_is_noticed() {
    let sim = start(slow());
    let socket = open(sim.addr(), "POST", "/v1/completions", "", &endless(false)).await;
    until("the request runs", || sim.stats().running == 1).await;
    drop(socket);
    until("the request is aborted", || {
        sim.stats().aborted_total == 1 && sim.stats().running == 0
    })
    .await;
    assert_eq!(sim.stats().kv_blocks_used, 0);
}

#[actix_web::test]
async fn a_client_that_leaves_after_the_head_before_the_first_token_is_noticed() {
    let speed = Speed {
        overhead_ms: 60_000.0,
        ..slow().speed
    };
    let sim = start(SimConfig { speed, ..slow() });
    let mut socket = open(sim.addr(), "POST", "/v1/completions", "", &endless(true)).await;
    let mut head = [0; 15];
    timeout(PATIENCE, socket.read_exact(&mut head))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    until("the request arrives", || sim.stats().waiting == 1).await;
    drop(socket);
    until("it is gone", || {
        sim.stats().waiting == 0 && sim.stats().aborted_total == 1
    })
    .await;
}

#[actix_web::test]
async fn a_client_that_leaves_the_queue_is_noticed() {
    let sim = start(SimConfig {
        max_num_seqs: 1,
        ..slow()
    });
    let first = open(sim.addr(), "POST", "/v1/completions", "", &endless(true)).await;
    until("the first one runs", || sim.stats().running == 1).await;
    let second = open(sim.addr(), "POST", "/v1/completions", "", &endless(true)).await;
    until("the second one waits", || sim.stats().waiting == 1).await;
    drop(second);
    until("the second one is gone", || {
        sim.stats().waiting == 0 && sim.stats().aborted_total == 1
    })
    .await;
    assert_eq!(sim.stats().running, 1);
    drop(first);
    until("the first one is gone", || sim.stats().running == 0).await;
}

#[actix_web::test]
async fn a_hanging_engine_gives_no_answer_but_looks_healthy() {
    let sim = start(fast());
    sim.faults().hang(true);
    let mut socket = open(sim.addr(), "POST", "/v1/completions", "", &endless(false)).await;
    until("the request came", || sim.stats().requests_total == 1).await;
    assert_eq!(get(sim.addr(), "/health").await.status, 200);
    let mut byte = [0];
    assert!(
        timeout(Duration::from_millis(20), socket.read(&mut byte))
            .await
            .is_err()
    );
}

#[actix_web::test]
async fn a_crowd_larger_than_the_cache_is_served_completely() {
    let sim = start(SimConfig {
        num_blocks: 40,
        max_model_len: 512,
        ..fast()
    });
    let ask = |number: u32| {
        let body = json!({"prompt": format!("Story {number} begins"), "max_tokens": 100, "ignore_eos": true});
        post(sim.addr(), "/v1/completions", body)
    };
    for answer in join_all((0..20).map(ask)).await {
        assert_eq!(answer.json()["usage"]["completion_tokens"], 100);
    }
    until("the engine is idle", || sim.stats().running == 0).await;
    let stats = sim.stats();
    assert!(
        stats.preemptions_total > 0,
        "20 answers of 7 blocks do not fit into 40"
    );
    assert_eq!(
        (stats.kv_blocks_used, stats.waiting, stats.generation_tokens),
        (0, 0, 2000)
    );
}

#[actix_web::test]
async fn simulated_time_passes_as_scaled() {
    let config = SimConfig {
        time_scale: 0.1,
        ..slow()
    };
    let sim = start(config);
    let begin = Instant::now();
    let body = json!({"prompt": "Go on", "max_tokens": 100, "ignore_eos": true});
    post(sim.addr(), "/v1/completions", body).await;
    let took = begin.elapsed();
    assert!(
        took >= Duration::from_millis(180),
        "100 steps of 20 ms at a tenth, less what catching up allows: {took:?}"
    );
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[actix_web::test]
async fn it_refuses_connections_until_it_is_loaded() {
    let sim = start(SimConfig {
        startup_delay: Duration::from_millis(400),
        time_scale: 1.0,
        ..slow()
    });
    assert!(TcpStream::connect(sim.addr()).await.is_err());
    let deadline = Instant::now() + PATIENCE;
    while TcpStream::connect(sim.addr()).await.is_err() {
        assert!(Instant::now() < deadline, "it never listens");
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(get(sim.addr(), "/health").await.status, 200);
}

#[actix_web::test]
async fn stopping_cuts_answers_and_frees_the_port() {
    let sim = start(slow());
    let addr = sim.addr();
    let mut socket = open(addr, "POST", "/v1/completions", "", &endless(true)).await;
    until("the request runs", || sim.stats().running == 1).await;
    timeout(PATIENCE, sim.stop()).await.unwrap();
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, socket.read_to_end(&mut rest))
        .await
        .unwrap(); // ended or reset, but over
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    let again = start(SimConfig {
        port: addr.port(),
        ..fast()
    });
    assert_eq!(again.addr(), addr);
    assert_eq!(get(addr, "/health").await.status, 200);
}

#[actix_web::test]
async fn an_idle_connection_closes_by_itself_like_uvicorns() {
    let sim = start(fast());
    let mut socket = TcpStream::connect(sim.addr()).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut socket, b"GET /health HTTP/1.1\r\nhost: sim\r\n\r\n")
        .await
        .unwrap();
    let begin = Instant::now();
    let mut all = Vec::new();
    timeout(PATIENCE, socket.read_to_end(&mut all))
        .await
        .unwrap()
        .unwrap();
    assert!(all.starts_with(b"HTTP/1.1 200") && begin.elapsed() > Duration::from_secs(4));
}

#[actix_web::test]
async fn the_six_seed_commands_serve() {
    let script = include_str!("../../../config/seed/5-engine-commands.txt").replace("\\\n", " ");
    let mut served = 0;
    for command in script.split("vllm serve ").skip(1) {
        // Flags and JSON apart: the JSON stands in single quotes.
        let mut words: Vec<String> = vec!["engine-sim".into(), "serve".into()];
        for (at, part) in command.split('\'').enumerate() {
            match at % 2 {
                0 => words.extend(part.split_whitespace().map(str::to_owned)),
                _ => words.push(part.to_owned()),
            }
        }
        let config = SimConfig {
            host: "127.0.0.1".into(),
            port: 0,
            time_scale: 0.001,
            ..SimConfig::from_args(words).unwrap()
        };
        let sim = start(config);
        let body = json!({"model": "meta-llama/Llama-3.1-70B-Instruct", "messages": [{"role": "user", "content": "Hello"}]});
        let answer = post(sim.addr(), "/v1/chat/completions", body).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_ne!(
            answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"],
            Value::Null
        );
        served += 1;
    }
    assert_eq!(served, 6);
}
