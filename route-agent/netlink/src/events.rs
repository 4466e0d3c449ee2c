use std::collections::{BTreeMap, BTreeSet};
use std::io;

use netlink_packet_core::{NetlinkMessage, NetlinkPayload, NlasIterator};
use netlink_packet_route::RouteNetlinkMessage as Message;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::neighbour::NeighbourState;
use netlink_packet_route::route::RouteProtocol;
use netlink_packet_route::rule::{RuleAttribute, RuleMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::net::if_::if_nametoindex;

use crate::attributes::{output_device, table_of};
use crate::links::has_carrier;
use crate::multicast::Multicast;
use crate::observe::LOCAL_TABLE;
use crate::{Handle, NetlinkError, Scope};

/// Notifies of changes to objects of ours, own changes among them, and of what others put before them.
#[derive(Debug)]
pub struct Events {
    multicast: Multicast,
    filter: Filter,
}

/// RTNLGRP_LINK, NEIGH (FDB entries too), IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR,
/// IPV6_ROUTE, IPV6_RULE, IPV4_NETCONF, IPV6_NETCONF.
const GROUPS: [u32; 10] = [1, 3, 5, 7, 8, 9, 11, 19, 24, 25];
/// Type of messages about a changed `forwarding` or `rp_filter`, among others (linux/netconf.h).
const RTM_NEWNETCONF: u16 = 80;
const NETCONFA_IFINDEX: u16 = 1;
/// Length of the headers before the attributes of such a message.
const NETCONF_HEADERS: usize = 20;

impl Handle {
    /// Watches links, addresses, neighbours, routes and rules of the scope, and those settings of its
    /// devices that the kernel notifies of; and what ours hang on without being ours: all devices'
    /// addresses and MTUs. For carriers see [`Events::watch_carriers`].
    pub fn events(&self, scope: &Scope) -> Result<Events, NetlinkError> {
        let multicast = Multicast::open(&self.netns, NETLINK_ROUTE, &GROUPS)?;
        let names: BTreeSet<String> = scope.links.union(&scope.devices).cloned().collect();
        let index = |name: &String| if_nametoindex(name.as_str()).ok();
        let indices = self.netns.run(|| names.iter().filter_map(index).collect())?;
        let filter = Filter {
            names,
            indices,
            tables: scope.tables.clone(),
            protocol: scope.protocol,
            last_rule: scope.last_rule,
            is_of_devices: scope.routes_of.is_some(),
            mtus: BTreeMap::new(),
            carriers: BTreeMap::new(),
        };
        Ok(Events { multicast, filter })
    }
}

impl Events {
    /// Watches whether these devices have a carrier, too, which each does now or not.
    pub fn watch_carriers(&mut self, carriers: BTreeMap<String, bool>) {
        self.filter.carriers = carriers;
    }

    /// Returns after the next change, once it has been quiet for a moment (20 ms, but at most
    /// 200 ms after the first change). Lost notifications count as a change. Can be cancelled
    /// without losing one.
    pub async fn changed(&mut self) -> io::Result<()> {
        let filter = &mut self.filter;
        self.multicast.changed(&mut |message| filter.matters(message)).await
    }
}

#[derive(Debug)]
struct Filter {
    names: BTreeSet<String>,
    /// Indices of the devices that exist.
    indices: BTreeSet<u32>,
    tables: BTreeSet<u32>,
    protocol: u8,
    /// Priority of the last rule of ours, if the foreign ones before it matter.
    last_rule: Option<u32>,
    /// Only routes over our devices matter.
    is_of_devices: bool,
    /// MTUs of the devices reported so far.
    mtus: BTreeMap<u32, u32>,
    /// Devices, by name, whose carriers matter, and whether each has one.
    carriers: BTreeMap<String, bool>,
}

impl Filter {
    /// Messages that can't be parsed matter: looking once too often does no harm.
    fn matters(&mut self, message: &[u8]) -> bool {
        if message_type(message) == Some(RTM_NEWNETCONF) {
            // Below zero for settings of all devices and of new ones.
            let index = netconf_index(message).and_then(|index| u32::try_from(index).ok());
            return index.is_none_or(|index| self.indices.contains(&index));
        }
        let Ok(message) = NetlinkMessage::<Message>::deserialize(message) else { return true };
        let NetlinkPayload::InnerMessage(message) = message.payload else { return false };
        if let Message::NewLink(link) = &message {
            self.new_link_matters(link)
        } else if let Message::DelLink(link) = &message {
            self.mtus.remove(&link.header.index);
            self.indices.remove(&link.header.index)
        } else if let Message::NewNeighbour(m) = &message {
            !is_learned(m.header.state) && self.indices.contains(&m.header.ifindex)
        } else if let Message::DelNeighbour(m) = &message {
            self.indices.contains(&m.header.ifindex)
        } else if let Message::NewRoute(m) | Message::DelRoute(m) = &message {
            let is_there = || output_device(m).is_some_and(|index| self.indices.contains(&index));
            let is_ours = (self.last_rule.is_some()
                || u8::from(m.header.protocol) == self.protocol)
                && self.tables.contains(&table_of(m))
                && (!self.is_of_devices || is_there());
            // Without it an address is of no use.
            let is_lost = || matches!(&message, Message::DelRoute(_)) && is_there();
            // Addresses bring the kernel's own, and are events by themselves.
            let is_foreign =
                || self.last_rule.is_some() && m.header.protocol != RouteProtocol::Kernel;
            is_ours || table_of(m) == LOCAL_TABLE && (is_lost() || is_foreign())
        } else if let Message::NewRule(m) | Message::DelRule(m) = &message {
            let precedes = self.last_rule.is_some_and(|last| rule_priority(m) <= last);
            precedes || self.tables.contains(&rule_table(m)) || self.is_for_link(m)
        } else {
            matches!(&message, Message::NewAddress(_) | Message::DelAddress(_))
        }
    }

    fn is_for_link(&self, rule: &RuleMessage) -> bool {
        rule.attributes.iter().any(|attribute| {
            matches!(attribute, RuleAttribute::Iifname(name) if self.names.contains(name))
        })
    }

    fn new_link_matters(&mut self, link: &LinkMessage) -> bool {
        let (index, carrier) = (link.header.index, has_carrier(link));
        let mut ours = self.indices.contains(&index);
        // Nothing hangs on a device that has just been made.
        let is_new = link.header.change_mask.bits() == u32::MAX;
        let (mut mtu_changed, mut carrier_changed) = (false, false);
        for attribute in &link.attributes {
            if let LinkAttribute::IfName(name) = attribute {
                if self.names.contains(name) {
                    ours = true;
                    self.indices.insert(index);
                }
                let before = self.carriers.get_mut(name).map(|of| std::mem::replace(of, carrier));
                carrier_changed = before.is_some_and(|before| before != carrier);
            } else if let LinkAttribute::Mtu(mtu) = attribute {
                let before = self.mtus.insert(index, *mtu);
                mtu_changed = before.map_or(!is_new, |before| before != *mtu);
            }
        }
        ours || mtu_changed || carrier_changed
    }
}

/// A neighbour that the kernel has learned changes its state every few seconds; ours, and forwarding entries, have none
/// of these.
fn is_learned(state: NeighbourState) -> bool {
    use NeighbourState::{Delay, Failed, Incomplete, Probe, Reachable, Stale};
    matches!(state, Incomplete | Reachable | Stale | Delay | Probe | Failed)
}

fn message_type(message: &[u8]) -> Option<u16> {
    message.get(4..6)?.try_into().ok().map(u16::from_ne_bytes)
}

fn netconf_index(message: &[u8]) -> Option<i32> {
    let attributes = NlasIterator::new(message.get(NETCONF_HEADERS..)?);
    let mut indices = attributes.flatten().filter(|attribute| attribute.kind() == NETCONFA_IFINDEX);
    indices.next()?.value().try_into().ok().map(i32::from_ne_bytes)
}

/// Without the attribute it is 0.
fn rule_priority(message: &RuleMessage) -> u32 {
    let priority =
        |a: &RuleAttribute| if let RuleAttribute::Priority(p) = a { Some(*p) } else { None };
    message.attributes.iter().find_map(priority).unwrap_or_default()
}

fn rule_table(message: &RuleMessage) -> u32 {
    let table = |a: &RuleAttribute| if let RuleAttribute::Table(t) = a { Some(*t) } else { None };
    message.attributes.iter().find_map(table).unwrap_or_else(|| message.header.table.into())
}
