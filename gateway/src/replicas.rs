//! The replicas of a gateway: one of them has the tunnel, the others stand by.
//!
//! Translation has no state, so any replica can carry any packet. Each sends the others a heartbeat ten
//! times a second, from pod to pod: a take-over depends on no other program. [`election`] decides
//! (pure), [`heartbeat`] is the message. The next replica initiates at once at the peer's last endpoint; the
//! one before carries packets under its keys until no more come. No nonce is used twice, as keys never leave the
//! memory of the lane that made them in a handshake; all that replicas share of the transport is the newest timestamp.

pub mod election;
mod heartbeat;
mod listing;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket as StdSocket};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use fabric_api::fabric::ActiveReplica;
use fabric_runtime::until;
use futures::future::select_all;
use gateway_config::input::Input;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::state::{Plane, Running, View};
use election::{Contest, Election, Predecessor, Role, Tunnel};
use heartbeat::{Keys, MAX_LENGTH};
use listing::Listing;

/// UDP port of the heartbeats.
pub const REPLICA_PORT: u16 = 12347;

/// Datagrams of a socket that are read before it is time to send.
const READS: usize = 64;

/// Place of this gateway among its replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    pub role: Role,
    /// Number of the last observed take-over.
    pub epoch: u64,
    /// This one has the tunnel, and the peer has not answered it for a while.
    pub is_stuck: bool,
    /// This one has the tunnel, and receives neither the peer nor a replica any more, but did.
    pub is_deaf: bool,
    /// Own address, if there are replicas.
    pub address: Option<IpAddr>,
    /// Another replica that has the tunnel, if this one stands by.
    pub active_other: Option<IpAddr>,
    /// Replica that had the tunnel before, if this one has it.
    pub predecessor: Option<Predecessor>,
    /// Other replicas that had it beside this one.
    pub contest: Contest,
    /// The successor of this replica, which leaves, is connected.
    pub is_relieved: bool,
    /// Ready for the tunnel: devices are up, and nodes have had the time to admit its packets.
    pub is_ready: bool,
    /// Another replica is ready for the tunnel.
    pub has_successor: bool,
    /// The config has left this replica out, and not all others: no node takes its packets any more.
    pub is_left_out: bool,
    /// Addresses of the other replicas, of those without a heartbeat for long, and of those that receive nothing.
    pub others: Vec<IpAddr>,
    pub missing: Vec<IpAddr>,
    pub deaf: Vec<IpAddr>,
}

impl Standing {
    pub fn has_tunnel(&self) -> bool {
        self.role == Role::Active
    }

    /// Another replica is to have the tunnel in place of this one, which ends and starts anew.
    pub fn must_give_way(&self) -> bool {
        self.is_left_out && self.has_tunnel() && self.has_successor
    }

    /// As it is published.
    pub fn active(&self) -> Option<ActiveReplica> {
        let address = self.address.filter(|_| self.has_tunnel())?;
        Some(ActiveReplica { address, epoch: self.epoch })
    }
}

/// State that heartbeats and decisions follow from.
#[derive(Clone)]
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub planes: watch::Receiver<Plane>,
    pub views: watch::Receiver<View>,
    /// This gateway is to end: another one gets the tunnel.
    pub leaving: CancellationToken,
}

/// Keeps `standings` up to date until `stop`, in a thread of its own: heartbeats do not wait for
/// anything else that the gateway does.
pub async fn run(
    sources: Sources,
    standings: watch::Sender<Standing>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let (ended, end) = oneshot::channel();
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let work = move || {
        let _ = ended.send(runtime.block_on(Replicas::new(sources).run(standings, stop)));
    };
    thread::Builder::new().name("replicas".to_owned()).spawn(work)?;
    end.await.context("the thread of the replicas panicked")?
}

struct Replicas {
    sources: Sources,
    election: Election,
    keys: Option<Keys>,
    sockets: Sockets,
    own: Option<IpAddr>,
    listing: Listing,
    is_ready: bool,
    /// Port of the relay of the present or last lane.
    relay: Option<u16>,
}

