//! Events of a watch.

use std::sync::Arc;

use fabric_api::networking::ACCEPTED;
use fabric_store::{Event, Kind, Object};
use serde_json::json;

use crate::{Place, applied};

#[tokio::test]
async fn watch_lists_then_reports_changes() {
    let Some(place) = Place::new("listed").await else { return };
    let mut configuration = place.configuration("milan", &json!(["10.1.0.0/16"]));
    place.admin.apply("configurations", &configuration).await;
    let mut watch =
        place.watch(&place.store(), &[Kind::Configuration, Kind::Namespace, Kind::Secret]);
    let first = watch.sync().await;
    assert!(matches!(first.last(), Some(Event::Problems(none)) if none.is_empty()), "{first:?}");
    let reference = |object: &Object| object.reference().to_string();
    let names: Vec<_> = first
        .iter()
        .filter_map(|e| if let Event::Applied(o) = e { Some(reference(o)) } else { None })
        .collect();
    assert!(names.contains(&"Configuration listed/milan".to_owned()), "{names:?}");
    assert!(names.contains(&"Namespace listed".to_owned()), "{names:?}");

    configuration["spec"]["remote"]["cidr"]["pod"] = json!("10.2.0.0/16");
    place.admin.apply("configurations", &configuration).await;
    let object = applied(watch.next().await);
    let Object::Configuration(reported) = &object else { panic!() };
    assert_eq!(reported.spec.remote.cidr.pod.0, ["10.2.0.0/16"], "a plain text is a list of one");
    assert_eq!(reported.metadata.generation, Some(2));
    assert!(
        reported.metadata.managed_fields.is_none() && reported.metadata.resource_version.is_none()
    );
    assert_eq!(watch.watch.seen().get(&object.reference()), Some(&object));

    place.admin.apply("configurations", &configuration).await;
    watch.quiet().await;
    place.admin.delete("configurations", &configuration).await;
    let gone = watch.next().await;
    assert!(
        matches!(&gone, Event::Deleted(r) if r.to_string() == "Configuration listed/milan"),
        "{gone:?}"
    );
}

#[tokio::test]
async fn foreign_status_write_is_reported() {
    let Some(place) = Place::new("statuses").await else { return };
    let ns = &place.namespace;
    let server = json!({
        "apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
        "metadata": {"name": "s", "namespace": ns}, "spec": {"endpoint": {"port": 51840}},
    });
    place.admin.apply("gatewayservers", &server).await;
    let store = place.store();
    let mut watch = place.watch(&store, &[Kind::GatewayServer]);
    let mut object = applied(watch.sync().await.remove(0));
    let Object::GatewayServer(own) = &mut object else { panic!() };
    let own = Arc::make_mut(own);
    let condition = json!({"type": ACCEPTED, "status": "False", "reason": "Invalid", "message": "m",
        "lastTransitionTime": "2026-01-31T12:00:00Z", "observedGeneration": 1});
    let status = own.status.get_or_insert_default();
    status.conditions.push(serde_json::from_value(condition).unwrap());
    assert!(place.store().put_status(&object).await.unwrap());
    assert_eq!(applied(watch.next().await), object);
    assert!(!store.put_status(&object).await.unwrap(), "the watch has reported it");
}

#[tokio::test]
async fn everything_can_be_read_at_once() {
    let Some(place) = Place::new("read").await else { return };
    let store = place.store();
    let stored = store.put(&place.network("n", "10.1.0.0/16")).await.unwrap();
    assert_eq!(store.get(&stored.reference()).await.unwrap(), Some(stored.clone()));
    let snapshot = store.read(&[Kind::Network, Kind::NodeConfig]).await.unwrap();
    assert_eq!(snapshot.objects.get(&stored.reference()), Some(&stored));
    assert!(store.list(Kind::Network).await.unwrap().contains(&stored));
    store.delete(&stored.reference()).await.unwrap();
    assert_eq!(store.get(&stored.reference()).await.unwrap(), None);
}
