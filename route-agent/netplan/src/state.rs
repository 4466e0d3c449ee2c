use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use fabric_primitives::{Cidr, Mac};

/// The part of the kernel's network state that one program owns, in one network namespace.
///
/// One type for both what is wanted and what is there, so that the two can be compared. Each map
/// is keyed by what the kernel keys by: it holds one route for a table, prefix and metric, so a
/// changed next hop is a change of value and not a second entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// VXLAN devices, by name. Made when missing, deleted when no longer wanted.
    pub links: BTreeMap<String, Vxlan>,
    /// Devices that others make (a TUN, `lo`, a veth's end), by name. Never made nor deleted.
    pub devices: BTreeMap<String, Device>,
    pub addresses: BTreeSet<Address>,
    /// Permanent neighbours, by device and IP address.
    pub neighbours: BTreeMap<(String, IpAddr), Mac>,
    /// Forwarding database of the VXLAN devices, by device and MAC: the underlay address that
    /// packets to this MAC are sent to.
    pub fdb: BTreeMap<(String, Mac), IpAddr>,
    pub routes: BTreeMap<RouteKey, Route>,
    pub rules: BTreeSet<Rule>,
    /// Never undone: those of a device go with the device.
    pub sysctls: BTreeMap<Sysctl, u32>,
}

/// A VXLAN device without learning, without remote and local address, its addrgenmode `none`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vxlan {
    pub vni: u32,
    /// UDP port, both of the own socket and towards others.
    pub port: u16,
    /// Family of the underlay: a device takes FDB entries of one family only.
    pub family: Family,
    /// The device was made in another namespace, where its UDP socket stays, and moved here.
    pub elsewhere: bool,
    /// Packets have a UDP checksum. Over IPv6 they always have one.
    pub checksum: bool,
    /// In bytes.
    pub mtu: u32,
    pub mac: Mac,
    /// Always wanted; false only in what is observed.
    pub up: bool,
}

/// Desired state of a device that others make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// In bytes.
    pub mtu: u32,
    pub up: bool,
}

/// An address on a device. IPv6 addresses are added without duplicate address detection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    pub dev: String,
    pub address: IpAddr,
    /// Prefix length in bits.
    pub len: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    Ipv4,
    Ipv6,
}

/// Attributes by which the kernel distinguishes routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RouteKey {
    pub table: u32,
    pub to: Cidr,
    /// Lower wins. Never 0, which the kernel turns into 1024 for IPv6 only.
    pub metric: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub hop: NextHop,
    /// Upper bound for packets on this route, in bytes.
    pub mtu: Option<u32>,
    /// Preferred source of packets made on this machine.
    pub source: Option<IpAddr>,
    /// Marks whose route it is (`proto`).
    pub protocol: u8,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextHop {
    Via(Via),
    /// Straight out of this device.
    Dev(String),
    /// Refused: the sender gets an ICMP error.
    Unreachable,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Via {
    /// Next hop, of the route's family.
    pub gateway: IpAddr,
    pub dev: String,
    /// The gateway is reached on `dev` although no address of `dev` covers it.
    pub onlink: bool,
}

/// A policy routing rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    pub priority: u32,
    pub family: Family,
    /// Only for packets that came in on this device (`lo`: made on this machine).
    pub iif: Option<String>,
    /// Only for packets to this prefix, of the rule's family.
    pub to: Option<Cidr>,
    pub action: RuleAction,
    /// Marks whose rule it is.
    pub protocol: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RuleAction {
    /// Looks into this table.
    Lookup(u32),
    /// Looks into this table, default routes aside (`suppress_prefixlength 0`).
    LookupSpecific(u32),
    /// Refuses: the sender gets an ICMP error.
    Unreachable,
}

/// A kernel setting, by its path under /proc/sys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sysctl(String);

impl Sysctl {
    /// One of the settings that each device has, such as `rp_filter` or `forwarding`.
    pub fn of_device(family: Family, dev: &str, setting: &str) -> Self {
        let family = match family {
            Family::Ipv4 => "ipv4",
            Family::Ipv6 => "ipv6",
        };
        Self(format!("net/{family}/conf/{dev}/{setting}"))
    }

    /// A setting of the whole namespace, such as `net/ipv4/ip_forward`.
    pub fn of_namespace(path: &str) -> Self {
        Self(path.to_owned())
    }

    /// Path under /proc/sys, with slashes.
    pub fn path(&self) -> &str {
        &self.0
    }

    /// Name as `sysctl` takes it: with dots, unless its device has some.
    pub fn name(&self) -> String {
        if self.0.contains('.') { self.0.clone() } else { self.0.replace('/', ".") }
    }

    /// True for a setting of IPv6.
    pub fn is_ipv6(&self) -> bool {
        self.0.starts_with("net/ipv6/")
    }

    /// The device that it belongs to.
    pub fn dev(&self) -> Option<&str> {
        let mut parts = self.0.split('/').skip(2);
        (parts.next() == Some("conf")).then(|| parts.next()).flatten()
    }
}

impl Family {
    pub fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::Ipv4,
            IpAddr::V6(_) => Self::Ipv6,
        }
    }

    pub fn of_prefix(prefix: &Cidr) -> Self {
        Self::of(prefix.address())
    }
}

