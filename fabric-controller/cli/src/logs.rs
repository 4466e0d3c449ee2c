//! `weft logs`: prints the processes' logs.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use fabric_supervisor::log_file::{TAIL, tail};
use fabric_supervisor::rundir::RunDir;

use super::output;
use super::selection::Selection;

const EXAMPLES: &str = "\
Examples:
  Everything that was said lately:
    weft logs
  One gateway, and what comes:
    weft logs -f gateway-liqo-tenant-milan-client";

/// Print the logs of the fabric's processes on this host.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct LogsArgs {
    /// Name of a process, or the beginning of one [default: all].
    process: Option<String>,
    #[command(flatten)]
    selection: Selection,
    /// How many of the last lines of each.
    #[arg(short = 'n', long, default_value_t = 50, value_name = "LINES")]
    lines: usize,
    /// Go on printing what is written.
    #[arg(short, long)]
    follow: bool,
}

pub(crate) fn run(args: &LogsArgs) -> anyhow::Result<ExitCode> {
    let dir = args.selection.require()?;
    let mut followed = Vec::new();
    for (name, path) in logs(&dir, args.process.as_deref())? {
        let (text, position) = tail(&path, TAIL, args.lines)
            .with_context(|| format!("cannot read {}", path.display()))?;
        output::print(&prefixed(&name, &text))?;
        followed.push((name, path, position));
    }
    if !args.follow {
        return Ok(ExitCode::SUCCESS);
    }
    loop {
        thread::sleep(Duration::from_millis(200));
        for (name, path, position) in &mut followed {
            // Between two looks the log may be put aside: then it is read on from its start.
            let Ok(text) = read_on(path, position) else { continue };
            output::print(&prefixed(name, &text))?;
        }
    }
}

fn logs(dir: &RunDir, wanted: Option<&str>) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let folder = dir.logs();
    let entries = fs::read_dir(&folder)
        .with_context(|| format!("cannot read folder {}", folder.display()))?;
    let mut all: Vec<_> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_name()?.to_str()?.strip_suffix(".log")?.to_owned();
            Some((name, path))
        })
        .collect();
    all.sort();
    let Some(wanted) = wanted else { return Ok(all) };
    if let Some(exact) = all.iter().find(|(name, _)| name == wanted) {
        return Ok(vec![exact.clone()]);
    }
    let names: Vec<_> = all.iter().map(|(name, _)| name.clone()).collect();
    all.retain(|(name, _)| name.starts_with(wanted));
    if all.is_empty() {
        bail!("no process {wanted:?} has a log here; expected one of {}", names.join(", "));
    }
    Ok(all)
}

/// The whole lines written since `position`, which is moved past them.
fn read_on(path: &Path, position: &mut u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    if file.metadata()?.len() < *position {
        *position = 0;
    }
    file.seek(SeekFrom::Start(*position))?;
    let mut bytes = Vec::new();
    file.take(TAIL).read_to_end(&mut bytes)?;
    bytes.truncate(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |last| last + 1));
    *position += bytes.len() as u64;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn prefixed(name: &str, text: &str) -> String {
    text.lines().map(|line| format!("{name}: {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use fabric_supervisor::log_file::last_line;

    use super::*;

    #[test]
    fn following_gives_whole_lines_and_survives_a_cut_log() {
        let path = std::env::temp_dir().join(format!("weft-log-{}", std::process::id()));
        fs::write(&path, "one\ntwo\nthr").unwrap();
        let (text, mut position) = tail(&path, TAIL, 2).unwrap();
        assert_eq!(text, "two\nthr\n");
        fs::write(&path, "one\ntwo\nthree\nfo").unwrap();
        assert_eq!(read_on(&path, &mut position).unwrap(), "ee\n");
        fs::write(&path, "new\n").unwrap();
        assert_eq!(read_on(&path, &mut position).unwrap(), "new\n");
        assert_eq!(last_line(&path), Some("new".to_owned()));
        fs::remove_file(&path).unwrap();
    }
}
