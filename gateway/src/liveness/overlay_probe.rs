//! Answers the probes that nodes send through the overlay, and watches whether they arrive.
//!
//! A node whose probes stay away is sent one datagram to its external address. No device has that,
//! so a kernel that still has our routes answers with an ICMP error: then only its agent is gone.
//!
//! A replica that has taken the tunnel over notifies the nodes at the port that their probes come from: an API
//! server that does not answer, or a controller on the node that is lost, would leave them with the one before.

mod socket;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_api::Cidr;
use fabric_api::fabric::{OVERLAY_PROBE_PORT, OverlayProbe};
use gateway_config::desired::{Desired, Node};
use gateway_config::input::Input;
use jiff::Timestamp;
use reachability::nodes::{NodePaths, Nodes};
use reachability::notices::Notices;
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::replicas::Standing;
use crate::state::{Plane, Running};
use socket::Responder;

/// Time without a report of a change after which replies to nodes name this gateway as cut off.
const CUT_OFF: Duration = Duration::from_secs(1);
/// Time until a socket that could not be opened is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Datagrams read before the time counts: a gateway that had to wait for a processor finds the
/// probes when it has one.
const LATE_DATAGRAMS: usize = 1024;
/// Most datagrams answered between two looks at all nodes.
const BATCH: usize = 64;
/// Between two looks for answers of kernels while any is awaited.
const TRACE_LOOK: Duration = Duration::from_millis(100);

/// Config that decides on whom to answer.
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub planes: watch::Receiver<Plane>,
    pub standings: watch::Receiver<Standing>,
    /// Time since which the store lacks a change of the connection.
    pub unreported: watch::Receiver<Option<tokio::time::Instant>>,
}

/// Keeps `paths` up to date until `stop`; there are none before probes are answered.
pub async fn run(
    mut sources: Sources,
    paths: watch::Sender<Option<NodePaths>>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let unreported = Some(sources.unreported.clone());
    let mut probing = Probing { unreported, ..Probing::default() };
    loop {
        let running = sources.planes.borrow_and_update().running.clone();
        let standing = sources.standings.borrow_and_update().clone();
        // One that stood by does not know what its predecessor has reported of late.
        let is_first = standing.predecessor.is_none();
        let is_new = is_first && probing.current.is_none();
        let earlier = is_new.then(|| sources.inputs.borrow().clone());
        probing.follow(running.as_ref(), earlier.as_ref());
        probing.notify(&standing);
        if is_first && standing.has_tunnel() {
            probing.await_nodes();
        }
        if probing.current.as_ref().is_some_and(|current| current.responder.is_some()) {
            publish(&paths, probing.nodes.paths());
        }
        let due = probing.deadline();
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            changed = sources.planes.changed() => changed?,
            changed = sources.standings.changed() => changed?,
            () = probing.handle_datagram() => {}
            () = sleep_until(due.into()) => probing.poll(due),
        }
    }
}

#[derive(Default)]
struct Probing {
    current: Option<Current>,
    nodes: Nodes,
    notices: Notices,
    /// The last config whose nodes were to send their first probe.
    awaited: Option<Arc<Desired>>,
    /// Time of the next look for answers of kernels.
    look_at: Option<Instant>,
    /// Room for a datagram, which an idle gateway does not clear each time that it wakes.
    buffer: Vec<u8>,
    unreported: Option<watch::Receiver<Option<tokio::time::Instant>>>,
}

/// The config in force, and the sockets for it.
struct Current {
    running: Running,
    responder: Option<Responder>,
}

impl Probing {
    fn follow(&mut self, running: Option<&Running>, earlier: Option<&Input>) {
        let Some(running) = running else {
            // Later there is nothing to be missed: another replica may have had the tunnel.
            *self = Self { unreported: self.unreported.take(), ..Self::default() };
            return;
        };
        let desired = &running.desired;
        let is_same = |c: &&mut Current| Arc::ptr_eq(&c.running.desired, desired);
        if let Some(current) = self.current.as_mut().filter(is_same) {
            current.running = running.clone();
            return;
        }
        self.nodes.retain(&desired.nodes.iter().map(|node| node.name.as_str()).collect());
        if let (None, Some(input)) = (&self.current, earlier) {
            self.restore(desired, input);
        }
        let same_place = |c: &Current| c.running.desired.overlay == desired.overlay;
        let before = self.current.take().filter(same_place);
        let responder = before.and_then(|current| current.responder);
        self.current = Some(Current { running: running.clone(), responder });
        self.open();
    }

