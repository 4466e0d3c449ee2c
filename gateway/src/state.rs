//! State that the parts of the gateway share, each the latest value of a watch channel.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_api::fabric::MtuBound;
use fabric_api::networking::ConnectionValue;
use gateway_config::desired::Desired;
use gateway_dataplane::overlay::Way;
use gateway_health::Fault;
use jiff::Timestamp;
use lane::LaneHandle;
use netlink::Netns;
use reachability::connection::Traffic;

/// State of the dataplane.
#[derive(Clone, Debug, Default)]
pub struct Plane {
    pub running: Option<Running>,
    /// The config that namespaces, devices and routes were last made for, with a lane or without.
    pub applied: Option<Arc<Desired>>,
    /// Steps that failed, one line each.
    pub problems: Vec<String>,
    /// The lane of a tunnel that another replica has: it goes on with the keys that it has.
    pub retiring: Option<Arc<LaneHandle>>,
}

/// A dataplane that moves packets.
#[derive(Clone)]
pub struct Running {
    /// The config in force.
    pub desired: Arc<Desired>,
    pub lane: Arc<LaneHandle>,
    /// Namespace that the probes are sent from.
    pub inner: Netns,
    /// Packets are let into the tunnel, not refused.
    pub open: bool,
    /// The tunnel's MTU in force, in bytes.
    pub mtu: u32,
    pub mtu_bound: MtuBound,
    /// The largest IP packet known to reach the peer, in bytes.
    pub path_mtu: Option<u32>,
    /// Path MTU that an earlier gateway found.
    pub remembered_path_mtu: Option<u32>,
    /// The path to be probed; `None` while no address of the peer is known.
    pub way: Option<Way>,
    /// UDP port that the tunnel is reached at.
    pub port: Option<u16>,
    /// UDP port at which a successor reaches the peer through this one.
    pub relay_port: Option<u16>,
    /// Source address of the tunnel's datagrams.
    pub source: Option<IpAddr>,
    /// Time at which another replica last had the tunnel as well.
    pub contested_at: Option<Instant>,
    pub has_replicas: bool,
}

impl PartialEq for Plane {
    fn eq(&self, other: &Self) -> bool {
        let key = |plane: &Self| {
            let running = plane.running.as_ref();
            running.map(|r| {
                let mtu = (r.mtu, r.mtu_bound, r.path_mtu, r.way);
                let place = (r.port, r.source, r.contested_at, r.has_replicas);
                (Arc::as_ptr(&r.desired), Arc::as_ptr(&r.lane), r.open, mtu, place)
            })
        };
        let applied = |plane: &Self| plane.applied.as_ref().map(Arc::as_ptr);
        let retiring = |plane: &Self| plane.retiring.as_ref().map(Arc::as_ptr);
        key(self) == key(other)
            && applied(self) == applied(other)
            && retiring(self) == retiring(other)
            && self.problems == other.problems
    }
}

impl Running {
    /// Signs of life of the peer that the lane has seen.
    pub fn traffic(&self) -> Traffic {
        let stats = self.lane.snapshot();
        Traffic {
            last_authentic: stats.peer.last_authentic,
            last_handshake: stats.peer.last_handshake,
            packets: stats.counters.rx_packets,
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running")
            .field("generation", &self.desired.generation)
            .field("mtu", &self.mtu)
            .finish_non_exhaustive()
    }
}

/// State of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub value: ConnectionValue,
    /// Round trip of the last probe; only while connected.
    pub latency: Option<Duration>,
    /// Time of that measurement.
    pub latency_at: Option<Timestamp>,
    /// Number of times a client gave its way to the server up: time to look the server's name up again.
    pub retries: u64,
    /// Number of times it gave its source port up.
    pub ports: u64,
    /// Endpoint of the server that it gave up last.
    pub left: Option<SocketAddr>,
    /// The largest IP packet known to reach the peer, in bytes; `None` unless the peer answers.
    pub path_mtu: Option<u32>,
    /// Faults between the two gateways, the most specific first.
    pub faults: Vec<TimedFault>,
    /// Share of lost probes in percent, if it is worth reporting.
    pub loss_percent: Option<u8>,
    /// Number within this process. A new count alone wakes no reader.
    pub probes: ProbeCounts,
    /// Segmented sends vanish on the way to the peer, and are not used.
    pub trains_vanish: bool,
}

impl View {
    /// Before anything is known.
    pub fn start() -> Self {
        Self {
            value: ConnectionValue::Connecting,
            latency: None,
            latency_at: None,
            retries: 0,
            ports: 0,
            left: None,
            path_mtu: None,
            faults: Vec::new(),
            loss_percent: None,
            probes: ProbeCounts::default(),
            trains_vanish: false,
        }
    }

    /// Goes back to the start, but for retries and ports. Returns whether that is a change.
    pub(crate) fn forget(&mut self) -> bool {
        let (retries, ports, left) = (self.retries, self.ports, self.left);
        let start = Self { retries, ports, left, ..Self::start() };
        let changed = *self != start;
        *self = start;
        changed
    }

    pub fn is_connected(&self) -> bool {
        self.value == ConnectionValue::Connected
    }
}

/// A fault and when it began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedFault {
    pub fault: Fault,
    pub since: Timestamp,
}

/// Probes of the connection: the loss on the way to the peer and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeCounts {
    pub sent: u64,
    pub answered: u64,
}
