//! Follows the published gateways: which processes to run for them, and what their Connections are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_api::fabric::GatewayConfig;
use fabric_api::labels;
use fabric_api::networking::{Connection, ConnectionStatus, ConnectionValue};
use fabric_store::{Event, Kind, Object, ObjectRef, Store, Watch};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::messages::say;
use super::supervise::MarkUnresponsive;
use super::workloads::{Gateways, Wanted, Workloads};

/// Published gateways and the processes to run for them. Reports their changes to the user.
pub struct Published {
    configs: BTreeMap<ObjectRef, GatewayConfig>,
    connections: BTreeMap<ObjectRef, ConnectionValue>,
    problems: BTreeSet<String>,
    workloads: Workloads,
    store: Store,
}

impl Published {
    pub fn new(workloads: Workloads, store: Store) -> Self {
        let (configs, connections, problems) = Default::default();
        Self { configs, connections, problems, workloads, store }
    }

    pub async fn until_synced(&mut self, events: &mut Watch) {
        loop {
            let event = events.next().await;
            if matches!(event, Event::Synced) {
                return;
            }
            self.apply(event);
        }
    }

    /// Publishes the wanted processes at every change. Ends with its receivers.
    pub async fn follow(mut self, mut events: Watch, wanted: watch::Sender<Wanted>) {
        let mut look = interval(Duration::from_secs(1));
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !wanted.is_closed() {
            tokio::select! {
                event = events.next() => self.apply(event),
                _ = look.tick() => self.report_problems().await,
            }
            let now = self.wanted();
            wanted.send_if_modified(|before| {
                let changed = *before != now;
                *before = now;
                changed
            });
        }
    }

    pub fn wanted(&self) -> Wanted {
        self.workloads.of_up(self.configs.values())
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Applied(object) => {
                let reference = object.reference();
                if let Object::Connection(connection) = &object {
                    let value = connection.status.as_ref().map(|status| status.value);
                    self.report_connection(
                        &reference,
                        object.label(labels::REMOTE_CLUSTER_ID),
                        value,
                    );
                } else if let Ok(config) = object.try_into() {
                    self.configs.insert(reference, config);
                }
            }
            Event::Deleted(reference) => {
                self.configs.remove(&reference);
                self.connections.remove(&reference);
            }
            // The controller's problems, which are reported below, have these among them.
            Event::Problems(_) | Event::Synced => {}
        }
    }

    fn report_connection(
        &mut self,
        reference: &ObjectRef,
        peer: Option<&str>,
        value: Option<ConnectionValue>,
    ) {
        let Some(value) = value else { return };
        if self.connections.insert(reference.clone(), value) != Some(value) {
            let who =
                peer.map_or_else(|| reference.to_string(), |peer| format!("peering with {peer}"));
            say(&format!("{who}: {value:?}"));
        }
    }

    /// Prints the problems that are new, and that none is left.
    async fn report_problems(&mut self) {
        let now = self.store.problems().await;
        let now: BTreeSet<_> = now.iter().map(ToString::to_string).collect();
        for problem in now.difference(&self.problems) {
            say(&format!("problem: {problem}"));
        }
        if now.is_empty() && !self.problems.is_empty() {
            say("no problem with the manifests is left");
        }
        self.problems = now;
    }
}

/// Marks the Connections of gateways that cannot be connected any more as `Error`.
pub struct Connections {
    pub store: Store,
}

impl MarkUnresponsive for Connections {
    async fn mark_unresponsive(&mut self, gateways: &Gateways) -> Gateways {
        let mut connected = Gateways::new();
        for connection in self.store.list(Kind::Connection).await.unwrap_or_default() {
            let Ok(mut connection) = Connection::try_from(connection) else { continue };
            let namespace = connection.metadata.namespace.clone().unwrap_or_default();
            let name = connection.spec.gateway_ref.name.clone().unwrap_or_default();
            let gateway = (namespace.clone(), name.clone());
            let claims = connection
                .status
                .as_ref()
                .is_some_and(|status| status.value == ConnectionValue::Connected);
            if !gateways.contains(&gateway) || !claims {
                continue;
            }
            connected.insert(gateway);
            connection.status =
                Some(ConnectionStatus { value: ConnectionValue::Error, latency: None });
            if let Err(error) = self.store.put_status(&connection.into()).await {
                let error = anyhow::Error::new(error);
                say(&format!(
                    "cannot mark the Connection of {namespace}/{name} as Error: {error:#}"
                ));
            }
        }
        connected
    }
}
