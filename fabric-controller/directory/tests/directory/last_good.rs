//! Whatever is done to a manifest, its last good version stands, also for who starts only then.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use fabric_directory::{Directory, Watch};
use fabric_objects::{Event, Kind};

use crate::{Place, cidr_of, network, network_ref, next, places, quiet, sync};

const SECRET: &str = "apiVersion: v1\nkind: Secret\nmetadata: {name: s, namespace: t}\n\
                      stringData: {x: HUSH}\n";
const NOTE: &str = "n";

/// As the controller does.
async fn controller(place: &Place) -> Watch {
    let mut watch = place.store.watch(&Kind::ALL);
    watch.remember();
    sync(&mut watch).await;
    watch
}

/// Returns the CIDR of a Network as a program reads it that starts now.
fn cidr_for_a_newcomer(place: &Place, name: &str) -> Option<String> {
    let store = Directory::open(places(place.dir.path())).unwrap();
    store.get(&network_ref(name)).unwrap().map(|object| cidr_of(&object).to_owned())
}

fn two(first: &str, second: &str) -> String {
    network("a", first) + "---\n" + SECRET + "---\n" + &network("b", second)
}

#[tokio::test]
async fn restart_uses_last_good_version_of_bad_manifest() {
    let place = Place::new();
    let good = two("10.1.0.0/16", "10.2.0.0/16");
    let bad = [
        good[..good.len() / 2].to_owned(),
        String::new(),
        good.replace("10.2.0.0/16", "10.2.0.7/16"),
        good.replace("kind: Network", "kind: Netwrok"),
        good.replace("cidr: 10.1", "cidr: [10.1"),
        "x".repeat(2 << 20),
    ];
    for bad in bad {
        place.write("a.yaml", &good);
        drop(controller(&place).await);
        place.write("a.yaml", &bad);
        for name in ["a", "b"] {
            let found = cidr_for_a_newcomer(&place, name);
            let expected = if name == "a" { "10.1.0.0/16" } else { "10.2.0.0/16" };
            assert_eq!(found.as_deref(), Some(expected), "{name} {:?}", &bad[..bad.len().min(300)]);
        }
        assert!(!place.problems().is_empty());
        drop(controller(&place).await);
        assert_eq!(cidr_for_a_newcomer(&place, "b").unwrap(), "10.2.0.0/16", "after two restarts");
    }
    fs::rename(place.path("manifests"), place.path("away")).unwrap();
    assert_eq!(cidr_for_a_newcomer(&place, "b").unwrap(), "10.2.0.0/16");
}

#[tokio::test]
async fn fault_names_use_of_last_good_version() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.7/16"));
    let fault = "a.yaml:7: Network liqo/a: spec.cidr: 10.1.0.7/16 has host bits set; did you mean 10.1.0.0/16?";
    assert_eq!(place.problems(), [fault], "there is no good version yet");
    place.replace("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = controller(&place).await;
    place.replace("a.yaml", &network("a", "10.1.0.7/16"));
    let expected = format!("{fault}; the last good version stays in use");
    let Event::Problems(problems) = next(&mut watch).await else { panic!() };
    assert_eq!(crate::lines(&problems), [expected.as_str()]);
    drop(watch);
    assert_eq!(place.problems(), [expected], "the same to a program that starts now");
}

#[tokio::test]
async fn removed_or_corrected_manifest_leaves_no_copy() {
    let place = Place::new();
    place.write("a.yaml", &two("10.1.0.0/16", "10.2.0.0/16"));
    drop(controller(&place).await);
    place.replace("a.yaml", &network("a", "10.3.0.0/16"));
    assert_eq!(cidr_for_a_newcomer(&place, "b"), None, "a good file that says nothing of it");
    drop(controller(&place).await);
    place.write("a.yaml", "kind: [");
    assert_eq!(cidr_for_a_newcomer(&place, "a").unwrap(), "10.3.0.0/16");
    assert_eq!(cidr_for_a_newcomer(&place, "b"), None);
    place.remove("a.yaml");
    assert_eq!(
        cidr_for_a_newcomer(&place, "a").unwrap(),
        "10.3.0.0/16",
        "a folder without any file"
    );
    place.write("other.yaml", "");
    assert_eq!(cidr_for_a_newcomer(&place, "a").unwrap(), "10.3.0.0/16", "it may be filling");
    let mut watch = controller(&place).await;
    assert!(matches!(next(&mut watch).await, Event::Deleted(of) if of.name == "a"));
    assert_eq!(cidr_for_a_newcomer(&place, "a"), None);
    assert_eq!(fs::read_dir(place.path("state/last-good")).unwrap().count(), 0);
}

