//! Objects that weft itself writes.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use fabric_api::ipam::{Network, NetworkSpec, NetworkStatus};
use fabric_api::networking::{Connection, ConnectionSpec, ConnectionStatus, ConnectionType};
use fabric_directory::{Directory, DirectoryError};
use fabric_objects::{Event, Kind, Object, ObjectRef, Problem};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::{Place, network, network_ref, next, places, quiet, sync};

pub(crate) fn connection(name: &str) -> Connection {
    let spec = ConnectionSpec { type_: ConnectionType::Server, gateway_ref: Default::default() };
    let mut connection = Connection::new(name, spec);
    connection.metadata.namespace = Some("t".to_owned());
    connection
}

fn own_network(cidr: &str) -> Object {
    let mut own = Network::new("own", NetworkSpec { cidr: cidr.into(), ..Default::default() });
    own.metadata.namespace = Some("t".to_owned());
    own.into()
}

fn secret(name: &str, byte: u8) -> Object {
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        namespace: Some("t".to_owned()),
        ..Default::default()
    };
    let data = Some([("privateKey".to_owned(), ByteString(vec![byte; 32]))].into());
    Secret { metadata, data, ..Default::default() }.into()
}

fn written_secret(name: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: t}}\ndata: {{x: eA==}}\n"
    )
}

fn modified(place: &Place, file: &str) -> std::time::SystemTime {
    fs::metadata(place.path(file)).unwrap().modified().unwrap()
}

#[test]
fn an_object_keeps_its_uid_and_counts_its_specs() {
    let place = Place::new();
    let first = place.store.put(&own_network("10.1.0.0/16")).unwrap();
    assert_eq!(first.generation(), 1);
    assert_eq!(first.uid().len(), 36);
    let second = place.store.put(&own_network("10.2.0.0/16")).unwrap();
    assert_eq!((second.uid(), second.generation()), (first.uid(), 2));

    let mut labelled = own_network("10.2.0.0/16");
    labelled.metadata_mut().labels = Some([("a".to_owned(), "b".to_owned())].into());
    let third = place.store.put(&labelled).unwrap();
    assert_eq!(third.generation(), 2, "labels are no spec");
    assert_eq!(place.store.get(&third.reference()).unwrap(), Some(third.clone()));

    place.store.delete(&third.reference()).unwrap();
    place.store.delete(&third.reference()).unwrap();
    let reborn = place.store.put(&own_network("10.2.0.0/16")).unwrap();
    assert_ne!(reborn.uid(), first.uid());
    assert_eq!(reborn.generation(), 1);
}

#[test]
fn equal_content_is_not_written_again() {
    let place = Place::new();
    let mut stored = place.store.put(&connection("c").into()).unwrap();
    let Object::Connection(own) = &mut stored else { panic!() };
    let own = Arc::make_mut(own);
    own.status = Some(ConnectionStatus::default());
    assert!(place.store.put_status(&stored).unwrap());
    let files = ["run/published/connections/t.c.yaml", "run/published/status/connections/t.c.yaml"];
    let before = files.map(|file| modified(&place, file));
    std::thread::sleep(Duration::from_millis(20));
    place.store.put(&connection("c").into()).unwrap();
    assert!(!place.store.put_status(&stored).unwrap());
    assert_eq!(files.map(|file| modified(&place, file)), before);
}

#[tokio::test]
async fn status_is_merged_and_reported() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    let mut object = place.store.get(&network_ref("a")).unwrap().unwrap();
    let Object::Network(net) = &mut object else { panic!() };
    let net = Arc::make_mut(net);
    net.status = Some(NetworkStatus { cidr: Some("10.7.0.0/16".to_owned()) });
    place.store.put_status(&object).unwrap();
    let Event::Applied(reported) = next(&mut watch).await else { panic!() };
    assert_eq!(reported, object);
    let text = fs::read_to_string(place.path("manifests/a.yaml")).unwrap();
    assert_eq!(text, network("a", "10.1.0.0/16"), "the user's file is never written");
    quiet(&mut watch).await;

    let again = Directory::open(places(place.dir.path())).unwrap();
    assert_eq!(again.get(&network_ref("a")).unwrap(), Some(object), "after a restart");
}

#[tokio::test]
async fn follow_reports_neither_others_nor_own_status() {
    let place = Place::new();
    let other = place.store.put(&connection("d").into()).unwrap();
    let mut own = place.store.put(&connection("c").into()).unwrap();
    let mut watch = place.store.follow(&own.reference(), &[Kind::Secret]);
    let first = sync(&mut watch).await;
    assert!(matches!(&first[..], [Event::Applied(reported), _] if *reported == own), "{first:?}");

    place.store.delete(&other.reference()).unwrap();
    let Object::Connection(written) = &mut own else { panic!() };
    let written = Arc::make_mut(written);
    written.status = Some(ConnectionStatus::default());
    place.store.put_status(&own).unwrap();
    quiet(&mut watch).await;

    own.metadata_mut().labels = Some([("a".to_owned(), "b".to_owned())].into());
    place.store.put(&own).unwrap();
    assert!(
        matches!(next(&mut watch).await, Event::Applied(reported) if reported.label("a") == Some("b"))
    );
    place.store.delete(&own.reference()).unwrap();
    assert!(matches!(next(&mut watch).await, Event::Deleted(gone) if gone == own.reference()));
}

