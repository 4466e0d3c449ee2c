//! Addresses of the node that changed while its manifest did not.

use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::{MovedAddress, NodeConfigSpec};
use netlink::{Handle, NetlinkError};

use crate::host_state::HostState;

/// Declared addresses that no device has, each with the one that takes its place: the one in use, if
/// it is there, or the source that the kernel gives to packets for where the node was, or for the
/// gateways.
pub(crate) async fn find(
    handle: &Handle,
    config: &NodeConfigSpec,
    host_state: &HostState,
) -> Result<Vec<MovedAddress>, NetlinkError> {
    let mut moved = Vec::new();
    for declared in config.declared.iter().filter(|ip| host_state.device_of(**ip).is_none()) {
        let same_family = |ip: &&IpAddr| ip.is_ipv4() == declared.is_ipv4();
        let in_use = config.underlay.iter().filter(same_family);
        let mut found = in_use.copied().find(|ip| is_usable(*ip, config, host_state));
        let gateways = config.peerings.iter().filter_map(|p| p.gateway.as_ref());
        let gateways = gateways.map(|gateway| &gateway.underlay).filter(same_family);
        for target in std::iter::once(declared).chain(gateways) {
            if found.is_none() {
                let route = handle.route_to(*target).await?;
                let source = route.filter(|route| !route.local).and_then(|route| route.source);
                found = source.filter(|ip| is_usable(*ip, config, host_state));
            }
        }
        moved.extend(found.map(|found| MovedAddress { declared: *declared, found }));
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
