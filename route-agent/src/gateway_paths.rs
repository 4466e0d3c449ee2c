//! Consequences of what probes of gateways have shown: which replica is active, which peers are lost.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::{ActiveReplica, NodeConfigSpec};

use crate::overlay_probe::{OverlayProbes, TakeOvers};

#[derive(Default)]
pub(crate) struct GatewayPaths {
    take_overs: TakeOvers,
    /// The last take-over that is published of each gateway, by its MAC address.
    published: BTreeMap<String, u64>,
    /// Peers whose prefixes are refused as their gateways do not answer this node.
    lost: BTreeSet<String>,
}

impl GatewayPaths {
    pub(crate) fn lost(&self) -> &BTreeSet<String> {
        &self.lost
    }

    /// Returns whether a replica has taken a gateway's tunnel over, or a gateway was lost or is back.
    /// With `--no-accept-rules`, where `can_lose` is false, none is lost: a firewall may drop what this
    /// host is answered and nothing of what its pods are.
    pub(crate) fn update(&mut self, probes: &OverlayProbes, can_lose: bool) -> bool {
        let lost = if can_lose { probes.lost() } else { BTreeSet::new() };
        for peer in lost.difference(&self.lost) {
            tracing::warn!(peer, "new connections are refused until the peer's gateway answers");
        }
        let take_overs = probes.take_overs();
        let is_changed = take_overs != self.take_overs || lost != self.lost;
        (self.take_overs, self.lost) = (take_overs, lost);
        is_changed
    }

    /// Forgets the take-overs of gateways that count anew: their configs were deleted, and made again.
    pub(crate) fn follow_published(&mut self, probes: &OverlayProbes, config: &NodeConfigSpec) {
        let gateways = config.peerings.iter().filter_map(|peering| peering.gateway.as_ref());
        let published = gateways.filter_map(|gateway| Some((gateway.mac.clone()?, gateway.epoch)));
        let before = std::mem::take(&mut self.published);
        for (mac, epoch) in published {
            let last = before.get(&mac).copied();
            if epoch.is_some_and(|epoch| last > Some(epoch)) {
                self.take_overs.remove(&mac);
                probes.forget_take_overs(&mac);
            }
            if let Some(epoch) = epoch.or(last) {
                self.published.insert(mac, epoch);
            }
        }
    }

    /// Has packets go to the replicas that have taken over since the config was written, which an API server that
    /// does not answer cannot report. Only replicas of the config count.
    pub(crate) fn follow_take_overs(&self, config: &mut NodeConfigSpec) {
        let gateways = config.peerings.iter_mut().filter_map(|peering| peering.gateway.as_mut());
        for gateway in gateways {
            let active = gateway.mac.as_ref().and_then(|mac| self.take_overs.get(mac));
            let is_replica = |active: &&ActiveReplica| gateway.replicas.contains(&active.address);
            let is_later = |active: &&ActiveReplica| Some(active.epoch) > gateway.epoch;
            if let Some(active) = active.filter(is_replica).filter(is_later) {
                (gateway.underlay, gateway.epoch) = (active.address, Some(active.epoch));
            }
        }
    }
}
