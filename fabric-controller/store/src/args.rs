use std::path::PathBuf;

use clap::builder::BoolishValueParser;

/// Heading in the help text.
const PLACE: &str = "Where the resources are: in Kubernetes, or in directories";

/// Place of the store, the same for every program of a cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct StoreArgs {
    /// Read and write the resources of a Kubernetes cluster: in a pod that of its service account,
    /// elsewhere the one that KUBECONFIG names, or ~/.kube/config.
    #[arg(
        long,
        env = "WEFT_KUBERNETES",
        help_heading = PLACE,
        value_parser = BoolishValueParser::new(),
        conflicts_with_all = ["manifests", "run_dir", "state_dir"]
    )]
    pub kubernetes: bool,
    /// As --kubernetes, of the cluster that this kubeconfig names.
    #[arg(
        long,
        value_name = "FILE",
        help_heading = PLACE,
        conflicts_with_all = ["manifests", "run_dir", "state_dir"]
    )]
    pub kubeconfig: Option<PathBuf>,
    /// The namespace that weft is installed in, with the cluster's ID and Networks [default: in a
    /// pod that of its service account, elsewhere liqo].
    #[arg(
        long,
        value_name = "NAMESPACE",
        help_heading = PLACE,
        conflicts_with_all = ["manifests", "run_dir", "state_dir"]
    )]
    pub liqo_namespace: Option<String>,
    /// Directory of the user's manifests (*.yaml, *.yml, *.json); never written to.
    #[arg(long, env = "WEFT_MANIFESTS", value_name = "DIR", help_heading = PLACE)]
    pub manifests: Option<PathBuf>,
    /// Directory of what is gone after a reboot: published config, status, sockets, logs. Needed
    /// unless --kubernetes is given.
    #[arg(long, env = "WEFT_RUN_DIR", value_name = "DIR", help_heading = PLACE)]
    pub run_dir: Option<PathBuf>,
    /// Directory of what must outlive a reboot: granted prefixes and addresses, generated keys.
    #[arg(long, env = "WEFT_STATE_DIR", value_name = "DIR", help_heading = PLACE)]
    pub state_dir: Option<PathBuf>,
}

impl StoreArgs {
    /// Directories, of which those of the manifests and of the state may be absent.
    pub fn directories(
        manifests: Option<PathBuf>,
        run_dir: PathBuf,
        state_dir: Option<PathBuf>,
    ) -> Self {
        let run_dir = Some(run_dir);
        let (kubernetes, kubeconfig, liqo_namespace) = (false, None, None);
        Self { kubernetes, kubeconfig, liqo_namespace, manifests, run_dir, state_dir }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::store::Store;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        store: StoreArgs,
    }

    fn open(line: &[&str]) -> Result<Store, String> {
        let line = Line::try_parse_from(["x"].iter().chain(line)).map_err(|e| e.to_string())?;
        Store::open(&line.store).map_err(|error| error.to_string())
    }

    #[test]
    fn no_store_or_two_is_error_with_expected_options() {
        let error = open(&["--manifests", "/m"]).unwrap_err();
        assert!(error.contains("--run-dir") && error.contains("--kubernetes"), "{error}");
        let error = open(&["--kubernetes", "--run-dir", "/r"]).unwrap_err();
        assert!(error.contains("'--kubernetes' cannot be used with '--run-dir"), "{error}");
        let error = open(&["--kubeconfig", "/k", "--run-dir", "/r"]).unwrap_err();
        assert!(error.contains("cannot be used with '--run-dir"), "{error}");
        let error = open(&["--kubeconfig", "/nowhere"]).unwrap_err();
        assert!(error.starts_with("cannot find out how to reach the API server"), "{error}");
    }
}
