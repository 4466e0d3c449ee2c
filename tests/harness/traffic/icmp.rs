use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Netns;
use crate::capture::initialized;
use crate::lab::TIMEOUT;

/// Reason for which a ping had no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PingError {
    Timeout,
    /// A router on the way reported it, with the MTU it has.
    TooBig {
        mtu: u32,
    },
    /// A router on the way, or this machine's own, reported it.
    Unreachable,
}

#[derive(Clone, Copy, Debug)]
pub struct PingStats {
    pub sent: u32,
    pub lost: u32,
    /// Median round trip of those that came back; zero if none did.
    pub median: Duration,
}

/// Sends echo requests that must not be fragmented on the way.
pub struct Pinger {
    socket: Socket,
    to: IpAddr,
    ident: u16,
}

/// Pings so many times, one after the other.
pub fn ping(ns: &Netns, to: IpAddr, count: u16) -> Result<PingStats> {
    let pinger = Pinger::new(ns, to)?;
    let mut times = Vec::new();
    for sequence in 0..count {
        times.extend(pinger.echo(sequence, 56, TIMEOUT)?.ok());
    }
    times.sort_unstable();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    Ok(PingStats {
        sent: count.into(),
        lost: u32::from(count) - u32::try_from(times.len()).unwrap_or_default(),
        median,
    })
}

static NEXT_IDENT: AtomicU16 = AtomicU16::new(1);

impl Pinger {
    pub fn new(ns: &Netns, to: IpAddr) -> Result<Self> {
        let (domain, protocol) = match to {
            IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4),
            IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6),
        };
        let socket = ns
            .run(|| Socket::new(domain, Type::RAW, Some(protocol)))
            .context("opening a raw socket")?;
        never_fragment(&socket, to)?;
        Ok(Self { socket, to, ident: NEXT_IDENT.fetch_add(1, Ordering::Relaxed) })
    }

    /// The round trip of one echo with `size` bytes behind the eight of the ICMP header.
    pub fn echo(&self, sequence: u16, size: usize, at_most: Duration) -> Result<EchoResult> {
        let start = Instant::now();
        if let Err(error) = self.socket.send_to(&self.request(sequence, size), &self.target()) {
            // Errors of the kernel for `unreachable`, `prohibit` and a rejecting firewall.
            let refusals = [libc::EHOSTUNREACH, libc::ENETUNREACH, libc::EACCES, libc::EPERM];
            if refusals.into_iter().any(|code| error.raw_os_error() == Some(code)) {
                return Ok(Err(PingError::Unreachable));
            }
            return Err(error).context("sending a ping");
        }
        let mut buffer = [MaybeUninit::<u8>::uninit(); 65_536];
        loop {
            let left = at_most.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(Err(PingError::Timeout));
            }
            self.socket.set_read_timeout(Some(left))?;
            let Ok(len) = self.socket.recv(&mut buffer) else { continue };
            if let Some(answer) = self.judge(&initialized(&buffer[..len]), sequence) {
                return Ok(answer.map(|()| start.elapsed()));
            }
        }
    }

    fn target(&self) -> socket2::SockAddr {
        SocketAddr::new(self.to, 0).into()
    }

    fn request(&self, sequence: u16, size: usize) -> Vec<u8> {
        let kind = if self.to.is_ipv4() { 8 } else { 128 };
        let mut packet = vec![kind, 0, 0, 0];
        packet.extend(self.ident.to_be_bytes());
        packet.extend(sequence.to_be_bytes());
        packet.extend((0..size).map(|i| i as u8));
        if self.to.is_ipv4() {
            let sum = internet_checksum(&packet);
            packet[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        packet
    }

    /// Result of our request according to a received message; `None` if it is about something else.
    fn judge(&self, received: &[u8], sequence: u16) -> Option<Result<(), PingError>> {
        let v4 = self.to.is_ipv4();
        let icmp =
            if v4 { received.get(usize::from(received.first()? & 15) * 4..)? } else { received };
        let (&kind, &code) = (icmp.first()?, icmp.get(1)?);
        let word = u32::from_be_bytes(icmp.get(4..8)?.try_into().ok()?);
        let ours = (u32::from(self.ident) << 16) | u32::from(sequence);
        let about_ours = || {
            let inner = icmp.get(8..)?;
            let skip = if v4 { usize::from(inner.first()? & 15) * 4 } else { 40 };
            let echo = inner.get(skip + 4..skip + 8)?;
            (u32::from_be_bytes(echo.try_into().ok()?) == ours).then_some(())
        };
        match (v4, kind, code) {
            (true, 0, _) | (false, 129, _) => (word == ours).then_some(Ok(())),
            (true, 3, 4) => about_ours().map(|()| Err(PingError::TooBig { mtu: word & 0xffff })),
            (false, 2, _) => about_ours().map(|()| Err(PingError::TooBig { mtu: word })),
            (true, 3, _) | (false, 1, _) => about_ours().map(|()| Err(PingError::Unreachable)),
            (true | false, _, _) => None,
        }
    }
}

type EchoResult = Result<Duration, PingError>;

/// Sets "don't fragment" and ignores what the kernel has learnt about the path, so that every
/// packet goes out and every router on the way can reject it.
#[allow(unsafe_code)]
fn never_fragment(socket: &Socket, to: IpAddr) -> Result<()> {
    let (level, option, value) = match to {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE),
    };
    // SAFETY: `value` is an int that outlives the call, and its size is given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()).context("setting DF") }
}

/// RFC 1071.
fn internet_checksum(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
