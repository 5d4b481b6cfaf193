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
    get(url, "", 0).map(|(status, _)| status)
}

/// A GET with these lines added to its head; answers the status and at most so much of the body.
pub fn get(url: &str, headers: &str, bytes_max: u64) -> std::io::Result<(u16, Vec<u8>)> {
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
    // 1.0: the answer is not chunked
    write!(
        stream,
        "GET {path} HTTP/1.0\r\nhost: {authority}\r\n{headers}connection: close\r\n\r\n"
    )?;
    let mut head = [0u8; 12]; // "HTTP/1.1 200"
    stream.read_exact(&mut head)?;
    let status = std::str::from_utf8(&head[9..])
        .ok()
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| bad("the answer is not HTTP"))?;
    let mut rest = Vec::new();
    if bytes_max > 0 {
        stream.take(bytes_max).read_to_end(&mut rest)?;
    }
    let body = rest.windows(4).position(|end| end == b"\r\n\r\n");
    Ok((
        status,
        body.map_or_else(Vec::new, |at| rest.split_off(at + 4)),
    ))
}
