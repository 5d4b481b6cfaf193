//! One server.

use crate::node::{Node, Tls, command, tls_arguments};

/// One Redis server, killed when dropped. It keeps nothing when it is started again.
#[derive(Debug)]
pub struct Single {
    node: Node,
    tls: bool,
}

impl Single {
    /// Starts one that answers.
    pub fn start() -> Self {
        Single::start_with(&[])
    }

    /// Starts one with arguments of `redis-server`, such as `--requirepass`.
    pub fn start_with(arguments: &[&str]) -> Self {
        let arguments = |_: &Node| arguments.iter().map(|text| (*text).into()).collect();
        let (node, tls) = (Node::start(arguments), false);
        Single { node, tls }
    }

    /// Starts one that speaks TLS; [`Single::url`] is that of its TLS port.
    pub fn start_tls(tls: &Tls) -> Self {
        let node = Node::start(|node| tls_arguments(tls, node.tls_port));
        Single { node, tls: true }
    }

    /// Its url, with a number for the host.
    pub fn url(&self) -> String {
        match self.tls {
            false => format!("redis://127.0.0.1:{}", self.node.port),
            true => format!("rediss://127.0.0.1:{}", self.node.tls_port),
        }
    }

    /// Its port for plain TCP.
    pub fn port(&self) -> u16 {
        self.node.port
    }

    /// Asks it. See [`command`].
    pub fn ask(&self, words: &[&str]) -> String {
        command(self.node.port, words)
    }

    /// A number in its `INFO`, as `total_connections_received`.
    pub fn info(&self, name: &str) -> u64 {
        let info = self.ask(&["INFO"]);
        let found = info.lines().find_map(|line| line.strip_prefix(name));
        let value = found.and_then(|rest| rest.strip_prefix(':')?.trim_end().parse().ok());
        value.expect("is a number in INFO")
    }

    /// Ends it without a word.
    pub fn kill(&mut self) {
        self.node.kill();
    }

    /// An empty one at the same port.
    pub fn start_again(&mut self) {
        self.node.start_again();
    }

    /// Ends it, and puts a cluster of this one node at the same port.
    pub fn become_a_cluster(&mut self) {
        self.node.kill();
        self.node.become_a_cluster();
        self.node.start_again();
        crate::cluster::serve_all_slots(&self.node);
    }

    /// Holds it still: it keeps its connections and answers nothing.
    pub fn pause(&self) {
        self.node.signal("-STOP");
    }

    /// Lets it go on.
    pub fn resume(&self) {
        self.node.signal("-CONT");
    }
}
