//! The binary, as somebody at a terminal has it.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_s3-server");

/// A running server, and the line that it began with.
struct Running(Child, String);

impl Running {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(PROGRAM);
        let mut child = command.args(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let output = child.stdout.as_mut().unwrap();
        BufReader::new(output).read_line(&mut line).unwrap();
        Running(child, line)
    }

    fn ask(&self, request: &str) -> String {
        let (_, rest) = self.1.split_once("http://").unwrap();
        let address = rest.split(',').next().unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        let head = format!("{request} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn it_tells_its_address_and_its_bucket_and_wants_signatures() {
    let server = Running::start(&["--port", "0", "--bucket", "answers"]);
    assert!(
        server.1.contains("bucket answers on http://127.0.0.1:"),
        "{}",
        server.1
    );
    let answer = server.ask("GET /answers/key");
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    assert!(answer.contains("AccessDenied"), "{answer}");
}

#[test]
fn a_directory_that_is_not_there_is_made_with_the_bucket_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("objects");
    let _server = Running::start(&["--root", root.to_str().unwrap(), "--bucket", "answers"]);
    assert!(root.join("answers").is_dir());
}

#[test]
fn a_bucket_with_a_slash_is_refused() {
    let output = Command::new(PROGRAM)
        .args(["--bucket", "../a"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("no name for a bucket"), "{said}");
}

#[test]
fn help_explains_every_flag() {
    let output = Command::new(PROGRAM).arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for flag in [
        "--host",
        "--port",
        "--root",
        "--access-key",
        "--secret-key",
        "--bucket",
        "--delay-ms",
        "Examples",
    ] {
        assert!(help.contains(flag), "{flag} in {help}");
    }
}
