//! The support itself: a request goes through, and everything is idle afterwards.

use crate::support::{Gateway, Upstream, chat, client, user};

#[test]
fn a_request_goes_through_and_leaves_nothing_behind() {
    let engine = Upstream::json(r#"{"id":"1","choices":[]}"#);
    let gateway = Gateway::start(&[("a", &engine)], "");
    let answer = client::post(&gateway, "/v1/chat/completions", chat(&user("hi")));
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.text(), r#"{"id":"1","choices":[]}"#);
    assert_eq!(answer.header("x-tidegate-backend"), Some("a"));
    assert_eq!(engine.requests().len(), 1);
    gateway.assert_idle();
}