impl RouteKey {
    /// Metric of a route that carries packets.
    pub const METRIC: u32 = 1024;
    /// Metric of the `unreachable` that is left when the route with [`Self::METRIC`] is lost.
    pub const BACKSTOP: u32 = 4096;
    /// The same for the overlay's own addresses, to which no pod sends.
    pub const OVERLAY_BACKSTOP: u32 = 4097;

    pub fn new(table: u32, to: Cidr) -> Self {
        Self { table, to, metric: Self::METRIC }
    }

    pub fn backstop(table: u32, to: Cidr) -> Self {
        Self { table, to, metric: Self::BACKSTOP }
    }

    pub fn overlay_backstop(table: u32, to: Cidr) -> Self {
        Self { table, to, metric: Self::OVERLAY_BACKSTOP }
    }
}

impl Route {
    pub fn unreachable(protocol: u8) -> Self {
        Self { hop: NextHop::Unreachable, mtu: None, source: None, protocol }
    }

    /// Through a gateway that is on-link on `dev`.
    pub fn onlink(gateway: IpAddr, dev: &str, protocol: u8) -> Self {
        let hop = NextHop::Via(Via { gateway, dev: dev.to_owned(), onlink: true });
        Self { hop, mtu: None, source: None, protocol }
    }

    pub fn dev(dev: &str, protocol: u8) -> Self {
        Self { hop: NextHop::Dev(dev.to_owned()), mtu: None, source: None, protocol }
    }

    pub fn with_mtu(self, mtu: u32) -> Self {
        Self { mtu: Some(mtu), ..self }
    }

    pub fn with_source(self, source: IpAddr) -> Self {
        Self { source: Some(source), ..self }
    }
}

impl NextHop {
    /// The device that packets leave by.
    pub fn device(&self) -> Option<&str> {
        match self {
            Self::Via(via) => Some(&via.dev),
            Self::Dev(dev) => Some(dev),
            Self::Unreachable => None,
        }
    }
}

impl Vxlan {
    /// True if the device can become `want` without being made anew.
    pub fn can_become(&self, want: &Self) -> bool {
        let fixed = |v: &Self| (v.vni, v.port, v.family, v.elsewhere, v.checksum);
        fixed(self) == fixed(want)
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "IPv4",
            Self::Ipv6 => "IPv6",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysctl_device_name_may_contain_dots() {
        let sysctl = Sysctl::of_device(Family::Ipv4, "eth0.7", "rp_filter");
        assert_eq!(sysctl.path(), "net/ipv4/conf/eth0.7/rp_filter");
        assert_eq!(sysctl.dev(), Some("eth0.7"));
        assert_eq!(Sysctl::of_namespace("net/ipv4/ip_forward").dev(), None);
    }
}
