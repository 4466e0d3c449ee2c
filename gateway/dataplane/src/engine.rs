//! Keeps the lane on the latest config: starts it, applies changes, and replaces it when its TUN
//! was removed.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_api::PrivateKey;
use fabric_api::fabric::Role;
use gateway_config::desired::Desired;
use lane::{Config, LaneHandle, Offloads, Tai64n, Tun, open_relay, open_socket};
use tunnel::{AddressMap, Remap, Rules, RulesConfig, RulesError};

/// Least time for which a lane carries what still comes after another replica has got the tunnel: it ends in the next
/// pass.
const RETIREMENT: Duration = Duration::from_secs(6);
/// A client that searches its server returns with each n-th socket to the port that the server knows, where one whose
/// address has changed meanwhile initiates.
const RETURN_TO_KNOWN: u32 = 4;
/// WireGuard's usual one. Probes do the same service, so only without them.
const KEEPALIVE: Duration = Duration::from_secs(25);

/// Settings of the lane. Equal ones are applied once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    pub desired: Arc<Desired>,
    pub key: PrivateKey,
    pub endpoint: Option<SocketAddr>,
    /// A configured endpoint that has not answered the replica before, which found the peer at another one.
    pub unproven: Option<SocketAddr>,
    /// UDP port of an earlier gateway of this peering.
    pub port_before: Option<u16>,
    /// Timestamp of its last initiation.
    pub stamp_before: Tai64n,
    /// Another replica had the tunnel a moment ago.
    pub has_predecessor: bool,
    /// Address at which the replica before passes packets on.
    pub relay: Option<IpAddr>,
    /// The tunnel's MTU in bytes.
    pub mtu: u32,
    /// Number of times a client gave its source port up.
    pub ports: u64,
}

/// The lane and what it was made of.
#[derive(Debug)]
pub struct Engine {
    offloads: Offloads,
    /// A TUN that no lane has yet.
    tun: Option<Tun>,
    running: Option<Running>,
    /// Lane whose tunnel another replica has, and the time at which it ends.
    retiring: Option<(Running, Instant)>,
}

#[derive(Debug)]
struct Running {
    lane: Arc<LaneHandle>,
    /// A second handle of the lane's socket, for a lane that may have to take this one's place.
    socket: UdpSocket,
    /// Socket of the relay between a server's peer and the next replica with the tunnel.
    relay: Option<UdpSocket>,
    order: Order,
    source_port: SourcePort,
}

/// Source ports of a client.
#[derive(Debug)]
struct SourcePort {
    /// The last one at which something authentic came.
    known: Option<u16>,
    /// Time at which the present one was opened.
    opened: Instant,
    /// Number of those given up since something came.
    given_up: u32,
}

