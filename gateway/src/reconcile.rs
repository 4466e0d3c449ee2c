//! Brings the kernel and the lane to what is wanted: on every new config, on every change of what
//! is ours by someone else, and every 30 s.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use fabric_api::fabric::MtuBound;
use fabric_runtime::chain;
use gateway_config::desired::Desired;
use gateway_config::input::Input;
use gateway_dataplane::engine::{Engine, Order};
use gateway_dataplane::overlay::{Filter, Overlay, Peer, TunnelMtu};
use gateway_dataplane::standby_relay::StandbyRelay;
use lane::{LaneHandle, Offloads};
use netlink::ChurnLimiter;
use netlink::nft::NftError;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::replicas::Standing;
use crate::state::{Plane, Running, View};

/// Time until everything is looked at again although nothing happened, and while something is
/// wrong.
const RESYNC: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(5);
/// Time for the monitor's last message.
const END_NOTICE_TIME: Duration = Duration::from_millis(200);

/// Inputs of the dataplane.
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub endpoint: watch::Receiver<Option<SocketAddr>>,
    pub views: watch::Receiver<View>,
    pub standings: watch::Receiver<Standing>,
}

/// Keeps kernel and lane on the latest of `sources` until `stop`, then takes them away.
pub async fn run(
    overlay: Overlay,
    offloads: Offloads,
    mut sources: Sources,
    planes: watch::Sender<Plane>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut dataplane = Dataplane {
        refusal: Filter::refusal(overlay.inner().clone())?,
        only_nodes: overlay.pod().cloned().map(Filter::only_nodes).transpose()?,
        overlay,
        engine: Engine::new(offloads),
        standby_relay: None,
        offloads,
        done: None,
        contests: 0,
    };
    let mut churn_limiter = ChurnLimiter::default();
    loop {
        let seen = sources.take();
        let peer_at = dataplane.peer_at();
        let (plane, steps) = dataplane.pass(&seen).await;
        let is_calm = plane.problems.is_empty() && plane.retiring.is_none();
        let again_at = Instant::now() + if is_calm { RESYNC } else { RETRY };
        publish(&planes, plane);
        if steps > 0 {
            churn_limiter.note();
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            changed = sources.changed(&seen) => { changed?; continue }
            () = moved(dataplane.engine.lane(), peer_at) => continue,
            () = sleep_until(again_at) => continue,
            () = dataplane.overlay.changed() => {}
            () = dataplane.refusal.changed() => {}
            () = changed(&mut dataplane.only_nodes) => {}
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            changed = sources.changed(&seen) => changed?,
            () = churn_limiter.throttle() => {}
        }
    }
    // The monitor announces the end through the tunnel, and then drops its views.
    let parted = async { while sources.views.changed().await.is_ok() {} };
    if timeout(END_NOTICE_TIME, parted).await.is_err() {
        tracing::debug!("the monitor is late, not waiting for its last probe");
    }
    publish(&planes, Plane::default());
    Ok(dataplane.overlay.remove().await?)
}

struct Dataplane {
    overlay: Overlay,
    refusal: Filter,
    /// Standalone only.
    only_nodes: Option<Filter>,
    engine: Engine,
    standby_relay: Option<StandbyRelay>,
    offloads: Offloads,
    done: Option<Done>,
    /// Turns of contests for the tunnel so far.
    contests: u64,
}

/// Result of the last pass that succeeded.
struct Done {
    desired: Arc<Desired>,
    mtu: TunnelMtu,
    source: Option<IpAddr>,
    /// Packets to the peer are not refused.
    open: bool,
}

/// The sources as one pass saw them.
struct Seen {
    input: Input,
    endpoint: Option<SocketAddr>,
    connected: bool,
    ports: u64,
    path_mtu: Option<u32>,
    standing: Standing,
}

impl Seen {
    /// Path MTU that probes have verified, if only those of the gateway before. What the kernel has learnt from
    /// errors, which may be forged, counts without one only (RFC 8899 section 4.6.2).
    fn path_mtu(&self) -> Option<u32> {
        self.path_mtu.or_else(|| self.remembered_path_mtu())
    }

    fn remembered_path_mtu(&self) -> Option<u32> {
        self.input.config.as_ref()?.status.as_ref()?.path_mtu
    }
}

