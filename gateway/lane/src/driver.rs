use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use tokio::sync::watch;
use tunnel::{Config, Datagrams, Engine, PeerState, Received, Stamper, Tai64n};

use super::Offloads;
use super::early_drop::EarlyDrop;
use super::endpoint_changes::PublishedEndpoint;
use super::port::Port;
use super::relay::Relay;
use super::shared::{Commands, Published};
use super::socket::TunnelSocket;
use super::tun::Tun;

/// One turn reads at most this much each way before everything is flushed: more does not make
/// trains longer (64, 128 and 256 KiB measured alike), it only lets the other direction wait.
const TURN_READS: usize = 64;
const TURN_BYTES: usize = 64 << 10;

/// Turns between two checks of the commands and epoll.
const TURNS: usize = 4;

/// Longest frame of a TUN: virtio header and IP packet. Longest UDP payload, rounded up.
const FRAME: usize = 10 + (64 << 10);
const DATAGRAMS: usize = 64 << 10;

/// Datagrams of a train that may lose its first: bulk, of which enough follows that the loss is
/// noticed at once.
const TRAIN_TO_DROP_FROM: usize = 8;

const TOKEN_WAKE: u64 = 0;
const TOKEN_TUN: u64 = 1;
const TOKEN_SOCKET: u64 = 2;
const TOKEN_RELAY: u64 = 3;

/// State of a lane's thread.
pub(super) struct Driver {
    engine: Engine,
    port: Port,
    epoll: Epoll,
    /// The TUN and the socket are registered for room in the socket, not for frames.
    is_waiting_for_room: bool,
    frame: Box<[u8]>,
    datagrams: Box<[u8]>,
    early_drop: EarlyDrop,
    /// The last turn left datagrams in the socket.
    is_behind: bool,
    offloads: Offloads,
    commands: Arc<Commands>,
    published: Arc<Published>,
    changes: watch::Sender<PeerState>,
    /// Overflows of sockets before the present one, and of the present one.
    overflows: (u32, u32),
    /// The last state that was published.
    shown: PeerState,
    endpoint: PublishedEndpoint,
    rounds: u64,
    load: Load,
    /// Relay to the replica that has the tunnel, once this lane is retired.
    relay: Option<Relay>,
}

/// Share of its time in which a lane has work.
#[derive(Debug, Default)]
struct Load {
    turns: u64,
    /// Directions of turns that read as much as they may: more was probably waiting.
    full_reads: u64,
}

impl Load {
    fn note_reads(&mut self, reads: usize, bytes: usize) {
        self.full_reads += u64::from(reads >= TURN_READS || bytes >= TURN_BYTES);
    }
}

/// Descriptors that may be read from.
#[derive(Clone, Copy)]
struct Ready {
    commands: bool,
    tun: bool,
    socket: bool,
}

/// State that a [`Driver`] shares with its handle.
pub(super) struct Links {
    pub(super) commands: Arc<Commands>,
    pub(super) published: Arc<Published>,
    pub(super) changes: watch::Sender<PeerState>,
}

impl Driver {
    pub(super) fn new(
        (tun, socket): (Tun, UdpSocket),
        offloads: Offloads,
        (config, stamp_floor): (Config, Tai64n),
        links: Links,
    ) -> io::Result<Self> {
        let now = Instant::now();
        // A clock before 1970 is as good as one that stands there.
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let stamper = Stamper::new(unix, now, stamp_floor);
        let socket = TunnelSocket::new(socket, offloads)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let readable = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
        epoll.add(&links.commands.wake, readable(TOKEN_WAKE))?;
        epoll.add(&tun.queue, readable(TOKEN_TUN))?;
        epoll.add(&socket, readable(TOKEN_SOCKET))?;
        let mut engine = Engine::new(config, RandomState::new().hash_one(now), stamper, now);
        engine.set_joins_udp(tun.has_udp_trains);
        Ok(Self {
            engine,
            port: Port::new(tun.queue, socket, now),
            epoll,
            is_waiting_for_room: false,
            frame: vec![0; FRAME].into(),
            datagrams: vec![0; DATAGRAMS].into(),
            early_drop: EarlyDrop::default(),
            is_behind: false,
            offloads,
            commands: links.commands,
            published: links.published,
            changes: links.changes,
            overflows: (0, 0),
            shown: PeerState::default(),
            endpoint: PublishedEndpoint::new(now),
            rounds: 0,
            load: Load::default(),
            relay: None,
        })
    }

