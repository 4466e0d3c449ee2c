//! TCP and UDP flows whose sending can be switched on and off.

mod udp;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use nix::sys::socket::{getsockopt, sockopt};
use socket2::{Domain, Socket, Type};
use weft_tests::Netns;

/// Bytes that one `write` and one `read` move at most, as in iperf3.
const BLOCK: usize = 128 * 1024;
/// Time without data after which a tunnel's flow counts as broken.
const FLOW_TIMEOUT: Duration = Duration::from_secs(5);
/// A sender that is gone because its tunnel is must not leave the sink waiting.
const READ_TIMEOUT: Duration = Duration::from_millis(500);

/// A TCP connection, or a pair of UDP sockets, with a thread at each end, kept over the whole run so
/// that no slice pays for a handshake or a cold window.
pub(crate) struct Flow {
    traffic: Traffic,
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

/// Kind of packets that flows send, as fast as they can.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Traffic {
    Tcp,
    /// UDP datagrams of 1,372 bytes in trains of 47 (UDP_SEGMENT), as QUIC servers send them.
    UdpTrains,
    /// UDP datagrams of 1,372 bytes, one by one.
    Udp,
}

/// Load on a tunnel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load<'a> {
    pub(crate) traffic: Traffic,
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
    /// Sends from `from` (whose port does not matter) to `to`. TCP has the congestion control of `load`
    /// as the sender's route sets it: anything else would be another measurement.
    pub(crate) fn open(from: &End, to: &End, load: Load<'_>) -> Result<Self> {
        Self::open_towards(from, to, to.address.ip(), load)
    }

    /// The same where the sender sees the other end under another address, `seen`.
    pub(crate) fn open_towards(from: &End, to: &End, seen: IpAddr, load: Load<'_>) -> Result<Self> {
        match load.traffic {
            Traffic::Tcp => Self::open_tcp(from, to, seen, load.congestion),
            Traffic::UdpTrains | Traffic::Udp => Self::open_udp(from, to, seen, load.traffic),
        }
    }

    fn open_tcp(from: &End, to: &End, seen: IpAddr, congestion: &str) -> Result<Self> {
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
        sender.set_write_timeout(Some(FLOW_TIMEOUT)).context("setting a timeout")?;
        sink.set_read_timeout(Some(READ_TIMEOUT)).context("setting a timeout")?;
        Ok(Self::spawn(Traffic::Tcp, sender, sink))
    }

    fn open_udp(from: &End, to: &End, seen: IpAddr, traffic: Traffic) -> Result<Self> {
        let sink = to.net.run(|| udp::Sink::bind(to.address))?;
        let port = sink.socket().local_addr().context("asking for the port")?.port();
        sink.socket().set_read_timeout(Some(READ_TIMEOUT)).context("setting a timeout")?;
        let target = SocketAddr::new(seen, port);
        let segmented = traffic == Traffic::UdpTrains;
        let sender = from.net.run(|| udp::Sender::connect(from.address, target, segmented))?;
        Ok(Self::spawn(traffic, sender, sink))
    }

    fn spawn(
        traffic: Traffic,
        sender: impl Write + Send + 'static,
        sink: impl Read + Send + 'static,
    ) -> Self {
        let state = Arc::new(State::default());
        let (at_sender, at_sink) = (state.clone(), state.clone());
        Self {
            traffic,
            state,
            sender: Some(std::thread::spawn(move || at_sender.send(sender))),
            sink: Some(std::thread::spawn(move || at_sink.receive(sink))),
        }
    }

    pub(crate) fn sent(&self) -> u64 {
        self.state.sent.load(Ordering::Relaxed)
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
        match self.traffic {
            Traffic::Tcp => self.drain_tcp(),
            Traffic::UdpTrains | Traffic::Udp => self.drain_udp(),
        }
    }

    /// Waits until nothing has arrived for a while: what was lost never does.
    fn drain_udp(&self) -> Result<()> {
        let deadline = Instant::now() + FLOW_TIMEOUT;
        let mut seen = None;
        while seen != Some(self.received()) {
            ensure!(Instant::now() < deadline, "datagrams arrive after the sender has stopped");
            seen = Some(self.received());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn drain_tcp(&self) -> Result<()> {
        let deadline = Instant::now() + FLOW_TIMEOUT;
        // Twice: between the last look at the switch and the count lies one `write`.
        for _ in 0..2 {
            while self.sent() != self.received() {
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
    fn send(&self, mut stream: impl Write) {
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

    fn receive(&self, mut stream: impl Read) {
        let mut block = vec![0_u8; BLOCK];
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
    socket.connect_timeout(&to.into(), FLOW_TIMEOUT)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(congestion: &str) -> Load<'_> {
        Load { traffic: Traffic::Tcp, flows: 1, congestion }
    }

    #[test]
    fn udp_flow_counts_sent_and_received_bytes() {
        for traffic in [Traffic::Udp, Traffic::UdpTrains] {
            let net = Netns::new().unwrap();
            let end = End { net, address: "127.0.0.1:0".parse().unwrap() };
            let flow = Flow::open(&end, &end, Load { traffic, ..load("cubic") }).unwrap();
            flow.start();
            std::thread::sleep(Duration::from_millis(50));
            flow.stop();
            flow.drain().unwrap();
            let (sent, received) = (flow.sent(), flow.received());
            assert!(received > 0 && received <= sent, "{traffic:?}: {received} of {sent} bytes");
            assert_eq!(received % udp::DATAGRAM as u64, 0);
        }
    }

    #[test]
    fn flow_sends_only_while_switched_on() {
        let net = Netns::new().unwrap();
        net.ip("route replace local 127.0.0.1 dev lo congctl reno").unwrap();
        let end = End { net, address: "127.0.0.1:0".parse().unwrap() };
        let flow = Flow::open(&end, &end, load("reno")).unwrap();
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
    fn other_congestion_control_is_refused() {
        let net = Netns::new().unwrap();
        net.ip("route replace local 127.0.0.1 dev lo congctl reno").unwrap();
        let end = End { net, address: "127.0.0.1:0".parse().unwrap() };
        let error = Flow::open(&end, &end, load("cubic")).err().unwrap().to_string();
        assert!(error.contains("reno") && error.contains("cubic"), "{error}");
    }
}
