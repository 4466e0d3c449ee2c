//! The cluster: an API server, weft's control plane and all that is simulated around it.

use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use api_server::{ApiServer, start_program};
use fabric_api::{crds, labels};
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use gateway_templates::{WIREGUARD_CLIENT, WIREGUARD_SERVER};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use weft_tests::bin_dir;

use crate::audit::AuditLog;
use crate::board::Board;
use crate::gateways::Gateway;
use crate::kubelets::OutsidePods;
use crate::manifests::{Endpoint, MAX_NODES, MAX_PEERINGS, Peer, cluster};
use crate::users::{User, Writer};
use crate::{agents, kubelets};

/// Writes of the user at a time.
const CONCURRENCY: usize = 16;
/// Longest wait for the first config of every node.
const START: Duration = Duration::from_secs(180);

/// Size of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub nodes: usize,
    pub peerings: usize,
}

/// Process IDs.
#[derive(Clone, Debug)]
pub struct Pids {
    pub controller: i32,
    pub ipam: i32,
    /// The API server and etcd.
    pub api_server: Vec<i32>,
}

/// A running cluster. Everything in it ends with this value, and with the process at the latest.
pub struct Lab {
    pub board: Board,
    pub size: Size,
    // Dropped in this order: clients end before the API server.
    _tasks: JoinSet<()>,
    controller: Running,
    ipam: Running,
    heartbeats: watch::Sender<bool>,
    user: Writer,
    server: Arc<ApiServer>,
}

struct Running {
    child: Child,
    log: PathBuf,
}

impl Lab {
    /// Starts a cluster without peerings, and waits until every node has acknowledged its first config.
    /// Programs log into `dir`.
    pub async fn start(server: Arc<ApiServer>, dir: &Path, size: Size) -> Result<Self> {
        let Size { nodes, peerings } = size;
        if !(1..=MAX_NODES).contains(&nodes) || peerings > MAX_PEERINGS {
            bail!(
                "{nodes} nodes, {peerings} peerings; expected 1 to {MAX_NODES} and at most {MAX_PEERINGS}"
            );
        }
        let defining = Arc::clone(&server);
        tokio::task::spawn_blocking(move || define_kinds(&defining)).await??;
        let user = Writer(User::Admin.client(&server)?);
        apply_cluster(&user, nodes).await?;
        let installing = Arc::clone(&server);
        tokio::task::spawn_blocking(move || install_templates(&installing)).await??;
        let socket = format!("unix:{}", dir.join("ipam.sock").display());
        let ipam = Running::start(&server, dir, User::Ipam, &["--listen", &socket])?;
        let controller = Running::start(&server, dir, User::Controller, &["--ipam", &socket])?;
        let (board, mut tasks) = (Board::default(), JoinSet::new());
        agents::start(&server, nodes, &board, &mut tasks)?;
        let heartbeats = watch::Sender::new(false);
        start_kubelets(&server, nodes, &board, &heartbeats, &mut tasks)?;
        let lab = Self { board, size, _tasks: tasks, controller, ipam, heartbeats, user, server };
        lab.board.all_started(nodes, START).await.map_err(|error| lab.explain(error))?;
        Ok(lab)
    }

    pub fn pids(&self) -> Pids {
        let own = |running: &Running| running.child.id().cast_signed();
        Pids {
            controller: own(&self.controller),
            ipam: own(&self.ipam),
            api_server: self.server.pids().into_iter().map(u32::cast_signed).collect(),
        }
    }

    pub fn audit(&self) -> AuditLog {
        AuditLog::new(self.server.audit_log())
    }

    /// Applies the manifests of these peerings, several at a time.
    pub async fn apply_peerings(&self, peers: &[Peer]) -> Result<()> {
        let applied = peers.iter().map(|peer| async {
            for manifest in peer.manifests() {
                self.user.apply(&manifest).await?;
            }
            anyhow::Ok(())
        });
        stream::iter(applied).buffer_unordered(CONCURRENCY).try_collect().await
    }

    /// Changes where a GatewayClient finds its server.
    pub async fn set_endpoint(&self, peer: Peer, endpoint: &Endpoint) -> Result<()> {
        let gateway = peer.manifests().pop().context("a peering without a gateway")?;
        let Endpoint { address, port } = endpoint;
        let patch = json!({"spec": {"endpoint": {"addresses": [address], "port": port}}});
        self.user.merge(&gateway, &patch).await
    }

    /// Heartbeats of kubelets and gateways, from now on or no more. A new cluster has none.
    pub fn set_heartbeats(&self, on: bool) {
        self.heartbeats.send_replace(on);
    }

