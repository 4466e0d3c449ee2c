//! Every right of every account, each with requests beside it that are refused.

use std::collections::BTreeSet;
use std::fs;

use serde_json::{Value, json};
use weft_tests::kubernetes::access_review;

use super::{RULES, VALUES, answers_to};
use crate::helm::MIN_VALUES;
use crate::life::Release;
use crate::policies::rights_of_withdrawal;

const CONTROLLER: &str = "liqo:liqo-fabric-controller";
const IPAM: &str = "liqo:liqo-ipam";
const AGENT: &str = "liqo:liqo-route-agent";
/// Account of the Job that runs while a release is uninstalled.
const WITHDRAWAL: &str = "liqo:liqo-withdrawal";
const GATEWAY: &str = "tenant:gw-milan";
/// Stands for the user of a peer, to whom liqoctl gives `liqo-peering-user`.
const USER: &str = "liqo:user";
/// Stands for a user to whom the administrator has given `weft-status`.
const READER: &str = "liqo:reader";
/// Account that nothing gives a right to.
const NOBODY: &str = "liqo:default";

const VERBS: [&str; 11] = [
    "get",
    "list",
    "watch",
    "create",
    "update",
    "patch",
    "delete",
    "deletecollection",
    "bind",
    "escalate",
    "impersonate",
];
const NAMESPACES: [&str; 3] = ["liqo", "tenant", "elsewhere"];
/// Requests that kubectl sends without a pause.
const BURST: usize = 250;

