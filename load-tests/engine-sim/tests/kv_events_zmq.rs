//! The ZeroMQ sockets of a running engine: sequences, replays, gaps, restarts, and who connects to whom.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod support;
#[path = "support/zmq.rs"]
mod zmq;

use engine_sim::{KvEventQuirks, KvEvents, ReplayFraming, SimConfig};
use serde_json::json;
use support::{PATIENCE, fast, long_text, post, start, until};
use tokio::time::timeout;
use zeromq::{Socket, SocketRecv, SubSocket};
use zmq::{ask, ask_times, assert_like_the_log, next, publishing, quirky, replay, seqs, subscribe};

#[actix_web::test]
async fn a_subscriber_sees_a_contiguous_sequence_and_a_replay_the_same_from_anywhere() {
    let sim = start(publishing(fast()));
    let (mut socket, first) = subscribe(&sim, || ask(&sim)).await;
    ask_times(&sim, 5).await;
    let last = sim.events().last().unwrap().seq;
    let mut live = vec![first];
    while live.last().unwrap().seq < last {
        live.push(next(&mut socket).await);
    }
    let first = live[0].seq;
    assert_eq!(seqs(&live), (first..=last).collect::<Vec<_>>());
    assert!(
        live.iter()
            .all(|message| message.topic.as_deref() == Some("kv@sim"))
    );

    let all = replay(&sim, 0).await;
    assert_like_the_log(&sim, &all, true);
    for (live, again) in live.iter().zip(&all[first as usize..]) {
        assert_eq!(live.payload, again.payload);
    }
    assert_eq!(
        seqs(&replay(&sim, last - 2).await),
        [last - 2, last - 1, last]
    );
    assert!(replay(&sim, last + 1).await.is_empty());
    sim.stop().await;
}

#[actix_web::test]
async fn replay_answers_have_the_topic_or_not() {
    for (replay_framing, topic) in [
        (ReplayFraming::Old, None),
        (ReplayFraming::New, Some("kv@sim")),
    ] {
        let sim = start(quirky(KvEventQuirks {
            replay_framing,
            ..KvEventQuirks::default()
        }));
        ask(&sim).await;
        let messages = replay(&sim, 0).await;
        assert!(!messages.is_empty());
        assert!(
            messages
                .iter()
                .all(|message| message.topic.as_deref() == topic)
        );
    }
}

#[actix_web::test]
async fn forced_gaps_are_in_the_live_sequence_and_a_replay_fills_them() {
    let sim = start(quirky(KvEventQuirks {
        drop_every: Some(3),
        ..KvEventQuirks::default()
    }));
    let (mut socket, first) = subscribe(&sim, || ask(&sim)).await;
    ask_times(&sim, 6).await;
    let first = first.seq;
    let last = sim.events().last().unwrap().seq;
    let due: Vec<u64> = (first..=last).filter(|seq| (seq + 1) % 3 != 0).collect();
    let mut live = vec![first];
    while live.len() < due.len() {
        live.push(next(&mut socket).await.seq);
    }
    assert_eq!(live, due);
    assert_eq!(seqs(&replay(&sim, 0).await), (0..=last).collect::<Vec<_>>());
}

#[actix_web::test]
async fn a_lost_batch_is_nowhere() {
    let sim = start(quirky(KvEventQuirks {
        lose_seq: Some(1),
        ..KvEventQuirks::default()
    }));
    ask_times(&sim, 4).await;
    assert_eq!(seqs(&replay(&sim, 0).await)[..3], [0, 2, 3]);
    assert_eq!(seqs(&replay(&sim, 1).await)[0], 2, "later than asked");
}

#[actix_web::test]
async fn the_ring_forgets_the_oldest_batches() {
    let mut config = publishing(fast());
    config.kv_events.buffer_steps = 3;
    let sim = start(config);
    ask_times(&sim, 6).await;
    let last = sim.events().last().unwrap().seq;
    assert_eq!(
        seqs(&replay(&sim, 0).await),
        [last - 2, last - 1, last],
        "later than asked"
    );
}

