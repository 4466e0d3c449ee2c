//! What the gateway reports: its Connection, as Liqo has it, and the status of its GatewayConfig.

use std::time::Duration;

use anyhow::Context;
use fabric_api::fabric::{GatewayConfig, GatewayConfigStatus, Role};
use fabric_api::labels::REMOTE_CLUSTER_ID;
use fabric_api::networking::{Connection, ConnectionLatency, ConnectionSpec, ConnectionStatus};
use fabric_store::{Kind, ObjectRef, Store, StoreError};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::connection::latency_text;
use crate::dataplane::{Plane, Running};
use crate::desired::Desired;
use crate::input::Input;
use crate::lane::{PeerState, Stats};
use crate::monitor::View;

/// How often counters are written while nothing else changes.
const COUNTERS: Duration = Duration::from_secs(5);
/// How much newer a latency has to be to be written: Liqo's `--ping-update-status-interval`.
const LATENCY: SignedDuration = SignedDuration::from_secs(10);
/// How often it is looked whether there is something to write, and whether what was written still
/// stands: who takes this gateway for dead says so in its Connection, and may be wrong.
const LOOK: Duration = Duration::from_secs(2);

/// What the reports are made of.
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub planes: watch::Receiver<Plane>,
    pub views: watch::Receiver<View>,
}

/// Reports until `stop`; then says that the connection is no longer there.
pub async fn run(
    store: Store,
    mut sources: Sources,
    name: ObjectRef,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut reporter = Reporter::new(store, name);
    loop {
        let (input, plane, view) = sources.take();
        let mut session = plane.running.as_ref().map(|running| running.lane.changes());
        session.iter_mut().for_each(watch::Receiver::mark_unchanged);
        let reported = tokio::select! {
            biased;
            () = stop.cancelled() => return reporter.say_goodbye(&input).await,
            reported = reporter.report(&input, &plane, &view, Timestamp::now()) => reported,
        };
        if let Err(error) = reported {
            tracing::warn!("cannot report: {error:#}");
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => {
                let input = sources.inputs.borrow().clone();
                return reporter.say_goodbye(&input).await;
            }
            changed = sources.changed() => changed?,
            // Where the peer is now is where a successor will look for it.
            () = changed(&mut session) => {}
            () = sleep(LOOK) => {}
        }
    }
}

impl Sources {
    fn take(&mut self) -> (Input, Plane, View) {
        let input = self.inputs.borrow_and_update().clone();
        let plane = self.planes.borrow_and_update().clone();
        let view = self.views.borrow_and_update().clone();
        (input, plane, view)
    }

    async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        tokio::select! {
            changed = self.inputs.changed() => changed,
            changed = self.planes.changed() => changed,
            changed = self.views.changed() => changed,
        }
    }
}

/// Returns when the peer moved, or there was a handshake.
async fn changed(session: &mut Option<watch::Receiver<PeerState>>) {
    let ended = match session {
        Some(session) => session.changed().await.is_err(),
        None => true,
    };
    if ended {
        std::future::pending().await
    }
}

struct Reporter {
    store: Store,
    name: ObjectRef,
    /// As it was wanted last, and as it is in the store.
    connection: Option<(Connection, Connection)>,
    /// There is none, as far as this gateway is concerned.
    removed: bool,
    written: Option<(String, GatewayConfigStatus)>,
    counters_at: Instant,
    /// When the Connection was last made sure of.
    ensured_at: Instant,
}

impl Reporter {
    fn new(store: Store, name: ObjectRef) -> Self {
        let now = Instant::now();
        let (connection, removed, written) = (None, false, None);
        Self { store, name, connection, removed, written, counters_at: now, ensured_at: now }
    }

    async fn report(
        &mut self,
        input: &Input,
        plane: &Plane,
        view: &View,
        now: Timestamp,
    ) -> anyhow::Result<()> {
        if let Some(config) = &input.config {
            self.report_config(config, input, plane, now).await?;
        }
        match input.desired.as_ref().filter(|desired| desired.peer_key.is_some()) {
            // Whoever reads Connected shall not find packets refused for a moment more, and whoever
            // reads that it is lost shall find them refused.
            Some(_) if view.is_connected() != is_open(plane) => Ok(()),
            Some(desired) => self.report_connection(desired, view).await,
            // As in Liqo: no key of the peer, no Connection.
            None if input.synced => self.remove_connection().await,
            None => Ok(()),
        }
    }

