//! The end of a peering's superseded keys. A gateway holds them in memory only: one that starts anew
//! has the present ones.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use fabric_api::fabric::GatewayConfig;
use fabric_api::{ClusterId, labels};
use fabric_store::Kind;
use fabric_supervisor::lock;
use fabric_supervisor::process::{self, Identity, PidFile};
use fabric_supervisor::rundir::RunDir;
use fabric_supervisor::workloads::gateways_of;

use crate::output;
use crate::selection::Selection;

/// Time for a gateway to stop, and for the supervisor to start the next one.
const TIMEOUT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

/// Has the gateways of a peer on this host start anew.
pub(super) fn end(selection: &Selection, peer: &ClusterId) -> anyhow::Result<ExitCode> {
    let dir = selection.require().with_context(|| in_kubernetes(peer))?;
    ensure!(
        lock::supervisor_of(&dir).is_some(),
        "no `weft up` runs here, which would start the gateway again"
    );
    let gateways = gateways_with(&dir, peer)?;
    for (name, old) in &gateways {
        let pidfd = old.open().with_context(|| format!("{name} does not run"))?;
        process::stop_and_wait(&pidfd, TIMEOUT);
    }
    for (name, old) in &gateways {
        wait_for_successor(&dir, name, old)?;
        output::say(&format!("{name} runs anew, with the present keys of {peer} alone"));
    }
    Ok(ExitCode::SUCCESS)
}

fn in_kubernetes(peer: &ClusterId) -> String {
    format!(
        "no key can be ended from here; in Kubernetes `kubectl delete pod --all-namespaces --selector \
         {}={},{}={peer}` ends them, since a new pod of a gateway has the present keys only",
        labels::COMPONENT,
        labels::GATEWAY,
        labels::REMOTE_CLUSTER_ID
    )
}

/// The processes of the peer's gateways on this host, by name.
fn gateways_with(dir: &RunDir, peer: &ClusterId) -> anyhow::Result<Vec<(String, Identity)>> {
    let record = dir.record()?.context("no fabric runs here")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let snapshot = runtime.block_on(dir.store(&record)?.read(&[Kind::GatewayConfig]))?;
    let configs = snapshot.objects.values().filter_map(|o| <&GatewayConfig>::try_from(o).ok());
    let configs = configs.filter(|config| config.spec.peer_cluster_id == peer.as_str());
    let names = gateways_of(&record.node, configs).into_keys();
    let running = |name: String| {
        let file = PidFile::read(&dir.pid_file(&name));
        Some((name, file?.identity))
    };
    let found: Vec<_> = names.filter_map(running).collect();
    if found.is_empty() {
        bail!("no gateway of a peering with {peer} runs on this host, node {}", record.node);
    }
    Ok(found)
}

fn wait_for_successor(dir: &RunDir, name: &str, old: &Identity) -> anyhow::Result<()> {
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        let file = PidFile::read(&dir.pid_file(name));
        if file.is_some_and(|file| file.identity != *old && file.identity.is_alive()) {
            return Ok(());
        }
        thread::sleep(POLL);
    }
    bail!("{name} has not started again within {TIMEOUT:?}; see `weft logs {name}{}`", dir.option())
}