#[tokio::test]
async fn follow_with_second_object_ignores_namesakes() {
    let place = Place::new();
    let own = place.store.put(&connection("c").into()).unwrap();
    place.store.put(&secret("made", 1)).unwrap();
    place.write("s.yaml", &written_secret("given"));
    let mut watch = place.store.follow(&own.reference(), &[]);
    assert_eq!(sync(&mut watch).await.len(), 2);

    let of = |name: &str| ObjectRef::new(Kind::Secret, "t", name);
    watch.also(&of("made"));
    assert!(matches!(next(&mut watch).await, Event::Applied(o) if o.reference() == of("made")));
    watch.also(&of("given"));
    assert!(matches!(next(&mut watch).await, Event::Deleted(gone) if gone == of("made")));
    assert!(matches!(next(&mut watch).await, Event::Applied(o) if o.reference() == of("given")));
    place.store.put(&secret("made", 2)).unwrap();
    quiet(&mut watch).await;
    place.write("s.yaml", &written_secret("given").replace("eA==", "eQ=="));
    assert!(matches!(next(&mut watch).await, Event::Applied(o) if o.reference() == of("given")));
    place.store.delete(&own.reference()).unwrap();
    assert!(matches!(next(&mut watch).await, Event::Deleted(gone) if gone == own.reference()));
}

#[test]
fn local_side_of_configuration_keeps_its_status() {
    let place = Place::new();
    let text = "apiVersion: networking.liqo.io/v1beta1\nkind: Configuration\nmetadata: {name: c}\n\
                spec: {remote: {cidr: {pod: 10.1.0.0/16}}}\n";
    place.write("c.yaml", text);
    let reference = ObjectRef::new(Kind::Configuration, "default", "c");
    let mut object = place.store.get(&reference).unwrap().unwrap();
    let generation = object.generation();
    let Object::Configuration(own) = &mut object else { panic!() };
    let own = Arc::make_mut(own);
    own.spec.local = Some(own.spec.remote.clone());
    place.store.put_status(&object).unwrap();
    let read = place.store.get(&reference).unwrap().unwrap();
    assert_eq!(read, object);
    assert_eq!(read.generation(), generation, "the user's spec is the same");
}

#[test]
fn a_status_of_a_namesake_is_not_taken() {
    let place = Place::new();
    let mut first = place.store.put(&own_network("10.1.0.0/16")).unwrap();
    let Object::Network(net) = &mut first else { panic!() };
    let net = Arc::make_mut(net);
    net.status = Some(NetworkStatus { cidr: Some("10.7.0.0/16".to_owned()) });
    place.store.put_status(&first).unwrap();
    fs::remove_file(place.path("state/networks/t.own.yaml")).unwrap();
    assert_eq!(place.store.orphaned_statuses().unwrap(), [first.reference()]);
    place.store.put(&own_network("10.1.0.0/16")).unwrap();
    let Some(Object::Network(net)) = place.store.get(&first.reference()).unwrap() else { panic!() };
    assert_eq!(net.status, None);
}

