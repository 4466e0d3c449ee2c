//! Numbered datagrams at a rate, and a sink that checks them. What a packet costs here is next to
//! nothing beside its way through two nodes and two gateways.

use std::fmt;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt};
use weft_tests::Netns;
use weft_tests::traffic::Arrived;

/// Fits the smallest tunnel that carries IPv6.
const PAYLOAD: usize = 1200;
const TICK: Duration = Duration::from_millis(1);
/// Maximum that a generator catches up with after it could not run; the rest was never sent.
const MAX_AT_ONCE: u64 = 64;
/// Receive buffer in bytes: no burst is lost at the sink itself.
const SINK_BUFFER: usize = 64 << 20;
/// Time to wait for late datagrams at the end.
const TAIL: Duration = Duration::from_secs(1);

pub(crate) struct Ends {
    pub(crate) from: Netns,
    /// Address of the sink as the sender sees it.
    pub(crate) to: SocketAddr,
    pub(crate) at: Netns,
}

/// A running generator and its sink.
pub(crate) struct Load {
    shared: Arc<Shared>,
    sender: JoinHandle<()>,
    sink: JoinHandle<Arrived>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    ended: AtomicBool,
    sent: AtomicU64,
    left_out: AtomicU64,
    received: AtomicU64,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) duplicated: u64,
    /// Numbers that did not arrive: the first of each row, and how long that is. Known at the end.
    pub(crate) missing: Vec<(u64, u64)>,
}

/// Runs for `length`, and until late packets have arrived.
pub(crate) fn run(ends: &Ends, rate: f64, length: Duration) -> Result<Tally> {
    let load = Load::start(ends, rate)?;
    std::thread::sleep(length);
    Ok(load.stop())
}

impl Load {
    /// Sends so many packets a second.
    pub(crate) fn start(ends: &Ends, rate: f64) -> Result<Self> {
        let bind = |ns: &Netns, port| ns.run(|| UdpSocket::bind((any(ends.to), port)));
        let sink = bind(&ends.at, ends.to.port()).context("opening the sink")?;
        setsockopt(&sink, sockopt::RcvBufForce, &SINK_BUFFER).context("making room for bursts")?;
        sink.set_read_timeout(Some(Duration::from_millis(20)))?;
        let source = bind(&ends.from, 0).context("opening the source")?;
        let (shared, to) = (Arc::new(Shared::default()), ends.to);
        let (ours, theirs) = (Arc::clone(&shared), Arc::clone(&shared));
        let sender = std::thread::spawn(move || send(&source, to, rate, &ours));
        let sink = std::thread::spawn(move || receive(&sink, &theirs));
        Ok(Self { shared, sender, sink })
    }

    /// Tally so far; what is on its way counts as lost.
    pub(crate) fn tally(&self) -> Tally {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let received = read(&self.shared.received);
        Tally { sent: read(&self.shared.sent), received, ..Tally::default() }
    }

    /// Packets that were not sent because the generator could not run in time.
    pub(crate) fn left_out(&self) -> u64 {
        self.shared.left_out.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(self) -> Tally {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.sender.join().expect("the sender does not panic");
        std::thread::sleep(TAIL);
        self.shared.ended.store(true, Ordering::Relaxed);
        let arrived = self.sink.join().expect("the sink does not panic");
        let sent = self.shared.sent.load(Ordering::Relaxed);
        let missing = arrived.missing(sent);
        Tally { sent, received: arrived.count(), duplicated: arrived.duplicated, missing }
    }
}

impl Tally {
    pub(crate) fn lost(&self) -> u64 {
        self.sent.saturating_sub(self.received)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = self.lost() as f64 / self.sent.max(1) as f64;
        write!(f, "sent {}, lost {} ({share:.1e})", self.sent, self.lost())
    }
}

fn send(socket: &UdpSocket, to: SocketAddr, rate: f64, shared: &Shared) {
    let mut datagram = [0; PAYLOAD];
    let (start, mut number, mut left_out) = (Instant::now(), 0, 0);
    while !shared.stop.load(Ordering::Relaxed) {
        let due = (start.elapsed().as_secs_f64() * rate) as u64;
        let behind = due - number - left_out;
        left_out += behind.saturating_sub(MAX_AT_ONCE);
        for _ in 0..behind.min(MAX_AT_ONCE) {
            datagram[..8].copy_from_slice(&u64::to_be_bytes(number));
            // A datagram that cannot be sent is lost, like any other that does not arrive.
            let _ = socket.send_to(&datagram, to);
            number += 1;
        }
        shared.sent.store(number, Ordering::Relaxed);
        shared.left_out.store(left_out, Ordering::Relaxed);
        std::thread::sleep(TICK);
    }
}

fn receive(socket: &UdpSocket, shared: &Shared) -> Arrived {
    let (mut arrived, mut buffer) = (Arrived::default(), [0; PAYLOAD]);
    while !shared.ended.load(Ordering::Relaxed) {
        if let Ok((8.., _)) = socket.recv_from(&mut buffer) {
            arrived.insert(u64::from_be_bytes(buffer[..8].try_into().expect("eight bytes")));
            shared.received.store(arrived.count(), Ordering::Relaxed);
        }
    }
    arrived
}

fn any(like: SocketAddr) -> std::net::IpAddr {
    if like.is_ipv4() { [0; 4].into() } else { [0u16; 8].into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_load_keeps_rate_and_loses_nothing() {
        let ns = Netns::new().unwrap();
        let to = SocketAddr::from(([127, 0, 0, 1], 7000));
        let ends = Ends { from: ns.clone(), to, at: ns };
        let tally = run(&ends, 2000.0, Duration::from_millis(300)).unwrap();
        assert!((100..=700).contains(&tally.sent) && tally.lost() == 0, "{tally}");
    }
}
