//! `fabric-controller`: see [`fabric_controller`].

mod config;

use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use fabric_controller::control::Controller;
use fabric_controller::grants::Ipam;
use fabric_controller::kinds::READ;
use fabric_controller::vitals::{COMPILED, Vitals, WEBHOOK};
use fabric_kube_client::findings::Reader;
use fabric_kube_client::lease::Election;
use fabric_migration::unserved;
use fabric_migration::withdrawal::{Prefixes, withdraw};
use fabric_runtime::Stop;
use fabric_store::{ApiServer, Store};
use fabric_webhook::{Webhook, WebhookArgs};
use gateway_workloads::report::report;
use gateway_workloads::{Kubernetes, keep_active_labels};
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;

use config::{Command, Config, WithdrawArgs};

/// Time between two checks of a replica that could not work in place of another one.
const RECHECK: Duration = Duration::from_secs(5);

fn main() -> anyhow::Result<()> {
    let config = Config::parse();
    config.log.start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the runtime")?.block_on(async {
        match &config.command {
            Some(Command::Withdraw(args)) => take_away(args).await,
            None => run(config).await,
        }
    })
}

async fn take_away(args: &WithdrawArgs) -> anyhow::Result<()> {
    let store = Store::open(&args.store).context("cannot open the store")?;
    let server =
        store.api_server().context("--kubernetes is missing; elsewhere, use `weft down`")?;
    let prefixes = if args.keep_prefixes { Prefixes::Kept } else { Prefixes::Returned };
    withdraw(server, args.patience, prefixes).await.context("not all of weft is taken away")
}

async fn run(config: Config) -> anyhow::Result<()> {
    let mut stop = Stop::listen().context("cannot listen for signals")?;
    let vitals = Vitals::default();
    let store = open(&config, &vitals)?;
    let ipam = Ipam::new(&config.ipam, config.ipam_token.clone())
        .context("cannot use the address of ipam")?;
    tracing::info!(ipam = %config.ipam, "running");
    match store.api_server() {
        Some(server) => {
            let vitals = vitals.of_kubernetes();
            serve(&config, &vitals)?;
            let (served, ends) = oneshot::channel::<()>();
            let webhook = serve_webhook(server.clone(), config.webhook, vitals.clone(), ends);
            let webhook = tokio::spawn(webhook);
            Replica { config, server, ipam, vitals }.run(&mut stop).await?;
            drop(served);
            webhook.await.context("the webhook panicked")?;
        }
        None => {
            let controller = controller(&config, store, ipam)?.reporting_to(vitals.clone());
            serve(&config, &vitals)?;
            vitals.metrics.set_elected(true);
            controller.run(stop.requested()).await;
        }
    }
    tracing::info!("stopped; what is published stays");
    Ok(())
}

fn open(config: &Config, vitals: &Vitals) -> anyhow::Result<Store> {
    let store = Store::open(&config.store).context("cannot open the store")?;
    Ok(store.counting(vitals.metrics.store()))
}

/// Serves metrics and probes from now on.
fn serve(config: &Config, vitals: &Vitals) -> anyhow::Result<()> {
    let Some(address) = config.http.clone() else { return Ok(()) };
    vitals.monitoring().serve(address).context("cannot serve metrics and probes")
}

fn controller(config: &Config, store: Store, ipam: Ipam) -> anyhow::Result<Controller> {
    let installation = store.api_server().map(|server| server.namespace);
    Controller::new(store, ipam, config.settings(installation)).context("cannot watch the store")
}

/// Serves in every replica. Without it only plain strings in place of lists are refused.
async fn serve_webhook(
    server: ApiServer,
    args: WebhookArgs,
    vitals: Vitals,
    ends: oneshot::Receiver<()>,
) {
    match Webhook::listen(&server, args).await {
        Ok(webhook) => {
            vitals.readiness.fulfilled(WEBHOOK);
            webhook.run(async { drop(ends.await) }).await;
        }
        Err(error) => {
            vitals.readiness.missing(WEBHOOK, error.to_string());
            tracing::warn!(%error, "plain strings for CIDRs will be refused");
        }
    }
}

/// One of several controllers, of which one works.
struct Replica {
    config: Config,
    server: ApiServer,
    ipam: Ipam,
    vitals: Vitals,
}

impl Replica {
    /// Works while it holds the Lease, and stands by otherwise.
    async fn run(&self, stop: &mut Stop) -> anyhow::Result<()> {
        let Self { config, server, ipam, vitals } = self;
        let identity = config.identity();
        let findings = vitals.findings.clone();
        let gateways = vitals.gateways.clone().unwrap_or_default();
        let reports = report(server.clone(), &config.name, &identity, findings.clone());
        let (works, is_working) = watch::channel(false);
        let labels = keep_active_labels(server, is_working);
        tokio::pin!(reports, labels);
        let election = Election::new(server, &identity).listening_at(config.address());
        let mut election = election.reporting(findings.clone());
        loop {
            let is_standby = self.stand_by(election.is_standby());
            tokio::select! {
                () = stop.requested() => return Ok(()),
                () = vitals.heartbeat.while_waiting(election.won()) => {}
                () = gateways.while_waiting(is_standby) => {}
                () = &mut reports => {}
                () = &mut labels => {}
            }
            // State observed by another store may be older than the replica that worked meanwhile.
            let store = open(config, vitals)?;
            let server = store.api_server().context("the store is no API server")?;
            let (findings_of, heartbeat) = (findings.clone(), gateways.clone());
            let (kubernetes, workloads) =
                Kubernetes::new(server, &identity, config.wave, findings_of, heartbeat);
            let controller = controller(config, store, ipam.clone())?.with(workloads);
            let controller = controller.reporting_to(vitals.clone());
            let unserved = unserved::report(self.server.clone(), &identity);
            findings.clear();
            vitals.metrics.set_elected(true);
            works.send_replace(true);
            let stopped = tokio::select! {
                () = controller.run(stop.requested()) => true,
                () = kubernetes.run() => true,
                () = election.lost() => false,
                () = &mut reports => true,
                () = &mut labels => true,
                () = unserved => true,
            };
            vitals.metrics.set_elected(false);
            works.send_replace(false);
            election.release().await;
            if stopped {
                return Ok(());
            }
            findings.clear();
            tracing::warn!("the Lease is lost, or another asks for it; standing by");
        }
    }

    /// Becomes ready once it could work in place of the replica that does. Does not return.
    async fn stand_by(&self, mut is_standby: watch::Receiver<bool>) {
        if is_standby.wait_for(|is_standby| *is_standby).await.is_ok() {
            loop {
                let Ok(store) = open(&self.config, &self.vitals) else { break };
                let problems = store.check(&READ).await;
                let can_work = problems.is_empty();
                self.vitals.findings.set(Reader::Standby, problems.into_iter().collect());
                if can_work {
                    self.vitals.standing_by();
                    break;
                }
                if let Some(why) = self.vitals.findings.text() {
                    self.vitals.readiness.missing(COMPILED, why);
                }
                sleep(RECHECK).await;
            }
        }
        std::future::pending().await
    }
}
