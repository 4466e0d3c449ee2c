//! Intervals between versions of the FabricRecords. All nodes acknowledge each version, which is most of
//! what the API server of a large cluster gets to do.

use std::time::Duration;

use fabric_core::index::Index;
use fabric_store::Kind;
use tokio::time::Instant;

/// Time for each node until the next version may follow, unless all have acknowledged this one.
const INTERVAL_PER_NODE: Duration = Duration::from_millis(5);
/// The same, on average over more than [`BURST`] versions. An API server on two cores takes about 400 writes
/// a second; this leaves three quarters of them to others.
const AVERAGE_PER_NODE: Duration = Duration::from_millis(10);
/// Versions that may follow each other faster than that: those that one new peering makes.
const BURST: u32 = 4;

/// When the next version may be published.
#[derive(Debug, Default)]
pub struct Pacing {
    published: Option<Instant>,
    /// Time at which the average is reached again.
    even: Option<Instant>,
    held: Option<Instant>,
}

impl Pacing {
    /// Time until which a new version has to wait; the first ones after a rest do not.
    pub fn earliest(&self, index: &Index) -> Option<Instant> {
        let nodes = index.of_kind(Kind::Node);
        let is_acknowledged = nodes.map(|(node, _)| &node.name).all(|node| index.is_applied(node));
        let next = self.published? + INTERVAL_PER_NODE * node_count(index);
        let ahead = AVERAGE_PER_NODE * node_count(index) * (BURST - 1);
        let now = Instant::now();
        let average = self.even?.checked_sub(ahead).unwrap_or(now);
        let earliest = if is_acknowledged { average } else { average.max(next) };
        (now < earliest).then_some(earliest)
    }

    /// A version has been written.
    pub fn published(&mut self, index: &Index) {
        let now = Instant::now();
        self.published = Some(now);
        self.even = Some(self.even.unwrap_or(now).max(now) + AVERAGE_PER_NODE * node_count(index));
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

fn node_count(index: &Index) -> u32 {
    u32::try_from(index.of_kind(Kind::Node).count()).unwrap_or(u32::MAX)
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
        pacing.published(&some);
        let second = Instant::now() + Duration::from_secs(1);
        assert_eq!(pacing.earliest(&some), Some(second));
        assert_eq!(pacing.earliest(&all), None, "nobody works on the one before");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(pacing.earliest(&some), None);
    }

    #[tokio::test(start_paused = true)]
    async fn many_versions_keep_to_their_average() {
        let (mut pacing, all) = (Pacing::default(), index_of_nodes(200, 200));
        let start = Instant::now();
        let mut times = Vec::new();
        while times.len() < 7 {
            if let Some(earliest) = pacing.earliest(&all) {
                tokio::time::sleep_until(earliest).await;
            }
            pacing.published(&all);
            times.push((Instant::now() - start).as_secs());
        }
        assert_eq!(times, [0, 0, 0, 0, 2, 4, 6]);
        tokio::time::advance(Duration::from_secs(8)).await;
        assert_eq!(pacing.earliest(&all), None, "it has rested");
    }
}