impl Replicas {
    fn new(sources: Sources) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let incarnation = u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX);
        let election = Election::new(incarnation, Instant::now());
        Self {
            sources,
            election,
            keys: None,
            sockets: Sockets::default(),
            own: None,
            listing: Listing::new(Instant::now()),
            is_ready: false,
            relay: None,
        }
    }

    async fn run(
        mut self,
        standings: watch::Sender<Standing>,
        stop: CancellationToken,
    ) -> anyhow::Result<()> {
        let leaving = self.sources.leaving.clone();
        let mut has_input = true;
        loop {
            if std::mem::take(&mut has_input) {
                self.follow_input();
            }
            let now = Instant::now();
            self.receive(now);
            if leaving.is_cancelled() {
                self.election.leave(now);
            }
            self.follow_plane();
            let before = self.election.role();
            self.election.decide(now);
            if self.election.role() != before {
                tracing::info!(role = %self.election.role(), epoch = self.election.epoch(), "replica");
            }
            if self.election.beat_due().is_some_and(|due| due <= now) {
                self.beat(now);
            }
            publish(&standings, self.standing());
            tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                changed = self.sources.inputs.changed() => {
                    changed?;
                    has_input = true;
                }
                () = leaving.cancelled(), if !leaving.is_cancelled() => {}
                () = self.sockets.readable() => {}
                () = until(self.election.deadline()) => {}
            }
        }
    }

    fn standing(&self) -> Standing {
        let role = self.election.role();
        Standing {
            role,
            epoch: self.election.epoch(),
            is_stuck: self.election.is_stuck(Instant::now()),
            is_deaf: self.election.has_become_deaf(Instant::now()),
            address: self.own.filter(|_| self.keys.is_some()),
            active_other: self
                .election
                .active_address(Instant::now())
                .filter(|_| role == Role::Standby),
            predecessor: self.election.predecessor().filter(|_| role == Role::Active),
            contest: self.election.contest(),
            is_relieved: self.election.is_relieved(),
            is_ready: self.is_ready,
            has_successor: self.election.has_successor(Instant::now()),
            is_left_out: self.listing.is_left_out(Instant::now()),
            others: self.election.others().collect(),
            missing: self.election.missing(Instant::now()),
            deaf: self.election.deaf(Instant::now()),
        }
    }

    fn follow_input(&mut self) {
        let input = self.sources.inputs.borrow_and_update().clone();
        let Some(config) = &input.config else { return };
        if let Some(key) = &input.key {
            Keys::follow(&mut self.keys, key, &config.spec.gateway_uid);
        }
        let (mut others, mut is_listed) = (BTreeSet::new(), false);
        for replica in &config.spec.replicas {
            if self.own == Some(replica.address) || is_own(replica.address) {
                (self.own, is_listed) = (Some(replica.address), true);
            } else {
                others.insert(replica.address);
            }
        }
        let now = Instant::now();
        self.listing.follow(is_listed, !others.is_empty(), config.spec.nodes.len(), now);
        self.election.set_unlisted(self.listing.is_unlisted());
        if let Some(desired) = &input.desired {
            self.election.set_probe_interval(desired.probe_interval());
        }
        // Without a key no heartbeat can be verified, and there is no tunnel either.
        if self.keys.is_none() {
            others.clear();
        }
        // A new replica may not be in the config yet, but sends heartbeats here.
        let has_replicas = self.keys.is_some() && !config.spec.replicas.is_empty();
        self.sockets.follow(&others, has_replicas);
        self.own = self.own.or_else(|| self.sockets.local_address());
        self.election.set_others(others, now);
        if let Some(active) = input.named {
            self.election.handle_published(active, self.own, now);
        }
    }

    fn follow_plane(&mut self) {
        let plane = self.sources.planes.borrow();
        self.relay = plane.running.as_ref().map_or(self.relay, |running| running.relay_port);
        let is_admitted = self.listing.is_admitted(Instant::now());
        let last = |running: &Running| running.lane.snapshot().peer.last_authentic;
        if let Some(last) = plane.running.as_ref().and_then(last) {
            self.election.set_heard(last);
        }
        self.is_ready = is_admitted && plane.applied.is_some() && plane.problems.is_empty();
        self.election.set_ready(self.is_ready);
    }

    fn receive(&mut self, now: Instant) {
        let Self { sockets, keys: Some(keys), election, .. } = self else { return };
        sockets.receive(|from, received| match received.map(|bytes| keys.open(bytes)) {
            Ok(Some(heartbeat)) => election.handle(from, heartbeat, now),
            Ok(None) => tracing::debug!(%from, "not a heartbeat of a replica"),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                election.handle_refusal(from, now);
            }
            Err(error) => tracing::debug!(%from, %error, "cannot receive heartbeats"),
        });
    }

    fn beat(&mut self, now: Instant) {
        let tunnel = self.tunnel();
        let heartbeat = self.election.beat(tunnel, now);
        let Some(keys) = &self.keys else { return };
        let message = keys.seal(&heartbeat);
        for other in self.election.others() {
            self.sockets.send(&message, other);
        }
    }

    /// State of the tunnel, if this replica has it.
    fn tunnel(&self) -> Tunnel {
        let plane = self.sources.planes.borrow();
        let lane = plane.running.as_ref().map(|running| &running.lane);
        let Some(stats) = lane.or(plane.retiring.as_ref()).map(|lane| lane.snapshot()) else {
            return Tunnel::default();
        };
        let connected = self.sources.views.borrow().is_connected() && plane.running.is_some();
        let peer = stats.peer.endpoint.filter(|_| stats.peer.is_endpoint_authentic);
        let unproven =
            stats.peer.unproven_endpoint.filter(|of| peer.is_some_and(|peer| peer != *of));
        Tunnel { connected, peer, unproven, relay: self.relay, stamp: stats.last_stamp }
    }
}

