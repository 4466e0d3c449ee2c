use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

/// Measures the control plane with many nodes and peerings on this machine.
///
/// etcd, kube-apiserver, fabric-controller and ipam are the real programs. Nodes, gateways and kubelets
/// are simulated in this process: each route-agent and gateway has connections and a watch of its own
/// and acknowledges what it reads at once.
///
/// Figures:
///
/// * apply: all peerings applied at once, until every node and gateway has acknowledged them, and
///   until the controller is quiet (always done). The same writes are then sent to an API server
///   without weft, 16 at a time.
/// * heartbeats: CPU of the controller while nothing but Nodes, Leases and Connections is renewed.
/// * idle: every request to the API server within a minute without heartbeats, by program.
/// * pods: 1,000 pods a minute outside their nodes' pod CIDRs, each for 15 s. The
///   next figure begins once all are gone.
/// * endpoint: a GatewayClient's endpoint changed, until its gateway's watch shows it; 100 times.
/// * peering: one more peering, until the last node has acknowledged it; 20 times.
///
/// A figure takes as many samples as fit into three minutes. Needs the weft programs built with
/// --release and what `make kubernetes` builds. All that a run starts ends with it.
#[derive(Debug, Parser)]
#[command(verbatim_doc_comment)]
pub(crate) struct ScaleArgs {
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=700))]
    pub(crate) nodes: u16,
    /// Peerings that are applied at once; figure `peering` adds 20.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=360))]
    pub(crate) peerings: u16,
    /// Figures to measure; all unless given. Can be repeated.
    #[arg(long, value_enum)]
    pub(crate) only: Vec<FigureName>,
    /// Time for the whole run, such as 20m; figures that do not fit are left out.
    #[arg(long, default_value = "25m", value_name = "TIME", value_parser = duration)]
    pub(crate) limit: Duration,
    /// Also write the report into this Markdown file, in place of the one that it has.
    #[arg(long, value_name = "FILE")]
    pub(crate) results: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FigureName {
    Apply,
    Heartbeats,
    Idle,
    Pods,
    Endpoint,
    Peering,
}

impl ScaleArgs {
    pub(crate) fn selects(&self, figure: FigureName) -> bool {
        self.only.is_empty() || self.only.contains(&figure)
    }

    pub(crate) fn size(&self) -> scale::Size {
        scale::Size { nodes: self.nodes.into(), peerings: self.peerings.into() }
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let expected = || "expected a time such as 20m or 90s".to_owned();
    let signed: jiff::SignedDuration = text.parse().map_err(|_| expected())?;
    signed.try_into().map_err(|_| expected())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_figures_are_wanted_unless_some_are_named() {
        let all = ScaleArgs::parse_from(["scale"]);
        assert!(all.selects(FigureName::Apply) && all.selects(FigureName::Peering));
        assert_eq!(all.size(), scale::Size { nodes: 200, peerings: 100 });
        let one = ScaleArgs::parse_from(["scale", "--only", "pods", "--limit", "90s"]);
        assert!(one.selects(FigureName::Pods) && !one.selects(FigureName::Idle));
        assert_eq!(one.limit, Duration::from_secs(90));
        assert!(ScaleArgs::try_parse_from(["scale", "--nodes", "0"]).is_err());
    }
}
