//! Objects that weft has made: gateways, published configs and records, granted prefixes and addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_api::fabric::{FabricRecord, GatewayConfig, GatewayRecord, NodeConfig};
use fabric_api::ipam::{IP, Network};
use fabric_api::labels;
use fabric_api::networking::{Connection, GatewayClient, GatewayServer};
use fabric_index::owner;
use fabric_kube_client::requests::{Part, Target};
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::api::{ApiResource, DynamicObject};
use kube::{Resource as _, ResourceExt as _};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::WithdrawError;
use super::cluster::{Cluster, kind};
use gateway_workloads::{SLICE_OF, SLICE_OF_WEFT};

/// Name in the chart.
const WEBHOOKS: &str = "weft-cidr-lists";
/// Longer than a gateway takes to end.
const POD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for the removal of everything, on a machine that is busy.
pub(super) const REMOVAL: Duration = Duration::from_secs(120);
/// Time for gateways to end. Those of a node that has failed are not waited for any longer.
const GATEWAYS_END: Duration = Duration::from_secs(12);
/// Interval of passes. Pods of two clusters do not reach each other meanwhile.
const PERIOD: Duration = Duration::from_millis(200);

/// Removes objects until none is left. What only takes long to end, such as the pod of a node that does not
/// answer, is left behind after a while.
pub(super) async fn remove(cluster: &Cluster) -> Result<(), WithdrawError> {
    let start = Instant::now();
    let mut removed = Removed::default();
    loop {
        let Left { ending, there } = sweep(cluster, &mut removed).await?;
        if ending.is_empty() && there.is_empty() {
            return Ok(());
        }
        if start.elapsed() >= POD_TIMEOUT && there.is_empty() {
            tracing::warn!(objects = ending.join(", "), "they take long to end; not waiting");
            return Ok(());
        }
        let again: Vec<_> = there.iter().filter(|name| removed.is_made_again(name)).collect();
        if start.elapsed() >= POD_TIMEOUT && !again.is_empty() {
            return Err(WithdrawError::MadeAgain(again.into_iter().cloned().collect()));
        }
        if start.elapsed() >= REMOVAL {
            return Err(WithdrawError::Remaining(there));
        }
        sleep(PERIOD).await;
    }
}

/// Removes generated key pairs, which are where users' gateways are. It may not read them.
pub(super) async fn remove_keys(cluster: &Cluster) -> Result<(), WithdrawError> {
    let mut namespaces = BTreeSet::new();
    for gateways in [kind::<GatewayServer>(), kind::<GatewayClient>()] {
        let gateways = cluster.list_metadata(&gateways, "").await?;
        namespaces.extend(gateways.iter().filter_map(|gateway| gateway.namespace()));
    }
    // The webhook's certificate goes with the webhook.
    let keys = format!("{},{}=true", ours(), labels::GATEWAY_RESOURCE);
    for namespace in namespaces {
        cluster.delete_all(&kind::<Secret>(), &namespace, &keys).await?;
    }
    Ok(())
}

/// Makes Networks of peers' prefixes objects of nobody's, which stay.
pub(super) async fn hand_over(cluster: &Cluster) -> Result<(), WithdrawError> {
    let networks = kind::<Network>();
    let of_peers = format!("{},{}", ours(), labels::CIDR_TYPE);
    let mark = owner::ANNOTATION;
    let nobodys = json!({"metadata":
        {"labels": {(labels::MANAGED_BY): null}, "annotations": {(mark): null}}});
    for network in cluster.list_metadata(&networks, &of_peers).await? {
        cluster.merge(&networks, &network, Part::AllButStatus, &nobodys).await?;
        tracing::info!("kept {}", Target::of(&networks, network.meta()));
    }
    Ok(())
}

/// Returns once no gateway runs: nothing comes from peers any more. One that ends without its config announces
/// to the peer that the peering is removed.
pub(super) async fn end_gateways(cluster: &Cluster) -> Result<(), WithdrawError> {
    let until = Instant::now() + GATEWAYS_END;
    for kind in [kind::<GatewayConfig>(), kind::<Deployment>()] {
        for object in cluster.list_metadata(&kind, &ours()).await? {
            cluster.delete(&kind, &object).await?;
            tracing::info!("removed {}", Target::of(&kind, object.meta()));
        }
    }
    loop {
        let running = gateways(cluster).await?;
        if running.is_empty() {
            return Ok(());
        }
        if Instant::now() >= until {
            tracing::warn!(objects = running.join(", "), "they take long to end; not waiting");
            return Ok(());
        }
        sleep(PERIOD).await;
    }
}

