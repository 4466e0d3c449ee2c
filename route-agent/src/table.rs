use std::collections::BTreeSet;

use fabric_api::Cidr;
use netlink::conntrack::Flow;
use netlink::nft::{self, NftError};
use netlink::{Netns, conntrack as tracked};
use netplan::{FIREWALL_TABLE, Firewall};

use crate::conntrack::{is_of_conflict, is_stale};

/// Our nftables table in the kernel, and what it was when we left it.
#[derive(Debug, Default)]
pub(crate) struct Table {
    installed: Option<Installed>,
}

#[derive(Debug)]
struct Installed {
    firewall: Firewall,
    table: nft::Table,
    /// No tracked connection is left that was translated otherwise.
    swept: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TableError {
    #[error("cannot install the firewall table")]
    Install(#[source] NftError),
    #[error("cannot read the firewall table")]
    Read(#[source] NftError),
    #[error("cannot remove the firewall table")]
    Remove(#[source] NftError),
    #[error("cannot delete stale tracked connections")]
    Conntrack(#[source] netlink::NetlinkError),
}

impl Table {
    /// Installs the table unless it is there as we left it. Always the first time, for nobody
    /// knows what was altered before. True if it was installed.
    pub(crate) fn ensure(&mut self, netns: &Netns, want: &Firewall) -> Result<bool, TableError> {
        let have = nft::table(netns, FIREWALL_TABLE).map_err(TableError::Read)?;
        let before = self.installed.take();
        let known = before.is_some();
        let intact = before.filter(|before| Some(&before.table) == have.as_ref());
        let changed = intact.as_ref().is_none_or(|before| before.firewall != *want);
        if changed && known && intact.is_none() {
            tracing::warn!("the firewall table was altered by another; installing it again");
        }
        let swept = intact.as_ref().is_some_and(|i| i.swept && same_nat(&i.firewall, want));
        let known = intact.as_ref().filter(|i| i.swept).map(|i| i.firewall.conflicts.clone());
        let new_conflicts = &want.conflicts - &known.unwrap_or_default();
        let table = if changed { install(netns, want)? } else { have };
        let firewall = want.clone();
        self.installed = table.map(|table| Installed { firewall, table, swept });
        if let Some(installed) = self.installed.as_mut().filter(|_| !swept) {
            sweep(netns, want, &new_conflicts)?;
            installed.swept = true;
        }
        Ok(changed)
    }

    /// True if the mark of the kernel's table is that of this text.
    pub(crate) fn is_current(netns: &Netns, want: &Firewall) -> Result<bool, TableError> {
        let have = nft::table(netns, FIREWALL_TABLE).map_err(TableError::Read)?;
        Ok(have.and_then(|table| table.mark).is_some_and(|mark| mark == want.mark()))
    }

    /// Needs no `nft` where there is no table.
    pub(crate) fn remove(&mut self, netns: &Netns) -> Result<(), TableError> {
        self.installed = None;
        if nft::table(netns, FIREWALL_TABLE).map_err(TableError::Read)?.is_none() {
            return Ok(());
        }
        nft::run(netns, &Firewall::removal()).map_err(TableError::Remove)
    }
}

fn install(netns: &Netns, want: &Firewall) -> Result<Option<nft::Table>, TableError> {
    nft::run(netns, &want.script()).map_err(TableError::Install)?;
    tracing::debug!(mark = want.mark(), "installed the firewall table");
    nft::table(netns, FIREWALL_TABLE).map_err(TableError::Read)
}

/// If it fails, it is tried again at the next look.
fn sweep(netns: &Netns, want: &Firewall, new_conflicts: &BTreeSet<Cidr>) -> Result<(), TableError> {
    let is_gone = |flow: &Flow| is_stale(want, flow) || is_of_conflict(new_conflicts, want, flow);
    let deleted = tracked::delete_stale(netns, is_gone);
    match deleted.map_err(TableError::Conntrack)? {
        0 => {}
        deleted => tracing::info!(deleted, "deleted stale tracked connections"),
    }
    Ok(())
}

/// True if both translate all connections alike.
fn same_nat(a: &Firewall, b: &Firewall) -> bool {
    let nat = |f: &Firewall| Firewall {
        unconnected: Default::default(),
        vxlan_sources: Default::default(),
        links: Default::default(),
        exits: Default::default(),
        uplinks: Default::default(),
        underlay: Default::default(),
        has_symmetric_pods: true,
        ..f.clone()
    };
    nat(a) == nat(b)
}