    /// Moves packets until a stop is requested. Fails when a descriptor cannot be waited for.
    pub(super) fn run(mut self) -> io::Result<()> {
        self.published.thread.store(nix::unistd::gettid().as_raw(), Ordering::Relaxed);
        loop {
            let mut ready = self.wait()?;
            if ready.commands && !self.apply_commands()? {
                return Ok(());
            }
            for _ in 0..TURNS {
                self.port.now = Instant::now();
                if !self.turn(ready)? {
                    break;
                }
                ready = Ready { commands: false, tun: true, socket: true };
            }
            self.engine.handle_timeout(self.port.now, &mut self.port);
            self.report();
        }
    }

    /// Sleeps until there is something to do.
    fn wait(&mut self) -> io::Result<Ready> {
        self.register()?;
        let left = self.engine.deadline().saturating_duration_since(self.port.now);
        // Rounded up, or the last part of a millisecond would be spent spinning.
        let timeout =
            EpollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(EpollTimeout::MAX);
        let mut events = [EpollEvent::empty(); 4];
        let count = match self.epoll.wait(&mut events, timeout) {
            Err(Errno::EINTR) => 0,
            outcome => outcome?,
        };
        let has = |token| events[..count].iter().any(|event| event.data() == token);
        Ok(Ready { commands: has(TOKEN_WAKE), tun: has(TOKEN_TUN), socket: has(TOKEN_SOCKET) })
    }

    /// A full socket is waited for, and until it has room the TUN is left alone: its queue fills,
    /// and TCP notices.
    fn register(&mut self) -> io::Result<()> {
        let is_blocked = self.port.is_blocked();
        if is_blocked == self.is_waiting_for_room {
            return Ok(());
        }
        self.is_waiting_for_room = is_blocked;
        let (tun, socket) = match is_blocked {
            true => (EpollFlags::empty(), EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT),
            false => (EpollFlags::EPOLLIN, EpollFlags::EPOLLIN),
        };
        self.epoll.modify(&self.port.tun, &mut EpollEvent::new(tun, TOKEN_TUN))?;
        self.epoll.modify(&self.port.socket, &mut EpollEvent::new(socket, TOKEN_SOCKET))?;
        Ok(())
    }

    /// Reads once from what is ready. Returns whether there is more to read: what comes after the end
    /// of a queue is left to epoll, which costs a lone packet less than looking for it.
    fn turn(&mut self, ready: Ready) -> io::Result<bool> {
        let was_blocked = self.port.is_blocked();
        let Self { engine, port, .. } = self;
        port.drain(|reason, datagrams| engine.count_unsent(reason, datagrams));
        self.load.turns += 1;
        if self.relay.is_some() {
            self.relay_to_peer();
        }
        if ready.socket {
            self.is_behind = self.receive();
        }
        let has_more = ready.tun && !self.port.is_blocked() && self.read()?;
        Ok(self.is_behind || has_more || was_blocked && !self.port.is_blocked())
    }

