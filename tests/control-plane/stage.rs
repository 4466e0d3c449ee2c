//! An API server with weft's kinds, and the programs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use api_server::{ApiServer, skip};
use fabric_api::crds;
use serde_json::{Value, json};
use weft_tests::bin_dir;

/// Time limit on a machine that does much else.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) struct Stage {
    pub(crate) server: ApiServer,
    dir: PathBuf,
}

/// Killed with this value, or with the test.
pub(crate) struct Running(Child);

impl Stage {
    /// `None`, after reporting why, if there can't be one.
    pub(crate) fn set(name: &str) -> Option<Self> {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("control-plane").join(name);
        let server = ApiServer::start(dir.join("server")).map_err(|why| skip(&why)).ok()?;
        let stage = Self { server, dir };
        let all = crds::liqo().into_iter().chain(crds::weft()).map(|crd| json!(crd));
        let list = json!({"apiVersion": "v1", "kind": "List", "items": all.collect::<Vec<_>>()});
        stage.apply(&list.to_string());
        let established = ["wait", "--for=condition=Established", "--timeout=30s", "-f", "-"];
        stage.server.kubectl(&established, &list.to_string()).unwrap();
        Some(stage)
    }

    pub(crate) fn apply(&self, text: &str) {
        // A kind that was defined a moment ago may take another to be served.
        self.server.wait_until("it is taken", || {
            self.server.kubectl(&["apply", "--server-side", "-f", "-"], text)
        });
    }

    /// Applies statuses of Nodes, which kubelets report elsewhere.
    pub(crate) fn apply_statuses(&self, text: &str) {
        let nodes = text.split("---\n").filter(|document| document.contains("kind: Node\n"));
        for node in nodes {
            let arguments = ["apply", "--server-side", "--subresource=status", "-f", "-"];
            self.server.kubectl(&arguments, node).unwrap();
        }
    }

    pub(crate) fn start_ipam(&self) -> Running {
        self.start("ipam", &["--listen", &self.ipam()])
    }

    pub(crate) fn start_controller(&self) -> Running {
        self.start("fabric-controller", &["--ipam", &self.ipam(), "--node", "n1"])
    }

    fn ipam(&self) -> String {
        format!("unix:{}", self.dir.join("ipam.sock").display())
    }

    fn start(&self, program: &str, arguments: &[&str]) -> Running {
        let log = File::create(self.log(program)).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(bin_dir().unwrap().join(program));
        command.arg("--kubernetes").arg("--kubeconfig").arg(self.server.admin()).args(arguments);
        Running(command.stdin(Stdio::null()).stderr(log).spawn().unwrap())
    }

    fn log(&self, program: &str) -> PathBuf {
        self.dir.join(format!("{program}.log"))
    }

    /// `namespace` is empty for cluster-wide kinds.
    pub(crate) fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        let mut arguments = vec!["get", plural, name, "-o", "json"];
        if !namespace.is_empty() {
            arguments.extend(["-n", namespace]);
        }
        serde_json::from_str(&self.server.kubectl(&arguments, "").ok()?).ok()
    }

    /// All that weft has written, as it was written last.
    pub(crate) fn versions(&self) -> Vec<String> {
        let kinds = "networks,ips,configurations,gatewayclients,secrets,gatewayconfigs,nodeconfigs,\
                     serviceaccounts,roles,rolebindings,deployments";
        let columns = "-o=custom-columns=A:.kind,B:.metadata.name,C:.metadata.resourceVersion";
        let text = self.server.kubectl(&["get", kinds, "-A", columns], "").unwrap();
        text.lines().map(str::to_owned).collect()
    }

    /// Polls until there is an answer.
    pub(crate) fn until<T>(&self, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(answer) = poll() {
                return answer;
            }
            assert!(began.elapsed() < TIMEOUT, "never: {what}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    pub(crate) fn logs(&self) -> String {
        let read = |program| std::fs::read_to_string(self.log(program)).unwrap_or_default();
        ["ipam", "fabric-controller"].map(read).join("\n--\n")
    }
}

impl Running {
    pub(crate) fn kill(mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
