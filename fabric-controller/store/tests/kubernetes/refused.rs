//! Kinds that the server does not have, or does not show.

use std::time::Duration;

use fabric_api::crds;
use fabric_api::networking::PublicKeySpec;
use fabric_store::{Event, Kind};
use serde_json::json;

use crate::{Place, applied, problems};

const KEY: &str = "SJbnWw47WiNBxWI4qjL/kxk/kpfvFCwKHSkixFgTt2Q=";
/// The longest wait between two tries.
const RETRY: Duration = Duration::from_secs(15);

#[tokio::test]
async fn missing_definition_is_reported_and_retried() {
    let Some(place) = Place::new("missing").await else { return };
    let store = place.store();
    store.put(&place.network("n", "10.1.0.0/16")).await.unwrap();
    let mut watch = place.watch(&store, &[Kind::PublicKey, Kind::Network]);
    let events = [watch.next().await, watch.next().await];
    assert!(events.iter().any(|event| matches!(event, Event::Applied(o) if o.name() == "n")));
    let reported = events.into_iter().find(|event| matches!(event, Event::Problems(_))).unwrap();
    let reported = problems(reported);
    assert!(
        reported[0].contains("knows no PublicKey of networking.liqo.io/v1beta1"),
        "{reported:?}"
    );
    assert!(reported[0].contains("publickeies.networking.liqo.io"), "{reported:?}");
    watch.quiet().await;

    let crd = crds::liqo().into_iter().find(|crd| crd.spec.names.kind == "PublicKey");
    let crd = serde_json::to_value(crd.unwrap()).unwrap();
    place.admin.define(&crd).await;
    let synced = watch.next_within(RETRY).await.unwrap();
    assert!(problems(synced).is_empty());
    assert!(matches!(watch.next().await, Event::Synced));
    let key = PublicKeySpec { public_key: KEY.to_owned() };
    let key = json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "PublicKey",
        "metadata": {"name": "k", "namespace": place.namespace,
            "labels": {"liqo.io/remote-cluster-id": "milan"}},
        "spec": key});
    place.admin.apply("publickeies", &key).await;
    let reported = applied(watch.next().await);
    assert_eq!(reported.name(), "k");

    // And it may go again. The server may end the watch before it removes the objects.
    place.admin.delete("customresourcedefinitions", &crd).await;
    let mut reported = watch.next_within(RETRY).await.unwrap();
    if matches!(&reported, Event::Deleted(gone) if gone.kind == Kind::PublicKey) {
        reported = watch.next_within(RETRY).await.unwrap();
    }
    let reported = problems(reported);
    assert!(reported.iter().any(|problem| problem.contains("knows no PublicKey")), "{reported:?}");
}

#[tokio::test]
async fn forbidden_kind_is_reported_and_retried() {
    let Some(place) = Place::new("forbidden").await else { return };
    let store = place.store_of("nobody");
    let mut watch = place.watch(&store, &[Kind::Node]);
    let reported = problems(watch.next().await);
    assert!(
        reported[0].contains("may not watch Node: ") && reported[0].contains("\"nobody\""),
        "{reported:?}"
    );
    assert!(reported[0].ends_with("the verbs get, list and watch on nodes"), "{reported:?}");
    watch.quiet().await;
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "look"},
        "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}],
    });
    place.admin.apply("clusterroles", &role).await;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "look"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "look"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "nobody"}],
    });
    place.admin.apply("clusterrolebindings", &binding).await;
    assert!(problems(watch.next_within(RETRY).await.unwrap()).is_empty());
    assert!(matches!(watch.next().await, Event::Synced));
    place.admin.delete("clusterrolebindings", &binding).await;
}

#[tokio::test]
async fn wrong_store_arguments_fail_with_reason() {
    let error =
        fabric_store::Store::kubernetes(Some(std::path::Path::new("/nowhere"))).unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("cannot find out how to reach the API server"), "{text}");
    assert!(text.contains("--kubeconfig=/nowhere: failed to read"), "{text}");
}
