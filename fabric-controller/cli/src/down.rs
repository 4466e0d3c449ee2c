use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fabric_supervisor::process::{self, Identity};
use fabric_supervisor::rundir::{
    self, REFUSAL_FILE, RUN_ROOT, Record, RunDir, STATE_ROOT, default_state_dir, state_option,
};
use fabric_supervisor::{lock, workloads};
use rustix::process::Signal;

use super::output::{say, sending};
use super::selection::{self, Selection};
use super::{host, preconditions};

mod lost;
pub(crate) mod refusal;
mod withdraw;

/// Time that all processes of a fabric together have to stop before they are killed.
const GRACE: Duration = Duration::from_secs(5);

/// Time that those have which are asked once others have used all of [`GRACE`].
const MIN_GRACE: Duration = Duration::from_millis(500);

/// Time for which a killed process may still be there.
const KILLED: Duration = Duration::from_secs(5);

/// Time for which a process that was just killed may still hold its lock.
const DYING: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "\
Examples:
    weft down
    weft down --cluster rome --purge
    weft down --now";

/// Take everything away: processes, devices, routes, nft table, run directory.
///
/// Also what a killed `weft up` left. On the host of `weft up`, the other hosts' agents do the same
/// first and are waited for, for up to 10 s. If something still sends to a peer's prefix within the 2 s
/// that it looks, the refusal of all of them stays, in the nftables table `inet weft_refused`: or these
/// packets would leave by the default route, in clear. --now or the next `weft up` ends that; on the other hosts, their agents do once nobody sends.
/// Without a sender nothing stays: what pods send to peers later leaves in clear. The state
/// directory (granted addresses, generated keys, last good versions of the manifests, their Secrets
/// included) stays unless --purge is given. Run again, it finds nothing to do, which is an error with
/// --purge.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DownArgs {
    #[command(flatten)]
    selection: Selection,
    /// The state directory, if the run directory is gone and cannot tell [default:
    /// /var/lib/weft/CLUSTER, or /var/lib/weft/agent-NODE of a further host].
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR")]
    state_dir: Option<PathBuf>,
    /// Wait for no agent, and refuse nothing: remove everything of this host at once. Other hosts keep
    /// theirs until `weft down` there.
    #[arg(long)]
    now: bool,
    /// Remove the state directory too, with granted addresses, generated keys and the copies of Secrets;
    /// not while something sends to a peer, unless --now is given.
    /// Where nothing runs, that of --cluster or --state-dir, or the only one there is.
    #[arg(long)]
    purge: bool,
}

impl DownArgs {
    fn named_state_dir(&self) -> Option<PathBuf> {
        let of_cluster = self.selection.cluster.as_ref().map(default_state_dir);
        self.state_dir.clone().or(of_cluster)
    }

    /// The one named, or those of all clusters.
    fn state_dirs(&self) -> Vec<PathBuf> {
        let all = || fs::read_dir(STATE_ROOT).into_iter().flatten().flatten();
        let named = self.named_state_dir();
        named.map_or_else(|| all().map(|entry| entry.path()).collect(), |state| vec![state])
    }
}

