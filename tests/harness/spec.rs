use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::kubernetes::Network;

/// Address families that something has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Families {
    V4,
    V6,
    Both,
}

/// A cluster on paper. Nodes and pods are numbered from 1.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    pub id: String,
    /// Distinguishes this cluster's nodes from others' on the segment: 192.0.2.(16 x number +
    /// node).
    pub number: u8,
    pub nodes: u8,
    pub pods_per_node: u8,
    /// Node on a subnet of its own, behind a router.
    pub behind_router: Option<u8>,
    /// Families of the nodes' addresses.
    pub underlay: Families,
    /// Order of the nodes' addresses, if they are of both families.
    pub ipv6_first: bool,
    /// /16s and /48s; node n has /24 or /64 number n of each.
    pub pod_cidrs: Vec<IpNet>,
    pub external_cidrs: Vec<IpNet>,
    pub internal_cidrs: Vec<IpNet>,
    /// Service CIDRs of clusters that run Kubernetes.
    pub service_cidrs: Vec<IpNet>,
    /// Network of clusters that run Kubernetes.
    pub network: Network,
    /// Nodes whose addresses are those of a VPN: one address without a subnet each, and 1300 bytes.
    pub on_vpn: bool,
    /// Nodes that cannot write to their root, with a kubelet in a folder of its own.
    pub read_only: bool,
}

impl ClusterSpec {
    /// IPv4 only, with the CIDRs that all clusters share.
    pub fn new(id: &str, number: u8, nodes: u8) -> Self {
        Self {
            id: id.to_owned(),
            number,
            nodes,
            pods_per_node: 1,
            behind_router: None,
            underlay: Families::V4,
            ipv6_first: false,
            pod_cidrs: vec![v4([10, 200, 0, 0])],
            external_cidrs: vec![v4([10, 70, 0, 0])],
            internal_cidrs: vec![v4([10, 80, 0, 0])],
            service_cidrs: vec![v4([10, 96, 0, 0])],
            network: Network::Bridge,
            on_vpn: false,
            read_only: false,
        }
    }

    pub fn on_network(self, network: Network) -> Self {
        Self { network, ..self }
    }

    pub fn on_vpn(self) -> Self {
        Self { on_vpn: true, ..self }
    }

    pub fn read_only(self) -> Self {
        Self { read_only: true, ..self }
    }

    /// IPv6 inside as well, again the same in every cluster.
    pub fn dual_stack(mut self) -> Self {
        self.pod_cidrs.push(v6(0x200));
        self.external_cidrs.push(v6(0x70));
        self
    }

    /// IPv6 between the nodes and between the clusters.
    pub fn on_ipv6(mut self) -> Self {
        self.underlay = Families::V6;
        self
    }

    /// IPv6 and nothing else, for nodes, pods and services. External addresses are of both families.
    pub fn only_ipv6(self) -> Self {
        let mut spec = self.dual_stack().on_ipv6();
        spec.pod_cidrs.retain(|cidr| cidr.addr().is_ipv6());
        spec.service_cidrs = vec![v6_services()];
        spec
    }

    /// Uses both families for nodes, pods and services, in this order.
    pub fn both_families(self, ipv6_first: bool) -> Self {
        let mut spec = Self { underlay: Families::Both, ipv6_first, ..self.dual_stack() };
        spec.service_cidrs.push(v6_services());
        if ipv6_first {
            spec.pod_cidrs.reverse();
            spec.service_cidrs.reverse();
        }
        spec
    }

    pub fn node_name(&self, number: u8) -> String {
        format!("{}-{number}", self.id)
    }

    /// The node's first address.
    pub fn node_address(&self, number: u8) -> IpAddr {
        self.node_addresses(number)[0]
    }

    pub fn node_addresses(&self, number: u8) -> Vec<IpAddr> {
        let host = self.number * 16 + number;
        let (v4, v6) = match self.behind_router {
            Some(routed) if routed == number => ([198, 51, 100, host], 3),
            Some(_) | None => ([192, 0, 2, host], 2),
        };
        let v4 = IpAddr::from(v4);
        let v6 = IpAddr::from(Ipv6Addr::new(0x2001, 0xdb8, v6, 0, 0, 0, 0, host.into()));
        match self.underlay {
            Families::V4 => vec![v4],
            Families::V6 => vec![v6],
            Families::Both if self.ipv6_first => vec![v6, v4],
            Families::Both => vec![v4, v6],
        }
    }

    pub fn node_pod_cidrs(&self, number: u8) -> Vec<IpNet> {
        self.pod_cidrs.iter().map(|cidr| part(cidr, number)).collect()
    }

    /// The addresses of a pod; those of "pod 0" are the node's own on the pods' bridge.
    pub fn pod_addresses(&self, node: u8, pod: u8) -> Vec<IpAddr> {
        let host = if pod == 0 { 1 } else { u32::from(pod) + 9 };
        self.node_pod_cidrs(node).iter().map(|cidr| nth(cidr, host)).collect()
    }
}

fn v4(address: [u8; 4]) -> IpNet {
    Ipv4Net::new(address.into(), 16).expect("16 is a length").into()
}

fn v6_services() -> IpNet {
    let address = Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0);
    Ipv6Net::new(address, 112).expect("112 is a length").into()
}

/// A unique local prefix (RFC 4193).
fn v6(subnet: u16) -> IpNet {
    let address = Ipv6Addr::new(0xfd00, subnet, 0, 0, 0, 0, 0, 0);
    Ipv6Net::new(address, 48).expect("48 is a length").into()
}

/// Part number n of a prefix: its /24s or /64s.
fn part(cidr: &IpNet, number: u8) -> IpNet {
    match cidr {
        IpNet::V4(net) => {
            let bits = net.addr().to_bits() | u32::from(number) << 8;
            Ipv4Net::new(bits.into(), 24).expect("24 is a length").into()
        }
        IpNet::V6(net) => {
            let bits = net.addr().to_bits() | u128::from(number) << 64;
            Ipv6Net::new(bits.into(), 64).expect("64 is a length").into()
        }
    }
}

fn nth(cidr: &IpNet, number: u32) -> IpAddr {
    match cidr {
        IpNet::V4(net) => Ipv4Addr::from_bits(net.addr().to_bits() + number).into(),
        IpNet::V6(net) => Ipv6Addr::from_bits(net.addr().to_bits() + u128::from(number)).into(),
    }
}
