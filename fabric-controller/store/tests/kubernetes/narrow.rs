//! Secrets and ConfigMaps: only those that concern weft are reported.

use fabric_api::labels::{CLUSTER_ID_CONFIGMAP, GATEWAY_RESOURCE, LIQO_NAMESPACE};
use fabric_store::{Event, Kind, Object, ObjectRef, Store, StoreArgs};
use serde_json::{Value, json};

use crate::{NamespaceWatch, Place, applied};

fn secret(place: &Place, name: &str, labels: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": name, "namespace": place.namespace, "labels": labels},
        "data": {"privateKey": "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc="},
    })
}

fn reference(place: &Place, name: &str) -> ObjectRef {
    ObjectRef::new(Kind::Secret, &place.namespace, name)
}

fn applied_name(event: Event) -> String {
    applied(event).name().to_owned()
}

#[tokio::test]
async fn labelled_or_named_secret_is_reported() {
    let Some(place) = Place::new("secrets").await else { return };
    let label = json!({(GATEWAY_RESOURCE): "true"});
    for (name, labels) in [("labelled", &label), ("named", &json!({})), ("foreign", &json!({}))] {
        place.admin.apply("secrets", &secret(&place, name, labels)).await;
    }
    let store = place.store();
    let mut watch = place.watch(&store, &[Kind::Secret]);
    let first = watch.sync().await;
    let is_one = |e: &Event| matches!(e, Event::Applied(secret) if secret.name() == "labelled");
    assert!(first.len() == 2 && first.iter().any(is_one), "{first:?}");
    let listed = store.list(Kind::Secret).await.unwrap();
    assert!(!listed.iter().any(|secret| ["named", "foreign"].contains(&secret.name())));

    let named = [reference(&place, "named"), reference(&place, "late")].into();
    assert!(watch.watch.name(&named) && !watch.watch.name(&named));
    assert_eq!(applied_name(watch.next().await), "named");
    watch.quiet().await;
    place.admin.apply("secrets", &secret(&place, "late", &json!({}))).await;
    assert_eq!(applied_name(watch.next().await), "late");

    assert!(!watch.watch.name(&[reference(&place, "late")].into()));
    assert!(matches!(watch.next().await, Event::Deleted(gone) if gone.name == "named"));
    place.admin.apply("secrets", &secret(&place, "named", &json!({"x": "y"}))).await;
    watch.quiet().await;
}

#[tokio::test]
async fn newly_labelled_secret_is_reported_once() {
    let Some(place) = Place::new("labelled").await else { return };
    place.admin.apply("secrets", &secret(&place, "keys", &json!({}))).await;
    let mut watch = place.watch(&place.store(), &[Kind::Secret]);
    watch.sync().await;
    watch.watch.name(&[reference(&place, "keys")].into());
    assert_eq!(applied_name(watch.next().await), "keys");
    let labelled = secret(&place, "keys", &json!({(GATEWAY_RESOURCE): "true"}));
    place.admin.apply("secrets", &labelled).await;
    assert_eq!(applied_name(watch.next().await), "keys");
    watch.quiet().await;
    assert!(!watch.watch.name(&[].into()));
    watch.quiet().await;
    place.admin.delete("secrets", &labelled).await;
    assert!(matches!(watch.next().await, Event::Deleted(gone) if gone.name == "keys"));
    watch.quiet().await;
}

#[tokio::test]
async fn config_map_needs_right_to_its_name_only() {
    let Some(place) = Place::new("cluster-id").await else { return };
    let map = |name: &str, namespace: &str| {
        json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": namespace}, "data": {"CLUSTER_ID": "rome"},
        })
    };
    for (name, namespace) in [
        (CLUSTER_ID_CONFIGMAP, LIQO_NAMESPACE),
        ("another", LIQO_NAMESPACE),
        (CLUSTER_ID_CONFIGMAP, &*place.namespace),
    ] {
        place.admin.apply("configmaps", &map(name, namespace)).await;
    }
    let group = "rbac.authorization.k8s.io";
    let metadata = json!({"name": "reader", "namespace": LIQO_NAMESPACE});
    let role = json!({
        "apiVersion": format!("{group}/v1"), "kind": "Role", "metadata": metadata,
        "rules": [{"apiGroups": [""], "resources": ["configmaps"],
            "resourceNames": [CLUSTER_ID_CONFIGMAP], "verbs": ["list", "watch"]}],
    });
    place.admin.apply("roles", &role).await;
    let binding = json!({
        "apiVersion": format!("{group}/v1"), "kind": "RoleBinding", "metadata": metadata,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "reader"}],
    });
    place.admin.apply("rolebindings", &binding).await;
    let store = place.store_of("reader");
    let mut watch = NamespaceWatch::everywhere(store.watch(&[Kind::ConfigMap]).unwrap());
    let first = watch.sync().await;
    let maps: Vec<String> = first
        .into_iter()
        .filter_map(|e| if let Event::Applied(map) = e { Some(map) } else { None })
        .map(|map: Object| map.reference().to_string())
        .collect();
    assert_eq!(maps, ["ConfigMap liqo/liqo-clusterid-configmap"]);
}

#[tokio::test]
async fn config_map_is_that_of_installation() {
    let Some(place) = Place::new("weft-system").await else { return };
    for (namespace, id) in [(LIQO_NAMESPACE, "others"), ("weft-system", "ours")] {
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": CLUSTER_ID_CONFIGMAP, "namespace": namespace},
            "data": {"CLUSTER_ID": id},
        });
        place.admin.apply("configmaps", &map).await;
    }
    let store = Store::open(&StoreArgs {
        kubernetes: true,
        kubeconfig: Some(place.server.admin()),
        liqo_namespace: Some("weft-system".to_owned()),
        manifests: None,
        run_dir: None,
        state_dir: None,
    });
    let store = store.unwrap();
    assert_eq!(store.api_server().unwrap().namespace, "weft-system");
    let listed = store.list(Kind::ConfigMap).await.unwrap();
    let maps: Vec<_> = listed.iter().map(|map| map.reference().to_string()).collect();
    assert_eq!(maps, ["ConfigMap weft-system/liqo-clusterid-configmap"]);
}
