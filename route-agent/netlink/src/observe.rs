use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_primitives::{Cidr, Mac};
use libc::ENOENT;
use netlink_packet_route::link::{LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteProtocol, RouteType,
};
use netlink_packet_route::rule::{self, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage as Message};
use netplan::{Device, Family, NextHop, Route, RouteKey, Rule, RuleAction, State, Sysctl, Via};

use crate::attributes::{as_address, ip, mtu, output_device, table_of};
use crate::message::MTU_LOCK;
use crate::vxlan::as_vxlan;
use crate::{Handle, NetlinkError, message, read_sysctl};

/// Table of the namespace's own addresses. Its rule is the kernel's: without it a host is cut off.
pub const LOCAL_TABLE: u32 = 255;

/// Objects of ours in a namespace. [`Handle::observe`] returns only these.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// Names of the VXLAN devices that we make.
    pub links: BTreeSet<String>,
    /// Names of devices that others make and we set up.
    pub devices: BTreeSet<String>,
    /// Routes and rules are ours if they are in one of these tables and have this protocol; so are
    /// rules of this protocol for packets that came in on one of `links`.
    pub tables: BTreeSet<u32>,
    pub protocol: u8,
    /// Only routes over this device are ours: others have the same tables and protocol.
    pub routes_of: Option<String>,
    /// Priority of our last rule, if all rules of this protocol are ours. What others put into our tables, and rules
    /// of theirs up to this priority, take packets from ours: changes of these are reported, too.
    pub last_rule: Option<u32>,
    /// Settings to read. Those of devices that are not there are left out.
    pub sysctls: BTreeSet<Sysctl>,
}

impl Handle {
    /// Reads what is ours. Addresses, permanent neighbours and FDB entries are ours on each
    /// device in the scope.
    pub async fn observe(&self, scope: &Scope) -> Result<State, NetlinkError> {
        let mut state = State::default();
        for name in scope.links.union(&scope.devices) {
            let Some(link) = self.link_message(name).await? else { continue };
            self.observe_device(&link, name, &mut state).await?;
            if scope.links.contains(name) {
                state.links.insert(name.clone(), as_vxlan(&link));
            } else {
                state.devices.insert(name.clone(), as_device(&link));
            }
        }
        self.observe_routes(scope, &mut state).await?;
        self.observe_rules(scope, &mut state).await?;
        self.netns.run(|| {
            for sysctl in &scope.sysctls {
                if let Some(value) = read_sysctl(&self.netns, sysctl)? {
                    state.sysctls.insert(sysctl.clone(), value);
                }
            }
            Ok(state)
        })?
    }

