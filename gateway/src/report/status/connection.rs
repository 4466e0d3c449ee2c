//! The Connection of one gateway: written, made sure of, and taken back in the end.

use std::future::pending;
use std::time::Duration;

use anyhow::Context;
use fabric_api::fabric::Role;
use fabric_api::labels::REMOTE_CLUSTER_ID;
use fabric_api::networking::{
    Connection, ConnectionLatency, ConnectionSpec, ConnectionStatus, ConnectionValue,
};
use fabric_store::{Event, Kind, Object, ObjectRef, Store, StoreError, Watch};
use gateway_config::desired::Desired;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use reachability::connection::latency_text;
use tokio::time::Instant;

use super::{COUNTERS, LOOK};
use crate::state::View;

/// Minimum age difference of a latency worth writing: Liqo's `--ping-update-status-interval`.
const LATENCY: SignedDuration = SignedDuration::from_secs(10);
/// While pods change there may be two gateways: one that is not connected leaves the value of the
/// other in place for as long as that one keeps it up to date.
const STALE: Duration = Duration::from_secs(30);

/// Keeps the Connection at what this gateway sees.
pub(super) struct OwnConnection {
    store: Store,
    /// Name of the gateway.
    name: ObjectRef,
    /// In Kubernetes, what others make of it. A directory is looked at often enough instead.
    watch: Option<Watch>,
    /// As it was wanted last, and as it was written.
    written: Option<(Connection, Connection)>,
    /// The value that the watch last reported, and when.
    seen: Option<(ConnectionValue, Instant)>,
    /// Time at which its removal by another program was observed.
    lost_at: Option<Instant>,
    /// There is none, as far as this gateway is concerned.
    removed: bool,
    /// Time at which it was last restored.
    ensured_at: Instant,
}

impl OwnConnection {
    pub(super) fn new(store: Store, name: ObjectRef) -> anyhow::Result<Self> {
        let own = own_name(&name);
        let watch = store.api_server().map(|_| store.follow(&own, &[])).transpose();
        Ok(Self {
            watch: watch.context("cannot watch the Connection")?,
            store,
            name,
            written: None,
            seen: None,
            lost_at: None,
            removed: false,
            ensured_at: Instant::now(),
        })
    }

    /// Returns when something was done to it, here or elsewhere. Cancel safe.
    pub(super) async fn changed(&mut self) {
        let Some(watch) = &mut self.watch else { return pending().await };
        let now = Instant::now;
        match watch.next().await {
            Event::Applied(object) => {
                let Object::Connection(connection) = object else { return };
                let value = connection.status.as_ref().map(|status| status.value);
                self.seen = Some((value.unwrap_or_default(), now()));
            }
            Event::Deleted(_) => {
                (self.written, self.seen, self.lost_at) = (None, None, Some(now()));
            }
            Event::Problems(_) | Event::Synced => {}
        }
    }

    pub(super) async fn report(&mut self, desired: &Desired, view: &View) -> anyhow::Result<()> {
        let wanted = connection(desired, &self.name);
        let status = connection_status(view);
        let known = self.written.as_ref().filter(|(before, _)| *before == wanted);
        if let Some((_, stored)) = known
            && !is_due(stored.status.as_ref(), &status)
        {
            return self.ensure(stored.clone()).await;
        }
        // The remover of the Connection may be at removing the gateway, too.
        if self.lost_at.is_some_and(|at| at.elapsed() < LOOK) {
            return Ok(());
        }
        self.removed = false;
        let stored = self.store.put(&wanted.clone().into()).await;
        let stored = stored.context("cannot write the Connection")?;
        let mut stored = Connection::try_from(stored)
            .map_err(|object| anyhow::anyhow!("stored a Connection, got {}", object.reference()))?;
        stored.status = Some(status);
        self.put_status(stored.clone()).await?;
        self.written = Some((wanted, stored));
        Ok(())
    }

    /// Restores the status: another writer that takes this gateway for dead may be wrong.
    async fn ensure(&mut self, stored: Connection) -> anyhow::Result<()> {
        // A file is read for it, and written every 10 s while there is a latency.
        let interval = if self.watch.is_none() { COUNTERS } else { LOOK };
        if self.ensured_at.elapsed() < interval || !self.may_be_wrong(stored.status.as_ref()) {
            return Ok(());
        }
        self.ensured_at = Instant::now();
        // No watch reports that its file is gone.
        if self.watch.is_none() {
            let put = self.store.put(&stored.clone().into()).await;
            put.context("cannot write the Connection")?;
        }
        self.put_status(stored).await
    }

