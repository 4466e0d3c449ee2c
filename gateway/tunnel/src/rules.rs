//! Filter of the packets that pass the tunnel, and translation of their addresses.
//!
//! Translation is stateless: prefix for prefix, host bits kept, so that a gateway can be replaced
//! without any effect on flows. The host bits also keep what a translation adds to a checksum the
//! same for all addresses of a prefix: it is computed when the rules are compiled.

mod mss;
mod table;
mod translate;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv4Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::DropReason;
pub use crate::packet::L4Checksum;
use crate::packet::{Headers, Version};
use table::{Address, Table, host};
use translate::{Tunnel, Way};

/// Source that [`Rules`] are compiled from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RulesConfig {
    /// This cluster's pod and external CIDRs.
    pub own: Vec<IpNet>,
    /// The peer's prefixes.
    pub remaps: Vec<Remap>,
    /// This end's address in the tunnel.
    pub tunnel_address: Ipv4Addr,
    /// The other end's.
    pub peer_tunnel_address: Ipv4Addr,
    /// Single addresses that the gateway rewrites. No two with the same external address or target.
    pub addresses: Vec<AddressMap>,
    /// At most one a family: stands in for the sources of ICMP errors that lie outside `own`.
    pub icmp_sources: Vec<IpAddr>,
    /// The tunnel's MTU in bytes, from which the bound of the MSS follows.
    pub mtu: usize,
}

/// A prefix of the peer: as the peer uses it, and as this cluster sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remap {
    pub remote: IpNet,
    /// Prefix of the same family and length as `remote`; overlaps no other remap's.
    pub local: IpNet,
}

/// An external address of this cluster, and what it stands for (an IP resource).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressMap {
    pub external: IpAddr,
    pub target: IpAddr,
}

impl RulesConfig {
    /// Everything passes as it is, as through a WireGuard that does no more than that. `mtu` is the
    /// tunnel's, in bytes.
    pub fn transparent(mtu: usize) -> Self {
        let everything = [Ipv4Net::default().into(), Ipv6Net::default().into()];
        Self {
            own: everything.to_vec(),
            remaps: everything.map(|net| Remap { remote: net, local: net }).to_vec(),
            tunnel_address: Ipv4Addr::new(169, 254, 18, 1),
            peer_tunnel_address: Ipv4Addr::new(169, 254, 18, 2),
            addresses: Vec::new(),
            icmp_sources: Vec::new(),
            mtu,
        }
    }
}

/// Why no rules can be compiled from a config: some packet would have two translations, or none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RulesError {
    #[error("{0} cannot stand for {1}: family or length differ")]
    Unlike(IpNet, IpNet),
    #[error("{0} has two translations")]
    Ambiguous(IpNet),
    #[error("the peer's prefixes overlap as this cluster sees them: {0} and {1}")]
    Overlap(IpNet, IpNet),
    #[error("{0} and {1} are both to stand for foreign sources of ICMP errors")]
    TwoIcmpSources(IpAddr, IpAddr),
}

/// The compiled packet rules of one peering. No call on a packet allocates.
#[derive(Clone, Debug)]
pub struct Rules {
    outbound_v4: Way<u32>,
    outbound_v6: Way<u128>,
    inbound_v4: Way<u32>,
    inbound_v6: Way<u128>,
}

impl Rules {
    pub fn new(config: &RulesConfig) -> Result<Self, RulesError> {
        check_remaps(&config.remaps)?;
        for map in &config.addresses {
            if map.external.is_ipv4() != map.target.is_ipv4() {
                return Err(RulesError::Unlike(host(map.external), host(map.target)));
            }
        }
        let mut rules = Self {
            outbound_v4: outbound(config)?,
            outbound_v6: outbound(config)?,
            inbound_v4: inbound(config)?,
            inbound_v6: inbound(config)?,
        };
        rules.set_mtu(config.mtu);
        Ok(rules)
    }

    /// The tunnel's MTU in bytes changed.
    pub fn set_mtu(&mut self, mtu: usize) {
        let (v4, v6) = (mss::bound(mtu, Version::V4), mss::bound(mtu, Version::V6));
        (self.outbound_v4.max_mss, self.inbound_v4.max_mss) = (v4, v4);
        (self.outbound_v6.max_mss, self.inbound_v6.max_mss) = (v6, v6);
    }

