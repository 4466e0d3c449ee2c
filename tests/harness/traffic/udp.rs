use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::once_free;
use crate::Netns;
use crate::lab::TIMEOUT;

/// Sends every datagram back to where it came from, until this value is dropped.
pub struct UdpEcho {
    port: u16,
    stop: Arc<AtomicBool>,
    echoer: Option<JoinHandle<()>>,
}

impl UdpEcho {
    pub fn start(ns: &Netns, port: u16) -> Result<Self> {
        let socket = open(ns, IpAddr::from([0u16; 8]), port)?;
        let port = socket.local_addr()?.port();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let echoer = std::thread::spawn(move || {
            let mut buffer = vec![0; 65_536];
            while !stopped.load(Ordering::Relaxed) {
                if let Ok((len, from)) = socket.recv_from(&mut buffer) {
                    let _ = socket.send_to(&buffer[..len], from);
                }
            }
        });
        Ok(Self { port, stop, echoer: Some(echoer) })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for UdpEcho {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(echoer) = self.echoer.take() {
            let _ = echoer.join();
        }
    }
}

/// One datagram there and back.
pub fn udp_echo(ns: &Netns, to: SocketAddr, payload: &[u8]) -> Result<Duration> {
    let socket = open(ns, unspecified(to), 0)?;
    let start = Instant::now();
    socket.send_to(payload, to).with_context(|| format!("sending to {to}"))?;
    let mut buffer = vec![0; 65_536];
    while start.elapsed() < TIMEOUT {
        if let Ok((len, _)) = socket.recv_from(&mut buffer)
            && buffer[..len] == *payload
        {
            return Ok(start.elapsed());
        }
    }
    anyhow::bail!("no answer from {to} within {TIMEOUT:?}")
}

/// A socket connected to one address, so that it receives ICMP errors.
pub fn udp_connect(ns: &Netns, to: SocketAddr) -> Result<UdpSocket> {
    let socket = open(ns, unspecified(to), 0)?;
    socket.connect(to)?;
    Ok(socket)
}

/// Sends a datagram that is to be refused; what the ICMP error made of it, and after what time.
pub fn udp_refusal(socket: &UdpSocket, at_most: Duration) -> Result<(ErrorKind, Duration)> {
    socket.set_read_timeout(Some(at_most))?;
    let start = Instant::now();
    match socket.send(b"?").and_then(|_| socket.recv(&mut [0; 8])) {
        Ok(_) => anyhow::bail!("there was an answer"),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            anyhow::bail!("no refusal within {at_most:?}")
        }
        Err(error) => Ok((error.kind(), start.elapsed())),
    }
}

/// Result of a numbered stream of datagrams through an [`UdpEcho`].
#[derive(Clone, Debug, Default)]
pub struct FlowReport {
    pub sent: u64,
    /// Numbers that never came back.
    pub lost: Vec<u64>,
    pub duplicated: u64,
    pub reordered: u64,
    /// The longest time between two that came back, or from the last one to the end.
    pub longest_gap: Duration,
}

/// Sends a numbered datagram every `interval` for so long, and until `during`, which runs meanwhile, is
/// over, while another thread collects the echoes.
pub fn udp_flow<T>(
    ns: &Netns,
    to: SocketAddr,
    (interval, for_long): (Duration, Duration),
    during: impl FnOnce() -> T,
) -> Result<(FlowReport, T)> {
    let socket = open(ns, unspecified(to), 0)?;
    let sending = AtomicBool::new(true);
    let received = AtomicU64::new(0);
    // Disconnected once `during` is over, even if that panics.
    let (running, is_over) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let (socket, sending, received) = (&socket, &sending, &received);
        let collector = scope.spawn(move || collect(socket, sending, received));
        let sender = scope.spawn(move || {
            let start = Instant::now();
            let mut sent = 0u64;
            while start.elapsed() < for_long || is_over.try_recv() == Err(TryRecvError::Empty) {
                let _ = socket.send_to(&sent.to_be_bytes(), to);
                sent += 1;
                let next = interval.saturating_mul(u32::try_from(sent).unwrap_or(u32::MAX));
                std::thread::sleep(next.saturating_sub(start.elapsed()));
            }
            // Late echoes are not lost, early ones may come twice.
            let end = Instant::now();
            std::thread::sleep(TIMEOUT / 10);
            while received.load(Ordering::Relaxed) < sent && end.elapsed() < TIMEOUT {
                std::thread::sleep(TIMEOUT / 100);
            }
            sending.store(false, Ordering::Relaxed);
            sent
        });
        let value = {
            let _running = running;
            during()
        };
        let sent = sender.join().expect("the sender does not panic");
        let (seen, mut report) = collector.join().expect("the collector does not panic");
        report.sent = sent;
        report.lost = (0..sent).filter(|number| !seen.contains(number)).collect();
        let missing = seen.last().map_or(sent, |last| sent - 1 - last);
        let gap = interval.saturating_mul(u32::try_from(missing).unwrap_or(u32::MAX));
        report.longest_gap = report.longest_gap.max(gap);
        Ok((report, value))
    })
}

fn collect(
    socket: &UdpSocket,
    sending: &AtomicBool,
    received: &AtomicU64,
) -> (BTreeSet<u64>, FlowReport) {
    let (mut seen, mut report) = (BTreeSet::new(), FlowReport::default());
    let mut last = Instant::now();
    let mut buffer = [0; 64];
    while sending.load(Ordering::Relaxed) {
        let Ok((8, _)) = socket.recv_from(&mut buffer) else { continue };
        let number = u64::from_be_bytes(buffer[..8].try_into().expect("eight bytes"));
        report.longest_gap = report.longest_gap.max(last.elapsed());
        last = Instant::now();
        report.reordered += u64::from(seen.last().is_some_and(|newest| number < *newest));
        report.duplicated += u64::from(!seen.insert(number));
        received.store(seen.len() as u64, Ordering::Relaxed);
    }
    (seen, report)
}

pub(super) fn open(ns: &Netns, address: IpAddr, port: u16) -> Result<UdpSocket> {
    let socket = ns
        .run(|| once_free(|| UdpSocket::bind((address, port))))
        .with_context(|| format!("binding UDP port {port}"))?;
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    Ok(socket)
}

fn unspecified(to: SocketAddr) -> IpAddr {
    if to.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0u16; 8]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_over_loopback_loses_nothing() {
        let ns = Netns::new().unwrap();
        let echo = UdpEcho::start(&ns, 0).unwrap();
        let to = SocketAddr::from(([127, 0, 0, 1], echo.port()));
        assert!(udp_echo(&ns, to, b"hello").is_ok());

        let pace = (Duration::from_millis(1), Duration::from_millis(50));
        let (report, answer) = udp_flow(&ns, to, pace, || 42).unwrap();
        assert!(report.sent > 10 && report.lost.is_empty() && answer == 42, "{report:?}");
    }

    #[test]
    fn stream_lasts_as_long_as_what_runs_beside_it() {
        let ns = Netns::new().unwrap();
        let echo = UdpEcho::start(&ns, 0).unwrap();
        let to = SocketAddr::from(([127, 0, 0, 1], echo.port()));
        let pace = (Duration::from_millis(5), Duration::from_millis(50));
        let beside = || std::thread::sleep(Duration::from_millis(500));
        let (report, ()) = udp_flow(&ns, to, pace, beside).unwrap();
        assert!(report.sent > 50 && report.lost.is_empty(), "{report:?}");
    }
}
