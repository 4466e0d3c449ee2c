//! One object, with the rights to that one alone.

use std::sync::Arc;

use fabric_api::fabric::GatewayConfigStatus;
use fabric_api::networking::{
    Connection, ConnectionSpec, ConnectionStatus, ConnectionType, ConnectionValue,
};
use fabric_store::{Event, Kind, Object, ObjectRef, Store, StoreError};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::{Value, json};

use crate::{NamespaceWatch, Place, applied, problems};

fn secret(place: &Place, name: &str, byte: u8) -> Object {
    let mut secret = Secret::default();
    secret.metadata.name = Some(name.to_owned());
    secret.metadata.namespace = Some(place.namespace.clone());
    secret.data = Some([("privateKey".to_owned(), ByteString(vec![byte; 32]))].into());
    secret.into()
}

/// Grants the rights of a gateway, and no more: see the chart.
async fn grant(place: &Place, connection_verbs: &[&str]) {
    let rule = |group: &str, resource: &str, name: &str, verbs: &[&str]| json!({"apiGroups": [group], "resources": [resource], "resourceNames": [name], "verbs": verbs});
    let read = ["get", "list", "watch"];
    let rules = vec![
        rule("fabric.weft.dev", "gatewayconfigs", "gw", &read),
        rule("fabric.weft.dev", "gatewayconfigs/status", "gw", &["patch"]),
        rule("", "secrets", "keys", &read),
        rule("networking.liqo.io", "connections", "gw-gw", connection_verbs),
        rule("networking.liqo.io", "connections/status", "gw-gw", &["patch"]),
    ];
    let of = |kind: &str, more: Value| {
        let mut object = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind,
            "metadata": {"name": "gw", "namespace": place.namespace},
        });
        more.as_object().unwrap().iter().for_each(|(key, value)| object[key] = value.clone());
        object
    };
    place.admin.apply("roles", &of("Role", json!({"rules": rules}))).await;
    let binding = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gw"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "gateway"}],
    });
    place.admin.apply("rolebindings", &of("RoleBinding", binding)).await;
}

fn follow(place: &Place, store: &Store, name: &str) -> NamespaceWatch {
    let own = ObjectRef::new(Kind::GatewayConfig, &place.namespace, name);
    NamespaceWatch::new(store.follow(&own, &[]).unwrap(), &place.namespace)
}

#[tokio::test]
async fn gateway_role_suffices_for_its_objects() {
    let Some(place) = Place::new("rights").await else { return };
    grant(&place, &["get", "list", "watch", "create", "patch", "delete"]).await;
    let admin = place.store();
    let mut published = admin.put(&place.config("gw").into()).await.unwrap();
    admin.put(&place.config("other").into()).await.unwrap();
    let key = admin.put(&secret(&place, "keys", 7)).await.unwrap();
    let foreign = admin.put(&secret(&place, "foreign", 8)).await.unwrap();

    let store = place.store_of("gateway");
    let mut watch = follow(&place, &store, "gw");
    assert_eq!(applied(watch.next().await), published);
    watch.sync().await;
    assert_eq!(store.get(&key.reference()).await.unwrap(), Some(key.clone()));
    watch.watch.also(&key.reference());
    assert_eq!(applied(watch.next().await), key);

    let Object::GatewayConfig(own) = &mut published else { panic!() };
    let own = Arc::make_mut(own);
    own.status = Some(GatewayConfigStatus { applied_generation: 1, ..Default::default() });
    assert!(store.put_status(&published).await.unwrap());
    let spec = ConnectionSpec { type_: ConnectionType::Client, gateway_ref: Default::default() };
    let mut connection = Connection::new("gw-gw", spec);
    connection.metadata.namespace = Some(place.namespace.clone());
    let stored = store.put(&connection.into()).await.unwrap();
    let mut connection = Connection::try_from(stored.clone()).unwrap();
    connection.status = Some(ConnectionStatus::default());
    assert!(store.put_status(&connection.into()).await.unwrap());
    let own = store.follow(&stored.reference(), &[]).unwrap();
    let mut own = NamespaceWatch::new(own, &place.namespace);
    assert!(
        matches!(&own.sync().await[0], Event::Applied(is) if is.reference() == stored.reference())
    );
    store.delete(&stored.reference()).await.unwrap();
    assert!(matches!(own.next().await, Event::Deleted(_)));
    watch.quiet().await;

    let denied = |error: StoreError| {
        let text = format!("{error:?}");
        assert!(text.contains("403"), "{text}");
    };
    denied(store.get(&foreign.reference()).await.unwrap_err());
    denied(store.list(Kind::Secret).await.unwrap_err());
    let mut changed = place.config("gw");
    changed.spec.mtu = 9000;
    denied(store.put(&changed.into()).await.unwrap_err());
    // Nothing is there to be removed, so no right to remove it is needed.
    grant(&place, &["get", "create", "patch"]).await;
    store.delete(&stored.reference()).await.unwrap();
    denied(store.put(&secret(&place, "made", 9)).await.unwrap_err());
}

