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
    controller.create(&key(TENANT, "gw-a")).unwrap();
    refused(controller.create(&key(OTHER, "gw-a")), "liqo.io/tenant-namespace");
    refused(controller.create(&key("liqo", "gw-a")), "liqo.io/tenant-namespace");
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
        refused(controller.create(&typed), why);
    }
    refused(controller.create(&key(TENANT, "sh.helm.release.v1.liqo.v9")), why);
    refused(controller.create(&secret(TENANT, "gw-unlabelled", json!({}))), why);
    certificate_is_one(&controller, why);
    let why = "have privateKey and publicKey, and the labels";
    let identity = json!({"kubeconfig": "YQ=="});
    refused(controller.create(&with(key(TENANT, "gw-b"), json!({ "data": identity }))), why);
    let mut identity = key(TENANT, "gw-b");
    identity["metadata"]["labels"]["liqo.io/identity-type"] = json!("ControlPlane");
    refused(controller.create(&identity), why);
    let mut users = key(TENANT, "gw-users");
    users["metadata"]["labels"] = json!({"networking.liqo.io/gateway-resource": "true"});
    refused(controller.create(&users), "make and remove Secrets with the label");
    users["metadata"]["name"] = json!("users");
    users["metadata"]["labels"] = json!({"app": "shop"});
    release.apply(&[users]);
    controller.apply(&keys(TENANT, CONTROLLER)).unwrap();
    release.server.wait_until("it may read keys there", || {
        controller.run(&["get", "secret", "users", "--namespace", TENANT], &Value::Null)
    });
    let patch_of = |name: &str, patch: Value| {
        let (patch, name) = (patch.to_string(), format!("secret/{name}"));
        let line = ["patch", "--namespace", TENANT, &name, "--type=merge", "--patch", &patch];
        controller.run(&line, &Value::Null)
    };
    let patch = |change: Value| patch_of("users", change);
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
    let of_wefts = |change: Value| patch_of("gw-a", change);
    let why = "have privateKey and publicKey, and the labels";
    refused(of_wefts(json!({"metadata": {"labels": {"liqo.io/identity-type": "a"}}})), why);
    refused(of_wefts(json!({"data": {"kubeconfig": "YQ=="}})), why);
    of_wefts(json!({"data": {"publicKey": "YQ=="}})).unwrap();
    // The API server's answer quotes what does not fit, before a policy is asked.
    let victim = secret(OTHER, "victim", json!({"data": {"password": "c2VjcmV0"}}));
    release.apply(std::slice::from_ref(&victim));
    refused(controller.apply(&victim), "cannot patch resource");
    withdrawal_removes_own_secrets_only(&release);
}

fn certificate_is_one(controller: &Account<'_>, why: &str) {
    let certificate = |namespace: &str, kind: &str| {
        let data = json!({"type": kind, "data": {"tls.crt": "YQ==", "tls.key": "YQ=="}});
        secret(namespace, "weft-webhook-certificate", data)
    };
    refused(controller.create(&certificate(TENANT, "kubernetes.io/tls")), why);
    refused(controller.create(&certificate("liqo", "Opaque")), why);
    // kubectl warns that it is none.
    refused(controller.create(&certificate("liqo", "kubernetes.io/tls")), "certificate created");
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
