//! Intervals between versions of the FabricRecords. All nodes acknowledge each version, which is most of
//! what the API server of a large cluster gets to do.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_index::Index;
use fabric_store::{Kind, ObjectRef};
use tokio::time::Instant;

/// Maximum time for each node until the next version may follow: some nodes may never acknowledge.
const LONGEST_PER_NODE: Duration = Duration::from_millis(25);
/// Time until the next version, as a multiple of the time that the acknowledgements of this one took: an
/// API server that is busy gets fewer of them.
const SHARE: u32 = 2;
/// Versions that may follow each other without that, after a rest of as many intervals: one more
/// peering makes three, as it gets its prefixes, its gateway and its connection.
pub(crate) const BURST: u32 = 3;
/// Maximum time for each node until the next one of those: acknowledgements of two versions at once would
/// make both late.
const BURST_PER_NODE: Duration = Duration::from_millis(5);

/// Maximum wait of new peerings for the pods of their gateways: those that come soon spare a version.
const GATEWAY_WAIT: Duration = Duration::from_secs(1);

/// Schedule of published versions.
#[derive(Debug, Default)]
pub struct Pacing {
    last: Option<Version>,
    /// Since when records of new peerings wait for their gateways.
    without_gateways: BTreeMap<ObjectRef, Instant>,
    held: Option<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Version {
    published: Instant,
    acknowledged: Option<Instant>,
    /// Time after which it has no part in the wait of later ones, as known by now.
    interval: Duration,
    /// Versions that may follow before that.
    spare: u32,
}

impl Pacing {
    /// Keeps those of the records of new peerings without gateways that still wait for those.
    pub fn await_gateways(&mut self, new: &mut BTreeSet<ObjectRef>) {
        let now = Instant::now();
        let all = &mut self.without_gateways;
        all.retain(|record, _| new.contains(record));
        new.retain(|record| now < *all.entry(record.clone()).or_insert(now) + GATEWAY_WAIT);
        let waiting = all.values().map(|since| *since + GATEWAY_WAIT);
        self.held = waiting.filter(|until| now < *until).min();
    }

    /// Time until which a version with news has to wait.
    pub fn earliest(&mut self, index: &Index) -> Option<Instant> {
        self.paced(index).filter(|earliest| Instant::now() < *earliest)
    }

    fn paced(&mut self, index: &Index) -> Option<Instant> {
        if index.is_applied_by_all() {
            self.acknowledged();
        }
        let last = self.last.as_mut()?;
        let count = u32::try_from(index.of_kind(Kind::Node).count()).unwrap_or(u32::MAX);
        let longest = LONGEST_PER_NODE * count;
        let of = |acknowledged: Instant| (acknowledged - last.published) * SHARE;
        last.interval = last.acknowledged.map_or(longest, of).min(longest);
        let wait = match last.acknowledged {
            _ if last.spare == 0 => last.interval,
            Some(_) => Duration::ZERO,
            None => BURST_PER_NODE * count,
        };
        Some(last.published + wait)
    }

    /// All nodes have acknowledged the last version.
    pub fn acknowledged(&mut self) {
        if let Some(last) = &mut self.last {
            last.acknowledged.get_or_insert_with(Instant::now);
        }
    }

    /// A version has been written.
    pub fn published(&mut self) {
        let now = Instant::now();
        let spare = self.last.map_or(BURST, |last| last.spare_at(now)).saturating_sub(1);
        let (acknowledged, interval) = (None, Duration::ZERO);
        self.last = Some(Version { published: now, acknowledged, interval, spare });
    }

    /// A version waits until then, beside those records.
    pub fn hold(&mut self, until: Option<Instant>) {
        self.held = self.held.into_iter().chain(until).min();
    }

    /// Time at which the version that waits is to be published.
    pub fn due(&self) -> Option<Instant> {
        self.held
    }
}

impl Version {
    fn spare_at(&self, now: Instant) -> u32 {
        let rest = (now - self.published).as_nanos() / self.interval.as_nanos().max(1);
        self.spare.saturating_add(u32::try_from(rest).unwrap_or(BURST)).min(BURST)
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

    const SECOND: Duration = Duration::from_secs(1);

    /// Pacing and 200 nodes that have acknowledged all of a burst but its last version, or all.
    fn after_burst() -> (Pacing, [Index; 2]) {
        let mut pacing = Pacing::default();
        let nodes = [199, 200].map(|applied| index_of_nodes(200, applied));
        for _ in 0..BURST {
            assert_eq!(pacing.earliest(&nodes[1]), None);
            pacing.published();
        }
        (pacing, nodes)
    }

    #[tokio::test(start_paused = true)]
    async fn version_waits_twice_as_long_as_acknowledgements() {
        let (mut pacing, [some, all]) = after_burst();
        let last = Instant::now();
        assert_eq!(pacing.earliest(&some), Some(last + 5 * SECOND));
        tokio::time::advance(SECOND * 2 / 5).await;
        assert_eq!(pacing.earliest(&all), Some(last + SECOND * 4 / 5));
        tokio::time::advance(SECOND * 2 / 5).await;
        assert_eq!(pacing.earliest(&all), None);
        pacing.published();
        assert_eq!(pacing.earliest(&some), Some(last + SECOND * 4 / 5 + 5 * SECOND));
        tokio::time::advance(5 * SECOND).await;
        assert_eq!(pacing.earliest(&some), None, "one node may never acknowledge");
    }

    #[tokio::test(start_paused = true)]
    async fn versions_after_a_rest_follow_acknowledgements() {
        let (mut pacing, [some, all]) = after_burst();
        tokio::time::advance(SECOND).await;
        assert_eq!(pacing.earliest(&all), Some(Instant::now() + SECOND));
        // Two intervals, and most of a third.
        tokio::time::advance(SECOND * 49 / 10).await;
        assert_eq!(pacing.earliest(&some), None);
        pacing.published();
        let next = Instant::now() + SECOND;
        assert_eq!(pacing.earliest(&some), Some(next), "one may be down");
        assert_eq!(pacing.earliest(&all), None);
        pacing.published();
        let next = Instant::now() + 5 * SECOND;
        assert_eq!(pacing.earliest(&some), Some(next), "no third one");
    }

    #[tokio::test(start_paused = true)]
    async fn new_peering_waits_for_its_gateway() {
        let mut pacing = Pacing::default();
        let mut waiting = |peers: &[&str]| {
            let records = peers.iter().map(|peer| ObjectRef::new(Kind::FabricRecord, "", peer));
            let mut records = records.collect();
            pacing.await_gateways(&mut records);
            let due = pacing.due().map(|due| due - Instant::now());
            (records.into_iter().map(|of| of.name).collect::<Vec<_>>().join(" "), due)
        };
        assert_eq!(waiting(&["milan"]), ("milan".to_owned(), Some(GATEWAY_WAIT)));
        tokio::time::advance(GATEWAY_WAIT / 2).await;
        let both = ("milan paris".to_owned(), Some(GATEWAY_WAIT / 2));
        assert_eq!(waiting(&["milan", "paris"]), both, "the first one goes on");
        tokio::time::advance(GATEWAY_WAIT / 2).await;
        let other = ("paris".to_owned(), Some(GATEWAY_WAIT / 2));
        assert_eq!(waiting(&["milan", "paris"]), other, "the gateway may never come");
        assert_eq!(waiting(&[]), (String::new(), None), "all are published");
    }
}
