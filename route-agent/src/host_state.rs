use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::NodeConfigSpec;
use netlink::nft::Hook;
use netlink::{Handle, NetlinkError, read_sysctl};
use netplan::{Address, Family, Sysctl};

use crate::names::{self, is_everywhere};
use crate::other_firewalls::Way;

/// State of the node that the agent needs besides its config.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostState {
    /// Addresses of all devices but our own.
    pub(crate) addresses: Vec<Address>,
    /// MTUs of all devices, by name, in bytes.
    pub(crate) mtus: BTreeMap<String, u32>,
    /// The kernel has IPv6.
    pub(crate) ipv6: bool,
    /// Settings that decide on forwarding, and whether they are on: one of the node for each family,
    /// and for IPv4 one of each device with an address, by which packets that come in there are
    /// forwarded.
    pub(crate) forwarding: BTreeMap<Sysctl, bool>,
}

impl HostState {
    pub(crate) async fn gather(handle: &Handle) -> Result<Self, NetlinkError> {
        let ours = [Family::Ipv4, Family::Ipv6].map(names::device);
        let addresses = handle.addresses().await?;
        let links = handle.links().await?;
        let addresses: Vec<_> =
            addresses.into_iter().filter(|a| !ours.contains(&&*a.dev)).collect();
        let mut settings: BTreeSet<_> = [Family::Ipv4, Family::Ipv6].map(names::forwarding).into();
        settings.extend(addresses.iter().map(|a| forwarding_of(&a.dev)));
        let mut forwarding = BTreeMap::new();
        for setting in settings {
            if let Some(value) = read_sysctl(handle.netns(), &setting)? {
                forwarding.insert(setting, value != 0);
            }
        }
        Ok(Self {
            addresses,
            mtus: links.into_iter().map(|link| (link.name, link.mtu)).collect(),
            ipv6: forwarding.contains_key(&names::forwarding(Family::Ipv6)),
            forwarding,
        })
    }

    /// The device that has this address.
    pub(crate) fn device_of(&self, address: IpAddr) -> Option<&str> {
        self.addresses.iter().find(|a| a.address == address).map(|a| a.dev.as_str())
    }

    /// Those of the settings on forwarding that packets between pods and peers of this family depend
    /// on, with their values. IPv4 packets depend on that of the device they come in on; each change of
    /// the namespace's sets those of all devices, so that it is the remedy where it is off, too.
    pub(crate) fn forwarding_of(
        &self,
        config: &NodeConfigSpec,
        family: Family,
    ) -> Vec<(&Sysctl, bool)> {
        let known = |setting: Sysctl| {
            self.forwarding.get_key_value(&setting).map(|(setting, is_on)| (setting, *is_on))
        };
        let namespace = known(names::forwarding(family));
        let devices = self.forwarding_devices(config).into_iter().map(forwarding_of);
        let devices: Vec<_> =
            devices.filter(|_| family == Family::Ipv4).filter_map(known).collect();
        if namespace.is_none_or(|(_, is_on)| is_on) {
            return namespace.into_iter().chain(devices).collect();
        }
        let all_forward = !devices.is_empty() && devices.iter().all(|(_, is_on)| *is_on);
        if all_forward { devices } else { namespace.into_iter().collect() }
    }

    /// Devices of the node's pods, and that of the underlay if gateways run here. Where pods have
    /// devices without an address, these are not known.
    fn forwarding_devices(&self, config: &NodeConfigSpec) -> BTreeSet<&str> {
        let mut devices = self.pod_devices(config);
        let mut gateways = config.peerings.iter().filter_map(|peering| peering.gateway.as_ref());
        if gateways.any(|gateway| !gateway.links.is_empty()) {
            devices.extend(self.underlay_devices(config));
        }
        devices
    }

    /// Devices with an address within a pod CIDR of the node.
    fn pod_devices(&self, config: &NodeConfigSpec) -> BTreeSet<&str> {
        let pods: Vec<Cidr> = config.local_pods.iter().filter_map(|p| p.parse().ok()).collect();
        let has_pods = |a: &&Address| pods.iter().any(|pods| pods.contains(a.address));
        self.addresses.iter().filter(has_pods).map(|a| a.dev.as_str()).collect()
    }

    /// Devices of the underlay that lead to no pod of the node.
    pub(crate) fn exits(&self, config: &NodeConfigSpec) -> BTreeSet<&str> {
        &self.underlay_devices(config) - &self.pod_devices(config)
    }

    fn underlay_devices(&self, config: &NodeConfigSpec) -> BTreeSet<&str> {
        config.underlay.iter().filter_map(|address| self.device_of(*address)).collect()
    }

    /// Devices by which packets of the overlay come and go at the hooks of packet filters.
    pub(crate) fn ways(&self, config: &NodeConfigSpec) -> Vec<Way> {
        let (underlay, forwarding) =
            (self.underlay_devices(config), self.forwarding_devices(config));
        let way = |hook, incoming: Option<&str>, outgoing: Option<&str>| Way {
            hook,
            incoming: incoming.map(str::to_owned),
            outgoing: outgoing.map(str::to_owned),
        };
        let overlay = names::device(Family::Ipv4);
        let forward = |dev: &&str| {
            [(*dev, overlay), (overlay, *dev)]
                .map(|(from, to)| way(Hook::Forward, Some(from), Some(to)))
        };
        let own = |dev| [way(Hook::Input, Some(dev), None), way(Hook::Output, None, Some(dev))];
        let own = underlay.into_iter().flat_map(own);
        forwarding.iter().flat_map(forward).chain(own).collect()
    }

    /// The node's own networks, each with the name of its device.
    pub(crate) fn networks(&self) -> impl Iterator<Item = (Cidr, &str)> {
        let network = |a: &Address| Cidr::around(a.address, a.len);
        let with_dev = self.addresses.iter().filter_map(move |a| Some((network(a)?, &*a.dev)));
        with_dev.filter(|(network, _)| !is_everywhere(network))
    }
}

/// IPv4 packets that come in on a device are forwarded by this setting of it.
fn forwarding_of(dev: &str) -> Sysctl {
    Sysctl::of_device(Family::Ipv4, dev, "forwarding")
}