    async fn report_config(
        &mut self,
        config: &GatewayConfig,
        input: &Input,
        plane: &Plane,
        now: Timestamp,
    ) -> anyhow::Result<()> {
        let uid = config.metadata.uid.clone().unwrap_or_default();
        let before = match &self.written {
            Some((of, status)) if *of == uid => status.clone(),
            // What an earlier gateway wrote, above all where it last heard the peer.
            Some(_) | None => config.status.clone().unwrap_or_default(),
        };
        let problems = input.problems().chain(plane.problems.iter().cloned()).collect();
        let stats = plane.running.as_ref().map(|running| running.lane.snapshot());
        let status =
            gateway_status(&before, problems, plane.running.as_ref().zip(stats.as_ref()), now);
        let first = self.written.as_ref().is_none_or(|(of, _)| *of != uid);
        let counted = self.counters_at.elapsed() >= COUNTERS && before != status;
        if !(first || counted || differs(&before, &status)) {
            return Ok(());
        }
        let mut object = config.clone();
        object.status = Some(status.clone());
        let put = self.store.put_status(&object.into()).await;
        put.context("cannot write the GatewayConfig's status")?;
        self.written = Some((uid, status));
        self.counters_at = Instant::now();
        Ok(())
    }

    async fn report_connection(&mut self, desired: &Desired, view: &View) -> anyhow::Result<()> {
        let wanted = connection(desired, &self.name);
        let status = connection_status(view);
        let known = self.connection.as_ref().filter(|(before, _)| *before == wanted);
        if let Some((_, stored)) = known
            && !is_due(stored.status.as_ref(), &status)
        {
            if self.ensured_at.elapsed() >= LOOK {
                self.ensured_at = Instant::now();
                self.put_connection_status(stored.clone()).await?;
            }
            return Ok(());
        }
        self.removed = false;
        let stored = self.store.put(&wanted.clone().into()).await;
        let stored = stored.context("cannot write the Connection")?;
        let mut stored = Connection::try_from(stored)
            .map_err(|object| anyhow::anyhow!("stored a Connection, got {}", object.reference()))?;
        stored.status = Some(status);
        self.put_connection_status(stored.clone()).await?;
        self.connection = Some((wanted, stored));
        self.ensured_at = Instant::now();
        Ok(())
    }

    async fn remove_connection(&mut self) -> anyhow::Result<()> {
        if self.removed || (self.written.is_none() && self.connection.is_none()) {
            return Ok(());
        }
        self.connection = None;
        let removed = self.store.delete(&self.connection_name()).await;
        removed.context("cannot remove the Connection")?;
        self.removed = true;
        Ok(())
    }

    /// Nobody shall take a gateway that is gone for a connected one. Where the config is gone, too,
    /// the peering is, and its Connection goes with it.
    async fn say_goodbye(&mut self, input: &Input) -> anyhow::Result<()> {
        if input.synced && input.config.is_none() {
            return self.remove_connection().await;
        }
        let Some((_, mut connection)) = self.connection.take() else { return Ok(()) };
        connection.status = Some(connection_status(&View::start()));
        self.put_connection_status(connection).await
    }

    /// Writes nothing if that is what is there. A Connection that is gone is made again next time.
    async fn put_connection_status(&mut self, connection: Connection) -> anyhow::Result<()> {
        let put = self.store.put_status(&connection.into()).await;
        if put.as_ref().is_err_and(StoreError::is_gone) {
            self.connection = None;
        }
        put.map(drop).context("cannot write the Connection's status")
    }

    fn connection_name(&self) -> ObjectRef {
        let namespace = self.name.namespace.as_deref().unwrap_or_default();
        ObjectRef::new(Kind::Connection, namespace, &format!("gw-{}", self.name.name))
    }
}

