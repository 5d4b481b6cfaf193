//! One connection of the pool: to a server, or to all nodes of a cluster. Which of them it is, is found out whenever one is made,
//! so nobody has to say it, and a server that was replaced by a cluster is noticed.

use super::fault::has_no_slots;
use super::settings::Target;
use super::topology::{Node, masters};
use deadpool::managed::{Manager, Metrics, RecycleError, RecycleResult};
use deadpool_redis::cluster::{ClusterClientBuilder, ClusterConnection};
use deadpool_redis::redis::aio::{ConnectionLike, MultiplexedConnection};
use deadpool_redis::redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
use deadpool_redis::redis::{
    AsyncConnectionConfig, Cmd, ConnectionInfo, Pipeline, RedisError as Failure, RedisFuture,
    ServerError, Value, cmd,
};
use futures_util::future::BoxFuture;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A connection unused for longer is asked whether it still lives. To ask every time, as deadpool-redis does by itself, doubles the
/// time of a command: a `GET` on one machine takes 19 us over a connection of one's own, 40 us with that question, and 22 us over
/// this pool without it (`what_a_command_costs` in tests/stores/redis_server.rs). One that was closed is replaced in silence anyway;
/// this is for those that died without a word.
const PROBE_AFTER_IDLE: Duration = Duration::from_secs(1);
/// How often the client of a cluster asks another node, or the same one again, before it tells of the fault.
const CLUSTER_RETRIES: u32 = 3;
/// Milliseconds between them, so that a cluster that is down is told before a command runs out of time.
const CLUSTER_RETRY_WAIT_MS: [u64; 2] = [10, 100];
/// Commands to a cluster at the same time, over one connection.
const CLUSTER_COMMANDS_MAX: usize = 64;

/// A connection to a cluster that has failed is made anew when it is older: a failover may have passed it by. One that is younger
/// is kept, since all nodes are asked when it is made, and one that hangs or is away should not hold up the others for long.
const CLUSTER_ANEW_AFTER: Duration = Duration::from_secs(5);

/// A connection of the pool.
pub(super) struct Link {
    /// Of which set of connections it is one. See [`Links::abandon`].
    pub(super) generation: u64,
    to: To,
}

enum To {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

/// Makes connections and looks after them.
pub(super) struct Links {
    target: Target,
    connect_timeout: Duration,
    command_timeout: Duration,
    max_age: Duration,
    generation: AtomicU64,
    /// Masters of the cluster as last seen: the node of the url may go while the others stay.
    known: Mutex<Vec<Node>>,
}

impl Links {
    pub(super) fn new(target: Target, connect: Duration, command: Duration, age: Duration) -> Self {
        Links {
            target,
            connect_timeout: connect,
            command_timeout: command,
            max_age: age,
            generation: AtomicU64::new(0),
            known: Mutex::default(),
        }
    }

    /// Connections that exist are not used again.
    pub(super) fn abandon_all(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Lets no connection be used again that was made with `link` or before: they lead to what is no more.
    pub(super) fn abandon(&self, generation: u64) {
        // whoever finds the next one dead in the same outage has nothing to add
        let (seen, next) = (generation, generation + 1);
        let _ = self
            .generation
            .compare_exchange(seen, next, Ordering::AcqRel, Ordering::Acquire);
    }

    fn known(&self) -> Vec<Node> {
        let known = self.known.lock();
        known.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn remember(&self, nodes: Vec<Node>) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = nodes;
    }

    /// A connection to the server of the url, or to another node of its cluster.
    async fn first_contact(&self) -> Result<(MultiplexedConnection, ConnectionInfo), Failure> {
        let mut known = self.known();
        fastrand::shuffle(&mut known);
        // a node that hangs leaves time for another
        let limit = match known.is_empty() {
            true => self.connect_timeout,
            false => self.connect_timeout / 4,
        };
        let named = self.connect(self.target.info.clone(), limit).await;
        let failure = match named {
            Ok(connected) => return Ok(connected),
            Err(failure) if !failure.is_io_error() => return Err(failure),
            Err(failure) => failure,
        };
        for node in &known {
            let info = self.target.info.clone();
            let address = node.address(info.addr());
            if let Ok(connected) = self.connect(info.set_addr(address), limit).await {
                return Ok(connected);
            }
        }
        Err(failure)
    }

    async fn connect(
        &self,
        info: ConnectionInfo,
        limit: Duration,
    ) -> Result<(MultiplexedConnection, ConnectionInfo), Failure> {
        // answers are waited for by whoever asks
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(limit))
            .set_response_timeout(None);
        let manager = deadpool_redis::Manager::new_with_config(info.clone(), config)?;
        let connected = tokio::time::timeout(limit, manager.create()).await;
        let connection = connected.map_err(|_| timed_out())??;
        Ok((connection, info))
    }

