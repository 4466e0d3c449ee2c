//! Secrets, which weft makes, labels and removes.

use serde_json::{Value, json};

use super::*;

#[test]
fn controller_writes_own_secrets_only() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let controller = release.account(CONTROLLER);
    let key = |key: &str| json!({"data": {"privateKey": key}});
    controller.apply(&secret(TENANT, "gw-a", key("YQ=="))).unwrap();
    refused(controller.apply(&secret(OTHER, "gw-a", key("YQ=="))), "liqo.io/tenant-namespace");
    let mut token = secret("liqo", "token", json!({"type": "kubernetes.io/service-account-token"}));
    token["metadata"]["annotations"] =
        json!({"kubernetes.io/service-account.name": "liqo-route-agent"});
    refused(controller.apply(&token), "makes no tokens of accounts");
    // The certificate of the webhook is one.
    controller.apply(&secret("liqo", "typed", json!({"type": "example.org/tls"}))).unwrap();
    let mut users = secret(TENANT, "users", key("YQ=="));
    users["metadata"]["labels"] = json!({});
    refused(controller.apply(&users), "make and remove Secrets with the label");
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
    let why = "labels, owners and publicKey only";
    refused(patch(json!({"data": {"privateKey": "Yg=="}})), why);
    refused(patch(json!({"data": {"privateKey": null}})), why);
    refused(patch(json!({"data": {"more": "Yg=="}})), why);
    withdrawal_removes_own_secrets_only(&release);
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
