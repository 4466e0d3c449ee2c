//! Nodes that reach the gateway through the overlay, by their probes and the time.
//!
//! ```text
//!   (awaited) ---probe--> Reachable --overdue--> NoAnswer <--kernel answers or not--> NoAgent
//!       |                     ^  \--probe reports--> OneWay, CutOff
//!       +--overdue--> NoAnswer +------------------- probe ------------------+
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use fabric_api::fabric::{OverlayProbe, PathFault, UnreachableNode};
use jiff::Timestamp;

use crate::probe::NodeCount;

/// Time after a probe was due until the node's kernel is asked instead, and between two requests.
const TRACE_AFTER: Duration = Duration::from_millis(500);
const TRACE_INTERVAL: Duration = Duration::from_millis(500);
/// The same once the fault is known. A kernel answers what an unreachable route refuses once in two
/// seconds: each answer counts twice towards its one a second (`ip_error` and `icmp_ratelimit`), and
/// requests in between use up what the next one needs.
const TRACE_KNOWN: Duration = Duration::from_millis(2200);
/// Time after a probe was due until the node counts as unreachable.
const GRACE: Duration = Duration::from_millis(1100);
/// Age up to which an answer of the node's kernel counts: one may be lost.
const TRACED: Duration = Duration::from_millis(4700);
/// Time from the notice of a take-over until a node's first probe: together with [`GRACE`] less than 3 s.
const NOTIFIED: Duration = Duration::from_millis(1500);
/// Time from the start of a gateway, or of a node's place in its config, until the node's first probe: with many
/// gateways, agents probe each every ten seconds.
const FIRST: Duration = Duration::from_secs(15);
/// Time in which replies reach a node: probes that it has sent before go on as unanswered, those that waited
/// for a gateway which stood still among them.
const REPLY_TIME: Duration = Duration::from_millis(500);
/// A poll that is so late shows that this process stood still, and perhaps the nodes, too.
const STOOD_STILL: Duration = Duration::from_millis(400);
/// Longest interval that a probe may announce: that of an agent that is being replaced.
const MAX_NEXT: Duration = Duration::from_secs(120);

/// Faults with which packets of a node's pods pass all the same: an API server that does not answer takes nothing
/// from its agent, a published directory that is lost has it refuse all new connections.
pub const PASSABLE_IN_KUBERNETES: &[PathFault] = &[PathFault::NoAgent, PathFault::CutOff];
pub const PASSABLE_ON_HOSTS: &[PathFault] = &[PathFault::NoAgent];

/// Reachability of all nodes, as reported.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePaths {
    /// Number of nodes that have sent probes, or are to follow a take-over, or whose first one is overdue.
    pub probing: u32,
    /// Those whose path fails, by name.
    pub unreachable: Vec<UnreachableNode>,
}

impl Node {
    fn new(trace_at: Instant) -> Self {
        let (due, last) = (trace_at, Timestamp::UNIX_EPOCH);
        Self {
            is_awaited: false,
            unanswered: None,
            due,
            last,
            trace_at,
            is_asked: false,
            traced: None,
            fault: None,
        }
    }
}

impl NodePaths {
    /// Number of a cluster's `nodes` that reach the gateway, unless there are some and all of them do, with faults
    /// `passable` or none. `faulty` ones have a fault that no probe shows; one that becomes unreachable as well is
    /// among both until the controller has read that.
    pub fn count(&self, nodes: usize, faulty: u32, passable: &[PathFault]) -> Option<NodeCount> {
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let of = number(nodes.max(self.unreachable.len()));
        let is_passable = |node: &&UnreachableNode| passable.contains(&node.fault);
        let unreachable = self.unreachable.iter().filter(|node| !is_passable(node)).count();
        let unreachable = number(unreachable).saturating_add(faulty).min(of);
        (unreachable > 0 || of == 0).then(|| NodeCount { reachable: of - unreachable, of })
    }
}

/// Reachability of each node that has ever sent a probe, or is to.
#[derive(Debug, Default)]
pub struct Nodes {
    known: BTreeMap<String, Node>,
}

