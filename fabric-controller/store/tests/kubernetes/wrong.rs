//! Objects that cannot be read, or are wrong.

use std::sync::Arc;

use fabric_store::{Event, Kind, Object};
use serde_json::json;

use crate::{Place, applied, problems};

#[tokio::test]
async fn unreadable_object_keeps_last_good_version() {
    let Some(place) = Place::new("unread").await else { return };
    let mut manifest = place.configuration("milan", &json!(["10.1.0.0/16"]));
    place.admin.apply("configurations", &manifest).await;
    let store = place.store();
    let mut watch = place.watch(&store, &[Kind::Configuration]);
    let good = applied(watch.sync().await.remove(0));

    manifest["spec"]["remote"]["cidr"]["pod"] = json!([7]);
    place.admin.apply("configurations", &manifest).await;
    let reported = problems(watch.next().await);
    assert!(
        reported.iter().any(|p| p.contains("Configuration unread/milan: spec.remote.cidr.pod")),
        "{reported:?}"
    );
    assert_eq!(watch.watch.seen().get(&good.reference()), Some(&good));

    // Its status can be written all the same: faults are reported there.
    let mut accepted = good.clone();
    let Object::Configuration(own) = &mut accepted else { panic!() };
    let own = Arc::make_mut(own);
    own.status = Some(Default::default());
    own.status.get_or_insert_default().remote = Some(own.spec.remote.clone());
    assert!(store.put_status(&accepted).await.unwrap());
    // Another object's events go on.
    let other = place.configuration("rome", &json!(["10.9.0.0/16"]));
    place.admin.apply("configurations", &other).await;
    assert_eq!(applied(watch.next().await).name(), "rome");

    manifest["spec"]["remote"]["cidr"]["pod"] = json!(["10.2.0.0/16"]);
    place.admin.apply("configurations", &manifest).await;
    let better = applied(watch.next().await);
    assert_eq!((better.uid(), better.name()), (good.uid(), "milan"));
    assert!(problems(watch.next().await).is_empty());
}

#[tokio::test]
async fn wrong_value_keeps_last_good_new_one_is_reported() {
    let Some(place) = Place::new("wrong").await else { return };
    let mut watch = place.watch(&place.store(), &[Kind::Configuration]);
    watch.sync().await;
    let mut manifest = place.configuration("milan", &json!(["10.1.0.1/16"]));
    place.admin.apply("configurations", &manifest).await;
    assert_eq!(applied(watch.next().await).name(), "milan", "there is no better one");
    let reported = problems(watch.next().await);
    assert!(
        reported.iter().any(|p| p.contains("spec.remote.cidr.pod[0]: 10.1.0.1/16 has host bits")),
        "{reported:?}"
    );

    manifest["spec"]["remote"]["cidr"]["pod"] = json!(["10.1.0.0/16"]);
    place.admin.apply("configurations", &manifest).await;
    let good = applied(watch.next().await);
    assert!(problems(watch.next().await).is_empty());

    manifest["spec"]["remote"]["cidr"]["pod"] = json!(["10.1.0.1/16"]);
    place.admin.apply("configurations", &manifest).await;
    // With the generation of the version that is reported as wrong.
    let mut kept = good.clone();
    kept.metadata_mut().generation = Some(good.generation() + 1);
    assert_eq!(applied(watch.next().await), kept);
    assert_eq!(problems(watch.next().await).len(), 1);
    watch.quiet().await;
    assert_eq!(watch.watch.seen().get(&good.reference()), Some(&kept));

    place.admin.delete("configurations", &manifest).await;
    assert!(matches!(watch.next().await, Event::Deleted(gone) if gone == good.reference()));
    assert!(problems(watch.next().await).is_empty());
}

#[tokio::test]
async fn new_watch_reports_valid_among_invalid() {
    let Some(place) = Place::new("newcomer").await else { return };
    let wrong = place.configuration("milan", &json!({"not": "a list"}));
    place.admin.apply("configurations", &wrong).await;
    place
        .admin
        .apply("configurations", &place.configuration("rome", &json!(["10.9.0.0/16"])))
        .await;
    let mut watch = place.watch(&place.store(), &[Kind::Configuration]);
    let events = watch.sync().await;
    let names: Vec<_> = events
        .iter()
        .filter_map(|e| if let Event::Applied(o) = e { Some(o.name()) } else { None })
        .collect();
    assert_eq!(names, ["rome"]);
    let of_milan =
        |p: &String| p.starts_with("Configuration newcomer/milan: spec.remote.cidr.pod: ");
    assert!(problems(events.last().unwrap().clone()).iter().any(of_milan), "{events:?}");
    let read = place.store().read(&[Kind::Configuration]).await.unwrap();
    assert!(read.problems.iter().map(ToString::to_string).any(|p| of_milan(&p)));
    place.admin.delete("configurations", &wrong).await;
}
