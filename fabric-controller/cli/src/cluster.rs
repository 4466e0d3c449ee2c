//! Selection of a Kubernetes cluster.

use std::path::PathBuf;

use clap::builder::BoolishValueParser;

use super::selection::{self, Selection};

/// Which cluster of Kubernetes is meant, if one is.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "In Kubernetes")]
pub(crate) struct ClusterArgs {
    /// Ask the API server of a Kubernetes cluster: the one that KUBECONFIG names, or
    /// ~/.kube/config, or that of the pod this runs in. Implied by KUBECONFIG where no fabric runs
    /// on this host.
    #[arg(long, env = "WEFT_KUBERNETES", value_parser = BoolishValueParser::new())]
    kubernetes: bool,
    /// As --kubernetes, of the cluster that this kubeconfig names.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// As --kubernetes, of this context of the kubeconfig instead of its current one.
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
}

impl ClusterArgs {
    /// Returns true if a cluster is meant, not a fabric of this host. `KUBECONFIG` alone means its cluster
    /// where no fabric of this host is named, and none runs.
    pub(crate) fn is_meant(&self, host: &Selection) -> anyhow::Result<bool> {
        if self.kubernetes || self.kubeconfig.is_some() || self.context.is_some() {
            return Ok(true);
        }
        let names_host = host.cluster.is_some() || host.run_dir.is_some();
        let named = std::env::var_os("KUBECONFIG").is_some_and(|file| !file.is_empty());
        Ok(named && !names_host && selection::all()?.is_empty())
    }
}