    async fn to_cluster(&self, seed: ConnectionInfo) -> Result<ClusterConnection, Failure> {
        let [least, most] = CLUSTER_RETRY_WAIT_MS;
        let mut client = ClusterClientBuilder::new([seed.clone()])
            .tcp_settings(seed.tcp_settings().clone())
            .connection_timeout(self.connect_timeout / 4) // a node that hangs is waited for, and others may come after
            .response_timeout(self.command_timeout)
            .retries(CLUSTER_RETRIES)
            .min_retry_wait(least)
            .max_retry_wait(most);
        if let Some(certificates) = &self.target.certificates {
            client = client.certs(certificates.clone());
        }
        client.build()?.get_async_connection().await
    }
}

pub(super) fn timed_out() -> Failure {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

impl Manager for Links {
    type Type = Link;
    type Error = Failure;

    async fn create(&self) -> Result<Link, Failure> {
        let generation = self.generation.load(Ordering::Acquire);
        let (mut first, info) = self.first_contact().await?;
        let asked = cmd("CLUSTER").arg("SLOTS").query_async(&mut first).await;
        let masters = match asked {
            Ok(slots) => masters(&slots, &Node::of(info.addr())),
            Err(failure) if has_no_slots(&failure) => {
                self.remember(Vec::new());
                let to = To::Server(first);
                return Ok(Link { generation, to });
            }
            Err(failure) => return Err(failure),
        };
        self.remember(masters);
        let to = To::Cluster(self.to_cluster(info).await?);
        Ok(Link { generation, to })
    }

    async fn recycle(&self, link: &mut Link, metrics: &Metrics) -> RecycleResult<Failure> {
        if metrics.age() > self.max_age {
            return Err(RecycleError::message("too old"));
        }
        if link.generation != self.generation.load(Ordering::Acquire) {
            return Err(RecycleError::message("abandoned"));
        }
        // the client of a cluster looks after its connections itself
        if let To::Server(connection) = &mut link.to
            && metrics.last_used() > PROBE_AFTER_IDLE
        {
            cmd("PING").exec_async(connection).await?;
        }
        Ok(())
    }
}

impl Link {
    /// Whether it may be used again after it broke or was silent for too long: the client of a cluster looks after its connections
    /// itself. Answers that come late are not taken for others.
    pub(super) fn outlives_failure(&self, age: Duration) -> bool {
        matches!(self.to, To::Cluster(_)) && age < CLUSTER_ANEW_AFTER
    }

    /// Each command by itself, wherever its key is; what a server refuses stands in its place.
    pub(super) async fn each(&mut self, commands: &[Cmd]) -> Result<Vec<Value>, Failure> {
        match &mut self.to {
            To::Server(server) => {
                let mut all = Pipeline::with_capacity(commands.len());
                for command in commands {
                    all.add_command(command.clone());
                }
                server.req_packed_commands(&all, 0, commands.len()).await
            }
            To::Cluster(cluster) => {
                let mut asked = Vec::with_capacity(commands.len());
                for command in commands {
                    asked.push(told_by(cluster.clone(), command));
                }
                let asked = stream::iter(asked).buffered(CLUSTER_COMMANDS_MAX);
                asked.try_collect().await
            }
        }
    }

    /// A command to one node; a single server is the only one.
    pub(super) async fn at(&mut self, node: &Node, command: &Cmd) -> Result<Value, Failure> {
        match &mut self.to {
            To::Server(server) => server.req_packed_command(command).await,
            To::Cluster(cluster) => {
                let (host, port) = (node.host.clone(), node.port);
                let route = SingleNodeRoutingInfo::ByAddress { host, port };
                let route = RoutingInfo::SingleNode(route);
                cluster.route_command(command.clone(), route).await
            }
        }
    }

    /// The masters in an order of their own, or nobody in particular for a single server.
    pub(super) async fn masters(&mut self) -> Result<Vec<Node>, Failure> {
        let To::Cluster(cluster) = &mut self.to else {
            return Ok(vec![Node::nobody()]);
        };
        let route = RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random);
        let command = cmd("CLUSTER").arg("SLOTS").to_owned();
        let slots = cluster.route_command(command, route).await?;
        Ok(masters(&slots, &Node::nobody()))
    }
}

/// The answer of a cluster to one command; what a server refuses is an answer too.
fn told_by(mut cluster: ClusterConnection, command: &Cmd) -> BoxFuture<'_, Result<Value, Failure>> {
    Box::pin(async move {
        let answer = cluster.req_packed_command(command).await;
        answer.or_else(|failure| ServerError::try_from(failure).map(Value::ServerError))
    })
}

impl ConnectionLike for Link {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match &mut self.to {
            To::Server(server) => server.req_packed_command(cmd),
            To::Cluster(cluster) => cluster.req_packed_command(cmd),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        commands: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match &mut self.to {
            To::Server(server) => server.req_packed_commands(commands, offset, count),
            To::Cluster(cluster) => cluster.req_packed_commands(commands, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match &self.to {
            To::Server(server) => server.get_db(),
            To::Cluster(cluster) => cluster.get_db(),
        }
    }
}
