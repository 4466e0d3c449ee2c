use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use fabric_api::Cidr;
use fabric_runtime::chain;
use netlink::Handle;
use netplan::{Refusal, State};
use tokio::time::sleep;

use crate::apply::apply;
use crate::host_state::HostState;
use crate::refusal::{self, RefusalError};
use crate::table::Table;
use foreign::other_firewalls;

/// Time in which senders notice that they are refused.
const SETTLE: Duration = Duration::from_millis(500);
/// Time in which a pod that still sends has to be seen.
const WATCH: Duration = Duration::from_millis(1500);

/// Remaining work of a caller after a withdrawal.
#[derive(Debug, Default)]
pub(crate) struct Withdrawn {
    /// Sources that still send to peers: their refusal stays.
    pub(crate) senders: Vec<IpAddr>,
    pub(crate) problems: Vec<String>,
}

/// Removes from a node all objects of ours and of the gateways that were killed on it: their ends
/// of a link go a moment after them, when the kernel comes to it. With `quiet`, the refusal of
/// prefixes that something still sends to stays.
pub(crate) async fn whole_node(handle: &Handle, quiet: Option<Duration>) -> Withdrawn {
    let mut table = Table::default();
    let mut withdrawn = match quiet {
        Some(quiet) => withdraw(handle, &mut table, quiet, Stays::default()).await,
        None => Withdrawn { senders: Vec::new(), problems: all(handle, &mut table).await },
    };
    withdrawn.problems.extend(other_firewalls::remove(handle.netns()));
    let removed = refusal::remove_saved(handle.netns());
    withdrawn.problems.extend(removed.err().map(|error| chain(&error)));
    let links = match handle.links().await {
        Ok(links) => links,
        Err(error) => {
            withdrawn.problems.push(chain(&error));
            return withdrawn;
        }
    };
    for link in links.iter().filter(|link| is_gateways(&link.name)) {
        if let Err(error) = handle.delete_link(&link.name).await {
            withdrawn.problems.push(format!("ip link del {}: {}", link.name, chain(&error)));
        }
    }
    withdrawn
}

/// A gateway names the host's end of its link `weft-` and eight digits.
fn is_gateways(name: &str) -> bool {
    let digits = name.strip_prefix("weft-").unwrap_or_default();
    digits.len() == 8 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
}

/// Parts of a config that a withdrawal goes by; none where there is no config.
#[derive(Default)]
pub(crate) struct Stays {
    /// Prefixes that stay refused in any case.
    pub(crate) prefixes: BTreeSet<Cidr>,
    /// Pods of the node.
    pub(crate) local_pods: BTreeSet<Cidr>,
}

/// Takes away all that is ours but the refusal of peers' prefixes, and that, too, unless something
/// still sends to them.
pub(crate) async fn withdraw(
    handle: &Handle,
    table: &mut Table,
    quiet: Duration,
    stays: Stays,
) -> Withdrawn {
    let mut withdrawn = Withdrawn::default();
    match refuse(handle, table, quiet, stays).await {
        Ok((senders, problems)) => (withdrawn.senders, withdrawn.problems) = (senders, problems),
        Err(error) => {
            withdrawn.problems.push(chain(&error));
            withdrawn.problems.extend(dataplane(handle, table).await);
        }
    }
    withdrawn
}

async fn refuse(
    handle: &Handle,
    table: &mut Table,
    quiet: Duration,
    stays: Stays,
) -> Result<(Vec<IpAddr>, Vec<String>), RefusalError> {
    let netns = handle.netns();
    let before = refusal::observe(netns)?;
    let mut refusal = Refusal::of(&before.prefixes | &refusal::backstops(handle).await?);
    // Networks that cannot be read are refused with the prefixes.
    if let Ok(host_state) = HostState::gather(handle).await {
        let networks = host_state.networks().map(|(network, _)| network);
        refusal.leave(networks, &(&before.local_pods | &stays.local_pods));
    }
    if refusal.prefixes.is_empty() {
        return Ok((Vec::new(), dataplane(handle, table).await));
    }
    refusal::write(netns, &refusal, quiet)?;
    let problems = dataplane(handle, table).await;
    sleep(SETTLE).await;
    refusal::write(netns, &refusal, quiet)?;
    sleep(WATCH).await;
    let senders = refusal::senders(&refusal::observe(netns)?);
    if senders.is_empty() {
        refusal.retain(&refusal.prefixes & &stays.prefixes);
        refusal::write(netns, &refusal, quiet)?;
    }
    Ok((senders, problems))
}

/// Takes away all that is ours but for accepts in chains of others: a plan towards nothing.
/// Returns what could not be done.
///
/// Objects of others are not touched, the gateways' host ends and their routes included.
pub(crate) async fn all(handle: &Handle, table: &mut Table) -> Vec<String> {
    let mut problems = dataplane(handle, table).await;
    // Needs no `nft` where there is no table.
    let removed = refusal::observe(handle.netns()).and_then(|have| {
        if have.prefixes.is_empty() {
            return Ok(());
        }
        refusal::write(handle.netns(), &Refusal::default(), Duration::ZERO)
    });
    problems.extend(removed.err().map(|error| chain(&error)));
    problems
}

/// Takes away all but the refusal.
pub(crate) async fn dataplane(handle: &Handle, table: &mut Table) -> Vec<String> {
    let mut problems = apply(handle, &State::default()).await.problems;
    if let Err(error) = table.remove(handle.netns()) {
        problems.push(chain(&error));
    }
    problems
}
