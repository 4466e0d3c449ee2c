//! Objects that weft publishes, as their readers see them: the one place that depends on which these are.
//!
//! Everything else asks by meaning: which peerings a node has all of, which endpoint a gateway has, and
//! how either acknowledges.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use fabric_api::fabric::{
    GatewayConfig, GatewayConfigStatus, NodeConfig, NodeConfigStatus, NodePeering,
    OVERLAY_PROBE_PORT, Role,
};
use fabric_store::{Event, Kind, Object, ObjectRef, Store, Watch};

use crate::manifests::Endpoint;

/// API group of what the controller publishes for agents and gateways.
pub const GROUP: &str = "fabric.weft.dev";

/// State that a route-agent has read.
pub(crate) struct AgentView {
    watch: Watch,
    config: Option<NodeConfig>,
}

/// State that a gateway has read.
pub(crate) struct GatewayView {
    watch: Watch,
    config: Option<GatewayConfig>,
}

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
        Ok(Self { watch: store.follow(&own, &[])?, config: None })
    }

    /// Waits for the next change. Cancel safe.
    pub(crate) async fn changed(&mut self) {
        loop {
            match self.watch.next().await {
                Event::Applied(object) => {
                    if let Object::NodeConfig(config) = *object {
                        self.config = Some(config);
                        return;
                    }
                }
                Event::Deleted(_) | Event::Problems(_) | Event::Synced => {}
            }
        }
    }

    /// Peerings of which the node has all: prefixes, MTU and the addresses of the gateway. By cluster
    /// ID, each with whether it is connected.
    pub(crate) fn peerings(&self) -> BTreeMap<String, bool> {
        let all = self.config.iter().flat_map(|config| &config.spec.peerings);
        let whole = all.filter(|peering| is_whole(peering));
        whole.map(|peering| (peering.peer_cluster_id.clone(), peering.connected)).collect()
    }

    /// Object whose status acknowledges all that was read; `None` before anything was.
    pub(crate) fn acknowledgement(&self) -> Option<Object> {
        let mut config = self.config.clone()?;
        let applied_generation = config.metadata.generation.unwrap_or_default();
        let refused = Some(Vec::new());
        config.status =
            Some(NodeConfigStatus { applied_generation, refused, ..Default::default() });
        Some(config.into())
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
        Ok(Self { watch, config: None })
    }

    /// Waits for the next change. Cancel safe.
    pub(crate) async fn changed(&mut self) {
        loop {
            match self.watch.next().await {
                Event::Applied(object) => {
                    if let Object::GatewayConfig(config) = *object {
                        self.config = Some(config);
                        return;
                    }
                }
                Event::Deleted(_) | Event::Problems(_) | Event::Synced => {}
            }
        }
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
        let mut config = self.config.clone()?;
        config.status = Some(GatewayConfigStatus {
            applied_generation: config.metadata.generation.unwrap_or_default(),
            mtu: 1_420,
            overlay_probe_port: Some(OVERLAY_PROBE_PORT),
            ..Default::default()
        });
        Some(config.into())
    }
}
