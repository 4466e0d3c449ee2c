//! A gateway whose config follows from records in a directory.

use std::time::Duration;

use fabric_api::fabric::{
    GatewayClusterRecord, GatewayConfigSpec, GatewayRecord, GatewayRecordSpec, NodeRecord,
    PeerPrefixes, Record as _, RecordVersion, digest,
};
use fabric_store::{Kind, ObjectRef, Store, StoreArgs};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::input::{Input, Sources, run};
use crate::test_config::config;

struct World {
    _dir: TempDir,
    store: Store,
}

struct Gateway {
    inputs: watch::Receiver<Input>,
    stop: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
}

impl World {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (run, state) = (dir.path().join("run"), dir.path().join("state"));
        let store = Store::open(&StoreArgs::directories(None, run, Some(state))).unwrap();
        Self { _dir: dir, store }
    }

    fn start(&self) -> Gateway {
        let name = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
        let (sender, inputs) = watch::channel(Input::default());
        let stop = CancellationToken::new();
        let sources = Sources { store: self.store.clone(), keep: None };
        let task = tokio::spawn(run(sources, name, sender, stop.clone()));
        Gateway { inputs, stop, task }
    }

    async fn put_own_part(&self) {
        let mut own = config();
        own.spec = own.spec.own_part();
        self.store.put(&own.into()).await.unwrap();
    }

    async fn put(&self, name: &str, spec: GatewayRecordSpec) -> GatewayRecord {
        let stored = self.store.put(&GatewayRecord::new(name, spec).into()).await.unwrap();
        GatewayRecord::try_from(stored).unwrap()
    }

    async fn put_nodes(&self, whole: &GatewayConfigSpec) -> Vec<GatewayRecord> {
        let mut records = Vec::new();
        for node in &whole.nodes {
            let node = NodeRecord {
                name: node.name.clone(),
                overlay: node.overlay,
                mac: node.mac.clone(),
                underlay: vec![node.underlay],
                prefixes: node.prefixes.clone(),
            };
            let name = GatewayRecord::name_of(&node.name);
            let spec = GatewayRecordSpec { node: Some(node), cluster: None };
            records.push(self.put(&name, spec).await);
        }
        records
    }

    async fn put_cluster(
        &self,
        whole: &GatewayConfigSpec,
        nodes: &[GatewayRecord],
    ) -> RecordVersion {
        let peer = |id: &str, prefix: &str| PeerPrefixes {
            peer_cluster_id: id.to_owned(),
            prefixes: vec![prefix.to_owned()],
        };
        let cluster = GatewayClusterRecord {
            digest: digest(nodes),
            pod_cidrs: whole.pod_cidrs.clone(),
            external_cidrs: whole.external_cidrs.clone(),
            ips: whole.ips.clone(),
            icmp_sources: whole.icmp_sources.clone(),
            peers: vec![peer("milan", "10.201.0.0/16"), peer("paris", &whole.egress[0])],
            egress: Vec::new(),
        };
        let spec = GatewayRecordSpec { cluster: Some(cluster), node: None };
        self.put(GatewayRecord::CLUSTER, spec).await.version().unwrap()
    }
}

impl Gateway {
    async fn until(&mut self, what: &str, holds: impl Fn(&Input) -> bool) -> Input {
        let found = tokio::time::timeout(Duration::from_secs(5), self.inputs.wait_for(holds));
        found.await.unwrap_or_else(|_| panic!("never {what}")).unwrap().clone()
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }
}

fn spec(input: &Input) -> Option<GatewayConfigSpec> {
    input.config.as_ref().map(|config| config.spec.clone())
}

#[tokio::test]
async fn own_part_waits_for_exactly_its_records() {
    let world = World::new();
    let mut whole = config().spec;
    world.put_own_part().await;
    let nodes = world.put_nodes(&whole).await;
    let mut gateway = world.start();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!gateway.inputs.borrow().synced, "a peering that waits is not gone");
    assert_eq!(spec(&gateway.inputs.borrow()), None);
    let first = world.put_cluster(&whole, &nodes).await;
    let input = gateway.until("joined", |input| input.records.as_ref() == Some(&first)).await;
    assert_eq!(spec(&input).as_ref(), Some(&whole));
    assert!(input.synced && input.is_good() && input.is_from_records);

    whole.nodes[1].prefixes.push("10.200.77.7/32".to_owned());
    let nodes = world.put_nodes(&whole).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_ne!(spec(&gateway.inputs.borrow()).as_ref(), Some(&whole), "of no version");
    let second = world.put_cluster(&whole, &nodes).await;
    let input = gateway.until("joined", |input| input.records.as_ref() == Some(&second)).await;
    assert_eq!(spec(&input).as_ref(), Some(&whole));
    gateway.end().await;
}

#[tokio::test]
async fn start_without_records_is_on_the_last_good_config() {
    let world = World::new();
    let whole = config().spec;
    world.put_own_part().await;
    let nodes = world.put_nodes(&whole).await;
    world.put_cluster(&whole, &nodes).await;
    let mut first = world.start();
    first.until("joined", |input| input.records.is_some()).await;
    first.end().await;
    let cluster = ObjectRef::new(Kind::GatewayRecord, "", GatewayRecord::CLUSTER);
    world.store.delete(&cluster).await.unwrap();
    let mut second = world.start();
    let input = second.until("started", |input| input.synced).await;
    assert_eq!((spec(&input), input.records), (Some(whole), None));
    second.end().await;
}

#[tokio::test]
async fn whole_config_needs_no_records() {
    let world = World::new();
    world.store.put(&config().into()).await.unwrap();
    let mut gateway = world.start();
    let input = gateway.until("started", |input| input.synced).await;
    assert_eq!((spec(&input), input.records), (Some(config().spec), None));
    assert!(!input.is_from_records);
    let nodes = world.put_nodes(&config().spec).await;
    let version = world.put_cluster(&config().spec, &nodes).await;
    gateway.until("acknowledged", |input| input.records.as_ref() == Some(&version)).await;
    gateway.end().await;
}
