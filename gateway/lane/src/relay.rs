use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use tunnel::UdpPath;

/// Sources other than the peer's endpoint: the peer's own gateway may be moving, too.
const MAX_SOURCES: usize = 8;
/// Maximum number of datagrams from other senders that are skipped in a row.
const MAX_FOREIGN: usize = 64;

/// Relay of a retired lane between the peer and the replica that has the tunnel: connection tracking on the
/// path leads the peer's packets here for a while.
#[derive(Debug)]
pub(super) struct Relay {
    /// Addresses of the other replicas, one of which has the tunnel.
    replicas: Vec<IpAddr>,
    /// The replica that has the tunnel, once it has sent something.
    successor: Option<SocketAddr>,
    /// One for each address of the peer; the first is for its endpoint, and known to the successor.
    ways: Vec<Way>,
    pub(super) datagrams: u64,
}

/// Socket that stands for an address of the peer towards the successor.
#[derive(Debug)]
struct Way {
    socket: UdpSocket,
    peer: Option<UdpPath>,
}

impl Relay {
    pub(super) fn new(socket: UdpSocket, replicas: Vec<IpAddr>) -> Self {
        let ways = vec![Way { socket, peer: None }];
        Self { replicas, successor: None, ways, datagrams: 0 }
    }

    pub(super) fn sockets(&self) -> impl Iterator<Item = &UdpSocket> {
        self.ways.iter().map(|way| &way.socket)
    }

    /// Sets the path to the peer's endpoint.
    pub(super) fn set_path(&mut self, path: Option<UdpPath>) {
        if let [first, ..] = self.ways.as_mut_slice() {
            first.peer = path.or(first.peer);
        }
    }

    /// Passes a datagram on, if it can be sent now. Returns the socket, if that is new.
    pub(super) fn send(&mut self, datagram: &[u8], from: UdpPath) -> Option<&UdpSocket> {
        let successor = self.successor?;
        let is_its = |way: &Way| way.peer.is_some_and(|peer| peer.remote == from.remote);
        let is_new = !self.ways.iter().any(is_its);
        if is_new && self.ways.len() <= MAX_SOURCES {
            self.ways.push(Way { socket: open_relay().ok()?, peer: Some(from) });
        }
        let way = self.ways.iter().find(|way| is_its(way))?;
        let sent = way.socket.send_to(datagram, successor);
        self.datagrams += u64::from(sent.is_ok());
        is_new.then_some(&way.socket)
    }

    /// Returns the length of the next datagram for the peer, in `buffer`, and its path.
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Option<(usize, UdpPath)> {
        for way in &self.ways {
            for _ in 0..MAX_FOREIGN {
                let Ok((length, from)) = way.socket.recv_from(buffer) else { break };
                let is_successor = match self.successor {
                    Some(successor) => successor == from,
                    None => self.replicas.contains(&from.ip().to_canonical()),
                };
                if let Some(peer) = way.peer.filter(|_| is_successor) {
                    self.successor = Some(from);
                    self.datagrams += 1;
                    return Some((length, peer));
                }
            }
        }
        None
    }
}

/// Opens the socket, at any port.
pub fn open_relay() -> io::Result<UdpSocket> {
    let v6 = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
    let socket = v6.or_else(|_| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}
