//! `fabric-controller`: see [`fabric_controller`].

mod config;

use anyhow::Context as _;
use clap::Parser as _;
use fabric_controller::control::Controller;
use fabric_controller::grants::Ipam;
use fabric_controller::kubernetes::Kubernetes;
use fabric_controller::kubernetes::lease::Election;
use fabric_controller::kubernetes::withdrawal::withdraw;
use fabric_controller::webhook::{Webhook, WebhookArgs};
use fabric_shell::Stop;
use fabric_store::{ApiServer, Store};
use tokio::sync::oneshot;

use config::{Command, Config, WithdrawArgs};

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
    withdraw(server, args.patience).await.context("not all of weft is taken away")
}

async fn run(config: Config) -> anyhow::Result<()> {
    let mut stop = Stop::listen().context("cannot listen for signals")?;
    let store = Store::open(&config.store).context("cannot open the store")?;
    let ipam = Ipam::new(&config.ipam).context("cannot use the address of ipam")?;
    tracing::info!(ipam = %config.ipam, "running");
    match store.api_server() {
        Some(server) => {
            let (served, ends) = oneshot::channel::<()>();
            let webhook = tokio::spawn(serve_webhook(server.clone(), config.webhook, ends));
            elected(&config, server, ipam, &mut stop).await?;
            drop(served);
            webhook.await.context("the webhook panicked")?;
        }
        None => controller(&config, store, ipam)?.run(stop.told()).await,
    }
    tracing::info!("stopped; what is published stays");
    Ok(())
}

fn controller(config: &Config, store: Store, ipam: Ipam) -> anyhow::Result<Controller> {
    let installation = store.api_server().map(|server| server.namespace);
    Controller::new(store, ipam, config.settings(installation)).context("cannot watch the store")
}

/// Whoever leads. Without it only plain strings in place of lists are refused.
async fn serve_webhook(server: ApiServer, args: WebhookArgs, ends: oneshot::Receiver<()>) {
    match Webhook::listen(server.client, &server.namespace, args).await {
        Ok(webhook) => webhook.run(async { drop(ends.await) }).await,
        Err(error) => tracing::warn!(%error, "plain strings for CIDRs will be refused"),
    }
}

/// Works whenever no other does, and no longer than no other may.
async fn elected(
    config: &Config,
    server: ApiServer,
    ipam: Ipam,
    stop: &mut Stop,
) -> anyhow::Result<()> {
    let identity = config.identity();
    let mut election = Election::new(&server, &identity);
    loop {
        tokio::select! {
            () = stop.told() => return Ok(()),
            () = election.won() => {}
        }
        // What another store knows may be of the time before the one that worked meanwhile.
        let store = Store::open(&config.store).context("cannot open the store")?;
        let (kubernetes, outside) = Kubernetes::new(server.clone(), &identity);
        let controller = controller(config, store, ipam.clone())?.with(outside);
        let stopped = tokio::select! {
            () = controller.run(stop.told()) => true,
            () = kubernetes.run() => true,
            () = election.lost() => false,
        };
        election.release().await;
        if stopped {
            return Ok(());
        }
        tracing::warn!("the Lease is lost, or another asks for it; standing by");
    }
}
