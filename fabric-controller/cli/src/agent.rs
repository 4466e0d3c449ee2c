use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use fabric_api::fabric::NodeConfig;
use fabric_store::Kind;
use fabric_supervisor::lock::Lock;
use fabric_supervisor::rundir::{Record, RunDir, agent_state_dir};
use fabric_supervisor::supervise::{self, End, Loop, MarkUnresponsive, OwnFiles, StopSignals};
use fabric_supervisor::workloads::{
    self, AgentOptions, ChildLogs, ControlOptions, GatewayOptions, Gateways, Workloads,
};
use fabric_supervisor::{lock, metrics, process};
use tokio::sync::watch;

use super::down::refusal;
use super::output::say;
use super::up::print_stop_hint;
use super::{host, manifest, preconditions};

/// Between two looks for a published directory that is not there yet.
const POLL: Duration = Duration::from_millis(500);
/// Longest time for a look at what is published.
const READ: Duration = Duration::from_secs(2);
const DEFAULT_RUN_DIR: &str = "/run/weft/agent";

const EXAMPLES: &str = "\
Examples:
  The first host shares /run/weft/rome/published (NFS, rsync, anything); here it is mounted:
    weft agent --node n2 --published /mnt/rome
Ctrl-C or SIGTERM stops the supervisor only; the route-agent and its routes stay until `weft down`.";

/// Run the route-agent of a further host, on what `weft up` publishes.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct AgentArgs {
    /// The node that this host is, as the cluster's Nodes name it.
    #[arg(long, value_name = "NAME", value_parser = manifest::dns_name)]
    node: String,
    /// The `published` directory of the host that runs `weft up`, shared however you like; waited for
    /// if it is not there yet. May be read-only: then `weft status` elsewhere only shows that this node
    /// acknowledges nothing.
    #[arg(long, value_name = "DIR")]
    published: PathBuf,
    /// Where pid files and logs go.
    #[arg(long, value_name = "DIR", env = "WEFT_RUN_DIR", default_value = DEFAULT_RUN_DIR)]
    run_dir: PathBuf,
    /// Serve the metrics of the route-agent at http://IP:PORT/metrics.
    #[arg(long, value_name = "IP:PORT")]
    metrics: Option<SocketAddr>,
    /// Directory of what the next start of this host refuses until the route-agent runs: loaded by
    /// weft-refuse.service, or while this waits for DIR of --published
    /// [default: /var/lib/weft/agent-NODE].
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    agent: AgentOptions,
    #[command(flatten)]
    logs: ChildLogs,
}

/// A further host runs no gateway.
struct NoGateways;

impl MarkUnresponsive for NoGateways {
    async fn mark_unresponsive(&mut self, _gateways: &Gateways) -> Gateways {
        Gateways::new()
    }
}

pub(crate) fn run(args: &AgentArgs) -> anyhow::Result<ExitCode> {
    preconditions::check(false)?;
    let programs = workloads::programs()?;
    workloads::check_programs(&programs, &["route-agent"])?;
    let dir = RunDir::at(&args.run_dir)?;
    process::check_alone(&dir)?;
    dir.create()?;
    let lock = lock::lock(&dir, "weft agent")?;
    let node = args.node.clone();
    let state = args.state_dir.clone().unwrap_or_else(|| agent_state_dir(&node));
    let mut record = Record {
        cluster_id: None,
        node,
        manifests: None,
        state_dir: Some(std::path::absolute(state)?),
        published: Some(std::path::absolute(&args.published)?),
        netns: host::netns(),
    };
    let before = dir.record().ok().flatten();
    // `weft status` shows what it waits for.
    dir.write_record(&record)?;
    let published = published(&args.published, || refuse_saved(&dir, &record))?;
    if !is_writable(&published) {
        say(&format!(
            "{} is read-only: this node's status will not be seen elsewhere",
            published.display()
        ));
    }
    record.published = Some(published);
    // Later commands may name the cluster.
    let known = before.filter(|before| before.published == record.published);
    record.cluster_id = cluster_id(&dir, &record).or_else(|| known?.cluster_id);
    dir.write_record(&record)?;
    say(&format!("node {}, run directory {}", record.node, dir.path().display()));
    let control = ControlOptions::default();
    let (agent, logs) = (args.agent.clone(), args.logs.clone());
    let gateway = GatewayOptions::default();
    let workloads = Workloads { programs, dir, record, control, agent, gateway, logs };
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(supervise_agent(
        &workloads,
        lock,
        args.metrics,
    ))
}