    /// A gateway that starts anew has not seen the nodes that its predecessor missed.
    fn restore(&mut self, desired: &Desired, input: &Input) {
        let status = input.config.as_ref().and_then(|config| config.status.as_ref());
        let earlier = status.iter().flat_map(|status| &status.unreachable_nodes);
        let names: BTreeSet<_> = desired.nodes.iter().map(|node| &node.name).collect();
        for node in earlier.filter(|node| names.contains(&node.node)) {
            self.nodes.restore(node, Instant::now());
        }
    }

    /// Expects a first probe of all nodes in the config: one that failed while no gateway ran is in no report.
    fn await_nodes(&mut self) {
        let Some(Current { running, responder: Some(_) }) = &self.current else { return };
        let desired = &running.desired;
        if self.awaited.as_ref().is_some_and(|awaited| Arc::ptr_eq(awaited, desired)) {
            return;
        }
        let (now, wall) = (Instant::now(), Timestamp::now());
        for node in desired.nodes.iter().filter(|node| has_source(desired, node)) {
            self.nodes.expect_first(&node.name, now, wall);
        }
        self.awaited = Some(Arc::clone(desired));
    }

    fn open(&mut self) {
        let Some(current) = &mut self.current else { return };
        if current.responder.is_none() {
            let opened = Responder::open(&current.running.inner, current.running.desired.overlay);
            let warn = |error: &anyhow::Error| {
                tracing::warn!("cannot open the sockets for nodes' probes: {error:#}");
            };
            current.responder = opened.inspect_err(warn).ok();
        }
    }

    fn deadline(&self) -> Instant {
        let far = Instant::now() + Duration::from_secs(3600);
        let all = [self.nodes.deadline(), self.notices.deadline(), self.look_at];
        all.into_iter().flatten().min().unwrap_or(far)
    }

    /// Notifies all nodes of a take-over, or of one that was in vain, and expects their probes. While the predecessor
    /// carries packets, this replica is connected first.
    fn notify(&mut self, standing: &Standing) {
        let is_news = standing.predecessor.is_some() || standing.contest.turns > 0;
        let Some(active) = standing.active().filter(|_| is_news) else {
            return self.notices = Notices::default();
        };
        let Some(Current { running, responder: Some(_) }) = &self.current else { return };
        if running.open || standing.predecessor.is_none_or(|of| !of.is_alive) {
            let (now, wall) = (Instant::now(), Timestamp::now());
            let nodes = || running.desired.nodes.iter().map(|node| node.name.as_str());
            if self.notices.begin(active, nodes(), now) {
                let nodes = running.desired.nodes.iter();
                let probing = nodes.filter(|node| has_source(&running.desired, node));
                probing.for_each(|node| self.nodes.expect(&node.name, now, wall));
            }
        }
    }

    /// Answers the next probes. Can be cancelled without losing one.
    async fn handle_datagram(&mut self) {
        loop {
            let Some(current) = &mut self.current else { return std::future::pending().await };
            let Some(responder) = &current.responder else {
                sleep(RETRY).await;
                return self.open();
            };
            if let Err(error) = responder.readable().await {
                tracing::debug!(%error, "cannot receive nodes' probes");
                current.responder = None;
                return;
            }
            // A socket is called readable until it is found empty.
            if self.receive() {
                // Many nodes may probe at a time, and all of them are looked at after each batch.
                for _ in 1..BATCH {
                    if !self.receive() {
                        break;
                    }
                }
                return;
            }
        }
    }

    /// Answers a probe that is there already. Returns whether there was one.
    fn receive(&mut self) -> bool {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(OverlayProbe::MAX_DATAGRAM, 0);
        let responder = self.current.as_ref().and_then(|current| current.responder.as_ref());
        let received = responder.and_then(|responder| responder.received(&mut buffer));
        if let Some((from, length)) = received {
            self.answer(&buffer[..length], from);
        }
        self.buffer = buffer;
        received.is_some()
    }

