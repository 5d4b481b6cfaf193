//! Equal requests at one time: one call, every client served, whoever leaves and whatever fails.

use crate::cache::{ON, cached, engine, numbered, text, zero};
use crate::support::sse::{DONE, delta, finish, parse, text_of};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, chat_stream, ms, user, wait_until,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

fn zero_stream(text: &str) -> String {
    chat_stream(&format!("{}, \"temperature\": 0", user(text)))
}

/// Clients that have sent the same request, whose answers are still to be read.
fn crowd(gateway: &Gateway, size: usize, body: &str) -> Vec<Client> {
    let send = |_| {
        let mut client = Client::connect(gateway);
        client.start_chat(body);
        client
    };
    let clients: Vec<Client> = (0..size).map(send).collect();
    wait_until("every request has come in", DEADLINE, || {
        gateway.inner.requests.count() >= size
    });
    clients
}

#[test]
fn five_hundred_equal_requests_make_one_call_and_all_stream_as_it_comes() {
    let (go, end) = (Signal::new(), Signal::new());
    let (wait, finishes) = (go.clone(), end.clone());
    let engine = Upstream::start(move |_, wire| {
        wait.wait();
        wire.stream_head();
        wire.chunk(delta("one "));
        finishes.wait();
        wire.chunk([&delta("two"), &finish("stop"), DONE].concat());
        wire.end();
    });
    let gateway = Gateway::start(
        &[("a", &engine)],
        &format!("server: {{ workers: 2 }}\n{ON}"),
    );
    let mut clients = crowd(&gateway, 500, &zero_stream("hi"));
    go.raise();
    // all of them have the beginning before there is more
    let mut answers: Vec<_> = clients
        .iter_mut()
        .map(|client| {
            let mut answer = client.head();
            assert!(client.read_until(&mut answer, &delta("one ")));
            answer
        })
        .collect();
    end.raise();
    let mut states = [0, 0];
    for (client, answer) in clients.iter_mut().zip(&mut answers) {
        while client.next_piece(answer) {}
        assert_eq!(text_of(&parse(&answer.body)), "one two");
        assert!(answer.text().ends_with(DONE));
        states[usize::from(cached(answer) == ("HIT", Some("flight")))] += 1;
    }
    assert_eq!(states, [1, 499]);
    gateway.assert_idle();
    assert_eq!(engine.count(), 1);
    assert_eq!(
        gateway.metric("tidegate_cache_requests_total", &["result=\"joined\""]),
        499.0
    );
    assert_eq!(
        gateway.metric("tidegate_requests_total", &["route=\"chat\""]),
        500.0
    );
    assert_eq!(gateway.metric("tidegate_cache_flight_bytes", &[]), 0.0);
    assert_eq!(
        gateway.chat(&zero_stream("hi")).header("x-cache-tier"),
        Some("memory")
    );
}

#[test]
fn the_call_outlives_the_client_that_began_it_and_ends_with_the_last_one() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |request, wire| {
        if request.number == 1 {
            wire.hang();
            return;
        }
        wire.stream_head();
        wire.chunk(delta("one "));
        wait.wait();
        wire.chunk([&delta("two"), &finish("stop"), DONE].concat());
        wire.end();
    });
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let mut clients = crowd(&gateway, 3, &zero_stream("hi"));
    let leader = clients.remove(0);
    leader.reset();
    wait_until("it has left", DEADLINE, || {
        gateway.inner.requests.count() == 2
    });
    let mut late = Client::connect(&gateway);
    late.start_chat(zero_stream("hi"));
    clients.push(late);
    wait_until("it has come", DEADLINE, || {
        gateway.inner.requests.count() == 3
    });
    go.raise();
    for client in &mut clients {
        let answer = client.answer();
        assert_eq!(text_of(&parse(&answer.body)), "one two");
    }
    gateway.assert_idle();
    // of the next, nobody stays
    let clients = crowd(&gateway, 3, &zero_stream("other"));
    engine.wait_for_requests(2);
    clients.into_iter().for_each(Client::reset);
    engine.wait_for_close(1);
    gateway.assert_idle();
    assert_eq!(engine.count(), 2);
}

