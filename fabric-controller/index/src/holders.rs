//! Holders of what ipam has granted.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::{Cidr, labels};
use fabric_objects::{Kind, Object, ObjectRef};

use crate::grant::Grant;
use crate::index::Index;

/// Grants in the statuses of objects, and prefixes of peers in the records that nodes go by.
#[derive(Debug)]
pub struct Holders {
    networks: Vec<(Cidr, ObjectRef)>,
    addresses: BTreeMap<IpAddr, ObjectRef>,
    peers: Vec<(Cidr, String)>,
}

impl Holders {
    pub fn of(index: &Index) -> Self {
        let (mut networks, mut addresses) = (Vec::new(), BTreeMap::new());
        for (of, object) in index.of_kind(Kind::Network).chain(index.of_kind(Kind::Ip)) {
            match Grant::of(object) {
                Some(Grant::Network(cidr)) => networks.push((cidr, of.clone())),
                Some(Grant::Address { ip, .. }) => {
                    addresses.insert(ip, of.clone());
                }
                None => {}
            }
        }
        let peers = index.recorded_prefixes().filter_map(|(peer, prefix)| {
            prefix.parse().ok().map(|prefix: Cidr| (prefix, peer.to_owned()))
        });
        Self { networks, addresses, peers: peers.collect() }
    }

    /// Another object with this grant of an object, or a part of it, or another peer that nodes have routes to by that.
    pub fn other(&self, object: &Object, grant: Grant) -> Option<String> {
        let own = object.reference();
        match grant {
            Grant::Address { ip, .. } => {
                self.addresses.get(&ip).filter(|holder| **holder != own).map(ObjectRef::to_string)
            }
            Grant::Network(cidr) => {
                let mut networks = self.networks.iter();
                let network =
                    networks.find(|(held, holder)| held.overlaps(&cidr) && *holder != own);
                let own_peer = object.label(labels::REMOTE_CLUSTER_ID).unwrap_or_default();
                let mut peers = self.peers.iter();
                let peer = peers.find(|(held, peer)| held.overlaps(&cidr) && peer != own_peer);
                let peer = || peer.map(|(_, peer)| format!("the record of the peer {peer}"));
                network.map(|(_, holder)| holder.to_string()).or_else(peer)
            }
        }
    }
}