#[derive(Debug)]
struct Node {
    /// It has not sent any probe to this gateway; it may have no agent yet.
    is_awaited: bool,
    /// Time of the first of its probes that were sent while the ones before were unanswered.
    unanswered: Option<Instant>,
    /// Time at which the next probe is to arrive.
    due: Instant,
    /// Time at which the last one did.
    last: Timestamp,
    trace_at: Instant,
    /// Its kernel was asked since its last probe. An answer without that is a late one, of an earlier silence.
    is_asked: bool,
    /// Time of the last answer of the node's kernel.
    traced: Option<Instant>,
    fault: Option<(PathFault, Timestamp)>,
}

impl Nodes {
    /// Forgets nodes that are not in the config any more.
    pub fn retain(&mut self, names: &BTreeSet<&str>) {
        self.known.retain(|name, _| names.contains(name.as_str()));
    }

    /// Takes over what an earlier gateway reported.
    pub fn restore(&mut self, earlier: &UnreachableNode, now: Instant) {
        let Ok(since) = earlier.since.parse() else { return };
        let fault = Some((earlier.fault, since));
        let node = Node { due: now, last: since, fault, ..Node::new(now) };
        self.known.entry(earlier.node.clone()).or_insert(node);
    }

    /// Expects a probe of a node that probed the gateway's predecessor, and was notified.
    pub fn expect(&mut self, node: &str, now: Instant, wall: Timestamp) {
        let due = now + NOTIFIED;
        let trace_at = due + TRACE_AFTER;
        let expected = Node { due, last: wall, ..Node::new(trace_at) };
        self.known.entry(node.to_owned()).or_insert(expected);
    }

    /// Expects the first probe of a node in the config of a gateway that has started.
    pub fn expect_first(&mut self, node: &str, now: Instant, wall: Timestamp) {
        if !self.known.contains_key(node) {
            let due = now + FIRST;
            let new = Node::new(due + TRACE_AFTER);
            self.known.insert(node.to_owned(), Node { is_awaited: true, due, last: wall, ..new });
        }
    }

    pub fn handle_probe(&mut self, probe: &OverlayProbe, now: Instant, wall: Timestamp) {
        let before = self.known.get(&probe.node).and_then(|node| node.unanswered);
        let unanswered = probe.unanswered.then(|| before.unwrap_or(now));
        let is_one_way = unanswered.is_some_and(|first| now >= first + REPLY_TIME);
        let fault = match (is_one_way, probe.cut_off) {
            (true, _) => Some(PathFault::OneWay),
            (false, true) => Some(PathFault::CutOff),
            (false, false) => None,
        };
        let due = now + Duration::from_millis(probe.next_ms.into()).min(MAX_NEXT);
        let trace_at = due + TRACE_AFTER;
        let before = self.known.get(&probe.node).and_then(|node| node.fault);
        let since = before.filter(|(of, _)| Some(*of) == fault).map_or(wall, |(_, since)| since);
        let fault = fault.map(|fault| (fault, since));
        let node = Node { unanswered, due, last: wall, fault, ..Node::new(trace_at) };
        self.known.insert(probe.node.clone(), node);
    }

    /// The node's kernel has answered over VXLAN.
    pub fn handle_trace(&mut self, node: &str, now: Instant) {
        if let Some(node) = self.known.get_mut(node).filter(|node| node.is_asked) {
            node.traced = Some(now);
        }
    }

    /// Takes in that it is now, `late` after [`Self::deadline`]; returns the nodes whose kernel is
    /// to be asked.
    pub fn poll(&mut self, now: Instant, late: Duration) -> Vec<String> {
        let stood_still = late >= STOOD_STILL;
        let mut asked = Vec::new();
        for (name, node) in &mut self.known {
            if stood_still && node.due + GRACE > now - late {
                node.due = node.due.max(now);
            }
            if now >= node.trace_at {
                let is_known = node.fault.is_some();
                node.trace_at = now + if is_known { TRACE_KNOWN } else { TRACE_INTERVAL };
                node.is_asked = true;
                asked.push(name.clone());
            }
            if now >= node.due + GRACE {
                let traced = node.traced.is_some_and(|at| now - at < TRACED);
                let fault = if traced { PathFault::NoAgent } else { PathFault::NoAnswer };
                node.fault = Some((fault, node.last));
            }
        }
        asked
    }

