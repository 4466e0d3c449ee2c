//! Reports obstacles as Events of the controller's own pod, where `kubectl describe pod` shows them.

use fabric_kube_client::ApiServer;
use fabric_kube_client::reflector::Selection;
use fabric_runtime::{Heartbeat, until};
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::api::ApiResource;

use super::events::Events;
use fabric_kube_client::findings::Findings;

/// Reports without end. `pod` is the name of the own one, `identity` that of the program in Events.
pub async fn report(server: ApiServer, pod: &str, identity: &str, findings: Findings) {
    let mut events = Events::new(server.client.clone(), identity);
    let mut changes = findings.changes();
    let mut is_known = false;
    let heartbeat = Heartbeat::default();
    loop {
        let problems = findings.obstacles();
        if !problems.is_empty() && !is_known {
            let own = own(&server, pod).await;
            is_known = own.uid.is_some();
            events.set_own(own);
        }
        let problems = problems.into_iter().map(|problem| (problem, String::new())).collect();
        events.emit_new(&problems, &heartbeat).await;
        tokio::select! {
            // The sender is `findings`.
            _ = changes.changed() => {}
            () = until(events.again()) => {}
        }
    }
}

async fn own(server: &ApiServer, pod: &str) -> ObjectReference {
    let selection = Selection::all(ApiResource::erase::<Pod>(&())).inside(&server.namespace);
    let selection = selection.fields(&format!("metadata.name={pod}"));
    let found = selection.list_metadata(&server.client, None).await;
    let found = found.ok().and_then(|pods| pods.into_iter().next());
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(server.namespace.clone()),
        name: Some(pod.to_owned()),
        uid: found.and_then(|pod| pod.metadata.uid),
        ..ObjectReference::default()
    }
}
