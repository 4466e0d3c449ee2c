//! Simulated kubelets and controllers of Kubernetes: pods of gateways, heartbeats of nodes, other pods.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use fabric_api::labels;
use futures::stream::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::board::Board;
use crate::manifests::{Peer, SHOP, node_name, pod_address};
use crate::users::Writer;

/// Between two reports of a node whose status does not change otherwise.
const NODE_STATUS: Duration = Duration::from_secs(300);
const LEASE: Duration = Duration::from_secs(10);
/// Kubelets that write at a time.
const CONCURRENCY: usize = 16;
/// Time that a pod which is no gateway runs.
const POD_LIFE: Duration = Duration::from_secs(15);
/// First /24 of the pod CIDR that is no node's.
const OUTSIDE: usize = 768;
const OUTSIDE_LEN: usize = 250 * 200;

/// Makes a pod of each gateway's Deployment, and reports the peer once the pod is Ready.
pub(crate) async fn run_pods(
    client: Client,
    nodes: usize,
    board: Board,
    ready: mpsc::UnboundedSender<Peer>,
) {
    let selection =
        watcher::Config::default().labels(&format!("{}={}", labels::COMPONENT, labels::GATEWAY));
    let deployments: Api<Deployment> = Api::all(client.clone());
    let mut events = watcher(deployments, selection).boxed();
    let (mut seen, mut tasks) = (BTreeSet::new(), JoinSet::new());
    let turns = Arc::new(Semaphore::new(CONCURRENCY));
    while let Some(event) = events.next().await {
        let deployment = match event {
            Ok(Event::Apply(deployment) | Event::InitApply(deployment)) => deployment,
            Ok(_) => continue,
            Err(error) => {
                board.failed("kubelet", &error.into());
                sleep(Duration::from_millis(200)).await;
                continue;
            }
        };
        let namespace = deployment.metadata.namespace.clone().unwrap_or_default();
        let Some(peer) = Peer::of_namespace(&namespace).filter(|peer| seen.insert(*peer)) else {
            continue;
        };
        let (writer, board, ready) = (Writer(client.clone()), board.clone(), ready.clone());
        let turns = Arc::clone(&turns);
        tasks.spawn(async move {
            let _turn = turns.acquire().await;
            while board.check("kubelet", run_pod(&writer, peer, nodes).await).is_none() {
                sleep(Duration::from_millis(200)).await;
            }
            board.pod_ready(peer, Instant::now());
            // There is no receiver any more while all ends.
            let _ = ready.send(peer);
        });
    }
}

async fn run_pod(writer: &Writer, peer: Peer, nodes: usize) -> Result<()> {
    let (namespace, gateway) = (peer.namespace(), peer.gateway());
    let node = peer.0 % nodes;
    let host = u8::try_from(10 + peer.0 / nodes).unwrap_or(u8::MAX);
    let ip = pod_address(node, host).to_string();
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("gw-{gateway}-0"), "namespace": namespace, "labels": {
            labels::REMOTE_CLUSTER_ID: peer.to_string(), labels::COMPONENT: labels::GATEWAY,
            labels::GATEWAY_NAME: gateway, labels::GATEWAY_NAMESPACE: namespace,
            labels::ACTIVE: "true"}},
        "spec": {"nodeName": node_name(node), "serviceAccountName": format!("gw-{gateway}"),
            "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "gateway", "image": "gateway"}]}});
    writer.apply(&pod).await?;
    let conditions = json!([{"type": "Ready", "status": "True"}]);
    let status = json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
        "conditions": conditions});
    writer.merge_status(&pod, &status).await?;
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": format!("gw-{gateway}"), "namespace": namespace}});
    let status = json!({"replicas": 1, "readyReplicas": 1, "availableReplicas": 1,
        "updatedReplicas": 1});
    writer.merge_status(&deployment, &status).await
}

/// Renews Leases and the statuses of Nodes, in turn, at the pace of that many kubelets.
pub(crate) async fn run_heartbeats(
    client: Client,
    nodes: usize,
    board: Board,
    on: watch::Receiver<bool>,
) {
    let writer = Writer(client);
    let count = u32::try_from(nodes).unwrap_or(u32::MAX);
    tokio::join!(
        in_turn(NODE_STATUS / count, nodes, &on, |node| {
            let (writer, board) = (&writer, &board);
            async move { board.check("kubelet", renew_status(writer, node).await) }
        }),
        in_turn(LEASE / count, nodes, &on, |node| {
            let (writer, board) = (&writer, &board);
            async move { board.check("kubelet", renew_lease(writer, node).await) }
        }),
    );
}

async fn in_turn<T>(
    pace: Duration,
    nodes: usize,
    on: &watch::Receiver<bool>,
    beat: impl Fn(usize) -> T,
) where
    T: Future<Output = Option<()>>,
{
    let mut ticks = interval(pace);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for node in (0..nodes).cycle() {
        ticks.tick().await;
        let is_on = *on.borrow();
        if is_on {
            beat(node).await;
        }
    }
}

async fn renew_status(writer: &Writer, node: usize) -> Result<()> {
    let object = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node_name(node)}});
    let now = format!("{:.0}", Timestamp::now());
    let condition = json!({"type": "Ready", "status": "True", "reason": "KubeletReady",
        "lastHeartbeatTime": now});
    writer.merge_status(&object, &json!({"conditions": [condition]})).await
}

async fn renew_lease(writer: &Writer, node: usize) -> Result<()> {
    let now = format!("{:.6}", Timestamp::now());
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": node_name(node), "namespace": "kube-node-lease"},
        "spec": {"holderIdentity": node_name(node), "leaseDurationSeconds": 40, "renewTime": now}});
    writer.apply(&lease).await
}

/// Pods that run outside the pod CIDRs of their nodes. They end early with this value.
#[derive(Debug)]
pub struct OutsidePods {
    pub started: usize,
    tasks: JoinSet<()>,
}

impl OutsidePods {
    /// Waits until all of them are deleted.
    pub async fn gone(mut self) {
        while self.tasks.join_next().await.is_some() {}
    }
}

/// Starts pods outside the pod CIDRs of their nodes at this pace, each for a while, until `end`.
pub(crate) async fn run_outside_pods(
    client: Client,
    nodes: usize,
    board: &Board,
    (pace, end): (Duration, Instant),
) -> OutsidePods {
    let writer = Writer(client);
    let (mut ticks, mut tasks) = (interval(pace), JoinSet::new());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut started = 0;
    while Instant::now() < end {
        ticks.tick().await;
        let (writer, board, number) = (writer.clone(), board.clone(), started);
        tasks.spawn(async move {
            let pod = outside_pod(number, nodes);
            board.check("workloads", start_pod(&writer, &pod, number).await);
            sleep(POD_LIFE).await;
            board.check("workloads", writer.delete(&pod).await);
        });
        started += 1;
    }
    OutsidePods { started, tasks }
}

fn outside_pod(number: usize, nodes: usize) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("pod-{number}"), "namespace": SHOP},
        "spec": {"nodeName": node_name(number % nodes), "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "shop", "image": "shop"}]}})
}

async fn start_pod(writer: &Writer, pod: &Value, number: usize) -> Result<()> {
    let (at, host) = (number % OUTSIDE_LEN / 200, number % 200 + 1);
    let ip = pod_address(OUTSIDE + at, u8::try_from(host).unwrap_or(1)).to_string();
    writer.apply(pod).await?;
    let conditions = json!([{"type": "Ready", "status": "True"}]);
    let status = json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
        "conditions": conditions});
    writer.merge_status(pod, &status).await
}
