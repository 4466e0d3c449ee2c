//! The user's manifests: from text to everything the controller would publish.

use std::time::{Duration, Instant};

use fabric_controller::{Index, Settings, compile};
use fabric_store::{Event, Kind, Object};
use jiff::Timestamp;

/// A file that is not right says where, and no file takes the controller down or holds it up.
#[test]
fn manifests() {
    bolero::check!().with_max_len(16 * 1024).for_each(|bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        // YAML's line breaks (YAML 1.2 section 5.4).
        let lines = text.split(['\n', '\r']).count();
        let start = Instant::now();
        let (objects, problems) = fabric_store::parse("file.yaml", &text);
        for problem in &problems {
            let line = problem.source.strip_prefix("file.yaml:").unwrap();
            let line: usize = line.parse().unwrap();
            assert!(line >= 1 && line <= lines + 1, "{problem}");
            assert!(!problem.message.is_empty());
            let shown = problem.to_string();
            assert!(problem.field.as_ref().is_none_or(|field| shown.contains(field.as_str())));
        }
        let index = index(objects);
        let published = compile(&index, Timestamp::UNIX_EPOCH);
        assert_eq!(published, compile(&index, Timestamp::UNIX_EPOCH));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    });
}

fn index(objects: Vec<Object>) -> Index {
    let mut index = Index::new(Settings { node: Some("node-1".to_owned()), ..Settings::default() });
    for object in objects {
        let reference = object.reference();
        assert!(!reference.name.is_empty());
        assert!(!matches!(
            reference.kind,
            Kind::GatewayConfig | Kind::NodeConfig | Kind::Connection
        ));
        index.apply(Event::Applied(Box::new(object)));
    }
    index.apply(Event::Synced);
    index
}
