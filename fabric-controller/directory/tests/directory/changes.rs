//! Events of a watch.

use std::fs;
use std::time::{Duration, Instant};

use fabric_directory::{Directory, Watch};
use fabric_objects::{Event, Kind, Object};

use crate::{Place, cidr_of, lines, network, network_ref, next, quiet, sync};

fn applied(event: Event) -> Object {
    let Event::Applied(object) = event else { panic!("{event:?}") };
    object
}

#[tokio::test]
async fn watch_lists_objects_then_reports_changes() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = place.store.watch(&[Kind::Network]);
    let first = sync(&mut watch).await;
    assert_eq!(first.len(), 2, "{first:?}");
    assert!(matches!(&first[1], Event::Problems(none) if none.is_empty()));

    let began = Instant::now();
    place.write("b.yaml", &network("b", "10.2.0.0/16"));
    assert_eq!(applied(next(&mut watch).await).reference(), network_ref("b"));
    assert!(began.elapsed() < Duration::from_millis(250), "{:?}", began.elapsed());

    place.replace("a.yaml", &network("a", "10.3.0.0/16"));
    assert_eq!(cidr_of(&applied(next(&mut watch).await)), "10.3.0.0/16");

    place.remove("b.yaml");
    assert!(matches!(next(&mut watch).await, Event::Deleted(r) if r == network_ref("b")));
    quiet(&mut watch).await;
}

#[tokio::test]
async fn unchanged_write_is_no_event() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = place.store.watch(&Kind::ALL);
    sync(&mut watch).await;
    place.replace("a.yaml", &format!("# a comment\n{}", network("a", "10.1.0.0/16")));
    quiet(&mut watch).await;
}

#[tokio::test]
async fn an_edit_within_one_clock_tick_is_seen() {
    let place = Place::new();
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    for round in 10..30 {
        place.write("a.yaml", &network("a", &format!("10.{round}.0.0/16")));
        assert_eq!(cidr_of(&applied(next(&mut watch).await)), format!("10.{round}.0.0/16"));
    }
}

#[tokio::test]
async fn a_file_cut_short_keeps_its_last_good_objects() {
    let place = Place::new();
    let good = network("a", "10.1.0.0/16") + "---\n" + &network("b", "10.2.0.0/16");
    place.write("a.yaml", &good);
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;

    place.replace("a.yaml", &(network("a", "10.5.0.0/16") + "---\nkind: [Net"));
    assert_eq!(cidr_of(&applied(next(&mut watch).await)), "10.5.0.0/16", "a is whole");
    assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.len() == 1));
    quiet(&mut watch).await; // b stands

    place.replace("a.yaml", &network("a", "10.5.0.0/16"));
    assert!(matches!(next(&mut watch).await, Event::Deleted(r) if r == network_ref("b")));
    assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.is_empty()));
}

#[tokio::test]
async fn a_slip_in_an_edit_keeps_the_last_good_object() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    place.replace("a.yaml", &network("a", "10.1.0.0/16").replace("cidr:", "cdir:"));
    let Event::Problems(problems) = next(&mut watch).await else { panic!() };
    assert!(lines(&problems)[0].contains("Network liqo/a"), "{problems:?}");
    quiet(&mut watch).await;
    place.write("other.yaml", "");
    place.remove("a.yaml");
    assert!(matches!(next(&mut watch).await, Event::Deleted(_)));
}

#[tokio::test]
async fn moved_object_is_no_event() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    fs::rename(place.path("manifests/a.yaml"), place.path("manifests/z.yml")).unwrap();
    quiet(&mut watch).await;
}

#[tokio::test]
async fn lost_folder_keeps_objects_until_it_is_back() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    fs::rename(place.path("manifests"), place.path("elsewhere")).unwrap();
    assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.len() == 1));
    quiet(&mut watch).await;
    fs::rename(place.path("elsewhere"), place.path("manifests")).unwrap();
    place.write("b.yaml", &network("b", "10.2.0.0/16"));
    assert_eq!(applied(next(&mut watch).await).reference(), network_ref("b"));
}

