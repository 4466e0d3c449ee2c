use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::relay::Relay;
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::Notify;
use tunnel::{Config, Counters, DropReason, Tai64n};

/// Probes that may wait for the lane to take them.
const MAX_PROBES: usize = 64;

/// Commands from the program to a lane. Only the latest of each kind counts.
#[derive(Debug)]
pub(super) struct Commands {
    /// Readable when there are new ones.
    pub(super) wake: EventFd,
    latest: Mutex<PendingCommands>,
}

#[derive(Debug, Default)]
pub(super) struct PendingCommands {
    pub(super) config: Option<Config>,
    pub(super) socket: Option<UdpSocket>,
    pub(super) initiate: bool,
    pub(super) reroute: bool,
    pub(super) go_back: bool,
    pub(super) slow: Option<bool>,
    pub(super) retire: Option<Option<Relay>>,
    pub(super) path_probing: Option<bool>,
    pub(super) segmenting: Option<bool>,
    /// Frames of one train probe.
    pub(super) train: Vec<Vec<u8>>,
    /// Frames as from the TUN. Unlike the rest, all of them count.
    pub(super) probes: Vec<Vec<u8>>,
    pub(super) stop: bool,
}

impl Commands {
    pub(super) fn new() -> nix::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self { wake: EventFd::from_flags(flags)?, latest: Mutex::default() })
    }

    /// Changes the commands and wakes the lane.
    pub(super) fn send(&self, change: impl FnOnce(&mut PendingCommands)) {
        change(&mut self.latest.lock().unwrap_or_else(PoisonError::into_inner));
        if let Err(error) = self.wake.write(1) {
            // Only if the counter is full, which wakes the lane as well.
            tracing::debug!(%error, "wake-up of the lane");
        }
    }

    /// Probes to send; those that find no room are lost.
    pub(super) fn send_probes(&self, probes: impl Iterator<Item = Vec<u8>>) {
        self.send(|latest| {
            let room = MAX_PROBES - latest.probes.len();
            latest.probes.extend(probes.take(room));
        });
    }

    /// Returns the commands since the last call.
    pub(super) fn take(&self) -> PendingCommands {
        // First, so that what is given from now on wakes again.
        if let Err(error) = self.wake.read() {
            tracing::debug!(%error, "wake-up of the lane");
        }
        std::mem::take(&mut *self.latest.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A lane's numbers, written by its thread alone. Each is exact; a set of them that belongs together
/// may be torn by one turn.
#[derive(Debug)]
pub(super) struct Published {
    started: Instant,
    totals: [AtomicU64; TOTALS],
    dropped_inbound: [AtomicU64; DropReason::COUNT],
    dropped_outbound: [AtomicU64; DropReason::COUNT],
    /// Nanoseconds from `started` to it, plus 1; 0 if there was none.
    last_authentic: AtomicU64,
    /// Timestamp of the last initiation in nanoseconds since 1970.
    last_stamp: AtomicU64,
    /// Rounds of the lane's loop, to see that it turns.
    pub(super) rounds: AtomicU64,
    pub(super) turns: AtomicU64,
    pub(super) full_reads: AtomicU64,
    pub(super) relayed: AtomicU64,
    /// Thread ID of the lane; 0 before it runs.
    pub(super) thread: AtomicI32,
    pub(super) gso_active: AtomicBool,
    pub(super) socket_overflows: AtomicU32,
    pub(super) large_sends: AtomicU64,
    /// Somebody waits for another one.
    pub(super) large_awaited: AtomicBool,
    pub(super) large_sent: Notify,
}

const TOTALS: usize = 11;

impl Published {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            started: now,
            totals: Default::default(),
            dropped_inbound: Default::default(),
            dropped_outbound: Default::default(),
            last_authentic: AtomicU64::new(0),
            last_stamp: AtomicU64::new(0),
            rounds: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            full_reads: AtomicU64::new(0),
            relayed: AtomicU64::new(0),
            thread: AtomicI32::new(0),
            gso_active: AtomicBool::new(false),
            socket_overflows: AtomicU32::new(0),
            large_sends: AtomicU64::new(0),
            large_awaited: AtomicBool::new(false),
            large_sent: Notify::new(),
        }
    }

    pub(super) fn store_large_sends(&self, count: u64) {
        if self.large_sends.load(Ordering::Relaxed) == count {
            return;
        }
        self.large_sends.store(count, Ordering::SeqCst);
        if self.large_awaited.load(Ordering::SeqCst) {
            self.large_awaited.store(false, Ordering::SeqCst);
            self.large_sent.notify_one();
        }
    }

    pub(super) fn store(&self, counters: &Counters, last_authentic: Option<Instant>) {
        store_all(&self.totals, &totals_of(counters));
        store_all(&self.dropped_inbound, &counters.dropped_inbound);
        store_all(&self.dropped_outbound, &counters.dropped_outbound);
        let since = last_authentic.map(|at| at.saturating_duration_since(self.started));
        let nanos = since.map_or(0, |since| since.as_nanos() as u64 + 1);
        self.last_authentic.store(nanos, Ordering::Relaxed);
    }

    pub(super) fn store_last_stamp(&self, stamp: Tai64n) {
        let nanos = u64::try_from(stamp.to_unix().as_nanos()).unwrap_or(u64::MAX);
        self.last_stamp.store(nanos, Ordering::Relaxed);
    }

    pub(super) fn last_stamp(&self) -> Tai64n {
        Tai64n::from_unix(Duration::from_nanos(self.last_stamp.load(Ordering::Relaxed)))
    }

    pub(super) fn counters(&self) -> Counters {
        let [
            rx_packets,
            rx_bytes,
            tx_packets,
            tx_bytes,
            tun_trains_read,
            tun_trains_written,
            trains_sent,
            trains_received,
            handshake_attempts,
            handshakes,
            endpoint_changes,
        ] = load_all(&self.totals);
        Counters {
            rx_packets,
            rx_bytes,
            tx_packets,
            tx_bytes,
            tun_trains_read,
            tun_trains_written,
            trains_sent,
            trains_received,
            handshake_attempts,
            handshakes,
            endpoint_changes,
            dropped_inbound: load_all(&self.dropped_inbound),
            dropped_outbound: load_all(&self.dropped_outbound),
        }
    }

    pub(super) fn last_authentic(&self) -> Option<Instant> {
        let nanos = self.last_authentic.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.started + Duration::from_nanos(nanos))
    }
}

fn totals_of(counters: &Counters) -> [u64; TOTALS] {
    [
        counters.rx_packets,
        counters.rx_bytes,
        counters.tx_packets,
        counters.tx_bytes,
        counters.tun_trains_read,
        counters.tun_trains_written,
        counters.trains_sent,
        counters.trains_received,
        counters.handshake_attempts,
        counters.handshakes,
        counters.endpoint_changes,
    ]
}

fn store_all<const N: usize>(to: &[AtomicU64; N], from: &[u64; N]) {
    for (to, from) in to.iter().zip(from) {
        to.store(*from, Ordering::Relaxed);
    }
}

fn load_all<const N: usize>(from: &[AtomicU64; N]) -> [u64; N] {
    std::array::from_fn(|i| from[i].load(Ordering::Relaxed))
}
