use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::NodeConfigSpec;
use netlink::nft::Hook;
use netlink::{Handle, NetlinkError, read_sysctl};
use netplan::{Address, Family, Sysctl};

use crate::names::{self, is_everywhere};
use crate::other_firewalls::Way;

/// What the agent must know of its node, besides its config.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Of all devices but our own.
    pub(crate) addresses: Vec<Address>,
    /// Of all devices, by name, in bytes.
    pub(crate) mtus: BTreeMap<String, u32>,
    /// The kernel has IPv6.
    pub(crate) ipv6: bool,
    /// The node forwards packets of this family between its devices.
    pub(crate) forwards_v4: bool,
    pub(crate) forwards_v6: bool,
}

impl Facts {
    pub(crate) async fn gather(handle: &Handle) -> Result<Self, NetlinkError> {
        let ours = [Family::Ipv4, Family::Ipv6].map(names::device);
        let addresses = handle.addresses().await?;
        let links = handle.links().await?;
        let setting = |path| read_sysctl(handle.netns(), &Sysctl::of_namespace(path));
        let forwards_v6 = setting("net/ipv6/conf/all/forwarding")?;
        Ok(Self {
            addresses: addresses.into_iter().filter(|a| !ours.contains(&&*a.dev)).collect(),
            mtus: links.into_iter().map(|link| (link.name, link.mtu)).collect(),
            ipv6: forwards_v6.is_some(),
            forwards_v4: setting("net/ipv4/ip_forward")? == Some(1),
            forwards_v6: forwards_v6 == Some(1),
        })
    }

    /// The device that has this address.
    pub(crate) fn device_of(&self, address: IpAddr) -> Option<&str> {
        self.addresses.iter().find(|a| a.address == address).map(|a| a.dev.as_str())
    }

    /// Devices by which packets of the overlay come and go at the hooks of packet filters. Where pods
    /// have devices without an address, these are not known.
    pub(crate) fn ways(&self, config: &NodeConfigSpec) -> Vec<Way> {
        let underlay: BTreeSet<_> =
            config.underlay.iter().filter_map(|address| self.device_of(*address)).collect();
        let pods: Vec<Cidr> = config.local_pods.iter().filter_map(|p| p.parse().ok()).collect();
        let has_pods = |a: &&Address| pods.iter().any(|pods| pods.contains(a.address));
        let mut forwarding: BTreeSet<_> =
            self.addresses.iter().filter(has_pods).map(|a| a.dev.as_str()).collect();
        let mut gateways = config.peerings.iter().filter_map(|peering| peering.gateway.as_ref());
        if gateways.any(|gateway| !gateway.links.is_empty()) {
            forwarding.extend(&underlay);
        }
        let way = |hook, incoming: &str, outgoing: Option<&str>| Way {
            hook,
            incoming: incoming.to_owned(),
            outgoing: outgoing.map(str::to_owned),
        };
        let overlay = names::device(Family::Ipv4);
        let forward = |dev: &&str| {
            [(*dev, overlay), (overlay, *dev)].map(|(from, to)| way(Hook::Forward, from, Some(to)))
        };
        let input = underlay.iter().map(|dev| way(Hook::Input, dev, None));
        forwarding.iter().flat_map(forward).chain(input).collect()
    }

    /// The node's own networks, each with the name of its device.
    pub(crate) fn networks(&self) -> impl Iterator<Item = (Cidr, &str)> {
        let network = |a: &Address| Cidr::around(a.address, a.len);
        let with_dev = self.addresses.iter().filter_map(move |a| Some((network(a)?, &*a.dev)));
        with_dev.filter(|(network, _)| !is_everywhere(network))
    }
}