fn is_open(plane: &Plane) -> bool {
    plane.running.as_ref().is_some_and(|running| running.open)
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
    // So that it goes with its gateway, whoever still runs to remove it.
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

/// Whether `new` is worth writing: another value, or a latency that is 10 s newer.
fn is_due(old: Option<&ConnectionStatus>, new: &ConnectionStatus) -> bool {
    let Some(old) = old.filter(|old| old.value == new.value) else { return true };
    let time = |status: &ConnectionStatus| -> Option<Timestamp> {
        status.latency.as_ref()?.timestamp.as_ref()?.parse().ok()
    };
    match (time(old), time(new)) {
        // A clock that was set back must not keep a newer one from being told.
        (Some(old), Some(new)) => old > new || new.duration_since(old) >= LATENCY,
        (None, None) => false,
        (None, Some(_)) | (Some(_), None) => true,
    }
}

/// The status after `before`. What is no longer known stays as it was: a gateway that starts anew
/// goes by it.
fn gateway_status(
    before: &GatewayConfigStatus,
    problems: Vec<String>,
    running: Option<(&Running, &Stats)>,
    now: Timestamp,
) -> GatewayConfigStatus {
    let mut status = GatewayConfigStatus { problems, ..before.clone() };
    let Some((running, stats)) = running else { return status };
    status.applied_generation = running.desired.generation;
    status.mtu = running.mtu;
    status.mtu_bound = Some(running.mtu_bound).filter(|_| running.mtu > 0);
    status.path_mtu = running.path_mtu;
    status.listen_port = running.port;
    status.received_bytes = stats.counters.rx_bytes;
    status.transmitted_bytes = stats.counters.tx_bytes;
    if stats.peer.last_authentic.is_some() {
        status.peer_endpoint = stats.peer.endpoint.map(|peer| canonical(peer).to_string());
    }
    if let Some(unix) = stats.last_handshake_unix() {
        let unix = i64::try_from(unix).unwrap_or(i64::MAX);
        status.last_handshake =
            Timestamp::from_second(unix).ok().filter(|at| *at <= now).map(|at| format!("{at:.0}"));
    }
    status
}

/// Whether two statuses differ in more than their counters.
fn differs(a: &GatewayConfigStatus, b: &GatewayConfigStatus) -> bool {
    let without = |status: &GatewayConfigStatus| GatewayConfigStatus {
        received_bytes: 0,
        transmitted_bytes: 0,
        ..status.clone()
    };
    without(a) != without(b)
}

fn canonical(peer: std::net::SocketAddr) -> std::net::SocketAddr {
    std::net::SocketAddr::new(peer.ip().to_canonical(), peer.port())
}

#[cfg(test)]
mod tests {
    use fabric_api::networking::ConnectionValue;
    use fabric_store::Object;

    use super::*;
    use crate::desired::tests::config;

    #[test]
    fn a_connection_is_named_labelled_and_referenced_as_in_liqo() {
        let desired = Desired::parse(&config()).unwrap();
        let name = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
        let object = Object::from(connection(&desired, &name)).to_value();
        assert_eq!(object["metadata"]["name"], "gw-client");
        assert_eq!(object["metadata"]["labels"][REMOTE_CLUSTER_ID], "milan");
        assert_eq!(object["spec"]["type"], "Client");
        assert_eq!(object["spec"]["gatewayRef"]["kind"], "WgGatewayClient");
        assert_eq!(object["spec"]["gatewayRef"]["name"], "client");
        assert_eq!(object["spec"]["gatewayRef"]["uid"], "7c8f4e70-0000-4000-8000-000000000001");
        let owner = &object["metadata"]["ownerReferences"][0];
        assert_eq!((&owner["kind"], &owner["name"]), (&"GatewayClient".into(), &"client".into()));
        assert_eq!(owner["uid"], object["spec"]["gatewayRef"]["uid"]);
    }

    #[test]
    fn a_connection_is_written_on_change_or_when_ten_seconds_newer() {
        let at = |second: i32| View {
            value: ConnectionValue::Connected,
            latency: Some(Duration::from_millis(second.unsigned_abs().into())),
            latency_at: Timestamp::from_second(second.into()).ok(),
            retries: 0,
            path_mtu: None,
        };
        let status = |second: i32| connection_status(&at(second));
        assert!(is_due(None, &status(0)));
        assert!(!is_due(Some(&status(0)), &status(9)));
        assert!(is_due(Some(&status(0)), &status(10)));
        let lost = connection_status(&View { value: ConnectionValue::Error, ..View::start() });
        assert!(is_due(Some(&status(0)), &lost));
        assert!(!is_due(Some(&lost), &lost));
        assert_eq!(lost.latency.unwrap().value, "N/A");
    }

    #[tokio::test]
    async fn what_another_writes_into_its_connection_is_taken_back_soon() {
        let dir = tempfile::tempdir().unwrap();
        let args = fabric_store::StoreArgs::directories(None, dir.path().join("run"), None);
        let store = Store::open(&args).unwrap();
        let name = ObjectRef::new(Kind::GatewayConfig, "liqo-tenant-milan", "client");
        let mut reporter = Reporter::new(store.clone(), name);
        let desired = Desired::parse(&config()).unwrap();
        let view = View { value: ConnectionValue::Connected, ..View::start() };
        let stored = async || {
            let object = store.get(&reporter_connection()).await.unwrap().unwrap();
            Connection::try_from(object).unwrap()
        };
        reporter.report_connection(&desired, &view).await.unwrap();
        let written = stored().await;

        let mut other = written.clone();
        other.status = Some(ConnectionStatus { value: ConnectionValue::Error, latency: None });
        assert!(store.put_status(&other.into()).await.unwrap());
        reporter.report_connection(&desired, &view).await.unwrap();
        assert_ne!(stored().await, written, "not looked at with every probe");
        reporter.ensured_at -= LOOK;
        reporter.report_connection(&desired, &view).await.unwrap();
        assert_eq!(stored().await, written);
    }

    fn reporter_connection() -> ObjectRef {
        ObjectRef::new(Kind::Connection, "liqo-tenant-milan", "gw-client")
    }

    #[test]
    fn what_an_earlier_gateway_knew_stays_until_something_is_known() {
        let before = GatewayConfigStatus {
            applied_generation: 4,
            peer_endpoint: Some("192.0.2.7:1000".to_owned()),
            ..GatewayConfigStatus::default()
        };
        let status = gateway_status(&before, vec!["p".to_owned()], None, Timestamp::UNIX_EPOCH);
        assert_eq!(status.peer_endpoint.as_deref(), Some("192.0.2.7:1000"));
        assert_eq!((status.applied_generation, status.problems.len()), (4, 1));
        assert!(differs(&before, &status));
        let counted = GatewayConfigStatus { received_bytes: 9, ..before.clone() };
        assert!(!differs(&before, &counted));
    }
}