    fn may_be_wrong(&self, written: Option<&ConnectionStatus>) -> bool {
        if self.watch.is_none() {
            return true;
        }
        let (Some((seen, since)), Some(written)) = (self.seen, written) else { return false };
        let is_sure = written.value == ConnectionValue::Connected || since.elapsed() >= STALE;
        seen != written.value && is_sure
    }

    pub(super) async fn remove(&mut self) -> anyhow::Result<()> {
        if self.removed {
            return Ok(());
        }
        self.written = None;
        let removed = self.store.delete(&own_name(&self.name)).await;
        removed.context("cannot remove the Connection")?;
        self.removed = true;
        Ok(())
    }

    /// Resets the status: nobody shall take a gateway that is gone for a connected one. Its
    /// successor may have written something since.
    pub(super) async fn report_end(&mut self) -> anyhow::Result<()> {
        let Some((_, mut connection)) = self.written.take() else { return Ok(()) };
        connection.status = Some(connection_status(&View::start()));
        let put = self.store.put_status_if_last(&connection.into()).await;
        put.map(drop).context("cannot write the Connection's status")
    }

    /// Writes nothing if that is what is there. A Connection that is gone is made again next time.
    async fn put_status(&mut self, connection: Connection) -> anyhow::Result<()> {
        let put = self.store.put_status(&connection.into()).await;
        if put.as_ref().is_err_and(StoreError::is_gone) {
            self.written = None;
        }
        put.map(drop).context("cannot write the Connection's status")
    }
}

/// Name of the Connection of a gateway.
fn own_name(gateway: &ObjectRef) -> ObjectRef {
    let namespace = gateway.namespace.as_deref().unwrap_or_default();
    ObjectRef::new(Kind::Connection, namespace, &format!("gw-{}", gateway.name))
}

/// The Connection without its status. Kinds and names in `gatewayRef` as Liqo writes them.
fn connection(desired: &Desired, name: &ObjectRef) -> Connection {
    let kind = match desired.role {
        Role::Server => "WgGatewayServer",
        Role::Client => "WgGatewayClient",
    };
    let gateway_ref = ObjectReference {
        api_version: Some(Kind::Connection.api_version().to_owned()),
        kind: Some(kind.to_owned()),
        name: Some(name.name.clone()),
        namespace: name.namespace.clone(),
        uid: Some(desired.gateway_uid.clone()),
        ..ObjectReference::default()
    };
    let spec = ConnectionSpec { type_: desired.role, gateway_ref };
    let mut connection = Connection::new(&format!("gw-{}", name.name), spec);
    connection.metadata.namespace = name.namespace.clone();
    connection.metadata.labels =
        Some([(REMOTE_CLUSTER_ID.to_owned(), desired.peer.to_string())].into());
    // So that it goes with its gateway, even if no program is left to remove it.
    connection.metadata.owner_references = Some(vec![OwnerReference {
        api_version: Kind::GatewayServer.api_version().to_owned(),
        kind: kind.trim_start_matches("Wg").to_owned(),
        name: name.name.clone(),
        uid: desired.gateway_uid.clone(),
        ..OwnerReference::default()
    }]);
    connection
}

fn connection_status(view: &View) -> ConnectionStatus {
    let timestamp = view.latency_at.map(|at| format!("{at:.0}"));
    let latency = ConnectionLatency { value: latency_text(view.latency), timestamp };
    ConnectionStatus { value: view.value, latency: Some(latency) }
}

/// Returns whether `new` is worth writing: another value, or a latency that is 10 s newer.
fn is_due(old: Option<&ConnectionStatus>, new: &ConnectionStatus) -> bool {
    let Some(old) = old.filter(|old| old.value == new.value) else { return true };
    let time = |status: &ConnectionStatus| -> Option<Timestamp> {
        status.latency.as_ref()?.timestamp.as_ref()?.parse().ok()
    };
    match (time(old), time(new)) {
        // A clock that was set back must not keep a newer one from being written.
        (Some(old), Some(new)) => old > new || new.duration_since(old) >= LATENCY,
        (None, None) => false,
        (None, Some(_)) | (Some(_), None) => true,
    }
}

#[cfg(test)]
mod tests;
