//! The user's manifests: from text to everything the controller would publish.

use std::sync::LazyLock;
use std::time::Duration;

use fabric_core::compile;
use fabric_index::{Index, Settings};
use fabric_objects::{Event, Kind, Object};
use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};

/// One input in so many is compiled twice, with one result.
const AGAIN: usize = 16;

/// A cluster and a peer, but for the gateway; an input is one file more, so that little text has effects.
static GOOD: LazyLock<Index> = LazyLock::new(|| {
    let (objects, problems) = fabric_directory::parse("good.yaml", include_str!("good.yaml"));
    assert_eq!(problems, []);
    let settings = Settings { node: Some("node-1".to_owned()), ..Settings::default() };
    with(Index::new(settings), objects)
});

/// A file that is not right is reported with its place, and no file takes the controller down or holds it up.
#[test]
fn manifests() {
    bolero::check!().with_max_len(2048).for_each(|bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        // YAML's line breaks (YAML 1.2 section 5.4).
        let lines = text.split(['\n', '\r']).count();
        let start = busy();
        let (objects, problems) = fabric_directory::parse("file.yaml", &text);
        for problem in &problems {
            let line = problem.source.strip_prefix("file.yaml:").unwrap();
            let line: usize = line.parse().unwrap();
            assert!(line >= 1 && line <= lines + 1, "{problem}");
            assert!(!problem.message.is_empty());
            let shown = problem.to_string();
            assert!(problem.field.as_ref().is_none_or(|field| shown.contains(field.as_str())));
        }
        let index = with(GOOD.clone(), objects);
        let published = compile(&index, Timestamp::UNIX_EPOCH);
        if bytes.len().is_multiple_of(AGAIN) {
            assert_eq!(published, compile(&index, Timestamp::UNIX_EPOCH));
        }
        let took = busy().saturating_sub(start);
        assert!(took < Duration::from_secs(5), "{took:?}");
    });
}

/// Processor time of this thread, however long it had to wait for it.
fn busy() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

fn with(mut index: Index, objects: Vec<Object>) -> Index {
    for object in objects {
        let reference = object.reference();
        assert!(!reference.name.is_empty());
        assert!(!matches!(
            reference.kind,
            Kind::GatewayConfig
                | Kind::NodeConfig
                | Kind::FabricRecord
                | Kind::GatewayRecord
                | Kind::Connection
        ));
        index.apply(Event::Applied(object));
    }
    index.apply(Event::Synced);
    index
}
