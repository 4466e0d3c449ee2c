//! Memory and open files of every process of weft, over time.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use weft_tests::{Cluster, resident_bytes};

/// Growth of RSS allowed from the first third of the time to the last: a share, and bytes.
const GROWTH: f64 = 0.05;
const ALLOWANCE: f64 = 2e6;

/// Footprints of each process, by name and ID.
#[derive(Debug, Default)]
pub(crate) struct Footprints {
    taken: usize,
    by_process: BTreeMap<(String, i32), Vec<Footprint>>,
}

#[derive(Clone, Copy, Debug)]
struct Footprint {
    rss_bytes: u64,
    files: usize,
}

impl Footprints {
    pub(crate) fn sample(&mut self, clusters: &[Cluster]) {
        self.taken += 1;
        for cluster in clusters {
            for (pid, line) in cluster.head().processes() {
                let Some(name) = program(&line) else { continue };
                // It may just have ended.
                let (Ok(rss_bytes), Ok(files)) = (resident_bytes(pid), open_files(pid)) else {
                    continue;
                };
                let name = format!("{} {name}", cluster.spec.id);
                let footprint = Footprint { rss_bytes, files };
                self.by_process.entry((name, pid)).or_default().push(footprint);
            }
        }
    }

    /// Fails if a process that was there all the time is larger at the end than at the beginning.
    pub(crate) fn are_flat(&self) -> Result<()> {
        let mut checked = 0;
        for ((name, _), samples) in self.lasting() {
            checked += 1;
            let third = samples.len() / 3;
            let (first, last) = (&samples[..third], &samples[samples.len() - third..]);
            let (before, after) = (mean_rss(first), mean_rss(last));
            let most = before * (1.0 + GROWTH) + ALLOWANCE;
            ensure!(after <= most, "{name} grew from {before:.0} to {after:.0} bytes");
            // A file that is open for a moment only is not in the minimum.
            let (before, after) = (min_files(first), min_files(last));
            ensure!(after <= before, "{name} had {before:?} open files, and now {after:?}");
        }
        // weft up, controller, ipam, agent and gateway, in each cluster.
        ensure!(checked >= 10, "only {checked} processes lasted: {self}");
        Ok(())
    }

    fn lasting(&self) -> impl Iterator<Item = (&(String, i32), &Vec<Footprint>)> {
        self.by_process.iter().filter(|(_, samples)| samples.len() == self.taken)
    }
}

/// The latest.
impl fmt::Display for Footprints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for ((name, _), samples) in self.lasting() {
            let Some(Footprint { rss_bytes, files }) = samples.last() else { continue };
            write!(f, "{between}{name} {:.1} MB {files} fds", *rss_bytes as f64 / 1e6)?;
            between = ", ";
        }
        Ok(())
    }
}

/// The name of a program of weft's, from its command line; not of tools that run for a moment.
fn program(line: &str) -> Option<&str> {
    let name = Path::new(line.split(' ').next()?).file_name()?.to_str()?;
    let is_ours = ["weft", "fabric-controller", "ipam", "route-agent", "gateway"].contains(&name);
    is_ours.then_some(name)
}

fn open_files(pid: i32) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

fn mean_rss(samples: &[Footprint]) -> f64 {
    samples.iter().map(|sample| sample.rss_bytes as f64).sum::<f64>() / samples.len() as f64
}

fn min_files(samples: &[Footprint]) -> Option<usize> {
    samples.iter().map(|sample| sample.files).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn footprints(rss_bytes: [u64; 6], files: [usize; 6]) -> Footprints {
        let samples = rss_bytes.into_iter().zip(files);
        let samples: Vec<_> =
            samples.map(|(rss_bytes, files)| Footprint { rss_bytes, files }).collect();
        let all = (0..10).map(|pid| (("gateway".to_owned(), pid), samples.clone()));
        Footprints { taken: 6, by_process: all.collect() }
    }

    #[test]
    fn growth_is_found_and_transients_are_not() {
        let (flat, few) = ([10_000_000; 6], [20; 6]);
        footprints(flat, few).are_flat().unwrap();
        footprints(flat, [20, 20, 20, 20, 20, 25]).are_flat().unwrap();
        assert!(footprints(flat, [20, 20, 20, 20, 21, 21]).are_flat().is_err());
        let grown = [10_000_000, 10_000_000, 11_000_000, 12_000_000, 12_600_000, 12_600_000];
        assert!(footprints(grown, few).are_flat().is_err());
    }
}
