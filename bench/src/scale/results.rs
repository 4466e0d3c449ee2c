//! The report: figures beside their bars, and a section of `RESULTS.md`.

use std::fmt::{self, Write as _};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};
use api_server::ApiServer;
use jiff::Zoned;
use scale::{RequestCount, Size};

use crate::machine;

/// Marks the section of this benchmark in a file with others.
const BEGIN: &str = "<!-- bench scale: begin -->";
const END: &str = "<!-- bench scale: end -->";
const TITLE: &str = "# Results\n\nWritten by the benchmarks themselves; figures of different machines cannot be \
                     compared.\n";

/// Upper bounds for 100 peerings on 200 nodes and two cores, each with what was measured.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bar {
    /// Time less that of the same writes; see [`Report::baseline`].
    Apply(Duration),
    Endpoint(Duration),
    Peering(Duration),
    /// Shares of a core.
    Heartbeats(f64),
    Pods(f64),
    /// A second.
    PodWrites(f64),
    /// Bytes.
    Rss(u64),
}

/// A line of the table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) figure: String,
    pub(crate) measured: String,
    pub(crate) bar: Option<Bar>,
}

/// All of a run.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) size: Size,
    pub(crate) rows: Vec<Row>,
    /// Within a minute without changes.
    pub(crate) requests: Vec<RequestCount>,
    /// Writes from the peerings' application until the controller is quiet.
    pub(crate) writes: Vec<RequestCount>,
    /// Time of the same writes as those of figure `apply` without weft.
    pub(crate) baseline: Option<Duration>,
}

impl Bar {
    /// The bar, what to aim for, and whether the bar is met.
    fn texts(self, baseline: Option<Duration>) -> (String, &'static str, bool) {
        let text = str::to_owned;
        match self {
            Self::Apply(took) => {
                let relative = baseline.map_or(Duration::ZERO, |baseline| baseline.mul_f64(1.5));
                let bar = relative.max(Duration::from_secs(10));
                let of_writes = match baseline {
                    Some(_) => format!("10 s or {} (1.5 x the same writes)", seconds(relative)),
                    None => text("10 s"),
                };
                (of_writes, "5 s", took <= bar)
            }
            Self::Endpoint(took) => (text("100 ms"), "20 ms", took <= Duration::from_millis(100)),
            Self::Peering(took) => (text("1 s"), "300 ms", took <= Duration::from_secs(1)),
            Self::Heartbeats(share) => (text("1 %"), "0.3 %", share <= 0.01),
            Self::Pods(share) => (text("5 %"), "", share <= 0.05),
            Self::PodWrites(rate) => (text("1"), "", rate <= 1.0),
            Self::Rss(bytes) => (text("60 MB"), "", bytes <= 60_000_000),
        }
    }
}

impl Report {
    /// Writes the report into a file in place of the one it has, or at its end.
    pub(crate) fn write_into(&self, path: &Path) -> Result<()> {
        let before = fs::read_to_string(path).unwrap_or_else(|_| TITLE.to_owned());
        let section = format!("{BEGIN}\n{self}{END}\n");
        fs::write(path, replace_section(&before, &section))
            .with_context(|| format!("writing {}", path.display()))
    }
}

fn replace_section(text: &str, section: &str) -> String {
    let around = text.split_once(BEGIN).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(END)?;
        Some((before, after.trim_start_matches('\n')))
    });
    match around {
        Some((before, after)) => format!("{before}{section}{after}"),
        None => format!("{}\n\n{section}", text.trim_end()),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Size { nodes, peerings } = self.size;
        writeln!(f, "## Control plane: {nodes} nodes, {peerings} peerings\n")?;
        let date = Zoned::now().date();
        writeln!(
            f,
            "{date}, weft {}, {}, {}\n",
            revision(),
            machine::describe(),
            ApiServer::versions()
        )?;
        writeln!(
            f,
            "Bars are for 100 peerings on 200 nodes and two cores, which the API server shares.\n"
        )?;
        writeln!(f, "| figure | measured | bar | aim | met |\n|---|---|---|---|---|")?;
        for row in &self.rows {
            let (bar, aim, met) = match row.bar.map(|bar| bar.texts(self.baseline)) {
                Some((bar, aim, met)) => (bar, aim, if met { "yes" } else { "no" }),
                None => (String::new(), "", ""),
            };
            writeln!(f, "| {} | {} | {bar} | {aim} | {met} |", row.figure, row.measured)?;
        }
        let title = "Writes from the peerings' application until the controller is quiet";
        write_counts(f, title, &self.writes)?;
        let title = "Requests to the API server within a minute in which nothing changes";
        write_counts(f, title, &self.requests)
    }
}

fn write_counts(f: &mut fmt::Formatter<'_>, title: &str, counts: &[RequestCount]) -> fmt::Result {
    if counts.is_empty() {
        return Ok(());
    }
    writeln!(f, "\n{title}:\n\n| program | verb | resource | count |\n|---|---|---|---|")?;
    for RequestCount { user, verb, resource, count } in counts {
        writeln!(f, "| {user} | {verb} | {resource} | {count} |")?;
    }
    Ok(())
}

/// Version, with the commit in a git repository.
fn revision() -> String {
    let mut revision = env!("CARGO_PKG_VERSION").to_owned();
    let git = Command::new("git").args(["describe", "--always", "--dirty"]).output();
    if let Some(out) = git.ok().filter(|out| out.status.success()) {
        let commit = String::from_utf8_lossy(&out.stdout);
        let _ = write!(revision, " ({})", commit.trim());
    }
    revision
}

/// Formats a time with its significant digits.
pub(crate) fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        return format!("{:.0} ms", time.as_secs_f64() * 1e3);
    }
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_section_replaces_the_old_one_alone() {
        let section = |text: &str| format!("{BEGIN}\n{text}\n{END}\n");
        let first = replace_section("# Results\n", &section("one"));
        assert_eq!(first, format!("# Results\n\n{}", section("one")));
        let other = first + "\n## Other\n";
        let second = replace_section(&other, &section("two"));
        assert_eq!(second, other.replace("one", "two").replace("\n\n## Other", "\n## Other"));
        assert_eq!(replace_section(&second, &section("two")), second);
    }

    #[test]
    fn apply_bar_follows_the_same_writes() {
        let took = Bar::Apply(Duration::from_secs(14));
        assert!(!took.texts(None).2);
        assert!(took.texts(Some(Duration::from_secs(10))).2);
        assert!(!took.texts(Some(Duration::from_secs(9))).2);
    }
}
