//! The nodes of a cluster.

use deadpool_redis::redis::{ConnectionAddr, Value};

/// Where a node of a cluster is reached.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Node {
    pub(super) host: String,
    pub(super) port: u16,
}

impl Node {
    /// The only server there is.
    pub(super) fn nobody() -> Self {
        let (host, port) = (String::new(), 0);
        Node { host, port }
    }

    /// The node at an address.
    pub(super) fn of(address: &ConnectionAddr) -> Self {
        match address {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Node {
                host: host.clone(),
                port: *port,
            },
            _ => Node::nobody(),
        }
    }

    /// Its address, reached as `like` is.
    pub(super) fn address(&self, like: &ConnectionAddr) -> ConnectionAddr {
        let (host, port) = (self.host.clone(), self.port);
        match like {
            ConnectionAddr::TcpTls {
                insecure,
                tls_params,
                ..
            } => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: *insecure,
                tls_params: tls_params.clone(),
            },
            _ => ConnectionAddr::Tcp(host, port),
        }
    }
}

/// The masters in an answer to `CLUSTER SLOTS`: ranges, each with its first and last slot and then its nodes, the master first.
pub(super) fn masters(slots: &Value, asked: &Node) -> Vec<Node> {
    let Value::Array(ranges) = slots else {
        return Vec::new();
    };
    let mut nodes: Vec<Node> = ranges
        .iter()
        .filter_map(|range| {
            let Value::Array(range) = range else {
                return None;
            };
            let Value::Array(master) = range.get(2)? else {
                return None;
            };
            let Value::Int(port) = master.get(1)? else {
                return None;
            };
            // a node that does not know its own name leaves it out
            let host = match master.first()? {
                Value::BulkString(host) if !host.is_empty() => String::from_utf8(host.clone()).ok(),
                Value::SimpleString(host) if !host.is_empty() => Some(host.clone()),
                _ => None,
            };
            Some(Node {
                host: host.unwrap_or_else(|| asked.host.clone()),
                port: u16::try_from(*port).ok()?,
            })
        })
        .collect();
    nodes.sort();
    nodes.dedup();
    nodes
}

#[cfg(test)]
mod tests {
    use super::*;
    use deadpool_redis::redis::parse_redis_value;

    fn node(host: &str, port: u16) -> Node {
        let host = host.into();
        Node { host, port }
    }

    #[test]
    fn masters_are_told_once_each_and_those_without_a_name_by_the_one_that_was_asked() {
        let slots = "*3\r\n\
            *4\r\n:0\r\n:9\r\n*2\r\n$3\r\nh-b\r\n:2\r\n*2\r\n$7\r\nreplica\r\n:3\r\n\
            *3\r\n:10\r\n:19\r\n*2\r\n$0\r\n\r\n:1\r\n\
            *3\r\n:20\r\n:99\r\n*2\r\n$3\r\nh-b\r\n:2\r\n";
        let slots = parse_redis_value(slots.as_bytes()).unwrap();
        let told = masters(&slots, &node("asked", 9));
        assert_eq!(told, [node("asked", 1), node("h-b", 2)]);
    }

    #[test]
    fn what_is_no_list_of_slots_has_no_masters() {
        for reply in [
            "+OK\r\n",
            "*1\r\n:1\r\n",
            "*1\r\n*1\r\n:1\r\n",
            "*1\r\n*3\r\n:0\r\n:1\r\n*0\r\n",
        ] {
            let reply = parse_redis_value(reply.as_bytes()).unwrap();
            assert!(masters(&reply, &node("asked", 9)).is_empty());
        }
    }
}
