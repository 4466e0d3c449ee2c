//! Relay of a server's replica on standby between the peer and the replica that has the tunnel.
//!
//! Connection tracking leads the peer's datagrams to the pod that had the tunnel until kube-proxy learns of the
//! other one, which takes a second, or an API server. If only the process of that pod has ended, the next one
//! passes them on.

use std::collections::BTreeMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use futures::future::select_all;
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

/// Sources at a time: the peer's gateway may be moving, too.
const MAX_SOURCES: usize = 8;
/// Longest datagram, in bytes.
const MAX_LENGTH: usize = u16::MAX as usize;

/// Passes datagrams on until it is closed.
#[derive(Debug)]
pub struct StandbyRelay {
    active: SocketAddr,
    task: JoinHandle<()>,
}

impl StandbyRelay {
    /// Takes the place of the WireGuard socket at the port of `active`.
    pub fn open(active: SocketAddr) -> io::Result<Self> {
        Ok(Self::on(open(active.port())?, active))
    }

    fn on(socket: UdpSocket, active: SocketAddr) -> Self {
        let relay = Relay { socket, active, ways: BTreeMap::new() };
        Self { active, task: tokio::spawn(relay.run()) }
    }

    /// Returns the socket of the active replica.
    pub fn active(&self) -> SocketAddr {
        self.active
    }

    /// Returns once the port is free.
    pub async fn close(self) {
        self.task.abort();
        _ = self.task.await;
    }
}

struct Relay {
    socket: UdpSocket,
    active: SocketAddr,
    /// By address of the peer.
    ways: BTreeMap<SocketAddr, Way>,
}

/// Socket that stands for an address of the peer towards the active replica.
struct Way {
    socket: UdpSocket,
    used: Instant,
}

impl Relay {
    /// A datagram that cannot be passed on is a lost one.
    async fn run(mut self) {
        let mut buffer = vec![0; MAX_LENGTH];
        loop {
            tokio::select! {
                received = self.socket.recv_from(&mut buffer) => {
                    if let Ok((length, peer)) = received {
                        self.pass_on(&buffer[..length], peer).await;
                    }
                }
                () = self.way_readable() => self.pass_back(&mut buffer).await,
            }
        }
    }

    async fn pass_on(&mut self, datagram: &[u8], peer: SocketAddr) {
        if !self.ways.contains_key(&peer) {
            let Ok(socket) = connected(self.active).await else { return };
            let oldest = self.ways.iter().min_by_key(|(_, way)| way.used).map(|(peer, _)| *peer);
            if let Some(oldest) = oldest.filter(|_| self.ways.len() >= MAX_SOURCES) {
                self.ways.remove(&oldest);
            }
            tracing::info!(%peer, active = %self.active, "datagrams for the active replica come here");
            self.ways.insert(peer, Way { socket, used: Instant::now() });
        }
        if let Some(way) = self.ways.get_mut(&peer) {
            way.used = Instant::now();
            _ = way.socket.send(datagram).await;
        }
    }

    async fn way_readable(&self) {
        let all: Vec<_> = self.ways.values().map(|way| Box::pin(way.socket.readable())).collect();
        if all.is_empty() {
            return std::future::pending().await;
        }
        // An error is reported by the read that follows.
        let _ = select_all(all).await;
    }

    async fn pass_back(&self, buffer: &mut [u8]) {
        for (peer, way) in &self.ways {
            while let Ok(length) = way.socket.try_recv(buffer) {
                _ = self.socket.send_to(&buffer[..length], *peer).await;
            }
        }
    }
}

async fn connected(active: SocketAddr) -> io::Result<UdpSocket> {
    let any = match active {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(active).await?;
    Ok(socket)
}

fn open(port: u16) -> io::Result<UdpSocket> {
    let v6 = std::net::UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port));
    let socket = v6.or_else(|_| std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)))?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    async fn received(socket: &UdpSocket) -> (Vec<u8>, SocketAddr) {
        let mut buffer = [0; 64];
        let received = timeout(SOON, socket.recv_from(&mut buffer)).await.expect("a datagram");
        let (length, from) = received.unwrap();
        (buffer[..length].to_vec(), from)
    }

    #[tokio::test]
    async fn datagrams_pass_both_ways_and_peers_stay_apart() {
        let active = UdpSocket::bind("127.0.0.2:0").await.unwrap();
        let active_at = active.local_addr().unwrap();
        let standby = SocketAddr::from(([127, 0, 0, 1], active_at.port()));
        let relay = StandbyRelay::on(UdpSocket::bind(standby).await.unwrap(), active_at);
        let mut ways = Vec::new();
        for text in [b"one", b"two"] {
            let peer = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            peer.send_to(text, standby).await.unwrap();
            let (datagram, way) = received(&active).await;
            assert_eq!(datagram, text);
            active.send_to(b"back", way).await.unwrap();
            assert_eq!(received(&peer).await, (b"back".to_vec(), standby));
            ways.push(way);
        }
        assert_ne!(ways[0], ways[1]);

        relay.close().await;
        assert!(UdpSocket::bind(standby).await.is_ok());
    }
}
