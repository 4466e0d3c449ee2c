use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::Signal;

use super::output::say;
use super::process::{self, Identity};
use super::rundir::{self, RunDir, Selection, default_state_dir};
use super::{host, preconditions, supervise, workloads};

mod lost;

/// How long a process may take before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// How long a process that was just killed may still hold its lock.
const DYING: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "\
Examples:
    weft down
    weft down --cluster rome --purge";

/// Take everything away: processes, devices, routes, nft table, run directory.
///
/// Also what a killed `weft up` left. The state directory (granted addresses, generated keys)
/// stays unless --purge is given. Run again, it finds nothing to do.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DownArgs {
    #[command(flatten)]
    selection: Selection,
    /// The state directory, if the run directory is gone and cannot tell [default:
    /// /var/lib/weft/CLUSTER].
    #[arg(long, value_name = "DIR", env = "WEFT_STATE_DIR")]
    state_dir: Option<PathBuf>,
    /// Remove the state directory too: granted addresses and generated keys are lost.
    #[arg(long)]
    purge: bool,
}

pub(crate) fn run(args: &DownArgs) -> anyhow::Result<ExitCode> {
    preconditions::check_rights()?;
    let Some(dir) = args.selection.find()? else {
        stop_lost(&args.selection)?;
        return purge_alone(args);
    };
    let record = dir.record()?;
    if record.is_none() {
        dir.check_ours().context("nothing was removed")?;
    }
    stop_supervisor(&dir)?;
    lost::supervisors(dir.path()).iter().for_each(stop_lost_supervisor);
    // Held until the end, so that no new supervisor starts meanwhile.
    let _lock = supervise::lock(&dir, "weft down")?;
    stop_processes(&dir)?;
    let netns = record.as_ref().map_or(0, |record| record.netns);
    if netns == 0 || netns == host::netns() {
        clean_up_host()?;
    } else {
        say(
            "it ran in another network namespace, whose devices and routes stay; if that is still \
             there, run `route-agent cleanup` in it",
        );
    }
    fs::remove_dir_all(dir.path())
        .with_context(|| format!("cannot remove {}", dir.path().display()))?;
    say(&format!("removed {}", dir.path().display()));
    let state = record.and_then(|record| record.state_dir);
    state.map_or(Ok(()), |state| end_of_state(&state, args.purge))?;
    Ok(ExitCode::SUCCESS)
}

/// Someone removed the run directory. What was started from it is found all the same, and what is
/// in the kernel is ours if no other run directory is of this network namespace.
fn stop_lost(selection: &Selection) -> anyhow::Result<()> {
    let dirs = lost::dirs(selection)?;
    if dirs.is_empty() {
        say(&format!("nothing runs here: no {}", selection.place().display()));
    }
    for dir in &dirs {
        say(&format!("{} was removed, but not what was started from it", dir.path().display()));
        lost::supervisors(dir.path()).iter().for_each(stop_lost_supervisor);
        stop_processes(dir)?;
        // They may have made it again.
        if dir.path().is_dir() {
            fs::remove_dir_all(dir.path())
                .with_context(|| format!("cannot remove {}", dir.path().display()))?;
        }
    }
    if !lost::others_are_here()? {
        clean_up_host()?;
    }
    Ok(())
}

fn stop_lost_supervisor(identity: &Identity) {
    if let Some(pidfd) = identity.open() {
        let gently = process::stop_and_wait(&pidfd, GRACE * 2 + Duration::from_secs(2));
        say(&format!("{} a supervisor without run directory (pid {})", verb(gently), identity.pid));
    }
}

/// With nothing left that runs, the state can still be meant.
fn purge_alone(args: &DownArgs) -> anyhow::Result<ExitCode> {
    let of_cluster = args.selection.cluster.as_ref().map(default_state_dir);
    match args.state_dir.clone().or(of_cluster) {
        Some(state) => end_of_state(&state, args.purge)?,
        None if args.purge => {
            bail!("which state to remove cannot be told; say --cluster ID or --state-dir DIR")
        }
        None => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn end_of_state(state: &Path, purge: bool) -> anyhow::Result<()> {
    if !state.exists() {
        return Ok(());
    }
    if purge {
        rundir::check_state(state).context("it was not removed")?;
        fs::remove_dir_all(state).with_context(|| format!("cannot remove {}", state.display()))?;
        say(&format!("removed {}", state.display()));
    } else {
        say(&format!(
            "kept {} (granted addresses, generated keys); --purge removes it",
            state.display()
        ));
    }
    Ok(())
}

fn stop_supervisor(dir: &RunDir) -> anyhow::Result<()> {
    let give_up = Instant::now() + DYING;
    let (held, pidfd) = loop {
        let Some(held) = supervise::supervisor_of(dir) else { return Ok(()) };
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

/// All are asked first, so that the waiting is shared.
fn stop_processes(dir: &RunDir) -> anyhow::Result<()> {
    let strays = process::strays(dir);
    let named = process::running(dir);
    let unnamed =
        strays.into_iter().map(|identity| ("a process without pid file".to_owned(), identity));
    let handles: Vec<_> = named
        .into_iter()
        .chain(unnamed)
        .filter_map(|(name, identity)| Some((name, identity.open()?, identity.pid)))
        .collect();
    for (name, pidfd, _) in &handles {
        // Its peer is to know that this is no restart.
        if name.starts_with("gateway-") {
            process::send(pidfd, Signal::USR1);
        }
        process::send(pidfd, Signal::TERM);
    }
    for (name, pidfd, pid) in &handles {
        let gently = process::stop_and_wait(pidfd, GRACE);
        if !process::ended(pidfd, Duration::ZERO) {
            bail!(
                "{name} (pid {pid}) does not end, not even when killed; see `ps -p {pid} -o stat,wchan`"
            );
        }
        say(&format!("{} {name} (pid {pid})", verb(gently)));
    }
    Ok(())
}

fn verb(gently: bool) -> &'static str {
    if gently { "stopped" } else { "killed" }
}

/// Devices, routes, rules and the nft table of this host: the route-agent made them and knows them.
fn clean_up_host() -> anyhow::Result<()> {
    let program: PathBuf = workloads::programs()?.join("route-agent");
    let run =
        Command::new(&program).arg("cleanup").stdin(Stdio::null()).stdout(Stdio::null()).output();
    match run {
        Ok(output) if output.status.success() => Ok(()),
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
