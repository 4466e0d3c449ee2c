//! Files with the results of all processors: figures as JSON, plots, and a section of `RESULTS.md`.

use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use anyhow::{Context, Result};

use crate::report::Report;
use crate::{plot, section};

/// Name of the section in `RESULTS.md`.
const SECTION: &str = "dataplane";

const INTRODUCTION: &str = "## Data plane: weft and the best of wireguard-go, gotatun and boringtun

Medians of pairs of slices in turns, and of their ratios, with the interval in which that lies with 95 % confidence. Control:
neighbouring slices of one tunnel. Bars are those of the processor's class: A if ring seals 1,420 bytes in less than 900 ns,
else S. Peers of lines *pod to pod* have no overlay. Method: `bench --help`.
";

/// Writes raw figures and plots into `results` beside `path`, and all processors' figures there
/// into a section of it. Lines that this run has not measured stay as they are.
pub(crate) fn write(mut report: Report, path: &Path) -> Result<()> {
    let dir = path.with_file_name("results");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let name = report.machine.file_name();
    let raw = dir.join(format!("{name}.json"));
    if let Some(Report { lines, .. }) = read(&raw)? {
        report.lines = lines.into_iter().chain(report.lines).collect();
    }
    let write = |path: &Path, text: String| {
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    write(&raw, to_json(&report)?)?;
    for (kind, svg) in plot::all(&report) {
        write(&dir.join(format!("{name}-{kind}.svg")), svg)?;
    }
    let mut body = INTRODUCTION.to_owned();
    for report in read_all(&dir)? {
        let _ = write!(body, "\n{report}");
        for (kind, _) in plot::all(&report) {
            let file = report.machine.file_name();
            let _ = writeln!(body, "\n![{kind}](results/{file}-{kind}.svg)");
        }
    }
    section::write(path, SECTION, &body)
}

/// One text line for each line of the comparison, so that a new run of one changes one.
fn to_json(report: &Report) -> Result<String> {
    let mut text = serde_json::to_string(report).context("writing JSON")?;
    for name in report.lines.keys() {
        let key = format!("\"{name}\":{{");
        text = text.replacen(&key, &format!("\n{key}"), 1);
    }
    Ok(text + "\n")
}

/// `None` if there is no such file.
fn read(path: &Path) -> Result<Option<Report>> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .with_context(|| format!("{}: remove it, or run another version", path.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("reading {}", path.display())),
    }
}

/// Reports of all processors, by the names of their files.
fn read_all(dir: &Path) -> Result<Vec<Report>> {
    let entries = fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    paths.iter().filter_map(|path| read(path).transpose()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn later_run_replaces_its_lines_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("RESULTS.md");
        let raw = dir.path().join("results/p-1-2-cores.json");
        write(report(&["tcp-1", "udp-64"]), &path).unwrap();
        let mut other = report(&["tcp-1"]);
        other.machine.cores = 8;
        write(other, &path).unwrap();
        let mut later = report(&["udp-64"]);
        later.lines.get_mut("udp-64").unwrap().best = "boringtun".to_owned();
        write(later, &path).unwrap();

        let stored = read(&raw).unwrap().unwrap();
        assert_eq!(stored.lines["tcp-1"], report(&["tcp-1"]).lines["tcp-1"]);
        assert_eq!(stored.lines["udp-64"].best, "boringtun");
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches("### ").count(), 2, "{text}");
        assert_eq!(fs::read_to_string(&raw).unwrap().lines().count(), 3);
        assert!(dir.path().join("results/p-1-2-cores-throughput.svg").exists());
    }
}
