//! Clients that speak TLS: what they are shown, when that changes, and that all limits hold for them as well.

use crate::support::process::{SettingsFile, run};
use crate::support::tls::{Authority, Files, Pair};
use crate::support::{
    Client, DEADLINE, Gateway, Signal, Upstream, chat, chat_stream, sse, user, wait_until,
};
use std::io::Read;
use std::net::TcpStream;

const NAME: &str = "gateway.test";

fn listening(files: &Files) -> String {
    format!("server: {{ tls: {} }}\n", files.yaml())
}

/// `Gateway::start` looks at `/metrics` without TLS; this one only at what it shares.
fn start(engine: &Upstream, files: &Files, more: &str) -> Gateway {
    let backends = engine.yaml("a");
    Gateway::with(&backends, &format!("{}{more}", listening(files)))
}

fn connect(gateway: &Gateway, authority: &Authority) -> Client {
    let tls = authority.client(NAME, &["h2", "http/1.1"]);
    Client::connect_tls(gateway.address, tls).unwrap()
}

fn shown(client: &Client) -> Vec<u8> {
    client.tls().peer_certificates().unwrap()[0].to_vec()
}

fn der(pair: &Pair) -> Vec<u8> {
    use rustls::pki_types::pem::PemObject;
    let der = rustls::pki_types::CertificateDer::from_pem_slice(pair.certificate.as_bytes());
    der.unwrap().to_vec()
}

#[test]
fn requests_and_streams_pass_within_tls_by_http_1_alone() {
    let engine = Upstream::start(|request, wire| {
        if request.text().contains("\"stream\":true") {
            wire.stream(&[sse::delta("a"), sse::finish("stop")]);
        } else {
            wire.json("200 OK", r#"{"choices":[]}"#);
        }
    });
    let authority = Authority::new();
    let files = Files::new(&authority.sign(&[NAME]));
    let gateway = start(&engine, &files, "");
    let mut client = connect(&gateway, &authority);
    assert_eq!(client.tls().alpn_protocol(), Some(&b"http/1.1"[..]));
    let answer = client.chat(chat(&user("hi")));
    assert_eq!((answer.status, answer.backend()), (200, "a"), "{answer:?}");
    let answer = client.chat(chat_stream(&user("hi")));
    assert!(answer.text().contains("stop"), "{answer:?}");
    assert_eq!(client.get("/ready", "").status, 200);
    assert_eq!(client.get("/admin/backends", "").status, 200, "local");
    gateway.assert_idle();
}

#[test]
fn who_does_not_trust_the_certificate_or_speaks_no_tls_gets_nothing() {
    let engine = Upstream::json("{}");
    let authority = Authority::new();
    let files = Files::new(&authority.sign(&[NAME]));
    let gateway = start(&engine, &files, "");
    let stranger = Authority::new().client(NAME, &[]);
    assert!(Client::connect_tls(gateway.address, stranger).is_err());
    let elsewhere = authority.client("other.test", &[]);
    assert!(Client::connect_tls(gateway.address, elsewhere).is_err());
    let mut plain = TcpStream::connect(gateway.address).unwrap();
    plain.set_read_timeout(Some(DEADLINE)).unwrap();
    std::io::Write::write_all(&mut plain, b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    let metrics = || {
        connect(&gateway, &authority)
            .get("/metrics", "")
            .text()
            .to_owned()
    };
    let series = "tidegate_tls_handshake_failures_total{listener=\"server\"}";
    wait_until("failures are counted", DEADLINE, || {
        metrics().contains(series)
    });
}

#[test]
fn a_changed_certificate_is_shown_to_new_connections_while_old_ones_go_on() {
    let go_on = Signal::new();
    let heard = go_on.clone();
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        wire.chunk(sse::delta("before"));
        heard.wait();
        wire.chunk(sse::delta("after"));
        wire.chunk(sse::finish("stop"));
        wire.end();
    });
    let authority = Authority::new();
    let (first, second) = (authority.sign(&[NAME]), authority.sign(&[NAME]));
    let files = Files::new(&first);
    let gateway = start(&engine, &files, "");
    let mut old = connect(&gateway, &authority);
    assert_eq!(shown(&old), der(&first));
    old.start_chat(chat_stream(&user("hi")));
    let mut answer = old.head();
    assert!(old.read_until(&mut answer, "before"));
    // what cannot be used changes nothing
    std::fs::write(files.certificate(), "no certificate").unwrap();
    gateway.reload_certificates();
    let reloads = |result: &str| {
        let series =
            format!("tidegate_certificate_reloads_total{{of=\"server\",result=\"{result}\"}} 1");
        wait_until(&series, DEADLINE, || {
            let mut client = connect(&gateway, &authority);
            client.get("/metrics", "").text().contains(&series)
        });
    };
    reloads("failed");
    assert_eq!(shown(&connect(&gateway, &authority)), der(&first));
    // nor does a certificate whose key has not come yet
    std::fs::write(files.certificate(), &second.certificate).unwrap();
    gateway.reload_certificates();
    files.replace(&second);
    // noticed without being told, too
    wait_until("the second certificate is shown", DEADLINE, || {
        shown(&connect(&gateway, &authority)) == der(&second)
    });
    reloads("ok");
    go_on.raise();
    while old.next_piece(&mut answer) {}
    assert!(answer.text().contains("after"), "{answer:?}");
}

