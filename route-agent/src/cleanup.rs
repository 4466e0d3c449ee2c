use netlink::Handle;
use netplan::State;

use crate::agent::{apply, chain};
use crate::other_firewalls;
use crate::table::Table;

/// What a node has of ours and of the gateways that were killed on it: their ends of a link go a
/// moment after them, when the kernel comes to it.
pub(crate) async fn whole_node(handle: &Handle) -> Vec<String> {
    let mut problems = all(handle, &mut Table::default()).await;
    problems.extend(other_firewalls::remove(handle.netns()));
    let links = match handle.links().await {
        Ok(links) => links,
        Err(error) => {
            problems.push(chain(&error));
            return problems;
        }
    };
    for link in links.iter().filter(|link| is_gateways(&link.name)) {
        if let Err(error) = handle.delete_link(&link.name).await {
            problems.push(format!("ip link del {}: {}", link.name, chain(&error)));
        }
    }
    problems
}

/// A gateway names the host's end of its link `weft-` and eight digits.
fn is_gateways(name: &str) -> bool {
    let digits = name.strip_prefix("weft-").unwrap_or_default();
    digits.len() == 8 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
}

/// Takes away all that is ours but for accepts in chains of others: a plan towards nothing.
/// Returns what could not be done.
///
/// What others made is not touched, the gateways' host ends and their routes included.
pub(crate) async fn all(handle: &Handle, table: &mut Table) -> Vec<String> {
    let mut problems = apply(handle, &State::default()).await.problems;
    if let Err(error) = table.remove(handle.netns()) {
        problems.push(chain(&error));
    }
    problems
}
