//! The controller against real directories and an ipam that answers over a real socket.
//!
//! ```text
//! manifests/ --watch--> controller --gRPC--> ipam (in this process, on DIR/ipam.sock)
//!                           |
//!                           +--> run/published/, state/
//! ```

#![allow(clippy::unwrap_used)]

mod changes;
mod failures;
mod ipam;
mod probes;
mod program;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use fabric_api::fabric::{FabricRecord, GatewayConfig, NodeConfig, NodeConfigStatus, Records};
use fabric_controller::control::Controller;
use fabric_controller::grants::Ipam;
use fabric_index::Settings;
use fabric_store::{Kind, Object, ObjectRef, Store, StoreArgs};
use futures::FutureExt as _;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::ipam::FakeIpam;

struct Cluster {
    dir: TempDir,
    store: Store,
    ipam: FakeIpam,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Cluster {
    /// Nothing runs yet, but the cluster's own manifests are there.
    fn new(id: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("manifests")).unwrap();
        let ipam = FakeIpam::new(dir.path().join("ipam.sock"));
        let store = Store::open(&args(&dir)).unwrap();
        let cluster = Self { dir, store, ipam, running: None };
        cluster.write("cluster.yaml", &cluster_manifests(id));
        cluster
    }

    async fn started(id: &str) -> Self {
        let mut cluster = Self::new(id);
        cluster.ipam.start();
        cluster.start();
        cluster
    }

    fn start(&mut self) {
        let ipam = Ipam::new(&self.ipam.address(), None).unwrap();
        let settings = Settings { node: Some("n1".to_owned()), ..Settings::default() };
        let store = Store::open(&args(&self.dir)).unwrap();
        let controller = Controller::new(store, ipam, settings).unwrap();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(controller.run(async {
            stopped.await.ok();
        }));
        self.running = Some((stop, task));
    }

    async fn stop(&mut self) {
        let (stop, task) = self.running.take().unwrap();
        stop.send(()).unwrap();
        task.await.unwrap();
    }

    fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    fn write(&self, file: &str, text: &str) {
        let swap = self.path("manifests").join(format!(".{file}"));
        fs::write(&swap, text).unwrap();
        fs::rename(swap, self.path("manifests").join(file)).unwrap();
    }

    fn remove(&self, file: &str) {
        fs::remove_file(self.path("manifests").join(file)).unwrap();
    }

    fn gateway(&self, peer: &str, name: &str) -> Option<GatewayConfig> {
        let reference = ObjectRef::new(Kind::GatewayConfig, &format!("liqo-tenant-{peer}"), name);
        at_once(self.store.get(&reference)).unwrap().and_then(|object| object.try_into().ok())
    }

    fn node(&self, name: &str) -> Option<NodeConfig> {
        let reference = ObjectRef::new(Kind::NodeConfig, "", name);
        at_once(self.store.get(&reference)).unwrap().and_then(|object| object.try_into().ok())
    }

    /// Reports as the node's agent does once it has read everything, with pods that send to all
    /// refused prefixes.
    fn acknowledge(&self, node: &str) {
        let Some(mut config) = self.node(node) else { return };
        let records = at_once(self.store.list(Kind::FabricRecord)).unwrap();
        let records = records.into_iter().filter_map(|record| FabricRecord::try_from(record).ok());
        let records: Records<FabricRecord> = records.collect();
        config.status = Some(NodeConfigStatus {
            applied_generation: config.metadata.generation.unwrap(),
            records: records.version(),
            refused: Some(Vec::new()),
            ..NodeConfigStatus::default()
        });
        at_once(self.store.put_status(&config.into())).unwrap();
    }

    fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Object> {
        at_once(self.store.get(&ObjectRef::new(kind, namespace, name))).unwrap()
    }

    fn problems(&self) -> Vec<String> {
        at_once(self.store.problems()).iter().map(ToString::to_string).collect()
    }

    /// Every file that weft wrote, with the time of that and its content.
    fn written(&self) -> Vec<(PathBuf, SystemTime, String)> {
        let mut files = Vec::new();
        let mut folders = vec![self.path("run"), self.path("state")];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let at = fs::metadata(&path).unwrap().modified().unwrap();
                    files.push((path.clone(), at, fs::read_to_string(path).unwrap()));
                }
            }
        }
        files.sort();
        files
    }
}

/// Waits until it is so, and returns how long that took.
async fn until(what: &str, condition: impl Fn() -> bool) -> Duration {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(10), "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    began.elapsed()
}

fn args(dir: &TempDir) -> StoreArgs {
    let [manifests, run, state] = ["manifests", "run", "state"].map(|name| dir.path().join(name));
    StoreArgs::directories(Some(manifests), run, Some(state))
}

/// A directory answers at once.
fn at_once<T>(answer: impl Future<Output = T>) -> T {
    answer.now_or_never().unwrap()
}

fn cluster_manifests(id: &str) -> String {
    format!(
        "\
apiVersion: v1
kind: ConfigMap
metadata: {{name: liqo-clusterid-configmap, namespace: liqo}}
data: {{CLUSTER_ID: {id}}}
---
apiVersion: ipam.liqo.io/v1alpha1
kind: Network
metadata:
  name: pod-cidr
  namespace: liqo
  labels:
    ipam.liqo.io/network-type: pod-cidr
    ipam.liqo.io/network-not-remapped: \"true\"
    ipam.liqo.io/network-shared: \"true\"
spec: {{cidr: 10.200.0.0/16}}
---
apiVersion: v1
kind: Node
metadata: {{name: n1}}
spec: {{podCIDR: 10.200.1.0/24, podCIDRs: [10.200.1.0/24]}}
status:
  addresses: [{{type: InternalIP, address: 192.0.2.11}}]
"
    )
}

fn external_network(cidr: &str) -> String {
    format!(
        "\
apiVersion: ipam.liqo.io/v1alpha1
kind: Network
metadata:
  name: external-cidr
  namespace: liqo
  labels: {{ipam.liqo.io/network-type: external-cidr, ipam.liqo.io/network-not-remapped: \"true\"}}
spec: {{cidr: {cidr}}}
"
    )
}

/// A peering in which this cluster is the client, with a key that is made here.
fn client_of(peer: &str, port: u16) -> String {
    format!(
        "\
apiVersion: v1
kind: Namespace
metadata:
  name: liqo-tenant-{peer}
  labels: {{liqo.io/remote-cluster-id: {peer}, liqo.io/tenant-namespace: \"true\"}}
---
apiVersion: networking.liqo.io/v1beta1
kind: Configuration
metadata:
  name: {peer}
  namespace: liqo-tenant-{peer}
  labels: {{liqo.io/remote-cluster-id: {peer}}}
spec:
  remote:
    cidr:
      pod: 10.200.0.0/16
      external: [10.70.0.0/16]
---
apiVersion: networking.liqo.io/v1beta1
kind: PublicKey
metadata:
  name: gw-publickey
  namespace: liqo-tenant-{peer}
  labels: {{liqo.io/remote-cluster-id: {peer}}}
spec:
  publicKey: SJbnWw47WiNBxWI4qjL/kxk/kpfvFCwKHSkixFgTt2Q=
---
apiVersion: networking.liqo.io/v1beta1
kind: GatewayClient
metadata:
  name: client
  namespace: liqo-tenant-{peer}
  labels: {{liqo.io/remote-cluster-id: {peer}}}
spec:
  mtu: 1340
  endpoint:
    addresses: [192.0.2.20]
    port: {port}
    protocol: UDP
"
    )
}