const READ: &str = "get list watch";
const OWN: &str = "get list watch create patch delete";
/// Account, namespace (none: all), resources with their groups, name (none: all), verbs.
type Row = (&'static str, &'static str, &'static str, &'static str, &'static str);

const RIGHTS: &[Row] = &[
    (CONTROLLER, "", "nodes", "", "list watch"),
    (CONTROLLER, "", "pods", "", "list watch patch delete"),
    (CONTROLLER, "", "shadowendpointslices.offloading.liqo.io", "", "list watch patch"),
    (CONTROLLER, "", "services serviceaccounts deployments.apps", "", OWN),
    (CONTROLLER, "", "poddisruptionbudgets.policy endpointslices.discovery.k8s.io", "", OWN),
    (CONTROLLER, "", "roles.rbac.authorization.k8s.io", "", OWN),
    (CONTROLLER, "", "rolebindings.rbac.authorization.k8s.io", "", OWN),
    (
        CONTROLLER,
        "",
        "clusterrolebindings.rbac.authorization.k8s.io",
        "liqo-gateway-records",
        "get list watch patch",
    ),
    (CONTROLLER, "", "clusterroles.rbac.authorization.k8s.io", "liqo-gateway-keys", "bind"),
    (CONTROLLER, "", "secrets", "", "create"),
    (CONTROLLER, "tenant", "secrets", "", "get list watch patch"),
    (CONTROLLER, "liqo", "secrets", "weft-webhook-certificate", "get list watch update"),
    (CONTROLLER, "", "events.events.k8s.io", "", "create patch"),
    (CONTROLLER, "", "configurations.networking.liqo.io", "", "get list watch patch"),
    (CONTROLLER, "", "gatewayservers.networking.liqo.io", "", READ),
    (CONTROLLER, "", "gatewayclients.networking.liqo.io", "", READ),
    (CONTROLLER, "", "configurations.networking.liqo.io/status", "", "patch"),
    (CONTROLLER, "", "gatewayservers.networking.liqo.io/status", "", "patch"),
    (CONTROLLER, "", "gatewayclients.networking.liqo.io/status", "", "patch"),
    (CONTROLLER, "", "publickeies.networking.liqo.io", "", "list watch"),
    (CONTROLLER, "", "wggatewayservertemplates.networking.liqo.io", "", "list watch"),
    (CONTROLLER, "", "wggatewayclienttemplates.networking.liqo.io", "", "list watch"),
    (CONTROLLER, "", "firewallconfigurations.networking.liqo.io", "", "list"),
    (CONTROLLER, "", "routeconfigurations.networking.liqo.io", "", "list"),
    (CONTROLLER, "", "connections.networking.liqo.io", "", OWN),
    (CONTROLLER, "", "connections.networking.liqo.io/status", "", "get patch"),
    (CONTROLLER, "", "networks.ipam.liqo.io ips.ipam.liqo.io", "", OWN),
    (CONTROLLER, "", "networks.ipam.liqo.io/status ips.ipam.liqo.io/status", "", "patch"),
    (CONTROLLER, "", "foreignclusters.core.liqo.io", "", "list watch create delete"),
    (CONTROLLER, "", "foreignclusters.core.liqo.io/status", "", "patch"),
    (CONTROLLER, "", "gatewayconfigs.fabric.weft.dev nodeconfigs.fabric.weft.dev", "", OWN),
    (CONTROLLER, "", "fabricrecords.fabric.weft.dev gatewayrecords.fabric.weft.dev", "", OWN),
    (CONTROLLER, "", "gatewayconfigs.fabric.weft.dev/status", "", "get patch"),
    (
        CONTROLLER,
        "",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io",
        "weft-cidr-lists",
        "get list watch patch",
    ),
    (CONTROLLER, "liqo", "configmaps", "liqo-clusterid-configmap", READ),
    (CONTROLLER, "liqo", "configmaps leases.coordination.k8s.io", "", "create"),
    (CONTROLLER, "liqo", "leases.coordination.k8s.io", "weft-fabric-controller", "get update"),
    (IPAM, "", "networks.ipam.liqo.io ips.ipam.liqo.io", "", READ),
    (IPAM, "", "tokenreviews.authentication.k8s.io", "", "create"),
    (IPAM, "liqo", "configmaps", "", "create"),
    (IPAM, "liqo", "configmaps", "weft-ipam-open-grants", "get patch"),
    (AGENT, "", "nodeconfigs.fabric.weft.dev fabricrecords.fabric.weft.dev", "", READ),
    (AGENT, "", "nodeconfigs.fabric.weft.dev/status", "", "patch"),
    (WITHDRAWAL, "", "nodes pods", "", "list"),
    (WITHDRAWAL, "liqo", "pods", "", "delete"),
    (WITHDRAWAL, "", "nodeconfigs.fabric.weft.dev", "", "list patch delete"),
    (WITHDRAWAL, "", "gatewayconfigs.fabric.weft.dev", "", "list delete"),
    (WITHDRAWAL, "", "fabricrecords.fabric.weft.dev", "", "list delete"),
    (WITHDRAWAL, "", "gatewayrecords.fabric.weft.dev", "", "list delete"),
    (WITHDRAWAL, "", "services serviceaccounts deployments.apps", "", "list delete"),
    (WITHDRAWAL, "", "poddisruptionbudgets.policy", "", "list delete"),
    (WITHDRAWAL, "", "endpointslices.discovery.k8s.io", "", "list delete"),
    (WITHDRAWAL, "", "roles.rbac.authorization.k8s.io", "", "list delete"),
    (WITHDRAWAL, "", "rolebindings.rbac.authorization.k8s.io", "", "list delete"),
    (WITHDRAWAL, "", "secrets", "", "deletecollection"),
    (WITHDRAWAL, "", "connections.networking.liqo.io", "", "list delete"),
    (WITHDRAWAL, "", "networks.ipam.liqo.io ips.ipam.liqo.io", "", "list delete"),
    (WITHDRAWAL, "", "networks.ipam.liqo.io/status ips.ipam.liqo.io/status", "", "patch"),
    (WITHDRAWAL, "", "configurations.networking.liqo.io", "", "list patch"),
    (WITHDRAWAL, "", "gatewayservers.networking.liqo.io", "", "list"),
    (WITHDRAWAL, "", "gatewayclients.networking.liqo.io", "", "list"),
    (WITHDRAWAL, "", "configurations.networking.liqo.io/status", "", "patch"),
    (WITHDRAWAL, "", "gatewayservers.networking.liqo.io/status", "", "patch"),
    (WITHDRAWAL, "", "gatewayclients.networking.liqo.io/status", "", "patch"),
    (WITHDRAWAL, "", "foreignclusters.core.liqo.io", "", "list watch delete"),
    (WITHDRAWAL, "", "foreignclusters.core.liqo.io/status", "", "patch"),
    (
        WITHDRAWAL,
        "",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io",
        "weft-cidr-lists",
        "get delete",
    ),
    (WITHDRAWAL, "", "events.events.k8s.io", "", "create"),
    (WITHDRAWAL, "liqo", "leases.coordination.k8s.io", "", "create"),
    (WITHDRAWAL, "liqo", "leases.coordination.k8s.io", "weft-fabric-controller", "get update"),
    (WITHDRAWAL, "liqo", "configmaps", "liqo-clusterid-configmap", "get delete"),
    (GATEWAY, "", "gatewayrecords.fabric.weft.dev", "", READ),
    (GATEWAY, "tenant", "gatewayconfigs.fabric.weft.dev", "milan", READ),
    (GATEWAY, "tenant", "gatewayconfigs.fabric.weft.dev/status", "milan", "get patch"),
    (GATEWAY, "tenant", "secrets", "gw-keys", READ),
    (GATEWAY, "tenant", "connections.networking.liqo.io", "", "create"),
    (
        GATEWAY,
        "tenant",
        "connections.networking.liqo.io",
        "gw-milan",
        "get list watch patch delete",
    ),
    (GATEWAY, "tenant", "connections.networking.liqo.io/status", "gw-milan", "get patch"),
    (USER, "liqo", "configmaps", "", READ),
    (USER, "liqo", "ips.ipam.liqo.io", "", "get"),
    (USER, "liqo", "networks.ipam.liqo.io", "", "get list"),
    (USER, "liqo", "wggatewayservertemplates.networking.liqo.io", "", "get list"),
    (USER, "liqo", "wggatewayclienttemplates.networking.liqo.io", "", "get list"),
    (USER, "tenant", "namespaces services deployments.apps", "", "get"),
    (USER, "tenant", "secrets", "", "create delete get list"),
    (USER, "tenant", "tenants.authentication.liqo.io", "", "create delete get list update"),
    (USER, "tenant", "ips.ipam.liqo.io", "", "create delete get update"),
    (USER, "tenant", "configurations.networking.liqo.io", "", "create delete get list update"),
    (USER, "tenant", "gatewayservers.networking.liqo.io", "", "create delete get list update"),
    (USER, "tenant", "gatewayclients.networking.liqo.io", "", "create delete get list update"),
    (USER, "tenant", "publickeies.networking.liqo.io", "", "create delete get list update"),
    (USER, "tenant", "connections.networking.liqo.io", "", "get list"),
    (USER, "tenant", "gatewayservers.networking.liqo.io/status", "", "get"),
    (USER, "tenant", "gatewayclients.networking.liqo.io/status", "", "get"),
    (READER, "", "configurations.networking.liqo.io", "", READ),
    (READER, "", "connections.networking.liqo.io publickeies.networking.liqo.io", "", READ),
    (READER, "", "gatewayservers.networking.liqo.io", "", READ),
    (READER, "", "gatewayclients.networking.liqo.io", "", READ),
    (READER, "", "networks.ipam.liqo.io ips.ipam.liqo.io", "", READ),
    (READER, "", "gatewayconfigs.fabric.weft.dev nodeconfigs.fabric.weft.dev", "", READ),
    (READER, "", "fabricrecords.fabric.weft.dev", "", READ),
    (READER, "", "nodes pods deployments.apps", "", "list"),
    (READER, "", "leases.coordination.k8s.io", "weft-fabric-controller", "list"),
];

/// Right of the withdrawal with `withdrawal.keepPrefixes`.
const TO_KEEP_PREFIXES: Row = (WITHDRAWAL, "", "networks.ipam.liqo.io", "", "patch");

/// One right in one namespace: resource, name (none: all), verb.
type Right = (String, String, String);

/// Checks the table in a release whose controller may read keys in the namespace `tenant`, and has
/// bound the account of its gateway.
pub(super) fn holds(release: &Release) {
    prepare(release);
    has_rows(release, RIGHTS);
    let keep_prefixes = [MIN_VALUES, VALUES, "withdrawal: {keepPrefixes: true}"];
    release.helm("upgrade", &keep_prefixes).unwrap();
    let rights =
        json!({"apiVersion": "v1", "kind": "List", "items": rights_of_withdrawal(release)});
    let apply = ["apply", "--server-side", "--force-conflicts", "--filename=-"];
    release.server.kubectl(&apply, &rights.to_string()).unwrap();
    has_rows(release, &[RIGHTS, &[TO_KEEP_PREFIXES]].concat());
}

fn has_rows(release: &Release, rows: &[Row]) {
    let every = token_of(release, NOBODY);
    let every = NAMESPACES.map(|namespace| listed(release, &every, namespace));
    for account in [CONTROLLER, IPAM, AGENT, WITHDRAWAL, GATEWAY, USER, READER] {
        let token = token_of(release, account);
        for (namespace, every) in NAMESPACES.iter().zip(&every) {
            let wants = rights(rows, account, namespace);
            release.server.wait_until("the rights are those of the table", || {
                let has = listed(release, &token, namespace);
                let has: BTreeSet<_> = has.difference(every).cloned().collect();
                let more: Vec<_> = has.difference(&wants).collect();
                let less: Vec<_> = wants.difference(&has).collect();
                let differs = format!("{account} in {namespace}: more {more:?}, less {less:?}");
                if has == wants { Ok(()) } else { Err(differs) }
            });
        }
    }
    let cases: BTreeSet<_> = rows.iter().flat_map(|row| beside(rows, row)).collect();
    let cases: Vec<_> = cases.into_iter().collect();
    let reviews: Vec<_> =
        cases.iter().map(|(who, place, what)| access_review(who, place, what)).collect();
    let answers: Vec<_> =
        reviews.chunks(BURST).flat_map(|some| answers_to(release, some)).collect();
    let wrong: Vec<_> = cases.iter().zip(answers).filter(|(_, may)| *may).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Adds what is not there in a release that stays: the withdrawal's rights, a gateway's, a user's.
fn prepare(release: &Release) {
    release.apply(&rights_of_withdrawal(release));
    let rules = fs::read_to_string(RULES).unwrap().replace("server", "milan");
    let rules: Value = serde_saphyr::from_str(&rules).unwrap();
    let metadata = |name: &str, namespace: &str| json!({"name": name, "namespace": namespace});
    let account = |account: &str| {
        let (namespace, name) = account.split_once(':').unwrap();
        json!({"kind": "ServiceAccount", "name": name, "namespace": namespace})
    };
    let group = "rbac.authorization.k8s.io";
    let binding = |of: &str, kind: &str, role: &str, namespace: &str| {
        json!({"apiVersion": format!("{group}/v1"), "kind": "RoleBinding",
            "metadata": metadata(role, namespace), "subjects": [account(of)],
            "roleRef": {"apiGroup": group, "kind": kind, "name": role}})
    };
    release.apply(&[
        json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": metadata("gw-milan", "tenant")}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata("user", "liqo")}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": metadata("reader", "liqo")}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": metadata("default", "liqo")}),
        json!({"apiVersion": format!("{group}/v1"), "kind": "Role",
            "metadata": metadata("gw-milan", "tenant"), "rules": rules}),
        binding(GATEWAY, "Role", "gw-milan", "tenant"),
        binding(USER, "Role", "liqo-peering-user", "liqo"),
        binding(USER, "ClusterRole", "liqo-peering-user", "tenant"),
        json!({"apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding",
            "metadata": {"name": "reader"}, "subjects": [account(READER)],
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "weft-status"}}),
    ]);
}

