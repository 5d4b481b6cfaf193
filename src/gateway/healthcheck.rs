//! Asks a running gateway whether it is alive, so that a container image needs no curl.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(3);

/// Prints nothing when all is well; answers the exit code.
pub fn ask(url: &str, any_status: bool) -> i32 {
    match status(url) {
        Ok(200..=299) => 0,
        Ok(_) if any_status => 0,
        Ok(status) => {
            eprintln!("{url} answered {status}");
            1
        }
        Err(error) => {
            eprintln!("{url}: {error}");
            1
        }
    }
}

fn status(url: &str) -> std::io::Result<u16> {
    let bad = |what| std::io::Error::new(std::io::ErrorKind::InvalidInput, what);
    let rest = url
        .strip_prefix("http://")
        .ok_or_else(|| bad("the URL must begin with http://"))?;
    let (authority, path) = match rest.find('/') {
        Some(at) => rest.split_at(at),
        None => (rest, "/"),
    };
    let mut addresses = authority
        .to_socket_addrs()
        .map_err(|_| bad("the URL needs host:port"))?;
    let address = addresses
        .next()
        .ok_or_else(|| bad("the host has no address"))?;
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n"
    )?;
    let mut head = [0u8; 12]; // "HTTP/1.1 200"
    stream.read_exact(&mut head)?;
    std::str::from_utf8(&head[9..])
        .ok()
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| bad("the answer is not HTTP"))
}
