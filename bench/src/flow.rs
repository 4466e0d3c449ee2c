//! TCP flows whose sending can be switched on and off.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{getsockopt, sockopt};
use socket2::{Domain, Socket, Type};
use weft_tests::Netns;

/// Bytes that one `write` and one `read` move at most, as in iperf3.
const BLOCK: usize = 128 * 1024;
/// Time without data after which a tunnel's flow counts as broken.
const PATIENCE: Duration = Duration::from_secs(5);

/// A TCP connection with a thread at each end, kept over the whole run so that no slice pays for
/// a handshake or a cold window.
pub(crate) struct Flow {
    state: Arc<State>,
    sender: Option<JoinHandle<()>>,
    sink: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    sending: AtomicBool,
    closing: AtomicBool,
    sent: AtomicU64,
    received: AtomicU64,
}

/// Load on a tunnel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    /// Flows side by side.
    pub(crate) flows: usize,
    /// The senders' congestion control.
    pub(crate) congestion: &'a str,
}

/// An end of a flow: a namespace and an address in it.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) net: Netns,
    pub(crate) address: SocketAddr,
}

impl Flow {
    /// Connects `from` (whose port does not matter) to `to`, with `congestion` control as the
    /// sender's route sets it: anything else would be another measurement.
    pub(crate) fn open(from: &End, to: &End, congestion: &str) -> Result<Self> {
        Self::open_towards(from, to, to.address.ip(), congestion)
    }

    /// The same where the sender sees the other end under another address, `seen`.
    pub(crate) fn open_towards(
        from: &End,
        to: &End,
        seen: IpAddr,
        congestion: &str,
    ) -> Result<Self> {
        let listener = to
            .net
            .run(|| TcpListener::bind(to.address))
            .with_context(|| format!("listening on {}", to.address))?;
        let port = listener.local_addr().context("asking for the port")?.port();
        let target = SocketAddr::new(seen, port);
        let sender = from
            .net
            .run(|| connect(from.address, target))
            .with_context(|| format!("connecting {} to {target}", from.address))?;
        let (sink, _) = listener.accept().context("accepting the connection")?;
        let used = getsockopt(&sender, sockopt::TcpCongestion).context("asking for congestion")?;
        ensure!(
            used.to_string_lossy().trim_end_matches('\0') == congestion,
            "TCP uses {used:?}, not {congestion}"
        );
        sender.set_write_timeout(Some(PATIENCE)).context("setting a timeout")?;
        let state = Arc::new(State::default());
        let (at_sender, at_sink) = (state.clone(), state.clone());
        Ok(Self {
            state,
            sender: Some(std::thread::spawn(move || at_sender.send(sender))),
            sink: Some(std::thread::spawn(move || at_sink.receive(sink))),
        })
    }

    pub(crate) fn received(&self) -> u64 {
        self.state.received.load(Ordering::Relaxed)
    }

    pub(crate) fn start(&self) {
        self.state.sending.store(true, Ordering::Relaxed);
        if let Some(sender) = &self.sender {
            sender.thread().unpark();
        }
    }

    pub(crate) fn stop(&self) {
        self.state.sending.store(false, Ordering::Relaxed);
    }

    /// Waits until nothing is under way any more, so that the next slice begins with empty queues.
    pub(crate) fn drain(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        // Twice: between the last look at the switch and the count lies one `write`.
        for _ in 0..2 {
            while self.state.sent.load(Ordering::Relaxed) != self.received() {
                ensure!(Instant::now() < deadline, "what was sent does not arrive");
                std::thread::sleep(Duration::from_millis(2));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop();
        self.state.closing.store(true, Ordering::Relaxed);
        if let Some(sender) = self.sender.take() {
            sender.thread().unpark();
            let _ = sender.join();
        }
        if let Some(sink) = self.sink.take() {
            let _ = sink.join();
        }
    }
}

impl State {
    fn send(&self, mut stream: TcpStream) {
        let block = vec![0_u8; BLOCK];
        while !self.closing.load(Ordering::Relaxed) {
            if !self.sending.load(Ordering::Relaxed) {
                std::thread::park_timeout(Duration::from_millis(100));
                continue;
            }
            match stream.write(&block) {
                Ok(written) => {
                    self.sent.fetch_add(written as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }

    fn receive(&self, mut stream: TcpStream) {
        let mut block = vec![0_u8; BLOCK];
        // A sender that is gone because its tunnel is must not leave this thread waiting.
        let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
        while !self.closing.load(Ordering::Relaxed) {
            match stream.read(&mut block) {
                Ok(0) => return,
                Ok(read) => {
                    self.received.fetch_add(read as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }
}

fn connect(from: SocketAddr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(from.ip(), 0).into())?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_sends_only_while_it_is_switched_on() {
        let net = Netns::new().unwrap();
        net.ip("route replace local 127.0.0.1 dev lo congctl reno").unwrap();
        let end = End { net, address: "127.0.0.1:0".parse().unwrap() };
        let flow = Flow::open(&end, &end, "reno").unwrap();
        assert_eq!(flow.received(), 0);
        flow.start();
        std::thread::sleep(Duration::from_millis(50));
        flow.stop();
        flow.drain().unwrap();
        let received = flow.received();
        assert!(received > 0);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(flow.received(), received);
    }

    #[test]
    fn another_congestion_control_than_asked_for_is_refused() {
        let net = Netns::new().unwrap();
        net.ip("route replace local 127.0.0.1 dev lo congctl reno").unwrap();
        let end = End { net, address: "127.0.0.1:0".parse().unwrap() };
        let error = Flow::open(&end, &end, "cubic").err().unwrap().to_string();
        assert!(error.contains("reno") && error.contains("cubic"), "{error}");
    }
}
