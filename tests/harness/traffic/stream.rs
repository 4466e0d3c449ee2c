use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};

use super::udp::open;
use crate::Netns;

/// Time to wait for late datagrams at the end.
const TAIL: Duration = Duration::from_secs(2);

/// Receive buffer in bytes, so that a sink that has to wait for the processor loses nothing itself.
const SINK_BUFFER: usize = 8 << 20;

/// Datagrams that go one way, and nothing comes back.
pub struct Way {
    pub from: Netns,
    /// Address as the sender sees it.
    pub to: SocketAddr,
    /// Namespace in which they arrive, on the port of `to`.
    pub at: Netns,
}

/// Numbered datagrams on many ways side by side, until this value is stopped.
pub struct Streams {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<u64>,
    sink: JoinHandle<Vec<Arrived>>,
    interval: Duration,
}

/// Result of one of the [`Streams`].
#[derive(Clone, Debug, Default)]
pub struct StreamReport {
    pub sent: u64,
    pub lost: u64,
    pub duplicated: u64,
    /// The longest time in which everything was lost.
    pub longest_outage: Duration,
    /// Since the start, of the first that was lost.
    pub first_lost: Option<Duration>,
}

/// Set of the numbers that have arrived: 0 up to 64 are the bits of the first `u64`, and so on.
#[derive(Clone, Debug, Default)]
pub struct Arrived {
    words: Vec<u64>,
    count: u64,
    pub duplicated: u64,
}

impl Streams {
    /// A datagram on every way each `interval`, each with `padding` zeros behind its number.
    pub fn start(ways: &[Way], interval: Duration, padding: usize) -> Result<Self> {
        let (mut outs, mut ins) = (Vec::new(), Vec::new());
        for way in ways {
            let unspecified = IpAddr::from([0u16; 8]);
            let sink = open(&way.at, unspecified, way.to.port())?;
            sink.set_nonblocking(true).context("making a sink not block")?;
            setsockopt(&sink, sockopt::RcvBufForce, &SINK_BUFFER).context("making room")?;
            ins.push(sink);
            let any = if way.to.is_ipv4() { IpAddr::from([0; 4]) } else { unspecified };
            outs.push((open(&way.from, any, 0)?, way.to));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (out_stop, in_stop) = (Arc::clone(&stop), Arc::clone(&stop));
        let sender = std::thread::spawn(move || send(&outs, interval, padding, &out_stop));
        let sink = std::thread::spawn(move || receive(&ins, &in_stop));
        Ok(Self { stop, sender, sink, interval })
    }

    /// Waits for what is on its way; one report for each way, in their order.
    pub fn stop(self) -> Vec<StreamReport> {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self.sender.join().expect("the sender does not panic");
        let arrived = self.sink.join().expect("the sink does not panic");
        arrived.iter().map(|arrived| arrived.report(sent, self.interval)).collect()
    }
}

impl Arrived {
    pub fn insert(&mut self, number: u64) {
        let (word, bit) = ((number / 64) as usize, 1 << (number % 64));
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        if self.words[word] & bit != 0 {
            self.duplicated += 1;
        } else {
            self.words[word] |= bit;
            self.count += 1;
        }
    }

    pub fn contains(&self, number: u64) -> bool {
        let word = self.words.get((number / 64) as usize).copied().unwrap_or_default();
        word & 1 << (number % 64) != 0
    }

    /// Rows of numbers below `sent` that have not arrived: first and how many.
    pub fn missing(&self, sent: u64) -> Vec<(u64, u64)> {
        let mut rows: Vec<(u64, u64)> = Vec::new();
        for number in (0..sent).filter(|number| !self.contains(*number)) {
            match rows.last_mut() {
                Some((first, count)) if *first + *count == number => *count += 1,
                Some(_) | None => rows.push((number, 1)),
            }
        }
        rows
    }

    /// Count of different numbers that have arrived.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Report on the numbers below `sent`, one each `interval`.
    fn report(&self, sent: u64, interval: Duration) -> StreamReport {
        let rows = self.missing(sent);
        let longest = rows.iter().map(|(_, count)| *count).max().unwrap_or_default();
        let times = |number| interval * u32::try_from(number).unwrap_or(u32::MAX);
        StreamReport {
            sent,
            lost: sent - self.count,
            duplicated: self.duplicated,
            longest_outage: times(longest),
            first_lost: rows.first().map(|(first, _)| times(*first)),
        }
    }
}

/// Sends at a rate, and never catches up after a pause: a burst is another kind of traffic.
fn send(
    outs: &[(UdpSocket, SocketAddr)],
    interval: Duration,
    padding: usize,
    stop: &AtomicBool,
) -> u64 {
    let mut next = Instant::now();
    let mut datagram = vec![0; 8 + padding];
    let mut number = 0u64;
    while !stop.load(Ordering::Relaxed) {
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        for (socket, to) in outs {
            // A datagram that cannot be sent is lost, like any other that does not arrive.
            let _ = socket.send_to(&datagram, to);
        }
        number += 1;
        next = (next + interval).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    number
}

fn receive(ins: &[UdpSocket], stop: &AtomicBool) -> Vec<Arrived> {
    let mut arrived = vec![Arrived::default(); ins.len()];
    let mut fds: Vec<_> =
        ins.iter().map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)).collect();
    let mut buffer = [0; 64];
    let mut end = None;
    while end.is_none_or(|end| Instant::now() < end) {
        if end.is_none() && stop.load(Ordering::Relaxed) {
            end = Some(Instant::now() + TAIL);
        }
        let _ = poll(&mut fds, PollTimeout::from(20u8));
        for (fd, (socket, arrived)) in fds.iter().zip(ins.iter().zip(&mut arrived)) {
            if fd.any() != Some(true) {
                continue;
            }
            while let Ok((8.., _)) = socket.recv_from(&mut buffer) {
                arrived.insert(u64::from_be_bytes(buffer[..8].try_into().expect("eight bytes")));
            }
        }
    }
    arrived
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_stream_loses_nothing_closed_loses_all() {
        let (ns, nowhere) = (Netns::new().unwrap(), Netns::new().unwrap());
        let to = SocketAddr::from(([127, 0, 0, 1], 7001));
        let elsewhere = SocketAddr::from(([127, 0, 0, 1], 7002));
        let ways = [
            Way { from: ns.clone(), to, at: ns.clone() },
            Way { from: ns, to: elsewhere, at: nowhere },
        ];
        let streams = Streams::start(&ways, Duration::from_millis(1), 5).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let reports = streams.stop();
        // A machine at work may not send more.
        assert!(reports[0].sent > 0 && reports[0].lost == 0, "{reports:?}");
        assert_eq!(reports[0].longest_outage, Duration::ZERO);
        assert_eq!(reports[1].lost, reports[1].sent);
        assert_eq!(reports[1].first_lost, Some(Duration::ZERO));
    }

    #[test]
    fn longest_outage_is_longest_gap_of_numbers() {
        let mut arrived = Arrived::default();
        (0..100).filter(|n| !matches!(n, 10 | 60..65)).for_each(|n| arrived.insert(n));
        arrived.insert(0);
        let report = arrived.report(101, Duration::from_millis(10));
        assert_eq!((report.lost, report.duplicated), (7, 1));
        assert_eq!(report.longest_outage, Duration::from_millis(50));
        assert_eq!(report.first_lost, Some(Duration::from_millis(100)));
    }
}
