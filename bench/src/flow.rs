//! TCP and UDP flows whose sending can be switched on and off, at full speed or at a held rate.

mod pace;
mod sequence;
mod udp;

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{getsockopt, sockopt};
use socket2::{Domain, Socket, Type};
use weft_tests::Netns;

use self::pace::Pace;

/// Congestion control of all senders. BBR paces: its timers run TCP on the gateways' account and
/// hide half of any difference.
pub(crate) const CONGESTION: &str = "cubic";
/// Bytes that one `write` and one `read` move at most, as in iperf3.
const BLOCK: usize = 128 * 1024;
/// Time without data after which a tunnel's flow counts as broken.
const FLOW_TIMEOUT: Duration = Duration::from_secs(5);
/// A sender that is gone because its tunnel is must not leave the sink waiting.
const READ_TIMEOUT: Duration = Duration::from_millis(500);
/// Time after which a datagram that has not arrived is lost.
const SETTLED: Duration = Duration::from_millis(40);
/// Pause between two looks at what TCP has still under way.
const SHORT: Duration = Duration::from_millis(2);

/// A TCP connection, or a pair of UDP sockets, with a thread at each end, kept over a whole line so
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
    /// True once the sender has stopped and counted all that it sent.
    parked: AtomicBool,
    closing: AtomicBool,
    /// Bits per second; 0 for as many as possible.
    rate: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
    duplicates: AtomicU64,
    reordered: AtomicU64,
}

/// Kind of packets of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Traffic {
    Tcp,
    /// UDP with so many bytes of payload, in trains (`UDP_SEGMENT`) or one by one.
    Udp {
        datagram: usize,
        segmented: bool,
    },
}

/// Counters of flows since they were opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Bytes of payload.
    pub(crate) sent: u64,
    /// Bytes of payload, without duplicates.
    pub(crate) received: u64,
    /// Datagrams.
    pub(crate) duplicates: u64,
    pub(crate) reordered: u64,
}

/// Outcome of one receiving call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Arrived {
    bytes: usize,
    duplicates: u64,
    reordered: u64,
}

/// An end of a path: a namespace, an address in it, and the address under which the other end sees
/// that one.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) net: Netns,
    pub(crate) address: IpAddr,
    pub(crate) seen: IpAddr,
}

impl Flow {
    pub(crate) fn open(from: &End, to: &End, traffic: Traffic) -> Result<Self> {
        match traffic {
            Traffic::Tcp => Self::open_tcp(from, to),
            Traffic::Udp { datagram, segmented } => {
                let mut sink = to.net.run(|| udp::Sink::bind(to.address, datagram))?;
                let port = sink.socket().local_addr().context("asking for the port")?.port();
                let timeout = sink.socket().set_read_timeout(Some(READ_TIMEOUT));
                timeout.context("setting a timeout")?;
                let target = SocketAddr::new(to.seen, port);
                let connect = || udp::Sender::connect(from.address, target, datagram, segmented);
                let mut sender = from.net.run(connect)?;
                Ok(Self::spawn(traffic, move || sender.send(), move || sink.receive()))
            }
        }
    }

    /// The congestion control is that of the sender's route: anything but [`CONGESTION`] would be
    /// another measurement.
    fn open_tcp(from: &End, to: &End) -> Result<Self> {
        let listener = to
            .net
            .run(|| TcpListener::bind((to.address, 0)))
            .with_context(|| format!("listening on {}", to.address))?;
        let port = listener.local_addr().context("asking for the port")?.port();
        let target = SocketAddr::new(to.seen, port);
        let mut sender = from
            .net
            .run(|| connect(from.address, target))
            .with_context(|| format!("connecting {} to {target}", from.address))?;
        let (mut sink, _) = listener.accept().context("accepting the connection")?;
        let used = getsockopt(&sender, sockopt::TcpCongestion).context("asking for congestion")?;
        ensure!(
            used.to_string_lossy().trim_end_matches('\0') == CONGESTION,
            "TCP uses {used:?}, not {CONGESTION}"
        );
        sender.set_write_timeout(Some(FLOW_TIMEOUT)).context("setting a timeout")?;
        sink.set_read_timeout(Some(READ_TIMEOUT)).context("setting a timeout")?;
        let (block, mut buffer) = (vec![0; BLOCK], vec![0; BLOCK]);
        let receive = move || {
            let bytes = sink.read(&mut buffer)?;
            Ok(Arrived { bytes, ..Arrived::default() })
        };
        Ok(Self::spawn(Traffic::Tcp, move || sender.write(&block), receive))
    }

    fn spawn(
        traffic: Traffic,
        send: impl FnMut() -> io::Result<usize> + Send + 'static,
        receive: impl FnMut() -> io::Result<Arrived> + Send + 'static,
    ) -> Self {
        let state = Arc::new(State::default());
        let (at_sender, at_sink) = (state.clone(), state.clone());
        Self {
            traffic,
            state,
            sender: Some(std::thread::spawn(move || at_sender.send(send))),
            sink: Some(std::thread::spawn(move || at_sink.receive(receive))),
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            sent: count(&self.state.sent),
            received: count(&self.state.received),
            duplicates: count(&self.state.duplicates),
            reordered: count(&self.state.reordered),
        }
    }

