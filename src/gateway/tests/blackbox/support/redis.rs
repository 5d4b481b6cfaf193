//! A Redis server of a test's own, which it may kill and start again. Needs `redis-server`.

use super::{DEADLINE, wait_until};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

/// Killed when dropped.
pub struct Redis {
    pub port: u16,
    child: Option<Child>,
}

impl Redis {
    /// Starts one that answers.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let mut redis = Redis { port, child: None };
        redis.start_again();
        redis
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Ends it without a word.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// An empty one at the same port.
    pub fn start_again(&mut self) {
        let port = self.port.to_string();
        let arguments = [
            "--port",
            &port,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ];
        let started = Command::new("redis-server")
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        self.child = Some(started.expect("redis-server is installed, test.sh sees to it"));
        wait_until("redis answers", DEADLINE, || {
            TcpStream::connect(("127.0.0.1", self.port)).is_ok()
        });
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}