#[test]
fn a_handshake_that_stalls_is_given_up_and_holds_up_nobody() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let authority = Authority::new();
    let files = Files::new(&authority.sign(&[NAME]));
    let gateway = start(&engine, &files, "");
    let stalled: Vec<TcpStream> = (0..300)
        .map(|_| TcpStream::connect(gateway.address).unwrap())
        .collect();
    let answer = connect(&gateway, &authority).chat(chat(&user("hi")));
    assert_eq!(answer.status, 200);
    for mut stream in stalled {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let ended = stream.read(&mut [0; 16]);
        assert!(
            matches!(ended, Ok(0)) || ended.is_err_and(|e| !crate::support::wire::is_timeout(&e))
        );
    }
}

#[test]
fn a_client_that_reads_nothing_is_dropped_within_tls_as_well() {
    let text = "x".repeat(256 << 10);
    let engine = Upstream::start(move |_, wire| {
        wire.stream_head();
        while wire.chunk(sse::delta(&text)) {}
    });
    let authority = Authority::new();
    let files = Files::new(&authority.sign(&[NAME]));
    let settings = format!(
        "server: {{ client_write_timeout: 1s, tls: {} }}\n",
        files.yaml()
    );
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let client = Client::connect_small(&gateway, 64 << 10);
    let mut client = client.encrypted(authority.client(NAME, &[])).unwrap();
    client.start_chat(chat_stream(&user("hi")));
    engine.wait_for_requests(1);
    engine.wait_for_close(0);
    gateway.assert_idle();
    drop(client);
}

#[test]
fn a_client_that_leaves_within_tls_frees_its_engine_at_once() {
    let engine = Upstream::start(|_, wire| wire.hang());
    let authority = Authority::new();
    let files = Files::new(&authority.sign(&[NAME]));
    let gateway = start(&engine, &files, "");
    let mut client = connect(&gateway, &authority);
    client.start_chat(chat_stream(&user("hi")));
    engine.wait_for_requests(1);
    client.leave();
    engine.wait_for_close(0);
    gateway.assert_idle();
}

#[test]
fn admin_has_a_certificate_of_its_own() {
    let engine = Upstream::json("{}");
    let authority = Authority::new();
    let files = Files::new(&authority.sign(&["admin.test"]));
    let settings = format!(
        "admin: {{ listen: '127.0.0.1:0', tls: {} }}\n",
        files.yaml()
    );
    let gateway = Gateway::start(&[("a", &engine)], &settings);
    let tls = authority.client("admin.test", &[]);
    let mut operator = Client::connect_tls(gateway.admin_address.unwrap(), tls).unwrap();
    assert_eq!(operator.get("/admin/backends", "").status, 200);
    assert_eq!(crate::support::client::get(&gateway, "/health").status, 200);
}

#[test]
fn files_that_cannot_be_used_are_named_with_their_key() {
    let authority = Authority::new();
    let (pair, other) = (authority.sign(&[NAME]), authority.sign(&[NAME]));
    let good = Files::new(&pair);
    let mixed = Files::new(&Pair {
        certificate: pair.certificate.clone(),
        key: other.key.clone(),
    });
    let swapped = Files::new(&Pair {
        certificate: pair.key.clone(),
        key: pair.certificate.clone(),
    });
    let gone = Files::new(&pair);
    std::fs::remove_file(gone.key()).unwrap();
    let only = |files: &Files| format!("{{ cert_file: '{}' }}", files.certificate().display());
    for (tls, expected) in [
        (
            mixed.yaml(),
            "server.tls.key_file: ".to_owned()
                + &mixed.key().display().to_string()
                + ": is not the key of the certificate",
        ),
        (swapped.yaml(), "has no certificate in PEM form".into()),
        (gone.yaml(), "No such file".into()),
        (
            only(&good),
            "server.tls.key_file: is required: TLS needs both files".into(),
        ),
    ] {
        let file = SettingsFile::new(&format!(
            "server: {{tls: {tls}}}\nbackends: [{{name: a, url: 'http://a'}}]"
        ));
        let refused = run(&["check", "--config", file.0.to_str().unwrap()], &[]);
        assert_eq!(refused.status.code(), Some(1), "{expected}");
        assert!(
            refused.stderr.contains(&expected),
            "{expected}: {}",
            refused.stderr
        );
        assert!(!refused.stderr.contains("PRIVATE"), "{}", refused.stderr);
    }
}
