use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Socket, Type};

use super::once_free;
use crate::Netns;

/// No read or write of a server or client may wait longer.
const STALL: Duration = Duration::from_secs(20);
/// Connections that are held open may be idle for that long.
const SILENCE: Duration = Duration::from_secs(600);
const BLOCK: usize = 256 * 1024;

/// Behaviour of a server on each connection.
#[derive(Clone, Copy, Debug)]
pub enum Service {
    /// Sends back what it gets.
    Echo,
    /// HTTP/1.1: answers any request with the client's address as the server sees it.
    Http,
    /// Takes everything and answers with its checksum.
    Sink,
}

/// A TCP server in a namespace, until this value is dropped.
pub struct TcpServer {
    address: SocketAddr,
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl TcpServer {
    pub fn start(ns: &Netns, port: u16, service: Service) -> Result<Self> {
        let listener = ns.run(|| listen_on_both_families(port))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let acceptor = std::thread::spawn(move || accept(&listener, &stopped, service));
        Ok(Self { address, stop, acceptor: Some(acceptor) })
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct BulkReport {
    pub bytes: u64,
    pub took: Duration,
}

impl BulkReport {
    pub fn megabits_per_second(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.took.as_secs_f64() / 1e6
    }
}

/// Connects from inside a namespace.
pub fn connect(ns: &Netns, to: SocketAddr, at_most: Duration) -> std::io::Result<TcpStream> {
    let stream = ns.run(|| TcpStream::connect_timeout(&to, at_most))?;
    stream.set_read_timeout(Some(STALL))?;
    stream.set_write_timeout(Some(STALL))?;
    Ok(stream)
}

/// Address of the client as a [`Service::Http`] server sees it.
pub fn http_get(ns: &Netns, to: SocketAddr) -> Result<IpAddr> {
    let mut stream = connect(ns, to, STALL).with_context(|| format!("connecting to {to}"))?;
    write!(stream, "GET /whoami HTTP/1.1\r\nHost: {to}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("reading the answer")?;
    ensure!(answer.starts_with("HTTP/1.1 200 "), "{to} answered {answer:?}");
    let body = answer.rsplit("\r\n\r\n").next().unwrap_or_default();
    body.trim().parse().with_context(|| format!("{to} answered {answer:?}"))
}

/// Sends so many bytes to a [`Service::Sink`] server and compares checksums.
pub fn bulk(ns: &Netns, to: SocketAddr, bytes: u64) -> Result<BulkReport> {
    paced_bulk(ns, to, bytes, Duration::ZERO)
}

/// The same with a pause before each quarter of a megabyte, so that it takes its time.
pub fn paced_bulk(ns: &Netns, to: SocketAddr, bytes: u64, pause: Duration) -> Result<BulkReport> {
    let mut stream = connect(ns, to, STALL).with_context(|| format!("connecting to {to}"))?;
    let start = Instant::now();
    let mut checksum = Checksum::default();
    let mut block = vec![0; BLOCK];
    let mut left = bytes;
    while left > 0 {
        std::thread::sleep(pause);
        let len = left.min(BLOCK as u64) as usize;
        fill(&mut block[..len], left);
        checksum.add(&block[..len]);
        stream
            .write_all(&block[..len])
            .with_context(|| format!("sending to {to}, {left} bytes left"))?;
        left -= len as u64;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).context("reading the checksum")?;
    let took = start.elapsed();
    ensure!(
        u64::from_be_bytes(answer) == checksum.0,
        "what {to} received differs from what was sent"
    );
    Ok(BulkReport { bytes, took })
}

fn listen_on_both_families(port: u16) -> Result<TcpListener> {
    let any = SocketAddr::new(IpAddr::from([0u16; 8]), port);
    let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    once_free(|| socket.bind(&any.into())).with_context(|| format!("binding TCP port {port}"))?;
    socket.listen(128)?;
    Ok(socket.into())
}

fn accept(listener: &TcpListener, stop: &AtomicBool, service: Service) {
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, from)) => {
                std::thread::spawn(move || serve(stream, from, service));
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(_) => return,
        }
    }
}

/// A connection that breaks is an error of the client.
fn serve(mut stream: TcpStream, from: SocketAddr, service: Service) -> Option<()> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(STALL)).ok()?;
    stream.set_write_timeout(Some(STALL)).ok()?;
    match service {
        Service::Echo => {
            stream.set_read_timeout(Some(SILENCE)).ok()?;
            let mut block = vec![0; BLOCK];
            loop {
                let len = stream.read(&mut block).ok().filter(|len| *len > 0)?;
                stream.write_all(&block[..len]).ok()?;
            }
        }
        Service::Http => {
            let mut head = BufReader::new(stream.try_clone().ok()?);
            let mut line = String::new();
            while head.read_line(&mut line).ok()? > 0 && line != "\r\n" {
                line.clear();
            }
            let body = format!("{}\n", from.ip().to_canonical());
            let len = body.len();
            write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{body}"
            )
            .ok()
        }
        Service::Sink => {
            let mut checksum = Checksum::default();
            let mut block = vec![0; BLOCK];
            let mut carried = 0;
            loop {
                let len = stream.read(&mut block[carried..]).ok()?;
                let full = carried + len;
                let take = if len == 0 { full } else { full - full % 8 };
                checksum.add(&block[..take]);
                block.copy_within(take..full, 0);
                carried = full - take;
                if len == 0 {
                    break;
                }
            }
            stream.write_all(&checksum.0.to_be_bytes()).ok()
        }
    }
}

/// Bytes that differ from block to block, cheaply made.
fn fill(block: &mut [u8], seed: u64) {
    let mut word = seed ^ 0x9e37_79b9_7f4a_7c15;
    for chunk in block.chunks_mut(8) {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
}

/// Depends on every byte and on their order, at a fraction of the cost of sending them.
#[derive(Default)]
struct Checksum(u64);

impl Checksum {
    /// Only the last block of a stream may have a length that is no multiple of eight.
    fn add(&mut self, block: &[u8]) {
        for chunk in block.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = (self.0 ^ u64::from_le_bytes(word))
                .wrapping_mul(0x0000_0100_0000_01b3)
                .rotate_left(23);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bulk_is_complete_and_http_reports_source() {
        let ns = Netns::new().unwrap();
        let sink = TcpServer::start(&ns, 0, Service::Sink).unwrap();
        let http = TcpServer::start(&ns, 0, Service::Http).unwrap();
        let at = |server: &TcpServer| SocketAddr::from(([127, 0, 0, 1], server.port()));

        let report = bulk(&ns, at(&sink), 10_000_003).unwrap();
        assert_eq!(report.bytes, 10_000_003);
        assert_eq!(http_get(&ns, at(&http)).unwrap(), IpAddr::from([127, 0, 0, 1]));
        assert!(connect(&ns, ([127, 0, 0, 1], 9).into(), STALL).is_err());
    }

    #[test]
    fn checksum_detects_flipped_bit_and_swap() {
        let sum = |bytes: &[u8]| {
            let mut checksum = Checksum::default();
            checksum.add(bytes);
            checksum.0
        };
        let mut block = vec![0; 64];
        fill(&mut block, 5);
        let whole = sum(&block);
        block[40] ^= 1;
        assert_ne!(sum(&block), whole);
        block[40] ^= 1;
        block.swap(8, 16);
        assert_ne!(sum(&block), whole);
    }
}
