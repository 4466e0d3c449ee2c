//! The report: figures beside their bars, and a section of `RESULTS.md`.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use api_server::ApiServer;
use jiff::Zoned;
use scale::{RequestCount, Size};

use crate::machine::Machine;
use crate::section;

/// Name of the section in `RESULTS.md`.
const SECTION: &str = "scale";

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
        section::write(path, SECTION, &self.to_string())
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
            section::revision(),
            Machine::this(),
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
    fn apply_bar_follows_the_same_writes() {
        let took = Bar::Apply(Duration::from_secs(14));
        assert!(!took.texts(None).2);
        assert!(took.texts(Some(Duration::from_secs(10))).2);
        assert!(!took.texts(Some(Duration::from_secs(9))).2);
    }
}
