use std::collections::BTreeSet;
use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::fabric::VXLAN_PORT;
use netlink::conntrack::Flow;
use netplan::Firewall;

/// True for a tracked connection that is not translated as `firewall` would: it was made while
/// our table was missing, and since NAT looks at a connection's first packet only, it would stay
/// broken for good.
pub(crate) fn is_stale(firewall: &Firewall, flow: &Flow) -> bool {
    if takes_vxlan(firewall, flow) {
        return true;
    }
    let to = flow.reply.source;
    if firewall.peers.iter().chain(&firewall.probed).any(|peer| peer.contains(to)) {
        let source = translated_source(firewall, flow.original.source);
        return source.is_some_and(|source| flow.reply.destination != source);
    }
    let target = firewall.targets.get(&flow.original.destination);
    target.is_some_and(|target| to != *target)
}

/// True for UDP from or to the port of VXLAN that our table lets not begin so. Conntrack takes VXLAN for this node for
/// the answer to such a masqueraded container, and changes the source port of VXLAN of this node if one has that port.
fn takes_vxlan(firewall: &Firewall, flow: &Flow) -> bool {
    let (Some(original), Some(reply)) = (flow.original.udp_ports, flow.reply.udp_ports) else {
        return false;
    };
    let source = flow.original.source;
    let is_changed = match flow.reply.destination == source {
        true => original[0] != reply[1],
        false => !firewall.vxlan_sources.contains(&source),
    };
    is_changed && reply.contains(&VXLAN_PORT)
}

/// True for a connection to a pod that a peer may have opened before its prefix took addresses of the node's networks:
/// answers pass, and would leave in clear.
pub(crate) fn is_of_conflict(conflicts: &BTreeSet<Cidr>, firewall: &Firewall, flow: &Flow) -> bool {
    let to = flow.reply.source;
    let is_to_pod = firewall.local_pods.iter().any(|pods| pods.contains(to))
        || firewall.targets.values().any(|target| *target == to);
    is_to_pod && conflicts.iter().any(|prefix| prefix.contains(flow.original.source))
}

/// `None` if there is no address to give it.
fn translated_source(firewall: &Firewall, source: IpAddr) -> Option<IpAddr> {
    let pods = firewall.local_pods.iter().filter(|_| !firewall.full_masquerade);
    if pods.into_iter().any(|pods| pods.contains(source)) {
        return Some(source);
    }
    match source {
        IpAddr::V4(_) => firewall.external_v4.map(IpAddr::from),
        IpAddr::V6(_) => firewall.external_v6.map(IpAddr::from),
    }
}