    /// Starts pods outside of their nodes' pod CIDRs at that pace, each for 15 s.
    pub async fn run_outside_pods(&self, pace: Duration, end: Instant) -> Result<OutsidePods> {
        let client = User::Workloads.client(&self.server)?;
        let started = kubelets::run_outside_pods(client, self.size.nodes, &self.board, (pace, end));
        Ok(started.await)
    }

    /// An error with what the programs of weft logged last, and what simulated ones met.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let errors = self.board.errors().into_iter().take(5);
        let errors = errors.map(|(error, count)| format!("{count} x {error}"));
        let errors: Vec<String> = errors.collect();
        let logs = [&self.controller, &self.ipam].map(Running::last_lines).join("\n");
        error.context(format!("simulated programs: {errors:?}\n{logs}\nnot reached"))
    }
}

impl Running {
    fn start(server: &ApiServer, dir: &Path, user: User, arguments: &[&str]) -> Result<Self> {
        let name = if user == User::Ipam { "ipam" } else { "fabric-controller" };
        let program = bin_dir()?.join(name);
        let kubeconfig = user.kubeconfig(server).display().to_string();
        let common = ["--kubernetes", "--kubeconfig", &kubeconfig, "--liqo-namespace", "liqo"];
        let arguments = common.iter().chain(arguments).map(|argument| (*argument).to_owned());
        let log = dir.join(format!("{name}.log"));
        let child = start_program(&program, &arguments.collect::<Vec<_>>(), &log);
        Ok(Self { child, log })
    }

    fn last_lines(&self) -> String {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Defines Liqo's kinds and weft's.
pub(crate) fn define_kinds(server: &ApiServer) -> Result<()> {
    let all = crds::liqo().into_iter().chain(crds::weft()).map(|crd| json!(crd));
    let list = json!({"apiVersion": "v1", "kind": "List", "items": all.collect::<Vec<_>>()});
    let run = |arguments: &[&str]| {
        let done = server.kubectl(arguments, &list.to_string());
        done.map(drop).map_err(|error| anyhow::anyhow!("kubectl {arguments:?}: {error}"))
    };
    run(&["apply", "--server-side", "-f", "-"])?;
    run(&["wait", "--for=condition=Established", "--timeout=60s", "-f", "-"])
}

/// Installs the gateways' templates as the chart does: the built-in ones are for clusters without.
fn install_templates(server: &ApiServer) -> Result<()> {
    for template in [WIREGUARD_SERVER, WIREGUARD_CLIENT] {
        let arguments = ["apply", "--server-side", "-n", labels::LIQO_NAMESPACE, "-f", "-"];
        let done = server.kubectl(&arguments, template);
        done.map_err(|error| anyhow::anyhow!("cannot install a template: {error}"))?;
    }
    Ok(())
}

async fn apply_cluster(user: &Writer, nodes: usize) -> Result<()> {
    let (nodes, others): (Vec<Value>, Vec<Value>) =
        cluster(nodes).into_iter().partition(|object| object["kind"] == "Node");
    for object in others {
        user.apply(&object).await?;
    }
    let nodes = nodes.iter().map(|node| async move {
        user.apply(node).await?;
        user.merge_status(node, &node["status"]).await
    });
    stream::iter(nodes).buffer_unordered(CONCURRENCY).try_collect().await
}

fn start_kubelets(
    server: &Arc<ApiServer>,
    nodes: usize,
    board: &Board,
    heartbeats: &watch::Sender<bool>,
    tasks: &mut JoinSet<()>,
) -> Result<()> {
    let (ready, pods) = mpsc::unbounded_channel();
    let kubelet = User::Kubelet.client(server)?;
    tasks.spawn(kubelets::run_pods(kubelet, nodes, board.clone(), ready));
    let kubelet = User::Kubelet.client(server)?;
    tasks.spawn(kubelets::run_heartbeats(kubelet, nodes, board.clone(), heartbeats.subscribe()));
    let gateways = run_gateways(Arc::clone(server), pods, board.clone(), heartbeats.subscribe());
    tasks.spawn(gateways);
    Ok(())
}

/// Runs a gateway in every pod that is Ready.
async fn run_gateways(
    server: Arc<ApiServer>,
    mut pods: mpsc::UnboundedReceiver<Peer>,
    board: Board,
    heartbeats: watch::Receiver<bool>,
) {
    let mut gateways = JoinSet::new();
    while let Some(peer) = pods.recv().await {
        let store = User::Gateway(peer).store(&server);
        let Some(store) = board.check("gateway", store) else { continue };
        let (board, heartbeats) = (board.clone(), heartbeats.clone());
        gateways.spawn(Gateway { peer, store, board, heartbeats }.run());
    }
}
