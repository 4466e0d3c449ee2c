//! A real Kubernetes API server on a real etcd, on loopback, for as long as a test lasts.
//!
//! Needs etcd, openssl, setpriv, and kube-apiserver and kubectl in `$WEFT_KUBERNETES_DIR`.

#![expect(clippy::unwrap_used, reason = "a test fails where it is")]

mod port;
mod programs;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

pub use crate::programs::{built, skip, skip_disturbed, start_program};

use crate::port::Port;
use crate::programs::{found, keep, run};

/// A cold start on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);
const TOKEN: &str = "admin";
/// Content of the audit log: writes, once each.
const POLICY: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}]}"#;
/// Every request, and of writes what was sent.
const DETAILED_POLICY: &str = r#"{"apiVersion": "audit.k8s.io/v1", "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "verbs": ["get", "list", "watch"]},
        {"level": "Metadata", "resources": [{"group": "coordination.k8s.io"}]},
        {"level": "Request"}]}"#;
const AUDIT: &str = "audit.log";

/// Both programs end with this value, and with the process at the latest.
pub struct ApiServer {
    dir: PathBuf,
    port: Port,
    /// For clients and for peers.
    etcd_ports: [Port; 2],
    policy: &'static str,
    etcd: Child,
    api_server: Mutex<Option<Child>>,
}

impl ApiServer {
    /// Keeps its files in `dir`, which is emptied first. The error is why there is none here.
    pub fn start(dir: impl AsRef<Path>) -> Result<Self, String> {
        Self::with_policy(dir.as_ref(), POLICY)
    }

    /// Starts one whose audit log has every request, and what was sent with writes: for programs that
    /// account for requests.
    pub fn start_audited(dir: impl AsRef<Path>) -> Result<Self, String> {
        Self::with_policy(dir.as_ref(), DETAILED_POLICY)
    }

