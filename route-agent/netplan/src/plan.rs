use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::names::IPV6_MIN_MTU;
use crate::{Address, Family, NextHop, Op, RouteKey, State, Vxlan};

/// Returns the steps that turn `have` into `want`, in the order they must be taken.
///
/// Make before break: no prefix that is wanted before and after is without a route in between.
/// If the kernel does not allow that (a VNI cannot be changed in place, so the device is made anew
/// and its routes go with the old one), the device's own things follow at once, and an
/// `unreachable` of a higher metric, put first, keeps packets from leaving another way.
///
/// Addresses that the kernel makes itself (loopback, IPv6 link-local) are never deleted, but for those of a
/// VXLAN device, which has none.
pub fn plan(have: &State, want: &State) -> Vec<Op> {
    let change = Change { have, want };
    let mut ops = Vec::new();
    change.put_backstops(&mut ops);
    change.set_namespace_sysctls(&mut ops);
    for dev in change.devices() {
        change.set_up_link(dev, &mut ops);
        change.fill_device(dev, &mut ops);
    }
    ops.extend(want.rules.difference(&have.rules).cloned().map(Op::AddRule));
    change.delete_unwanted(&mut ops);
    ops
}

struct Change<'a> {
    have: &'a State,
    want: &'a State,
}

/// Share of a device that the change takes away for a moment.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Disturbance {
    Nothing,
    /// The kernel flushes IPv4 routes and neighbours with a device's last IPv4 address.
    Ipv4,
    All,
}

