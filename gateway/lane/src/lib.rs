//! The driver of the engine: one thread, one TUN queue, one UDP socket, run to completion.
//!
//! A [`Lane`] thread never hands a packet to another thread and never waits for more packets than
//! are there. The rest of the program talks to it through a [`LaneHandle`]: the latest config in,
//! counters and the peer's state out.

mod driver;
mod early_drop;
mod endpoint_changes;
mod port;
mod relay;
mod shared;
mod socket;
mod tun;

use std::io;
use std::net::{IpAddr, UdpSocket};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
pub use tunnel::{Config, Counters, PeerState, Tai64n};

use self::driver::{Driver, Links};
use self::relay::Relay;
pub use self::relay::open_relay;
use self::shared::{Commands, Published};
pub use self::socket::open_socket;
pub use self::tun::{Tun, open_tun};

/// Offloads that may be used. All true unless a switch forces a fallback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offloads {
    /// UDP segmentation when sending (`--no-gso`).
    pub gso: bool,
    /// UDP receive coalescing (`--no-gro`).
    pub gro: bool,
    /// TCP and UDP segmentation and checksums on the TUN (`--no-tun-offload`).
    pub tun: bool,
}

impl Offloads {
    pub const ALL: Self = Self { gso: true, gro: true, tun: true };
}

/// Pause between two looks whether a lane has turned.
pub const HEARTBEAT_STEP: Duration = Duration::from_millis(10);