    /// Starts sending, at so many bits per second if that is held.
    pub(crate) fn start(&self, rate: Option<f64>) {
        self.state.rate.store(rate.map_or(0, |rate| rate as u64), Ordering::Relaxed);
        self.state.parked.store(false, Ordering::SeqCst);
        self.state.sending.store(true, Ordering::SeqCst);
        if let Some(sender) = &self.sender {
            sender.thread().unpark();
        }
    }

    pub(crate) fn stop(&self) {
        self.state.sending.store(false, Ordering::SeqCst);
    }

    /// Waits until nothing is under way any more, so that the next slice begins with empty queues.
    pub(crate) fn drain(&self) -> Result<()> {
        let deadline = Instant::now() + FLOW_TIMEOUT;
        let (mut seen, mut is_drained) = (self.counts(), false);
        while !is_drained {
            ensure!(Instant::now() < deadline, "packets under way {FLOW_TIMEOUT:?} after the end");
            std::thread::sleep(match self.traffic {
                Traffic::Tcp => SHORT,
                Traffic::Udp { .. } => SETTLED,
            });
            let is_parked = self.state.parked.load(Ordering::SeqCst);
            let now = self.counts();
            is_drained = is_parked
                && match self.traffic {
                    Traffic::Tcp => now.sent == now.received,
                    // Datagrams that were lost never arrive.
                    Traffic::Udp { .. } => now.received == seen.received,
                };
            seen = now;
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
    fn send(&self, mut send: impl FnMut() -> io::Result<usize>) {
        let mut pace = None;
        while !self.closing.load(Ordering::Relaxed) {
            if !self.sending.load(Ordering::SeqCst) {
                pace = None;
                self.parked.store(true, Ordering::SeqCst);
                std::thread::park_timeout(Duration::from_millis(100));
                continue;
            }
            self.parked.store(false, Ordering::SeqCst);
            let rate = self.rate.load(Ordering::Relaxed);
            let pace = pace.get_or_insert_with(|| Pace::new(rate, Instant::now()));
            if let Some(pause) = pace.pause(Instant::now()) {
                std::thread::sleep(pause);
                continue;
            }
            match send() {
                Ok(sent) => {
                    pace.record(sent);
                    self.sent.fetch_add(sent as u64, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }

    fn receive(&self, mut receive: impl FnMut() -> io::Result<Arrived>) {
        while !self.closing.load(Ordering::Relaxed) {
            match receive() {
                Ok(Arrived { bytes: 0, duplicates: 0, .. }) => return,
                Ok(arrived) => {
                    self.received.fetch_add(arrived.bytes as u64, Ordering::Relaxed);
                    self.duplicates.fetch_add(arrived.duplicates, Ordering::Relaxed);
                    self.reordered.fetch_add(arrived.reordered, Ordering::Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
        }
    }
}

fn connect(from: IpAddr, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None)?;
    socket.bind(&SocketAddr::new(from, 0).into())?;
    socket.connect_timeout(&to.into(), FLOW_TIMEOUT)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(congestion: &str) -> End {
        let net = Netns::new().unwrap();
        net.ip(&format!("route replace local 127.0.0.1 dev lo congctl {congestion}")).unwrap();
        End { net, address: [127, 0, 0, 1].into(), seen: [127, 0, 0, 1].into() }
    }

    fn sent_in(flow: &Flow, rate: Option<f64>, time: Duration) -> Counts {
        flow.start(rate);
        std::thread::sleep(time);
        flow.stop();
        flow.drain().unwrap();
        flow.counts()
    }

    #[test]
    fn udp_flow_counts_sent_and_received_bytes() {
        let end = end(CONGESTION);
        for segmented in [false, true] {
            let flow = Flow::open(&end, &end, Traffic::Udp { datagram: 1372, segmented }).unwrap();
            let counts = sent_in(&flow, None, Duration::from_millis(50));
            assert!(counts.received > 0 && counts.received <= counts.sent, "{counts:?}");
            assert_eq!((counts.received % 1372, counts.duplicates), (0, 0));
        }
    }

    #[test]
    fn held_rate_is_held() {
        let end = end(CONGESTION);
        for traffic in [Traffic::Tcp, Traffic::Udp { datagram: 64, segmented: true }] {
            let flow = Flow::open(&end, &end, traffic).unwrap();
            let start = Instant::now();
            let counts = sent_in(&flow, Some(80e6), Duration::from_millis(300));
            // And what a sender may be late with, and one block.
            let most = start.elapsed().as_secs_f64() * 10e6 + 50e3 + BLOCK as f64;
            assert!(counts.sent > 0 && counts.sent as f64 <= most, "{traffic:?}: {counts:?}");
        }
    }

    #[test]
    fn flow_sends_only_while_switched_on() {
        let end = end(CONGESTION);
        let flow = Flow::open(&end, &end, Traffic::Tcp).unwrap();
        assert_eq!(flow.counts().received, 0);
        let received = sent_in(&flow, None, Duration::from_millis(50)).received;
        assert!(received > 0);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(flow.counts().received, received);
    }

    #[test]
    fn other_congestion_control_is_refused() {
        let end = end("reno");
        let error = Flow::open(&end, &end, Traffic::Tcp).err().unwrap().to_string();
        assert!(error.contains("reno") && error.contains(CONGESTION), "{error}");
    }
}