#[tokio::test]
async fn lost_copies_are_written_again() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = controller(&place).await;
    let copy = place.path("state/last-good/a.yaml");
    for (n, is_whole) in [(2, true), (3, false)] {
        match is_whole {
            true => fs::remove_dir_all(place.path("state/last-good")).unwrap(),
            false => fs::remove_file(&copy).unwrap(),
        }
        // Reads everything again.
        place.write(&format!("{n}.yaml"), &network(&format!("n{n}"), &format!("10.{n}.0.0/16")));
        assert!(matches!(next(&mut watch).await, Event::Applied(_)));
        assert!(copy.exists(), "{n}");
    }
}

#[tokio::test]
async fn a_secret_is_remembered_for_root_alone() {
    let place = Place::new();
    place.write("a.yaml", &two("10.1.0.0/16", "10.2.0.0/16"));
    drop(controller(&place).await);
    let text = fs::read_to_string(place.path("state/last-good/a.yaml")).unwrap();
    assert!(text.contains("10.2.0.0/16") && text.contains("Secret"), "{text}");
    let mode = |path: &str| fs::metadata(place.path(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("state/last-good/a.yaml"), 0o600);
    assert_eq!(mode("state/last-good"), 0o700);
}

#[tokio::test]
async fn a_fault_in_one_object_hides_no_other_of_its_file() {
    let place = Place::new();
    place.write("a.yaml", &two("10.1.0.0/16", "10.2.0.0/16"));
    let mut watch = controller(&place).await;
    // A cut that leaves good YAML, but for one length.
    let good = two("10.1.0.0/16", "10.2.0.0/16");
    let cut = good.find("0/16").unwrap() + 3;
    place.replace("a.yaml", &good[..cut]);
    let Event::Problems(problems) = next(&mut watch).await else { panic!() };
    assert!(problems.iter().any(|p| p.message.contains("host bits")), "{problems:?}");
    assert!(problems.iter().any(|p| p.message.contains("end of the file")), "{problems:?}");
    quiet(&mut watch).await;
}

#[tokio::test]
async fn slowly_written_file_loses_nothing() {
    let place = Place::new();
    place.write("a.yaml", &two("10.1.0.0/16", "10.2.0.0/16"));
    let mut watch = controller(&place).await;
    let text = two("10.5.0.0/16", "10.2.0.0/16");
    let path = place.path("manifests/a.yaml");
    let writer = std::thread::spawn(move || {
        let mut file = OpenOptions::new().write(true).truncate(true).open(path).unwrap();
        for line in text.split_inclusive('\n') {
            file.write_all(line.as_bytes()).unwrap();
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    let mut changed = false;
    while !writer.is_finished() {
        let event = tokio::time::timeout(Duration::from_millis(50), watch.next()).await;
        match event {
            Ok(Event::Deleted(gone)) => panic!("{gone} was taken for deleted"),
            Ok(Event::Applied(object)) => changed |= object.reference() == network_ref("a"),
            Ok(Event::Problems(_) | Event::Synced) | Err(_) => {}
        }
    }
    assert!(changed, "the change itself arrived");
}

#[tokio::test]
async fn object_removed_in_place_is_gone_within_second() {
    let place = Place::new();
    place.write("a.yaml", &two("10.1.0.0/16", "10.2.0.0/16"));
    let mut watch = controller(&place).await;
    place.write("a.yaml", &network("b", "10.2.0.0/16"));
    let began = std::time::Instant::now();
    assert!(matches!(next(&mut watch).await, Event::Deleted(_)));
    assert!(matches!(next(&mut watch).await, Event::Deleted(r) if r == network_ref("a")));
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[test]
fn a_note_is_kept_whole_or_not_at_all() {
    let place = Place::new();
    assert_eq!(place.store.note::<Vec<u8>>(NOTE), None);
    assert!(place.store.put_note(NOTE, &vec![1_u8, 2]).unwrap());
    assert!(!place.store.put_note(NOTE, &vec![1_u8, 2]).unwrap());
    assert_eq!(place.store.note::<Vec<u8>>(NOTE), Some(vec![1, 2]));
    fs::write(place.path("state/notes/n.yaml"), "[1, ").unwrap();
    assert_eq!(place.store.note::<Vec<u8>>(NOTE), None);
    place.store.delete_note(NOTE).unwrap();
    place.store.delete_note(NOTE).unwrap();
}
