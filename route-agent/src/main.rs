//! One per node: its VXLAN devices, its routes to peers, one nft table.

mod agent;
mod apply;
mod cleanup;
mod compile;
mod config;
mod config_source;
mod conntrack;
mod desired;
mod gateway_paths;
mod host_faults;
mod host_state;
mod liqo_leftovers;
mod moved;
mod overlay_probe;
mod parsed_config;
mod presence;
mod preview;
mod problems;
mod refusal;
mod report;
mod rivals;
mod table;
mod undone;
mod vitals;
mod withdrawal;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use fabric_api::fabric::REFUSE_SECONDS;
use fabric_runtime::Stop;
use fabric_store::{Kind, ObjectRef, Store};
use netlink::{Handle, Netns};
use tokio::signal::unix::{SignalKind, signal};

use agent::Agent;
use config::{Cli, Command, RunArgs};
use vitals::Vitals;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    cli.log.start();
    match execute(cli.command).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("route-agent stopped: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn execute(command: Command) -> anyhow::Result<()> {
    let netns = Netns::current()?;
    let handle = Handle::open(&netns)?;
    match command {
        Command::Run(args) => run(*args, handle).await,
        Command::Cleanup { refuse } => clean_up(&handle, refuse).await,
    }
}

async fn clean_up(handle: &Handle, refuse: bool) -> anyhow::Result<()> {
    if let Some(pid) = presence::running_agent().await.context("cannot look for an agent")? {
        let which =
            if pid > 0 { format!("process {pid}") } else { "in another container".to_owned() };
        bail!(
            "a route-agent runs here ({which}) and would make all of it again: stop it first \
             (`weft down`, with the --run-dir that it was started in, does both; in Kubernetes uninstall \
             weft, or remove the node)"
        );
    }
    let quiet = refuse.then(|| Duration::from_secs(REFUSE_SECONDS.into()));
    let withdrawn = cleanup::whole_node(handle, quiet).await;
    if !withdrawn.problems.is_empty() {
        bail!("not all is cleaned up: {}", withdrawn.problems.join("; "));
    }
    let lines: Vec<_> = withdrawn.senders.iter().map(|sender| format!("{sender}\n")).collect();
    std::io::stdout().write_all(lines.concat().as_bytes()).context("cannot print")
}

async fn run(mut args: RunArgs, handle: Handle) -> anyhow::Result<()> {
    let stop = Stop::listen().context("cannot listen for signals")?;
    let taken_down = signal(SignalKind::user_defined1()).context("cannot listen for signals")?;
    let store = match (&args.published, &args.store) {
        (Some(published), _) => Store::open_published(published),
        (None, Some(args)) => Store::open(args),
        (None, None) => {
            bail!("no source of the config: expected --kubernetes, --run-dir or --published")
        }
    };
    let store = store.context("cannot open the store")?;
    if args.dry_run {
        return preview::print(&handle, &store, &node_config(&args.node)).await;
    }
    tracing::info!(node = %args.node, "route-agent is up");
    let vitals = Vitals::new();
    if let Some(address) = args.http.take() {
        // A node's traffic needs its agent, whether or not another program has taken the port.
        if let Err(error) = vitals.monitoring(&store).serve(address) {
            if error.is_held() {
                return Err(error.into());
            }
            let error = anyhow::Error::from(error);
            tracing::error!("metrics and probes are not served: {error:#}");
        }
    }
    let agent = Agent::start(args, handle, &store, vitals)?;
    agent.run(&store, stop, taken_down).await?;
    tracing::info!("route-agent is down");
    Ok(())
}

fn node_config(node: &str) -> ObjectRef {
    ObjectRef::new(Kind::NodeConfig, "", node)
}
