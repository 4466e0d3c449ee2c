//! Addresses of the node that changed while its Node did not.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::fabric::MovedAddress;
use netlink::{Handle, NetlinkError};

use crate::host_state::HostState;
use crate::parsed_config::ParsedConfig;

/// Devices that declared addresses were on, as long as agents have run.
pub(crate) type Homes = BTreeMap<IpAddr, String>;

/// Declared addresses that no device has, each with the one that takes its place. One of its network or device
/// precedes all others, which take its place only while there is none: a host that is renumbered may be without an
/// address for a while. Of several, the one in use precedes the source that the kernel gives to packets for where
/// the node was, or for the gateways.
pub(crate) async fn find(
    handle: &Handle,
    config: &ParsedConfig<'_>,
    host_state: &HostState,
    homes: &mut Homes,
    only_known: bool,
) -> Result<Vec<MovedAddress>, NetlinkError> {
    let mut moved = Vec::new();
    for declared in &missing(&config.spec.declared, host_state, homes, only_known) {
        let same_family = |ip: &IpAddr| ip.is_ipv4() == declared.is_ipv4();
        let mut candidates = config.spec.underlay.clone();
        let gateways = config.gateways().map(|gateway| gateway.underlay).filter(same_family);
        for target in std::iter::once(*declared).chain(gateways) {
            let route = handle.route_to(target).await?;
            let source = route.filter(|route| !route.local).and_then(|route| route.source);
            candidates.extend(source);
        }
        let near = host_state.near(*declared, homes.get(declared).map(String::as_str));
        let others = near.iter().filter(|near| !candidates.contains(near)).copied();
        candidates.extend(others.collect::<Vec<_>>());
        candidates.retain(|ip| same_family(ip) && is_usable(*ip, config, host_state));
        let found = candidates.iter().find(|ip| near.contains(ip)).or_else(|| candidates.first());
        moved.extend(found.map(|found| MovedAddress { declared: *declared, found: *found }));
    }
    Ok(moved)
}

/// Addresses that no device has. With `only_known`, as in Kubernetes, those that a device had: clouds translate
/// addresses of nodes that none ever has.
fn missing(
    declared: &[IpAddr],
    host_state: &HostState,
    homes: &mut Homes,
    only_known: bool,
) -> Vec<IpAddr> {
    let mut missing = Vec::new();
    for address in declared {
        match host_state.device_of(*address) {
            Some(dev) => _ = homes.insert(*address, dev.to_owned()),
            None if only_known && !homes.contains_key(address) => {}
            None => missing.push(*address),
        }
    }
    missing
}

/// Homes of addresses that an earlier agent has reported as moved.
pub(crate) fn homes_of(reported: &[MovedAddress], host_state: &HostState) -> Homes {
    let home = |moved: &MovedAddress| {
        Some((moved.declared, host_state.device_of(moved.found)?.to_owned()))
    };
    reported.iter().filter_map(home).collect()
}

/// Problem of a Node whose kubelet has not reported the new address.
pub(crate) fn stale(MovedAddress { declared, found }: &MovedAddress) -> String {
    format!(
        "status.addresses of the Node: found {declared}, which no device of the node has any more; expected \
         {found}: restart its kubelet, or correct the kubelet's --node-ip"
    )
}

/// An address of a device of others, and none that is there for pods.
fn is_usable(address: IpAddr, config: &ParsedConfig<'_>, host_state: &HostState) -> bool {
    let link_local = match address {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    host_state.device_of(address).is_some()
        && !address.is_loopback()
        && !link_local
        && !config.pods().any(|pods| pods.contains(address))
}

#[cfg(test)]
mod tests {
    use netplan::Address;

    use super::*;

    fn host_with(address: &str) -> HostState {
        let address =
            Address { dev: "eth0".to_owned(), address: address.parse().unwrap(), len: 24 };
        HostState { addresses: vec![address], ..HostState::default() }
    }

    /// Addresses among those declared that another has to take the place of, while the host has these.
    fn missing_of(hosts: &[&str], homes: &mut Homes, only_known: bool) -> Vec<String> {
        let declared = ["192.0.2.18", "198.51.100.18"].map(|ip| ip.parse().unwrap());
        let found = hosts.iter().map(|at| missing(&declared, &host_with(at), homes, only_known));
        found.last().unwrap().iter().map(IpAddr::to_string).collect()
    }

    #[test]
    fn translated_address_of_a_node_is_not_missing() {
        let mut homes = Homes::new();
        let hosts = ["192.0.2.18", "192.0.2.120"];
        assert_eq!(missing_of(&hosts, &mut homes, true), ["192.0.2.18"]);
        assert_eq!(missing_of(&hosts, &mut homes, false), ["192.0.2.18", "198.51.100.18"]);
    }

    #[test]
    fn next_agent_knows_what_the_one_before_reported() {
        let host = host_with("192.0.2.120");
        let declared = "192.0.2.18".parse().unwrap();
        let reported = [MovedAddress { declared, found: "192.0.2.120".parse().unwrap() }];
        let mut homes = homes_of(&reported, &host);
        assert_eq!(missing_of(&["192.0.2.120"], &mut homes, true), ["192.0.2.18"]);
    }
}
