//! Peers that other peers reach through this cluster: IP resources give them addresses here.

use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::{NodeAddressMap, Remap, RemapKind};
use serde::Serialize;

use super::Peering;

/// An address of this cluster's external CIDR that leads to a peer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Transit {
    pub external: IpAddr,
    /// The peer's own address as this cluster sees it.
    pub target: IpAddr,
}

/// Assigns IP resources to the peers in whose prefixes their targets lie, if there are others.
pub(super) fn fill_in(peerings: &mut [Peering], ips: &[NodeAddressMap]) {
    if peerings.len() < 2 {
        return;
    }
    for peering in peerings {
        let to_peer =
            ips.iter().filter(|ip| peering.remaps.iter().any(|of| leads_to(of, ip.target)));
        let transit = to_peer.map(|ip| Transit { external: ip.external, target: ip.target });
        peering.transit = transit.collect();
    }
}

/// The first address of an external CIDR is no host's: Liqo has an IP for it, of unknown sources.
fn leads_to(remap: &Remap, target: IpAddr) -> bool {
    let is_unknown_source =
        |cidr: &Cidr| remap.kind == RemapKind::External && cidr.address() == target;
    let cidr: Option<Cidr> = remap.local.parse().ok();
    cidr.is_some_and(|cidr| cidr.contains(target) && !is_unknown_source(&cidr))
}
