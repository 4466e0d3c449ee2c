//! Withdraws a fabric from all its hosts before one of them takes it down.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fabric_api::fabric::{NodeConfig, NodeConfigSpec, NodeConfigStatus};
use fabric_store::{Kind, Object, ObjectRef, Store};
use fabric_supervisor::process;
use fabric_supervisor::rundir::{Record, RunDir};
use fabric_supervisor::workloads::agent_process;
use tokio::time::sleep;

use crate::output::{say, sending};

/// Time limit for the acknowledgements of all agents.
const ACKNOWLEDGED: Duration = Duration::from_secs(10);
/// Between two looks.
const PERIOD: Duration = Duration::from_millis(100);

/// On the host of `weft up`: has every agent take away what it made, and waits for that.
pub(super) fn nodes(dir: &RunDir, record: &Record) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = dir.store(record)?;
        let waiting = mark(&store, dir, record).await.context("cannot withdraw the NodeConfigs")?;
        if !waiting.is_empty() {
            acknowledged(&store, waiting).await?;
        }
        Ok(())
    })
}

/// On a further host, once its agent has ended: nobody has to wait for it any more.
pub(super) fn retract(dir: &RunDir, record: &Record) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let store = dir.store(record)?;
        let own = ObjectRef::new(Kind::NodeConfig, "", &record.node);
        if let Some(Ok(mut config)) = store.get(&own).await?.map(NodeConfig::try_from) {
            config.status = Some(NodeConfigStatus::default());
            store.put_status(&config.into()).await?;
        }
        Ok(())
    })
}

/// Returns the nodes whose agents have something to take away.
async fn mark(store: &Store, dir: &RunDir, record: &Record) -> anyhow::Result<BTreeSet<String>> {
    let own_agent = agent_process(&record.node);
    let runs_here = process::running(dir).iter().any(|(name, _)| *name == own_agent);
    let is_agent_of = |name: &str| name != record.node || runs_here;
    let mut waiting = BTreeSet::new();
    let found = store.read(&[Kind::NodeConfig]).await?;
    // The agent of a damaged one runs on the version of before.
    let damaged = found.problems.iter().filter_map(|problem| problem.object.as_ref());
    for ObjectRef { name, .. } in damaged.filter(|of| !found.objects.contains_key(of)) {
        let spec = NodeConfigSpec::of_removed(record.cluster_id.clone().unwrap_or_default());
        store.put(&NodeConfig::new(name, spec).into()).await?;
        waiting.extend(is_agent_of(name).then(|| name.clone()));
    }
    for object in found.objects.into_values() {
        let Ok(mut config) = NodeConfig::try_from(object) else { continue };
        let name = config.metadata.name.clone().unwrap_or_default();
        let applied = config.status.as_ref().map_or(0, |status| status.applied_generation);
        config.spec.removed = true;
        // The peerings end, too: refused is what still sends.
        config.spec.refused.clear();
        store.put(&config.into()).await?;
        if applied > 0 && is_agent_of(&name) {
            waiting.insert(name);
        }
    }
    Ok(waiting)
}

async fn acknowledged(store: &Store, mut waiting: BTreeSet<String>) -> anyhow::Result<()> {
    let seconds = ACKNOWLEDGED.as_secs();
    say(&format!("waiting up to {seconds} s for {} to take all away", list(&waiting)));
    let until = Instant::now() + ACKNOWLEDGED;
    while !waiting.is_empty() && Instant::now() < until {
        sleep(PERIOD).await;
        for object in store.list(Kind::NodeConfig).await? {
            let Object::NodeConfig(config) = object else { continue };
            let name = config.metadata.name.clone().unwrap_or_default();
            if config.is_applied() && waiting.remove(&name) {
                report(&name, &config);
            }
        }
    }
    if !waiting.is_empty() {
        say(&format!(
            "no answer from {} within {seconds} s: what is there stays until `weft down` runs \
             on each",
            list(&waiting)
        ));
    }
    Ok(())
}

/// Names those on another host that still send.
fn report(node: &str, config: &NodeConfig) {
    let refused = config.status.iter().filter_map(|status| status.refused.as_ref()).flatten();
    for traffic in refused.filter(|traffic| !traffic.senders.is_empty()) {
        say(&format!(
            "{node}: {} to {}, which stays refused: on another host until nobody does, or until \
             `weft down --now` runs there",
            sending(&traffic.senders),
            traffic.prefix
        ));
    }
}

fn list(names: &BTreeSet<String>) -> String {
    names.iter().map(String::as_str).collect::<Vec<_>>().join(", ")
}
