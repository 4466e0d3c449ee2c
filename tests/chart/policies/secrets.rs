//! Secrets, which weft makes, labels and removes.

use serde_json::{Value, json};

use super::*;

#[test]
fn controller_writes_own_secrets_only() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let controller = release.account(CONTROLLER);
    let key = |namespace: &str, name: &str| {
        let mut key = secret(namespace, name, json!({"data": {"privateKey": "YQ=="}}));
        key["metadata"]["labels"]["networking.liqo.io/gateway-resource"] = json!("true");
        key
    };
    controller.apply(&key(TENANT, "gw-a")).unwrap();
    refused(controller.apply(&key(OTHER, "gw-a")), "liqo.io/tenant-namespace");
    refused(controller.apply(&key("liqo", "gw-a")), "liqo.io/tenant-namespace");
    let why = "makes key pairs of gateways, named gw-NAME, and the certificate";
    for (kind, annotations) in [
        (
            "kubernetes.io/service-account-token",
            json!({"kubernetes.io/service-account.name": "gw-a"}),
        ),
        ("helm.sh/release.v1", json!({})),
    ] {
        let mut typed = with(key(TENANT, "gw-typed"), json!({ "type": kind }));
        typed["metadata"]["annotations"] = annotations;
        release.apply(&[account(TENANT, &format!("gw-{}", kind.len()))]);
        refused(controller.apply(&typed), why);
    }
    refused(controller.apply(&key(TENANT, "sh.helm.release.v1.liqo.v9")), why);
    refused(controller.apply(&secret(TENANT, "gw-unlabelled", json!({}))), why);
    certificate_is_one(&controller, why);
    let mut users = key(TENANT, "gw-users");
    users["metadata"]["labels"] = json!({"networking.liqo.io/gateway-resource": "true"});
    refused(controller.apply(&users), "make and remove Secrets with the label");
    users["metadata"]["name"] = json!("users");
    users["metadata"]["labels"] = json!({"app": "shop"});
    release.apply(&[users]);
    controller.apply(&keys(TENANT, CONTROLLER)).unwrap();
    release.server.wait_until("it may read keys there", || {
        controller.run(&["get", "secret", "users", "--namespace", TENANT], &Value::Null)
    });
    let patch = |patch: Value| {
        let patch = patch.to_string();
        let line = ["patch", "--namespace", TENANT, "secret/users", "--type=merge", "--patch"];
        controller.run(&[&line[..], &[&patch]].concat(), &Value::Null)
    };
    let labels = json!({"labels": {"networking.liqo.io/gateway-resource": "true"}});
    patch(json!({"metadata": labels, "data": {"publicKey": "Yg=="}})).unwrap();
    let why = "changes publicKey only";
    refused(patch(json!({"data": {"privateKey": "Yg=="}})), why);
    refused(patch(json!({"data": {"privateKey": null}})), why);
    refused(patch(json!({"data": {"more": "Yg=="}})), why);
    let why = "changes the labels liqo.io/remote-cluster-id and";
    let owners = json!([{"apiVersion": "v1", "kind": "Pod", "name": "none", "uid": "none"}]);
    for metadata in [
        json!({"labels": {"app.kubernetes.io/managed-by": "weft"}}),
        json!({"labels": {"app": null}}),
        json!({"annotations": {"a": "b"}}),
        json!({"finalizers": ["example.org/a"]}),
        json!({ "ownerReferences": owners }),
    ] {
        refused(patch(json!({ "metadata": metadata })), why);
    }
    refused(patch(json!({"immutable": true})), why);
    withdrawal_removes_own_secrets_only(&release);
}

fn certificate_is_one(controller: &Account<'_>, why: &str) {
    let certificate = |namespace: &str, kind: &str| {
        let data = json!({"type": kind, "data": {"tls.crt": "YQ==", "tls.key": "YQ=="}});
        secret(namespace, "weft-webhook-certificate", data)
    };
    refused(controller.apply(&certificate(TENANT, "kubernetes.io/tls")), why);
    refused(controller.apply(&certificate("liqo", "Opaque")), why);
    // kubectl warns that it is none.
    refused(controller.apply(&certificate("liqo", "kubernetes.io/tls")), "serverside-applied");
}

/// RBAC lets it remove all Secrets.
fn withdrawal_removes_own_secrets_only(release: &Release) {
    let mut role = role(TENANT, "removal");
    role["rules"] =
        json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["deletecollection"]}]);
    let mut binding = binding(TENANT, "removal", "Role", "removal");
    binding["subjects"] =
        json!([{"kind": "ServiceAccount", "name": WITHDRAWAL, "namespace": "liqo"}]);
    release.apply(&[account("liqo", WITHDRAWAL), role, binding]);
    let withdrawal = release.account(WITHDRAWAL);
    let remove = |name: &str| {
        let path =
            format!("/api/v1/namespaces/{TENANT}/secrets?fieldSelector=metadata.name={name}");
        withdrawal.run(&["delete", "--raw", &path], &Value::Null)
    };
    release.server.wait_until("it may remove its own", || remove("gw-a"));
    refused(remove("users"), "make and remove Secrets with the label");
}
