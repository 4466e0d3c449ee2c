//! Objects that weft itself writes.

use std::sync::Arc;

use fabric_api::ipam::NetworkStatus;
use fabric_api::labels;
use fabric_api::networking::{CidrList, ClusterCidrs, SideConfig};
use fabric_kube_client::requests::Part;
use fabric_kube_client::{ApiServer, target};
use fabric_store::{Event, Kind, Note, Object, ObjectRef, StoreError};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DeleteParams;
use serde_json::json;

use crate::admin::version;
use crate::{Place, applied};

fn granted(mut network: Object, cidr: &str) -> Object {
    let Object::Network(own) = &mut network else { panic!() };
    let own = Arc::make_mut(own);
    own.status = Some(NetworkStatus { cidr: Some(cidr.to_owned()) });
    network
}

#[tokio::test]
async fn object_keeps_uid_and_increments_generation() {
    let Some(place) = Place::new("own").await else { return };
    let store = place.store();
    let mut config = place.config("gw");
    let first = store.put(&config.clone().into()).await.unwrap();
    assert_eq!((first.generation(), first.uid().len()), (1, 36));
    assert_eq!(first.label(labels::MANAGED_BY), Some(labels::WEFT));
    config.spec.mtu = 1300;
    let second = store.put(&config.clone().into()).await.unwrap();
    assert_eq!((second.uid(), second.generation()), (first.uid(), 2));

    store.delete(&second.reference()).await.unwrap();
    store.delete(&second.reference()).await.unwrap();
    let reborn = store.put(&config.into()).await.unwrap();
    assert_ne!(reborn.uid(), first.uid());
    let user = ObjectRef::new(Kind::Configuration, &place.namespace, "c");
    assert!(matches!(store.delete(&user).await, Err(StoreError::NotOurs { .. })));
}

#[tokio::test]
async fn unchanged_object_is_not_sent_after_restart() {
    let Some(place) = Place::new("idle").await else { return };
    let (ns, store) = (&place.namespace, place.store());
    let mut watch = place.watch(&store, &[Kind::Ip]);
    watch.sync().await;
    let ip = json!({
        "apiVersion": "ipam.liqo.io/v1alpha1", "kind": "IP",
        "metadata": {"name": "i", "namespace": ns, "annotations": {"fabric.weft.dev/owner": "Node n"}},
        "spec": {"ip": "192.0.2.1"},
    });
    let ip = Object::from(serde_json::from_value::<fabric_api::ipam::IP>(ip).unwrap());
    let stored = store.put(&ip).await.unwrap();
    assert_eq!(applied(watch.next().await), stored);
    let mut with_status = stored.clone();
    let Object::Ip(own) = &mut with_status else { panic!() };
    let own = Arc::make_mut(own);
    own.status =
        serde_json::from_value(json!({"ip": "10.70.0.1", "cidr": "10.70.0.0/16"})).unwrap();
    assert!(store.put_status(&with_status).await.unwrap());
    assert_eq!(applied(watch.next().await), with_status);

    let again = place.store();
    let mut second = place.watch(&again, &[Kind::Ip]);
    second.sync().await;
    let before = place.admin.requests("ips").await;
    for store in [&store, &again] {
        assert_eq!(store.put(&ip).await.unwrap(), with_status);
        assert!(!store.put_status(&with_status).await.unwrap());
    }
    assert_eq!(place.admin.requests("ips").await, before);
    watch.quiet().await;
}

#[tokio::test]
async fn foreign_fields_stay_and_unwanted_ones_go() {
    let Some(place) = Place::new("shared").await else { return };
    let ns = &place.namespace;
    let labelled = |key: &str| {
        let mut config = Object::from(place.config("gw"));
        config.metadata_mut().labels = Some([(key.to_owned(), "x".to_owned())].into());
        config
    };
    let store = place.store();
    let first = store.put(&labelled("liqo.io/a")).await.unwrap();
    let named = json!({"apiVersion": "fabric.weft.dev/v1alpha1", "kind": "GatewayConfig",
        "metadata": {"name": "gw", "namespace": ns}});
    let theirs = json!({"metadata": {"labels": {"theirs": "y"}, "annotations": {"note": "z"}}});
    place.admin.merge("gatewayconfigs", &named, &theirs).await;

    let mut watch = place.watch(&store, &[Kind::GatewayConfig]);
    let reported = applied(watch.sync().await.remove(0));
    assert_eq!((reported.label("theirs"), reported.label("liqo.io/a")), (Some("y"), Some("x")));
    assert_eq!(store.put(&labelled("liqo.io/a")).await.unwrap(), reported);
    let other = place.store();
    let mut second = place.watch(&other, &[Kind::GatewayConfig]);
    second.sync().await;
    let relabelled = other.put(&labelled("liqo.io/b")).await.unwrap();
    let labels = ["theirs", "liqo.io/a", "liqo.io/b"].map(|key| relabelled.label(key).is_some());
    assert_eq!(labels, [true, false, true]);
    assert_eq!(relabelled.uid(), first.uid());

    // Another writer's change of the spec is reverted.
    place.admin.merge("gatewayconfigs", &named, &json!({"spec": {"mtu": 9000}})).await;
    applied(second.next().await);
    applied(second.next().await);
    let Object::GatewayConfig(restored) = other.put(&labelled("liqo.io/b")).await.unwrap() else {
        panic!()
    };
    assert_eq!(restored.spec.mtu, 1340);
}