#[test]
fn a_failure_reaches_one_waiter_at_a_time_and_three_calls_are_the_most() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |_, wire| {
        wait.wait();
        wire.fin(); // before a byte: worth another try
    });
    let settings =
        format!("retry: {{ max_attempts: 1 }}\ncircuit_breaker: {{ enabled: false }}\n{ON}");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let clients = crowd(&gateway, 100, &zero("hi"));
    go.raise();
    let statuses: Vec<u16> = clients
        .into_iter()
        .map(|mut client| client.answer().status)
        .collect();
    assert!(statuses.iter().all(|status| *status == 502), "{statuses:?}");
    assert_eq!(engine.count(), 3);
    assert_eq!(gateway.metric("tidegate_cache_handovers_total", &[]), 2.0);
    gateway.assert_idle();
}

#[test]
fn a_second_try_serves_all_who_still_wait() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |request, wire| {
        wait.wait();
        if request.number == 0 {
            wire.fin();
        } else {
            wire.json("200 OK", &numbered(request.number));
        }
    });
    let settings = format!("retry: {{ max_attempts: 1 }}\n{ON}");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let clients = crowd(&gateway, 100, &zero("hi"));
    go.raise();
    let answers: Vec<_> = clients
        .into_iter()
        .map(|mut client| client.answer())
        .collect();
    let failed = answers.iter().filter(|answer| answer.status == 502).count();
    let served = answers
        .iter()
        .filter(|answer| answer.status == 200 && text(answer) == "answer 1");
    assert_eq!((failed, served.count(), engine.count()), (1, 99, 2));
    gateway.assert_idle();
}

#[test]
fn a_refusal_of_the_request_goes_to_all_and_is_not_repeated() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |_, wire| {
        wait.wait();
        wire.json(
            "422 Unprocessable Entity",
            r#"{"error":{"message":"no such format"}}"#,
        );
    });
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let clients = crowd(&gateway, 50, &zero("hi"));
    go.raise();
    for mut client in clients {
        let answer = client.answer();
        assert_eq!(
            (answer.status, answer.json()["error"]["message"].as_str()),
            (422, Some("no such format"))
        );
    }
    gateway.assert_idle();
    assert_eq!(engine.count(), 1);
}

#[test]
fn a_stream_that_breaks_off_says_so_to_everybody_and_callers_of_json_get_a_502() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        wire.chunk(delta("one "));
        wait.wait();
        wire.reset();
    });
    let settings = format!("upstream: {{ request_stream_usage: true }}\n{ON}");
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let mut streams = crowd(&gateway, 3, &zero_stream("hi"));
    let mut json = Client::connect(&gateway);
    json.start_chat(zero("hi"));
    wait_until("it has come", DEADLINE, || {
        gateway.inner.requests.count() == 4
    });
    go.raise();
    for client in &mut streams {
        let mut answer = client.head();
        while client.next_piece(&mut answer) {}
        let events = parse(&answer.body);
        assert_eq!(text_of(&events), "one ");
        assert_eq!(events.last().unwrap().json()["error"]["code"], "stream_cut");
    }
    assert_eq!(json.answer().status, 502);
    gateway.assert_idle();
    assert_eq!(engine.count(), 1);
    assert_eq!(
        gateway.metric("tidegate_errors_total", &["kind=\"stream_cut\""]),
        4.0
    );
}

#[test]
fn callers_of_both_shapes_share_one_call() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |request, wire| {
        wait.wait();
        assert_ne!(request.json()["stream"], true);
        wire.json("200 OK", &numbered(7));
    });
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let mut clients = crowd(&gateway, 2, &zero("hi"));
    let mut stream = Client::connect(&gateway);
    stream.start_chat(zero_stream("hi"));
    wait_until("it has come", DEADLINE, || {
        gateway.inner.requests.count() == 3
    });
    go.raise();
    for client in &mut clients {
        assert_eq!(text(&client.answer()), "answer 7");
    }
    let answer = stream.answer();
    assert_eq!(
        (text(&answer), cached(&answer)),
        ("answer 7".to_owned(), ("HIT", Some("flight")))
    );
    assert!(answer.text().ends_with(DONE));
    gateway.assert_idle();
    assert_eq!(engine.count(), 1);
}

#[test]
fn tenants_and_those_who_want_a_fresh_answer_share_no_call() {
    let go = Signal::new();
    let wait = go.clone();
    let engine = Upstream::start(move |request, wire| {
        wait.wait();
        wire.json("200 OK", &numbered(request.number));
    });
    let gateway = Gateway::start(&[("a", &engine)], ON);
    let mut clients: Vec<Client> = Vec::new();
    for headers in [
        "",
        "Authorization: Bearer x\r\n",
        "Cache-Control: no-cache\r\n",
        "Cache-Control: no-store\r\n",
    ] {
        let mut client = Client::connect(&gateway);
        client.send(crate::support::client::request(
            "/v1/chat/completions",
            headers,
            zero("hi"),
        ));
        clients.push(client);
    }
    engine.wait_for_requests(4);
    go.raise();
    let mut texts: Vec<String> = clients
        .iter_mut()
        .map(|client| text(&client.answer()))
        .collect();
    texts.sort_unstable();
    texts.dedup();
    assert_eq!(texts.len(), 4);
    gateway.assert_idle();
}

