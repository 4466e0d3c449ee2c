use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// Sources other than the peer's endpoint: the peer's own gateway may be moving, too.
const MAX_SOURCES: usize = 8;
/// Datagrams of others that are skipped at once.
const MAX_FOREIGN: usize = 64;

/// Way between the peer and the replica that has the tunnel now, through the one that had it: connection
/// tracking on the way leads the peer's packets here for a while.
#[derive(Debug)]
pub(super) struct Relay {
    /// Addresses of the other replicas, one of which has the tunnel.
    replicas: Vec<IpAddr>,
    /// The one that has sent something.
    successor: Option<SocketAddr>,
    /// The first one is for the peer's endpoint, and known to the successor.
    ways: Vec<Way>,
    pub(super) datagrams: u64,
}

/// Socket that stands for an address of the peer towards the successor.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) socket: UdpSocket,
    peer: Option<SocketAddr>,
}

impl Relay {
    pub(super) fn new(socket: UdpSocket, replicas: Vec<IpAddr>) -> Self {
        let ways = vec![Way { socket, peer: None }];
        Self { replicas, successor: None, ways, datagrams: 0 }
    }

    pub(super) fn sockets(&self) -> impl Iterator<Item = &UdpSocket> {
        self.ways.iter().map(|way| &way.socket)
    }

    /// Sets the peer's endpoint.
    pub(super) fn set_endpoint(&mut self, endpoint: Option<SocketAddr>) {
        if let [first, ..] = self.ways.as_mut_slice() {
            first.peer = endpoint.or(first.peer);
        }
    }

    /// Passes a datagram on. One that cannot be sent now is lost. Returns a socket that is new.
    pub(super) fn send(&mut self, datagram: &[u8], from: SocketAddr) -> Option<&UdpSocket> {
        let successor = self.successor?;
        let known = self.ways.iter().position(|way| way.peer == Some(from));
        let is_new = known.is_none();
        if is_new && self.ways.len() <= MAX_SOURCES {
            self.ways.push(Way { socket: open_relay().ok()?, peer: Some(from) });
        }
        let way = self
            .ways
            .get(known.unwrap_or(self.ways.len() - 1))
            .filter(|way| way.peer == Some(from))?;
        let sent = way.socket.send_to(datagram, successor);
        self.datagrams += u64::from(sent.is_ok());
        is_new.then_some(&way.socket)
    }

    /// The next datagram for the peer: its length in `buffer`, and where the peer is. Anybody can send others.
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Option<(usize, SocketAddr)> {
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
