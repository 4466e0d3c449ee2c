//! Rights of a gateway in the API: read its own config and Secret, write its own status and
//! Connection.

use fabric_api::labels;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

const RBAC: &str = "rbac.authorization.k8s.io";

pub(super) fn account(metadata: ObjectMeta) -> ServiceAccount {
    ServiceAccount { metadata, ..ServiceAccount::default() }
}

pub(super) fn role(metadata: ObjectMeta, gateway: &str, secret: &str) -> Role {
    let connection = format!("gw-{gateway}");
    let rules = vec![
        rule("fabric.weft.dev", "gatewayconfigs", &["get", "list", "watch"], Some(gateway)),
        rule("fabric.weft.dev", "gatewayconfigs/status", &["get", "patch"], Some(gateway)),
        rule("", "secrets", &["get", "list", "watch"], Some(secret)),
        // An object to create has no name yet when it is authorised.
        rule(labels::NETWORKING_GROUP, "connections", &["create"], None),
        rule(
            labels::NETWORKING_GROUP,
            "connections",
            &["get", "list", "watch", "patch", "delete"],
            Some(&connection),
        ),
        rule(labels::NETWORKING_GROUP, "connections/status", &["get", "patch"], Some(&connection)),
    ];
    Role { metadata, rules: Some(rules) }
}

/// Gives the account of that name the role of that name.
pub(super) fn binding(metadata: ObjectMeta) -> RoleBinding {
    let name = metadata.name.clone().unwrap_or_default();
    let subject = Subject {
        kind: "ServiceAccount".to_owned(),
        name: name.clone(),
        namespace: metadata.namespace.clone(),
        ..Subject::default()
    };
    let role_ref = RoleRef { api_group: Some(RBAC.to_owned()), kind: "Role".to_owned(), name };
    RoleBinding { metadata, role_ref, subjects: Some(vec![subject]) }
}

fn rule(group: &str, resource: &str, verbs: &[&str], name: Option<&str>) -> PolicyRule {
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(vec![resource.to_owned()]),
        resource_names: name.map(|name| vec![name.to_owned()]),
        verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
        ..PolicyRule::default()
    }
}