#[tokio::test]
async fn follower_of_object_sees_no_other_and_no_status() {
    let Some(place) = Place::new("one").await else { return };
    let store = place.store();
    let mut own = store.put(&place.config("gw").into()).await.unwrap();
    let mut watch = follow(&place, &store, "gw");
    assert_eq!(watch.sync().await.len(), 2);
    let other = store.put(&place.config("other").into()).await.unwrap();
    let Object::GatewayConfig(written) = &mut own else { panic!() };
    let written = Arc::make_mut(written);
    written.status = Some(GatewayConfigStatus { received_bytes: 9, ..Default::default() });
    assert!(store.put_status(&own).await.unwrap());
    watch.quiet().await;

    let mut changed = place.config("gw");
    changed.spec.mtu = 1300;
    store.put(&changed.into()).await.unwrap();
    let Object::GatewayConfig(reported) = applied(watch.next().await) else { panic!() };
    assert_eq!(
        (reported.metadata.generation, reported.status.as_ref().unwrap().received_bytes),
        (Some(2), 9)
    );
    store.delete(&other.reference()).await.unwrap();
    store.delete(&own.reference()).await.unwrap();
    assert!(matches!(watch.next().await, Event::Deleted(gone) if gone == own.reference()));
}

#[tokio::test]
async fn another_secret_takes_the_place_of_the_one_before() {
    let Some(place) = Place::new("rotated").await else { return };
    let store = place.store();
    let [first, second] = [secret(&place, "first", 1), secret(&place, "second", 2)];
    store.put(&first).await.unwrap();
    let stored = store.put(&second).await.unwrap();
    let mut watch = follow(&place, &store, "gw");
    assert!(matches!(&watch.sync().await[..], [Event::Problems(none)] if none.is_empty()));
    watch.watch.also(&first.reference());
    assert_eq!(applied(watch.next().await).name(), "first");
    watch.watch.also(&second.reference());
    assert!(matches!(watch.next().await, Event::Deleted(gone) if gone == first.reference()));
    assert_eq!(applied(watch.next().await), stored);
    store.delete(&first.reference()).await.unwrap();
    watch.quiet().await;
    store.delete(&second.reference()).await.unwrap();
    assert!(matches!(watch.next().await, Event::Deleted(gone) if gone == second.reference()));
}

#[tokio::test]
async fn missing_right_to_secret_is_retried() {
    let Some(place) = Place::new("denied").await else { return };
    let store = place.store_of("nobody");
    let mut watch = NamespaceWatch::new(
        store.follow(&secret(&place, "keys", 0).reference(), &[]).unwrap(),
        &place.namespace,
    );
    let reported = problems(watch.next().await);
    assert!(reported[0].starts_with("Secret denied/keys: may not watch Secret: "), "{reported:?}");
    assert!(reported[0].ends_with("the label liqo.io/tenant-namespace=true"), "{reported:?}");
}

#[tokio::test]
async fn follower_of_connection_sees_foreign_status() {
    let Some(place) = Place::new("shared-connection").await else { return };
    let (store, other) = (place.store(), place.store());
    let spec = ConnectionSpec { type_: ConnectionType::Client, gateway_ref: Default::default() };
    let mut connection = Connection::new("gw-gw", spec);
    connection.metadata.namespace = Some(place.namespace.clone());
    let stored = store.put(&connection.into()).await.unwrap();
    let with = |value| {
        let mut connection = Connection::try_from(stored.clone()).unwrap();
        connection.status = Some(ConnectionStatus { value, latency: None });
        Object::from(connection)
    };
    let mut watch =
        NamespaceWatch::new(store.follow(&stored.reference(), &[]).unwrap(), &place.namespace);
    watch.sync().await;
    let [connected, error, connecting] =
        [ConnectionValue::Connected, ConnectionValue::Error, ConnectionValue::Connecting].map(with);
    assert!(store.put_status(&connected).await.unwrap());
    assert_eq!(applied(watch.next().await), connected);
    assert!(store.put_status_if_last(&connecting).await.unwrap());
    assert_eq!(applied(watch.next().await), connecting);

    // Before the watch reports it, and after.
    assert!(other.put_status(&error).await.unwrap());
    assert!(!store.put_status_if_last(&connecting).await.unwrap());
    assert_eq!(applied(watch.next().await), error);
    assert!(!store.put_status_if_last(&connecting).await.unwrap());
    watch.quiet().await;
    assert!(store.put_status(&connecting).await.unwrap(), "it is written whatever was last");
}

#[tokio::test]
async fn status_of_a_later_writer_may_be_yielded_to() {
    let Some(place) = Place::new("yielding-status").await else { return };
    let (store, other) = (place.store(), place.store());
    let spec = ConnectionSpec { type_: ConnectionType::Client, gateway_ref: Default::default() };
    let mut connection = Connection::new("gw-gw", spec);
    connection.metadata.namespace = Some(place.namespace.clone());
    let stored = store.put(&connection.into()).await.unwrap();
    let [connected, error, connecting] =
        [ConnectionValue::Connected, ConnectionValue::Error, ConnectionValue::Connecting].map(
            |value| {
                let mut connection = Connection::try_from(stored.clone()).unwrap();
                connection.status = Some(ConnectionStatus { value, latency: None });
                Object::from(connection)
            },
        );
    assert!(store.put_status(&connected).await.unwrap());
    assert!(other.put_status(&error).await.unwrap());
    let is_error = |stored: &Object| stored.reference() == error.reference() && *stored == error;
    let overtaken = store.put_status_unless(&connecting, is_error).await;
    assert!(matches!(overtaken, Err(StoreError::Overtaken { .. })), "{overtaken:?}");
    store.list(Kind::Connection).await.unwrap();
    let overtaken = store.put_status_unless(&connecting, is_error).await;
    assert!(matches!(overtaken, Err(StoreError::Overtaken { .. })), "it knows the other's write");
    assert!(store.put_status_unless(&connecting, |_| false).await.unwrap());
}
