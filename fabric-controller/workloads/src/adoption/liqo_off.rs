//! Liqo's controllers for its network have to be off: they would make again what is taken away.

use fabric_api::labels;
use fabric_kube_client::requests::Target;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject};
use serde_json::Value;

use super::AdoptError;
use crate::liqo_ips::NETWORKING_OFF;
use crate::withdrawal::cluster::{Cluster, kind};

/// Fails with the first program that runs Liqo's networking, or may.
pub(super) async fn ensure(cluster: &Cluster, namespace: &str) -> Result<(), AdoptError> {
    let app = labels::APP_NAME;
    let fabric = format!("{app}=fabric,app.kubernetes.io/component=networking");
    let manager = format!("{app}=controller-manager,{}!={}", labels::PART_OF, labels::WEFT);
    for (kind, selector, is_on) in [
        (kind::<DaemonSet>(), &fabric, always as fn(&DynamicObject) -> bool),
        (kind::<Pod>(), &fabric, always),
        (kind::<Deployment>(), &manager, |of| has_networking(&of.data["spec"]["template"])),
        (kind::<Pod>(), &manager, |of| has_networking(&of.data)),
    ] {
        let there = cluster.list(&kind, selector).await?;
        if let Some(on) = there.iter().find(|object| is_on(object)) {
            return Err(error(&kind, on, namespace));
        }
    }
    Ok(())
}

fn error(kind: &ApiResource, on: &DynamicObject, namespace: &str) -> AdoptError {
    let found = Target::of(kind, &on.metadata).to_string();
    let namespace = on.metadata.namespace.as_deref().unwrap_or(namespace);
    AdoptError::NetworkingIsOn(found, namespace.to_owned())
}

fn always(_: &DynamicObject) -> bool {
    true
}

/// True for a pod, or the template of one, that Liqo's chart has not switched it off for.
fn has_networking(pod: &Value) -> bool {
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
    let mut arguments = containers.flat_map(|one| one["args"].as_array().into_iter().flatten());
    let has_ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    !has_ended && !arguments.any(|argument| argument == NETWORKING_OFF)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn manager_without_the_argument_has_networking() {
        let pod = |arguments: Value| json!({"spec": {"containers": [{"args": arguments}]}});
        assert!(has_networking(&pod(json!(["--networking-enabled=true"]))));
        assert!(has_networking(&pod(json!([]))), "it is Liqo's default");
        assert!(!has_networking(&pod(json!(["--a", NETWORKING_OFF]))));
        let mut ended = pod(json!([]));
        ended["status"] = json!({"phase": "Failed"});
        assert!(!has_networking(&ended));
    }
}