/// Pods of gateways.
async fn gateways(cluster: &Cluster) -> Result<Vec<String>, WithdrawError> {
    let labels = format!("{}={}", labels::COMPONENT, labels::GATEWAY);
    let pods = kind::<Pod>();
    let running = cluster.list_metadata(&pods, &labels).await?;
    Ok(running.iter().map(|pod| Target::of(&pods, pod.meta()).to_string()).collect())
}

/// Networks and the name of the cluster, as far as they are still weft's: helm keeps them, since Liqo's
/// chart may have taken them over.
pub(super) async fn remove_shared(
    cluster: &Cluster,
    installation: &str,
) -> Result<(), WithdrawError> {
    let networks = kind::<Network>();
    let ours = format!("{}={}", labels::PART_OF, labels::WEFT);
    for network in cluster.list_metadata(&networks, &ours).await? {
        cluster.delete(&networks, &network).await?;
    }
    let names = kind::<ConfigMap>();
    let name = cluster.get(&names, (installation, labels::CLUSTER_ID_CONFIGMAP)).await?;
    let is_ours = |name: &DynamicObject| {
        name.labels().get(labels::PART_OF).is_some_and(|chart| chart == labels::WEFT)
    };
    match name.filter(is_ours) {
        Some(name) => cluster.delete(&names, &name).await,
        None => Ok(()),
    }
}

/// Webhooks, which helm removes after the controllers that serve them.
pub(super) async fn remove_webhooks(cluster: &Cluster) -> Result<(), WithdrawError> {
    let kind = kind::<MutatingWebhookConfiguration>();
    cluster.delete(&kind, &DynamicObject::new(WEBHOOKS, &kind)).await
}

/// Objects found in one pass.
#[derive(Default)]
struct Left {
    ending: Vec<String>,
    /// Objects that this pass has deleted.
    there: Vec<String>,
}

/// Uids of the objects that were removed, by kind and name.
#[derive(Default)]
struct Removed(BTreeMap<String, BTreeSet<String>>);

impl Removed {
    fn record(&mut self, name: &str, uid: Option<&String>) {
        self.0.entry(name.to_owned()).or_default().extend(uid.cloned());
    }

    /// True if several objects of that name were removed, one after the other.
    fn is_made_again(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|uids| uids.len() > 1)
    }
}

async fn sweep(cluster: &Cluster, removed: &mut Removed) -> Result<Left, WithdrawError> {
    let mut left = Left::default();
    for (kind, labels) in made() {
        for object in cluster.list_metadata(&kind, &labels).await? {
            let name = Target::of(&kind, object.meta()).to_string();
            if object.meta().deletion_timestamp.is_some() {
                left.ending.push(name);
                continue;
            }
            cluster.delete(&kind, &object).await?;
            tracing::info!("removed {name}");
            removed.record(&name, object.meta().uid.as_ref());
            left.there.push(name);
        }
    }
    // They end with their Deployments, and write into the API until then.
    left.ending.extend(gateways(cluster).await?);
    Ok(left)
}

/// Label of what weft has made.
fn ours() -> String {
    format!("{}={}", labels::MANAGED_BY, labels::WEFT)
}

/// Kinds, in the order in which they go, and the labels of those that are weft's.
fn made() -> [(ApiResource, String); 14] {
    let ours = ours();
    [
        (kind::<GatewayConfig>(), ours.clone()),
        (kind::<Deployment>(), ours.clone()),
        (kind::<PodDisruptionBudget>(), ours.clone()),
        (kind::<Service>(), ours.clone()),
        // Kubernetes' own have the labels of their Services.
        (kind::<EndpointSlice>(), format!("{SLICE_OF}={SLICE_OF_WEFT}")),
        (kind::<RoleBinding>(), ours.clone()),
        (kind::<Role>(), ours.clone()),
        (kind::<ServiceAccount>(), ours.clone()),
        (kind::<Connection>(), ours.clone()),
        (kind::<IP>(), ours.clone()),
        (kind::<Network>(), ours.clone()),
        (kind::<FabricRecord>(), ours.clone()),
        (kind::<GatewayRecord>(), ours.clone()),
        (kind::<NodeConfig>(), ours),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn object_seen_twice_is_not_made_again() {
        let mut removed = Removed::default();
        let mut record = |name: &str, uid: &str| {
            removed.record(name, Some(&uid.to_owned()));
            removed.is_made_again(name)
        };
        assert!(!record("Role t/gw-a", "1"));
        assert!(!record("Role t/gw-a", "1"), "it is the same one, which an API server still lists");
        assert!(!record("Role t/gw-b", "2"), "one of another name");
        assert!(record("Role t/gw-a", "3"));
    }
}
