//! Objects that weft publishes, as their readers see them: the one place that depends on which these are.
//!
//! Everything else queries by meaning: which peerings a node has all of, which endpoint a gateway has, and
//! how either acknowledges.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use fabric_api::fabric::{
    FabricRecord, GatewayConfig, GatewayConfigStatus, GatewayRecord, NodeConfig, NodeConfigStatus,
    NodePeering, OVERLAY_PROBE_PORT, RecordVersion, Records, Role,
};
use fabric_store::{Event, Kind, Object, ObjectRef, Store, Watch};

use crate::manifests::Endpoint;

/// API group of what the controller publishes for agents and gateways.
pub const GROUP: &str = "fabric.weft.dev";

/// State that a route-agent has read.
pub(crate) struct AgentView {
    watch: Watch,
    published: Option<NodeConfig>,
    records: Records<FabricRecord>,
    seen: Option<Seen>,
    /// Config with the status that acknowledges what was there in whole last.
    acknowledged: Option<NodeConfig>,
    peerings: BTreeMap<String, bool>,
}

/// State that a gateway has read.
pub(crate) struct GatewayView {
    watch: Watch,
    record_watch: Watch,
    published: Option<GatewayConfig>,
    records: Records<GatewayRecord>,
    seen: Option<Seen>,
    /// Version of the records in its status.
    acknowledged: Option<RecordVersion>,
    /// Config in whole, as it was when all records of a version were there last.
    config: Option<GatewayConfig>,
}

/// Identifies what a config is joined from: its uid, its generation, and the records. What follows from the
/// same again is not made again, or hundreds of programs on one machine would be what is measured.
type Seen = (Option<String>, Option<i64>, Option<RecordVersion>);

/// Fields that the Connection of a gateway repeats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GatewayIdentity {
    pub(crate) uid: String,
    pub(crate) role: Role,
}

impl AgentView {
    /// Watches as `route-agent` does.
    pub(crate) fn follow(store: &Store, node: &str) -> Result<Self> {
        let own = ObjectRef::new(Kind::NodeConfig, "", node);
        let watch = store.follow(&own, &[Kind::FabricRecord])?;
        Ok(Self {
            watch,
            published: None,
            records: Records::default(),
            seen: None,
            acknowledged: None,
            peerings: BTreeMap::new(),
        })
    }

    /// Waits for the next change. Cancel safe.
    pub(crate) async fn changed(&mut self) {
        loop {
            match self.watch.next().await {
                Event::Applied(object) => match FabricRecord::try_from(object) {
                    Ok(record) => self.records.insert(record),
                    Err(object) => self.published = NodeConfig::try_from(object).ok(),
                },
                Event::Deleted(gone) => self.records.remove(&gone.name),
                Event::Problems(_) | Event::Synced => continue,
            }
            if self.join() {
                return;
            }
        }
    }

    /// Returns true if there is something to acknowledge.
    fn join(&mut self) -> bool {
        let Some(own) = &self.published else { return false };
        let seen = (own.metadata.uid.clone(), own.metadata.generation, self.records.version());
        if self.seen.as_ref() == Some(&seen) {
            return false;
        }
        let Some(joined) = own.joined(&self.records) else { return false };
        let known = self.acknowledged.as_ref().and_then(|config| config.status.clone());
        let known = known.unwrap_or_default();
        let status = NodeConfigStatus {
            applied_generation: own.metadata.generation.unwrap_or_default(),
            records: seen.2.clone().or_else(|| known.records.clone()),
            refused: Some(Vec::new()),
            refuses_recorded: true,
            ..Default::default()
        };
        let is_new = known != status;
        self.seen = Some(seen);
        let whole = joined.spec.peerings.iter().filter(|peering| is_whole(peering));
        self.peerings =
            whole.map(|peering| (peering.peer_cluster_id.clone(), peering.connected)).collect();
        self.acknowledged = Some(NodeConfig { status: Some(status), ..own.clone() });
        is_new
    }

    /// Peerings of which the node has all: prefixes, MTU and the addresses of the gateway. By cluster
    /// ID, each with whether it is connected.
    pub(crate) fn peerings(&self) -> BTreeMap<String, bool> {
        self.peerings.clone()
    }

    /// Object whose status acknowledges all that was read; `None` before anything was.
    pub(crate) fn acknowledgement(&self) -> Option<Object> {
        self.acknowledged.clone().map(Object::from)
    }
}