    fn with_policy(dir: &Path, policy: &'static str) -> Result<Self, String> {
        if let Some(missing) = missing() {
            return Err(format!("no API server here without {missing}"));
        }
        let dir = dir.to_owned();
        drop(fs::remove_dir_all(&dir));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("tokens"), format!("{TOKEN},admin,1,system:masters\n")).unwrap();
        run(Command::new("openssl").args(["genrsa", "-out"]).arg(dir.join("key")).arg("2048"), "");
        let port = Port::claim();
        let etcd_ports = [Port::claim(), Port::claim()];
        let etcd = start_etcd(&dir, &etcd_ports);
        let api_server = Mutex::default();
        let server = Self { dir, port, etcd_ports, policy, etcd, api_server };
        server.write_kubeconfig(&server.admin(), "");
        server.resume();
        server.wait_until("there is a namespace", || server.kubectl(&["get", "ns", "default"], ""));
        Ok(server)
    }

    /// The kubeconfig of a user with all rights.
    pub fn admin(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// The kubeconfig of a user with the rights that roles give it, and no other:
    /// `system:serviceaccount:NAMESPACE:NAME` is a service account.
    pub fn user(&self, name: &str) -> PathBuf {
        let path = self.dir.join(format!("{}.kubeconfig", name.replace(':', ".")));
        self.write_kubeconfig(&path, &format!(", as: '{name}'"));
        path
    }

    /// Returns the output of kubectl; its failures and warnings are errors.
    pub fn kubectl(&self, arguments: &[&str], input: &str) -> Result<String, String> {
        let out = run(&mut self.command(arguments), input);
        let [stdout, stderr] =
            [out.stdout, out.stderr].map(|text| String::from_utf8(text).unwrap());
        if out.status.success() && stderr.is_empty() { Ok(stdout) } else { Err(stderr + &stdout) }
    }

    /// kubectl as it is, for the user with all rights.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut kubectl = Command::new(built("kubectl"));
        kubectl.arg("--kubeconfig").arg(self.admin()).args(arguments).env("HOME", &self.dir);
        kubectl
    }

    /// Writes in a namespace that others than kubectl have requested so far: verb, resource and name of
    /// each.
    pub fn writes(&self, namespace: &str) -> Vec<String> {
        let log = fs::read_to_string(self.audit_log()).unwrap_or_default();
        let writes = log.lines().filter_map(|line| {
            // The last line may be in the making.
            let event: Value = serde_json::from_str(line).ok()?;
            let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str);
            let theirs = text("/objectRef/namespace") == Some(namespace)
                && !text("/userAgent").is_some_and(|agent| agent.starts_with("kubectl/"));
            let words = ["/verb", "/objectRef/resource", "/objectRef/name"].map(text);
            theirs.then(|| words.map(Option::unwrap_or_default).join(" "))
        });
        writes.collect()
    }

    /// Repeats a request until there is no error.
    pub fn wait_until<T, E: std::fmt::Debug>(
        &self,
        what: &str,
        mut request: impl FnMut() -> Result<T, E>,
    ) -> T {
        let began = Instant::now();
        loop {
            match request() {
                Ok(answer) => return answer,
                Err(error) => {
                    let late = began.elapsed() > TIMEOUT;
                    assert!(!late, "waited for: {what}: {error:?}\n{}", self.logs());
                }
            }
            sleep(Duration::from_millis(100));
        }
    }

    /// Starts the API server again after [`Self::kill`], and waits until it is ready.
    pub fn resume(&self) {
        let mut api = programs::command(&built("kube-apiserver"), &self.log("apiserver"));
        let file = |name: &str| self.dir.join(name).display().to_string();
        api.arg(format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_ports[0].number()));
        api.arg(format!("--secure-port={}", self.port.number()));
        api.arg(format!("--cert-dir={}", file("certificates")));
        api.arg(format!("--token-auth-file={}", file("tokens")));
        api.arg(format!("--service-account-key-file={}", file("key")));
        api.arg(format!("--service-account-signing-key-file={}", file("key")));
        api.arg("--service-account-issuer=https://kubernetes.default.svc");
        api.args(["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"]);
        api.args(["--service-cluster-ip-range=10.96.0.0/24", "--authorization-mode=RBAC"]);
        api.args(["--endpoint-reconciler-type=none", "--allow-privileged"]);
        fs::write(self.dir.join("policy.json"), self.policy).unwrap();
        api.arg(format!("--audit-policy-file={}", file("policy.json")));
        api.arg(format!("--audit-log-path={}", self.audit_log().display()));
        // In megabytes: one file, however long.
        api.arg("--audit-log-maxsize=65536");
        *self.api_server.lock().unwrap() = Some(keep(api));
        self.wait_until("it is ready", || self.kubectl(&["get", "--raw", "/readyz"], ""));
    }

    /// Path of the audit log: one JSON object a line.
    pub fn audit_log(&self) -> PathBuf {
        self.dir.join(AUDIT)
    }

    /// Process IDs of etcd and, unless it was killed, of the API server.
    pub fn pids(&self) -> Vec<u32> {
        let api_server = self.api_server.lock().unwrap();
        [Some(self.etcd.id()), api_server.as_ref().map(Child::id)].into_iter().flatten().collect()
    }

    /// Versions of Kubernetes and etcd, as they print them.
    pub fn versions() -> String {
        let first_line = |program: &Path| {
            let out = run(Command::new(program).arg("--version"), "");
            let text = String::from_utf8_lossy(&out.stdout).into_owned();
            text.lines().next().unwrap_or("unknown version").replace("Version: ", "")
        };
        let programs = [built("kube-apiserver"), PathBuf::from("etcd")];
        programs.iter().map(|program| first_line(program)).collect::<Vec<_>>().join(", ")
    }

    /// Returns true if Kubernetes is older than this version 1.x.
    pub fn is_older_than(minor: u32) -> bool {
        let versions = Self::versions();
        let own = versions.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
        own.unwrap_or_else(|| panic!("no version in {versions:?}")) < minor
    }

    /// The API server is gone from one moment to the next; what it holds stays in etcd.
    pub fn kill(&self) {
        if let Some(mut child) = self.api_server.lock().unwrap().take() {
            end(&mut child);
        }
    }

    /// Frozen, it takes connections, but does nothing with them.
    pub fn freeze(&self, frozen: bool) {
        let pid = self.api_server.lock().unwrap().as_ref().unwrap().id();
        let signal = if frozen { Signal::SIGSTOP } else { Signal::SIGCONT };
        kill(Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
    }

    fn write_kubeconfig(&self, path: &Path, user: &str) {
        // The server makes its certificate when it first starts.
        let authority = self.dir.join("certificates/apiserver.crt");
        let (port, authority) = (self.port.number(), authority.display());
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{port}', certificate-authority: {authority}}}}}]\n\
             users: [{{name: u, user: {{token: {TOKEN}{user}}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n",
        );
        fs::write(path, text).unwrap();
    }

    fn log(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.log"))
    }

    fn logs(&self) -> String {
        let read = |name| fs::read_to_string(self.log(name)).unwrap_or_default();
        let tail = |text: String| text.lines().rev().take(20).collect::<Vec<_>>().join("\n");
        ["etcd", "apiserver"].map(read).map(tail).join("\n--\n")
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.kill();
        end(&mut self.etcd);
        drop(fs::remove_dir_all(&self.dir));
    }
}

/// Returns the first prerequisite of an API server that is missing.
fn missing() -> Option<String> {
    let built = ["kube-apiserver", "kubectl"].map(built);
    let built = built.into_iter().find(|path| !path.exists());
    let installed = ["etcd", "openssl", "setpriv"].into_iter().find(|name| !found(name));
    built.map(|path| path.display().to_string()).or_else(|| installed.map(str::to_owned))
}

fn start_etcd(dir: &Path, ports: &[Port; 2]) -> Child {
    let [clients, peers] =
        ports.each_ref().map(|port| format!("http://127.0.0.1:{}", port.number()));
    let mut etcd = programs::command(Path::new("etcd"), &dir.join("etcd.log"));
    etcd.arg("--data-dir").arg(dir.join("etcd")).arg("--unsafe-no-fsync");
    etcd.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
    etcd.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
    etcd.args(["--initial-cluster", &format!("default={peers}")]);
    keep(etcd)
}

fn end(child: &mut Child) {
    drop(child.kill());
    drop(child.wait());
}
