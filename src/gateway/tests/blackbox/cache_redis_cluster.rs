//! The cache in a Redis Cluster of three nodes, of which the settings name one.

use crate::cache::{engine, numbered, text, zero};
use crate::cache_faults::BOUND;
use crate::cache_tiers::{ask, until_stored};
use crate::support::stores::{PATIENT, redis_only};
use crate::support::{Client, DEADLINE, Gateway, Upstream, wait_until};
use redis_servers::Cluster;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

const PROMPTS: usize = 50;

fn ask_all(gateway: &Gateway) -> Vec<String> {
    (0..PROMPTS)
        .map(|number| ask(gateway, &format!("prompt {number}")))
        .collect()
}

fn keys_of_nodes(cluster: &Cluster) -> Vec<usize> {
    let size = |node| cluster.ask(node, &["DBSIZE"]);
    let sizes = (0..cluster.nodes()).map(size);
    sizes
        .map(|size| size.trim_start_matches(':').parse().unwrap())
        .collect()
}

#[test]
fn answers_are_kept_on_all_nodes_and_removed_from_all() {
    let (engine, cluster) = (engine(), Cluster::start());
    let gateway = Gateway::with(
        &engine.yaml_for("a", &["m", "other"]),
        &redis_only(&cluster.url(), ""),
    );
    assert!(ask_all(&gateway).iter().all(|said| said == "MISS"));
    gateway.assert_idle();
    until_stored(&gateway, ("redis", PROMPTS as u64));
    assert!(ask_all(&gateway).iter().all(|said| said == "HIT redis"));
    assert_eq!(engine.count(), PROMPTS);
    // another gateway, by another node
    let two = Gateway::start(&[("a", &engine)], &redis_only(&cluster.url_of(2), ""));
    assert!(ask_all(&two).iter().all(|said| said == "HIT redis"));
    let other = zero("hi").replace("\"m\"", "\"other\"");
    gateway.chat(&other);
    gateway.assert_idle();
    // locks lapse by themselves or are given back
    wait_until("nothing but answers is there", DEADLINE, || {
        keys_of_nodes(&cluster).iter().sum::<usize>() == PROMPTS + 1
    });
    assert!(
        keys_of_nodes(&cluster).iter().all(|keys| *keys > 0),
        "{:?}",
        keys_of_nodes(&cluster)
    );
    let mut admin = Client::connect(&gateway);
    admin.send("DELETE /admin/cache?model=m HTTP/1.1\r\nhost: x\r\n\r\n");
    let told = admin.answer().json();
    assert_eq!(told["complete"], true, "{told}");
    assert_eq!(told["tiers"][0]["removed"], PROMPTS, "{told}");
    assert_eq!(keys_of_nodes(&cluster).iter().sum::<usize>(), 1);
    assert_eq!(ask(&gateway, "prompt 7"), "MISS");
}

#[test]
fn while_a_node_is_away_requests_go_on_and_the_others_serve() {
    let (engine, mut cluster) = (engine(), Cluster::start());
    // with the default limit of a lookup, and without memory in its place
    let settings = redis_only(&cluster.url(), "")
        .replace(PATIENT, "type: redis")
        .replace("fallback_to_memory: true", "fallback_to_memory: false");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    ask_all(&gateway);
    gateway.assert_idle();
    cluster.kill(0); // which the settings name
    let mut hits = 0;
    // failures in a row, of keys that happen to be of that node, may make it rest for a while
    wait_until("the others serve", DEADLINE, || {
        for number in 0..PROMPTS {
            let begun = Instant::now();
            let said = ask(&gateway, &format!("prompt {number}")); // is a 200
            assert!(begun.elapsed() < BOUND, "{:?}", begun.elapsed());
            hits += usize::from(said == "HIT redis");
        }
        hits >= PROMPTS / 2
    });
    cluster.start_again(0);
    wait_until("every answer is served again", DEADLINE, || {
        ask_all(&gateway);
        gateway.assert_idle();
        ask_all(&gateway).iter().all(|said| said == "HIT redis")
    });
}

#[test]
fn nobody_gets_anothers_answer_out_of_a_cluster() {
    let cluster = Cluster::start();
    let engine = Upstream::start(|request, wire| {
        let body = request.json();
        let said = body["messages"][0]["content"].as_str().unwrap();
        if said.ends_with('7') && request.number % 3 == 0 {
            wire.reset();
        } else {
            wire.json("200 OK", &numbered(0).replace("answer 0", said));
        }
    });
    let settings = format!(
        "server: {{ workers: 2 }}\ncircuit_breaker: {{ enabled: false }}\n{}",
        redis_only(&cluster.url(), "")
    );
    let gateways = [0, 1].map(|_| Gateway::start(&[("a", &engine)], &settings));
    let served = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..16usize {
            let (gateways, served) = (&gateways, &served);
            scope.spawn(move || {
                for turn in 0..40usize {
                    // some are alone, some meet others here or at the other gateway
                    let token = format!("token-{}-{}", (thread % 4) * 1000, turn / 2);
                    let mut client = Client::connect(&gateways[(thread / 4 + turn) % 2]);
                    client.start_chat(zero(&token));
                    if turn % 10 == 9 {
                        client.reset();
                        continue;
                    }
                    let answer = client.answer();
                    if answer.status == 200 {
                        assert_eq!(text(&answer), token);
                        served.fetch_add(1, Relaxed);
                    }
                }
            });
        }
    });
    assert!(served.load(Relaxed) > 500, "{served:?}");
    gateways.iter().for_each(Gateway::assert_idle);
}
