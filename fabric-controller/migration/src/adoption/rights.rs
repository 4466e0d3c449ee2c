//! Rights that taking over needs, all looked at before anything is read or changed.

use fabric_api::ipam::{IP, Network};
use fabric_api::networking::{
    GatewayClient, GatewayServer, WgGatewayClientTemplate, WgGatewayServerTemplate,
};
use fabric_kube_client::{ApiServer, may};
use futures::future::join_all;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::ApiResource;

use super::{AdoptError, FABRIC, WG_GATEWAYS};
use crate::liqo_networking::{FIREWALL, ROUTE, resource};
use crate::withdrawal::cluster::kind;

/// Verbs of `--dry-run`.
const READ: [&str; 2] = ["list", "get"];
const LOOK: [&str; 1] = ["list"];
const CHANGE: [&str; 2] = ["list", "patch"];
const REMOVE: [&str; 3] = ["list", "patch", "delete"];

/// Fails with all rights that the user lacks.
pub(super) async fn ensure(server: &ApiServer, is_dry_run: bool) -> Result<(), AdoptError> {
    let lacking = needed().into_iter().map(|(kind, verbs)| async move {
        let verbs = verbs.iter().filter(|verb| !is_dry_run || READ.contains(verb));
        let denied = verbs.map(|verb| is_denied(server, verb, &kind));
        let denied: Vec<_> = join_all(denied).await.into_iter().flatten().collect();
        let group = if kind.group.is_empty() { String::new() } else { format!(".{}", kind.group) };
        (!denied.is_empty()).then(|| format!("{} {}{group}", denied.join(", "), kind.plural))
    });
    let lacking: Vec<_> = join_all(lacking).await.into_iter().flatten().collect();
    if lacking.is_empty() { Ok(()) } else { Err(AdoptError::Denied(lacking.join("; "))) }
}

/// Returns the verb if it is denied. If access reviews are refused, the requests themselves will show a
/// missing right.
async fn is_denied<'a>(server: &ApiServer, verb: &'a str, kind: &ApiResource) -> Option<&'a str> {
    let may = may(&server.client, (verb, kind), None).await.unwrap_or(true);
    (!may).then_some(verb)
}

/// Kinds with the verbs on them.
fn needed() -> Vec<(ApiResource, &'static [&'static str])> {
    let looked_at = [
        kind::<DaemonSet>(),
        kind::<Pod>(),
        kind::<ConfigMap>(),
        kind::<WgGatewayServerTemplate>(),
        kind::<WgGatewayClientTemplate>(),
    ];
    let changed =
        [kind::<GatewayServer>(), kind::<GatewayClient>(), kind::<Network>(), kind::<IP>()];
    let of_liqo = [&WG_GATEWAYS[..], &FABRIC, &[FIREWALL, ROUTE]].concat();
    let removed = of_liqo.into_iter().map(resource).chain([kind::<ClusterRoleBinding>()]);
    let mut all: Vec<(ApiResource, &'static [&'static str])> = Vec::new();
    all.extend(looked_at.map(|kind| (kind, &LOOK[..])));
    all.extend(changed.map(|kind| (kind, &CHANGE[..])));
    all.push((kind::<Deployment>(), &["list", "get", "patch"]));
    all.push((kind::<Service>(), &["get", "patch"]));
    all.push((kind::<ServiceAccount>(), &["get", "patch"]));
    all.extend(removed.map(|kind| (kind, &REMOVE[..])));
    all
}
