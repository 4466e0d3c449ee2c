//! A Kubernetes API server with its etcd, on loopback, for as long as a test lasts.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const TOKEN: &str = "admin";

pub(crate) struct ApiServer {
    programs: Vec<Child>,
    pub(crate) port: u16,
    dir: TempDir,
}

impl ApiServer {
    /// What is missing here to have one.
    pub(crate) fn missing() -> Option<String> {
        let built = ["kube-apiserver", "kubectl"].map(program);
        let installed = ["etcd", "openssl", "setpriv"].map(found).into_iter().flatten();
        let absent = built.into_iter().find(|path| !path.exists()).map(|p| p.display().to_string());
        absent.or_else(|| installed.map(str::to_owned).next())
    }

    pub(crate) fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [clients, peers, port] = free_ports();
        fs::write(dir.path().join("tokens"), format!("{TOKEN},admin,1,system:masters\n")).unwrap();
        let key = dir.path().join("accounts.key");
        run(Command::new("openssl").args(["genrsa", "-out"]).arg(&key).arg("2048"), "");
        let mut server = Self { programs: Vec::new(), port, dir };
        server.start_etcd(clients, peers);
        server.start_api_server(clients);
        server.wait_until("it is ready", |kubectl| kubectl(&["get", "--raw", "/readyz"]).is_ok());
        server.wait_until("there is a namespace", |kubectl| {
            kubectl(&["get", "ns", "default"]).is_ok()
        });
        server
    }

    /// What kubectl prints, or what it says is wrong.
    pub(crate) fn kubectl(&self, arguments: &[&str], input: &str) -> Result<String, String> {
        let out = run(&mut self.command(arguments), input);
        let [stdout, stderr] =
            [out.stdout, out.stderr].map(|text| String::from_utf8(text).unwrap());
        if out.status.success() && stderr.is_empty() { Ok(stdout) } else { Err(stderr + &stdout) }
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut kubectl = Command::new(program("kubectl"));
        let url = format!("https://127.0.0.1:{}", self.port);
        kubectl.args(["--insecure-skip-tls-verify", "--token", TOKEN, "--server", &url]);
        kubectl.args(arguments).env("HOME", self.dir.path()).env("KUBECONFIG", "/dev/null");
        kubectl
    }

    /// Asks until it is so.
    pub(crate) fn wait_until(
        &self,
        what: &str,
        mut is_so: impl FnMut(&dyn Fn(&[&str]) -> Result<String, String>) -> bool,
    ) {
        let began = Instant::now();
        while !is_so(&|arguments| self.kubectl(arguments, "")) {
            assert!(began.elapsed() < PATIENCE, "waited for: {what}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn start_etcd(&mut self, clients: u16, peers: u16) {
        let [clients, peers] = [clients, peers].map(|port| format!("http://127.0.0.1:{port}"));
        let data = self.dir.path().join("etcd");
        let arguments: [&OsStr; 11] = [
            "--data-dir".as_ref(),
            data.as_ref(),
            "--listen-client-urls".as_ref(),
            clients.as_ref(),
            "--advertise-client-urls".as_ref(),
            clients.as_ref(),
            "--listen-peer-urls".as_ref(),
            peers.as_ref(),
            "--initial-advertise-peer-urls".as_ref(),
            peers.as_ref(),
            "--unsafe-no-fsync".as_ref(),
        ];
        let more = ["--initial-cluster".to_owned(), format!("default={peers}")];
        self.spawn(
            "etcd",
            Path::new("etcd"),
            arguments.into_iter().chain(more.iter().map(AsRef::as_ref)),
        );
    }

    fn start_api_server(&mut self, etcd: u16) {
        let file = |name: &str| self.dir.path().join(name).display().to_string();
        let key = file("accounts.key");
        let arguments = [
            format!("--etcd-servers=http://127.0.0.1:{etcd}"),
            format!("--secure-port={}", self.port),
            format!("--cert-dir={}", file("certificates")),
            format!("--token-auth-file={}", file("tokens")),
            format!("--service-account-key-file={key}"),
            format!("--service-account-signing-key-file={key}"),
            "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
            "--service-cluster-ip-range=10.96.0.0/24".to_owned(),
            "--bind-address=127.0.0.1".to_owned(),
            "--advertise-address=127.0.0.1".to_owned(),
            "--authorization-mode=RBAC".to_owned(),
        ];
        let program = program("kube-apiserver");
        self.spawn("apiserver", &program, arguments.iter().map(AsRef::as_ref));
    }

    /// It ends with the thread that runs the test, come what may.
    fn spawn<'a>(
        &mut self,
        name: &str,
        program: &Path,
        arguments: impl Iterator<Item = &'a OsStr>,
    ) {
        let log = fs::File::create(self.log(name)).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(arguments);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.programs.push(command.spawn().unwrap());
    }

    fn log(&self, name: &str) -> PathBuf {
        self.dir.path().join(name).with_extension("log")
    }

    fn logs(&self) -> String {
        let read = |name| fs::read_to_string(self.log(name)).unwrap_or_default();
        let tail = |text: String| text.lines().rev().take(20).collect::<Vec<_>>().join("\n");
        ["etcd", "apiserver"].map(read).map(tail).join("\n--\n")
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        for mut program in self.programs.drain(..).rev() {
            drop(program.kill());
            drop(program.wait());
        }
    }
}

fn program(name: &str) -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let dir = std::env::var_os("WEFT_KUBERNETES_DIR").map(PathBuf::from);
    dir.unwrap_or_else(|| home().join(".cache/weft/kubernetes/bin")).join(name)
}

/// The command, if it is not installed.
fn found(name: &str) -> Option<&str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path).any(|dir| dir.join(name).exists());
    (!installed).then_some(name)
}

fn free_ports<const N: usize>() -> [u16; N] {
    let listeners = [(); N].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

fn run(command: &mut Command, input: &str) -> Output {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}