    /// Returns whether it has left something in the socket.
    fn receive(&mut self) -> bool {
        let Self { engine, port, datagrams, early_drop, relay, epoll, .. } = self;
        let (mut reads, mut bytes) = (0, 0);
        let is_long = self.is_behind && port.socket.has_long_queue();
        let mut drops = early_drop.decide(is_long, port.now);
        let is_behind = loop {
            if reads == TURN_READS || bytes >= TURN_BYTES {
                break true;
            }
            let received = match port.socket.receive(datagrams) {
                Ok(received) => received,
                Err(error) => {
                    if error.kind() != io::ErrorKind::WouldBlock {
                        tracing::trace!(%error, "receive");
                    }
                    break false;
                }
            };
            reads += 1;
            bytes += received.len;
            if let Some(overflows) = received.overflows {
                self.overflows.1 = overflows;
            }
            let first = match drops && received.len >= TRAIN_TO_DROP_FROM * received.segment_size {
                true => received.segment_size,
                false => 0,
            };
            if first > 0 {
                drops = false;
                engine.count_early_drop();
            }
            let train = Received {
                path: received.path,
                bytes: &mut datagrams[first..received.len],
                segment_size: received.segment_size,
                tos: received.tos,
            };
            if let Some(relay) = relay {
                divide(train, (relay, epoll), engine, port);
                continue;
            }
            engine.handle_datagrams(train, port.now, port);
        };
        if reads > 0 {
            engine.flush(port.now, port);
        }
        self.load.note_reads(reads, bytes);
        is_behind
    }

    /// Returns whether it has left something in the TUN's queue.
    fn read(&mut self) -> io::Result<bool> {
        let Self { engine, port, frame, .. } = self;
        let (mut reads, mut bytes) = (0, 0);
        let is_behind = loop {
            if reads == TURN_READS || bytes >= TURN_BYTES || port.is_blocked() {
                break true;
            }
            match nix::unistd::read(&port.tun, frame) {
                Ok(len) => {
                    reads += 1;
                    bytes += len;
                    engine.handle_frame(&mut frame[..len], port.now, port);
                }
                Err(Errno::EAGAIN | Errno::EINTR) => break false,
                // EBADFD: the device is gone, and epoll would report that for ever.
                Err(error) => return Err(error.into()),
            }
        };
        if reads > 0 {
            engine.flush(port.now, port);
        }
        self.load.note_reads(reads, bytes);
        Ok(is_behind)
    }

    /// Applies new commands. Returns false if one of them is to stop.
    fn apply_commands(&mut self) -> io::Result<bool> {
        let latest = self.commands.take();
        let now = Instant::now();
        if let Some(config) = latest.config {
            self.engine.configure(config, now);
        }
        if let Some(socket) = latest.socket {
            self.replace_socket(socket)?;
            self.engine.initiate(now);
        }
        if let Some(relay) = latest.retire {
            self.retire(relay)?;
        }
        if latest.initiate {
            self.engine.initiate(now);
        }
        if latest.go_back {
            self.engine.go_back(now);
        }
        if latest.reroute {
            self.engine.reroute(now);
        }
        if let Some(slow) = latest.slow {
            self.engine.set_slow(slow, now);
        }
        if let Some(probing) = latest.path_probing {
            self.port.socket.set_path_probing(probing);
        }
        if let Some(segmenting) = latest.segmenting {
            self.port.socket.set_segmenting(segmenting);
        }
        self.send_probes((latest.probes, latest.train), now);
        Ok(!latest.stop)
    }

    #[cold]
    fn retire(&mut self, relay: Option<Relay>) -> io::Result<()> {
        self.engine.retire();
        for socket in relay.iter().flat_map(Relay::sockets) {
            watch_relay(&self.epoll, socket)?;
        }
        self.relay = relay;
        Ok(())
    }

    /// Passes on datagrams from the replica that has the tunnel to the peer.
    #[cold]
    fn relay_to_peer(&mut self) {
        let Self { relay: Some(relay), port, datagrams, engine, .. } = self else { return };
        relay.set_path(engine.path());
        for _ in 0..TURN_READS {
            let Some((length, path)) = relay.receive(datagrams) else { return };
            let bytes = &datagrams[..length];
            let datagram = Datagrams { path, bytes, segment_size: length, tos: 0 };
            let _ = port.socket.send(datagram, port.now);
        }
    }

