//! Standalone: the link between the host and the gateway's "pod" namespace, a veth pair such as a
//! CNI would make. The overlay's VXLAN sockets are in the pod namespace, for two VXLAN devices
//! with the same VNI and port in one namespace are refused by the kernel.

use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fabric_api::{Cidr, Mac};
use gateway_config::desired::IPV6_MTU;
use netlink::Scope;
use netplan::names::{GATEWAY_PROTOCOL as PROTOCOL, MAIN_TABLE, PRIORITY, TABLE};
use netplan::{Device, Family, Route, RouteKey, Rule, RuleAction, State, Sysctl};
use sha2::{Digest, Sha256};

use super::inner::host_address;

/// The pod's end.
pub(super) const POD_END: &str = "eth0";
/// The host as the pod sees it: link-local next hops that no interface has; permanent neighbours
/// take the place of ARP.
const HOST_V4: Ipv4Addr = Ipv4Addr::new(169, 254, 18, 254);
const HOST_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Name of the host's end: `weft-` and eight digits that follow from whose gateway it is, since a
/// device's name has room for 15 bytes only.
pub fn host_end_name(namespace: &str, name: &str) -> String {
    let hash = Sha256::digest(format!("{namespace}/{name}"));
    let digits: String = hash.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
    format!("weft-{digits}")
}

/// The link as it is: made, with the MAC addresses that the kernel gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) host_end: String,
    pub(super) host_mac: Mac,
    pub(super) pod_mac: Mac,
    pub(super) pod_address: Ipv4Addr,
    pub(super) pod_address_v6: Ipv6Addr,
    /// In bytes.
    pub(super) mtu: u32,
    /// Addresses of the nodes, which the pod may send to.
    pub(super) nodes: Vec<IpAddr>,
    /// This host's address among them, the source of its VXLAN packets to the pod.
    pub(super) own: Option<IpAddr>,
}

impl Link {
    /// Returns the desired state of the pod namespace: all nodes are behind the host. Nothing else
    /// is, so that VXLAN from anywhere else has no way back, and is dropped: IPv4 by the strict
    /// reverse path filter, both families by [`super::Filter::only_nodes`].
    pub(super) fn pod_state(&self) -> State {
        let mut state = State::default();
        let device = Device { mtu: self.mtu, up: true };
        state.devices.insert(POD_END.to_owned(), device);
        state.devices.insert("lo".to_owned(), Device { mtu: 65_536, up: true });
        for (own, host) in self.ends() {
            state.addresses.insert(host_address(POD_END, own));
            state.neighbours.insert((POD_END.to_owned(), host), self.host_mac);
            // The kernel's own one does not come back once it is flushed.
            state.rules.insert(Rule {
                priority: PRIORITY,
                family: Family::of(own),
                iif: None,
                to: None,
                action: RuleAction::Lookup(MAIN_TABLE),
                protocol: PROTOCOL,
            });
            for node in self.nodes.iter().filter(|node| node.is_ipv4() == own.is_ipv4()) {
                let route = Route::onlink(host, POD_END, PROTOCOL).with_source(own);
                state.routes.insert(RouteKey::new(MAIN_TABLE, Cidr::host(*node)), route);
            }
        }
        state.sysctls = [Self::pod_filter()].into();
        state
    }

    pub(super) fn pod_scope() -> Scope {
        Scope {
            devices: [POD_END, "lo"].map(str::to_owned).into(),
            tables: [MAIN_TABLE].into(),
            protocol: PROTOCOL,
            sysctls: [Self::pod_filter().0].into(),
            ..Scope::default()
        }
    }

    fn pod_filter() -> (Sysctl, u32) {
        (Sysctl::of_device(Family::Ipv4, POD_END, "rp_filter"), 1)
    }

    /// Returns the host's part: the way to the pod, and nothing that outlives its end of the pair.
    pub(super) fn host_state(&self) -> State {
        let dev = &self.host_end;
        let mut state = State::default();
        state.devices.insert(dev.clone(), Device { mtu: self.mtu, up: true });
        for (pod, _) in self.ends() {
            state.neighbours.insert((dev.clone(), pod), self.pod_mac);
            let key = RouteKey::new(TABLE, Cidr::host(pod));
            let route = Route::dev(dev, PROTOCOL);
            let own = self.own.filter(|own| own.is_ipv4() == pod.is_ipv4());
            let route = if let Some(own) = own { route.with_source(own) } else { route };
            state.routes.insert(key, route);
        }
        let sysctls = Self::host_sysctls(dev).into_iter();
        state.sysctls = sysctls.filter(|(s, _)| !s.is_ipv6() || self.has_ipv6()).collect();
        state
    }

    pub(super) fn host_scope(host_end: &str) -> Scope {
        Scope {
            devices: [host_end.to_owned()].into(),
            tables: [TABLE].into(),
            protocol: PROTOCOL,
            routes_of: Some(host_end.to_owned()),
            sysctls: Self::host_sysctls(host_end).map(|(sysctl, _)| sysctl).into(),
            ..Scope::default()
        }
    }

    fn host_sysctls(dev: &str) -> [(Sysctl, u32); 4] {
        [
            // Off by default on many hosts.
            (Sysctl::of_device(Family::Ipv6, dev, "disable_ipv6"), 0),
            (Sysctl::of_device(Family::Ipv4, dev, "forwarding"), 1),
            (Sysctl::of_device(Family::Ipv4, dev, "rp_filter"), 0),
            (Sysctl::of_device(Family::Ipv6, dev, "forwarding"), 1),
        ]
    }

    /// The pod's addresses, each with the host's of the same family.
    fn ends(&self) -> impl Iterator<Item = (IpAddr, IpAddr)> {
        let v6 = (self.pod_address_v6.into(), HOST_V6.into());
        let v6 = self.has_ipv6().then_some(v6);
        iter::once((self.pod_address.into(), HOST_V4.into())).chain(v6)
    }

    /// Linux takes IPv6 from a device that is too narrow for it.
    fn has_ipv6(&self) -> bool {
        self.mtu >= IPV6_MTU
    }
}

#[cfg(test)]
mod tests {
    use netplan::plan;

    use super::*;

    #[test]
    fn narrow_link_gets_no_ipv6() {
        let mut link = Link {
            host_end: "weft-0".to_owned(),
            host_mac: Mac([2; 6]),
            pod_mac: Mac([4; 6]),
            pod_address: [10, 80, 0, 7].into(),
            pod_address_v6: "fd77::7".parse().unwrap(),
            mtu: 1279,
            nodes: vec!["192.0.2.5".parse().unwrap(), "2001:db8::5".parse().unwrap()],
            own: None,
        };
        let steps = |link: &Link| {
            let states = [link.pod_state(), link.host_state()];
            let ops = states.iter().flat_map(|state| plan(&State::default(), state));
            ops.map(|op| op.to_string()).collect::<Vec<_>>().join("\n")
        };
        let narrow = steps(&link);
        assert!(!narrow.contains("ipv6") && !narrow.contains("::"), "{narrow}");
        link.mtu = 1280;
        let wide = steps(&link);
        assert!(
            wide.contains("net/ipv6/conf/weft-0/forwarding") && wide.contains("fd77::7"),
            "{wide}"
        );
    }

    #[test]
    fn names_fit_and_differ() {
        let name = host_end_name("liqo-tenant-milan", "client");
        assert_eq!(name.len(), 13);
        assert_ne!(name, host_end_name("liqo-tenant-milan", "server"));
    }
}
