use std::net::IpAddr;

use super::{Fault, peer};
use crate::networking::{GatewayClient, GatewayServer, ServiceType};

/// Every IPv4 host takes packets of this size (RFC 791).
const MIN_MTU: u32 = 576;

pub fn gateway_server(of: &GatewayServer) -> Vec<Fault> {
    let mut faults: Vec<_> = peer(&of.metadata).err().into_iter().collect();
    faults.extend(mtu(of.spec.mtu));
    let has_port = of.spec.endpoint.port.is_some() || !of.spec.endpoint.ports.is_empty();
    // The Service has a port whatever the node port is, but need not be given one.
    let of_service = || service_port(of).err().filter(|_| has_port);
    faults.extend(listen_port(of).err().or_else(of_service));
    faults
}

pub fn gateway_client(of: &GatewayClient) -> Vec<Fault> {
    let mut faults: Vec<_> = peer(&of.metadata).err().into_iter().collect();
    faults.extend(mtu(of.spec.mtu));
    faults.extend(client_port(of).err());
    let endpoint = &of.spec.endpoint;
    if let Some(protocol) = endpoint.protocol.as_deref().filter(|p| *p != "UDP") {
        let message = format!("found {protocol:?}; expected UDP");
        faults.push(Fault::new("spec.endpoint.protocol", message));
    }
    if endpoint.addresses.is_empty() {
        let message = "missing; expected an IP address or DNS name of the server";
        faults.push(Fault::new("spec.endpoint.addresses", message));
    }
    for (i, address) in endpoint.addresses.iter().enumerate().filter(|(_, a)| !is_host(a)) {
        let message =
            format!("found {address:?}; expected an IP address of one host or a DNS name");
        faults.push(Fault::new(format!("spec.endpoint.addresses[{i}]"), message));
    }
    faults
}

/// Port on which a server listens: standalone, a node port is bound as it is.
pub fn listen_port(of: &GatewayServer) -> Result<u16, Fault> {
    let endpoint = &of.spec.endpoint;
    if endpoint.service_type == ServiceType::ExternalName {
        let message = "found ExternalName; expected NodePort, LoadBalancer or ClusterIP";
        return Err(Fault::new("spec.endpoint.serviceType", message));
    }
    let own = (endpoint.port, &endpoint.ports, "spec.endpoint.port");
    let node = (endpoint.node_port, &endpoint.node_ports, "spec.endpoint.nodePort");
    let has_node_port = node.0.is_some() || !node.1.is_empty();
    let (one, many, field) = match endpoint.service_type {
        ServiceType::NodePort if has_node_port => node,
        ServiceType::NodePort
        | ServiceType::ClusterIP
        | ServiceType::LoadBalancer
        | ServiceType::ExternalName => own,
    };
    port(field, one.or_else(|| many.first().copied()))
}

/// Port of a server's Service, and in Kubernetes of its pod, whatever the node port is.
pub fn service_port(of: &GatewayServer) -> Result<u16, Fault> {
    let endpoint = &of.spec.endpoint;
    port("spec.endpoint.port", endpoint.port.or_else(|| endpoint.ports.first().copied()))
}

/// The port at which a client finds its server.
pub fn client_port(of: &GatewayClient) -> Result<u16, Fault> {
    let endpoint = &of.spec.endpoint;
    port("spec.endpoint.port", endpoint.port.or_else(|| endpoint.ports.first().copied()))
}

fn port(field: &str, found: Option<i32>) -> Result<u16, Fault> {
    let port = found.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0);
    port.ok_or_else(|| {
        let found = found.map_or_else(|| "missing".to_owned(), |port| format!("found {port}"));
        Fault::new(field, format!("{found}; expected a port, 1 to 65535"))
    })
}

fn mtu(found: Option<i64>) -> Option<Fault> {
    let found = found?;
    let fits = u32::try_from(found).is_ok_and(|mtu| (MIN_MTU..=65_535).contains(&mtu));
    let message = format!("found {found}; expected {MIN_MTU} to 65535 bytes");
    (!fits).then(|| Fault::new("spec.mtu", message))
}

fn is_host(text: &str) -> bool {
    let label = |part: &str| {
        let legal = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        (1..=63).contains(&part.len()) && part.chars().all(legal) && !part.starts_with('-')
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    let digits = name.chars().all(|c| c.is_ascii_digit() || c == '.');
    let dns = name.len() <= 253 && !digits && name.split('.').all(label);
    // 240.0.0.0/4 is reserved (RFC 1112 section 4), the broadcast address there among it.
    let is_reserved = |ip: IpAddr| matches!(ip, IpAddr::V4(v4) if v4.octets()[0] >= 240);
    let is_one = |ip: IpAddr| !(ip.is_multicast() || ip.is_unspecified() || is_reserved(ip));
    dns || text.parse().is_ok_and(|ip: IpAddr| is_one(ip.to_canonical()))
}
