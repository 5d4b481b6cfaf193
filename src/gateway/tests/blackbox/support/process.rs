//! The program itself, as an operator starts it.

use super::client::{Answer, Client};
use super::gateway::sum;
use super::{DEADLINE, wait_until};
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What a finished run said.
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// A settings file that is removed at the end.
pub struct SettingsFile(pub PathBuf);

impl SettingsFile {
    pub fn new(yaml: &str) -> Self {
        let name = format!("tidegate-{}-{}.yaml", std::process::id(), fastrand::u64(..));
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, yaml).unwrap();
        SettingsFile(path)
    }
}

impl Drop for SettingsFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn command(arguments: &[&str], environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command
        .args(arguments)
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs it to its end.
pub fn run(arguments: &[&str], environment: &[(&str, &str)]) -> Finished {
    let output = command(arguments, environment).output().unwrap();
    Finished {
        status: output.status,
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A gateway process. Killed when dropped.
pub struct Process {
    child: Child,
    pub port: u16,
    output: Arc<Mutex<Vec<u8>>>,
    settings: SettingsFile,
}

impl Process {
    /// Starts it and waits until it listens.
    pub fn start(yaml: &str) -> Self {
        let process = Self::launch(yaml);
        wait_until("the process listens", DEADLINE, || {
            std::net::TcpStream::connect(("127.0.0.1", process.port)).is_ok()
        });
        process
    }

    /// Starts it.
    pub fn launch(yaml: &str) -> Self {
        let port = {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let settings = SettingsFile::new(yaml);
        let port_text = port.to_string();
        let environment = [
            ("TIDEGATE__SERVER__HOST", "127.0.0.1"),
            ("TIDEGATE__SERVER__PORT", &port_text),
        ];
        let arguments = ["--config", settings.0.to_str().unwrap()];
        let mut child = command(&arguments, &environment).spawn().unwrap();
        let output = Arc::new(Mutex::new(Vec::new()));
        collect(child.stdout.take().unwrap(), output.clone());
        collect(child.stderr.take().unwrap(), output.clone());
        Process {
            child,
            port,
            output,
            settings,
        }
    }

    /// Its settings file.
    pub fn settings_file(&self) -> &std::path::Path {
        &self.settings.0
    }

    /// All that it printed so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&self.output.lock().unwrap()).into_owned()
    }

    /// A GET on a connection of its own.
    pub fn get(&self, path: &str) -> Answer {
        let mut client = Client::connect_to_port(self.port);
        client.send(format!("GET {path} HTTP/1.1\r\nhost: gateway\r\n\r\n"));
        client.answer()
    }

    /// Sends a chat request.
    pub fn chat(&self, body: &str) -> Answer {
        Client::connect_to_port(self.port).chat(body)
    }

    /// As [`super::Gateway::metric`].
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        sum(self.get("/metrics").text(), name, labels)
    }

    /// Sends it a signal, such as `TERM`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .args([&format!("-{name}"), &self.child.id().to_string()])
            .status();
        assert!(sent.unwrap().success());
    }

    /// Waits for its end; answers the exit code.
    pub fn exit_code(&mut self) -> Option<i32> {
        let end = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(
                Instant::now() < end,
                "the process does not end:\n{}",
                self.output()
            );
            std::thread::sleep(super::ms(5));
        }
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(mut from: impl Read + Send + 'static, into: Arc<Mutex<Vec<u8>>>) {
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = from.read(&mut buffer) {
            into.lock().unwrap().extend_from_slice(&buffer[..n]);
        }
    });
}
