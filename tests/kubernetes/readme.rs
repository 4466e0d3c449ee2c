//! The commands that the README has for two clusters, as they stand there.

use std::fs;

use anyhow::{Context, Result, ensure};
use weft_tests::Kubernetes;
use weft_tests::kubernetes::WEFT;

const README: &str = "../README.md";
const HEADING: &str = "## In Kubernetes\n";
/// The programs whose images the chart uses.
const IMAGES: [&str; 4] = ["fabric-controller", "gateway", "ipam", "route-agent"];

pub(crate) struct Readme {
    commands: Vec<String>,
}

impl Readme {
    /// # Errors
    ///
    /// If it has other commands than two installations, a connection and a look.
    pub(crate) fn read() -> Result<Self> {
        let readme = fs::read_to_string(README).context("not started in the folder `tests`")?;
        let (_, chapter) = readme.split_once(HEADING).context("the README has that chapter")?;
        let lines = chapter.lines().skip_while(|line| !line.starts_with("    "));
        let block: Vec<_> = lines.take_while(|line| line.starts_with("    ")).collect();
        let joined = block.join("\n").replace("\\\n", " ");
        let without_comment = |line: &str| line.split(" #").next().unwrap_or_default().to_owned();
        let mut commands: Vec<_> = joined.lines().map(str::trim).map(without_comment).collect();
        let programs = commands.iter().filter_map(|line| line.split(' ').next());
        let programs: Vec<_> = programs.collect();
        ensure!(programs == ["helm", "helm", "liqoctl", "weft"], "its commands are {commands:#?}");
        let (start, _) = commands[1].split_once(" ...").context("the second one is the same")?;
        let the_same = commands[0].replace("rome", "milan");
        ensure!(the_same.starts_with(start), "{start} is not {the_same}");
        commands[1] = the_same;
        Ok(Self { commands })
    }

    /// Installs weft in both clusters.
    pub(crate) fn install(&self, clusters: &[Kubernetes; 2]) -> Result<()> {
        let (_, registry) =
            self.commands[0].split_once("registry=").context("it names a registry")?;
        let registry = registry.split(' ').next().unwrap_or_default();
        let version = env!("CARGO_PKG_VERSION");
        let names = IMAGES.map(|image| format!("{registry}/weft/{image}:{version}"));
        for (cluster, line) in clusters.iter().zip(&self.commands) {
            cluster.name_image(WEFT, &names)?;
            std::thread::scope(|scope| {
                let installed = scope.spawn(|| clusters[0].shell(clusters, line));
                cluster.name_ipam()?;
                installed.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map(drop)
            })?;
        }
        Ok(())
    }

    /// Joins them, and checks the result.
    pub(crate) fn connect(&self, clusters: &[Kubernetes; 2]) -> Result<()> {
        clusters[0].shell(clusters, &self.commands[2])?;
        let shown = clusters[0].shell(clusters, &self.commands[3])?;
        ensure!(shown.contains("Connected"), "{shown}");
        Ok(())
    }
}
