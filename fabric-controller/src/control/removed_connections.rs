//! Connections that were removed while their gateways run.
//!
//! A gateway finds that within two seconds and writes its Connection again. Until then the peering
//! remains as it was, or nodes would refuse its new flows for that time.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_api::fabric::GatewayConfig;
use fabric_api::networking::Connection;
use fabric_index::Index;
use fabric_store::{Kind, Object, ObjectRef};
use tokio::time::Instant;

/// Longer than a gateway takes to write it again.
const GRACE: Duration = Duration::from_secs(3);

/// Connections that are gone from the store and still in the index, with the end of that.
#[derive(Debug, Default)]
pub(super) struct RemovedConnections(BTreeMap<ObjectRef, Instant>);

impl RemovedConnections {
    /// Records a removal; returns whether the index is to have the object for a while.
    pub(super) fn hold(&mut self, removed: &ObjectRef, index: &Index, now: Instant) -> bool {
        let is_held = index.typed(removed).is_some_and(|connection| is_expected(connection, index));
        if is_held {
            self.0.entry(removed.clone()).or_insert(now + GRACE);
        }
        is_held
    }

    /// Forgets the removal of an object that is there again.
    pub(super) fn restored(&mut self, object: &Object) {
        if object.kind() == Kind::Connection {
            self.0.remove(&object.reference());
        }
    }

    pub(super) fn next_check(&self) -> Option<Instant> {
        self.0.values().min().copied()
    }

    /// Returns those whose gateways have not written them again in time.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<ObjectRef> {
        let due = self.0.iter().filter(|(_, end)| **end <= now);
        let due: Vec<_> = due.map(|(connection, _)| connection.clone()).collect();
        self.0.retain(|_, end| *end > now);
        due
    }
}

/// As in Liqo, a gateway has a Connection while it has a config with the peer's key.
fn is_expected(connection: &Connection, index: &Index) -> bool {
    let name = connection.spec.gateway_ref.name.clone().unwrap_or_default();
    let namespace = connection.metadata.namespace.clone();
    let config = ObjectRef { kind: Kind::GatewayConfig, namespace, name };
    let config = index.typed::<GatewayConfig>(&config);
    config.is_some_and(|config| {
        config.metadata.deletion_timestamp.is_none() && config.spec.peer_public_key.is_some()
    })
}