#[tokio::test]
async fn status_is_written_to_same_uid_only() {
    let Some(place) = Place::new("very").await else { return };
    let (store, other) = (place.store(), place.store());
    let first = store.put(&place.network("n", "10.1.0.0/16")).await.unwrap();
    assert!(store.put_status(&granted(first.clone(), "10.7.0.0/16")).await.unwrap());
    let read = store.get(&first.reference()).await.unwrap().unwrap();
    assert_eq!(read, granted(first.clone(), "10.7.0.0/16"));

    other.delete(&first.reference()).await.unwrap();
    let gone = store.put_status(&granted(first.clone(), "10.8.0.0/16")).await.unwrap_err();
    assert!(gone.is_gone(), "{gone:?}");
    let namesake = other.put(&place.network("n", "10.1.0.0/16")).await.unwrap();
    let another = store.put_status(&granted(first.clone(), "10.8.0.0/16")).await.unwrap_err();
    assert!(another.is_gone(), "{another:?}");
    let Object::Network(now) = store.get(&first.reference()).await.unwrap().unwrap() else {
        panic!()
    };
    assert_eq!(now.status, None);
    let mut nameless = granted(namesake, "10.8.0.0/16");
    nameless.metadata_mut().uid = None;
    assert!(matches!(store.put_status(&nameless).await, Err(StoreError::NoUid { .. })));
}

/// Deletions, and the writes of parts of gateways, name the object that was seen.
#[tokio::test]
async fn stale_uid_changes_nothing() {
    let Some(place) = Place::new("stale").await else { return };
    let (store, other) = (place.store(), place.store());
    let first = store.put(&place.network("n", "10.1.0.0/16")).await.unwrap();
    other.delete(&first.reference()).await.unwrap();
    let namesake = other.put(&place.network("n", "10.1.0.0/16")).await.unwrap();

    let server = ApiServer::open(Some(&place.server.admin()), None, None).unwrap();
    let (requests, target) = (server.requests(), target(&first.reference()));
    let mut change = json!({
        "apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network", "spec": {"cidr": "10.1.0.0/16"},
        "metadata": {"name": "n", "namespace": place.namespace, "labels": {"liqo.io/a": "b"},
            "uid": first.uid()},
    });
    let refused = requests.apply(&target, Part::AllButStatus, &change).await.unwrap_err();
    let message = refused.to_string();
    assert!(message.contains("metadata.uid"), "{message}");
    let stale = Some(first.uid().to_owned());
    assert!(!requests.delete(&target, stale, DeleteParams::default()).await.unwrap());
    store.delete(&first.reference()).await.unwrap();
    assert_eq!(store.get(&first.reference()).await.unwrap().as_ref(), Some(&namesake));

    change["metadata"]["uid"] = json!(namesake.uid());
    requests.apply(&target, Part::AllButStatus, &change).await.unwrap();
    let own = Some(namesake.uid().to_owned());
    assert!(requests.delete(&target, own, DeleteParams::default()).await.unwrap());
}

#[tokio::test]
async fn configuration_gets_local_side_and_status() {
    let Some(place) = Place::new("local").await else { return };
    let manifest = place.configuration("milan", &json!(["10.1.0.0/16"]));
    place.admin.apply("configurations", &manifest).await;
    let store = place.store();
    let mut watch = place.watch(&store, &[Kind::Configuration]);
    let mut object = applied(watch.sync().await.remove(0));
    let Object::Configuration(own) = &mut object else { panic!() };
    let own = Arc::make_mut(own);
    let list = |cidr: &str| CidrList(vec![cidr.to_owned()]);
    let cidr = ClusterCidrs { pod: list("10.200.0.0/16"), external: list("10.70.0.0/16") };
    own.spec.local = Some(SideConfig { cidr });
    own.status.get_or_insert_default().remote = own.spec.local.clone();
    assert!(store.put_status(&object).await.unwrap());

    let stored = place.admin.get("configurations", &manifest).await.unwrap();
    assert_eq!(stored.data["spec"]["local"]["cidr"]["pod"], json!(["10.200.0.0/16"]));
    assert_eq!(
        stored.data["spec"]["remote"], manifest["spec"]["remote"],
        "the user's is untouched"
    );
    assert_eq!(stored.data["status"]["remote"]["cidr"]["external"], json!(["10.70.0.0/16"]));
    // The user applies the same again and takes nothing of weft's away.
    place.admin.apply("configurations", &manifest).await;
    assert!(!store.put_status(&object).await.unwrap());
    let after = place.admin.get("configurations", &manifest).await.unwrap();
    assert_eq!(version(&after), version(&stored));
    place.admin.delete("configurations", &manifest).await;
    let mut other = object.clone();
    let Object::Configuration(own) = &mut other else { panic!() };
    let own = Arc::make_mut(own);
    own.spec.local = Some(SideConfig::default());
    assert!(place.store().put_status(&other).await.unwrap_err().is_gone(), "it is not made again");
    assert!(place.admin.get("configurations", &manifest).await.is_none());
}