#[tokio::test]
async fn emptied_folder_keeps_objects_until_it_is_filled() {
    let place = Place::new();
    let texts = [("a.yaml", network("a", "10.1.0.0/16")), ("b.yaml", network("b", "10.2.0.0/16"))];
    texts.iter().for_each(|(file, text)| place.write(file, text));
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    for (round, back) in [2, 1].into_iter().enumerate() {
        texts.iter().for_each(|(file, _)| place.remove(file));
        let Event::Problems(problems) = next(&mut watch).await else { panic!() };
        let [problem] = &lines(&problems)[..] else { panic!("{problems:?}") };
        assert!(problem.contains("holds no manifest any more"), "{problem}");
        quiet(&mut watch).await;
        for (file, text) in texts.iter().rev().take(back) {
            place.write(file, text);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.is_empty()));
        match round {
            0 => quiet(&mut watch).await,
            _ => assert!(
                matches!(next(&mut watch).await, Event::Deleted(r) if r == network_ref("a"))
            ),
        }
    }
}

fn id(id: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: liqo-clusterid-configmap, namespace: liqo}}\n\
         data: {{CLUSTER_ID: {id}}}\n"
    )
}

/// Nothing was applied: the one that stays counts.
#[tokio::test]
async fn folder_of_two_clusters_becomes_that_of_one() {
    let place = Place::new();
    place.write("milan.yaml", &id("milan"));
    place.write("rome.yaml", &id("rome"));
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = place.store.watch(&[Kind::Network]);
    let expected = loop {
        let Event::Problems(problems) = next(&mut watch).await else { continue };
        let Some(line) = lines(&problems).pop() else { continue };
        break if line.contains("expected milan") { "milan.yaml" } else { "rome.yaml" };
    };
    place.remove(expected);
    while !matches!(next(&mut watch).await, Event::Applied(_)) {}
}

#[tokio::test]
async fn folder_of_another_cluster_changes_nothing() {
    let place = Place::new();
    place.write("cluster.yaml", &id("rome"));
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    fs::create_dir(place.path("other")).unwrap();
    fs::write(place.path("other/milan.yaml"), id("milan")).unwrap();
    fs::write(place.path("other/b.yaml"), network("b", "10.2.0.0/16")).unwrap();
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    let swap = |from: &str, to: &str| {
        fs::rename(place.path("manifests"), place.path(to)).unwrap();
        fs::rename(place.path(from), place.path("manifests")).unwrap();
    };
    swap("other", "elsewhere");
    // The folder was missing for a moment.
    while let Event::Problems(problems) = next(&mut watch).await {
        if lines(&problems).iter().any(|line| line.contains("found milan; expected rome")) {
            break;
        }
    }
    quiet(&mut watch).await;
    place.write("c.yaml", &network("c", "10.4.0.0/16"));
    quiet(&mut watch).await;
    swap("elsewhere", "other");
    while !matches!(next(&mut watch).await, Event::Problems(p) if p.is_empty()) {}
    quiet(&mut watch).await;
    place.remove("cluster.yaml");
    let Event::Problems(problems) = next(&mut watch).await else { panic!() };
    assert!(lines(&problems)[0].contains("missing; expected CLUSTER_ID: rome"), "{problems:?}");
    place.replace("a.yaml", &network("a", "10.9.0.0/16"));
    quiet(&mut watch).await;
    place.replace("a.yaml", &network("a", "10.1.0.0/16"));
    place.write("cluster.yaml", &id("rome"));
    while !matches!(next(&mut watch).await, Event::Problems(p) if p.is_empty()) {}
    quiet(&mut watch).await;
    place.replace("a.yaml", &network("a", "10.3.0.0/16"));
    assert_eq!(cidr_of(&applied(next(&mut watch).await)), "10.3.0.0/16");
}

#[tokio::test]
async fn folder_that_fills_after_a_start_loses_nothing() {
    let place = Place::new();
    let texts = [("a.yaml", network("a", "10.1.0.0/16")), ("b.yaml", network("b", "10.2.0.0/16"))];
    texts.iter().for_each(|(file, text)| place.write(file, text));
    {
        let mut watch = place.store.watch(&[Kind::Network]);
        watch.remember();
        sync(&mut watch).await;
    }
    texts.iter().for_each(|(file, _)| place.remove(file));
    let mut watch = place.store.watch(&[Kind::Network]);
    watch.remember();
    let first = sync(&mut watch).await;
    let applied = first.iter().filter(|event| matches!(event, Event::Applied(_))).count();
    assert_eq!(applied, 2, "{first:?}");
    place.write("b.yaml", &texts[1].1);
    assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.is_empty()));
    tokio::time::sleep(Duration::from_millis(300)).await;
    place.write("a.yaml", &texts[0].1);
    quiet(&mut watch).await;
}