pub(crate) fn run(args: &DownArgs) -> anyhow::Result<ExitCode> {
    preconditions::check_rights()?;
    let Some(dir) = args.selection.find()? else {
        let lost = stop_lost(args)?;
        return purge_alone(args, &lost);
    };
    let record = dir.record()?;
    let own = record.as_ref().and_then(|record| record.state_dir.as_deref());
    if let (Some(named), Some(own)) = (&args.state_dir, own)
        && std::path::absolute(named)? != own
    {
        // Another fabric's, which does not run here.
        if args.purge {
            return purge_alone(args, &Lost::default());
        }
        bail!(
            "the fabric of {} has the state directory {}: nothing was taken away; expected that one, or --purge \
             to remove {} alone",
            dir.path().display(),
            own.display(),
            named.display()
        );
    }
    if record.is_none() {
        dir.check_ours().context("nothing was removed")?;
    }
    stop_supervisor(&dir)?;
    lost::supervisors(dir.path()).iter().for_each(stop_lost_supervisor);
    // Held until the end, so that no new supervisor starts meanwhile, unless none could.
    let _lock = match lock::lock(&dir, "weft down") {
        Err(error) if is_read_only(&error) => None,
        Err(_) if !dir.path().exists() => {
            say(&format!("another `weft down` has removed {}", dir.path().display()));
            return Ok(ExitCode::SUCCESS);
        }
        lock => Some(lock?),
    };
    withdraw(&dir, record.as_ref(), args.now)?;
    let netns = record.as_ref().map_or(0, |record| record.netns);
    let mut refuses = false;
    if record.is_none() && lost::others_are_here()? {
        say("nothing was started from it, and another fabric runs here, which stays");
    } else if netns == 0 || netns == host::netns() {
        let state = record.as_ref().and_then(|record| record.state_dir.as_deref());
        refuses = clean_up_host(args.now, state)?;
    } else {
        say(
            "it ran in another network namespace, whose devices and routes stay; if that is still \
             there, run `route-agent cleanup` in it",
        );
    }
    let removed = remove_run_dir(dir.path());
    if removed.is_ok() {
        say(&format!("removed {}", dir.path().display()));
    }
    let (mut forgotten, mut is_spared) = (Ok(()), false);
    let is_agent = record.as_ref().is_some_and(|record| record.published.is_some());
    if let Some(state) = record.and_then(|record| record.state_dir) {
        if !refuses {
            forgotten = refusal::remove(&state.join(REFUSAL_FILE));
        }
        // An agent has nothing else there.
        let is_empty = is_agent && fs::remove_dir(&state).is_ok();
        if is_empty && args.purge {
            say(&format!("removed {}", state.display()));
        }
        // With the state gone, a refused prefix would be granted to another peer.
        is_spared = args.purge && refuses && !is_agent;
        if !is_empty && (!is_agent || args.purge) {
            end_of_state(&state, args.purge && !refuses)?;
        }
    }
    // A host that was the first one before has keys.
    if is_agent && args.purge {
        other_state_dirs().iter().flatten().try_for_each(|state| end_of_state(state, false))?;
    }
    removed.and(forgotten).context("everything else was taken away")?;
    Ok(if is_spared { spared() } else { ExitCode::SUCCESS })
}

/// State directories of clusters in the usual place, but for those of run directories in theirs.
fn other_state_dirs() -> anyhow::Result<Vec<PathBuf>> {
    let mut used = Vec::new();
    for dir in selection::all()? {
        used.extend(dir.record()?.and_then(|record| record.state_dir));
    }
    let all = fs::read_dir(STATE_ROOT).into_iter().flatten().flatten();
    let clusters = all.filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"agent-"));
    let others = clusters.map(|entry| entry.path()).filter(|state| !used.contains(state));
    Ok(others.filter(|state| rundir::check_state(state).is_ok()).collect())
}

fn spared() -> ExitCode {
    say(
        "nothing was purged, or another peer could be granted what is refused: wait, or give --now, too",
    );
    ExitCode::FAILURE
}

fn is_read_only(error: &anyhow::Error) -> bool {
    let error = error.root_cause().downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == io::ErrorKind::ReadOnlyFilesystem)
}

/// Ends all that runs: the gateways before the agents take away what they made, since a host without
/// that answers what gateways send it with ICMP errors, which quote packets of peers in clear.
fn withdraw(dir: &RunDir, record: Option<&Record>, now: bool) -> anyhow::Result<()> {
    let mut grace = GRACE;
    let is_agent = record.is_some_and(|record| record.published.is_some());
    if let Some(record) = record.filter(|_| !now && !is_agent) {
        // It would publish everything again.
        stop_some(dir, &mut grace, |name| name == "fabric-controller")?;
        stop_some(dir, &mut grace, |name| name.starts_with("gateway-"))?;
        if let Err(error) = withdraw::nodes(dir, record) {
            say(&format!("{error:#}; other hosts were not asked to take anything away"));
        }
    }
    stop_some(dir, &mut grace, |_| true)?;
    if let Some(record) = record.filter(|_| is_agent) {
        // The directory may be gone, or read-only.
        let _ = withdraw::retract(dir, record);
    }
    Ok(())
}

/// State of a host without run directory.
#[derive(Default)]
struct Lost {
    /// There was something.
    is_found: bool,
    /// Something still sends to a peer, and is refused.
    refuses: bool,
}