    /// Deadline of the next [`Self::poll`].
    pub fn deadline(&self) -> Option<Instant> {
        let of = |node: &Node| match node.fault {
            Some((PathFault::NoAnswer, _)) => node.trace_at,
            Some((PathFault::NoAgent, _)) => {
                node.trace_at.min(node.traced.map_or(node.trace_at, |at| at + TRACED))
            }
            // The last ones are found by others than a gateway.
            Some((
                PathFault::OneWay
                | PathFault::CutOff
                | PathFault::GatewayCutOff
                | PathFault::NotStarted
                | PathFault::NotForwarding
                | PathFault::PodCidrOverlap
                | PathFault::PodCidrOutside
                | PathFault::Diverted
                | PathFault::Lossy
                | PathFault::Cramped
                | PathFault::Undone,
                _,
            ))
            | None => node.trace_at.min(node.due + GRACE),
        };
        self.known.values().map(of).min()
    }

    pub fn paths(&self) -> NodePaths {
        let faults = self.known.iter().filter_map(|(name, node)| {
            let (fault, since) = node.fault?;
            let (node, since) = (name.clone(), format!("{since:.3}"));
            Some(UnreachableNode { node, fault, detail: None, since })
        });
        let probing = self.known.values().filter(|node| !node.is_awaited || node.fault.is_some());
        NodePaths {
            probing: u32::try_from(probing.count()).unwrap_or(u32::MAX),
            unreachable: faults.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn node_that_does_not_follow_a_take_over_is_named() {
        let (mut nodes, start, wall) = (Nodes::default(), Instant::now(), Timestamp::now());
        nodes.expect("n1", start, wall);
        nodes.expect("n2", start, wall);
        assert_eq!(nodes.paths(), NodePaths { probing: 2, unreachable: Vec::new() });
        let probe = |unanswered| OverlayProbe {
            node: "n1".to_owned(),
            next_ms: 5000,
            unanswered,
            ..OverlayProbe::default()
        };
        nodes.handle_probe(&probe(true), start + SECOND, wall);
        nodes.poll(start + SECOND * 3, Duration::ZERO);
        let unreachable = nodes.paths().unreachable;
        assert_eq!(unreachable.len(), 1, "{unreachable:?}");
        assert_eq!((&*unreachable[0].node, unreachable[0].fault), ("n2", PathFault::NoAnswer));
    }

    #[test]
    fn node_with_two_faults_adds_none_to_the_nodes() {
        let unreachable = |name: &str| UnreachableNode {
            node: name.to_owned(),
            fault: PathFault::NoAnswer,
            detail: None,
            since: String::new(),
        };
        let count = |names: &[&str], nodes, faulty| {
            let unreachable = names.iter().map(|name| unreachable(name)).collect();
            let count =
                NodePaths { probing: 2, unreachable }.count(nodes, faulty, PASSABLE_ON_HOSTS);
            count.map(|count| (count.reachable, count.of))
        };
        assert_eq!(count(&["n1", "n2"], 2, 1), Some((0, 2)));
        assert_eq!(count(&["n1"], 2, 1), Some((0, 2)));
        assert_eq!(count(&["n1"], 3, 0), Some((2, 3)));
        assert_eq!(count(&[], 2, 0), None);
        assert_eq!(count(&[], 0, 0), Some((0, 0)));
        let mut unreachable = vec![unreachable("n1"), unreachable("n2")];
        for (fault, on_hosts, in_kubernetes) in
            [(PathFault::NoAgent, 1, 1), (PathFault::CutOff, 0, 1)]
        {
            unreachable[0].fault = fault;
            let paths = NodePaths { probing: 2, unreachable: unreachable.clone() };
            let count = |passable| paths.count(2, 0, passable).map(|count| count.reachable);
            assert_eq!(count(PASSABLE_ON_HOSTS), Some(on_hosts), "{fault:?}");
            assert_eq!(count(PASSABLE_IN_KUBERNETES), Some(in_kubernetes), "{fault:?}");
        }
    }

    /// A clock, and the nodes as of it.
    struct World {
        start: Instant,
        now: Instant,
        nodes: Nodes,
        kernel: Kernel,
    }

    /// The limit of a kernel's errors to one destination: `ip_error` takes a second's worth of
    /// tokens, `icmp_send` another.
    struct Kernel {
        tokens: Duration,
        refilled: Instant,
    }

    impl Kernel {
        fn answers(&mut self, now: Instant) -> bool {
            self.tokens = (self.tokens + (now - self.refilled)).min(5 * SECOND);
            self.refilled = now;
            (0..2).all(|_| match self.tokens.checked_sub(SECOND) {
                Some(rest) => {
                    self.tokens = rest;
                    true
                }
                None => false,
            })
        }
    }

    impl World {
        fn new() -> Self {
            let start = Instant::now();
            let kernel = Kernel { tokens: 5 * SECOND, refilled: start };
            Self { start, now: start, nodes: Nodes::default(), kernel }
        }

        fn wall(&self) -> Timestamp {
            Timestamp::UNIX_EPOCH + (self.now - self.start)
        }

        fn probe(&mut self, change: impl FnOnce(&mut OverlayProbe)) {
            let mut probe =
                OverlayProbe { node: "n2".to_owned(), next_ms: 1000, ..OverlayProbe::default() };
            change(&mut probe);
            self.nodes.handle_probe(&probe, self.now, self.wall());
        }

        /// Lets time pass; a kernel that lives answers as many requests as its limit allows.
        fn pass(&mut self, time: Duration, kernel_lives: bool) {
            let end = self.now + time;
            while let Some(at) = self.nodes.deadline().filter(|at| *at <= end) {
                self.now = self.now.max(at);
                for node in self.nodes.poll(self.now, Duration::ZERO) {
                    if kernel_lives && self.kernel.answers(self.now) {
                        self.nodes.handle_trace(&node, self.now);
                    }
                }
            }
            self.now = end;
        }

        fn fault(&self) -> Option<PathFault> {
            self.nodes.paths().unreachable.first().map(|node| node.fault)
        }
    }

    #[test]
    fn node_without_probes_is_named_within_three_seconds() {
        for (kernel_lives, expected) in [(false, PathFault::NoAnswer), (true, PathFault::NoAgent)] {
            let mut world = World::new();
            world.probe(|_| {});
            world.pass(2 * SECOND, kernel_lives);
            assert_eq!(world.fault(), None, "one late probe is no fault");
            world.pass(Duration::from_millis(200), kernel_lives);
            assert_eq!(world.fault(), Some(expected));
            let since = &world.nodes.paths().unreachable[0].since;
            assert_eq!(since, "1970-01-01T00:00:00.000Z", "the time of the last probe");
            world.probe(|_| {});
            assert_eq!(world.nodes.paths(), NodePaths { probing: 1, unreachable: Vec::new() });
        }
    }

    #[test]
    fn time_alone_changes_no_report() {
        let mut world = World::new();
        world.probe(|_| {});
        world.pass(3 * SECOND, false);
        let first = world.nodes.paths();
        world.pass(300 * SECOND, false);
        assert_eq!(world.nodes.paths(), first);
    }

    #[test]
    fn kernel_that_stops_answering_changes_the_fault() {
        let mut world = World::new();
        world.probe(|_| {});
        world.pass(10 * SECOND, true);
        assert_eq!(world.fault(), Some(PathFault::NoAgent));
        world.pass(2300 * SECOND / 1000, false);
        assert_eq!(world.fault(), Some(PathFault::NoAgent), "one answer may be lost");
        world.pass(2500 * SECOND / 1000, false);
        assert_eq!(world.fault(), Some(PathFault::NoAnswer));
    }

    #[test]
    fn dead_agent_is_cause_while_kernel_answers() {
        let mut world = World::new();
        world.probe(|_| {});
        world.pass(3 * SECOND, true);
        for tenth in 0..600 {
            world.pass(SECOND / 10, true);
            assert_eq!(world.fault(), Some(PathFault::NoAgent), "{tenth} tenths later");
        }
    }

    #[test]
    fn late_answer_of_earlier_silence_is_ignored() {
        let mut world = World::new();
        world.probe(|_| {});
        world.pass(2 * SECOND, false);
        world.probe(|_| {});
        world.nodes.handle_trace("n2", world.now);
        world.pass(3 * SECOND, false);
        assert_eq!(world.fault(), Some(PathFault::NoAnswer));
    }

    #[test]
    fn announced_pause_is_no_fault() {
        let mut world = World::new();
        world.probe(|probe| probe.next_ms = 60_000);
        world.pass(60 * SECOND, true);
        assert_eq!(world.fault(), None);
        world.pass(2 * SECOND, true);
        assert_eq!(world.fault(), Some(PathFault::NoAgent));
    }

    #[test]
    fn fault_named_in_a_probe_keeps_its_time() {
        let mut world = World::new();
        world.probe(|_| {});
        world.probe(|probe| probe.unanswered = true);
        assert_eq!(world.fault(), None, "it may have waited for this gateway, which stood still");
        world.pass(REPLY_TIME, false);
        world.probe(|probe| probe.unanswered = true);
        assert_eq!(world.fault(), Some(PathFault::OneWay));
        let first = world.nodes.paths();
        world.pass(SECOND, false);
        world.probe(|probe| probe.unanswered = true);
        assert_eq!(world.nodes.paths(), first);
        world.probe(|probe| probe.cut_off = true);
        assert_eq!(world.fault(), Some(PathFault::CutOff));
        world.probe(|_| {});
        assert_eq!(world.fault(), None);
    }

    #[test]
    fn first_probe_shows_no_fault_of_this_gateway() {
        let mut world = World::new();
        world.probe(|probe| probe.unanswered = true);
        assert_eq!(world.fault(), None, "its first probe here");
        world.pass(REPLY_TIME, false);
        world.probe(|probe| probe.unanswered = true);
        assert_eq!(world.fault(), Some(PathFault::OneWay), "that was answered");
    }

    #[test]
    fn gateway_that_stood_still_gives_nodes_time() {
        let mut world = World::new();
        world.probe(|_| {});
        world.now += 20 * SECOND;
        let late = world.now - world.nodes.deadline().unwrap();
        world.nodes.poll(world.now, late);
        assert_eq!(world.fault(), None);
        world.pass(Duration::from_millis(1300), false);
        assert_eq!(world.fault(), Some(PathFault::NoAnswer), "but not for ever");
    }

    #[test]
    fn node_that_never_probed_is_not_counted() {
        let mut world = World::new();
        world.nodes.retain(&["n1", "n2"].into());
        world.pass(60 * SECOND, false);
        assert_eq!(world.nodes.paths(), NodePaths::default());
        world.probe(|_| {});
        world.nodes.retain(&["n1"].into());
        assert_eq!(world.nodes.paths(), NodePaths::default(), "nor one that left the config");
    }

    #[test]
    fn node_whose_first_probe_stays_away_is_named() {
        let mut world = World::new();
        for node in ["n1", "n2"] {
            world.nodes.expect_first(node, world.now, world.wall());
        }
        world.pass(FIRST, false);
        assert_eq!(world.nodes.paths(), NodePaths::default(), "neither has an agent perhaps");
        world.probe(|probe| probe.next_ms = 10_000);
        world.nodes.expect_first("n2", world.now, world.wall());
        world.pass(2 * SECOND, false);
        let paths = world.nodes.paths();
        assert_eq!((paths.probing, paths.unreachable.len()), (2, 1), "{paths:?}");
        let missing = &paths.unreachable[0];
        assert_eq!((&*missing.node, missing.fault), ("n1", PathFault::NoAnswer));
        assert_eq!(missing.since, "1970-01-01T00:00:00.000Z", "the start of the gateway");
    }

    #[test]
    fn restored_fault_lasts_until_a_probe_arrives() {
        let mut world = World::new();
        let earlier = UnreachableNode {
            node: "n2".to_owned(),
            fault: PathFault::NoAnswer,
            detail: None,
            since: "1969-12-31T23:59:00.000Z".to_owned(),
        };
        world.nodes.restore(&earlier, world.now);
        world.pass(5 * SECOND, false);
        assert_eq!(world.nodes.paths().unreachable, [earlier]);
        world.probe(|_| {});
        assert_eq!(world.fault(), None);
    }
}
