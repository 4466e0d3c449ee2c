//! Secrets with keys: a program that reads gateways reads those in their namespaces only.

use fabric_api::labels::GATEWAY_RESOURCE;
use fabric_store::{Event, Kind};
use serde_json::{Value, json};

use crate::{NamespaceWatch, Place, problems};

const CONTROLLER: &str = "system:serviceaccount:liqo:liqo-fabric-controller";
const READ: [Kind; 3] = [Kind::Secret, Kind::GatewayServer, Kind::GatewayClient];
const GROUP: &str = "rbac.authorization.k8s.io";

fn secret(namespace: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "gw-keys", "namespace": namespace, "labels": {(GATEWAY_RESOURCE): "true"}}})
}

fn server(namespace: &str) -> Value {
    json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
        "metadata": {"name": "server", "namespace": namespace},
        "spec": {"endpoint": {"serviceType": "ClusterIP", "port": 51840}}})
}

fn rule(group: &str, resources: &[&str], verbs: &[&str], names: &[&str]) -> Value {
    json!({"apiGroups": [group], "resources": resources, "verbs": verbs, "resourceNames": names})
}

/// Lets a user list gateways, and have more rules.
async fn allow(place: &Place, user: &str, more: &[Value]) {
    let gateways = ["gatewayservers", "gatewayclients"];
    let gateways = rule("networking.liqo.io", &gateways, &["list", "watch"], &[]);
    let name = user.replace(':', ".");
    let role = |name: &str, rules: &[Value]| {
        json!({"apiVersion": format!("{GROUP}/v1"), "kind": "ClusterRole",
            "metadata": {"name": name}, "rules": rules})
    };
    let binding = json!({"apiVersion": format!("{GROUP}/v1"), "kind": "ClusterRoleBinding",
        "metadata": {"name": name}, "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": GROUP, "kind": "User", "name": user}]});
    let keys = rule("", &["secrets"], &["get", "list", "watch"], &[]);
    place.admin.apply("clusterroles", &role("liqo-gateway-keys", &[keys])).await;
    place.admin.apply("clusterroles", &role(&name, &[&[gateways], more].concat())).await;
    place.admin.apply("clusterrolebindings", &binding).await;
}

fn names(events: &[Event]) -> Vec<String> {
    let name = |event: &Event| match event {
        Event::Applied(object) => Some(object.reference().to_string()),
        Event::Deleted(object) => Some(format!("no {object}")),
        Event::Problems(_) | Event::Synced => None,
    };
    events.iter().filter_map(name).collect()
}

/// Next event of this test's objects.
async fn next(watch: &mut NamespaceWatch) -> Event {
    loop {
        let event = watch.next().await;
        if names(std::slice::from_ref(&event)).iter().any(|name| name.contains("keys-late")) {
            return event;
        }
    }
}

#[tokio::test]
async fn secrets_are_read_where_gateways_are_only() {
    let Some(place) = Place::new("keys").await else { return };
    for namespace in ["keys-of-users", "keys-late"] {
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        place.admin.apply("namespaces", &namespace).await;
    }
    for namespace in ["keys", "keys-of-users", "keys-late"] {
        place.admin.apply("secrets", &secret(namespace)).await;
    }
    place.admin.apply("gatewayservers", &server("keys")).await;
    let bind = [
        rule(GROUP, &["rolebindings"], &["get", "create", "patch"], &[]),
        rule(GROUP, &["clusterroles"], &["bind"], &["liqo-gateway-keys"]),
    ];
    allow(&place, CONTROLLER, &bind).await;
    let store = place.store_of(CONTROLLER);
    assert!(store.check(&READ).await.is_empty());
    let mut watch = NamespaceWatch::everywhere(store.watch(&READ).unwrap());
    let mut first = names(&watch.sync().await);
    first.retain(|name| !name.contains("denied"));
    assert_eq!(first, ["Secret keys/gw-keys", "GatewayServer keys/server"], "in this order");

    let gateway = place.admin.apply("gatewayservers", &server("keys-late")).await;
    let late = [next(&mut watch).await, next(&mut watch).await];
    assert_eq!(names(&late), ["Secret keys-late/gw-keys", "GatewayServer keys-late/server"]);
    let binding = json!({"apiVersion": format!("{GROUP}/v1"), "kind": "RoleBinding",
        "metadata": {"name": "weft-gateway-keys", "namespace": "keys-late"}});
    let binding = place.admin.get("rolebindings", &binding).await.unwrap();
    let owner = &binding.metadata.owner_references.unwrap()[0];
    assert_eq!(Some(&owner.uid), gateway.metadata.uid.as_ref(), "it goes with the gateway");
    place.admin.delete("gatewayservers", &server("keys-late")).await;
    let gone = [next(&mut watch).await, next(&mut watch).await];
    assert_eq!(names(&gone), ["no GatewayServer keys-late/server", "no Secret keys-late/gw-keys"]);
    store
        .get(&fabric_store::ObjectRef::new(Kind::Secret, "keys-of-users", "gw-keys"))
        .await
        .unwrap_err();
}

#[tokio::test]
async fn gateway_is_reported_though_its_secrets_are_denied() {
    let Some(place) = Place::new("denied").await else { return };
    place.admin.apply("secrets", &secret("denied")).await;
    place.admin.apply("gatewayservers", &server("denied")).await;
    allow(&place, "denied", &[]).await;
    let mut watch = place.watch(&place.store_of("denied"), &READ);
    let mut events = watch.sync().await;
    let problems = problems(events.pop().unwrap());
    assert_eq!(names(&events), ["GatewayServer denied/server"]);
    let expected = "Secret denied/gw-server: may not watch Secret of its namespace: ";
    assert!(problems.iter().any(|problem| problem.starts_with(expected)), "{problems:?}");
}