#[tokio::test]
async fn unknown_key_is_never_overwritten() {
    let Some(place) = Place::new("keys").await else { return };
    let secret = |byte: u8| {
        let metadata = ObjectMeta {
            name: Some("gw-x".to_owned()),
            namespace: Some(place.namespace.clone()),
            ..ObjectMeta::default()
        };
        let data = Some([("privateKey".to_owned(), ByteString(vec![byte; 32]))].into());
        Object::from(Secret {
            metadata,
            data,
            type_: Some("Opaque".to_owned()),
            ..Secret::default()
        })
    };
    let stored = place.store().put(&secret(7)).await.unwrap();
    let error = place.store().put(&secret(8)).await.unwrap_err();
    let text = format!("{error:?} {error}");
    assert!(
        text.contains("409") && text.contains(&format!("Secret {}/gw-x", place.namespace)),
        "{text}"
    );
    let found = place.store().get(&stored.reference()).await.unwrap().unwrap();
    assert_eq!(found, stored);
    for hidden in ["BwcH", "7, 7"] {
        assert!(!format!("{found:?}").contains(hidden));
    }
}

#[tokio::test]
async fn note_survives_restart() {
    let Some(place) = Place::new("notes").await else { return };
    let note = Note::Only("open-grants");
    let store = place.store();
    store.delete_note(note).await.unwrap();
    assert_eq!(store.note::<Vec<u8>>(note).await.unwrap(), None);
    store.put_note(note, &vec![1_u8, 2]).await.unwrap();
    store.put_note(note, &vec![1_u8, 2]).await.unwrap();
    assert_eq!(place.store().note::<Vec<u8>>(note).await.unwrap(), Some(vec![1, 2]));
    store.delete_note(note).await.unwrap();
    store.delete_note(note).await.unwrap();
    store.put_note(note, &vec![1_u8, 2]).await.unwrap();
    store.delete_note(note).await.unwrap();
    // What the API server holds anyway is kept nowhere else.
    store.put_note(Note::Copy("gateway"), &1_u8).await.unwrap();
    assert_eq!(store.note::<u8>(Note::Copy("gateway")).await.unwrap(), None);
}

#[tokio::test]
async fn note_of_another_is_not_overwritten_unread() {
    let Some(place) = Place::new("shared-notes").await else { return };
    let note = Note::Only("shared-grants");
    let [one, other] = [place.store(), place.store()];
    one.delete_note(note).await.unwrap();
    one.put_note(note, &1_u8).await.unwrap();
    let refused = |written| matches!(written, Err(StoreError::NoteChanged(_)));
    assert!(refused(other.put_note(note, &2_u8).await), "it has not read that one");
    assert!(!other.is_note_current(note).await.unwrap());
    assert_eq!(other.note::<u8>(note).await.unwrap(), Some(1));
    assert!(other.is_note_current(note).await.unwrap());
    other.put_note(note, &2_u8).await.unwrap();
    assert!(refused(one.put_note(note, &3_u8).await), "it was replaced meanwhile");
    one.delete_note(note).await.unwrap();
    other.put_note(note, &4_u8).await.unwrap();
}

#[tokio::test]
async fn object_removed_by_other_is_recreated() {
    let Some(place) = Place::new("removed").await else { return };
    let store = place.store();
    let mut watch = place.watch(&store, &[Kind::Network]);
    watch.sync().await;
    let first = store.put(&place.network("n", "10.1.0.0/16")).await.unwrap();
    applied(watch.next().await);
    place.store().delete(&first.reference()).await.unwrap();
    assert!(matches!(watch.next().await, Event::Deleted(gone) if gone == first.reference()));
    let second = store.put(&place.network("n", "10.1.0.0/16")).await.unwrap();
    assert_ne!(first.uid(), second.uid());
    assert_eq!(applied(watch.next().await), second);

    // Who has only seen the first does not remove the second.
    let late = place.store();
    let mut seen = place.watch(&late, &[Kind::Network]);
    seen.sync().await;
    store.delete(&second.reference()).await.unwrap();
    let third = store.put(&place.network("n", "10.1.0.0/16")).await.unwrap();
    late.delete(&second.reference()).await.unwrap();
    assert_eq!(store.get(&third.reference()).await.unwrap(), Some(third));
}
