//! Intervals between versions of the FabricRecords. All nodes acknowledge each version, which is most of
//! what the API server of a large cluster gets to do.

use std::time::Duration;

use fabric_core::index::Index;
use fabric_store::Kind;
use tokio::time::Instant;

/// Maximum time for each node until the next version may follow: some nodes may never acknowledge.
const LONGEST_PER_NODE: Duration = Duration::from_millis(25);
/// Time until the next version, as a multiple of the time that the acknowledgements of this one took: an
/// API server that is busy gets fewer of them.
const SHARE: u32 = 2;

/// When the next version may be published.
#[derive(Debug, Default)]
pub struct Pacing {
    last: Option<Version>,
    held: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Version {
    published: Instant,
    acknowledged: Option<Instant>,
}

impl Pacing {
    /// Time until which a new version has to wait; the first one after a rest does not. Has to be called
    /// when a node has acknowledged.
    pub fn earliest(&mut self, index: &Index) -> Option<Instant> {
        let (last, now) = (self.last.as_mut()?, Instant::now());
        if last.acknowledged.is_none() && index.is_applied_by_all() {
            last.acknowledged = Some(now);
        }
        let count = u32::try_from(index.of_kind(Kind::Node).count()).unwrap_or(u32::MAX);
        let latest = last.published + LONGEST_PER_NODE * count;
        let after = |acknowledged| last.published + (acknowledged - last.published) * SHARE;
        let earliest = last.acknowledged.map_or(latest, after).min(latest);
        (now < earliest).then_some(earliest)
    }

    /// A version has been written.
    pub fn published(&mut self) {
        self.last = Some(Version { published: Instant::now(), acknowledged: None });
    }

    /// A version waits until then; `None`: none does.
    pub fn hold(&mut self, until: Option<Instant>) {
        self.held = until;
    }

    /// Time at which the version that waits is to be published.
    pub fn due(&self) -> Option<Instant> {
        self.held
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use fabric_api::fabric::{NodeConfig, NodeConfigStatus};
    use fabric_store::Event;
    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;

    use super::*;

    pub(crate) fn node_config(node: &str, is_applied: bool) -> NodeConfig {
        let spec = json!({"clusterId": "rome", "underlay": [], "localPods": [], "podCidrs": [],
            "external": [], "peerings": [], "vxlanSources": []});
        let mut config = NodeConfig::new(node, serde_json::from_value(spec).unwrap());
        config.metadata.generation = Some(1);
        let applied_generation = is_applied.into();
        config.status = Some(NodeConfigStatus { applied_generation, ..Default::default() });
        config
    }

    /// Nodes, of which the first ones have applied their configs.
    pub(crate) fn index_of_nodes(count: usize, applied: usize) -> Index {
        let mut index = Index::default();
        for n in 0..count {
            let name = format!("n{n}");
            let mut node = Node::default();
            node.metadata.name = Some(name.clone());
            index.apply(Event::Applied(node.into()));
            let config = node_config(&name, n < applied);
            index.apply(Event::Applied(config.into()));
        }
        index
    }

    #[tokio::test(start_paused = true)]
    async fn version_waits_twice_as_long_as_acknowledgements() {
        let mut pacing = Pacing::default();
        let (some, all) = (index_of_nodes(200, 199), index_of_nodes(200, 200));
        assert_eq!(pacing.earliest(&some), None, "it is the first one");
        let first = Instant::now();
        pacing.published();
        assert_eq!(pacing.earliest(&some), Some(first + Duration::from_secs(5)));
        tokio::time::advance(Duration::from_millis(400)).await;
        assert_eq!(pacing.earliest(&all), Some(first + Duration::from_millis(800)));
        tokio::time::advance(Duration::from_millis(400)).await;
        assert_eq!(pacing.earliest(&all), None);
        pacing.published();
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(pacing.earliest(&some), None, "one node may never acknowledge");
    }
}
