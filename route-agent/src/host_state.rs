use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::PacketDrop;
use foreign::other_firewalls::Way;
use netlink::nft::Hook;
use netlink::{ForeignRoute, Handle, LOCAL_TABLE, NetlinkError, read_sysctl};
use netplan::names::{self, MAIN_TABLE, TABLE, is_everywhere};
use netplan::{Address, Family, Sysctl};

use crate::parsed_config::ParsedConfig;

/// State of the node that the agent needs besides its config.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct HostState {
    /// Addresses of all devices but our own.
    pub(crate) addresses: Vec<Address>,
    /// MTUs of all devices, by name, in bytes.
    pub(crate) mtus: BTreeMap<String, u32>,
    /// Devices, by name, and whether they are up and have a carrier.
    pub(crate) carriers: BTreeMap<String, bool>,
    /// The kernel has IPv6.
    pub(crate) ipv6: bool,
    /// Settings that decide on forwarding, and whether they are on: one of the node for each family,
    /// and for IPv4 one of each device with an address, by which packets that come in there are
    /// forwarded.
    pub(crate) forwarding: BTreeMap<Sysctl, bool>,
    /// Routes by devices, of all tables but the local one and weft's.
    pub(crate) routes: Vec<ForeignRoute>,
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
        let mut routes = Vec::new();
        for family in [Family::Ipv4, Family::Ipv6] {
            let carries = |route: &ForeignRoute| {
                ![LOCAL_TABLE, TABLE].contains(&route.table)
                    && route.kind.is_empty()
                    && route.dev.is_some()
            };
            routes.extend(handle.all_routes(family).await?.into_iter().filter(carries));
        }
        Ok(Self {
            routes,
            addresses,
            carriers: links.iter().map(|link| (link.name.clone(), link.carrier)).collect(),
            mtus: links.into_iter().map(|link| (link.name, link.mtu)).collect(),
            ipv6: forwarding.contains_key(&names::forwarding(Family::Ipv6)),
            forwarding,
        })
    }

    /// True if a route leads into this network, other than a default one: a node has one to each network of its own, but
    /// to its own addresses alone.
    pub(crate) fn has_route_in(&self, network: &Cidr) -> bool {
        let is_own_address = network.len() == if network.is_ipv4() { 32 } else { 128 };
        let mut specific =
            self.routes.iter().filter(|r| r.table == MAIN_TABLE && !r.to.is_everything());
        is_own_address || specific.any(|route| route.to.overlaps(network))
    }

    /// The device that has this address.
    pub(crate) fn device_of(&self, address: IpAddr) -> Option<&str> {
        self.addresses.iter().find(|a| a.address == address).map(|a| a.dev.as_str())
    }

    /// Addresses of the device, and of networks that the address is in.
    pub(crate) fn near(&self, address: IpAddr, dev: Option<&str>) -> Vec<IpAddr> {
        let is_near = |other: &&Address| {
            let network = Cidr::around(other.address, other.len);
            let contains = |network: &Cidr| !is_everywhere(network) && network.contains(address);
            Some(other.dev.as_str()) == dev || network.as_ref().is_some_and(contains)
        };
        self.addresses.iter().filter(is_near).map(|near| near.address).collect()
    }

    /// Those of the settings on forwarding that packets between pods and peers of this family depend
    /// on, with their values. IPv4 packets depend on that of the device they come in on; each change of
    /// the namespace's sets those of all devices, so that it is the remedy where it is off, too.
    pub(crate) fn forwarding_of(
        &self,
        config: &ParsedConfig<'_>,
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
    fn forwarding_devices(&self, config: &ParsedConfig<'_>) -> BTreeSet<&str> {
        let mut devices = self.pod_devices(config);
        if config.gateways().any(|gateway| !gateway.links.is_empty()) {
            devices.extend(self.underlay_devices(config));
        }
        devices
    }

    /// Devices with an address within a pod CIDR of the node.
    fn pod_devices(&self, config: &ParsedConfig<'_>) -> BTreeSet<&str> {
        let has_pods = |a: &&Address| config.local_pods.iter().any(|pods| pods.contains(a.address));
        self.addresses.iter().filter(has_pods).map(|a| a.dev.as_str()).collect()
    }

    /// Devices that lead to no pod of the node: those with an address or a default route, but for those
    /// of pods. A pod's own device has neither, so that none is an exit before its route is there.
    pub(crate) fn exits(&self, config: &ParsedConfig<'_>) -> BTreeSet<&str> {
        let addressed = self.networks().map(|(_, dev)| dev);
        let defaults = self.routes.iter().filter(|route| route.to.is_everything());
        let devices = addressed.chain(defaults.filter_map(|route| route.dev.as_deref()));
        let of_pods = self.devices_of_routes(config);
        let is_other = |dev: &&str| {
            *dev != "lo" && !dev.starts_with("weft") && !of_pods.contains(dev) && is_plain(dev)
        };
        let underlay = self.underlay_devices(config).into_iter();
        let exits: BTreeSet<&str> = underlay.chain(devices.filter(is_other)).collect();
        &exits - &self.pod_devices(config)
    }

    /// Devices by which other hosts are reached: those with the node's address, a default route or one to pods of
    /// other nodes, whose packets may come with those nodes' addresses.
    pub(crate) fn uplinks(&self, config: &ParsedConfig<'_>) -> BTreeSet<&str> {
        let pods = &config.cluster_pods;
        let is_far = |to: Cidr| to.is_everything() || pods.iter().any(|pods| pods.overlaps(&to));
        let routes = self.routes.iter().filter(|route| is_far(route.to));
        let devices = routes.filter_map(|route| route.dev.as_deref());
        let of_pods = &self.devices_of_routes(config) | &self.pod_devices(config);
        let is_other = |dev: &&str| !of_pods.contains(dev) && is_plain(dev);
        self.underlay_devices(config).into_iter().chain(devices.filter(is_other)).collect()
    }

    /// Packets of pods come from the devices that routes to those pods lead to. Not with Cilium, whose routes lead to
    /// one device, while its programs in the kernel take packets from others.
    pub(crate) fn has_symmetric_pods(&self, config: &ParsedConfig<'_>) -> bool {
        !self.devices_of_routes(config).iter().any(|dev| dev.starts_with("cilium"))
    }

    /// Devices that lead to pods of the node.
    pub(crate) fn devices_of_pods(&self, config: &ParsedConfig<'_>) -> BTreeSet<&str> {
        &(&self.pod_devices(config) | &self.devices_of_routes(config)) - &self.exits(config)
    }

    fn devices_of_routes(&self, config: &ParsedConfig<'_>) -> BTreeSet<&str> {
        config.pod_cidrs().flat_map(|pods| self.devices_to(pods)).collect()
    }

    /// Devices by which specific routes lead to pods: those of the main table within the pods' prefix,
    /// or if it has none, wider ones, or those of other tables.
    fn devices_to(&self, pods: Cidr) -> BTreeSet<&str> {
        let specific = self.routes.iter().filter(|r| !r.to.is_everything() && r.to.overlaps(&pods));
        let (main, others): (Vec<_>, Vec<_>) = specific.partition(|r| r.table == MAIN_TABLE);
        let (within, wider): (Vec<_>, Vec<_>) =
            main.into_iter().partition(|r| r.to.len() >= pods.len());
        let first = [within, wider, others].into_iter().find(|routes| !routes.is_empty());
        first.into_iter().flatten().filter_map(|route| route.dev.as_deref()).collect()
    }

    /// Networks that the node's addresses are in.
    pub(crate) fn underlay_networks(&self, config: &ParsedConfig<'_>) -> BTreeSet<Cidr> {
        let own = self.addresses.iter().filter(|own| config.spec.underlay.contains(&own.address));
        own.filter_map(|own| Cidr::around(own.address, own.len)).collect()
    }

    /// Devices with the node's addresses, and whether they are up and have a carrier.
    pub(crate) fn underlay_carriers(&self, config: &ParsedConfig<'_>) -> BTreeMap<String, bool> {
        let of_underlay = self.underlay_devices(config).into_iter();
        of_underlay.filter_map(|dev| Some((dev.to_owned(), *self.carriers.get(dev)?))).collect()
    }

    /// Names those of these devices that are down or have no carrier.
    pub(crate) fn without_carrier(carriers: &BTreeMap<String, bool>) -> Vec<PacketDrop> {
        let devices = carriers.iter().filter(|(_, has_carrier)| !**has_carrier);
        let of_device = |(dev, _): (&String, _)| PacketDrop {
            cause: format!("{dev}, which has this node's address, is down or has no carrier"),
            remedy: format!(
                "see its cable and switch (`ip link show {dev}`), or what it is attached to"
            ),
        };
        devices.map(of_device).collect()
    }

    fn underlay_devices(&self, config: &ParsedConfig<'_>) -> BTreeSet<&str> {
        config.spec.underlay.iter().filter_map(|address| self.device_of(*address)).collect()
    }

    /// Devices by which packets of the overlay come and go at the hooks of packet filters.
    pub(crate) fn ways(&self, config: &ParsedConfig<'_>) -> Vec<Way> {
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

/// True for a name that means the same in a script of nft.
fn is_plain(device: &str) -> bool {
    !device.contains(['"', '\\', '*'])
}

/// IPv4 packets that come in on a device are forwarded by this setting of it.
fn forwarding_of(dev: &str) -> Sysctl {
    Sysctl::of_device(Family::Ipv4, dev, "forwarding")
}

#[cfg(test)]
mod tests {
    use fabric_api::fabric::NodeConfig;
    use netlink::ForeignRoute;

    use super::*;

    const UNDERLAY: &str = "192.0.2.5/24 eth0";

    /// Devices that count as exits of a node with these addresses and routes, as `PREFIX DEVICE`, the
    /// latter in the main table or `PREFIX DEVICE TABLE`.
    fn exits(addresses: &[&str], routes: &[&str]) -> Vec<String> {
        let (state, config) = host(addresses, routes);
        state.exits(&ParsedConfig::parse(&config)).into_iter().map(str::to_owned).collect()
    }

    fn host(addresses: &[&str], routes: &[&str]) -> (HostState, NodeConfig) {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let addresses = addresses.iter().chain(&[UNDERLAY]).map(|text| {
            let of = words(text);
            let (address, len) = of[0].split_once('/').unwrap();
            let (address, len) = (address.parse().unwrap(), len.parse().unwrap());
            Address { dev: of[1].clone(), address, len }
        });
        let routes = routes.iter().chain(&["0.0.0.0/0 eth0"]).map(|text| {
            let of = words(text);
            let table = of.get(2).map_or(MAIN_TABLE, |table| table.parse().unwrap());
            let (to, dev, gateway) = (of[0].parse().unwrap(), Some(of[1].clone()), None);
            ForeignRoute { table, to, metric: 0, kind: "", gateway, dev, protocol: 3 }
        });
        let state = HostState {
            addresses: addresses.collect(),
            routes: routes.collect(),
            ..HostState::default()
        };
        let config = serde_json::json!({"clusterId": "rome", "underlay": ["192.0.2.5"],
            "podCidrs": ["10.200.0.0/16"], "localPods": ["10.200.1.0/24"], "external": [], "peerings": [], "vxlanSources": []});
        (state, NodeConfig::new("rome-1", serde_json::from_value(config).unwrap()))
    }

    #[test]
    fn devices_to_other_hosts_are_uplinks() {
        let bridge = ["10.200.1.1/24 cni0", "172.17.0.1/16 docker0"];
        let routes = ["10.200.1.0/24 cni0", "10.200.2.0/24 tun1", "172.17.0.0/16 docker0"];
        let (state, config) = host(&bridge, &routes);
        assert_eq!(state.uplinks(&ParsedConfig::parse(&config)), ["eth0", "tun1"].into());
        let (state, config) = host(&["10.200.1.2/16 ovn0"], &["10.200.0.0/16 ovn0"]);
        assert_eq!(state.uplinks(&ParsedConfig::parse(&config)), ["eth0"].into());
        assert!(state.has_symmetric_pods(&ParsedConfig::parse(&config)));
        let (state, config) = host(&[], &["10.200.1.0/24 cilium_host"]);
        assert!(!state.has_symmetric_pods(&ParsedConfig::parse(&config)));
    }

    #[test]
    fn other_uplinks_are_exits() {
        let bridge = ("10.200.1.1/24 cni0", "10.200.1.0/24 cni0");
        assert_eq!(exits(&[bridge.0, "198.51.100.5/24 wan"], &[bridge.1]), ["eth0", "wan"]);
        assert_eq!(exits(&[bridge.0], &[bridge.1, "0.0.0.0/0 tun0 77"]), ["eth0", "tun0"]);
        let site = "10.0.0.0/8 wan";
        assert_eq!(exits(&["198.51.100.5/24 wan"], &[bridge.1, site]), ["eth0", "wan"]);
        let narrow = "10.200.1.0/25 wan 77";
        assert_eq!(exits(&["198.51.100.5/24 wan"], &[bridge.1, narrow]), ["eth0", "wan"]);
    }

    #[test]
    fn devices_of_pods_are_no_exits() {
        let ptp = ["10.200.1.2/32 veth2", "10.200.1.3/32 veth3"];
        assert_eq!(exits(&["fe80::1/64 veth2", "169.254.1.1/32 veth3"], &ptp), ["eth0"]);
        assert_eq!(exits(&["fe80::1/64 veth4"], &ptp), ["eth0"], "its route is to come");
        let ovn = ["100.64.0.2/16 ovn0", "10.200.0.0/16 ovn0"];
        assert_eq!(exits(&[ovn[0]], &[ovn[1]]), ["eth0"]);
        assert_eq!(exits(&["203.0.113.1/24 br9"], &["10.200.1.0/24 br9 200"]), ["eth0"]);
        assert_eq!(exits(&["10.80.0.1/31 weft-1", "127.0.0.2/8 lo"], &[]), ["eth0"]);
    }
}