fn publish(standings: &watch::Sender<Standing>, standing: Standing) {
    standings.send_if_modified(|current| {
        let is_changed = *current != standing;
        *current = standing;
        is_changed
    });
}

/// Returns whether a device of this pod has the address.
fn is_own(address: IpAddr) -> bool {
    StdSocket::bind((address, 0)).is_ok()
}

/// Connected sockets, one for each other replica, so that the kernel reports a process that is gone, and an
/// unconnected one for replicas that are not in the config yet. None where gateways have no replicas.
#[derive(Default)]
struct Sockets {
    any: Option<UdpSocket>,
    connected: BTreeMap<IpAddr, UdpSocket>,
}

impl Sockets {
    fn follow(&mut self, others: &BTreeSet<IpAddr>, listens: bool) {
        self.connected.retain(|address, _| others.contains(address));
        if self.any.is_none() && listens {
            self.any = warned(open(None));
        }
        for address in others {
            if !self.connected.contains_key(address)
                && let Some(socket) = warned(open(Some(*address)))
            {
                self.connected.insert(*address, socket);
            }
        }
    }

    fn local_address(&self) -> Option<IpAddr> {
        let local = self.connected.values().find_map(|socket| socket.local_addr().ok())?;
        Some(local.ip().to_canonical())
    }

    /// Returns when there is something to receive. Cancel safe.
    async fn readable(&self) {
        let sockets = self.connected.values().chain(&self.any);
        let all: Vec<_> = sockets.map(|socket| Box::pin(socket.readable())).collect();
        if all.is_empty() {
            return std::future::pending().await;
        }
        // An error is reported by the read that follows.
        let _ = select_all(all).await;
    }

    /// Reads up to [`READS`] datagrams of each socket, which may be flooded; known replicas come first.
    fn receive(&self, mut take: impl FnMut(IpAddr, io::Result<&[u8]>)) {
        let mut buffer = [0; MAX_LENGTH];
        for (address, socket) in &self.connected {
            for _ in 0..READS {
                match socket.try_recv(&mut buffer) {
                    Ok(length) => take(*address, Ok(&buffer[..length])),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => take(*address, Err(error)),
                }
            }
        }
        for _ in 0..READS {
            let received = self.any.as_ref().and_then(|any| any.try_recv_from(&mut buffer).ok());
            let Some((length, from)) = received else { return };
            take(from.ip().to_canonical(), Ok(&buffer[..length]));
        }
    }