    async fn observe_device(
        &self,
        link: &LinkMessage,
        name: &str,
        state: &mut State,
    ) -> Result<(), NetlinkError> {
        let index = link.header.index;
        let addresses = self.address_messages(index).await?;
        if !addresses.is_empty() {
            let local = self.local_addresses(index).await?;
            let addresses = addresses.iter().filter_map(|m| as_address(m, name.to_owned()));
            state.addresses.extend(addresses.filter(|of| local.contains(&of.address)));
        }
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            for found in self.neighbours(family, index).await? {
                let permanent = found.header.state == NeighbourState::Permanent;
                if let Some((ip, mac)) = as_neighbour(&found).filter(|_| permanent) {
                    state.neighbours.insert((name.to_owned(), ip), mac);
                }
            }
        }
        for found in self.neighbours(AddressFamily::Bridge, index).await? {
            if let Some((ip, mac)) = as_neighbour(&found) {
                state.fdb.insert((name.to_owned(), mac), ip);
            }
        }
        Ok(())
    }

    /// Addresses of a device that the kernel takes packets for. One whose route is missing in the
    /// table `local`, which the kernel adds with an address only, is of no use.
    pub(crate) async fn local_addresses(
        &self,
        index: u32,
    ) -> Result<BTreeSet<IpAddr>, NetlinkError> {
        let mut local = BTreeSet::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let kernels = u8::from(RouteProtocol::Kernel);
            let routes = self.routes((family, LOCAL_TABLE, kernels), Some(index)).await?;
            let routes = routes.into_iter().filter(|m| m.header.kind == RouteType::Local);
            local.extend(routes.flat_map(|m| m.attributes).filter_map(|attribute| {
                if let RouteAttribute::Destination(to) = attribute { ip(&to) } else { None }
            }));
        }
        Ok(local)
    }

    async fn neighbours(
        &self,
        family: AddressFamily,
        index: u32,
    ) -> Result<Vec<NeighbourMessage>, NetlinkError> {
        let mut question = NeighbourMessage::default();
        question.header.family = family;
        if family == AddressFamily::Bridge {
            question.header.ifindex = index;
        } else {
            question.attributes.push(NeighbourAttribute::IfIndex(index));
        }
        let found = self.dump(Message::GetNeighbour(question)).await?;
        let here = |m| if let Message::NewNeighbour(m) = m { Some(m) } else { None };
        Ok(found.into_iter().filter_map(here).filter(|m| m.header.ifindex == index).collect())
    }

    async fn observe_routes(&self, scope: &Scope, state: &mut State) -> Result<(), NetlinkError> {
        let device = match &scope.routes_of {
            Some(name) => match self.link(name).await? {
                Some(link) => Some(link.index),
                None => return Ok(()),
            },
            None => None,
        };
        let mut found = Vec::new();
        for table in &scope.tables {
            for family in [AddressFamily::Inet, AddressFamily::Inet6] {
                found.extend(self.routes((family, *table, scope.protocol), device).await?);
            }
        }
        let names = self.names(found.iter().filter_map(output_device).collect())?;
        state.routes.extend(found.iter().filter_map(|message| as_route(message, &names)));
        Ok(())
    }

    /// Those over one device, or all. The kernel filters, but one before 5.0 does not.
    async fn routes(
        &self,
        (family, table, protocol): (AddressFamily, u32, u8),
        device: Option<u32>,
    ) -> Result<Vec<RouteMessage>, NetlinkError> {
        let mut question = RouteMessage::default();
        question.header.address_family = family;
        question.header.protocol = RouteProtocol::from(protocol);
        question.attributes.push(RouteAttribute::Table(table));
        question.attributes.extend(device.map(RouteAttribute::Oif));
        let found = match self.dump(Message::GetRoute(question)).await {
            // There is no such table yet.
            Err(error) if error.is(&[ENOENT]) => return Ok(Vec::new()),
            found => found?,
        };
        let ours = |m: &RouteMessage| {
            let is_there = device.is_none() || output_device(m) == device;
            u8::from(m.header.protocol) == protocol && table_of(m) == table && is_there
        };
        let route = |m| if let Message::NewRoute(m) = m { Some(m) } else { None };
        Ok(found.into_iter().filter_map(route).filter(ours).collect())
    }

    async fn observe_rules(&self, scope: &Scope, state: &mut State) -> Result<(), NetlinkError> {
        for family in [Family::Ipv4, Family::Ipv6] {
            let mut question = RuleMessage::default();
            question.header.family = message::family(family);
            let found = self.dump(Message::GetRule(question)).await?;
            let rule = |m: &Message| {
                if let Message::NewRule(m) = m { as_rule(m, family) } else { None }
            };
            let is_scoped = |rule: &Rule| scope.last_rule.is_some() || scope.has_rule(rule);
            let ours = |rule: &Rule| rule.protocol == scope.protocol && is_scoped(rule);
            state.rules.extend(found.iter().filter_map(rule).filter(ours));
        }
        Ok(())
    }
}

impl Scope {
    fn has_rule(&self, rule: &Rule) -> bool {
        let of_table = match rule.action {
            RuleAction::Lookup(table) | RuleAction::LookupSpecific(table) => {
                self.tables.contains(&table)
            }
            RuleAction::Unreachable => false,
        };
        of_table || rule.iif.as_ref().is_some_and(|iif| self.links.contains(iif))
    }
}

fn as_device(link: &LinkMessage) -> Device {
    Device { mtu: mtu(link), up: link.header.flags.contains(LinkFlags::Up) }
}

