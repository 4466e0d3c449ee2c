//! Commands that deploy/LIQO.md has for the way to weft and back, as they stand there.

use std::fs;
use std::slice;

use anyhow::{Context, Result, ensure};
use weft_tests::Kubernetes;
use weft_tests::kubernetes::WEFT;

use crate::stage::step;

const GUIDE: &str = "../deploy/LIQO.md";
/// Headings, and the programs of the commands below.
const THERE: (&str, [&str; 4]) =
    ("## From Liqo's network to weft\n", ["helm", "weft", "weft", "helm"]);
const BACK: (&str, [&str; 4]) =
    ("## Back to Liqo's network\n", ["helm", "fabric-controller", "helm", "helm"]);
/// Beginning of the command for each GatewayServer.
const PATCH: &str = "`kubectl patch gatewayserver ";
/// The same of the command that makes Liqo look at stored addresses again.
const RESTART: &str = "`kubectl rollout restart ";
/// Programs whose images the chart uses.
const IMAGES: [&str; 4] = ["fabric-controller", "gateway", "ipam", "route-agent"];

pub(super) struct Guide {
    there: [String; 4],
    back: [String; 4],
    patch: String,
    restart: String,
}

impl Guide {
    /// # Errors
    ///
    /// If it has other commands.
    pub(super) fn read() -> Result<Self> {
        let guide = fs::read_to_string(GUIDE).context("not started in the folder `tests`")?;
        let inline = |beginning: &str| {
            let (_, rest) = guide.split_once(beginning).with_context(|| beginning.to_owned())?;
            let (rest, _) = rest.split_once('`').context("a command ends")?;
            let command = format!("{beginning}{rest}").replace('\n', " ");
            anyhow::Ok(command.trim_start_matches('`').to_owned())
        };
        let (patch, restart) = (inline(PATCH)?, inline(RESTART)?);
        Ok(Self { there: commands(&guide, THERE)?, back: commands(&guide, BACK)?, patch, restart })
    }

    pub(super) fn switch_liqo_off(&self, cluster: &Kubernetes) -> Result<()> {
        run(cluster, &self.there[0])
    }

    pub(super) fn adopt(&self, cluster: &Kubernetes) -> Result<()> {
        self.there[1..3].iter().try_for_each(|line| run(cluster, line))
    }

    pub(super) fn install_weft(&self, cluster: &Kubernetes) -> Result<()> {
        let line = &self.there[3];
        let (_, registry) = line.split_once("registry=").context("it names a registry")?;
        let registry = registry.split(' ').next().unwrap_or_default();
        let version = env!("CARGO_PKG_VERSION");
        let names = IMAGES.map(|image| format!("{registry}/weft/{image}:{version}"));
        cluster.name_image(WEFT, &names)?;
        run_beside(cluster, line, || cluster.name_ipam())
    }

    /// Fills in the name, the namespace and the port of a GatewayServer.
    pub(super) fn set_node_port(&self, cluster: &Kubernetes, values: [&str; 3]) -> Result<()> {
        let [name, namespace, port] = values;
        let line = self.patch.replace("NAMESPACE", namespace).replace("NAME", name);
        run(cluster, &line.replace("PORT", port))
    }

    pub(super) fn give_back(&self, cluster: &Kubernetes) -> Result<()> {
        let [upgrade, withdraw, uninstall, liqo] = &self.back;
        step("weft is upgraded", || run(cluster, upgrade))?;
        step("weft is withdrawn", || run(cluster, withdraw))?;
        step("weft is uninstalled", || run(cluster, uninstall))?;
        step("Liqo's network is switched on", || run(cluster, liqo))
    }

    /// Has Liqo look at stored addresses again.
    pub(super) fn restart_liqo(&self, cluster: &Kubernetes) -> Result<()> {
        run(cluster, &self.restart)
    }
}

fn commands<const N: usize>(
    guide: &str,
    (heading, programs): (&str, [&str; N]),
) -> Result<[String; N]> {
    let (_, chapter) = guide.split_once(heading).with_context(|| heading.to_owned())?;
    let lines = chapter.lines().skip_while(|line| !line.starts_with("    "));
    let block: Vec<_> = lines.take_while(|line| line.starts_with("    ")).collect();
    let joined = block.join("\n").replace("\\\n", " ");
    let commands: Vec<_> = joined.lines().map(|line| line.trim().to_owned()).collect();
    let found: Vec<_> = commands.iter().filter_map(|line| line.split(' ').next()).collect();
    ensure!(found == programs, "{heading}{commands:#?}");
    commands.try_into().ok().context("as many commands as programs")
}

fn run(cluster: &Kubernetes, line: &str) -> Result<()> {
    let line = format!("export KUBECONFIG=$PWD/{}.yaml; {line}", cluster.spec.id);
    cluster.shell(slice::from_ref(cluster), &line).map(drop)
}

/// Names of Services are in no DNS here: while helm waits, programs get the address of ipam.
fn run_beside(cluster: &Kubernetes, line: &str, f: impl FnOnce() -> Result<()>) -> Result<()> {
    std::thread::scope(|scope| {
        let ran = scope.spawn(|| run(cluster, line));
        f()?;
        ran.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
