use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use libc::{EADDRNOTAVAIL, EAFNOSUPPORT, EEXIST, ENOENT, ESRCH};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage as Message;
use netlink_packet_route::link::LinkAttribute;
use netlink_packet_route::route::RouteScope;
use netplan::{Address, Op, Route, RouteKey, Vxlan};

use crate::{Handle, NetlinkError, message, write_sysctl};

/// A step that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("{op}")]
pub struct Failure {
    pub op: Op,
    #[source]
    pub source: NetlinkError,
}

/// Longest wait for the local route of a new IPv6 address. Without one by then, the address is
/// planned once more.
const LOCAL_ROUTE_TIMEOUT: Duration = Duration::from_secs(1);

const PUT: u16 = NLM_F_CREATE | NLM_F_REPLACE;
const NEW: u16 = NLM_F_CREATE | NLM_F_EXCL;

impl Handle {
    /// Takes the steps in order. One that fails does not keep the others from being tried, so
    /// that what is wrong with one peering stays with that peering. Only steps on a device that
    /// could not be made are left out: they would fail for its lack alone.
    ///
    /// A step that another program has done already (a route deleted, a rule added) is no failure.
    pub async fn apply(&self, ops: &[Op]) -> Vec<Failure> {
        let mut steps = Steps { handle: self, indices: BTreeMap::new() };
        let (mut failures, mut not_made) = (Vec::new(), BTreeSet::new());
        for op in ops {
            if op.device().is_some_and(|dev| not_made.contains(dev)) {
                continue;
            }
            match steps.take(op).await {
                Ok(()) => tracing::debug!("{op}"),
                Err(source) => {
                    if let Op::AddLink(name, _) = op {
                        not_made.insert(name.as_str());
                    }
                    failures.push(Failure { op: op.clone(), source });
                }
            }
        }
        failures
    }
}

struct Steps<'a> {
    handle: &'a Handle,
    /// Interface index by name, for the devices looked up so far.
    indices: BTreeMap<String, u32>,
}

impl Steps<'_> {
    async fn take(&mut self, op: &Op) -> Result<(), NetlinkError> {
        let handle = self.handle;
        match op {
            Op::AddLink(name, vxlan) => {
                self.indices.remove(name);
                handle.add_vxlan(name, vxlan).await
            }
            Op::DelLink(name) => {
                self.indices.remove(name);
                handle.delete_link(name).await
            }
            Op::SetMtu(name, mtu) => self.set(name, LinkAttribute::Mtu(*mtu)).await,
            Op::SetNoLinkLocal(name) => {
                let bare = message::no_generated_addresses(self.index(name).await?);
                unless(handle.change(Message::SetLink(bare), 0).await, &[EAFNOSUPPORT])
            }
            Op::SetMac(name, mac) => self.set(name, LinkAttribute::Address(mac.0.to_vec())).await,
            Op::SetUp(name) => {
                let message = message::link_up(self.index(name).await?);
                handle.change(Message::SetLink(message), 0).await
            }
            Op::AddAddress(address) => self.add_address(address).await,
            Op::DelAddress(address) => {
                let message = message::address(self.index(&address.dev).await?, address);
                unless(handle.change(Message::DelAddress(message), 0).await, &[EADDRNOTAVAIL])
            }
            Op::PutNeighbour(dev, ip, mac) => {
                let message = message::neighbour(self.index(dev).await?, *ip, Some(*mac));
                handle.change(Message::NewNeighbour(message), PUT).await
            }
            Op::DelNeighbour(dev, ip) => {
                let message = message::neighbour(self.index(dev).await?, *ip, None);
                unless(handle.change(Message::DelNeighbour(message), 0).await, &[ENOENT])
            }
            Op::PutFdb(dev, mac, to) => {
                let message = message::fdb(self.index(dev).await?, *mac, *to);
                handle.change(Message::NewNeighbour(message), PUT).await
            }
            Op::DelFdb(dev, mac, to) => {
                let message = message::fdb(self.index(dev).await?, *mac, *to);
                unless(handle.change(Message::DelNeighbour(message), 0).await, &[ENOENT])
            }
            Op::PutRoute(key, route) => self.put_route(key, route).await,
            Op::DelRoute(key, route) => self.delete_route(key, route).await,
            Op::AddRule(rule) => {
                let message = Message::NewRule(message::rule(rule));
                unless(handle.change(message, NEW).await, &[EEXIST])
            }
            Op::DelRule(rule) => {
                let message = Message::DelRule(message::rule(rule));
                unless(handle.change(message, 0).await, &[ENOENT])
            }
            Op::SetSysctl(sysctl, value) => write_sysctl(&handle.netns, sysctl, *value),
        }
    }

    async fn add_address(&mut self, address: &Address) -> Result<(), NetlinkError> {
        let handle = self.handle;
        let index = self.index(&address.dev).await?;
        let message = message::address(index, address);
        let added = handle.change(Message::NewAddress(message.clone()), NEW).await;
        if added.as_ref().is_err_and(|error| error.is(&[EEXIST])) {
            // It is there without its local route. Both come with a new one.
            let deleted = handle.change(Message::DelAddress(message.clone()), 0).await;
            unless(deleted, &[EADDRNOTAVAIL])?;
            unless(handle.change(Message::NewAddress(message), NEW).await, &[EEXIST])?;
        } else {
            added?;
        }
        // The kernel answers before an IPv6 address has its local route, which a work queue adds.
        let end = Instant::now() + LOCAL_ROUTE_TIMEOUT;
        while address.address.is_ipv6()
            && Instant::now() < end
            && !handle.local_addresses(index).await?.contains(&address.address)
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    async fn set(&mut self, name: &str, what: LinkAttribute) -> Result<(), NetlinkError> {
        let message = message::link(self.index(name).await?, vec![what]);
        self.handle.change(Message::SetLink(message), 0).await
    }

    async fn put_route(&mut self, key: &RouteKey, route: &Route) -> Result<(), NetlinkError> {
        let index = match route.hop.device() {
            Some(dev) => Some(self.index(dev).await?),
            None => None,
        };
        let message = message::route(key, route, index);
        self.handle.change(Message::NewRoute(message), PUT).await
    }

    /// The kernel matches every attribute in the request, so the next hop is left out: the key and
    /// the protocol suffice.
    async fn delete_route(&self, key: &RouteKey, route: &Route) -> Result<(), NetlinkError> {
        let bare = Route { mtu: None, source: None, ..route.clone() };
        let mut message = message::route(key, &bare, None);
        message.header.scope = RouteScope::NoWhere;
        message.attributes.retain(|attribute| !is_gateway(attribute));
        unless(self.handle.change(Message::DelRoute(message), 0).await, &[ESRCH, ENOENT])
    }

    async fn index(&mut self, dev: &str) -> Result<u32, NetlinkError> {
        if let Some(index) = self.indices.get(dev) {
            return Ok(*index);
        }
        let index = self.handle.index(dev).await?;
        self.indices.insert(dev.to_owned(), index);
        Ok(index)
    }
}