    fn answer(&mut self, datagram: &[u8], from: SocketAddr) {
        let Some(Current { running, responder: Some(responder) }) = &self.current else { return };
        let Some(probe) = OverlayProbe::parse(datagram).filter(|probe| !probe.reply) else {
            return tracing::debug!(%from, "not a probe of a node");
        };
        // Others cannot make a node seem alive, or fill the table.
        let is_sender = |node: &Node| node.name == probe.node && has_address(node, from.ip());
        if !running.desired.nodes.iter().any(is_sender) {
            return tracing::debug!(%from, node = probe.node, "a probe that is not the node's");
        }
        self.nodes.handle_probe(&probe, Instant::now(), Timestamp::now());
        self.notices.forget(&probe.node);
        let unreported = self.unreported.as_ref().and_then(|unreported| *unreported.borrow());
        let cut_off = unreported.is_some_and(|since| since.elapsed() >= CUT_OFF);
        let reply = OverlayProbe { reply: true, in_size: true, cut_off, ..probe };
        responder.send(&reply.encode_in(datagram.len()), from);
    }

    /// Datagrams that have arrived count before the time does.
    fn poll(&mut self, due: Instant) {
        let late = due.elapsed();
        for _ in 0..LATE_DATAGRAMS {
            if !self.receive() {
                break;
            }
        }
        let Some(Current { running, responder: Some(responder) }) = &self.current else { return };
        let now = Instant::now();
        let desired = &running.desired;
        let external = |name: &str| {
            let node = desired.nodes.iter().find(|node| node.name == name);
            node.and_then(|node| external_address(desired, node))
        };
        for notice in self.notices.poll(now) {
            if let Some(external) = external(&notice.node) {
                responder.send(&notice.encode(), (external, OVERLAY_PROBE_PORT).into());
            }
        }
        self.look_at = None;
        // Late answers of an earlier silence are taken off the sockets before a node is asked again.
        for at in responder.traced() {
            let node = desired.nodes.iter().find(|node| has_address(node, at));
            node.into_iter().for_each(|node| self.nodes.handle_trace(&node.name, now));
        }
        for name in self.nodes.poll(now, late) {
            if let Some(external) = external(&name) {
                responder.trace(external);
                self.look_at = Some(now + TRACE_LOOK);
            }
        }
    }
}

fn has_address(node: &Node, address: IpAddr) -> bool {
    node.prefixes.iter().any(|prefix| prefix.contains(address))
}

/// Address of the node that no device has.
fn external_address(desired: &Desired, node: &Node) -> Option<IpAddr> {
    external_addresses(desired, node).next()
}

/// True for a node that surely has an address to probe from: the one that others reach it at, if it is of the
/// family of its external address. Another may have one on some device, and counts from its first probe on.
fn has_source(desired: &Desired, node: &Node) -> bool {
    external_addresses(desired, node).any(|address| address.is_ipv4() == node.underlay.is_ipv4())
}

/// Addresses of the node within the cluster's external CIDRs.
fn external_addresses<'a>(
    desired: &'a Desired,
    node: &'a Node,
) -> impl Iterator<Item = IpAddr> + 'a {
    let is_external =
        |address: &IpAddr| desired.external_cidrs.iter().any(|all| all.contains(*address));
    let hosts = node.prefixes.iter().filter(|prefix| **prefix == Cidr::host(prefix.address()));
    hosts.map(Cidr::address).filter(is_external)
}

fn publish(paths: &watch::Sender<Option<NodePaths>>, now: NodePaths) {
    paths.send_if_modified(|before| {
        let changed = before.as_ref() != Some(&now);
        log_changes(&before.take().unwrap_or_default(), &now);
        *before = Some(now);
        changed
    });
}

fn log_changes(before: &NodePaths, now: &NodePaths) {
    let is_in =
        |paths: &NodePaths, name: &str| paths.unreachable.iter().any(|node| node.node == name);
    for node in now.unreachable.iter().filter(|node| !before.unreachable.contains(node)) {
        tracing::warn!(node = node.node, fault = ?node.fault, since = node.since, "path to a node fails");
    }
    for node in before.unreachable.iter().filter(|node| !is_in(now, &node.node)) {
        tracing::info!(node = node.node, "path to the node works again");
    }
}