impl<'a> Change<'a> {
    /// All devices that something is wanted of. Those that lose something for a moment come last,
    /// so that what moves away from them has its new place already.
    fn devices(&self) -> Vec<&'a str> {
        let want = self.want;
        let mut devs: BTreeSet<&str> = want.links.keys().map(String::as_str).collect();
        devs.extend(want.devices.keys().map(String::as_str));
        devs.extend(want.addresses.iter().map(|a| a.dev.as_str()));
        devs.extend(want.neighbours.keys().map(|(dev, _)| dev.as_str()));
        devs.extend(want.fdb.keys().map(|(dev, _)| dev.as_str()));
        devs.extend(want.routes.values().filter_map(|route| route.hop.device()));
        devs.extend(want.sysctls.keys().filter_map(|s| s.dev()));
        let mut devs: Vec<&str> = devs.into_iter().collect();
        devs.sort_by_key(|dev| self.disturbance(dev));
        devs
    }

    fn disturbance(&self, dev: &str) -> Disturbance {
        if self.is_rebuilt(dev) || self.blocks(dev).is_some() || self.is_dropped(dev) {
            return Disturbance::All;
        }
        let ipv4 = |a: &&Address| a.dev == dev && a.address.is_ipv4();
        let loses_ipv4 = self.have.addresses.iter().filter(ipv4).any(is_deletable)
            && !self.want.addresses.iter().any(|a| ipv4(&a))
            && !self.have.addresses.iter().filter(ipv4).any(|a| !is_deletable(a));
        if loses_ipv4 { Disturbance::Ipv4 } else { Disturbance::Nothing }
    }

    fn is_rebuilt(&self, dev: &str) -> bool {
        match (self.have.links.get(dev), self.want.links.get(dev)) {
            (Some(have), Some(want)) => !have.can_become(want),
            (None, _) | (_, None) => false,
        }
    }

    fn is_dropped(&self, dev: &str) -> bool {
        self.have.links.contains_key(dev) && !self.want.links.contains_key(dev)
    }

    /// An unwanted device that `dev`, which is to be made, can't exist beside: the kernel refuses
    /// two of the same VNI, port and family.
    fn blocks(&self, dev: &str) -> Option<&'a String> {
        let new = self.want.links.get(dev).filter(|_| !self.have.links.contains_key(dev))?;
        let blocks = |(name, old): &(&String, &Vxlan)| self.is_dropped(name) && old.can_become(new);
        self.have.links.iter().find(blocks).map(|(name, _)| name)
    }

    fn put_backstops(&self, ops: &mut Vec<Op>) {
        for (key, route) in &self.want.routes {
            if route.hop == NextHop::Unreachable && self.have.routes.get(key) != Some(route) {
                ops.push(Op::PutRoute(*key, route.clone()));
            }
        }
    }

    fn set_namespace_sysctls(&self, ops: &mut Vec<Op>) {
        for (sysctl, value) in &self.want.sysctls {
            if sysctl.dev().is_none() && self.have.sysctls.get(sysctl) != Some(value) {
                ops.push(Op::SetSysctl(sysctl.clone(), *value));
            }
        }
    }

    fn set_up_link(&self, dev: &str, ops: &mut Vec<Op>) {
        if let Some(blocking) = self.blocks(dev) {
            ops.push(Op::DelLink(blocking.clone()));
        }
        if self.is_rebuilt(dev) {
            ops.push(Op::DelLink(dev.to_owned()));
        }
        let Some(want) = self.want.links.get(dev) else {
            return self.set_up_device(dev, ops);
        };
        let Some(have) = self.have.links.get(dev).filter(|have| have.can_become(want)) else {
            return ops.push(Op::AddLink(dev.to_owned(), want.clone()));
        };
        if have.mac != want.mac {
            ops.push(Op::SetMac(dev.to_owned(), want.mac));
        }
        if have.mtu != want.mtu {
            ops.push(Op::SetMtu(dev.to_owned(), want.mtu));
        }
        if have.mtu < IPV6_MIN_MTU && want.mtu >= IPV6_MIN_MTU {
            ops.push(Op::SetNoLinkLocal(dev.to_owned()));
        }
        if !have.up {
            ops.push(Op::SetUp(dev.to_owned()));
        }
    }

    fn set_up_device(&self, dev: &str, ops: &mut Vec<Op>) {
        let Some(want) = self.want.devices.get(dev) else { return };
        let have = self.have.devices.get(dev);
        if have.is_none_or(|have| have.mtu != want.mtu) {
            ops.push(Op::SetMtu(dev.to_owned(), want.mtu));
        }
        if want.up && have.is_none_or(|have| !have.up) {
            ops.push(Op::SetUp(dev.to_owned()));
        }
    }

    fn fill_device(&self, dev: &str, ops: &mut Vec<Op>) {
        let (have, want, rebuilt) = (self.have, self.want, self.is_rebuilt(dev));
        if self.disturbance(dev) == Disturbance::Ipv4 {
            self.delete_addresses(dev, Family::Ipv4, ops);
        }
        for (sysctl, value) in want.sysctls.iter().filter(|(s, _)| s.dev() == Some(dev)) {
            if rebuilt || have.sysctls.get(sysctl) != Some(value) {
                ops.push(Op::SetSysctl(sysctl.clone(), *value));
            }
        }
        for address in want.addresses.iter().filter(|a| a.dev == dev) {
            if rebuilt || !have.addresses.contains(address) {
                ops.push(Op::AddAddress(address.clone()));
            }
        }
        for (key, to) in want.fdb.iter().filter(|((d, _), _)| d == dev) {
            if rebuilt || have.fdb.get(key) != Some(to) {
                ops.push(Op::PutFdb(dev.to_owned(), key.1, *to));
            }
        }
        for (key, mac) in want.neighbours.iter().filter(|((d, _), _)| d == dev) {
            if self.loses_neighbour(dev, key.1) || have.neighbours.get(key) != Some(mac) {
                ops.push(Op::PutNeighbour(dev.to_owned(), key.1, *mac));
            }
        }
        for (key, route) in want.routes.iter().filter(|(_, r)| r.hop.device() == Some(dev)) {
            if self.loses_route(key) || have.routes.get(key) != Some(route) {
                ops.push(Op::PutRoute(*key, route.clone()));
            }
        }
    }

    /// The kernel flushes a device's neighbours when its MAC changes.
    fn loses_neighbour(&self, dev: &str, ip: IpAddr) -> bool {
        let mac_changes = match (self.have.links.get(dev), self.want.links.get(dev)) {
            (Some(have), Some(want)) => have.mac != want.mac,
            (None, _) | (_, None) => false,
        };
        mac_changes || self.is_lost(dev, ip)
    }

    fn loses_route(&self, key: &RouteKey) -> bool {
        let dev = self.have.routes.get(key).and_then(|route| route.hop.device());
        dev.is_some_and(|dev| self.is_lost(dev, key.to.address()))
    }

    /// True for what is of the family of `ip` on `dev` and goes when the device is disturbed.
    fn is_lost(&self, dev: &str, ip: IpAddr) -> bool {
        match self.disturbance(dev) {
            Disturbance::Nothing => false,
            Disturbance::Ipv4 => ip.is_ipv4(),
            Disturbance::All => true,
        }
    }

    /// Objects that go by themselves, with a device or its last address, are left out.
    fn delete_unwanted(&self, ops: &mut Vec<Op>) {
        let (have, want) = (self.have, self.want);
        // The last ones first: what an earlier rule lets pass is never refused by a later one.
        let unwanted: Vec<_> = have.rules.difference(&want.rules).cloned().collect();
        ops.extend(unwanted.into_iter().rev().map(Op::DelRule));
        for (key, route) in &have.routes {
            if !want.routes.contains_key(key) && !self.loses_route(key) {
                ops.push(Op::DelRoute(*key, route.clone()));
            }
        }
        for (dev, ip) in have.neighbours.keys() {
            let wanted = want.neighbours.contains_key(&(dev.clone(), *ip));
            if !wanted && !self.loses_neighbour(dev, *ip) {
                ops.push(Op::DelNeighbour(dev.clone(), *ip));
            }
        }
        let goes = |dev: &str| self.disturbance(dev) == Disturbance::All;
        for ((dev, mac), to) in &have.fdb {
            if !want.fdb.contains_key(&(dev.clone(), *mac)) && !goes(dev) {
                ops.push(Op::DelFdb(dev.clone(), *mac, *to));
            }
        }
        let devs: BTreeSet<&str> = have.addresses.iter().map(|a| a.dev.as_str()).collect();
        for dev in devs.into_iter().filter(|dev| !goes(dev)) {
            if self.disturbance(dev) == Disturbance::Nothing || !self.devices().contains(&dev) {
                self.delete_addresses(dev, Family::Ipv4, ops);
            }
            self.delete_addresses(dev, Family::Ipv6, ops);
        }
        let made_room: BTreeSet<&String> =
            want.links.keys().filter_map(|dev| self.blocks(dev)).collect();
        for name in have.links.keys() {
            if self.is_dropped(name) && !made_room.contains(name) {
                ops.push(Op::DelLink(name.clone()));
            }
        }
    }

    fn delete_addresses(&self, dev: &str, family: Family, ops: &mut Vec<Op>) {
        let unwanted = self.have.addresses.difference(&self.want.addresses);
        let here = |a: &&Address| a.dev == dev && Family::of(a.address) == family;
        let is_vxlan = self.have.links.contains_key(dev);
        let goes = |a: &&Address| is_vxlan || is_deletable(a);
        ops.extend(unwanted.filter(here).filter(goes).cloned().map(Op::DelAddress));
    }
}

fn is_deletable(address: &Address) -> bool {
    match address.address {
        IpAddr::V4(ip) => !ip.is_loopback(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    }
}
