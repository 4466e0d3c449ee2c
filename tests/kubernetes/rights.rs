//! Rights of each service account, and their limits, as reported by the API server of a cluster
//! with two peerings; and their return.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};
use weft_tests::Kubernetes;
use weft_tests::kubernetes::access_review;

/// Accounts, by their letters in the table below.
const ACCOUNTS: [(char, &str); 6] = [
    ('c', "liqo:liqo-fabric-controller"),
    ('i', "liqo:liqo-ipam"),
    ('a', "liqo:liqo-route-agent"),
    ('w', "liqo:liqo-withdrawal"),
    ('g', GATEWAY),
    ('o', OTHER_GATEWAY),
];
const GATEWAY: &str = "liqo-tenant-milan:gw-client";
const OTHER_GATEWAY: &str = "liqo-tenant-turin:gw-client";
const SYSTEM: &str = "kube-system";

/// Namespace, request, and the accounts that may make it.
type Row = (&'static str, &'static str, &'static str);

/// Rights in the namespaces of peerings.
const OF_PEERINGS: &[Row] = &[
    // Keys. Only a gateway's own, even if other gateways have the same name.
    ("milan", "get secrets gw-keys", "cg"),
    ("milan", "list secrets gw-keys", "cg"),
    ("milan", "watch secrets gw-keys", "cg"),
    ("turin", "get secrets gw-keys", "co"),
    ("turin", "watch secrets gw-keys", "co"),
    ("milan", "get secrets of-a-user", "c"),
    ("milan", "list secrets", "c"),
    ("milan", "create secrets", "c"),
    ("milan", "patch secrets gw-keys", "c"),
    ("milan", "update secrets gw-keys", ""),
    ("milan", "delete secrets gw-keys", ""),
    ("milan", "deletecollection secrets", "w"),
    ("milan", "get configmaps of-a-user", ""),
    ("milan", "create configmaps", ""),
    // Parts of gateways.
    ("milan", "create deployments.apps", "c"),
    ("milan", "patch deployments.apps gw-client", "c"),
    ("milan", "delete deployments.apps gw-client", "cw"),
    ("milan", "patch deployments.apps/scale gw-client", ""),
    ("milan", "delete poddisruptionbudgets.policy gw-client", "cw"),
    ("milan", "create daemonsets.apps", ""),
    ("milan", "create jobs.batch", ""),
    ("milan", "watch pods", "c"),
    ("milan", "get pods gw-client", ""),
    ("milan", "create pods", ""),
    ("milan", "patch pods gw-client", "c"),
    // Its policy leaves virtual kubelets of Liqo.
    ("milan", "delete pods gw-client", "c"),
    ("milan", "deletecollection pods", ""),
    ("milan", "patch shadowendpointslices.offloading.liqo.io web", "c"),
    ("milan", "delete shadowendpointslices.offloading.liqo.io web", ""),
    ("milan", "create pods/exec gw-client", ""),
    ("milan", "create pods/eviction gw-client", ""),
    ("milan", "get pods/log gw-client", ""),
    ("milan", "create services", "c"),
    ("milan", "delete services gw-client", "cw"),
    ("milan", "create endpointslices.discovery.k8s.io", "c"),
    ("milan", "delete endpointslices.discovery.k8s.io database", "cw"),
    ("milan", "create serviceaccounts", "c"),
    ("milan", "create serviceaccounts/token gw-client", ""),
    ("milan", "impersonate serviceaccounts gw-client", ""),
    ("milan", "create roles.rbac.authorization.k8s.io", "c"),
    ("milan", "create rolebindings.rbac.authorization.k8s.io", "c"),
    ("milan", "delete rolebindings.rbac.authorization.k8s.io gw-client", "cw"),
    ("milan", "escalate roles.rbac.authorization.k8s.io gw-client", ""),
    ("milan", "bind roles.rbac.authorization.k8s.io gw-client", ""),
    // Objects that users write, and their status.
    ("milan", "watch configurations.networking.liqo.io", "c"),
    ("milan", "create configurations.networking.liqo.io", ""),
    ("milan", "patch configurations.networking.liqo.io milan", "cw"),
    ("milan", "update configurations.networking.liqo.io milan", ""),
    ("milan", "delete configurations.networking.liqo.io milan", ""),
    ("milan", "update configurations.networking.liqo.io/finalizers milan", ""),
    ("milan", "patch configurations.networking.liqo.io/status milan", "cw"),
    ("milan", "watch gatewayclients.networking.liqo.io", "c"),
    ("milan", "patch gatewayclients.networking.liqo.io client", ""),
    ("milan", "delete gatewayclients.networking.liqo.io client", ""),
    ("milan", "patch gatewayclients.networking.liqo.io/status client", "cw"),
    ("milan", "watch publickeies.networking.liqo.io", "c"),
    ("milan", "list firewallconfigurations.networking.liqo.io", "c"),
    ("milan", "patch firewallconfigurations.networking.liqo.io mine", ""),
    ("milan", "patch publickeies.networking.liqo.io gw-publickey", ""),
    ("milan", "create events.events.k8s.io", "cw"),
    ("milan", "list events", ""),
    // Configs and reports of gateways.
    ("milan", "get gatewayconfigs.fabric.weft.dev client", "cg"),
    ("milan", "watch gatewayconfigs.fabric.weft.dev client", "cg"),
    ("milan", "list gatewayconfigs.fabric.weft.dev", "cw"),
    ("turin", "get gatewayconfigs.fabric.weft.dev client", "co"),
    ("milan", "create gatewayconfigs.fabric.weft.dev", "c"),
    ("milan", "patch gatewayconfigs.fabric.weft.dev client", "c"),
    ("milan", "delete gatewayconfigs.fabric.weft.dev client", "cw"),
    ("milan", "patch gatewayconfigs.fabric.weft.dev/status client", "cg"),
    ("turin", "patch gatewayconfigs.fabric.weft.dev/status client", "co"),
    ("milan", "create connections.networking.liqo.io", "cg"),
    ("turin", "create connections.networking.liqo.io", "co"),
    ("milan", "get connections.networking.liqo.io gw-client", "cg"),
    ("milan", "patch connections.networking.liqo.io gw-client", "cg"),
    ("milan", "patch connections.networking.liqo.io/status gw-client", "cg"),
    ("milan", "patch connections.networking.liqo.io/status gw-other", "c"),
    ("turin", "patch connections.networking.liqo.io/status gw-client", "co"),
    ("milan", "delete connections.networking.liqo.io gw-client", "cgw"),
    ("turin", "delete connections.networking.liqo.io gw-client", "cow"),
    ("milan", "list connections.networking.liqo.io", "cw"),
    ("milan", "create networks.ipam.liqo.io", "c"),
    ("milan", "patch networks.ipam.liqo.io/status milan", "cw"),
    ("milan", "patch ips.ipam.liqo.io/status database", "cw"),
];

/// Rights in weft's own namespace, in others, and for what is in none.
const ELSEWHERE: &[Row] = &[
    ("liqo", "create leases.coordination.k8s.io", "cw"),
    ("liqo", "update leases.coordination.k8s.io weft-fabric-controller", "cw"),
    ("liqo", "update leases.coordination.k8s.io of-a-user", ""),
    ("liqo", "get secrets weft-webhook-certificate", "c"),
    ("liqo", "update secrets weft-webhook-certificate", "c"),
    ("liqo", "update secrets of-a-user", ""),
    ("liqo", "watch configmaps liqo-clusterid-configmap", "c"),
    ("liqo", "get configmaps liqo-clusterid-configmap", "cw"),
    ("liqo", "delete configmaps liqo-clusterid-configmap", "w"),
    ("liqo", "patch configmaps liqo-clusterid-configmap", ""),
    ("liqo", "create configmaps", "ci"),
    ("liqo", "patch configmaps weft-ipam-open-grants", "i"),
    ("liqo", "get configmaps of-a-user", ""),
    ("liqo", "list configmaps", ""),
    ("liqo", "get wggatewayclienttemplates.networking.liqo.io wireguard-client", ""),
    ("liqo", "patch wggatewayclienttemplates.networking.liqo.io wireguard-client", ""),
    ("liqo", "create networks.ipam.liqo.io", "c"),
    ("liqo", "update networks.ipam.liqo.io pod-cidr", ""),
    ("liqo", "create pods", ""),
    ("liqo", "delete pods liqo-withdrawal", "cw"),
    ("liqo", "patch daemonsets.apps liqo-route-agent", ""),
    (SYSTEM, "get secrets of-a-user", ""),
    (SYSTEM, "patch secrets of-a-user", ""),
    (SYSTEM, "list secrets", ""),
    (SYSTEM, "get configmaps extension-apiserver-authentication", ""),
    (SYSTEM, "update leases.coordination.k8s.io kube-scheduler", ""),
    (SYSTEM, "create pods", ""),
    (SYSTEM, "create serviceaccounts/token clusterrole-aggregation-controller", ""),
    (SYSTEM, "create connections.networking.liqo.io", "c"),
    ("", "create tokenreviews.authentication.k8s.io", "i"),
    ("", "list networks.ipam.liqo.io", "ciw"),
    ("", "watch ips.ipam.liqo.io", "ci"),
    ("", "list nodes", "cw"),
    ("", "get nodes rome-1", ""),
    ("", "patch nodes rome-1", ""),
    ("", "patch nodes/status rome-1", ""),
    ("", "get nodes/proxy rome-1", ""),
    ("", "watch nodeconfigs.fabric.weft.dev", "ca"),
    ("", "create nodeconfigs.fabric.weft.dev", "c"),
    ("", "patch nodeconfigs.fabric.weft.dev rome-1", "cw"),
    ("", "patch nodeconfigs.fabric.weft.dev/status rome-1", "a"),
    ("", "delete nodeconfigs.fabric.weft.dev rome-1", "cw"),
    // MAC addresses of all gateways: no gateway may read those of others.
    ("", "watch fabricrecords.fabric.weft.dev", "ca"),
    ("", "get fabricrecords.fabric.weft.dev peering-milan", "ca"),
    ("", "list fabricrecords.fabric.weft.dev", "caw"),
    ("", "create fabricrecords.fabric.weft.dev", "c"),
    ("", "patch fabricrecords.fabric.weft.dev peering-milan", "c"),
    ("", "delete fabricrecords.fabric.weft.dev peering-milan", "cw"),
    // Of nodes alone: nothing in them is about another gateway.
    ("", "watch gatewayrecords.fabric.weft.dev", "cgo"),
    ("", "get gatewayrecords.fabric.weft.dev node-rome-1", "cgo"),
    ("", "list gatewayrecords.fabric.weft.dev", "cgow"),
    ("", "create gatewayrecords.fabric.weft.dev", "c"),
    ("", "patch gatewayrecords.fabric.weft.dev node-rome-1", "c"),
    ("", "delete gatewayrecords.fabric.weft.dev node-rome-1", "cw"),
    ("", "list namespaces", ""),
    ("", "create namespaces", ""),
    ("", "delete namespaces liqo-tenant-milan", ""),
    ("", "patch foreignclusters.core.liqo.io/status milan", "cw"),
    ("", "create customresourcedefinitions.apiextensions.k8s.io", ""),
    ("", "patch customresourcedefinitions.apiextensions.k8s.io ips.ipam.liqo.io", ""),
    ("", "create clusterroles.rbac.authorization.k8s.io", ""),
    ("", "patch clusterroles.rbac.authorization.k8s.io liqo-gateway", ""),
    ("", "bind clusterroles.rbac.authorization.k8s.io liqo-gateway-keys", "c"),
    ("", "bind clusterroles.rbac.authorization.k8s.io cluster-admin", ""),
    ("", "create clusterrolebindings.rbac.authorization.k8s.io", ""),
    ("", "patch clusterrolebindings.rbac.authorization.k8s.io liqo-gateway-records", "c"),
    ("", "patch clusterrolebindings.rbac.authorization.k8s.io cluster-admin", ""),
    ("", "impersonate users admin", ""),
    ("", "impersonate groups system:masters", ""),
    ("", "create certificatesigningrequests.certificates.k8s.io", ""),
    ("", "list persistentvolumes", ""),
    ("", "patch mutatingwebhookconfigurations.admissionregistration.k8s.io weft-cidr-lists", "c"),
    ("", "delete mutatingwebhookconfigurations.admissionregistration.k8s.io weft-cidr-lists", "w"),
    ("", "delete mutatingwebhookconfigurations.admissionregistration.k8s.io other", ""),
    ("", "patch mutatingwebhookconfigurations.admissionregistration.k8s.io of-a-user", ""),
    ("", "create mutatingwebhookconfigurations.admissionregistration.k8s.io", ""),
    ("", "create validatingwebhookconfigurations.admissionregistration.k8s.io", ""),
];

/// Checks rights in a cluster with a gateway for milan and one for turin.
pub(crate) fn are_minimal(cluster: &Kubernetes) -> Result<()> {
    let withdrawal = rights_of_withdrawal(cluster)?;
    cluster.apply(&withdrawal)?;
    let wrong = wrong_rows(cluster);
    cluster.delete(&withdrawal)?;
    let wrong = wrong?;
    ensure!(wrong.is_empty(), "{wrong:#?}");
    tokens_open_no_more(cluster)?;
    deleted_bindings_are_made_again(cluster)
}

fn wrong_rows(cluster: &Kubernetes) -> Result<Vec<String>> {
    let rows = OF_PEERINGS.iter().chain(ELSEWHERE);
    let cases: Vec<_> = rows.flat_map(|row| ACCOUNTS.map(|account| (row, account))).collect();
    let reviews: Vec<_> = cases
        .iter()
        .map(|((place, what, _), (_, account))| access_review(account, &namespace(place), what))
        .collect();
    let answers = cluster.may(&reviews)?;
    let wrong = cases
        .iter()
        .zip(answers)
        .filter(|(((.., who), (letter, _)), may)| who.contains(*letter) != *may);
    Ok(wrong
        .map(|(((place, what, _), (_, account)), may)| {
            let may = if may { "may" } else { "may not" };
            format!("{account} {may} {what} in {:?}", namespace(place))
        })
        .collect())
}

fn namespace(place: &str) -> String {
    let is_peer = ["milan", "turin"].contains(&place);
    if is_peer { format!("liqo-tenant-{place}") } else { place.to_owned() }
}

/// Rights that helm grants it while a release is uninstalled.
fn rights_of_withdrawal(cluster: &Kubernetes) -> Result<String> {
    let hooks = cluster.helm(&["get", "hooks", "weft", "--namespace", "liqo"])?;
    let hooks: Vec<Value> = serde_saphyr::from_multiple(&hooks)?;
    let is_right = |hook: &Value| hook["kind"].as_str().is_some_and(|kind| kind != "Job");
    let rights: Vec<_> = hooks.into_iter().filter(is_right).collect();
    ensure!(rights.len() == 5, "{rights:#?}");
    Ok(json!({"apiVersion": "v1", "kind": "List", "items": rights}).to_string())
}

/// The controller can grant a gateway no right to Secrets that it has lost itself.
fn deleted_bindings_are_made_again(cluster: &Kubernetes) -> Result<()> {
    let bindings = ["rolebinding/weft-gateway-keys", "rolebinding/gw-client"];
    let namespace = "--namespace=liqo-tenant-milan";
    cluster.kubectl(&[&["delete", namespace], &bindings[..]].concat())?;
    let get = [&["get", namespace, "--output=name"], &bindings[..]].concat();
    let start = Instant::now();
    while cluster.kubectl(&get).is_err() {
        ensure!(start.elapsed() < Duration::from_secs(20), "{bindings:?} are not made again");
        sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Requests with a gateway's own token are answered in the same way.
fn tokens_open_no_more(cluster: &Kubernetes) -> Result<()> {
    let own = ["get", "secret", "gw-keys", "--namespace=liqo-tenant-milan", "--output=name"];
    let named = ["get", "gatewayconfigs", "--field-selector=metadata.name=client"];
    let named = [&named[..], &["--namespace=liqo-tenant-milan"]].concat();
    cluster.kubectl_as(GATEWAY, &own)?;
    cluster.kubectl_as(GATEWAY, &named)?;
    cluster.kubectl_as(GATEWAY, &["get", "gatewayrecords", "--output=name"])?;
    for forbidden in [
        &["get", "secrets", "--namespace=liqo-tenant-milan"][..],
        &["get", "secret", "gw-keys", "--namespace=liqo-tenant-turin"],
        &["get", "gatewayconfigs", "--namespace=liqo-tenant-milan"],
        &["get", "secrets", "--all-namespaces"],
        &["get", "fabricrecords"],
    ] {
        let Err(error) = cluster.kubectl_as(GATEWAY, forbidden) else {
            bail!("{GATEWAY} may {forbidden:?}")
        };
        let text = format!("{error:#}");
        ensure!(text.contains("Forbidden"), "{text}");
    }
    Ok(())
}
