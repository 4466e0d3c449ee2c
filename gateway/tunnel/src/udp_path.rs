use std::net::{IpAddr, SocketAddr};

/// Way of the tunnel's datagrams: the peer's endpoint, and the address of this host that they leave
/// from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpPath {
    pub remote: SocketAddr,
    /// Destination of the peer's last packet; `None` leaves the choice to the kernel.
    pub source: Option<IpAddr>,
}

impl UdpPath {
    /// The same from the address that the kernel chooses.
    pub(crate) fn rerouted(self) -> Self {
        Self { source: None, ..self }
    }

    /// Returns whether that is the remote: a socket of IPv6 writes addresses of IPv4 in another way
    /// than a config.
    pub(crate) fn leads_to(self, to: SocketAddr) -> bool {
        self.remote.ip().to_canonical() == to.ip().to_canonical() && self.remote.port() == to.port()
    }
}

impl From<SocketAddr> for UdpPath {
    fn from(remote: SocketAddr) -> Self {
        Self { remote, source: None }
    }
}
