//! Rights of a gateway in the API: read its own config and Secret and what all gateways share, write
//! its own status and Connection.

use std::collections::BTreeSet;

use fabric_api::labels;
use fabric_objects::ObjectRef;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{
    ClusterRoleBinding, PolicyRule, Role, RoleBinding, RoleRef, Subject,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

const RBAC: &str = "rbac.authorization.k8s.io";
/// Name of the ClusterRole that may read GatewayRecords, and of its binding. The release has both, the
/// latter without subjects.
pub(super) const RECORD_READERS: &str = "liqo-gateway-records";

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
    let subject = subject(name.clone(), metadata.namespace.clone());
    RoleBinding { metadata, role_ref: role_ref("Role", name), subjects: Some(vec![subject]) }
}

/// Lets the accounts of these gateways read GatewayRecords, and `others`.
pub(super) fn record_readers<'a>(
    gateways: impl Iterator<Item = &'a ObjectRef>,
    others: Vec<Subject>,
) -> ClusterRoleBinding {
    let accounts = gateways.map(|of| (of.namespace.clone(), format!("gw-{}", of.name)));
    let others = others.into_iter().map(|subject| (subject.namespace, subject.name));
    let accounts: BTreeSet<_> = accounts.chain(others).collect();
    let subjects = accounts.into_iter().map(|(namespace, name)| subject(name, namespace));
    ClusterRoleBinding {
        metadata: ObjectMeta { name: Some(RECORD_READERS.to_owned()), ..ObjectMeta::default() },
        role_ref: role_ref("ClusterRole", RECORD_READERS.to_owned()),
        subjects: Some(subjects.collect()),
    }
}

fn subject(account: String, namespace: Option<String>) -> Subject {
    let kind = "ServiceAccount".to_owned();
    Subject { kind, name: account, namespace, ..Subject::default() }
}

fn role_ref(kind: &str, name: String) -> RoleRef {
    RoleRef { api_group: Some(RBAC.to_owned()), kind: kind.to_owned(), name }
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

#[cfg(test)]
mod tests {

    use fabric_objects::Kind;

    use super::*;

    #[test]
    fn every_gateway_reads_records_once() {
        let gateway = |peer: &str| ObjectRef::new(Kind::GatewayServer, peer, "server");
        let gateways = [gateway("milan"), gateway("paris")];
        let before = record_readers(gateways[..1].iter(), Vec::new()).subjects.unwrap();
        let readers = record_readers(gateways[1..].iter(), before.clone());
        assert_eq!(record_readers(gateways.iter(), before), readers);
        let subjects = readers.subjects.unwrap();
        let of = |subject: &Subject| subject.namespace.clone().unwrap();
        assert_eq!(subjects.iter().map(of).collect::<Vec<_>>(), ["milan", "paris"]);
        assert!(subjects.iter().all(|subject| subject.name == "gw-server"));
    }
}
