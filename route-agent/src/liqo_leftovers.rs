//! Removes what the daemon of Liqo's own network has left on a node: devices, the rules and routes
//! that lead to them, and tables of nft.
//!
//! Only once weft has routes for the same prefixes, of which each has an `unreachable` one behind it:
//! before, packets for peers would leave by the default route, in clear.

use std::collections::BTreeSet;

use fabric_api::Cidr;
use netlink::nft::{self, IpTable, NftError};
use netlink::{ForeignAction, ForeignRoute, Handle, NetlinkError};
use netplan::Family;

/// Prefix of the names of Liqo's Geneve devices, before ten random characters.
const DEVICE: &str = "liqo.";
const RANDOM: usize = 10;
/// Last part of the name of a table for a peer or a node, and its chain.
const BYPASS: (&str, &str) = ("-masquerade-bypass", "pre-postrouting");
/// Part of the name of a table for an IP, before the IP's namespace, and its chain.
const OF_IP: (&str, &str) = ("-remap-ipmapping-fabric-", "postrouting");

#[derive(Debug, thiserror::Error)]
pub(crate) enum LeftoverError {
    #[error("cannot remove the devices and rules of Liqo's network")]
    Routing(#[from] NetlinkError),
    #[error("cannot remove the nft tables of Liqo's network")]
    Firewall(#[from] NftError),
    #[error(
        "Liqo's network has a route to {0} on this node, and weft has none: both stay as they are; if no \
         peering is to have that prefix, start the node anew"
    )]
    Unserved(Cidr),
}

/// Removes all of it if weft serves all prefixes that it has routes to: those of `peers`.
pub(crate) async fn remove(handle: &Handle, peers: &BTreeSet<Cidr>) -> Result<(), LeftoverError> {
    let devices: BTreeSet<String> =
        handle.links().await?.into_iter().map(|link| link.name).filter(|n| is_liqos(n)).collect();
    let by_liqo =
        |route: &ForeignRoute| route.dev.as_ref().is_some_and(|dev| devices.contains(dev));
    let mut tables = BTreeSet::new();
    for rule in handle.all_rules(Family::Ipv4).await? {
        let ForeignAction::Lookup(table, _) = rule.action else { continue };
        let routes = handle.table_routes(Family::Ipv4, table).await?;
        if routes.is_empty() || !routes.iter().all(by_liqo) {
            continue;
        }
        let mut remote = routes.iter().filter(|route| route.gateway.is_some());
        let is_served = |to: &Cidr| peers.iter().any(|peer| peer.net().contains(&to.net()));
        if let Some(unserved) = remote.find(|route| !is_served(&route.to)) {
            return Err(LeftoverError::Unserved(unserved.to));
        }
        tables.insert(table);
    }
    let nft_tables = nft::ip_tables(handle.netns())?.into_iter().filter(is_liqos_table);
    let deletions: Vec<_> =
        nft_tables.map(|of| format!("delete table ip handle {}\n", of.handle)).collect();
    if devices.is_empty() && deletions.is_empty() {
        return Ok(());
    }
    // Rules are recognised by the routes, which go with the devices.
    for table in tables {
        handle.delete_rules_to(Family::Ipv4, table).await?;
    }
    for device in &devices {
        handle.delete_link(device).await?;
    }
    if !deletions.is_empty() {
        nft::run(handle.netns(), &deletions.concat())?;
    }
    tracing::info!(devices = devices.len(), tables = deletions.len(), "removed Liqo's network");
    Ok(())
}

fn is_liqos(device: &str) -> bool {
    let random = device.strip_prefix(DEVICE).unwrap_or_default();
    random.len() == RANDOM && random.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn is_liqos_table(table: &IpTable) -> bool {
    let has = |chain: &str| table.chains.contains(chain);
    (table.name.ends_with(BYPASS.0) && has(BYPASS.1))
        || (table.name.contains(OF_IP.0) && has(OF_IP.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_tables_are_known_by_name() {
        assert!(is_liqos("liqo.a1b2c3d4e5"));
        assert!(!is_liqos("liqo.eth0") && !is_liqos("liqo") && !is_liqos("weft4"));
        let table = |name: &str, chain: &str| IpTable {
            name: name.to_owned(),
            handle: 1,
            chains: [chain.to_owned()].into(),
        };
        assert!(is_liqos_table(&table("milan-masquerade-bypass", "pre-postrouting")));
        assert!(is_liqos_table(&table("db-remap-ipmapping-fabric-default", "postrouting")));
        assert!(!is_liqos_table(&table("milan-masquerade-bypass", "mine")));
        assert!(!is_liqos_table(&table("nat", "postrouting")));
    }
}