/// IP and MAC address, for an FDB entry too.
fn as_neighbour(message: &NeighbourMessage) -> Option<(IpAddr, Mac)> {
    let (mut ip, mut mac) = (None, None);
    for attribute in &message.attributes {
        if let NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) = attribute {
            ip = Some((*v4).into());
        } else if let NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) = attribute {
            ip = Some((*v6).into());
        } else if let NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) = attribute {
            // An FDB entry's family is that of bridges, so the length determines the address
            // family.
            ip = <[u8; 4]>::try_from(bytes.as_slice())
                .map(IpAddr::from)
                .or_else(|_| <[u8; 16]>::try_from(bytes.as_slice()).map(IpAddr::from))
                .ok();
        } else if let NeighbourAttribute::LinkLayerAddress(bytes) = attribute {
            mac = <[u8; 6]>::try_from(bytes.as_slice()).ok().map(Mac);
        }
    }
    Some((ip?, mac?))
}

fn as_route(message: &RouteMessage, names: &BTreeMap<u32, String>) -> Option<(RouteKey, Route)> {
    let header = &message.header;
    let (mut to, mut metric, mut gateway, mut dev) = (None, 0, None, None);
    let (mut mtu, mut source) = (None, None);
    for attribute in &message.attributes {
        if let RouteAttribute::Destination(address) = attribute {
            to = ip(address);
        } else if let RouteAttribute::Priority(value) = attribute {
            metric = *value;
        } else if let RouteAttribute::Gateway(address) = attribute {
            gateway = ip(address);
        } else if let RouteAttribute::Oif(index) = attribute {
            dev = names.get(index).cloned();
        } else if let RouteAttribute::PrefSource(address) = attribute {
            source = ip(address);
        } else if let RouteAttribute::Metrics(metrics) = attribute {
            let value = |m: &RouteMetric| if let RouteMetric::Mtu(v) = m { Some(*v) } else { None };
            let is_lock = |m: &RouteMetric| matches!(m, RouteMetric::Lock(l) if l & MTU_LOCK != 0);
            // IPv6 is not forwarded by an MTU that is not locked.
            let counts =
                header.address_family == AddressFamily::Inet || metrics.iter().any(is_lock);
            mtu = metrics.iter().find_map(value).filter(|_| counts);
        }
    }
    let ipv4 = header.address_family == AddressFamily::Inet;
    let everything: IpAddr = if ipv4 { [0; 4].into() } else { [0; 16].into() };
    let to = Cidr::around(to.unwrap_or(everything), header.destination_prefix_length)?;
    let hop = match (header.kind, gateway, dev) {
        (RouteType::Unreachable, ..) => NextHop::Unreachable,
        (_, Some(gateway), Some(dev)) => {
            let onlink = header.flags.contains(RouteFlags::Onlink);
            NextHop::Via(Via { gateway, dev, onlink })
        }
        (_, None, Some(dev)) => NextHop::Dev(dev),
        (_, _, None) => return None,
    };
    let key = RouteKey { table: table_of(message), to, metric };
    Some((key, Route { hop, mtu, source, protocol: header.protocol.into() }))
}

fn as_rule(message: &RuleMessage, family: Family) -> Option<Rule> {
    let (mut priority, mut table) = (0, u32::from(message.header.table));
    let (mut iif, mut to, mut protocol, mut is_specific) = (None, None, 0, false);
    for attribute in &message.attributes {
        if let RuleAttribute::Priority(value) = attribute {
            priority = *value;
        } else if let RuleAttribute::Table(value) = attribute {
            table = *value;
        } else if let RuleAttribute::Iifname(name) = attribute {
            iif = Some(name.clone());
        } else if let RuleAttribute::Destination(address) = attribute {
            to = Cidr::around(*address, message.header.dst_len);
        } else if let RuleAttribute::SuppressPrefixLen(len) = attribute {
            // The kernel reports -1 where nothing is suppressed.
            is_specific = *len == 0;
        } else if let RuleAttribute::Protocol(value) = attribute {
            protocol = u8::from(*value);
        }
    }
    let action = if message.header.action == rule::RuleAction::Unreachable {
        RuleAction::Unreachable
    } else if message.header.action != rule::RuleAction::ToTable {
        return None;
    } else if is_specific {
        RuleAction::LookupSpecific(table)
    } else {
        RuleAction::Lookup(table)
    };
    Some(Rule { priority, family, iif, to, action, protocol })
}
