//! Two clusters that use the same addresses, joined by weft on one machine.
#![allow(clippy::print_stdout)]

mod board;
mod interrupt;
mod peering;
mod proof;
mod tour;

use std::os::unix::process::CommandExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use weft_tests::{Cluster, ClusterSpec, Lab, bin_dir, find_holders, remove_group, require};

/// Name by which machines of a demo are found, also after it was killed.
const GROUP: &str = "weft-demo";
/// Prefixes that each cluster grants from: those of its own, and two by which it sees the other. They
/// differ, so that an address alone shows which cluster uses it for which.
const ROME_POOLS: &str = "10.70.0.0/16,10.80.0.0/16,10.201.0.0/16,10.202.0.0/16";
const MILAN_POOLS: &str = "10.70.0.0/16,10.80.0.0/16,10.211.0.0/16,10.212.0.0/16";
/// The port of milan's gateway on its node.
const PORT: u16 = 30742;

/// Joins two clusters, rome and milan, that both use 10.200.0.0/16 for their pods.
///
/// Both run on this machine, in network namespaces: two nodes each, pods with addresses of their
/// own, one underlay between all of them. Nothing outside those namespaces is touched, and
/// nothing is left when the demo ends, however it ends.
#[derive(Parser)]
#[command(name = "demo", version, after_help = EXAMPLES)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Leave everything up afterwards and print how to look around.
    #[arg(long)]
    keep: bool,
    /// Megabytes of each bulk transfer.
    #[arg(long, value_name = "MB", default_value_t = 48)]
    bulk: u64,
}

#[derive(Subcommand)]
enum Command {
    /// Run a command on a machine of a demo that was kept.
    In {
        /// rome-1, rome-2, milan-1, milan-2 or switch.
        machine: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<String>,
    },
    /// Remove a demo that was kept.
    Down,
}

const EXAMPLES: &str = "\
Examples:
  demo
  demo --keep
  demo in rome-1 weft status
  demo in milan-2 ip netns exec pod-2-1 ip address
  demo down

Exit codes: 0 everything was proven, 1 something was not (the last lines say what), 2 wrong usage,
130 interrupted.";

fn main() -> ExitCode {
    let args = Args::parse();
    let result = match &args.command {
        None => run(&args),
        Some(Command::In { machine, command }) => tour::run_in(machine, command),
        Some(Command::Down) => down(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            interrupt::give_way();
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return rerun_as_root_of_a_user_namespace();
    }
    require(&[
        ("ip", "iproute2"),
        ("bridge", "iproute2"),
        ("nft", "nftables"),
        ("unshare", "util-linux"),
        ("nsenter", "util-linux"),
    ])?;
    bin_dir()?;
    interrupt::watch()?;
    if remove_group(GROUP) > 0 {
        println!("removed what an earlier demo had left");
    }
    let start = Instant::now();
    let scene = Scene::build()?;
    if let Err(error) = scene.play(args) {
        interrupt::give_way();
        scene.explain();
        return Err(error);
    }
    if args.keep {
        return scene.keep();
    }
    drop(scene);
    println!("\nall proven and everything removed in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Replaces this process by one that is root in namespaces of its own, which needs no root.
fn rerun_as_root_of_a_user_namespace() -> Result<()> {
    let this = std::env::current_exe().context("finding this program")?;
    let mut unshare = std::process::Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--"]).arg(this).args(std::env::args_os().skip(1));
    Err(unshare.exec()).context("starting unshare (package util-linux)")
}

fn down() -> Result<()> {
    let count = find_holders(GROUP).len();
    remove_group(GROUP);
    println!("{}", if count == 0 { "no demo is up" } else { "removed" });
    Ok(())
}

/// Dropped in this order: the switch last.
struct Scene {
    rome: Cluster,
    milan: Cluster,
    lab: Lab,
}

impl Scene {
    fn build() -> Result<Self> {
        let step = board::Step::begin("machines", "two clusters of two nodes, pods, one underlay");
        let lab = Lab::new(GROUP)?;
        let [mut rome, mut milan] = [("rome", 1), ("milan", 2)]
            .map(|(id, number)| Cluster::new(&lab, ClusterSpec::new(id, number, 2)));
        step.done("both have pods in 10.200.0.0/16 and external addresses in 10.70.0.0/16");

        let step = board::Step::begin(
            "fabric",
            "weft up on rome-1 and milan-1, weft agent on rome-2 and milan-2",
        );
        for (cluster, pools) in [(&mut rome, ROME_POOLS), (&mut milan, MILAN_POOLS)] {
            if let Ok(cluster) = cluster {
                cluster.start_with(&["--pools", pools])?;
            }
        }
        let scene = Self { rome: rome?, milan: milan?, lab };
        peering::wait_for_nodes(&scene.rome)?;
        peering::wait_for_nodes(&scene.milan)?;
        step.done("running");
        Ok(scene)
    }

    fn play(&self, args: &Args) -> Result<()> {
        peering::connect(&self.rome, &self.milan, PORT).context("the peering did not come up")?;
        proof::prove(&self.rome, &self.milan, args.bulk * 1_000_000)
    }

    fn explain(&self) {
        for cluster in [&self.rome, &self.milan] {
            eprintln!("\n{}", cluster.report());
        }
    }

    fn keep(self) -> Result<()> {
        tour::print(&self.rome, &self.milan)?;
        self.rome.keep()?;
        self.milan.keep()?;
        self.lab.keep()
    }
}

/// No step takes longer, or it has failed.
const TIMEOUT: Duration = Duration::from_secs(20);
