//! Brings the kernel and the lane to what is wanted: on every new config, on every change of what
//! is ours by someone else, and every 30 s.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use netlink::Netns;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::desired::Desired;
use crate::engine::{Engine, Order};
use crate::input::Input;
use crate::lane::{LaneHandle, Offloads, PeerState};
use crate::monitor::View;
use crate::overlay::{Overlay, chain};

/// Time until everything is looked at again although nothing happened, and while something is
/// wrong.
const RESYNC: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(5);
/// Someone who changes back what we change gets slower and slower answers, up to [`RETRY`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// What the dataplane does now.
#[derive(Clone, Debug, Default)]
pub struct Plane {
    pub running: Option<Running>,
    /// What could not be done, one line each.
    pub problems: Vec<String>,
}

/// A dataplane that moves packets.
#[derive(Clone)]
pub struct Running {
    /// The config in force.
    pub desired: Arc<Desired>,
    pub lane: Arc<LaneHandle>,
    /// Where the probes are sent from.
    pub inner: Netns,
    /// Packets are let into the tunnel, not refused.
    pub open: bool,
    /// The tunnel's MTU in force, in bytes.
    pub mtu: u32,
    /// UDP port that the tunnel is reached at.
    pub port: Option<u16>,
}

/// What the dataplane goes by.
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub endpoint: watch::Receiver<Option<SocketAddr>>,
    pub views: watch::Receiver<View>,
}

/// Keeps kernel and lane on the latest of `sources` until `stop`, then takes them away.
pub async fn run(
    overlay: Overlay,
    offloads: Offloads,
    mut sources: Sources,
    planes: watch::Sender<Plane>,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut dataplane = Dataplane { overlay, engine: Engine::new(offloads), offloads };
    let mut pause = FIRST_PAUSE;
    loop {
        let seen = sources.take();
        let (plane, steps) = dataplane.pass(&seen).await;
        let again_at = Instant::now() + if plane.problems.is_empty() { RESYNC } else { RETRY };
        publish(&planes, plane);
        if steps == 0 {
            pause = FIRST_PAUSE;
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            changed = sources.changed(&seen) => { changed?; continue }
            () = session_changed(dataplane.engine.lane()) => continue,
            () = sleep_until(again_at) => continue,
            () = dataplane.overlay.changed() => {}
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            changed = sources.changed(&seen) => changed?,
            () = sleep(pause) => pause = (pause * 2).min(RETRY),
        }
    }
    publish(&planes, Plane::default());
    Ok(dataplane.overlay.remove().await?)
}

struct Dataplane {
    overlay: Overlay,
    engine: Engine,
    offloads: Offloads,
}

/// The sources as one pass saw them.
struct Seen {
    input: Input,
    endpoint: Option<SocketAddr>,
    connected: bool,
    retries: u64,
}

impl Dataplane {
    /// What is so after it, and how many steps it took.
    async fn pass(&mut self, seen: &Seen) -> (Plane, usize) {
        let Some(desired) = &seen.input.desired else { return (Plane::default(), 0) };
        // Where packets go now, which roaming may have changed.
        let session = self.engine.lane().map(|lane| *lane.changes().borrow());
        let peer = session.and_then(|peer| peer.endpoint).or(seen.endpoint);
        let applied = self.overlay.apply(desired, peer, seen.connected, self.offloads).await;
        let (mtu, steps, mut problems) = match applied {
            Ok(applied) => {
                if let Some(tun) = applied.new_tun {
                    self.engine.replace_tun(tun);
                }
                (applied.mtu, applied.steps.len(), applied.problems)
            }
            Err(error) => return (self.plane(0, false, vec![chain(&error)]), 0),
        };
        if let Some(key) = &seen.input.key {
            let order = Order {
                desired: desired.clone(),
                key: key.clone(),
                endpoint: seen.endpoint,
                mtu,
                retries: seen.retries,
            };
            problems.extend(self.engine.follow(order).err().map(|error| chain(&error)));
        }
        (self.plane(mtu, seen.connected, problems), steps)
    }

    fn plane(&self, mtu: u32, open: bool, problems: Vec<String>) -> Plane {
        let lane = self.engine.lane().zip(self.engine.order());
        let running = lane.map(|(lane, order)| Running {
            desired: order.desired.clone(),
            lane: lane.clone(),
            inner: self.overlay.inner().clone(),
            open,
            mtu,
            port: self.engine.port(),
        });
        Plane { running, problems }
    }
}

impl Sources {
    fn take(&mut self) -> Seen {
        let view = self.views.borrow_and_update();
        let (connected, retries) = (view.is_connected(), view.retries);
        drop(view);
        Seen {
            input: self.inputs.borrow_and_update().clone(),
            endpoint: *self.endpoint.borrow_and_update(),
            connected,
            retries,
        }
    }

    /// Returns when something is other than `seen`. A view changes with every probe; here only
    /// counts what packets go by.
    async fn changed(&mut self, seen: &Seen) -> Result<(), watch::error::RecvError> {
        let other =
            |view: &View| (view.is_connected(), view.retries) != (seen.connected, seen.retries);
        tokio::select! {
            changed = self.inputs.changed() => changed,
            changed = self.endpoint.changed() => changed,
            changed = self.views.wait_for(other) => changed.map(|_| ()),
        }
    }
}

/// Returns when the peer moved, or never without a lane.
async fn session_changed(lane: Option<&Arc<LaneHandle>>) {
    let Some(lane) = lane else { return std::future::pending().await };
    let mut changes = lane.changes();
    let endpoint = |peer: &PeerState| peer.endpoint;
    let before = endpoint(&changes.borrow_and_update());
    if changes.wait_for(|peer| endpoint(peer) != before).await.is_err() {
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

impl PartialEq for Plane {
    fn eq(&self, other: &Self) -> bool {
        let key = |plane: &Self| {
            plane
                .running
                .as_ref()
                .map(|r| (Arc::as_ptr(&r.desired), Arc::as_ptr(&r.lane), r.open, r.mtu, r.port))
        };
        key(self) == key(other) && self.problems == other.problems
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running")
            .field("generation", &self.desired.generation)
            .field("mtu", &self.mtu)
            .finish_non_exhaustive()
    }
}