fn is_whole(peering: &NodePeering) -> bool {
    !peering.prefixes.is_empty() && peering.mtu > 0 && peering.gateway.is_some()
}

impl GatewayView {
    /// Watches as `gateway` does, its Secret included.
    pub(crate) fn follow(store: &Store, namespace: &str, gateway: &str) -> Result<Self> {
        let own = ObjectRef::new(Kind::GatewayConfig, namespace, gateway);
        let mut watch = store.follow(&own, &[])?;
        watch.also(&ObjectRef::new(Kind::Secret, namespace, "gw-keys"));
        let record_watch = store.watch(&[Kind::GatewayRecord])?;
        let records = Records::default();
        let (seen, acknowledged) = (None, None);
        Ok(Self { watch, record_watch, published: None, records, seen, acknowledged, config: None })
    }

    /// Waits for the next change. Cancel safe.
    pub(crate) async fn changed(&mut self) {
        loop {
            tokio::select! {
                event = self.watch.next() => {
                    // Its Secret is none.
                    if let Event::Applied(object) = event
                        && let Ok(config) = GatewayConfig::try_from(object)
                    {
                        self.published = Some(config);
                    }
                }
                event = self.record_watch.next() => match event {
                    Event::Applied(object) => {
                        let record = GatewayRecord::try_from(object);
                        record.into_iter().for_each(|record| self.records.insert(record));
                    }
                    Event::Deleted(gone) => self.records.remove(&gone.name),
                    Event::Problems(_) | Event::Synced => {}
                }
            }
            if self.join() {
                return;
            }
        }
    }

    /// Returns true if there is something to apply or to acknowledge. A gateway whose config follows from
    /// records acknowledges none but those of another uid.
    fn join(&mut self) -> bool {
        let Some(own) = &self.published else { return false };
        let seen = (own.metadata.uid.clone(), own.metadata.generation, self.records.version());
        if self.seen.as_ref() == Some(&seen) {
            return false;
        }
        let Some(config) = own.joined(&self.records) else { return false };
        let is_new = self.config.as_ref().is_none_or(|known| {
            known.metadata.generation != config.metadata.generation || known.spec != config.spec
        });
        let is_whole = !own.spec.from_records;
        self.seen = Some(seen);
        self.config = Some(config);
        let is_wanted = |read: &RecordVersion| {
            let known = self.acknowledged.as_ref();
            is_whole || known.is_none_or(|known| known.uid != read.uid)
        };
        let read = self.records.version().filter(is_wanted).or_else(|| self.acknowledged.clone());
        let has_read_more = self.acknowledged != read;
        self.acknowledged = read;
        is_new || has_read_more
    }

    /// Endpoint of the server, if this is a client.
    pub(crate) fn endpoint(&self) -> Option<Endpoint> {
        let endpoint = self.config.as_ref()?.spec.endpoint.as_ref()?;
        let address = endpoint.addresses.first()?.clone();
        Some(Endpoint { address, port: endpoint.port })
    }

    /// Nodes that the gateway has all of, by name.
    pub(crate) fn nodes(&self) -> BTreeSet<String> {
        let nodes = self.config.iter().flat_map(|config| &config.spec.nodes);
        let whole = nodes.filter(|node| !node.prefixes.is_empty());
        whole.map(|node| node.name.clone()).collect()
    }

    /// `None` before the gateway can run: with the peer's key and remapped prefixes.
    pub(crate) fn identity(&self) -> Option<GatewayIdentity> {
        let spec = &self.config.as_ref()?.spec;
        let runs = spec.peer_public_key.is_some() && !spec.remaps.is_empty();
        runs.then(|| GatewayIdentity { uid: spec.gateway_uid.clone(), role: spec.role })
    }

    /// Object whose status acknowledges all that was read; `None` before anything was.
    pub(crate) fn acknowledgement(&self) -> Option<Object> {
        let config = self.config.as_ref()?;
        let mut own = self.published.clone()?;
        own.status = Some(GatewayConfigStatus {
            applied_generation: config.metadata.generation.unwrap_or_default(),
            mtu: 1_420,
            records: self.acknowledged.clone(),
            overlay_probe_port: Some(OVERLAY_PROBE_PORT),
            ..Default::default()
        });
        Some(own.into())
    }
}