#[actix_web::test]
async fn a_reordered_batch_arrives_after_its_successor() {
    let sim = start(quirky(KvEventQuirks {
        reorder_every: Some(4),
        ..KvEventQuirks::default()
    }));
    let (mut socket, first) = subscribe(&sim, || ask(&sim)).await;
    ask_times(&sim, 10).await;
    let mut live = vec![first.seq];
    while live.len() < 9 {
        live.push(next(&mut socket).await.seq);
    }
    let swapped: Vec<&[u64]> = live
        .windows(2)
        .filter(|pair| pair[1] + 1 == pair[0])
        .collect();
    assert!(!swapped.is_empty(), "{live:?}");
    assert!(swapped.iter().all(|pair| (pair[1] + 1) % 4 == 0));
}

#[actix_web::test]
async fn a_restart_counts_from_zero_over_the_same_connection_and_nothing_is_cached() {
    let sim = start(publishing(fast()));
    let (mut socket, _) = subscribe(&sim, || ask(&sim)).await;
    let body = json!({"prompt": long_text(), "max_tokens": 1});
    post(sim.addr(), "/v1/completions", body.clone()).await;
    sim.restart_events().await;
    assert!(sim.events().is_empty() && replay(&sim, 0).await.is_empty());
    let again = post(sim.addr(), "/v1/completions", body).await;
    let cached = &again.json()["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(*cached, 0);
    let restarted = timeout(PATIENCE, async {
        loop {
            let message = next(&mut socket).await;
            if message.seq == 0 {
                return message;
            }
        }
    });
    let restarted = restarted.await.expect("no batch has number 0");
    assert_eq!(restarted.payload, replay(&sim, 0).await[0].payload);
}

#[actix_web::test]
async fn a_restart_comes_after_as_many_batches_as_told() {
    let sim = start(quirky(KvEventQuirks {
        restart_after: Some(5),
        ..KvEventQuirks::default()
    }));
    ask_times(&sim, 12).await;
    let kept = seqs(&replay(&sim, 0).await);
    assert_eq!(kept[0], 0);
    let all = sim.events();
    assert!(kept.len() >= 7, "it happens once: {kept:?}");
    assert_eq!(all.len(), kept.len());
}

#[actix_web::test]
async fn a_plain_address_is_connected_to_and_again_after_the_subscriber_left() {
    let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", probe.local_addr().unwrap());
    drop(probe);
    let mut config = publishing(fast());
    config.kv_events.endpoint.clone_from(&endpoint);
    let sim = start(config);
    assert_eq!(sim.kv_endpoint(), Some(endpoint.clone()));
    for _ in 0..2 {
        let mut socket = SubSocket::new();
        socket.bind(&endpoint).await.unwrap();
        socket.subscribe("").await.unwrap();
        let arrived = timeout(PATIENCE, async {
            loop {
                ask(&sim).await;
                let brief = std::time::Duration::from_millis(20);
                if let Ok(message) = timeout(brief, socket.recv()).await {
                    return message.unwrap();
                }
            }
        });
        assert_eq!(arrived.await.expect("no event arrives").len(), 3);
        assert!(socket.close().await.is_empty());
    }
}

#[actix_web::test]
async fn without_the_switch_there_is_no_socket_and_with_it_a_taken_port_is_told() {
    let sim = start(fast());
    assert_eq!((sim.kv_endpoint(), sim.replay_endpoint()), (None, None));
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let with_endpoint = |endpoint: String| SimConfig {
        kv_events: KvEvents {
            enable_kv_cache_events: true,
            endpoint,
            ..KvEvents::default()
        },
        ..fast()
    };
    let port = taken.local_addr().unwrap().port();
    let config = with_endpoint(format!("tcp://*:{port}"));
    let fault = engine_sim::Sim::start(config).unwrap_err();
    assert_eq!(fault.kind(), std::io::ErrorKind::AddrInUse);
    let fault = engine_sim::Sim::start(with_endpoint("ipc:///tmp/x".into())).unwrap_err();
    assert_eq!(fault.kind(), std::io::ErrorKind::InvalidInput);
}

#[actix_web::test]
async fn a_stopped_engine_leaves_its_ports() {
    let sim = start(publishing(fast()));
    let ports: Vec<String> = [sim.kv_endpoint(), sim.replay_endpoint()]
        .into_iter()
        .map(|endpoint| endpoint.unwrap().replace("tcp://", ""))
        .collect();
    sim.stop().await;
    for port in &ports {
        std::net::TcpListener::bind(port).unwrap();
    }

    let dropped = start(publishing(fast()));
    let port = dropped.kv_endpoint().unwrap().replace("tcp://", "");
    drop(dropped);
    until("the port is free", || {
        std::net::TcpListener::bind(&port).is_ok()
    })
    .await;
}