fn is_gateway(attribute: &netlink_packet_route::route::RouteAttribute) -> bool {
    matches!(attribute, netlink_packet_route::route::RouteAttribute::Gateway(_))
}

/// Takes these of the kernel's answers for success.
fn unless(done: Result<(), NetlinkError>, fine: &[i32]) -> Result<(), NetlinkError> {
    match done {
        Err(error) if error.is(fine) => Ok(()),
        done => done,
    }
}

impl Handle {
    async fn add_vxlan(&self, name: &str, vxlan: &Vxlan) -> Result<(), NetlinkError> {
        if vxlan.elsewhere {
            let no_underlay = || NetlinkError::NoUnderlay(name.to_owned());
            let underlay = self.underlay.as_ref().ok_or_else(no_underlay)?;
            underlay.add_vxlan_for(self, name, vxlan).await?;
        } else {
            self.change(Message::NewLink(message::vxlan(name, vxlan)), NEW).await?;
        }
        let index = self.index(name).await?;
        let alias = LinkAttribute::IfAlias(message::vxlan_alias(vxlan.family));
        self.change(Message::SetLink(message::link(index, vec![alias])), 0).await?;
        // Fails where the kernel has no IPv6, and then there is nothing to keep it from.
        let bare = Message::SetLink(message::no_generated_addresses(index));
        unless(self.change(bare, 0).await, &[EAFNOSUPPORT])?;
        self.change(Message::SetLink(message::link_up(index)), 0).await
    }

    /// Makes the device here, where its UDP socket stays, and moves it to `there`.
    async fn add_vxlan_for(
        &self,
        there: &Self,
        name: &str,
        vxlan: &Vxlan,
    ) -> Result<(), NetlinkError> {
        self.delete_link(name).await?;
        self.change(Message::NewLink(message::vxlan(name, vxlan)), NEW).await?;
        let to = LinkAttribute::NetNsFd(there.netns.raw_fd());
        let moved = message::link(self.index(name).await?, vec![to]);
        let moved = self.change(Message::SetLink(moved), 0).await;
        if moved.is_err() {
            self.delete_link(name).await?;
        }
        moved
    }
}
