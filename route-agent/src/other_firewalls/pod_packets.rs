//! Rules of other programs about packets between this node's pods and peers.

use fabric_api::Cidr;
use netlink::nft::{AddressMatch, Interface};
use netplan::Family;

use super::Treatment;
use super::drop_points::Rule;
use crate::names;

impl Treatment {
    /// The pod CIDR whose packets to or from a peer all meet the rule.
    pub(super) fn pods_that_meet(&self, rule: &Rule) -> Option<&Cidr> {
        let meet = |pods: &&Cidr| [true, false].iter().any(|to| self.meet(rule, (pods, *to)));
        self.pods.iter().find(meet)
    }

    /// True if no packet of pods to peers gets past the rule.
    pub(super) fn all_meet(&self, rule: &Rule, pods: &Cidr) -> bool {
        let mut of_peers = rule.addresses.iter().filter(|of| !of.source);
        self.meet(rule, (pods, true))
            && of_peers.all(|of| self.peers_like(pods).all(|peer| holds(of, peer, true)))
    }

    /// True if all packets of pods to or from a peer meet the rule.
    pub(super) fn meet(&self, rule: &Rule, (pods, to_peers): (&Cidr, bool)) -> bool {
        let is_by = |of: &Interface| {
            if of.incoming == to_peers {
                self.pod_devices.iter().any(|dev| of.matches(dev))
            } else {
                [Family::Ipv4, Family::Ipv6].map(names::device).iter().any(|dev| of.matches(dev))
            }
        };
        let is_of = |of: &AddressMatch| {
            if of.prefix.is_ipv4() != pods.is_ipv4() {
                false
            } else if of.source == to_peers {
                holds(of, pods, true)
            } else {
                self.peers_like(pods).any(|peer| holds(of, peer, false))
            }
        };
        !rule.is_narrow
            && rule.protocol.is_none()
            && !rule.has_ports()
            && rule.interfaces.iter().all(is_by)
            && rule.addresses.iter().all(is_of)
            && self.peers_like(pods).next().is_some()
    }

    /// Peers' prefixes of the same family.
    fn peers_like(&self, pods: &Cidr) -> impl Iterator<Item = &Cidr> {
        let is_ipv4 = pods.is_ipv4();
        self.peers.iter().filter(move |peer| peer.is_ipv4() == is_ipv4)
    }
}

/// True if an address match holds for all addresses of a prefix, or for some.
fn holds(of: &AddressMatch, prefix: &Cidr, all: bool) -> bool {
    let overlaps = of.prefix.overlaps(prefix);
    let contains = overlaps && of.prefix.len() <= prefix.len();
    match (of.negated, all) {
        (false, true) => contains,
        (false, false) => overlaps,
        (true, true) => !overlaps,
        (true, false) => !contains,
    }
}
