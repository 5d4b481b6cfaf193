//! `/admin` on a listener of its own: what answers where, and that who may ask stays the same.

use crate::support::client::get;
use crate::support::process::{SettingsFile, run};
use crate::support::{Client, Gateway, Upstream, chat, user};

const OWN: &str = "admin: { listen: '127.0.0.1:0' }\n";

const PATHS: [&str; 4] = [
    "/admin/backends",
    "/admin/kv-index",
    "/admin/cache",
    "/admin/split",
];

#[test]
fn admin_moves_to_its_own_listener_and_the_api_stays() {
    let engine = Upstream::json(r#"{"choices":[]}"#);
    let gateway = Gateway::start(&[("a", &engine)], OWN);
    let own = gateway.admin_address.unwrap();
    assert_ne!(own, gateway.address);
    let mut operator = Client::connect_to(own);
    for path in PATHS {
        assert_eq!(get(&gateway, path).status, 404, "{path}");
        assert_eq!(operator.get(path, "").status, 200, "{path}");
    }
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(get(&gateway, path).status, 200, "{path}");
        assert_eq!(operator.get(path, "").status, 200, "{path}");
    }
    assert_eq!(gateway.chat(&chat(&user("hi"))).status, 200);
    let refused = Client::connect_to(own).post("/v1/chat/completions", "", chat(&user("hi")));
    assert_eq!(refused.status, 404, "{refused:?}");
    assert_eq!(operator.get("/v1/models", "").status, 404);
    let drained = operator.post("/admin/backends/a/drain", "", "");
    assert_eq!(drained.json()["draining"], true);
    let wrong = Client::connect(&gateway).post("/admin/backends/a/undrain", "", "");
    assert_eq!(wrong.status, 404);
}

#[test]
fn without_a_listener_of_its_own_admin_is_where_the_api_is() {
    let engine = Upstream::json("{}");
    let gateway = Gateway::start(&[("a", &engine)], "");
    assert_eq!(gateway.admin_address, None);
    assert_eq!(get(&gateway, "/admin/backends").status, 200);
}

#[test]
fn the_token_keys_and_distance_count_on_its_own_listener_as_well() {
    let engine = Upstream::json("{}");
    let settings = "
admin: { listen: '127.0.0.1:0', token: let-me-in }
api_keys:
  keys:
    - { name: ops, key: 'key-of-the-operators', scopes: [admin] }
    - { name: team, key: 'key-of-a-whole-team-' }
";
    let gateway = Gateway::start(&[("a", &engine)], settings);
    let mut operator = Client::connect_to(gateway.admin_address.unwrap());
    for (header, status) in [
        ("", 401),
        ("authorization: Bearer let-me-out\r\n", 401),
        ("authorization: Bearer let-me-in\r\n", 200),
        ("x-api-key: key-of-the-operators\r\n", 200),
        ("x-api-key: key-of-a-whole-team-\r\n", 401),
    ] {
        let answer = operator.get("/admin/backends", header);
        assert_eq!(answer.status, status, "{header}");
    }
    let open = Gateway::start(&[("a", &engine)], OWN);
    let mut proxied = Client::connect_to(open.admin_address.unwrap());
    let answer = proxied.get("/admin/backends", "x-forwarded-for: 10.0.0.9\r\n");
    assert_eq!(answer.status, 403);
}

#[test]
fn an_address_that_is_taken_or_none_names_the_key() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let settings = |listen: &str| {
        SettingsFile::new(&format!(
            "server: {{host: 127.0.0.1, port: 0}}\nadmin: {{listen: '{listen}'}}\nbackends: [{{name: a, url: 'http://a'}}]"
        ))
    };
    let file = settings(&address.to_string());
    let refused = run(&["--config", file.0.to_str().unwrap()], &[]);
    assert_eq!(refused.status.code(), Some(1));
    let expected = format!("cannot listen on {address} (admin.listen)");
    assert!(refused.stderr.contains(&expected), "{}", refused.stderr);
    for wrong in [
        "9091",
        ":9091",
        "::1:9091",
        "[::1:9091",
        "host:port",
        "http://a:1",
        "a b:1",
    ] {
        let file = settings(wrong);
        let refused = run(&["check", "--config", file.0.to_str().unwrap()], &[]);
        assert_eq!(
            refused.stderr.lines().next(),
            Some("admin.listen: must be host:port, for example 127.0.0.1:9091"),
            "{wrong}"
        );
    }
    let file = settings("[::1]:9091");
    let checked = run(&["check", "--config", file.0.to_str().unwrap()], &[]);
    assert_eq!(checked.status.code(), Some(0), "{}", checked.stderr);
}
