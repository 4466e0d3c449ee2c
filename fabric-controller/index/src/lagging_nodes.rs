//! Nodes whose agent does not apply its newest config, perhaps as they are down. Nothing waits for
//! them for ever.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use fabric_api::fabric::NodeConfig;
use fabric_objects::{Kind, ObjectRef};

use crate::index::Index;

/// Time after which a node is slow, and named. An agent that runs takes a tenth of a second.
const SLOW: Duration = Duration::from_secs(2);
/// Time after which it lags, and nothing waits for it.
const MAX_LAG: Duration = Duration::from_secs(10);
/// Time after which its agent may be an older one, which reads no records. Much longer than an API server
/// under load takes: what it then gets is large, and would make all others late.
const STALLED: Duration = Duration::from_secs(60);

/// Time since which each node has not applied its newest config.
#[derive(Debug, Default)]
pub struct LaggingNodes {
    behind: BTreeMap<String, Behind>,
    observed: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Behind {
    since: Instant,
    /// A first config just published is not late, however long there was none.
    has_config: bool,
    /// Generation of the records that it is to acknowledge.
    records: Option<i64>,
}

impl LaggingNodes {
    /// Looks at all nodes, and sets in the index which of them are slow, lag or are stalled.
    pub fn observe(&mut self, index: &mut Index, now: Instant) {
        let behind = index.of_kind(Kind::Node).filter_map(|(node, _)| {
            let name = &node.name;
            let config = index.typed::<NodeConfig>(&ObjectRef::new(Kind::NodeConfig, "", name));
            let has_config = config.is_some();
            let read = index.records_read(name).map(|read| read.generation);
            let known = self.behind.get(name).filter(|known| {
                // One that acknowledges all that there was then is late for nothing but news.
                let is_behind = !config.is_some_and(NodeConfig::is_applied) || read < known.records;
                known.has_config == has_config && is_behind
            });
            let records = index.records.as_ref().map(|version| version.generation);
            let behind = known.copied().unwrap_or(Behind { since: now, has_config, records });
            (!index.is_applied(name)).then(|| (name.clone(), behind))
        });
        (self.behind, self.observed) = (behind.collect(), Some(now));
        let behind_for = |time: Duration| -> BTreeSet<String> {
            let late = self.behind.iter().filter(|(_, behind)| now - behind.since >= time);
            late.map(|(name, _)| name.clone()).collect()
        };
        index.slow_nodes = behind_for(SLOW);
        let late = behind_for(MAX_LAG);
        for node in late.difference(&index.lagging_nodes) {
            tracing::warn!(node, "does not apply its NodeConfig; nothing waits for it any more");
        }
        index.lagging_nodes = late;
        // A tenth at a time: an API server under load makes all of them late, and more so by configs in whole.
        let tenth = index.of_kind(Kind::Node).count().div_ceil(10);
        index.stalled_nodes = behind_for(STALLED).into_iter().take(tenth).collect();
    }

    /// Time of the next check, if nothing happens before. One that was missed is due at once.
    pub fn next_check(&self) -> Option<Instant> {
        let observed = self.observed?;
        let since = self.behind.values().map(|behind| behind.since);
        let due = since.flat_map(|since| [SLOW, MAX_LAG, STALLED].map(|wait| since + wait));
        due.filter(|due| *due > observed).min()
    }
}

#[cfg(test)]
mod tests {
    use fabric_api::fabric::NodeConfigStatus;
    use fabric_objects::{Event, Object};
    use serde_json::json;

    use super::*;

    #[test]
    fn node_lags_ten_seconds_after_its_config_changed() {
        #[allow(clippy::disallowed_methods, reason = "any instant serves")]
        let start = Instant::now();
        let (mut index, mut lagging) = (Index::default(), LaggingNodes::default());
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}});
        let node: k8s_openapi::api::core::v1::Node = serde_json::from_value(node).unwrap();
        index.apply(Event::Applied(node.into()));
        let mut note = |at: u64, config: Option<(i64, i64)>| {
            if let Some((generation, applied)) = config {
                index.apply(Event::Applied(node_config(generation, applied)));
            }
            let now = start + Duration::from_secs(at);
            lagging.observe(&mut index, now);
            let again = lagging.next_check().map(|again| (again - start).as_secs());
            (index.lagging_nodes == BTreeSet::from(["n1".to_owned()]), again)
        };
        assert_eq!(note(0, None), (false, Some(2)));
        assert_eq!(note(10, None), (true, Some(60)), "nothing can be published for it");
        assert_eq!(note(20, Some((1, 0))), (false, Some(22)), "its config is new");
        assert_eq!(note(21, Some((1, 1))), (false, None));
        assert_eq!(note(40, Some((2, 1))), (false, Some(42)));
        assert_eq!(note(45, Some((3, 1))), (false, Some(50)), "it is still behind");
        assert_eq!(note(49, Some((3, 2))), (false, Some(50)));
        assert_eq!(note(50, Some((4, 2))), (true, Some(100)));
        assert_eq!(note(51, Some((4, 4))), (false, None), "it is back");
    }

    #[test]
    fn tenth_of_late_nodes_is_stalled_at_a_time() {
        #[allow(clippy::disallowed_methods, reason = "any instant serves")]
        let start = Instant::now();
        let (mut index, mut lagging) = (Index::default(), LaggingNodes::default());
        for n in 0..30 {
            let node =
                json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("n{n}")}});
            let node: k8s_openapi::api::core::v1::Node = serde_json::from_value(node).unwrap();
            index.apply(Event::Applied(node.into()));
        }
        lagging.observe(&mut index, start);
        lagging.observe(&mut index, start + STALLED);
        assert_eq!((index.lagging_nodes.len(), index.stalled_nodes.len()), (30, 3));
    }

    fn node_config(generation: i64, applied: i64) -> Object {
        let spec = json!({"clusterId": "rome", "underlay": [], "localPods": [], "podCidrs": [],
            "external": [], "peerings": [], "vxlanSources": []});
        let mut config = NodeConfig::new("n1", serde_json::from_value(spec).unwrap());
        config.metadata.generation = Some(generation);
        let applied_generation = applied;
        config.status = Some(NodeConfigStatus { applied_generation, ..Default::default() });
        config.into()
    }
}