/// Reason why the lane does not follow an order.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(
        "cannot listen on UDP port {port}, the spec.endpoint.nodePort (or port) of the GatewayServer; \
         give it a free one, in the peer's GatewayClient too, or stop what has this one (`ss -lunp`)"
    )]
    Listen { port: u16, source: io::Error },
    #[error("cannot open a UDP socket")]
    Socket(#[source] io::Error),
    #[error("cannot start the lane")]
    Start(#[source] io::Error),
    #[error(transparent)]
    Rules(#[from] RulesError),
}

impl Engine {
    /// Returns an engine without a lane, which waits for a TUN.
    pub fn new(offloads: Offloads) -> Self {
        Self { offloads, tun: None, running: None, retiring: None }
    }

    /// The TUN had to be made anew: the lane on the old one, if any, can do nothing any more.
    pub fn replace_tun(&mut self, tun: Tun) {
        self.tun = Some(tun);
    }

    /// Another replica has the tunnel: the lane takes no more part in handshakes, and ends soon.
    pub fn retire(&mut self, replicas: &[IpAddr], now: Instant) {
        if self.retiring.as_ref().is_some_and(|(_, ends)| *ends <= now) {
            self.end_retirement();
        }
        if let Some(mut running) = self.running.take() {
            running.lane.retire(running.relay.take(), replicas.to_vec());
            self.retiring = Some((running, now + RETIREMENT));
        }
    }

    /// Ends the retired lane, if there is one: its port is free for another lane, for which the TUN is to be made
    /// anew, or for a relay. It is stopped, not only dropped: the published plane holds its handle, too.
    pub fn end_retirement(&mut self) {
        if let Some((running, _)) = self.retiring.take() {
            running.lane.stop();
        }
    }

    /// Returns the retired lane, if there is one.
    pub fn retiring(&self) -> Option<&Arc<LaneHandle>> {
        self.retiring.as_ref().map(|(running, _)| &running.lane)
    }

    /// Returns the lane that has the tunnel.
    pub fn lane(&self) -> Option<&Arc<LaneHandle>> {
        self.running.as_ref().map(|running| &running.lane)
    }

    /// Returns the lane's settings in force.
    pub fn order(&self) -> Option<&Order> {
        self.running.as_ref().map(|running| &running.order)
    }

    /// UDP port at which a successor reaches the peer through this lane, once that is retired.
    pub fn relay_port(&self) -> Option<u16> {
        let relay = self.running.as_ref()?.relay.as_ref()?;
        relay.local_addr().ok().map(|address| address.port())
    }

    /// UDP port that the tunnel is reached at.
    pub fn port(&self) -> Option<u16> {
        self.running.as_ref()?.port()
    }

    /// Makes the lane follow `order`. Without a lane or a TUN to start one on, nothing happens.
    pub fn follow(&mut self, order: Order) -> Result<(), EngineError> {
        if self.tun.is_some() {
            let socket = match &self.running {
                Some(running) => running.socket.try_clone().map_err(EngineError::Socket)?,
                None => {
                    let before = order.port_before.filter(|_| is_free_to_move(&order.desired));
                    listen_again(before, &order, self.offloads)?
                }
            };
            return self.start(socket, order);
        }
        let Some(running) = &mut self.running else { return Ok(()) };
        let before = &running.order;
        let is_elsewhere = match order.desired.listen_port {
            Some(port) => running.port() != Some(port),
            None => before.desired.listen_port.is_some(),
        };
        if *before == order && !is_elsewhere {
            return Ok(());
        }
        let escapes = before.ports != order.ports && is_free_to_move(&order.desired);
        running.lane.configure(lane_config(&order)?);
        running.order = order;
        // A port that another program has keeps nothing else from being in force.
        if is_elsewhere {
            running.listen(listen(&running.order, self.offloads)?)
        } else if escapes {
            let port = running.next_port();
            running.listen(listen_again(port, &running.order, self.offloads)?)
        } else {
            Ok(())
        }
    }

    fn start(&mut self, socket: UdpSocket, order: Order) -> Result<(), EngineError> {
        let config = lane_config(&order)?;
        let kept = socket.try_clone().map_err(EngineError::Socket)?;
        let Some(tun) = self.tun.take() else { return Ok(()) };
        let before = self.lane().map(|lane| lane.snapshot().last_stamp).unwrap_or_default();
        let floor = before.max(order.stamp_before);
        let lane = LaneHandle::spawn((tun, socket), self.offloads, config, floor);
        let lane = Arc::new(lane.map_err(EngineError::Start)?);
        let relay = (order.desired.role == Role::Server).then(open_relay).and_then(Result::ok);
        let source_port =
            SourcePort { known: order.port_before, opened: Instant::now(), given_up: 0 };
        self.running = Some(Running { lane, socket: kept, relay, order, source_port });
        Ok(())
    }
}

impl Running {
    fn listen(&mut self, socket: UdpSocket) -> Result<(), EngineError> {
        let kept = socket.try_clone().map_err(EngineError::Socket)?;
        self.lane.set_socket(socket);
        self.socket = kept;
        self.source_port.opened = Instant::now();
        Ok(())
    }

    /// Source port to follow the present one, which is given up; `None` for a fresh one.
    fn next_port(&mut self) -> Option<u16> {
        let last = self.lane.snapshot().peer.last_authentic;
        let port = self.port();
        let source_port = &mut self.source_port;
        if last.is_some_and(|at| at > source_port.opened) {
            (source_port.known, source_port.given_up) = (port, 0);
        }
        source_port.given_up += 1;
        source_port.known.filter(|_| source_port.given_up.is_multiple_of(RETURN_TO_KNOWN))
    }

    fn port(&self) -> Option<u16> {
        self.socket.local_addr().ok().map(|address| address.port())
    }
}

/// Opens the port at which a server that was killed as well, or moves, will look for its client. Any other
/// port does, once an authentic packet of the client has come from it.
fn listen_again(
    before: Option<u16>,
    order: &Order,
    offloads: Offloads,
) -> Result<UdpSocket, EngineError> {
    let Some(port) = before else { return listen(order, offloads) };
    open_socket(Some(port), offloads).or_else(|error| {
        tracing::info!(port, %error, "the UDP port of before is taken, taking another");
        listen(order, offloads)
    })
}

fn listen(order: &Order, offloads: Offloads) -> Result<UdpSocket, EngineError> {
    listen_on(order.desired.listen_port, offloads)
}

fn listen_on(port: Option<u16>, offloads: Offloads) -> Result<UdpSocket, EngineError> {
    open_socket(port, offloads).map_err(|source| match port {
        Some(port) => EngineError::Listen { port, source },
        None => EngineError::Socket(source),
    })
}

/// A client whose port nobody relies on.
fn is_free_to_move(desired: &Desired) -> bool {
    desired.role == Role::Client && desired.listen_port.is_none()
}

fn lane_config(order: &Order) -> Result<Config, RulesError> {
    let desired = &order.desired;
    let mtu = order.mtu as usize;
    let own = desired.pod_cidrs.iter().chain(&desired.external_cidrs);
    let rules = Rules::new(&RulesConfig {
        own: own.map(|cidr| cidr.net()).collect(),
        remaps: desired
            .remaps
            .iter()
            .map(|remap| Remap { remote: remap.remote.net(), local: remap.local.net() })
            .collect(),
        tunnel_address: desired.tunnel_address,
        peer_tunnel_address: desired.peer_tunnel_address,
        addresses: desired
            .ips
            .iter()
            .map(|ip| AddressMap { external: ip.external, target: ip.target })
            .collect(),
        icmp_sources: desired.icmp_sources.clone(),
        mtu,
    })?;
    Ok(Config {
        private_key: order.key.clone(),
        peer_key: desired.peer_key,
        endpoint: order.endpoint,
        unproven: order.unproven,
        // A server that knows its client's last endpoint initiates at once, too.
        initiate: order.endpoint.is_some(),
        calls_back: order.has_predecessor && desired.role == Role::Server,
        relay: order.relay,
        keepalive: (!desired.probe.enabled).then_some(KEEPALIVE),
        mtu,
        rules,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taken_port_names_field_and_remedy() {
        let other = UdpSocket::bind("[::]:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let error = listen_on(Some(port), Offloads::ALL).unwrap_err().to_string();
        for says in [&port.to_string(), "GatewayServer", "spec.endpoint.nodePort", "ss -lunp"] {
            assert!(error.contains(says), "{error}");
        }
    }
}
