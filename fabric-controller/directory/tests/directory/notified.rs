//! Watches that a supervisor notifies.

use std::time::Instant;

use super::*;

/// Longer than a watch without a supervisor takes.
const TIMEOUT: Duration = Duration::from_secs(3);

fn secret(name: &str, text: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: t}}\n\
         stringData: {{privateKey: {text}}}\n"
    )
}

/// Waits for an event about the object; returns the time that took.
async fn applied(watch: &mut Watch, name: &str) -> Duration {
    let start = Instant::now();
    let wait = async {
        loop {
            let event = watch.next().await;
            if matches!(&event, Event::Applied(object) if object.name() == name) {
                return;
            }
        }
    };
    tokio::time::timeout(TIMEOUT, wait).await.unwrap();
    start.elapsed()
}

#[tokio::test]
async fn watch_outlives_its_supervisor_and_finds_the_next() {
    let place = Place::new();
    let server = place.store.serve_changes().unwrap();
    let mut watch = place.store.watch(&[Kind::Secret]);
    sync(&mut watch).await;
    quiet(&mut watch).await;
    place.replace("a.yaml", &secret("a", "x"));
    let took = applied(&mut watch, "a").await;
    assert!(took < Duration::from_millis(500), "{took:?}");

    drop(server);
    // In place, which a folder's own time does not show.
    place.write("a.yaml", &secret("a", "y"));
    applied(&mut watch, "a").await;

    let _server = place.store.serve_changes().unwrap();
    tokio::time::sleep(TIMEOUT).await;
    place.replace("b.yaml", &secret("b", "x"));
    let took = applied(&mut watch, "b").await;
    assert!(took < Duration::from_millis(500), "{took:?}");
}

/// Its manifest, edited or moved to another file, is noticed at once.
#[tokio::test]
async fn followed_secret_is_found_in_any_file() {
    let place = Place::new();
    let _server = place.store.serve_changes().unwrap();
    place.write("a.yaml", &secret("a", "x"));
    let own = ObjectRef::new(Kind::GatewayConfig, "t", "g");
    let mut watch = place.store.follow(&own, &[]);
    sync(&mut watch).await;
    watch.also(&ObjectRef::new(Kind::Secret, "t", "a"));
    applied(&mut watch, "a").await;
    place.write("a.yaml", &secret("a", "y"));
    applied(&mut watch, "a").await;
    place.replace("b.yaml", &secret("a", "z"));
    place.remove("a.yaml");
    applied(&mut watch, "a").await;
}
