use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_primitives::Mac;
use libc::{EACCES, EHOSTUNREACH, EINVAL, ENETUNREACH, ENODEV, ESRCH};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage as Message;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo as Info,
    LinkMessage,
};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteMetric, RouteType};
use netplan::{Address, Family};
use nix::net::if_::if_indextoname;

use crate::attributes::{as_address, ip, output_device};
use crate::{Handle, NetlinkError, Netns, message};

/// A device as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkInfo {
    pub name: String,
    pub index: u32,
    /// In bytes.
    pub mtu: u32,
    pub mac: Option<Mac>,
    pub up: bool,
    /// It is up, and so is what is under it: a cable is in, the other end of a veth is up.
    pub carrier: bool,
}

/// The way that the kernel would send a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteInfo {
    pub dev: String,
    /// In bytes; the smaller of the device's and the route's.
    pub mtu: u32,
    /// In bytes; the path MTU that routers have reported, if it is less. Valid for ten minutes.
    pub learnt_mtu: Option<u32>,
    /// The source address that packets made here would have.
    pub source: Option<IpAddr>,
    /// Absent when the destination is on-link.
    pub gateway: Option<IpAddr>,
    /// The destination is an address of this machine.
    pub local: bool,
}

impl Handle {
    pub async fn link(&self, name: &str) -> Result<Option<LinkInfo>, NetlinkError> {
        Ok(self.link_message(name).await?.as_ref().map(link_info))
    }

    pub async fn links(&self) -> Result<Vec<LinkInfo>, NetlinkError> {
        let found = self.dump(Message::GetLink(message::link(0, vec![no_stats()]))).await?;
        Ok(found.iter().filter_map(as_link).map(link_info).collect())
    }

    /// All addresses of all devices, ours or not.
    pub async fn addresses(&self) -> Result<Vec<Address>, NetlinkError> {
        let found = self.address_messages(0).await?;
        let names = self.names(found.iter().map(|m| m.header.index).collect())?;
        let name = |m: &AddressMessage| names.get(&m.header.index).cloned();
        Ok(found.iter().filter_map(|m| as_address(m, name(m)?)).collect())
    }

    /// Names of those of these devices that are there. A host may have thousands of others.
    pub(crate) fn names(
        &self,
        indices: BTreeSet<u32>,
    ) -> Result<BTreeMap<u32, String>, NetlinkError> {
        if indices.is_empty() {
            return Ok(BTreeMap::new());
        }
        let name = |index| Some((index, if_indextoname(index).ok()?.into_string().ok()?));
        Ok(self.netns.run(|| indices.into_iter().filter_map(name).collect())?)
    }

    /// The way to `address`; `None` when there is none.
    pub async fn route_to(&self, address: IpAddr) -> Result<Option<RouteInfo>, NetlinkError> {
        let mut question = RouteMessage::default();
        question.header.address_family = message::family(Family::of(address));
        question.header.destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
        question.attributes.push(RouteAttribute::Destination(address.into()));
        let found = match self.get(Message::GetRoute(question)).await {
            Err(e) if e.is(&[ENETUNREACH, EHOSTUNREACH, EACCES, EINVAL, ESRCH]) => return Ok(None),
            found => found?,
        };
        let Some(route) = found.iter().find_map(as_route) else { return Ok(None) };
        let Some(index) = output_device(route) else { return Ok(None) };
        let question = Message::GetLink(message::link(index, vec![no_stats()]));
        let found = match self.get(question).await {
            Err(error) if error.is(&[ENODEV]) => return Ok(None),
            found => found?,
        };
        let Some(link) = found.iter().find_map(as_link).map(link_info) else { return Ok(None) };
        let usable = [RouteType::Unicast, RouteType::Local].contains(&route.header.kind);
        Ok(usable.then(|| route_info(route, link)))
    }

    /// Makes a veth pair: `name` here, `peer` in `there`. Both ends are down.
    pub async fn add_veth(
        &self,
        name: &str,
        peer: &str,
        there: &Netns,
    ) -> Result<(), NetlinkError> {
        let far =
            vec![LinkAttribute::IfName(peer.to_owned()), LinkAttribute::NetNsFd(there.raw_fd())];
        let data = InfoData::Veth(InfoVeth::Peer(message::link(0, far)));
        let near = vec![
            LinkAttribute::IfName(name.to_owned()),
            LinkAttribute::LinkInfo(vec![Info::Kind(InfoKind::Veth), Info::Data(data)]),
        ];
        let new = Message::NewLink(message::link(0, near));
        self.change(new, NLM_F_CREATE | NLM_F_EXCL).await
    }

