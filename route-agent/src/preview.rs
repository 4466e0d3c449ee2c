//! Output of `--dry-run`.

use std::io::Write as _;

use anyhow::{Context, bail};
use fabric_api::fabric::{FabricRecord, NodeConfig, Records};
use fabric_store::{Kind, Object, ObjectRef, Store};
use netlink::Handle;
use netplan::{FIREWALL_TABLE, plan};

use crate::apply::observe;
use crate::compile::{Compiled, compile};
use crate::host_state::HostState;
use crate::parsed_config::ParsedConfig;
use crate::refusal;
use crate::table::Table;

/// Prints what the agent would do for a NodeConfig.
pub(crate) async fn print(
    handle: &Handle,
    store: &Store,
    reference: &ObjectRef,
) -> anyhow::Result<()> {
    let Some(Object::NodeConfig(config)) = store.get(reference).await? else {
        bail!("there is no {reference}");
    };
    let Some(config) = config.joined(&records(store, &config).await?) else {
        bail!("{reference} follows from FabricRecords, which are being written: try again");
    };
    let text = preview(handle, &config).await?;
    std::io::stdout().write_all(text.as_bytes()).context("cannot print")
}

/// Records that a config follows from.
async fn records(store: &Store, config: &NodeConfig) -> anyhow::Result<Records<FabricRecord>> {
    if !config.spec.from_records {
        return Ok(Records::default());
    }
    let all = store.list(Kind::FabricRecord).await?.into_iter();
    Ok(all.filter_map(|object| FabricRecord::try_from(object).ok()).collect())
}

/// Problems as comments, then the steps as commands.
async fn preview(handle: &Handle, config: &NodeConfig) -> anyhow::Result<String> {
    let host_state = HostState::gather(handle).await.context("cannot look at the node")?;
    let Compiled { state, firewall, problems, .. } = if config.spec.removed {
        Compiled::default()
    } else {
        let refused = refusal::observe(handle.netns())?.prefixes;
        compile(&ParsedConfig::parse(config), &host_state, &refused)
    };
    let mut lines: Vec<String> = problems.iter().map(|problem| format!("# {problem}")).collect();
    let have = observe(handle, &state).await?;
    if config.spec.removed {
        lines.push(format!("nft delete table inet {FIREWALL_TABLE}"));
    } else if !Table::is_current(handle.netns(), &firewall)? {
        lines.push(format!("nft -f - <<'END'\n{}END", firewall.script()));
    }
    lines.extend(plan(&have, &state).iter().map(ToString::to_string));
    lines.push(String::new());
    Ok(lines.join("\n"))
}