#[test]
fn an_answer_that_outgrows_the_buffer_goes_on_for_those_who_read_it_and_for_nobody_else() {
    let (both, go) = (Signal::new(), Signal::new());
    let (joined, wait) = (both.clone(), go.clone());
    let piece = "x".repeat(10_000);
    let engine = Upstream::start(move |request, wire| {
        wire.stream_head();
        wire.chunk(delta("first"));
        joined.wait();
        for _ in 0..20 {
            wire.chunk(delta(&piece));
        }
        if request.number == 0 {
            wait.wait();
        }
        for _ in 0..20 {
            wire.chunk(delta(&piece));
        }
        wire.chunk([&finish("stop"), DONE].concat());
        wire.end();
    });
    let gateway = Gateway::start(
        &[("a", &engine)],
        "response_cache: { enabled: true, max_stream_buffer_size: 100000 }",
    );
    let mut clients = crowd(&gateway, 2, &zero_stream("hi"));
    let mut answers = Vec::new();
    for client in &mut clients {
        let mut answer = client.head();
        assert!(client.read_until(&mut answer, &delta("first")));
        answers.push(answer);
    }
    both.raise();
    for (client, answer) in clients.iter_mut().zip(&mut answers) {
        while answer.body.len() < 200_000 {
            assert!(client.next_piece(answer));
        }
    }
    let newcomer = gateway.chat(&zero_stream("hi"));
    assert_eq!((text(&newcomer).len(), engine.count()), (400_005, 2));
    go.raise();
    for (client, answer) in clients.iter_mut().zip(&mut answers) {
        while client.next_piece(answer) {}
        assert_eq!(text_of(&parse(&answer.body)).len(), 400_005);
    }
    gateway.assert_idle();
    assert_eq!(gateway.metric("tidegate_cache_flight_bytes", &[]), 0.0);
}

#[test]
fn nobody_ever_gets_anothers_answer() {
    let engine = || {
        Upstream::start(|request, wire| {
            let body = request.json();
            let said = body["messages"][0]["content"].as_str().unwrap().to_owned();
            if body["stream"] == true {
                let (a, b) = said.split_at(said.len() / 2);
                wire.stream(&[delta(a), delta(b), [&finish("stop"), DONE].concat()]);
            } else if said.ends_with('7') && request.number % 3 == 0 {
                wire.reset();
            } else {
                wire.json("200 OK", &numbered(0).replace("answer 0", &said));
            }
        })
    };
    let settings = format!("server: {{ workers: 2 }}\ncircuit_breaker: {{ enabled: false }}\n{ON}");
    let engines = [engine(), engine()];
    let gateway = Gateway::start(&[("a", &engines[0]), ("b", &engines[1])], &settings);
    let gateway = Arc::new(gateway);
    let served = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..16)
        .map(|thread: usize| {
            let (gateway, served) = (gateway.clone(), served.clone());
            std::thread::spawn(move || {
                for turn in 0..120usize {
                    // some are alone, some meet others
                    let token = format!("token-{}-{}", (thread % 4) * 1000, turn / 2);
                    let body = if turn % 2 == 0 {
                        zero(&token)
                    } else {
                        zero_stream(&token)
                    };
                    let mut client = Client::connect(&gateway);
                    client.start_chat(&body);
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
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    assert!(served.load(Relaxed) > 1500, "{served:?}");
    gateway.assert_idle();
}

#[test]
fn a_waiter_may_leave_at_any_time() {
    let engine = engine();
    let gateway = Gateway::start(&[("a", &engine)], ON);
    for pause in [0, 1, 2, 5] {
        let body = zero_stream(&format!("leave {pause}"));
        let mut clients: Vec<Client> = Vec::new();
        for _ in 0..8 {
            let mut client = Client::connect(&gateway);
            client.start_chat(&body);
            clients.push(client);
        }
        std::thread::sleep(ms(pause)); // at another moment each round; nothing depends on which
        for client in clients.drain(..).step_by(2) {
            client.reset();
        }
        gateway.assert_idle();
    }
}