    /// Deletes a device. It is fine if there is none.
    pub async fn delete_link(&self, name: &str) -> Result<(), NetlinkError> {
        let Some(link) = self.link(name).await? else { return Ok(()) };
        match self.change(Message::DelLink(message::link(link.index, Vec::new())), 0).await {
            Err(error) if error.is(&[ENODEV]) => Ok(()),
            done => done,
        }
    }

    pub(crate) async fn index(&self, name: &str) -> Result<u32, NetlinkError> {
        let link = self.link(name).await?;
        Ok(link.ok_or_else(|| NetlinkError::NoDevice(name.to_owned()))?.index)
    }

    pub(crate) async fn link_message(
        &self,
        name: &str,
    ) -> Result<Option<LinkMessage>, NetlinkError> {
        let by_name = vec![LinkAttribute::IfName(name.to_owned()), no_stats()];
        match self.get(Message::GetLink(message::link(0, by_name))).await {
            Err(error) if error.is(&[ENODEV]) => Ok(None),
            found => Ok(found?.iter().find_map(as_link).cloned()),
        }
    }

    /// Those of one device, or of all (0).
    pub(crate) async fn address_messages(
        &self,
        index: u32,
    ) -> Result<Vec<AddressMessage>, NetlinkError> {
        let mut question = AddressMessage::default();
        question.header.index = index;
        let found = self.dump(Message::GetAddress(question)).await?;
        let address = |m| if let Message::NewAddress(m) = m { Some(m) } else { None };
        Ok(found.into_iter().filter_map(address).collect())
    }
}

/// Counters are the largest part of the kernel's report on a device.
pub(crate) fn no_stats() -> LinkAttribute {
    LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])
}

pub(crate) fn as_link(message: &Message) -> Option<&LinkMessage> {
    if let Message::NewLink(link) = message { Some(link) } else { None }
}

fn as_route(message: &Message) -> Option<&RouteMessage> {
    if let Message::NewRoute(route) = message { Some(route) } else { None }
}

pub(crate) fn has_carrier(message: &LinkMessage) -> bool {
    message.header.flags.contains(LinkFlags::LowerUp)
}

pub(crate) fn link_info(message: &LinkMessage) -> LinkInfo {
    let mut info = LinkInfo {
        name: String::new(),
        index: message.header.index,
        mtu: 0,
        mac: None,
        up: message.header.flags.contains(LinkFlags::Up),
        carrier: has_carrier(message),
    };
    for attribute in &message.attributes {
        if let LinkAttribute::IfName(name) = attribute {
            info.name.clone_from(name);
        } else if let LinkAttribute::Mtu(mtu) = attribute {
            info.mtu = *mtu;
        } else if let LinkAttribute::Address(bytes) = attribute {
            info.mac = <[u8; 6]>::try_from(bytes.as_slice()).ok().map(Mac);
        }
    }
    info
}

fn route_info(message: &RouteMessage, link: LinkInfo) -> RouteInfo {
    let local = message.header.kind == RouteType::Local;
    let mut info = RouteInfo {
        dev: link.name,
        mtu: link.mtu,
        learnt_mtu: None,
        source: None,
        gateway: None,
        local,
    };
    let expires = |a: &RouteAttribute| matches!(a, RouteAttribute::CacheInfo(c) if c.expires > 0);
    let is_learnt = message.attributes.iter().any(expires);
    for attribute in &message.attributes {
        if let RouteAttribute::PrefSource(address) = attribute {
            info.source = ip(address);
        } else if let RouteAttribute::Gateway(address) = attribute {
            info.gateway = ip(address);
        } else if let RouteAttribute::Metrics(metrics) = attribute {
            let mtu = |m: &RouteMetric| if let RouteMetric::Mtu(v) = m { Some(*v) } else { None };
            let route = metrics.iter().find_map(mtu).filter(|mtu| (1..info.mtu).contains(mtu));
            match is_learnt {
                true => info.learnt_mtu = route,
                false => info.mtu = route.unwrap_or(info.mtu),
            }
        }
    }
    info
}