/// The cluster whose configs are published, if there is any. Its file system may hang.
fn cluster_id(dir: &RunDir, record: &Record) -> Option<String> {
    let (found_to, found) = mpsc::channel();
    let (dir, record) = (dir.clone(), record.clone());
    let read = async move || {
        let snapshot = dir.store(&record).ok()?.read(&[Kind::NodeConfig]).await.ok()?;
        snapshot.objects.into_values().find_map(|object| match <&NodeConfig>::try_from(&object) {
            Ok(config) => Some(config.spec.cluster_id.clone()),
            Err(_) => None,
        })
    };
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        _ = found_to.send(runtime.ok().and_then(|runtime| runtime.block_on(read())));
    });
    found.recv_timeout(READ).ok().flatten()
}

/// Returns the published directory once it is there: it may be a mount that comes later than this host.
/// Calls `waiting` if it is not there yet.
fn published(path: &Path, waiting: impl Fn()) -> anyhow::Result<PathBuf> {
    let mut waits = false;
    loop {
        match std::fs::read_dir(path).and_then(|_| std::fs::canonicalize(path)) {
            Ok(published) => return Ok(published),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "cannot open the published directory {}; expected the directory \
                         `published` below the run directory of `weft up`, or a copy of it",
                        path.display()
                    )
                });
            }
        }
        if !std::mem::replace(&mut waits, true) {
            say(&format!(
                "waiting for the published directory {}, which is not there yet",
                path.display()
            ));
            waiting();
        }
        thread::sleep(POLL);
    }
}

/// Loads what this node refused last, as weft-refuse.service does when the host starts: without a
/// route-agent pods would send in clear what is for peers. One that still runs refuses that itself.
fn refuse_saved(dir: &RunDir, record: &Record) {
    let state_dirs: Vec<_> = record.state_dir.iter().cloned().collect();
    for file in refusal::saved(&state_dirs) {
        if !process::running(dir).is_empty() {
            return;
        }
        say(&match refusal::load(&file) {
            Ok(()) => {
                format!("packets to peers are refused until then, as {} has them", file.display())
            }
            Err(error) => format!("packets to peers may leave this host in clear: {error:#}"),
        });
    }
}

async fn supervise_agent(
    workloads: &Workloads,
    lock: Lock,
    metrics_address: Option<SocketAddr>,
) -> anyhow::Result<ExitCode> {
    let stop = StopSignals::new()?;
    let dir = workloads.dir.clone();
    let own = OwnFiles { dir: dir.clone(), lock, record: workloads.record.clone() };
    supervise::raise_open_files();
    // Nothing changes what is wanted, so the sender only has to exist.
    let (_wanted_to, wanted) = watch::channel(workloads.of_agent());
    let (reports, reported) = watch::channel(BTreeMap::new());
    if let Some(address) = metrics_address {
        metrics::serve(address, reported).await?;
        say(&format!("metrics at http://{address}/metrics"));
    }
    let connections = NoGateways;
    match (Loop { own, wanted, reports, connections, stop }).run().await {
        End::Stopped(kept) => say(&print_stop_hint(&kept, &dir)),
        End::RunDirLost => return Err(supervise::start_anew(&dir)),
    }
    Ok(ExitCode::SUCCESS)
}

fn is_writable(dir: &Path) -> bool {
    nix::unistd::access(dir, nix::unistd::AccessFlags::W_OK).is_ok()
}
