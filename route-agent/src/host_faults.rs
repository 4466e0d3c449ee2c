//! Faults of the host that weft reports and leaves alone, each since it was found first.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::{Diversion, ForwardingOff, MovedAddress, NodeConfigStatus, PacketDrop};
use foreign::foreign_routes::{self, Foreign};
use jiff::Timestamp;
use netlink::{Handle, NetlinkError};
use netplan::Sysctl;

use crate::host_state::HostState;
use crate::moved::{self, Homes};
use crate::parsed_config::ParsedConfig;

#[derive(Default)]
pub(crate) struct HostFaults {
    /// Declared addresses of the node that another has taken the place of.
    moved: Vec<MovedAddress>,
    homes: Homes,
    /// Devices with the node's addresses, and whether they are up and have a carrier.
    carriers: BTreeMap<String, bool>,
    /// Settings that keep the node from forwarding.
    forwarding_off: Vec<ForwardingOff>,
    /// Rules and routes of others that take packets between pods and peers.
    diversions: Vec<Diversion>,
    /// Rules of other firewalls that let no packets between pods and peers pass.
    filtered: Vec<Diversion>,
}

impl HostFaults {
    pub(crate) fn carriers(&self) -> &BTreeMap<String, bool> {
        &self.carriers
    }

    /// Forgets moved addresses before they are looked for, and with a config that is `removed` all
    /// that follows from one.
    pub(crate) fn clear(&mut self, removed: bool) {
        self.moved.clear();
        if removed {
            self.diversions.clear();
            self.forwarding_off.clear();
        }
    }

    /// Compares the node's addresses with those of its devices. Returns the problems.
    pub(crate) async fn observe(
        &mut self,
        handle: &Handle,
        config: &ParsedConfig<'_>,
        host_state: &HostState,
        in_kubernetes: bool,
    ) -> Result<BTreeSet<String>, NetlinkError> {
        self.carriers = host_state.underlay_carriers(config);
        if let Some(status) = config.object.status.as_ref().filter(|_| self.homes.is_empty()) {
            self.homes = moved::homes_of(&status.moved, host_state);
        }
        let homes = &mut self.homes;
        self.moved = moved::find(handle, config, host_state, homes, in_kubernetes).await?;
        Ok(self.moved.iter().filter(|_| in_kubernetes).map(moved::stale).collect())
    }

    pub(crate) fn note_diversions(&mut self, found: &[Foreign]) {
        foreign_routes::note(&mut self.diversions, found);
    }

    pub(crate) fn note_filtered(&mut self, found: &[Foreign]) {
        foreign_routes::note(&mut self.filtered, found);
    }

    pub(crate) fn note_forwarding(&mut self, settings: &BTreeMap<Sysctl, bool>) {
        let before = std::mem::take(&mut self.forwarding_off);
        for (setting, _) in settings.iter().filter(|(_, is_on)| !**is_on) {
            let known = before.iter().find(|off| off.setting == setting.name());
            let since = known.map(|off| off.since.clone());
            self.forwarding_off.push(ForwardingOff {
                setting: setting.name(),
                ipv6: setting.is_ipv6(),
                since: since.unwrap_or_else(|| format!("{:.3}", Timestamp::now())),
            });
        }
    }

    /// Devices with the node's addresses that drop all packets.
    pub(crate) fn packet_drops(&self) -> Vec<PacketDrop> {
        HostState::without_carrier(&self.carriers)
    }

    /// Part of the status.
    pub(crate) fn status(&self) -> NodeConfigStatus {
        NodeConfigStatus {
            moved: self.moved.clone(),
            forwarding_off: self.forwarding_off.clone(),
            diversions: [&*self.diversions, &*self.filtered].concat(),
            ..NodeConfigStatus::default()
        }
    }
}