    /// A heartbeat that cannot be sent now is a lost one.
    fn send(&self, message: &[u8], to: IpAddr) {
        let sent = match (self.connected.get(&to), &self.any) {
            (Some(socket), _) => socket.try_send(message),
            (None, Some(any)) => any.try_send_to(message, mapped(to, any)),
            (None, None) => return,
        };
        if let Err(error) = sent {
            tracing::debug!(%to, %error, "cannot send a heartbeat");
        }
    }
}

/// Address of a replica, mapped to IPv6 for an IPv6 socket.
fn mapped(to: IpAddr, socket: &UdpSocket) -> SocketAddr {
    let is_ipv6 = socket.local_addr().is_ok_and(|local| local.is_ipv6());
    let address = match to {
        IpAddr::V4(v4) if is_ipv6 => v4.to_ipv6_mapped().into(),
        IpAddr::V4(_) | IpAddr::V6(_) => to,
    };
    (address, REPLICA_PORT).into()
}

fn warned(socket: io::Result<UdpSocket>) -> Option<UdpSocket> {
    let warn = |error: &io::Error| tracing::warn!(%error, "cannot open a socket for replicas");
    socket.inspect_err(warn).ok()
}

/// `None`: for all replicas, of both families where there is IPv6.
fn open(other: Option<IpAddr>) -> io::Result<UdpSocket> {
    let bound = |any: IpAddr| {
        let local = SocketAddr::from((any, REPLICA_PORT));
        let socket = Socket::new(Domain::for_address(local), Type::DGRAM, Some(Protocol::UDP))?;
        if any.is_ipv6() {
            socket.set_only_v6(false)?;
        }
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&local.into())?;
        io::Result::Ok(socket)
    };
    let (v4, v6) = (Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into());
    let socket = match other {
        Some(IpAddr::V4(_)) => bound(v4)?,
        Some(IpAddr::V6(_)) => bound(v6)?,
        None => bound(v6).or_else(|_| bound(v4))?,
    };
    if let Some(other) = other {
        socket.connect(&SocketAddr::from((other, REPLICA_PORT)).into())?;
    }
    UdpSocket::from_std(socket.into())
}

/// Maximum time for which a gateway that ends waits for its successor, and then for the last packet.
const RELIEF: Duration = Duration::from_secs(4);
const DRAIN: Duration = Duration::from_secs(5);
/// Time without a packet after which the last one has come.
const QUIET: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(50);

/// Hands the tunnel over before the gateway ends, if another replica is ready for it.
pub async fn hand_over(
    leaving: &CancellationToken,
    standings: &mut watch::Receiver<Standing>,
    planes: &watch::Receiver<Plane>,
) {
    let (has_tunnel, has_successor) = {
        let standing = standings.borrow();
        (standing.has_tunnel(), standing.has_successor)
    };
    if !(has_tunnel && has_successor) {
        return;
    }
    leaving.cancel();
    let settled = standings.wait_for(|standing| {
        standing.is_relieved || standing.role == Role::Leaving && !standing.has_successor
    });
    let settled = tokio::time::timeout(RELIEF, settled).await;
    if !matches!(settled, Ok(Ok(standing)) if standing.is_relieved) {
        return;
    }
    tracing::info!("another replica has the tunnel");
    let packets = || {
        let lane = planes.borrow().retiring.clone();
        lane.map(|lane| lane.snapshot())
            .map(|stats| stats.counters.rx_packets + stats.counters.tx_packets + stats.relayed)
    };
    let (start, mut last, mut changed_at) = (Instant::now(), packets(), Instant::now());
    while start.elapsed() < DRAIN && changed_at.elapsed() < QUIET {
        tokio::time::sleep(LOOK).await;
        let now = packets();
        if now != last {
            (last, changed_at) = (now, Instant::now());
        }
    }
}