/// Someone removed the run directory. What was started from it is found all the same, and what is
/// in the kernel is ours if no other run directory is of this network namespace.
fn stop_lost(args: &DownArgs) -> anyhow::Result<Lost> {
    let selection = &args.selection;
    let dirs = lost::dirs(selection)?;
    if dirs.is_empty() {
        say(&format!("nothing runs here: no fabric in {}", selection.searched()));
    }
    for dir in &dirs {
        say(&format!("{} was removed, but not what was started from it", dir.path().display()));
        lost::supervisors(dir.path()).iter().for_each(stop_lost_supervisor);
        stop_some(dir, &mut { GRACE }, |_| true)?;
        // They may have made it again.
        if dir.path().is_dir() {
            remove_run_dir(dir.path())?;
        }
    }
    let is_found = !dirs.is_empty();
    if lost::others_are_here()? {
        return Ok(Lost { is_found, ..Lost::default() });
    }
    let (was_refused, saved) = (refusal::is_in_force(), refusal::saved(&args.state_dirs()));
    let refuses = clean_up_host(args.now, args.named_state_dir().as_deref())?;
    if !refuses {
        refusal::end(was_refused, &saved);
    }
    Ok(Lost { is_found: is_found || was_refused, refuses })
}

/// A mount point stays, empty. Agents of other hosts may share the folder, and write a status into it meanwhile.
fn remove_run_dir(path: &Path) -> anyhow::Result<()> {
    const TRIES: u32 = 20;
    let mut removed = fs::remove_dir_all(path);
    for _ in 1..TRIES {
        match &removed {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            Ok(()) | Err(_) => break,
        }
        thread::sleep(Duration::from_millis(50));
        removed = fs::remove_dir_all(path);
    }
    match removed {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
        removed => removed.with_context(|| format!("cannot remove {}", path.display()))?,
    }
    // Other fabrics have their directories there, too: one that is not empty stays.
    if path.parent() == Some(Path::new(RUN_ROOT)) {
        let _ = fs::remove_dir(RUN_ROOT);
    }
    Ok(())
}

fn stop_lost_supervisor(identity: &Identity) {
    if let Some(pidfd) = identity.open() {
        let gently = process::stop_and_wait(&pidfd, GRACE * 2 + Duration::from_secs(2));
        say(&format!("{} a supervisor without run directory (pid {})", verb(gently), identity.pid));
    }
}

/// Handles the options on the state directory when nothing is left that runs.
fn purge_alone(args: &DownArgs, lost: &Lost) -> anyhow::Result<ExitCode> {
    if args.named_state_dir().is_none() && !args.purge {
        return Ok(ExitCode::SUCCESS);
    }
    if args.purge && lost.refuses {
        return Ok(spared());
    }
    let (dirs, named) = (args.state_dirs(), args.named_state_dir());
    match &dirs[..] {
        [state] if state.exists() => end_of_state(state, args.purge)?,
        [] | [_] if args.purge && !lost.is_found => bail!(
            "nothing was purged: found no fabric in {}, and no state directory {}; expected the \
             directories of `weft up`. Name them with --run-dir DIR and --state-dir DIR",
            args.selection.searched(),
            named.unwrap_or_else(|| Path::new(STATE_ROOT).join("*")).display()
        ),
        [] | [_] => {}
        several => bail!(
            "{} has the state directories of {} clusters; say which with --cluster ID or --state-dir \
             DIR",
            STATE_ROOT,
            several.len()
        ),
    }
    Ok(ExitCode::SUCCESS)
}

fn end_of_state(state: &Path, purge: bool) -> anyhow::Result<()> {
    if !state.exists() {
        return Ok(());
    }
    if purge {
        rundir::check_state(state).context("it was not removed")?;
        let _lock = lock::lock_state(state).context("it was not removed")?;
        fs::remove_dir_all(state).with_context(|| format!("cannot remove {}", state.display()))?;
        say(&format!("removed {}", state.display()));
    } else {
        say(&format!(
            "kept {0} (granted addresses, generated keys, last good versions of the manifests, their \
             Secrets included); `weft down --purge --state-dir {0}` removes it",
            state.display()
        ));
    }
    Ok(())
}

