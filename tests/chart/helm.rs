use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

/// Folder in which `make kubernetes` puts helm.
const DIR: &str = "WEFT_KUBERNETES_DIR";
const NAMESPACE: &str = "liqo";
/// Error of an API server that took a minute for what takes milliseconds. Templates that ask it end
/// there, before anything is written.
const STOOD_STILL: &str = "unable to return a response in the time allotted";
const TRIES: usize = 3;

/// Set to write what is generated instead of comparing it.
pub(crate) const BLESS: &str = "WEFT_BLESS";

/// Minimal values that a cluster needs. CRDs are compared where they are made.
pub(crate) const MIN_VALUES: &str = "\
discovery: {config: {clusterID: rome}}
ipam: {podCIDRs: [10.200.0.0/16], serviceCIDR: 10.96.0.0/12}
crds: {liqo: never, weft: never}
";

/// Required values, and one for everything else.
pub(crate) const EVERYTHING: &str = include_str!("values/everything.yaml");

/// helm, version 3.
pub(crate) struct Helm {
    program: PathBuf,
    /// Kubeconfig of the cluster that it works on, if any.
    kubeconfig: Option<PathBuf>,
}

impl Helm {
    /// `None` if there is none, which is printed as the reason why a test does nothing.
    pub(crate) fn find() -> Option<Self> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
        let built = std::env::var_os(DIR).map(PathBuf::from);
        let built = built.unwrap_or_else(|| home.join(".cache/weft/kubernetes/bin"));
        let found = std::iter::once(built)
            .chain(std::env::split_paths(&path))
            .map(|dir| Self { program: dir.join("helm"), kubeconfig: None })
            .find(|helm| helm.version().starts_with("v3."));
        if found.is_none() {
            weft_tests::skip("no helm 3 here; `make kubernetes` builds it");
        }
        found
    }

    /// Helm for that cluster.
    pub(crate) fn on(self, kubeconfig: PathBuf) -> Self {
        Self { kubeconfig: Some(kubeconfig), ..self }
    }

    /// Manifests that the chart is rendered to, as text.
    pub(crate) fn template(&self, values: &[&str]) -> Result<String, String> {
        // A helm that was built by hand takes any cluster for an old one.
        self.with(&["template", "weft", "--kube-version=1.34.0"], values)
    }

    /// Does something with the chart. Of several values, the last counts.
    pub(crate) fn with(&self, arguments: &[&str], values: &[&str]) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        let (chart, mut files) = (chart().display().to_string(), Vec::new());
        for (i, text) in values.iter().enumerate() {
            let file = dir.path().join(format!("{i}.yaml"));
            std::fs::write(&file, text).unwrap();
            files.push(format!("--values={}", file.display()));
        }
        let files = files.iter().map(String::as_str);
        let arguments = arguments.iter().copied().chain([chart.as_str()]).chain(files);
        self.run(&arguments.collect::<Vec<_>>())
    }

    /// The manifests that it is rendered to.
    pub(crate) fn objects(&self, values: &[&str]) -> Vec<Value> {
        parse(&self.template(values).unwrap())
    }

    /// Output of helm, or its error.
    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = Command::new(&self.program);
        command.args(arguments).args(["--namespace", NAMESPACE]);
        if let Some(kubeconfig) = &self.kubeconfig {
            // Caches of clusters must not outlive them.
            command.env("KUBECONFIG", kubeconfig).env("HOME", kubeconfig.parent().unwrap());
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut tries = 0;
        loop {
            tries += 1;
            let output = command.output().unwrap();
            let printed = text(&output.stdout) + &text(&output.stderr);
            if output.status.success() {
                return Ok(text(&output.stdout));
            }
            if tries == TRIES || !printed.contains(STOOD_STILL) {
                return Err(printed);
            }
            eprintln!("once more, since the machine stood still: {printed}");
        }
    }

    fn version(&self) -> String {
        let output = Command::new(&self.program).args(["version", "--short"]).output();
        output
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default()
    }
}

/// Its folder.
pub(crate) fn chart() -> PathBuf {
    PathBuf::from("../deploy/chart")
}

/// Every document of a text that is not empty.
pub(crate) fn parse(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    documents.into_iter().filter(|document| !document.is_null()).collect()
}
