//! Intervals between versions of the FabricRecords. All nodes acknowledge each version, which is most of
//! what the API server of a large cluster gets to do.

use std::time::Duration;

use fabric_core::index::Index;
use fabric_store::Kind;
use tokio::time::Instant;

/// Minimum interval between two versions for each node, unless all have acknowledged the first. An API
/// server on two cores takes about 1,000 small writes a second; this leaves four fifths of them to others.
const INTERVAL_PER_NODE: Duration = Duration::from_millis(5);

/// When the next version may be published.
#[derive(Debug, Default)]
pub struct Pacing {
    published: Option<Instant>,
    held: Option<Instant>,
}

impl Pacing {
    /// Time until which a new version has to wait; the first one after a rest does not.
    pub fn earliest(&self, index: &Index) -> Option<Instant> {
        let mut nodes = index.of_kind(Kind::Node).map(|(node, _)| node.name.as_str());
        let count = u32::try_from(index.of_kind(Kind::Node).count()).unwrap_or(u32::MAX);
        let earliest = self.published? + INTERVAL_PER_NODE.saturating_mul(count);
        let is_early = Instant::now() < earliest && !nodes.all(|node| index.is_applied(node));
        is_early.then_some(earliest)
    }

    /// A version has been written.
    pub fn published(&mut self) {
        self.published = Some(Instant::now());
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
            index.apply(Event::Applied(Box::new(node.into())));
            let config = node_config(&name, n < applied);
            index.apply(Event::Applied(Box::new(config.into())));
        }
        index
    }

    #[tokio::test(start_paused = true)]
    async fn version_waits_for_acknowledgements_or_its_time() {
        let mut pacing = Pacing::default();
        let (some, all) = (index_of_nodes(200, 199), index_of_nodes(200, 200));
        assert_eq!(pacing.earliest(&some), None, "it is the first one");
        pacing.published();
        let second = Instant::now() + Duration::from_secs(1);
        assert_eq!(pacing.earliest(&some), Some(second));
        assert_eq!(pacing.earliest(&all), None, "nobody works on the one before");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(pacing.earliest(&some), None);
    }
}