impl Dataplane {
    /// Returns the endpoint in force, which roaming may have changed.
    fn peer_at(&self) -> Option<SocketAddr> {
        self.engine.lane().and_then(|lane| lane.changes().borrow().endpoint)
    }

    /// Returns the state after one pass, and how many steps it took.
    async fn pass(&mut self, seen: &Seen) -> (Plane, usize) {
        let Some(desired) = &seen.input.desired else { return (Plane::default(), 0) };
        match seen.standing.has_tunnel() {
            true => self.engine.end_retirement(),
            false => self.engine.retire(&seen.standing.others, Instant::now().into()),
        }
        self.relay_to(desired.listen_port.zip(seen.standing.active_other)).await;
        let address = self.peer_at().or(seen.endpoint);
        let peer = address.map(|address| Peer { address, path_mtu: seen.path_mtu() });
        let (refused, guarded, applied) = tokio::join!(
            self.refusal.ensure(!(seen.connected || self.engine.retiring().is_some())),
            ensure(&mut self.only_nodes),
            self.overlay.apply(desired, peer, self.offloads),
        );
        let (mtu, source, steps, mut problems) = match applied {
            Ok(applied) => {
                if let Some(tun) = applied.new_tun {
                    self.engine.replace_tun(tun);
                }
                (applied.mtu, applied.source, applied.steps.len(), applied.problems)
            }
            Err(error) => return (self.plane(seen, vec![chain(&error)]), 0),
        };
        self.done = Some(Done { desired: desired.clone(), mtu, source, open: seen.connected });
        problems.extend([refused, guarded].into_iter().filter_map(Result::err).map(|e| chain(&e)));
        if let Some(key) = seen.input.key.as_ref().filter(|_| seen.standing.has_tunnel()) {
            let predecessor = seen.standing.predecessor;
            let stamp = predecessor.map(|of| of.tunnel.stamp).unwrap_or_default();
            // Until the endpoint is edited.
            let follows = predecessor.filter(|of| of.peer() == seen.endpoint);
            let order = Order {
                desired: desired.clone(),
                key: key.clone(),
                endpoint: seen.endpoint,
                unproven: follows.and_then(|of| of.tunnel.unproven),
                port_before: seen.input.remembered.port,
                stamp_before: seen.input.remembered.stamp.max(stamp),
                has_predecessor: predecessor.is_some(),
                relay: predecessor.and_then(|of| of.relay()).map(|at| at.ip()),
                mtu: mtu.bytes,
                ports: seen.ports,
            };
            problems.extend(self.engine.follow(order).err().map(|error| chain(&error)));
        }
        let contests = std::mem::replace(&mut self.contests, seen.standing.contest.turns);
        if seen.standing.has_tunnel() && contests != self.contests {
            // The peer may have followed the other replica: the newest session is the one that it answers.
            self.engine.lane().into_iter().for_each(|lane| lane.initiate());
        }
        (self.plane(seen, problems), steps)
    }

    /// Keeps a relay to the active replica, while a retired lane has no need of the port.
    async fn relay_to(&mut self, active: Option<(u16, IpAddr)>) {
        let active = active.filter(|_| self.engine.retiring().is_none());
        let active = active.map(|(port, address)| SocketAddr::new(address, port));
        if self.standby_relay.as_ref().map(StandbyRelay::active) == active {
            return;
        }
        if let Some(relay) = self.standby_relay.take() {
            relay.close().await;
        }
        let opened = active.map(StandbyRelay::open).transpose();
        let warn = |error: &io::Error| tracing::warn!(%error, "no relay to the active replica");
        self.standby_relay = opened.inspect_err(warn).ok().flatten();
    }

