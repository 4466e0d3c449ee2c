//! The gateway: reads its config, and runs one task for each thing that goes on.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use fabric_runtime::Stop;
use fabric_store::{Kind, ObjectRef, Store};
use gateway::args::{Args, Config};
use gateway::liveness::{monitor, overlay_probe};
use gateway::replicas::{self, Standing};
use gateway::report::{http, status};
use gateway::state::{Plane, View};
use gateway::{endpoint, reconcile};
use gateway_config::input::{self, Input};
use gateway_config::restart_cache::RestartCache;
use gateway_dataplane::overlay::{Overlay, host_end_name};
use reachability::nodes::{PASSABLE_IN_KUBERNETES, PASSABLE_ON_HOSTS};
use reachability::probe::Departure;
use tokio::runtime::Builder;
use tokio::signal::unix::{self, SignalKind};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

/// Time for the store to report whether the peering is still there.
const LOOKUP: Duration = Duration::from_millis(200);

fn main() -> ExitCode {
    map_large_buffers();
    let args = Args::parse();
    args.log.start();
    match run_to_end(args.into()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("gateway stopped: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Gives buffers of 32 KiB and more pages of their own, which are memory once they are written to: an
/// idle lane hardly uses its five of 64 KiB. Nothing is allocated on the packet path.
fn map_large_buffers() {
    #[cfg(target_env = "gnu")]
    #[allow(unsafe_code)]
    // SAFETY: sets a parameter of the allocator, before there is a second thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 10);
    }
}

fn run_to_end(config: Config) -> anyhow::Result<()> {
    if let Some(cipher) = config.cipher {
        cipher.force().context("--cipher")?;
    }
    // One thread for all of this: packets go through the lane's own.
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(run(config));
    // A name may still be looked up, and its resolver not answer.
    runtime.shutdown_background();
    outcome
}

/// Reason for the end of this gateway, as announced to the peer.
async fn reason(store: &Store, name: &ObjectRef, taken_down: &mut unix::Signal) -> Departure {
    if timeout(Duration::ZERO, taken_down.recv()).await.is_ok() {
        return Departure::TakenDown;
    }
    match timeout(LOOKUP, store.get(name)).await {
        Ok(Ok(None)) => Departure::Removed,
        Ok(Ok(Some(_)) | Err(_)) | Err(_) => Departure::Restarting,
    }
}

/// Returns when another replica is to have the tunnel in place of this one.
async fn left_out(mut standings: watch::Receiver<Standing>) -> Result<(), watch::error::RecvError> {
    standings.wait_for(Standing::must_give_way).await.map(drop)
}

/// Without it, all but one kind of start goes as well.
fn opened(dir: PathBuf) -> Option<RestartCache> {
    let keep = RestartCache::open(dir);
    keep.inspect_err(|error| tracing::warn!("nothing is kept for a restart: {error}")).ok()
}

async fn run(config: Config) -> anyhow::Result<()> {
    let mut signal = Stop::listen().context("cannot listen for signals")?;
    // `weft down` sends it before SIGTERM.
    let mut taken_down =
        unix::signal(SignalKind::user_defined1()).context("cannot listen for signals")?;
    let store = Store::open(&config.store).context("cannot open the store")?;
    let http = match &config.http {
        Some(address) => Some(address.bind().await?),
        None => None,
    };
    let keep = config.keep.and_then(opened);
    let name = ObjectRef::new(Kind::GatewayConfig, &config.namespace, &config.name);
    let host_end = config.standalone.then(|| host_end_name(&config.namespace, &config.name));
    let overlay = Overlay::new(host_end).await?;

    let (input_tx, inputs) = watch::channel(Input::default());
    let (endpoint_tx, endpoint) = watch::channel(None);
    let (lookup_tx, lookups) = watch::channel(None);
    let departure = Arc::new(OnceLock::new());
    let (plane_tx, planes) = watch::channel(Plane::default());
    let (view_tx, views) = watch::channel(View::start());
    let (paths_tx, paths) = watch::channel(None);
    let (unreported_tx, unreported) = watch::channel(None);
    let (standing_tx, mut standings) = watch::channel(Standing::default());
    let leaving = CancellationToken::new();

    let stop = CancellationToken::new();
    let mut tasks = JoinSet::new();
    let sources = input::Sources { store: store.clone(), keep: keep.clone() };
    tasks.spawn(input::run(sources, name.clone(), input_tx, stop.clone()));
    let found = (endpoint_tx, lookup_tx);
    let sources = (inputs.clone(), views.clone(), standings.clone());
    tasks.spawn(endpoint::run(sources, found, stop.clone()));
    let sources = replicas::Sources {
        inputs: inputs.clone(),
        planes: planes.clone(),
        views: views.clone(),
        leaving: leaving.clone(),
    };
    tasks.spawn(replicas::run(sources, standing_tx, stop.clone()));
    let sources = reconcile::Sources {
        inputs: inputs.clone(),
        endpoint,
        views: views.clone(),
        standings: standings.clone(),
    };
    tasks.spawn(reconcile::run(overlay, config.offloads, sources, plane_tx, stop.clone()));
    let sources = monitor::Sources {
        inputs: inputs.clone(),
        planes: planes.clone(),
        paths: paths.clone(),
        passable: if config.standalone { PASSABLE_ON_HOSTS } else { PASSABLE_IN_KUBERNETES },
        departure: departure.clone(),
        standings: standings.clone(),
    };
    tasks.spawn(monitor::run(sources, view_tx, stop.clone()));
    let sources = overlay_probe::Sources {
        inputs: inputs.clone(),
        planes: planes.clone(),
        standings: standings.clone(),
        unreported,
    };
    tasks.spawn(overlay_probe::run(sources, paths_tx, stop.clone()));
    if let Some(listener) = http {
        let (inputs, planes) = (inputs.clone(), planes.clone());
        let sources = http::Sources {
            inputs,
            planes,
            views: views.clone(),
            paths: paths.clone(),
            standings: standings.clone(),
        };
        tasks.spawn(http::run(listener, sources, stop.clone()));
    }
    let report = status::Report { store: store.clone(), keep, name: name.clone() };
    let standing = standings.clone();
    let handed = planes.clone();
    let sources = status::Sources { inputs, planes, views, lookups, paths, standings: standing };
    tasks.spawn(status::run(report, sources, unreported_tx, stop.clone()));

    let outcome = tokio::select! {
        () = signal.requested() => {
            let reason = reason(&store, &name, &mut taken_down).await;
            if reason == Departure::Restarting {
                replicas::hand_over(&leaving, &mut standings, &handed).await;
            }
            let _ = departure.set(reason);
            Ok(())
        }
        Ok(()) = left_out(standings.clone()) => {
            tracing::warn!("the config has left this replica out, as its node has no Node any more: another one takes over");
            replicas::hand_over(&leaving, &mut standings, &handed).await;
            let _ = departure.set(Departure::Restarting);
            Ok(())
        }
        Some(ended) = tasks.join_next() => ended.context("a task panicked").flatten(),
    };
    // Every task looks at `stop` first: that the channels between them close is no error then. One
    // that ends of its own accord has set it already.
    stop.cancel();
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended.context("a task panicked").flatten() {
            tracing::warn!("while stopping: {error:#}");
        }
    }
    outcome
}