    fn send_probes(&mut self, (probes, mut train): (Vec<Vec<u8>>, Vec<Vec<u8>>), now: Instant) {
        self.port.now = now;
        // The probes themselves are no reason to probe.
        let large_sends = self.port.large_sends;
        if !train.is_empty() {
            let was_segmenting = self.port.socket.set_segmenting(true);
            self.engine.handle_probe(&mut train, now, &mut self.port);
            self.port.socket.set_segmenting(was_segmenting);
        }
        for frame in probes {
            self.engine.handle_probe(&mut [frame], now, &mut self.port);
        }
        self.port.large_sends = large_sends;
    }

    fn replace_socket(&mut self, socket: UdpSocket) -> io::Result<()> {
        let mut socket = TunnelSocket::new(socket, self.offloads)?;
        socket.set_path_probing(self.port.socket.is_path_probing());
        socket.set_segmenting(self.port.socket.is_segmenting);
        self.epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_SOCKET))?;
        self.epoll.delete(&self.port.socket)?;
        self.is_waiting_for_room = false;
        self.epoll.modify(&self.port.tun, &mut EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_TUN))?;
        self.port.socket = socket;
        self.overflows = (self.overflows.0 + self.overflows.1, 0);
        Ok(())
    }

    /// Publishes counters and the peer's state.
    fn report(&mut self) {
        let now = self.port.now;
        let mut state = self.engine.peer_state();
        state.endpoint = self.endpoint.update(state.endpoint, state.unproven_endpoint, now);
        self.rounds += 1;
        self.published.rounds.store(self.rounds, Ordering::Relaxed);
        let relayed = self.relay.as_ref().map_or(0, |relay| relay.datagrams);
        self.published.relayed.store(relayed, Ordering::Relaxed);
        self.published.turns.store(self.load.turns, Ordering::Relaxed);
        self.published.full_reads.store(self.load.full_reads, Ordering::Relaxed);
        self.published.store(self.engine.counters(), state.last_authentic);
        self.published.store_last_stamp(self.engine.last_stamp());
        self.published.gso_active.store(self.port.socket.segments(), Ordering::Relaxed);
        let overflows = self.overflows.0 + self.overflows.1;
        self.published.socket_overflows.store(overflows, Ordering::Relaxed);
        self.published.store_large_sends(self.port.large_sends);
        let is_changed = self.shown.endpoint != state.endpoint
            || self.shown.is_endpoint_authentic != state.is_endpoint_authentic
            || self.shown.unproven_endpoint != state.unproven_endpoint
            || self.shown.has_session != state.has_session
            || self.shown.last_handshake != state.last_handshake
            || self.shown.on_superseded_keys != state.on_superseded_keys
            || self.shown.rejections != state.rejections
            || self.shown.unconfirmed != state.unconfirmed
            || self.shown.duplicate != state.duplicate;
        if is_changed {
            self.shown = state;
            self.changes.send_replace(state);
        }
    }
}

/// Handles datagrams of this lane, and passes the rest on.
#[cold]
fn divide(
    train: Received<'_>,
    (relay, epoll): (&mut Relay, &Epoll),
    engine: &mut Engine,
    port: &mut Port,
) {
    let Received { path, bytes, segment_size, tos } = train;
    for datagram in bytes.chunks_mut(segment_size.max(1)) {
        if engine.is_foreign(datagram) {
            let new = relay.send(datagram, path).map(|socket| watch_relay(epoll, socket));
            if let Some(Err(error)) = new {
                tracing::debug!(%error, "cannot receive for a moved peer");
            }
        } else {
            let segment_size = datagram.len();
            let one = Received { path, bytes: datagram, segment_size, tos };
            engine.handle_datagrams(one, port.now, port);
        }
    }
}

fn watch_relay(epoll: &Epoll, socket: &UdpSocket) -> io::Result<()> {
    Ok(epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, TOKEN_RELAY))?)
}