    /// Checks and translates a packet on its way to the peer, in place.
    ///
    /// `packet` is exactly one IP packet, or one train: a TSO or USO super-packet, whose headers
    /// are translated once for all of its segments. Its length fields are not looked at, so cut
    /// off padding first ([`Headers::total_len`]). A packet that is refused is left as it was.
    #[inline]
    pub fn outbound(&self, packet: &mut [u8], checksum: L4Checksum) -> Result<(), DropReason> {
        let headers = Headers::parse_train(packet)?;
        match headers.version {
            Version::V4 => self.outbound_v4.translate(packet, &headers, checksum),
            Version::V6 => self.outbound_v6.translate(packet, &headers, checksum),
        }
    }

    /// Checks and translates a packet that came from the peer; as [`Rules::outbound`] otherwise.
    #[inline]
    pub fn inbound(&self, packet: &mut [u8], checksum: L4Checksum) -> Result<(), DropReason> {
        let headers = Headers::parse_train(packet)?;
        match headers.version {
            Version::V4 => self.inbound_v4.translate(packet, &headers, checksum),
            Version::V6 => self.inbound_v6.translate(packet, &headers, checksum),
        }
    }
}

fn outbound<A: Address>(config: &RulesConfig) -> Result<Way<A>, RulesError> {
    let [own, peer] = [config.tunnel_address, config.peer_tunnel_address].map(IpAddr::from);
    let targets = config.addresses.iter().map(|map| (host(map.target), host(map.external)));
    let remaps = config.remaps.iter().map(|remap| (remap.local, remap.remote));
    Ok(Way {
        source: Table::new(kept(config, own, |map| map.target).chain(targets))?,
        destination: Table::new(remaps.chain([(host(peer), host(peer))]))?,
        icmp_source: icmp_source(&config.icmp_sources)?,
        tunnel: tunnel(own, peer),
        max_mss: 0,
    })
}

fn inbound<A: Address>(config: &RulesConfig) -> Result<Way<A>, RulesError> {
    let [own, peer] = [config.tunnel_address, config.peer_tunnel_address].map(IpAddr::from);
    let externals = config.addresses.iter().map(|map| (host(map.external), host(map.target)));
    let remaps = config.remaps.iter().map(|remap| (remap.remote, remap.local));
    Ok(Way {
        source: Table::new(remaps)?,
        destination: Table::new(kept(config, own, |map| map.external).chain(externals))?,
        icmp_source: None,
        tunnel: tunnel(peer, own),
        max_mss: 0,
    })
}

fn tunnel<A: Address>(from: IpAddr, to: IpAddr) -> Option<Tunnel<A>> {
    A::from_ip(from).zip(A::from_ip(to)).map(|(from, to)| Tunnel { from, to })
}

/// Own addresses that need no translation. A prefix that is nothing but one of the rewritten
/// addresses is left out, as it would have two.
fn kept(
    config: &RulesConfig,
    tunnel: IpAddr,
    rewritten: fn(&AddressMap) -> IpAddr,
) -> impl Iterator<Item = (IpNet, IpNet)> {
    let is_rewritten =
        move |net: &IpNet| config.addresses.iter().any(|map| host(rewritten(map)) == *net);
    let own = config.own.iter().copied().filter(move |net| !is_rewritten(net));
    own.chain([host(tunnel)]).map(|net| (net, net))
}

/// Remaps must be one to one: two prefixes that this cluster sees at one place could not be
/// distinguished. The peer's own prefixes may lie in each other; the longest counts.
fn check_remaps(remaps: &[Remap]) -> Result<(), RulesError> {
    for (i, a) in remaps.iter().enumerate() {
        let is_v4 = |net: IpNet| matches!(net, IpNet::V4(_));
        if a.local.prefix_len() != a.remote.prefix_len() || is_v4(a.local) != is_v4(a.remote) {
            return Err(RulesError::Unlike(a.local, a.remote));
        }
        for b in &remaps[..i] {
            if a != b && (a.local.contains(&b.local) || b.local.contains(&a.local)) {
                return Err(RulesError::Overlap(a.local, b.local));
            }
        }
    }
    Ok(())
}

fn icmp_source<A: Address>(sources: &[IpAddr]) -> Result<Option<A>, RulesError> {
    let mut family = sources.iter().filter(|source| A::from_ip(**source).is_some());
    match (family.next(), family.next()) {
        (Some(first), Some(second)) => Err(RulesError::TwoIcmpSources(*first, *second)),
        (first, _) => Ok(first.and_then(|source| A::from_ip(*source))),
    }
}
