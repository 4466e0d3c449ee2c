use std::fmt;
use std::net::IpAddr;

use fabric_primitives::Mac;

use crate::{Address, Family, NextHop, Route, RouteKey, Rule, RuleAction, Sysctl, Vxlan};

/// One step. Prints as the `ip`, `bridge` or `sysctl` command that it equals, so that logs read
/// as an operator would type them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// Makes the device and brings it up.
    AddLink(String, Vxlan),
    DelLink(String),
    SetMtu(String, u32),
    /// Keeps the kernel from making link-local addresses, which it forgets along with a device's IPv6.
    SetNoLinkLocal(String),
    SetMac(String, Mac),
    SetUp(String),
    AddAddress(Address),
    DelAddress(Address),
    PutNeighbour(String, IpAddr, Mac),
    DelNeighbour(String, IpAddr),
    PutFdb(String, Mac, IpAddr),
    /// Carries the underlay address that is there, for the kernel wants it named.
    DelFdb(String, Mac, IpAddr),
    PutRoute(RouteKey, Route),
    /// Carries the route that is there, so that only ours is deleted.
    DelRoute(RouteKey, Route),
    AddRule(Rule),
    DelRule(Rule),
    SetSysctl(Sysctl, u32),
}

impl Op {
    /// Device that the step is taken on, and that it needs.
    pub fn device(&self) -> Option<&str> {
        match self {
            Self::AddLink(dev, _)
            | Self::DelLink(dev)
            | Self::SetMtu(dev, _)
            | Self::SetNoLinkLocal(dev)
            | Self::SetMac(dev, _)
            | Self::SetUp(dev)
            | Self::PutNeighbour(dev, ..)
            | Self::DelNeighbour(dev, _)
            | Self::PutFdb(dev, ..)
            | Self::DelFdb(dev, ..) => Some(dev),
            Self::AddAddress(address) | Self::DelAddress(address) => Some(&address.dev),
            Self::PutRoute(_, route) => route.hop.device(),
            Self::SetSysctl(sysctl, _) => sysctl.dev(),
            Self::DelRoute(..) | Self::AddRule(_) | Self::DelRule(_) => None,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AddLink(name, vxlan) => write_link(f, name, vxlan),
            Self::DelLink(name) => write!(f, "ip link del {name}"),
            Self::SetMtu(name, mtu) => write!(f, "ip link set {name} mtu {mtu}"),
            Self::SetNoLinkLocal(name) => write!(f, "ip link set {name} addrgenmode none"),
            Self::SetMac(name, mac) => write!(f, "ip link set {name} address {mac}"),
            Self::SetUp(name) => write!(f, "ip link set {name} up"),
            Self::AddAddress(address) => {
                let nodad = if address.address.is_ipv6() { " nodad" } else { "" };
                write!(f, "ip address add {address}{nodad}")
            }
            Self::DelAddress(address) => write!(f, "ip address del {address}"),
            Self::PutNeighbour(dev, ip, mac) => {
                write!(f, "ip neigh replace {ip} lladdr {mac} dev {dev} nud permanent")
            }
            Self::DelNeighbour(dev, ip) => write!(f, "ip neigh del {ip} dev {dev}"),
            Self::PutFdb(dev, mac, to) => {
                write!(f, "bridge fdb replace {mac} dev {dev} self permanent dst {to}")
            }
            Self::DelFdb(dev, mac, to) => {
                write!(f, "bridge fdb del {mac} dev {dev} self dst {to}")
            }
            Self::PutRoute(key, route) => write_route(f, "replace", key, route),
            Self::DelRoute(key, route) => write_route(f, "del", key, route),
            Self::AddRule(rule) => write_rule(f, "add", rule),
            Self::DelRule(rule) => write_rule(f, "del", rule),
            Self::SetSysctl(sysctl, value) => write!(f, "sysctl -w {}={value}", sysctl.path()),
        }
    }
}

fn write_link(f: &mut fmt::Formatter<'_>, name: &str, vxlan: &Vxlan) -> fmt::Result {
    let Vxlan { vni, port, family, elsewhere, checksum, mtu, mac, up: _ } = vxlan;
    let family = flag(*family);
    let moved = if *elsewhere { ", moved here from the underlay's namespace" } else { "" };
    let checksum = if *checksum { "" } else { " noudpcsum" };
    write!(
        f,
        "ip{family} link add {name} up mtu {mtu} address {mac} addrgenmode none \
         type vxlan id {vni} dstport {port} nolearning{checksum}{moved}"
    )
}

fn write_route(
    f: &mut fmt::Formatter<'_>,
    verb: &str,
    RouteKey { table, to, metric }: &RouteKey,
    Route { hop, mtu, source, protocol }: &Route,
) -> fmt::Result {
    let family = flag(Family::of_prefix(to));
    let kind = if *hop == NextHop::Unreachable { "unreachable " } else { "" };
    write!(f, "ip{family} route {verb} {kind}{to}")?;
    match hop {
        NextHop::Via(via) => {
            write!(f, " via {} dev {}", via.gateway, via.dev)?;
            if via.onlink {
                f.write_str(" onlink")?;
            }
        }
        NextHop::Dev(dev) => write!(f, " dev {dev}")?,
        NextHop::Unreachable => {}
    }
    write!(f, " table {table} metric {metric} proto {protocol}")?;
    if let Some(source) = source {
        write!(f, " src {source}")?;
    }
    // Linux forwards IPv6 by a locked one only.
    let lock = if to.is_ipv4() { "" } else { "lock " };
    mtu.map_or(Ok(()), |mtu| write!(f, " mtu {lock}{mtu}"))
}

fn write_rule(f: &mut fmt::Formatter<'_>, verb: &str, rule: &Rule) -> fmt::Result {
    let Rule { priority, family, iif, to, action, protocol } = rule;
    write!(f, "ip{} rule {verb} from all", flag(*family))?;
    if let Some(to) = to {
        write!(f, " to {to}")?;
    }
    if let Some(iif) = iif {
        write!(f, " iif {iif}")?;
    }
    match action {
        RuleAction::Lookup(table) => write!(f, " lookup {table}")?,
        RuleAction::LookupSpecific(table) => {
            write!(f, " lookup {table} suppress_prefixlength 0")?;
        }
        RuleAction::Unreachable => f.write_str(" unreachable")?,
    }
    write!(f, " priority {priority} proto {protocol}")
}

fn flag(family: Family) -> &'static str {
    match family {
        Family::Ipv4 => "",
        Family::Ipv6 => " -6",
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} dev {}", self.address, self.len, self.dev)
    }
}