    /// After a pass that failed, what the last good one did is still so.
    fn plane(&self, seen: &Seen, problems: Vec<String>) -> Plane {
        let mtu = self.done.as_ref().map(|done| done.mtu);
        let lane = self.engine.lane().zip(self.engine.order());
        let running = lane.map(|(lane, order)| Running {
            desired: order.desired.clone(),
            lane: lane.clone(),
            inner: self.overlay.inner().clone(),
            open: seen.connected && self.done.as_ref().is_some_and(|done| done.open),
            mtu: mtu.map_or(0, |mtu| mtu.bytes),
            mtu_bound: mtu.map_or(MtuBound::Spec, |mtu| mtu.bound),
            path_mtu: seen.path_mtu,
            remembered_path_mtu: seen.remembered_path_mtu(),
            way: mtu.and_then(|mtu| mtu.way),
            port: self.engine.port(),
            relay_port: self.engine.relay_port(),
            source: self.done.as_ref().and_then(|done| done.source),
            contested_at: seen.standing.contest.at,
            has_replicas: !seen.standing.others.is_empty(),
        });
        let applied = self.done.as_ref().map(|done| done.desired.clone());
        let retiring = self.engine.retiring().cloned();
        Plane { running, applied, problems, retiring }
    }
}

impl Sources {
    fn take(&mut self) -> Seen {
        let view = self.views.borrow_and_update();
        let (connected, ports, path_mtu) = (view.is_connected(), view.ports, view.path_mtu);
        drop(view);
        Seen {
            input: self.inputs.borrow_and_update().clone(),
            endpoint: *self.endpoint.borrow_and_update(),
            connected,
            ports,
            path_mtu,
            standing: self.standings.borrow_and_update().clone(),
        }
    }

    /// Returns when something is other than `seen`. A view changes with every probe; here only
    /// counts what packets go by.
    async fn changed(&mut self, seen: &Seen) -> Result<(), watch::error::RecvError> {
        let other = |view: &View| {
            (view.is_connected(), view.ports, view.path_mtu)
                != (seen.connected, seen.ports, seen.path_mtu)
        };
        let (tunnel, predecessor) = (seen.standing.has_tunnel(), seen.standing.predecessor);
        let active = seen.standing.active_other;
        let move_of_tunnel = |of: &Standing| {
            (of.has_tunnel(), of.predecessor, of.active_other) != (tunnel, predecessor, active)
        };
        tokio::select! {
            changed = self.inputs.changed() => changed,
            changed = self.endpoint.changed() => changed,
            changed = self.standings.wait_for(move_of_tunnel) => changed.map(|_| ()),
            changed = self.views.wait_for(other) => changed.map(|_| ()),
        }
    }
}

async fn ensure(filter: &mut Option<Filter>) -> Result<(), NftError> {
    let Some(filter) = filter else { return Ok(()) };
    filter.ensure(true).await
}

async fn changed(filter: &mut Option<Filter>) {
    let Some(filter) = filter else { return std::future::pending().await };
    filter.changed().await;
}

/// Returns when the peer is elsewhere than `before`, or never without a lane.
async fn moved(lane: Option<&Arc<LaneHandle>>, before: Option<SocketAddr>) {
    let Some(lane) = lane else { return std::future::pending().await };
    if lane.changes().wait_for(|peer| peer.endpoint != before).await.is_err() {
        // The lane has ended; the next pass finds out why.
        std::future::pending().await
    }
}

fn publish(planes: &watch::Sender<Plane>, plane: Plane) {
    planes.send_if_modified(|current| {
        for problem in plane.problems.iter().filter(|p| !current.problems.contains(p)) {
            tracing::warn!("{problem}");
        }
        let changed = *current != plane;
        *current = plane;
        changed
    });
}

#[cfg(test)]
mod tests {
    use fabric_api::fabric::GatewayConfigStatus;

    use super::*;
    use crate::test_config::config;

    #[test]
    fn gateway_starts_with_path_its_predecessor_verified() {
        let mut config = config();
        let path_mtu = Some(1400);
        config.status = Some(GatewayConfigStatus { path_mtu, ..GatewayConfigStatus::default() });
        let mut seen = Seen {
            input: Input { config: Some(Arc::new(config)), ..Input::default() },
            endpoint: None,
            connected: false,
            ports: 0,
            path_mtu: None,
            standing: Standing::default(),
        };
        assert_eq!(seen.path_mtu(), path_mtu);
        seen.path_mtu = Some(1300);
        assert_eq!(seen.path_mtu(), Some(1300));
        seen.input = Input::default();
        seen.path_mtu = None;
        assert_eq!(seen.path_mtu(), None);
    }
}
