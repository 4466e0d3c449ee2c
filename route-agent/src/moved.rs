//! Addresses of the node that changed while its manifest did not.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::{MovedAddress, NodeConfigSpec};
use netlink::{Handle, NetlinkError};

use crate::host_state::HostState;

/// Devices that declared addresses were on, as long as this agent runs.
pub(crate) type Homes = BTreeMap<IpAddr, String>;

/// Declared addresses that no device has, each with the one that takes its place. One of its network or device
/// precedes all others, which take its place only while there is none: a host that is renumbered may be without an
/// address for a while. Of several, the one in use precedes the source that the kernel gives to packets for where
/// the node was, or for the gateways.
pub(crate) async fn find(
    handle: &Handle,
    config: &NodeConfigSpec,
    host_state: &HostState,
    homes: &mut Homes,
) -> Result<Vec<MovedAddress>, NetlinkError> {
    let mut moved = Vec::new();
    for declared in &config.declared {
        if let Some(dev) = host_state.device_of(*declared) {
            homes.insert(*declared, dev.to_owned());
            continue;
        }
        let same_family = |ip: &IpAddr| ip.is_ipv4() == declared.is_ipv4();
        let mut candidates = config.underlay.clone();
        let gateways = config.peerings.iter().filter_map(|p| p.gateway.as_ref());
        let gateways = gateways.map(|gateway| gateway.underlay).filter(same_family);
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

/// An address of a device of others, and none that is there for pods.
fn is_usable(address: IpAddr, config: &NodeConfigSpec, host_state: &HostState) -> bool {
    let link_local = match address {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let pods = config.pod_cidrs.iter().chain(&config.local_pods);
    let mut pods = pods.filter_map(|text| text.parse::<Cidr>().ok());
    host_state.device_of(address).is_some()
        && !address.is_loopback()
        && !link_local
        && !pods.any(|pods| pods.contains(address))
}
