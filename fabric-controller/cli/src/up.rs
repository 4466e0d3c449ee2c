use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use fabric_api::{ClusterId, labels};
use fabric_store::{Kind, Object, ObjectRef, Snapshot, Store};
use fabric_supervisor::lock::Lock;
use fabric_supervisor::published::{Connections, Published};
use fabric_supervisor::rundir::{self, Record, RunDir, default_state_dir};
use fabric_supervisor::supervise::{self, End, Loop, OwnFiles, StopSignals};
use fabric_supervisor::workloads::{
    self, AgentOptions, ChildLogs, ControlOptions, GatewayOptions, Workloads,
};
use fabric_supervisor::{lock, metrics, process};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

use super::output::say;
use super::{host, manifest, preconditions};

const EXAMPLES: &str = "\
Examples:
    weft up --manifests /etc/weft/rome
    weft up --manifests /etc/weft/rome --node n1 --metrics 127.0.0.1:9100
Ctrl-C or SIGTERM stops the supervisor, the controller and ipam; gateways and route-agent go on
carrying traffic, and the next `weft up` takes them over. `weft down` takes everything away.";

/// Run the fabric on this host: controller, ipam, route-agent and a gateway for each peering.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct UpArgs {
    /// Directory of the cluster's manifests, as `weft init` begins it. Changes take effect at once.
    #[arg(long, value_name = "DIR", env = "WEFT_MANIFESTS")]
    manifests: PathBuf,
    /// The node that this host is [default: the Node with the host's name, the one it was before, or the one with
    /// one of its addresses].
    #[arg(long, value_name = "NAME", value_parser = manifest::dns_name)]
    node: Option<String>,
    /// What is gone after a reboot: published config, sockets, logs [default: /run/weft/CLUSTER].
    #[arg(long, value_name = "DIR", env = "WEFT_RUN_DIR")]
    run_dir: Option<PathBuf>,
    /// What outlives a reboot: granted addresses, generated keys [default: /var/lib/weft/CLUSTER].
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR")]
    state_dir: Option<PathBuf>,
    /// Serve the metrics of all processes of this host, merged, at http://IP:PORT/metrics.
    #[arg(long, value_name = "IP:PORT")]
    metrics: Option<SocketAddr>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    agent: AgentOptions,
    #[command(flatten)]
    gateway: GatewayOptions,
    #[command(flatten)]
    logs: ChildLogs,
}

