//! Reports obstacles as Events of the controller's own pod, where `kubectl describe pod` shows them.

use std::time::Duration;

use fabric_kube_client::ApiServer;
use fabric_runtime::{Heartbeat, until};
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::Api;
use kube::api::ListParams;

use super::events::Events;
use super::lease::within;
use fabric_kube_client::obstacles::Obstacles;

/// Time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Reports without end. `pod` is the name of the own one, `identity` that of the program in Events.
pub async fn report(server: ApiServer, pod: &str, identity: &str, obstacles: Obstacles) {
    let mut events = Events::new(server.client.clone(), identity);
    let mut changes = obstacles.changes();
    let mut is_known = false;
    let heartbeat = Heartbeat::default();
    loop {
        let problems = obstacles.all();
        if !problems.is_empty() && !is_known {
            let own = own(&server, pod).await;
            is_known = own.uid.is_some();
            events.set_own(own);
        }
        let problems = problems.into_iter().map(|problem| (problem, String::new())).collect();
        events.emit_new(&problems, &heartbeat).await;
        tokio::select! {
            // The sender is `obstacles`.
            _ = changes.changed() => {}
            () = until(events.again()) => {}
        }
    }
}

async fn own(server: &ApiServer, pod: &str) -> ObjectReference {
    let pods = Api::<Pod>::namespaced(server.client.clone(), &server.namespace);
    let selection = ListParams::default().fields(&format!("metadata.name={pod}"));
    let found = within(TIMEOUT, pods.list_metadata(&selection)).await;
    let found = found.ok().and_then(|list| list.items.into_iter().next());
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(server.namespace.clone()),
        name: Some(pod.to_owned()),
        uid: found.and_then(|pod| pod.metadata.uid),
        ..ObjectReference::default()
    }
}
