//! Simulated gateways: each with a watch of its own, and connected as soon as it has a config.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fabric_api::labels::REMOTE_CLUSTER_ID;
use fabric_api::networking::{
    Connection, ConnectionLatency, ConnectionSpec, ConnectionStatus, ConnectionValue,
};
use fabric_store::{Kind, ObjectRef, Store};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval_at, sleep};

use crate::board::Board;
use crate::manifests::Peer;
use crate::published::{GatewayIdentity, GatewayView};

/// Between two latencies in a Connection, as a gateway writes them.
const LATENCY: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(2);

/// One gateway.
pub(crate) struct Gateway {
    pub(crate) peer: Peer,
    pub(crate) store: Store,
    pub(crate) board: Board,
    /// True while latencies are to be written.
    pub(crate) heartbeats: watch::Receiver<bool>,
}

impl Gateway {
    pub(crate) async fn run(self) {
        let result = self.follow().await;
        self.board.check("gateway", result);
    }

    async fn follow(&self) -> Result<()> {
        let (namespace, name) = (self.peer.namespace(), self.peer.gateway());
        let mut view = GatewayView::follow(&self.store, &namespace, name)?;
        let own = ObjectRef::new(Kind::Connection, &namespace, &format!("gw-{name}"));
        let mut others = self.store.follow(&own, &[])?;
        let mut connection: Option<Connection> = None;
        // Spread over the period, as gateways that started at different times are.
        let phase = LATENCY.mul_f64((self.peer.0 % 100) as f64 / 100.0);
        let mut ticks = interval_at(tokio::time::Instant::now() + phase, LATENCY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = view.changed() => {
                    self.acknowledge(&view).await;
                    if connection.is_none() && let Some(identity) = view.identity() {
                        connection = self.board.check("gateway", self.connect(identity).await);
                    }
                }
                _ = others.next() => {}
                _ = ticks.tick() => {
                    let on = *self.heartbeats.borrow();
                    if let (true, Some(connection)) = (on, &mut connection) {
                        let written = self.write_latency(connection).await;
                        self.board.check("gateway", written);
                    }
                }
            }
        }
    }

    async fn acknowledge(&self, view: &GatewayView) {
        let Some(acknowledgement) = view.acknowledgement() else { return };
        let (endpoint, nodes) = (view.endpoint(), view.nodes().len());
        // The figure is the time of the write, which the watch has just shown.
        if let Some(endpoint) = endpoint {
            self.board.endpoint_seen(self.peer, endpoint, Instant::now());
        }
        loop {
            match self.store.put_status(&acknowledgement).await {
                Ok(_) => break,
                Err(error) if error.is_gone() => return,
                Err(error) => self.board.failed("gateway", &error.into()),
            }
            sleep(RETRY).await;
        }
        if view.identity().is_some() {
            self.board.gateway_acknowledged(self.peer, nodes, Instant::now());
        }
    }

    /// Writes the Connection as the gateway does: its spec, then its status.
    async fn connect(&self, identity: GatewayIdentity) -> Result<Connection> {
        let wanted = self.connection(identity);
        let stored = self.store.put(&wanted.into()).await.context("cannot write a Connection")?;
        let mut stored = Connection::try_from(stored)
            .map_err(|other| anyhow::anyhow!("a Connection is stored as {}", other.reference()))?;
        self.write_latency(&mut stored).await?;
        Ok(stored)
    }

    fn connection(&self, identity: GatewayIdentity) -> Connection {
        let (namespace, name) = (self.peer.namespace(), self.peer.gateway());
        let kind = if self.peer.is_client() { "WgGatewayClient" } else { "WgGatewayServer" };
        let gateway_ref = ObjectReference {
            api_version: Some(Kind::Connection.api_version().to_owned()),
            kind: Some(kind.to_owned()),
            name: Some(name.to_owned()),
            namespace: Some(namespace.clone()),
            uid: Some(identity.uid),
            ..ObjectReference::default()
        };
        let spec = ConnectionSpec { type_: identity.role, gateway_ref };
        let mut connection = Connection::new(&format!("gw-{name}"), spec);
        connection.metadata.namespace = Some(namespace);
        let label = (REMOTE_CLUSTER_ID.to_owned(), self.peer.to_string());
        connection.metadata.labels = Some([label].into());
        connection
    }

    async fn write_latency(&self, connection: &mut Connection) -> Result<()> {
        let now = Timestamp::now();
        connection.status = Some(ConnectionStatus {
            value: ConnectionValue::Connected,
            latency: Some(ConnectionLatency {
                value: format!("{}μs", 400 + now.subsec_microsecond() % 100),
                timestamp: Some(format!("{now:.0}")),
            }),
        });
        let written = self.store.put_status(&connection.clone().into()).await;
        written.map(drop).context("cannot write the status of a Connection")
    }
}
