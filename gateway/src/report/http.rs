//! `/metrics`, `/healthz` and `/readyz`, on a Unix socket or a TCP port.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use fabric_runtime::{HttpListener, OPENMETRICS};
use gateway_config::input::Input;
use gateway_dataplane::overlay::tun_overflows;
use reachability::nodes::NodePaths;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::replicas::Standing;
use crate::replicas::election::Role;
use crate::report::metrics::{Metrics, NodeCounts, Scrape};
use crate::state::Plane;
use crate::state::View;

/// Looks at the lane in one liveness probe: 0.6 s, less than the second that Kubernetes waits.
const HEARTBEAT_STEPS: u32 = 60;
/// Least time between two probes that both find the lane hung.
const HUNG_AFTER: Duration = Duration::from_secs(5);

/// Inputs of the answers.
#[derive(Clone)]
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub planes: watch::Receiver<Plane>,
    pub views: watch::Receiver<View>,
    /// Absent until nodes' probes are answered.
    pub paths: watch::Receiver<Option<NodePaths>>,
    pub standings: watch::Receiver<Standing>,
}

struct Shared {
    sources: Sources,
    metrics: Metrics,
    probes: Mutex<Probes>,
}

/// State of the probes between two requests.
#[derive(Debug, Default)]
struct Probes {
    /// Since when the lane has not turned, as of the last liveness probe.
    hung_since: Option<Instant>,
    /// The gateway was ready once.
    was_ready: bool,
}

/// Serves until `stop`.
pub async fn run(
    listener: HttpListener,
    sources: Sources,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let shared = Arc::new(Shared { sources, metrics: Metrics::new(), probes: Mutex::default() });
    let router = Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .with_state(shared);
    listener.serve(router, stop.cancelled_owned()).await.context("cannot serve HTTP")
}

async fn scrape(State(shared): State<Arc<Shared>>) -> Response {
    match shared.metrics.render(shared.sources.scrape()) {
        Ok(text) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => {
            tracing::warn!(%error, "cannot write the metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Answers the liveness probe: the lane has to turn, if there is one. It is called hung when two
/// probes in a row found it so, [`HUNG_AFTER`] apart; a host that stood still is awake in both.
async fn alive(State(shared): State<Arc<Shared>>) -> Answer {
    let lane = shared.sources.planes.borrow().running.as_ref().map(|running| running.lane.clone());
    let asked_at = Instant::now();
    let turns = match lane {
        Some(lane) => lane.is_alive(HEARTBEAT_STEPS).await,
        None => true,
    };
    let mut probes = shared.probes.lock().unwrap_or_else(PoisonError::into_inner);
    let hung_since = (!turns).then(|| probes.hung_since.unwrap_or(asked_at));
    probes.hung_since = hung_since;
    match hung_since.map(|since| since.elapsed()).filter(|hung| *hung >= HUNG_AFTER) {
        Some(hung) => {
            let text = format!("the lane has not turned for {} s\n", hung.as_secs());
            (StatusCode::SERVICE_UNAVAILABLE, text.into())
        }
        None => (StatusCode::OK, "ok\n".into()),
    }
}

/// Answers the readiness probe. A gateway that was ready stays so when a later config cannot be
/// applied: without readiness its Service would cut off a tunnel that works.
async fn ready(State(shared): State<Arc<Shared>>) -> Answer {
    let missing = shared.sources.missing();
    let mut probes = shared.probes.lock().unwrap_or_else(PoisonError::into_inner);
    match missing {
        Some(Missing::NewestConfig) if probes.was_ready => {}
        Some(missing) => return (StatusCode::SERVICE_UNAVAILABLE, missing.text().into()),
        None => probes.was_ready = true,
    }
    (StatusCode::OK, "ready\n".into())
}

type Answer = (StatusCode, Cow<'static, str>);

/// Conditions that a gateway lacks to be ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    Store,
    Replicas,
    Dataplane,
    NewestConfig,
}

impl Missing {
    fn text(self) -> &'static str {
        match self {
            Self::Store => "the store has not been read yet\n",
            Self::Replicas => {
                "it is not known yet which replica has the tunnel, or nodes do not know this one yet\n"
            }
            Self::Dataplane => "the dataplane is not up\n",
            Self::NewestConfig => "the dataplane is not on the newest config yet\n",
        }
    }
}

impl Sources {
    /// A gateway without a config is ready, or a rollout would never end; one that only has a bad one is
    /// not, or a rollout would take the good one's place. One without a key has no lane, but everything
    /// that a lane needs, and so has a replica that stands by.
    fn missing(&self) -> Option<Missing> {
        let input = self.inputs.borrow();
        if !input.synced {
            return Some(Missing::Store);
        }
        let Some(desired) = &input.desired else {
            let is_bad = input.config.is_some() || input.unreadable.is_some();
            return is_bad.then_some(Missing::NewestConfig);
        };
        let (role, is_ready) = {
            let standing = self.standings.borrow();
            (standing.role, standing.is_ready)
        };
        if role == Role::Undecided || role == Role::Standby && !is_ready {
            return Some(Missing::Replicas);
        }
        let plane = self.planes.borrow();
        let lane = plane.running.as_ref().filter(|running| running.lane.is_running());
        let in_force = match &input.key {
            Some(_) if role == Role::Active => lane.map(|running| &running.desired),
            Some(_) | None => plane.applied.as_ref(),
        };
        match in_force {
            Some(in_force) if Arc::ptr_eq(in_force, desired) => None,
            Some(_) => Some(Missing::NewestConfig),
            None => Some(Missing::Dataplane),
        }
    }

    /// `None` of a replica that stands by: another one has the peer's metrics.
    fn scrape(&self) -> Option<Scrape> {
        if self.standings.borrow().role == Role::Standby {
            return None;
        }
        let desired = self.inputs.borrow().desired.clone()?;
        let running = self.planes.borrow().running.clone();
        let view = self.views.borrow().clone();
        let count = |paths: &NodePaths| NodeCounts {
            probing: paths.probing,
            unreachable: paths.unreachable.len(),
        };
        Some(Scrape {
            peer: desired.peer.clone(),
            connected: view.is_connected(),
            latency: view.latency,
            mtu: running.as_ref().map_or(0, |running| running.mtu),
            path_mtu: running.as_ref().and_then(|running| running.path_mtu),
            tun_overflows: running.as_ref().and_then(|running| tun_overflows(&running.inner)),
            processor_time: running.as_ref().and_then(|running| running.lane.processor_time()),
            probes: view.probes,
            faults: view.faults.iter().map(|of| of.fault.reason).collect(),
            paths: self.paths.borrow().as_ref().map(count),
            stats: running.map(|running| running.lane.snapshot()),
        })
    }
}
