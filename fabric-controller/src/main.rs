//! `fabric-controller`: see [`fabric_controller`].

mod config;

use anyhow::Context as _;
use clap::Parser as _;
use fabric_controller::control::Controller;
use fabric_controller::grants::Ipam;
use fabric_shell::Stop;
use fabric_store::Store;

fn main() -> anyhow::Result<()> {
    let config = config::Config::parse();
    config.log.start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the runtime")?.block_on(run(config))
}

async fn run(config: config::Config) -> anyhow::Result<()> {
    let mut stop = Stop::listen().context("cannot listen for signals")?;
    let store = Store::open(&config.store).context("cannot open the store")?;
    let ipam = Ipam::new(&config.ipam).context("cannot use the address of ipam")?;
    let settings = config.settings();
    let controller = Controller::new(store, ipam, settings).context("cannot watch the store")?;
    tracing::info!(ipam = %config.ipam, "running");
    controller.run(stop.told()).await;
    tracing::info!("stopped; what is published stays");
    Ok(())
}
