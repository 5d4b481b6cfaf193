//! Three masters that share the slots.

use crate::node::{Node, Tls, command, tls_arguments};
use crate::wait_until;

/// Masters of a cluster: as few as Redis allows.
const NODES: usize = 3;
/// Slots of every cluster.
const SLOTS: usize = 16_384;

/// A Redis Cluster of three masters without replicas, killed when dropped.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    tls: bool,
}

fn cluster_arguments(node: &Node) -> Vec<String> {
    let bus_port = node.bus_port.to_string();
    let pairs = [
        ("--cluster-enabled", "yes"),
        ("--cluster-config-file", "nodes.conf"),
        ("--cluster-node-timeout", "2000"),
        // what the others hold is served even while a node is away
        ("--cluster-require-full-coverage", "no"),
        ("--cluster-port", &bus_port),
    ];
    let pairs = pairs.into_iter();
    pairs
        .flat_map(|(name, of)| [name.into(), of.into()])
        .collect()
}

impl Node {
    /// From the next start on.
    pub(crate) fn become_a_cluster(&mut self) {
        let arguments = cluster_arguments(self);
        self.replace_arguments(arguments);
    }
}

/// Makes a cluster of one node.
pub(crate) fn serve_all_slots(node: &Node) {
    let last = (SLOTS - 1).to_string();
    command(node.port, &["CLUSTER", "ADDSLOTSRANGE", "0", &last]);
    wait_until("the cluster serves", || serves(node, 1));
}

fn serves(node: &Node, nodes: usize) -> bool {
    let info = command(node.port, &["CLUSTER", "INFO"]);
    info.contains("cluster_state:ok")
        && info.contains("cluster_slots_ok:16384")
        && info.contains(&format!("cluster_known_nodes:{nodes}\r"))
}

impl Cluster {
    /// Starts one that serves every slot.
    pub fn start() -> Self {
        Cluster::start_with(&[], None)
    }

    /// Starts one whose clients speak TLS; [`Cluster::url`] is that of a TLS port.
    pub fn start_tls(tls: &Tls) -> Self {
        Cluster::start_with(&[], Some(tls))
    }

    /// Starts one with further arguments of `redis-server`.
    pub fn start_with(arguments: &[&str], tls: Option<&Tls>) -> Self {
        let all = |node: &Node| {
            let mut all = cluster_arguments(node);
            all.extend(arguments.iter().map(|text| (*text).to_owned()));
            if let Some(tls) = tls {
                all.extend(tls_arguments(tls, node.tls_port));
                // only so do nodes tell of each other's TLS ports
                all.extend(["--tls-cluster".into(), "yes".into()]);
            }
            all
        };
        let nodes: Vec<Node> = (0..NODES).map(|_| Node::start(all)).collect();
        let cluster = Cluster {
            nodes,
            tls: tls.is_some(),
        };
        cluster.share_out();
        cluster
    }

    fn share_out(&self) {
        for (at, node) in self.nodes.iter().enumerate() {
            let from = (at * SLOTS / NODES).to_string();
            let to = ((at + 1) * SLOTS / NODES - 1).to_string();
            self.ask(at, &["CLUSTER", "ADDSLOTSRANGE", &from, &to]);
            let epoch = (at + 1).to_string();
            self.ask(at, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
            let port = if self.tls { node.tls_port } else { node.port };
            let (port, bus_port) = (port.to_string(), node.bus_port.to_string());
            self.ask(0, &["CLUSTER", "MEET", "127.0.0.1", &port, &bus_port]);
        }
        self.wait_until_whole();
    }

    /// Waits until every node knows of every other, and of an owner for every slot.
    pub fn wait_until_whole(&self) {
        wait_until("the cluster serves", || {
            self.nodes.iter().all(|node| serves(node, NODES))
        });
    }

    /// The url of one of its nodes.
    pub fn url(&self) -> String {
        self.url_of(0)
    }

    /// The url of a node.
    pub fn url_of(&self, node: usize) -> String {
        let node = &self.nodes[node];
        match self.tls {
            false => format!("redis://127.0.0.1:{}", node.port),
            true => format!("rediss://127.0.0.1:{}", node.tls_port),
        }
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Asks a node, as [`command`] does.
    pub fn ask(&self, node: usize, words: &[&str]) -> String {
        command(self.nodes[node].port, words)
    }

    /// Ends a node without a word.
    pub fn kill(&mut self, node: usize) {
        self.nodes[node].kill();
    }

    /// Starts a node again: without keys, and with its slots.
    pub fn start_again(&mut self, node: usize) {
        self.nodes[node].start_again();
        self.wait_until_whole();
    }

    /// Holds a node still: it keeps its connections and answers nothing.
    pub fn pause(&self, node: usize) {
        self.nodes[node].signal("-STOP");
    }

    /// Lets it go on.
    pub fn resume(&self, node: usize) {
        self.nodes[node].signal("-CONT");
    }

    /// The node that serves a key.
    pub fn owner(&self, key: &str) -> usize {
        let slot = self.slot(key);
        let owns = |node: &usize| {
            let told = self.ask(*node, &["CLUSTER", "COUNTKEYSINSLOT", &slot]);
            let keys = told.trim_start_matches(':').parse::<u64>();
            keys.is_ok_and(|keys| keys > 0)
        };
        let mut nodes = 0..self.nodes.len();
        nodes.find(owns).expect("a node has the key")
    }

    /// The slot of a key.
    pub fn slot(&self, key: &str) -> String {
        let slot = self.ask(0, &["CLUSTER", "KEYSLOT", key]);
        slot.trim_start_matches(':').to_owned()
    }

    /// The name that the cluster gave a node.
    pub fn id(&self, node: usize) -> String {
        self.ask(node, &["CLUSTER", "MYID"])
    }

    /// Where a node is reached by other nodes.
    pub fn port(&self, node: usize) -> u16 {
        self.nodes[node].port
    }
}
