//! The store against a real API server, on a real etcd.
//!
//! ```text
//! test -- Store --TLS--> kube-apiserver --> etcd       all on loopback; both end with this process
//!    \-- Admin ----------^
//! ```
//!
//! Prerequisites of the server are documented in the crate `api-server`.

#![allow(clippy::unwrap_used)]

mod admin;
mod follow;
mod keys;
mod narrow;
mod outage;
mod refused;
mod watch;
mod write;
mod wrong;

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use api_server::{ApiServer, skip};
use fabric_api::fabric::GatewayConfig;
use fabric_api::ipam::{Network, NetworkSpec};
use fabric_store::{Event, Kind, Object, ObjectRef, Problem, Store, Watch};
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::admin::Admin;

fn start(name: &str) -> Result<ApiServer, String> {
    ApiServer::start(Path::new(env!("CARGO_TARGET_TMPDIR")).join("store").join(name))
}

/// The server that most tests share. It ends with the process.
fn shared() -> Option<&'static ApiServer> {
    static SHARED: OnceLock<Result<ApiServer, String>> = OnceLock::new();
    SHARED.get_or_init(|| start("shared")).as_ref().map_err(|why| skip(why)).ok()
}

/// A namespace of its own on the server that all tests share.
struct Place {
    server: &'static ApiServer,
    admin: Admin,
    namespace: String,
}

impl Place {
    /// `None`, after reporting why, if there is no server.
    async fn new(name: &str) -> Option<Self> {
        let server = shared()?;
        let admin = Admin::new(&server.admin());
        static DEFINED: OnceCell<()> = OnceCell::const_new();
        DEFINED.get_or_init(|| admin.define_everything()).await;
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
        admin.apply("namespaces", &namespace).await;
        Some(Self { server, admin, namespace: name.to_owned() })
    }

    /// Store of a program that was just started.
    fn store(&self) -> Store {
        Store::kubernetes(Some(&self.server.admin())).unwrap()
    }

    fn store_of(&self, user: &str) -> Store {
        Store::kubernetes(Some(&self.server.user(user))).unwrap()
    }

    fn watch(&self, store: &Store, kinds: &[Kind]) -> NamespaceWatch {
        NamespaceWatch::new(store.watch(kinds).unwrap(), &self.namespace)
    }

    fn network(&self, name: &str, cidr: &str) -> Object {
        let spec = NetworkSpec { cidr: cidr.to_owned(), ..NetworkSpec::default() };
        let mut network = Network::new(name, spec);
        network.metadata.namespace = Some(self.namespace.clone());
        network.into()
    }

    fn config(&self, name: &str) -> GatewayConfig {
        let spec = json!({
            "clusterId": "rome", "peerClusterId": "milan", "role": "Client", "gatewayUid": "u",
            "secretName": "keys", "mtu": 1340,
            "tunnelAddress": "169.254.18.2", "peerTunnelAddress": "169.254.18.1",
            "remaps": [], "podCidrs": [], "externalCidrs": [],
            "overlay": {"address": "10.80.0.2"}, "nodes": [],
            "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5},
        });
        let mut config = GatewayConfig::new(name, serde_json::from_value(spec).unwrap());
        config.metadata.namespace = Some(self.namespace.clone());
        config
    }

    fn configuration(&self, name: &str, pod: &Value) -> Value {
        json!({
            "apiVersion": "networking.liqo.io/v1beta1", "kind": "Configuration",
            "metadata": {"name": name, "namespace": self.namespace,
                "labels": {"liqo.io/remote-cluster-id": "milan"}},
            "spec": {"remote": {"cidr": {"pod": pod, "external": ["10.70.0.0/16"]}}},
        })
    }
}

/// A watch of one namespace only, and of what is in none.
struct NamespaceWatch {
    watch: Watch,
    namespace: Option<String>,
    problems: Option<Vec<Problem>>,
}

impl NamespaceWatch {
    fn new(watch: Watch, namespace: &str) -> Self {
        Self { watch, namespace: Some(namespace.to_owned()), problems: None }
    }

    fn everywhere(watch: Watch) -> Self {
        Self { watch, namespace: None, problems: None }
    }

    /// All events up to `Synced`; what is wrong at last. Other tests' problems come and go.
    async fn sync(&mut self) -> Vec<Event> {
        let (mut events, mut wrong) = (Vec::new(), None);
        loop {
            match self.next().await {
                Event::Synced => break,
                problems @ Event::Problems(_) => wrong = Some(problems),
                event @ (Event::Applied(_) | Event::Deleted(_)) => events.push(event),
            }
        }
        events.extend(wrong);
        events
    }

    async fn next(&mut self) -> Event {
        self.next_within(Duration::from_secs(10)).await.expect("an event")
    }

    async fn next_within(&mut self, bound: Duration) -> Option<Event> {
        let next = async {
            loop {
                let event = self.watch.next().await;
                if let Some(event) = self.filter(event) {
                    return event;
                }
            }
        };
        tokio::time::timeout(bound, next).await.ok()
    }

    /// Checks that no event comes.
    async fn quiet(&mut self) {
        let event = self.next_within(Duration::from_millis(500)).await;
        assert!(event.is_none(), "{event:?}");
    }

    fn filter(&mut self, event: Event) -> Option<Event> {
        let ours = |object: &ObjectRef| {
            // Other tests make namespaces of their own.
            let own = (object.kind == Kind::Namespace).then_some(&object.name);
            let (of, ours) = (object.namespace.as_ref().or(own), self.namespace.as_ref());
            of.is_none() || ours.is_none() || of == ours
        };
        match event {
            Event::Applied(ref object) => ours(&object.reference()).then_some(event),
            Event::Deleted(ref object) => ours(object).then_some(event),
            Event::Problems(mut problems) => {
                problems.retain(|problem| problem.object.as_ref().is_none_or(ours));
                let before = self.problems.replace(problems.clone());
                (before.as_ref() != Some(&problems)).then_some(Event::Problems(problems))
            }
            Event::Synced => Some(event),
        }
    }
}

fn applied(event: Event) -> Object {
    let Event::Applied(object) = event else { panic!("{event:?}") };
    object
}

fn problems(event: Event) -> Vec<String> {
    let Event::Problems(problems) = event else { panic!("{event:?}") };
    problems.iter().map(ToString::to_string).collect()
}
