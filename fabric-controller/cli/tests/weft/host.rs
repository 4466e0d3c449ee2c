//! A host for one test: a network namespace that forwards and has address 192.0.2.11, a folder
//! with `weft` and stand-ins for its siblings, and directories that are gone afterwards.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use fabric_api::fabric::{GatewayConfig, NodeConfig};
use fabric_api::networking::Connection;
use fabric_store::{Kind, ObjectRef, Store, StoreArgs};
use futures::FutureExt as _;

/// Runs until SIGTERM, and reports it.
const STAND_IN: &str = "#!/bin/sh
if [ \"$1\" = cleanup ]; then touch \"$(dirname $0)/cleaned\"; exit 0; fi
echo \"$(basename $0) says hello\"
trap 'echo stopping; exit 0' TERM
while :; do sleep 0.05; done
";

/// Processes of [`running`].
pub(crate) const ALL: [&str; 4] =
    ["ipam", "fabric-controller", "route-agent-n1", "gateway-t-client"];

/// A host with the whole fabric up, and one gateway.
pub(crate) fn running() -> (Host, Supervisor) {
    let host = Host::new();
    host.init();
    host.publish("client");
    let up = host.up(&[]);
    for process in ALL {
        host.pid(process);
    }
    eventually("weft up says that it runs", || host.messages().contains("running"));
    (host, up)
}

/// A directory answers at once.
pub(crate) fn at_once<T>(answer: impl Future<Output = T>) -> T {
    answer.now_or_never().unwrap()
}

/// A supervisor in the background; killed, if it still runs, when this goes.
pub(crate) struct Supervisor(Child);

pub(crate) struct Host {
    pub(crate) root: PathBuf,
    namespace: Child,
}

impl Host {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let nth = COUNT.fetch_add(1, Ordering::Relaxed);
        let root =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("w{}-{nth}", std::process::id()));
        fs::create_dir_all(root.join("bin")).unwrap();
        // A hard link, so that /proc/self/exe names this place.
        fs::hard_link(env!("CARGO_BIN_EXE_weft"), root.join("bin/weft")).unwrap();
        let host = Self { namespace: namespace(), root };
        for program in ["ipam", "fabric-controller", "route-agent", "gateway"] {
            host.stand_in(program, STAND_IN);
        }
        host
    }

    pub(crate) fn stand_in(&self, program: &str, script: &str) {
        let path = self.root.join("bin").join(program);
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    pub(crate) fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// Manifests of a cluster with nodes n1 (this host) and n2.
    pub(crate) fn init(&self) {
        let out = self.path("manifests");
        let done = self.weft(&[
            "init",
            "--cluster-id=rome",
            "--node=n1=192.0.2.11=10.200.1.0/24",
            "--node=n2=192.0.2.12=10.200.2.0/24",
            "--out",
            out.to_str().unwrap(),
        ]);
        assert!(done.status.success(), "{done:?}");
    }

    /// Runs `weft` in the host's namespace, with its run directory.
    pub(crate) fn weft(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net=/proc/{}/ns/net", self.namespace.id()))
            .arg(self.path("bin/weft"))
            .args(args)
            .env("WEFT_RUN_DIR", self.path("run"))
            .env("WEFT_STATE_DIR", self.path("state"))
            .stdin(Stdio::null());
        command
    }

    /// Runs a script as a process of a fabric with the same paths in another mount namespace.
    pub(crate) fn elsewhere(&self, script: &str) -> Child {
        let root = self.root.display();
        let mut child = Command::new("nsenter")
            .arg(format!("--net=/proc/{}/ns/net", self.namespace.id()))
            .args(["unshare", "--mount", "sh", "-c"])
            .arg(format!("mount -t tmpfs none {root} && mkdir {root}/run && echo && {script}"))
            .env("WEFT_PROCESS", self.path("run"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut mounted = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut mounted).unwrap();
        child
    }

    /// Runs a script that has weft as `$weft`, in namespaces with an empty /run and /var/lib of their
    /// own, and of processes, which end with it. Returns its output.
    pub(crate) fn alone(&self, script: &str) -> String {
        let mut command = Command::new("nsenter");
        for key in ["WEFT_RUN_DIR", "WEFT_STATE_DIR", "WEFT_CLUSTER", "KUBECONFIG"] {
            command.env_remove(key);
        }
        let output = command
            .arg(format!("--net=/proc/{}/ns/net", self.namespace.id()))
            .args(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"])
            .args(["sh", "-c"])
            .arg(format!(
                "exec 2>&1; mount -t tmpfs none /run && mount -t tmpfs none /var/lib && weft={} && {{\n{script}\n}}",
                self.path("bin/weft").display()
            ))
            .stdin(Stdio::null())
            .output()
            .unwrap();
        stdout(&output)
    }

    /// The answer to GET /metrics, from within the host's namespace.
    pub(crate) fn fetch(&self, address: &str, port: u16) -> String {
        let script = format!(
            "exec 3<>/dev/tcp/{address}/{port} && printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3"
        );
        self.run(&script)
    }

    /// Runs a script in the host's namespace. Returns its output.
    pub(crate) fn run(&self, script: &str) -> String {
        let done = Command::new("nsenter")
            .arg(format!("--net=/proc/{}/ns/net", self.namespace.id()))
            .args(["bash", "-c", script])
            .output()
            .unwrap();
        stdout(&done)
    }

    /// `weft up` in the background, its messages in the file `up.err`.
    pub(crate) fn up(&self, more: &[&str]) -> Supervisor {
        let manifests = self.path("manifests");
        let mut args = vec!["up", "--manifests", manifests.to_str().unwrap()];
        args.extend(more);
        self.background(&args)
    }

    pub(crate) fn background(&self, args: &[&str]) -> Supervisor {
        let messages = fs::File::create(self.path("up.err")).unwrap();
        Supervisor(self.command(args).stdout(Stdio::null()).stderr(messages).spawn().unwrap())
    }

    pub(crate) fn messages(&self) -> String {
        fs::read_to_string(self.path("up.err")).unwrap_or_default()
    }

    pub(crate) fn store(&self) -> Store {
        let (manifests, state) = (Some(self.path("manifests")), Some(self.path("state")));
        Store::open(&StoreArgs::directories(manifests, self.path("run"), state)).unwrap()
    }

    /// Publishes the config of a gateway of this host's node, as the controller would.
    pub(crate) fn publish(&self, name: &str) {
        let spec = serde_json::from_value(serde_json::json!({
            "clusterId": "rome", "peerClusterId": "milan", "role": "Client", "gatewayUid": "u",
            "secretName": "gw-keys", "mtu": 1340,
            "tunnelAddress": "169.254.18.2", "peerTunnelAddress": "169.254.18.1",
            "remaps": [{"kind": "Pod", "remote": "10.200.0.0/16", "local": "10.201.0.0/16"}],
            "podCidrs": ["10.200.0.0/16"], "externalCidrs": ["10.70.0.0/16"],
            "overlay": {"address": "10.80.0.2", "node": "n1"}, "nodes": [],
            "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5},
        }));
        let mut config = GatewayConfig::new(name, spec.unwrap());
        config.metadata.namespace = Some("t".to_owned());
        at_once(self.store().put(&config.into())).unwrap();
    }

    /// Publishes this host's own config.
    pub(crate) fn publish_node(&self) {
        let spec = serde_json::json!({"clusterId": "rome", "underlay": [], "localPods": [],
            "podCidrs": [], "external": [], "peerings": [], "vxlanSources": []});
        let config = NodeConfig::new("n1", serde_json::from_value(spec).unwrap());
        at_once(self.store().put(&config.into())).unwrap();
    }

    pub(crate) fn unpublish(&self, name: &str) {
        at_once(self.store().delete(&ObjectRef::new(Kind::GatewayConfig, "t", name))).unwrap();
    }

    /// Writes the Connection that a gateway reports when connected.
    pub(crate) fn claim_connected(&self, name: &str) {
        let connection: Connection = serde_json::from_value(serde_json::json!({
            "apiVersion": "networking.liqo.io/v1beta1", "kind": "Connection",
            "metadata": {"name": format!("gw-{name}"), "namespace": "t",
            "labels": {"liqo.io/remote-cluster-id": "milan"}},
            "spec": {"type": "Client", "gatewayRef": {"name": name}},
        }))
        .unwrap();
        let stored = at_once(self.store().put(&connection.into())).unwrap();
        let mut connection = Connection::try_from(stored).unwrap();
        connection.status = Some(
            serde_json::from_value(serde_json::json!({
            "value": "Connected", "latency": {"value": "3ms"}}))
            .unwrap(),
        );
        at_once(self.store().put_status(&connection.into())).unwrap();
    }

    /// Returns the value of a gateway's Connection.
    pub(crate) fn connection(&self, name: &str) -> String {
        let reference = ObjectRef::new(Kind::Connection, "t", &format!("gw-{name}"));
        let object = at_once(self.store().get(&reference)).unwrap().unwrap();
        object.to_value()["status"]["value"].as_str().unwrap_or_default().to_owned()
    }

    /// The pid of a process, once it runs.
    pub(crate) fn pid(&self, process: &str) -> i32 {
        let path = self.path("run/pids").join(format!("{process}.pid"));
        let mut pid = 0;
        eventually(&format!("{process} runs"), || {
            let text = fs::read_to_string(&path).unwrap_or_default();
            pid = text.lines().next().and_then(|line| line.parse().ok()).unwrap_or(0);
            pid != 0 && is_alive(pid)
        });
        pid
    }
}

impl Supervisor {
    pub(crate) fn pid(&self) -> i32 {
        self.0.id().cast_signed()
    }

    /// Sends SIGKILL, as a user or the OOM killer may.
    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Waits for its end; true if it was a good one.
    pub(crate) fn ended_well(&mut self) -> bool {
        self.0.wait().unwrap().success()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.weft(&["down", "--now", "--purge"]));
        drop(self.namespace.kill());
        drop(self.namespace.wait());
        drop(fs::remove_dir_all(&self.root));
    }
}

fn namespace() -> Child {
    let script = "echo 1 > /proc/sys/net/ipv4/ip_forward
        ip link set lo up && ip address add 192.0.2.11/32 dev lo && echo ready && exec sleep 600";
    let mut child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let out = child.stdout.as_mut().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    assert_eq!(line, "ready\n", "tests need root: a network namespace is made");
    child
}

pub(crate) fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub(crate) fn kill(pid: i32, signal: &str) {
    let done = Command::new("kill").args([signal, &pid.to_string()]).status().unwrap();
    assert!(done.success());
}

pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "in vain waited until {what}");
        sleep(Duration::from_millis(20));
    }
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
