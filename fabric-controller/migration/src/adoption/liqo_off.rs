//! Liqo's controllers for its network have to be off: they would make again what is taken away.

use std::time::Duration;

use fabric_api::labels;
use fabric_kube_client::requests::Target;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::AdoptError;
use crate::withdrawal::WithdrawError;
use crate::withdrawal::cluster::{Cluster, kind};
use gateway_workloads::NETWORKING_OFF;

/// Time in which pods end whose Deployment or DaemonSet has networking off by now.
const PODS_END: Duration = Duration::from_secs(60);
const PERIOD: Duration = Duration::from_secs(1);

/// Kind, selector, and whether an object runs Liqo's networking.
type Check<'a> = (ApiResource, &'a str, fn(&DynamicObject) -> bool);

/// Fails with the first program that runs Liqo's networking, or may. Pods that only have to end are
/// waited for.
pub(super) async fn ensure(cluster: &Cluster) -> Result<(), AdoptError> {
    let app = labels::APP_NAME;
    let fabric = &format!("{app}=fabric,app.kubernetes.io/component=networking");
    let manager = &format!("{app}=controller-manager,{}!={}", labels::PART_OF, labels::WEFT);
    let workloads: [Check<'_>; 2] = [
        (kind::<DaemonSet>(), fabric, |_| true),
        (kind::<Deployment>(), manager, |of| has_networking(&of.data["spec"]["template"])),
    ];
    let pods: [Check<'_>; 2] = [
        (kind::<Pod>(), fabric, |_| true),
        (kind::<Pod>(), manager, |of| has_networking(&of.data)),
    ];
    if let Some((found, namespace)) = first(cluster, &workloads).await? {
        return Err(AdoptError::NetworkingIsOn(found, namespace));
    }
    let until = Instant::now() + PODS_END;
    while let Some((found, namespace)) = first(cluster, &pods).await? {
        if Instant::now() >= until {
            return Err(AdoptError::NetworkingIsOn(found, namespace));
        }
        sleep(PERIOD).await;
    }
    Ok(())
}

/// First object for which a check holds, and its namespace.
async fn first(
    cluster: &Cluster,
    checks: &[Check<'_>],
) -> Result<Option<(String, String)>, WithdrawError> {
    for (kind, selector, is_on) in checks {
        let there = cluster.list(kind, selector).await?;
        if let Some(on) = there.iter().find(|object| is_on(object)) {
            let namespace = on.metadata.namespace.clone().unwrap_or_default();
            return Ok(Some((Target::of(kind, &on.metadata).to_string(), namespace)));
        }
    }
    Ok(None)
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