/// The program's side of a lane. Dropping it stops the lane.
#[derive(Debug)]
pub struct LaneHandle {
    commands: Arc<Commands>,
    published: Arc<Published>,
    changes: watch::Receiver<PeerState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl LaneHandle {
    /// Starts the thread. It ends early only if the TUN device is deleted, which is logged, closes
    /// [`LaneHandle::changes`] and shows in [`LaneHandle::is_running`]. Timestamps of initiations are later
    /// than `stamp_floor`, the last one of an earlier lane with the same private key.
    pub fn spawn(
        (tun, socket): (Tun, UdpSocket),
        offloads: Offloads,
        config: Config,
        stamp_floor: Tai64n,
    ) -> io::Result<Self> {
        let commands = Arc::new(Commands::new()?);
        let published = Arc::new(Published::new(Instant::now()));
        let (sender, changes) = watch::channel(PeerState::default());
        let links = Links {
            commands: Arc::clone(&commands),
            published: Arc::clone(&published),
            changes: sender,
        };
        let driver = Driver::new((tun, socket), offloads, (config, stamp_floor), links)?;
        let thread = thread::Builder::new().name("lane".to_owned()).spawn(|| {
            if let Err(error) = driver.run() {
                tracing::error!(%error, "the lane stops");
            }
        })?;
        Ok(Self { commands, published, changes, thread: Mutex::new(Some(thread)) })
    }

    /// Replaces the config; the lane takes the latest over within a wake-up. Other keys take
    /// the place of those before without a gap ([`tunnel::Engine::configure`]).
    pub fn configure(&self, config: Config) {
        self.commands.send(|latest| latest.config = Some(config));
    }

    /// Replaces the socket (another source port): the peer follows the first authentic packet, and
    /// a handshake is begun at once.
    pub fn set_socket(&self, socket: UdpSocket) {
        self.commands.send(|latest| latest.socket = Some(socket));
    }

    /// Begins a handshake at once, whatever session there is.
    pub fn initiate(&self) {
        self.commands.send(|latest| latest.initiate = true);
    }

    /// The same from the address that the kernel chooses ([`tunnel::Engine::reroute`]).
    pub fn reroute(&self) {
        self.commands.send(|latest| latest.reroute = true);
    }

    /// Begins a handshake at the configured endpoint ([`tunnel::Engine::go_back`]).
    pub fn go_back(&self) {
        self.commands.send(|latest| latest.go_back = true);
    }

    /// Sets whether attempts of a handshake follow each other slowly ([`tunnel::Engine::set_slow`]).
    pub fn set_slow(&self, slow: bool) {
        self.commands.send(|latest| latest.slow = Some(slow));
    }

    /// Another replica has the tunnel: packets go on under the keys that there are, handshakes are neither
    /// begun nor answered. Datagrams that this lane cannot open pass by way of `relay` to the replica with the
    /// tunnel, one of these addresses, and its datagrams to the peer.
    pub fn retire(&self, relay: Option<UdpSocket>, replicas: Vec<IpAddr>) {
        let relay = relay.map(|socket| Relay::new(socket, replicas));
        self.commands.send(|latest| latest.retire = Some(relay));
    }

    /// Sets whether path MTU discovery is done by probes: then datagrams are never fragmented, and
    /// the kernel's cached path MTU is ignored. Otherwise that one applies.
    pub fn set_path_probing(&self, probing: bool) {
        self.commands.send(|latest| latest.path_probing = Some(probing));
    }

    /// Sends packets that may be larger than the tunnel's MTU, each as a frame of the TUN: a virtio
    /// header and an IP packet.
    pub fn send_probes(&self, frames: impl Iterator<Item = Vec<u8>>) {
        self.commands.send_probes(frames);
    }

    /// True if segmented sends arrive on this path: otherwise datagrams are sent one by one.
    pub fn set_segmenting(&self, segmenting: bool) {
        self.commands.send(|latest| latest.segmenting = Some(segmenting));
    }

    /// Sends frames like those of [`Self::send_probes`], all of one length, as one segmented send,
    /// and one more by itself.
    pub fn send_train_probe(&self, train: [Vec<u8>; 2], single: Vec<u8>) {
        self.commands.send(|latest| latest.train = train.into());
        self.send_probes([single].into_iter());
    }

    /// Sends so far, other than of probes, of datagrams that a path of 1,280 bytes may not take.
    pub fn large_sends(&self) -> u64 {
        self.published.large_sends.load(Ordering::Relaxed)
    }

    /// Returns when [`Self::large_sends`] is another than `seen`.
    pub async fn large_sends_other_than(&self, seen: u64) {
        let published = &self.published;
        loop {
            // First, so that the lane has either counted or sees that it is waited for.
            published.large_awaited.store(true, Ordering::SeqCst);
            if published.large_sends.load(Ordering::SeqCst) != seen {
                return;
            }
            published.large_sent.notified().await;
        }
    }

    /// Counters and times as they are now. Costs the lane nothing.
    pub fn snapshot(&self) -> Stats {
        let published = &self.published;
        let last_authentic = published.last_authentic();
        Stats {
            counters: published.counters(),
            peer: PeerState { last_authentic, ..*self.changes.borrow() },
            last_stamp: published.last_stamp(),
            gso_active: published.gso_active.load(Ordering::Relaxed),
            socket_overflows: published.socket_overflows.load(Ordering::Relaxed).into(),
            turns: published.turns.load(Ordering::Relaxed),
            full_reads: published.full_reads.load(Ordering::Relaxed),
            relayed: published.relayed.load(Ordering::Relaxed),
        }
    }

    /// Processor time of the lane's thread so far; `None` where the kernel does not count it.
    pub fn processor_time(&self) -> Option<Duration> {
        let thread = self.published.thread.load(Ordering::Relaxed);
        let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
        text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    }

    /// The peer's state, changed when a session comes, is renewed or goes, or the peer moves; not
    /// with every packet.
    pub fn changes(&self) -> watch::Receiver<PeerState> {
        self.changes.clone()
    }

    /// Returns true if the lane's loop turns: it is woken and given `steps` times [`HEARTBEAT_STEP`] for a
    /// round. A host that stood still meanwhile is no hang: after it the steps that are left count.
    pub async fn is_alive(&self, steps: u32) -> bool {
        let rounds = || self.published.rounds.load(Ordering::Relaxed);
        let before = rounds();
        self.commands.send(|_| {});
        for _ in 0..steps {
            tokio::time::sleep(HEARTBEAT_STEP).await;
            if rounds() != before {
                return true;
            }
        }
        false
    }

    pub fn is_running(&self) -> bool {
        self.thread().as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Stops the thread and waits for it: its socket and TUN queue are closed then, even while others hold this
    /// handle.
    pub fn stop(&self) {
        let Some(thread) = self.thread().take() else { return };
        self.commands.send(|latest| latest.stop = true);
        if thread.join().is_err() {
            tracing::error!("the lane had panicked");
        }
    }

    fn thread(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LaneHandle {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A lane's counters and times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stats {
    pub counters: Counters,
    /// `last_authentic` is exact here, unlike in [`LaneHandle::changes`].
    pub peer: PeerState,
    /// Timestamp of the last initiation, or the floor that it will be above.
    pub last_stamp: Tai64n,
    /// Trains leave as one segmented send. False while the path refuses them.
    pub gso_active: bool,
    /// Datagrams that the kernel dropped because the socket's receive buffer was full.
    pub socket_overflows: u64,
    /// Turns of the lane, and directions of turns that read as much as one may.
    pub turns: u64,
    pub full_reads: u64,
    /// Datagrams between the peer and the replica that has the tunnel now.
    pub relayed: u64,
}

impl Stats {
    /// Unix time in seconds of the last handshake.
    pub fn last_handshake_unix(&self) -> Option<u64> {
        self.peer.last_handshake.and_then(unix_time)
    }
}

/// Seconds since 1970 of a past moment, by the present wall clock; `None` if by that it was earlier:
/// the clock was not set yet, or stepped back.
fn unix_time(moment: Instant) -> Option<u64> {
    SystemTime::now()
        .checked_sub(moment.elapsed())
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .map(|since| since.as_secs())
}