fn stop_supervisor(dir: &RunDir) -> anyhow::Result<()> {
    let give_up = Instant::now() + DYING;
    let (held, pidfd) = loop {
        let Some(held) = lock::supervisor_of(dir) else { return Ok(()) };
        if held.command == "weft down" {
            return Err(held.into());
        }
        match Identity::of(held.pid).and_then(|identity| identity.open()) {
            Some(pidfd) => break (held, pidfd),
            None if Instant::now() < give_up => thread::sleep(Duration::from_millis(20)),
            None => bail!(
                "{} holds {}, but pid {} is not to be seen from here; stop it where it runs",
                held.command,
                dir.lock_file().display(),
                held.pid
            ),
        }
    };
    // It stops its own children within the grace it gives them.
    let gently = process::stop_and_wait(&pidfd, GRACE * 2 + Duration::from_secs(2));
    say(&format!("{} {} (pid {})", verb(gently), held.command, held.pid));
    Ok(())
}

/// Ends processes. All are asked first and killed together, so that the waiting, which it takes from
/// `grace`, is shared.
fn stop_some(
    dir: &RunDir,
    grace: &mut Duration,
    meant: impl Fn(&str) -> bool,
) -> anyhow::Result<()> {
    let strays = process::strays(dir);
    let named = process::running(dir);
    let unnamed =
        strays.into_iter().map(|identity| ("a process without pid file".to_owned(), identity));
    let handles: Vec<_> = named
        .into_iter()
        .chain(unnamed)
        .filter(|(name, _)| meant(name))
        .filter_map(|(name, identity)| Some((name, identity.open()?, identity.pid)))
        .collect();
    for (name, pidfd, _) in &handles {
        // Peers, and gateways of other hosts, are to know that this is no restart.
        if name.starts_with("gateway-") || name.starts_with("route-agent-") {
            process::send(pidfd, Signal::USR1);
        }
        process::send(pidfd, Signal::TERM);
    }
    let began = Instant::now();
    let deadline = began + (*grace).max(MIN_GRACE);
    let gently: Vec<bool> = handles.iter().map(|(_, pidfd, _)| ends_by(pidfd, deadline)).collect();
    *grace = grace.saturating_sub(began.elapsed());
    for ((_, pidfd, _), _) in handles.iter().zip(&gently).filter(|(_, gently)| !**gently) {
        process::send(pidfd, Signal::KILL);
    }
    let deadline = Instant::now() + KILLED;
    for ((name, pidfd, pid), gently) in handles.iter().zip(gently) {
        if !ends_by(pidfd, deadline) {
            bail!(
                "{name} (pid {pid}) does not end, not even when killed; see `ps -p {pid} -o stat,wchan`"
            );
        }
        say(&format!("{} {name} (pid {pid})", verb(gently)));
    }
    Ok(())
}

fn ends_by(pidfd: &OwnedFd, deadline: Instant) -> bool {
    process::ended(pidfd, deadline.saturating_duration_since(Instant::now()))
}

fn verb(gently: bool) -> &'static str {
    if gently { "stopped" } else { "killed" }
}

/// Devices, routes, rules and the nft tables of this host: the route-agent made them and knows them.
/// Returns whether the table of refused prefixes stays, as something still sends to them. `state` has a copy
/// of that.
fn clean_up_host(now: bool, state: Option<&Path>) -> anyhow::Result<bool> {
    let program: PathBuf = workloads::programs()?.join("route-agent");
    let mut command = Command::new(&program);
    command.arg("cleanup").args((!now).then_some("--refuse"));
    match command.stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => {
            let senders = String::from_utf8_lossy(&output.stdout);
            let senders: Vec<_> = senders.lines().collect();
            if !senders.is_empty() {
                say(&format!(
                    "{} to peers: all packets to them stay refused, by the nftables table `inet \
                     weft_refused`. `weft down --now{}` removes it, the next `weft up` takes it over",
                    sending(&senders),
                    state.map(state_option).unwrap_or_default()
                ));
            }
            Ok(!senders.is_empty())
        }
        Ok(output) => bail!(
            "`{} cleanup` failed ({}): {}",
            program.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => bail!(
            "{} not found, which takes away devices, routes and the nft table; expected it next to \
             weft itself",
            program.display()
        ),
        Err(error) => {
            Err(anyhow::Error::new(error)
                .context(format!("cannot run {} cleanup", program.display())))
        }
    }
}
