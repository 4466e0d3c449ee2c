//! Times at which simulated programs had what was published, and acknowledged it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::time::sleep;

use crate::manifests::{Endpoint, Peer};

/// Between two looks; times are those of the events.
const PAUSE: Duration = Duration::from_millis(5);
const PROGRESS: Duration = Duration::from_secs(2);

/// Observations of all simulated programs. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Mutex<Times>>);

#[derive(Debug, Default)]
struct Times {
    /// First acknowledgement, and first one as connected, by peer and node.
    nodes: BTreeMap<String, BTreeMap<String, [Option<Instant>; 2]>>,
    /// First acknowledgement of anything, by node.
    agents: BTreeMap<String, Instant>,
    /// First acknowledgement of the peer's key, its prefixes and this many nodes, by peer.
    gateways: BTreeMap<Peer, BTreeMap<usize, Instant>>,
    /// Time when the gateway's pod was Ready, by peer.
    pods: BTreeMap<Peer, Instant>,
    endpoints: BTreeMap<(Peer, Endpoint), Instant>,
    /// Errors of simulated programs, and how often each occurred.
    errors: BTreeMap<String, u64>,
}

impl Board {
    /// Records what a node has acknowledged, each peering with whether it is connected.
    pub(crate) fn acknowledged(&self, node: &str, peerings: &BTreeMap<String, bool>, at: Instant) {
        let mut times = self.times();
        times.agents.entry(node.to_owned()).or_insert(at);
        for (peer, connected) in peerings {
            let of_peer = times.nodes.entry(peer.clone()).or_default();
            let [first, first_connected] = of_peer.entry(node.to_owned()).or_default();
            first.get_or_insert(at);
            if *connected {
                first_connected.get_or_insert(at);
            }
        }
    }

    pub(crate) fn gateway_acknowledged(&self, peer: Peer, nodes: usize, at: Instant) {
        self.times().gateways.entry(peer).or_default().entry(nodes).or_insert(at);
    }

    pub(crate) fn pod_ready(&self, peer: Peer, at: Instant) {
        self.times().pods.entry(peer).or_insert(at);
    }

    pub(crate) fn endpoint_seen(&self, peer: Peer, endpoint: Endpoint, at: Instant) {
        self.times().endpoints.entry((peer, endpoint)).or_insert(at);
    }

    /// Records an error of a program that goes on.
    pub(crate) fn failed(&self, program: &str, error: &anyhow::Error) {
        *self.times().errors.entry(format!("{program}: {error:#}")).or_default() += 1;
    }

    /// Records the error of a result, and returns its value.
    pub(crate) fn check<T>(&self, program: &str, result: Result<T>) -> Option<T> {
        result.map_err(|error| self.failed(program, &error)).ok()
    }

    /// Errors of simulated programs, the most frequent first.
    pub fn errors(&self) -> Vec<(String, u64)> {
        let mut errors: Vec<_> = self.times().errors.clone().into_iter().collect();
        errors.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        errors
    }

    /// Time at which the pod of the peering's gateway became Ready.
    pub fn pod_ready_at(&self, peer: Peer) -> Option<Instant> {
        self.times().pods.get(&peer).copied()
    }

    /// Waits until that many nodes have acknowledged anything at all.
    pub async fn all_started(&self, nodes: usize, at_most: Duration) -> Result<Instant> {
        let all: Vec<usize> = (0..nodes).collect();
        self.progress("nodes acknowledged their first config", &all, at_most, |times, node| {
            times.agents.values().nth(*node).copied()
        })
        .await
    }

    /// Waits until each of `nodes` nodes has acknowledged all peerings, and each gateway all nodes.
    /// Returns when the last one did. The error has the count of those that have.
    pub async fn all_acknowledged(
        &self,
        peers: &[Peer],
        nodes: usize,
        at_most: Duration,
    ) -> Result<Instant> {
        let what = "peerings acknowledged by every node and gateway";
        self.progress(what, peers, at_most, |times, peer| {
            let node = times.last_of_nodes(*peer, nodes, 0)?;
            let gateway = times.gateways.get(peer)?.get(&nodes)?;
            Some(node.max(*gateway))
        })
        .await
    }

    /// Waits as [`Self::all_acknowledged`] does, for nodes alone, until they have it connected.
    pub async fn all_connected(
        &self,
        peers: &[Peer],
        nodes: usize,
        at_most: Duration,
    ) -> Result<Instant> {
        let what = "peerings acknowledged as connected by every node";
        self.progress(what, peers, at_most, |times, peer| times.last_of_nodes(*peer, nodes, 1))
            .await
    }

    /// Waits until the gateway's object has this endpoint. Returns since when.
    pub async fn has_endpoint(
        &self,
        peer: Peer,
        endpoint: &Endpoint,
        at_most: Duration,
    ) -> Result<Instant> {
        let key = (peer, endpoint.clone());
        let what = "gateways have the new endpoint";
        self.progress(what, &[key], at_most, |times, key| times.endpoints.get(key).copied()).await
    }

    async fn progress<T>(
        &self,
        what: &str,
        all: &[T],
        at_most: Duration,
        done: impl Fn(&Times, &T) -> Option<Instant>,
    ) -> Result<Instant> {
        let start = Instant::now();
        let mut shown = start;
        loop {
            let (count, last) = {
                let times = self.times();
                let done: Vec<_> = all.iter().filter_map(|item| done(&times, item)).collect();
                (done.len(), done.into_iter().max())
            };
            if let (true, Some(last)) = (count == all.len(), last) {
                return Ok(last);
            }
            if start.elapsed() >= at_most {
                bail!("{count} of {} {what} after {:.0?}", all.len(), start.elapsed());
            }
            if shown.elapsed() >= PROGRESS {
                shown = Instant::now();
                eprintln!("  {:>3.0?}: {count} of {} {what}", start.elapsed(), all.len());
            }
            sleep(PAUSE).await;
        }
    }

    fn times(&self) -> MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Times {
    /// `None` unless that many nodes have; `stage` is 0 for acknowledged, 1 for connected.
    fn last_of_nodes(&self, peer: Peer, nodes: usize, stage: usize) -> Option<Instant> {
        let of_peer = self.nodes.get(&peer.to_string())?;
        let times: Vec<Instant> = of_peer.values().filter_map(|stages| stages[stage]).collect();
        if times.len() < nodes { None } else { times.into_iter().max() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn last_acknowledgement_of_all_nodes_counts() {
        let board = Board::default();
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        let peering = |connected| BTreeMap::from([(Peer(3).to_string(), connected)]);
        board.acknowledged("n1", &peering(false), later);
        board.acknowledged("n1", &peering(true), later + Duration::from_secs(1));
        board.gateway_acknowledged(Peer(3), 1, start);
        board.gateway_acknowledged(Peer(3), 2, start);
        let wait = |nodes| {
            let board = board.clone();
            async move { board.all_acknowledged(&[Peer(3)], nodes, Duration::ZERO).await }
        };
        let error = wait(2).await.unwrap_err().to_string();
        assert!(error.starts_with("0 of 1 peerings acknowledged"), "{error}");
        board.acknowledged("n2", &peering(false), start);
        assert_eq!(wait(2).await.unwrap(), later);
        let connected = board.all_connected(&[Peer(3)], 1, Duration::ZERO).await.unwrap();
        assert_eq!(connected, later + Duration::from_secs(1));
    }
}