#[test]
fn key_secrets_are_private_and_survive_restart() {
    let place = Place::new();
    let stored = place.store.put(&secret("gw-x", 7)).unwrap();
    let mode = |path| fs::metadata(place.path(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("state/secrets/t.gw-x.yaml"), 0o600);
    assert_eq!(mode("state/secrets"), 0o700);
    let again = Directory::open(places(place.dir.path())).unwrap();
    assert_eq!(again.get(&stored.reference()).unwrap(), Some(stored));
}

#[test]
fn users_objects_cannot_be_written_only_their_status() {
    let place = Place::new();
    place.write("a.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: t}\n");
    let object = place.store.get(&ObjectRef::new(Kind::Namespace, "", "t")).unwrap().unwrap();
    assert!(matches!(place.store.put(&object), Err(DirectoryError::NotOurs { .. })));
    assert!(matches!(place.store.put_status(&object), Err(DirectoryError::NoStatus { .. })));
    let mut outside = own_network("10.1.0.0/16");
    outside.metadata_mut().name = Some("../../x".to_owned());
    assert!(matches!(place.store.put(&outside), Err(DirectoryError::Name { .. })));
}

#[test]
fn a_file_of_weft_that_was_damaged_is_written_anew() {
    let place = Place::new();
    let path = place.path("run/published/connections/t.c.yaml");
    let first = place.store.put(&connection("c").into()).unwrap();
    fs::write(&path, "kind: [").unwrap();
    assert_eq!(place.store.read(&Kind::ALL).unwrap().problems.len(), 1);
    fs::write(path.with_file_name(".t.c.yaml.tmp"), "left behind").unwrap();
    let second = place.store.put(&connection("c").into()).unwrap();
    assert_ne!(first.uid(), second.uid());
    assert_eq!(place.problems(), [""; 0]);
    fs::write(&path, "kind: [").unwrap();
    let problem = &place.store.read(&Kind::ALL).unwrap().problems[0];
    assert_eq!(problem.object, Some(second.reference()));
    let third = place.store.put(&second).unwrap();
    assert_eq!((third.uid(), third.generation()), (second.uid(), second.generation()), "mended");
}

#[test]
fn manifest_named_like_wefts_own_network_is_not_used() {
    let place = Place::new();
    place.store.put(&own_network("10.1.0.0/16")).unwrap();
    place.write("a.yaml", &network("own", "10.2.0.0/16").replace("liqo\n", "t\n"));
    assert_eq!(place.names(), ["Network t/own"]);
    let found = place.store.read(&[Kind::Network]).unwrap();
    assert_eq!(crate::cidr_of(found.objects.values().next().unwrap()), "10.1.0.0/16");
    let problem = found.problems[0].to_string();
    assert!(
        problem.starts_with("a.yaml:1: Network t/own: metadata.name: weft has one"),
        "{problem}"
    );
}

#[test]
fn problems_read_back_as_they_were_published() {
    let place = Place::new();
    let problem = |object, field: Option<&str>| Problem {
        source: "a.yaml:7".to_owned(),
        object,
        field: field.map(str::to_owned),
        message: "found: \"x\"; expected # y".to_owned(),
    };
    let all = [problem(None, None), problem(Some(network_ref("a")), Some("spec.cidr"))];
    assert!(place.store.put_problems(&all).unwrap());
    assert!(!place.store.put_problems(&all).unwrap());
    assert_eq!(place.store.problems(), all);
    assert!(place.store.put_problems(&[]).unwrap());
    assert_eq!(place.store.problems(), []);
}

/// Files of a Network that was granted a prefix.
const GRANTED: [&str; 2] = ["state/networks/t.own.yaml", "state/status/networks/t.own.yaml"];

fn granted(place: &Place) -> Network {
    let mut network: Network =
        place.store.put(&own_network("10.1.0.0/16")).unwrap().try_into().unwrap();
    network.status = Some(NetworkStatus { cidr: Some("10.201.0.0/16".to_owned()) });
    place.store.put_status(&network.clone().into()).unwrap();
    network
}

#[test]
fn damaged_grants_are_restored_at_the_start() {
    let place = Place::new();
    let own = granted(&place);
    let reference = Object::from(own.clone()).reference();
    for file in GRANTED {
        for text in [None, Some(""), Some("uid: [")] {
            match text {
                Some(text) => fs::write(place.path(file), text).unwrap(),
                None => fs::remove_file(place.path(file)).unwrap(),
            }
            let store = Directory::open(places(place.dir.path())).unwrap();
            assert_eq!(store.restore_grants().unwrap(), [place.path(file)], "{text:?}");
            let restored: Network = store.get(&reference).unwrap().unwrap().try_into().unwrap();
            assert_eq!(restored.metadata.uid, own.metadata.uid, "{file} {text:?}");
            assert_eq!(restored.status, own.status, "{file} {text:?}");
        }
    }
    assert_eq!(place.store.restore_grants().unwrap(), [] as [std::path::PathBuf; 0]);
}

#[test]
fn missing_copies_are_made_at_the_start() {
    let place = Place::new();
    granted(&place);
    fs::remove_dir_all(place.path("state/notes")).unwrap();
    place.store.copy_grants().unwrap();
    fs::remove_file(place.path(GRANTED[1])).unwrap();
    assert_eq!(place.store.restore_grants().unwrap(), [place.path(GRANTED[1])]);
}

#[test]
fn deleted_grant_is_not_restored() {
    let place = Place::new();
    let reference = Object::from(granted(&place)).reference();
    place.store.delete(&reference).unwrap();
    assert_eq!(place.store.restore_grants().unwrap(), [] as [std::path::PathBuf; 0]);
    assert_eq!(place.store.get(&reference).unwrap(), None);
}

#[test]
fn damaged_status_without_copy_is_named() {
    let place = Place::new();
    granted(&place);
    fs::remove_dir_all(place.path("state/notes")).unwrap();
    fs::write(place.path(GRANTED[1]), "uid: [").unwrap();
    assert_eq!(place.store.restore_grants().unwrap(), [] as [std::path::PathBuf; 0]);
    assert_eq!(place.store.lost_grants(), [place.path(GRANTED[1])]);
    let problems = place.problems();
    assert!(problems.len() == 1 && problems[0].contains(GRANTED[1]), "{problems:?}");
}
