//! One per cluster: which prefixes and addresses are taken.

mod addresses;
mod claims;
mod clients;
mod config;
mod ledger;
mod listen;
mod metrics;
mod pools;
mod reconciler;
mod service;
mod shared;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use fabric_runtime::{Heartbeat, Monitoring, Readiness, Stop};
use fabric_store::Store;
use ipam_proto::ipam_server::IpamServer;
use tokio::sync::watch;
use tokio::time::sleep;
use tonic::transport::Server;

use clients::Clients;
use config::Args;
use ledger::Ledger;
use listen::Listener;
use pools::Pools;
use reconciler::{Reconciler, STORE};
use service::Service;
use shared::Shared;

/// Time for which calls under way (a health watch may last for ever) can delay the end.
const DRAIN: Duration = Duration::from_secs(2);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    args.log.start();
    match run(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("ipam stopped: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Beats while grants can be answered.
async fn beat(heartbeat: Heartbeat, shared: Shared) {
    loop {
        shared.wait_until_free().await;
        heartbeat.beat();
        sleep(Heartbeat::INTERVAL).await;
    }
}

async fn run(args: Args) -> anyhow::Result<()> {
    let mut signal = Stop::listen().context("cannot listen for signals")?;
    let pools = Pools::new(args.pools).context("bad --pools")?;
    let store = Store::open(&args.store).context("cannot open the store")?;
    let (stop, stopped) = watch::channel(false);
    let (health, health_service) = tonic_health::server::health_reporter();
    let shared = Shared::new(store.clone(), Ledger::new(pools, args.sync_grace_period));
    let clients = Clients::new(store.clone(), args.require_token);
    let (readiness, heartbeat) = (Readiness::default(), Heartbeat::default());
    readiness.missing(STORE, "not read yet");
    if let Some(address) = args.http {
        let registry = shared.metrics.registry(store.metrics());
        let (readiness, heartbeats) = (readiness.clone(), vec![heartbeat.clone()]);
        let monitoring = Monitoring { registry, heartbeats, readiness };
        monitoring.serve(address).context("cannot serve metrics and probes")?;
    }
    let listener = Listener::bind(&args.listen)
        .await
        .with_context(|| format!("cannot listen on {}", args.listen))?;
    tokio::spawn(beat(heartbeat, shared.clone()));

    let router = Server::builder()
        .add_service(health_service)
        .add_service(IpamServer::new(Service { shared: shared.clone(), clients }));
    let mut stop_serving = stopped.clone();
    let mut server = tokio::spawn(listener.serve(router, async move {
        let _ = stop_serving.wait_for(|stop| *stop).await;
    }));
    let reconciler = Reconciler {
        store,
        shared,
        health,
        readiness,
        interval: args.sync_interval,
        known: Vec::new(),
    };
    let reconciler = tokio::spawn(reconciler.run(stopped));
    tracing::info!(listen = %args.listen, "ipam is up");

    tokio::select! {
        () = signal.requested() => {}
        ended = &mut server => ended.context("the server panicked")?.context("cannot serve")?,
    }
    stop.send_replace(true);
    let drained = tokio::time::timeout(DRAIN, async { tokio::join!(server, reconciler) }).await;
    tracing::info!(drained = drained.is_ok(), "ipam is down");
    Ok(())
}