pub(crate) fn run(args: &UpArgs) -> anyhow::Result<ExitCode> {
    let manifests = std::fs::canonicalize(&args.manifests).map_err(|error| {
        let path = args.manifests.display();
        let is_missing = error.kind() == ErrorKind::NotFound;
        let remedy = is_missing.then(|| format!("; `weft init --out {path}` makes one"));
        let remedy = remedy.unwrap_or_default();
        anyhow::Error::new(error)
            .context(format!("cannot open the manifest directory {path}{remedy}"))
    })?;
    preconditions::check(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let cluster = runtime.block_on(ClusterManifests::read(&manifests))?;
    let cluster_id = cluster.cluster_id(&manifests)?;
    let dir = args.run_dir.as_deref().map_or_else(|| Ok(RunDir::of(&cluster_id)), RunDir::at)?;
    let state = args.state_dir.clone().unwrap_or_else(|| default_state_dir(&cluster_id));
    let (node, state) = (cluster.node(args, &dir, &state)?, std::path::absolute(state)?);
    let programs = workloads::programs()?;
    workloads::check_programs(&programs, &["ipam", "fabric-controller", "route-agent", "gateway"])?;

    process::check_alone(&dir)?;
    let state_lock = lock::lock_state(&state);
    let _state_lock =
        state_lock.map_err(|error| lock::supervisor_of(&dir).map_or(error, Into::into))?;
    rundir::check_cluster(&dir, &state, &cluster_id)?;
    dir.create()?;
    let lock = lock::lock(&dir, "weft up")?;
    let kept = rundir::keep_node(&state, &node);
    if let Err(error) = kept.and_then(|()| rundir::keep_cluster(&state, &cluster_id)) {
        say(&format!("cannot keep the names of node and cluster in {}: {error}", state.display()));
    }
    let record = Record {
        cluster_id: Some(cluster_id.to_string()),
        node,
        manifests: Some(manifests),
        state_dir: Some(state),
        published: None,
        netns: host::netns(),
    };
    dir.write_record(&record)?;
    say(&format!(
        "cluster {cluster_id}, node {}, run directory {}",
        record.node,
        dir.path().display()
    ));
    let (control, agent, logs) = (args.control.clone(), args.agent.clone(), args.logs.clone());
    let gateway = args.gateway.clone();
    let workloads = Workloads { programs, dir, record, control, agent, gateway, logs };
    runtime.block_on(supervise_all(workloads, lock, args.metrics))
}

async fn supervise_all(
    workloads: Workloads,
    lock: Lock,
    metrics_address: Option<SocketAddr>,
) -> anyhow::Result<ExitCode> {
    let stop = StopSignals::new()?;
    let dir = workloads.dir.clone();
    let own = OwnFiles { dir: dir.clone(), lock, record: workloads.record.clone() };
    let store = dir.store(&workloads.record)?;
    supervise::raise_open_files();
    for file in store.restore_grants().context("cannot restore what was granted")? {
        say(&format!("{} was damaged or gone: restored from its copy", file.display()));
    }
    if let Err(error) = store.copy_grants() {
        say(&format!(
            "cannot copy what was granted, so damage to it could not be repaired: {error:#}"
        ));
    }
    // Ends with the supervisor: what runs on looks for changes once a second.
    let _changes = store
        .serve_changes()
        .map_err(anyhow::Error::new)
        .inspect_err(|error| say(&format!("{error:#}; changes are looked for once a second")))
        .ok();
    let (reports, reported) = watch::channel(BTreeMap::new());
    if let Some(address) = metrics_address {
        metrics::serve(address, reported).await?;
        say(&format!("metrics at http://{address}/metrics"));
    }
    let kinds = [Kind::GatewayConfig, Kind::Connection];
    let mut events = store.watch(&kinds).context("cannot watch the store")?;
    let mut published = Published::new(workloads, store.clone());
    published.until_synced(&mut events).await;
    let (wanted_to, wanted) = watch::channel(published.wanted());
    tokio::spawn(published.follow(events, wanted_to));
    let connections = Connections { store };
    match (Loop { own, wanted, reports, connections, stop }).run().await {
        End::Stopped(kept) => say(&print_stop_hint(&kept, &dir)),
        End::RunDirLost => return Err(supervise::start_anew(&dir)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Message to the user when the supervisor ends.
pub(crate) fn print_stop_hint(kept: &[String], dir: &RunDir) -> String {
    if kept.is_empty() {
        return "stopped; nothing runs on".to_owned();
    }
    format!(
        "stopped; {} carry on with the traffic. `weft down --run-dir {}` takes everything away",
        kept.join(", "),
        dir.path().display()
    )
}

/// The cluster's own manifests.
struct ClusterManifests(Snapshot);

impl ClusterManifests {
    async fn read(manifests: &Path) -> anyhow::Result<Self> {
        // The run directory, with all the rest, is named after the cluster in these.
        let read = Store::open_manifests(manifests).read(&[Kind::ConfigMap, Kind::Node]).await;
        Ok(Self(read.context("cannot read the manifests")?))
    }

    fn cluster_id(&self, manifests: &Path) -> anyhow::Result<ClusterId> {
        let named =
            ObjectRef::new(Kind::ConfigMap, labels::LIQO_NAMESPACE, labels::CLUSTER_ID_CONFIGMAP);
        let labelled = |object: &&Object| {
            object.namespace() == Some(labels::LIQO_NAMESPACE)
                && object.label(labels::APP_NAME) == Some(labels::CLUSTER_ID_APP)
        };
        let found = self.0.objects.get(&named).or_else(|| self.0.objects.values().find(labelled));
        let Some(Object::ConfigMap(map)) = found else {
            let problems: Vec<_> =
                self.0.problems.iter().map(|problem| format!("\n  - {problem}")).collect();
            bail!(
                "{} has no {named}, which names the cluster; `weft init` writes it{}",
                manifests.display(),
                problems.concat()
            );
        };
        let id = map.data.as_ref().and_then(|data| data.get(labels::CLUSTER_ID_KEY));
        let id = id.with_context(|| {
            format!("{named}: data.{}: missing; expected the cluster's ID", labels::CLUSTER_ID_KEY)
        })?;
        id.parse().with_context(|| format!("{named}: data.{}", labels::CLUSTER_ID_KEY))
    }

    /// The Node that this host is. Its addresses come last: they may have changed, and another Node may still have
    /// one that is this host's by now.
    fn node(&self, args: &UpArgs, dir: &RunDir, state: &Path) -> anyhow::Result<String> {
        let objects = self.0.objects.values();
        let nodes: Vec<&Node> = objects.filter_map(|object| object.try_into().ok()).collect();
        let names: Vec<_> = nodes.iter().filter_map(|node| node.metadata.name.as_deref()).collect();
        let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
        let is_known = |name: &String| names.contains(&name.as_str());
        if let Some(named) = &args.node {
            if !is_known(named) {
                bail!("--node {named}: no such Node in the manifests (there: {there})");
            }
            return Ok(named.clone());
        }
        let host = host::name().ok();
        let running = dir.record().ok().flatten().filter(|record| record.netns == host::netns());
        let before = running.map(|record| record.node);
        if let Some(name) = host.clone().into_iter().chain(before).find(is_known) {
            return Ok(name);
        }
        let here: Vec<_> = nodes.iter().filter(|node| is_here(node)).collect();
        if let [node] = here[..] {
            return Ok(node.metadata.name.clone().unwrap_or_default());
        }
        rundir::kept_node(state).filter(is_known).with_context(|| {
            format!(
                "cannot tell which Node this host is: found {} with an address of this host and \
                 none named {:?} (there: {there}); say which with --node NAME",
                here.len(),
                host.unwrap_or_default()
            )
        })
    }
}

fn is_here(node: &Node) -> bool {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    addresses.filter_map(|address| address.address.parse().ok()).any(host::has_address)
}