/// Rights of an account in a namespace by the rows.
fn rights(rows: &[Row], account: &str, namespace: &str) -> BTreeSet<Right> {
    let rows = rows
        .iter()
        .filter(|(who, place, ..)| *who == account && (place.is_empty() || *place == namespace));
    rows.flat_map(|(_, _, resources, name, verbs)| {
        resources.split(' ').flat_map(move |resource| {
            let right = |verb: &str| (resource.to_owned(), (*name).to_owned(), verb.to_owned());
            verbs.split(' ').map(right)
        })
    })
    .collect()
}

fn token_of(release: &Release, account: &str) -> String {
    let (namespace, name) = account.split_once(':').unwrap();
    let create = ["create", "token", name, "--namespace", namespace];
    format!("--token={}", release.server.kubectl(&create, "").unwrap().trim())
}

/// Rights in a namespace as the API server lists them to a token.
fn listed(release: &Release, token: &str, namespace: &str) -> BTreeSet<Right> {
    let review = json!({"apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}});
    let create = [token, "create", "--validate=false", "--filename=-", "--output=json"];
    let review = release.server.kubectl(&create, &review.to_string()).unwrap();
    let review: Value = serde_json::from_str(&review).unwrap();
    review["status"]["resourceRules"].as_array().unwrap().iter().flat_map(rights_of).collect()
}

fn rights_of(rule: &Value) -> Vec<Right> {
    let texts = |key: &str| {
        let list = rule[key].as_array().cloned().unwrap_or_default();
        list.iter().map(|text| text.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let names = Some(texts("resourceNames")).filter(|names| !names.is_empty());
    let names = names.unwrap_or_else(|| vec![String::new()]);
    let mut all = Vec::new();
    for group in texts("apiGroups") {
        for resource in texts("resources").iter().map(|resource| in_group(resource, &group)) {
            for name in &names {
                let verbs = texts("verbs").into_iter();
                all.extend(verbs.map(|verb| (resource.clone(), name.clone(), verb)));
            }
        }
    }
    all
}

/// `RESOURCE[.GROUP][/SUBRESOURCE]`.
fn in_group(resource: &str, group: &str) -> String {
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, subresource)) => (resource, format!("/{subresource}")),
        None => (resource, String::new()),
    };
    let dot = if group.is_empty() { "" } else { "." };
    format!("{resource}{dot}{group}{subresource}")
}

/// Requests beside a row that the account may not make: other verbs, another name, another namespace.
fn beside(
    rows: &[Row],
    (account, place, resources, name, verbs): &Row,
) -> Vec<(String, String, String)> {
    let namespace = if place.is_empty() { "tenant" } else { place };
    let mut cases = Vec::new();
    for resource in resources.split(' ') {
        let mut refuse = |namespace: &str, name: &str, verb: &str| {
            let has = |of: &str| {
                let right = (resource.to_owned(), of.to_owned(), verb.to_owned());
                rights(rows, account, namespace).contains(&right)
            };
            if !has("") && !has(name) {
                let what = format!("{verb} {resource} {name}");
                cases.push(((*account).to_owned(), namespace.to_owned(), what.trim().to_owned()));
            }
        };
        VERBS.iter().for_each(|verb| refuse(namespace, name, verb));
        for verb in verbs.split(' ').filter(|_| !name.is_empty()) {
            refuse(namespace, "other", verb);
        }
        for verb in verbs.split(' ').filter(|_| !place.is_empty()) {
            refuse("elsewhere", name, verb);
        }
    }
    cases
}