/// As at the start of a host, which writes them while weft starts.
#[tokio::test]
async fn folder_half_full_at_the_start_loses_nothing() {
    let place = Place::new();
    let texts = [("a.yaml", network("a", "10.1.0.0/16")), ("b.yaml", network("b", "10.2.0.0/16"))];
    texts.iter().for_each(|(file, text)| place.write(file, text));
    let applied = async |watch: &mut Watch| {
        let first = sync(watch).await;
        first.iter().filter(|event| matches!(event, Event::Applied(_))).count()
    };
    for (is_back, rest) in [(true, 2), (false, 1)] {
        let mut watch = place.store.watch(&[Kind::Network]);
        watch.remember();
        assert_eq!(applied(&mut watch).await, 2);
        drop(watch);
        place.remove("b.yaml");
        let mut watch = place.store.watch(&[Kind::Network]);
        watch.remember();
        assert_eq!(applied(&mut watch).await, 2, "b.yaml may be back soon");
        if is_back {
            tokio::time::sleep(Duration::from_millis(300)).await;
            place.write("b.yaml", &texts[1].1);
            quiet(&mut watch).await;
        } else {
            assert!(matches!(next(&mut watch).await, Event::Deleted(of) if of.name == "b"));
        }
        drop(watch);
        let mut watch = place.store.watch(&[Kind::Network]);
        assert_eq!(applied(&mut watch).await, rest);
    }
}

/// Each within half a second of the one before, all of them after more than that.
#[tokio::test]
async fn folder_that_is_made_anew_may_fill_slowly() {
    let place = Place::new();
    let texts =
        ["a", "b", "c", "d"].map(|name| (format!("{name}.yaml"), network(name, "10.1.0.0/16")));
    texts.iter().for_each(|(file, text)| place.write(file, text));
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    fs::remove_dir_all(place.path("manifests")).unwrap();
    assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.len() == 1));
    fs::create_dir(place.path("manifests")).unwrap();
    for (file, text) in &texts {
        place.write(file, text);
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.is_empty()));
    quiet(&mut watch).await;
}

#[tokio::test]
async fn only_file_may_be_replaced_under_another_name() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    place.remove("a.yaml");
    assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.len() == 1));
    place.write("z.yaml", &network("a", "10.3.0.0/16"));
    assert_eq!(cidr_of(&applied(next(&mut watch).await)), "10.3.0.0/16");
    assert!(matches!(next(&mut watch).await, Event::Problems(p) if p.is_empty()));
    quiet(&mut watch).await;
}

#[tokio::test]
async fn a_cancelled_wait_loses_nothing() {
    let place = Place::new();
    let mut watch = place.store.watch(&[Kind::Network]);
    sync(&mut watch).await;
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    for _ in 0..5 {
        let short = tokio::time::timeout(Duration::from_millis(7), watch.next()).await;
        assert!(short.is_err() || matches!(short, Ok(Event::Applied(_))), "{short:?}");
        if short.is_ok() {
            return;
        }
    }
    applied(next(&mut watch).await);
}

#[tokio::test]
async fn further_host_reads_published_objects_only() {
    let place = Place::new();
    let published = Directory::open_published(&place.path("run/published")).unwrap();
    let mut watch = published.watch(&Kind::ALL);
    sync(&mut watch).await;
    place.write("a.yaml", &network("a", "10.1.0.0/16"));
    quiet(&mut watch).await;
    place.store.put(&crate::own::connection("c").into()).unwrap();
    assert_eq!(applied(next(&mut watch).await).name(), "c");
    assert!(Directory::open_published(&place.path("nowhere")).is_err());
}

#[test]
fn reader_does_not_remake_a_removed_directory() {
    let place = Place::new();
    let published = Directory::open_published(&place.path("run/published")).unwrap();
    let stored = place.store.put(&crate::own::connection("c").into()).unwrap();
    fs::remove_dir_all(place.path("run/published")).unwrap();
    let error = published.put_status(&stored).unwrap_err().to_string();
    assert!(error.contains("published"), "{error}");
    assert!(!place.path("run/published").exists());
}
