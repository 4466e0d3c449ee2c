//! A cluster of an API server and a controller, which tests share, each with peers of its own; and another
//! one for those that need it alone.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use api_server::{ApiServer, built, skip, start_program};
use fabric_api::crds;
use fabric_api::fabric::{NodeConfig, NodeConfigStatus};
use fabric_store::{Event, Kind, Store};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::ipam::FakeIpam;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Between two polls: kubectl takes more CPU time than all that it queries.
const PAUSE: Duration = Duration::from_millis(250);

pub(crate) struct Cluster {
    pub(crate) server: ApiServer,
    _ipam: FakeIpam,
    dir: TempDir,
    /// The pid of the controller that was there first.
    pub(crate) first: u32,
}

/// The cluster of tests that run beside each other. `None`, after reporting why, if there is none here.
pub(crate) fn cluster() -> Option<&'static Cluster> {
    static TOGETHER: Shared = OnceLock::new();
    shared(&TOGETHER)
}

/// The cluster of tests that stop the controller, change what all peerings share, or measure: one at a time.
pub(crate) fn cluster_alone() -> Option<(MutexGuard<'static, ()>, &'static Cluster)> {
    static ALONE: Shared = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Some((turn, shared(&ALONE)?))
}

type Shared = OnceLock<Result<Cluster, String>>;

fn shared(cluster: &'static Shared) -> Option<&'static Cluster> {
    cluster.get_or_init(Cluster::start).as_ref().map_err(|why| skip(why)).ok()
}

impl Cluster {
    fn start() -> Result<Self, String> {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::start(dir.path().join("server"))?;
        let mut ipam = FakeIpam::new(dir.path().join("ipam.sock"));
        ipam.start();
        let mut cluster = Self { server, _ipam: ipam, dir, first: 0 };
        cluster.define();
        for object in own() {
            cluster.apply(&object);
            if let Some(status) = object.get("status") {
                cluster.set_status(&object, status);
            }
        }
        cluster.first = cluster.run_controller("first");
        let admin = cluster.server.admin();
        thread::spawn(move || Runtime::new().unwrap().block_on(run_agents(&admin)));
        Ok(cluster)
    }

    /// One more, which ends with this process at the latest. Gives its pid.
    pub(crate) fn run_controller(&self, name: &str) -> u32 {
        let socket = self.dir.path().join("ipam.sock");
        let mut program = Command::new("setpriv");
        program.args(["--pdeathsig", "KILL", "--", env!("CARGO_BIN_EXE_fabric-controller")]);
        program.arg("--kubernetes").arg("--kubeconfig").arg(self.server.admin());
        program.arg(format!("--ipam=unix:{}", socket.display())).stdin(Stdio::null());
        let log = OpenOptions::new().create(true).append(true).open(self.log_file());
        program.env("POD_NAME", name).stderr(log.unwrap());
        let (sender, pid) = channel();
        // It ends with the thread that started it.
        thread::spawn(move || {
            let mut child = program.spawn().unwrap();
            sender.send(child.id()).unwrap();
            child.wait()
        });
        pid.recv().unwrap()
    }

    fn define(&self) {
        let all = crds::liqo().into_iter().chain(crds::weft());
        let all: Vec<_> = all.map(|crd| serde_json::to_value(crd).unwrap()).collect();
        self.define_all(&json!({"apiVersion": "v1", "kind": "List", "items": all}).to_string());
    }

    /// Installs definitions.
    pub(crate) fn define_all(&self, all: &str) {
        self.kubectl(&["apply", "--server-side", "--force-conflicts", "-f", "-"], all);
        self.kubectl(&["wait", "--for=condition=Established", "--timeout=60s", "-f", "-"], all);
    }

    pub(crate) fn kubectl(&self, arguments: &[&str], input: &str) -> String {
        let printed = self.server.kubectl(arguments, input);
        printed.unwrap_or_else(|error| panic!("kubectl {arguments:?}: {error}"))
    }

    pub(crate) fn apply(&self, object: &Value) {
        self.kubectl(
            &["apply", "--server-side", "--force-conflicts", "-f", "-"],
            &object.to_string(),
        );
    }

    pub(crate) fn delete(&self, kind: &str, namespace: &str, name: &str) {
        self.kubectl(&["delete", kind, name, "-n", namespace, "--wait=false"], "");
    }

    pub(crate) fn set_status(&self, object: &Value, status: &Value) {
        let patch = json!({"status": status}).to_string();
        let kind = object["kind"].as_str().unwrap();
        let name = object["metadata"]["name"].as_str().unwrap();
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
        let what = ["patch", kind, name, "-n", namespace];
        let how = ["--subresource=status", "--type=merge", "-p", &patch];
        self.kubectl(&[what.as_slice(), how.as_slice()].concat(), "");
    }

    pub(crate) fn merge(&self, kind: &str, namespace: &str, name: &str, patch: &Value) {
        let patch = patch.to_string();
        self.kubectl(&["patch", kind, name, "-n", namespace, "--type=merge", "-p", &patch], "");
    }

    pub(crate) fn get(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        let get = ["get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found"];
        let text = self.kubectl(&get, "");
        (!text.is_empty()).then(|| serde_json::from_str(&text).unwrap())
    }

    pub(crate) fn names(&self, kind: &str, namespace: &str) -> Vec<String> {
        let printed = self.kubectl(&["get", kind, "-n", namespace, "-o", "json"], "");
        let list: Value = serde_json::from_str(&printed).unwrap();
        let items = list["items"].as_array().unwrap().iter();
        items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
    }

    /// Waits until there is something to give back.
    pub(crate) fn until<T>(&self, what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
        let began = Instant::now();
        loop {
            if let Some(answer) = ask() {
                return answer;
            }
            assert!(began.elapsed() < TIMEOUT, "never: {what}\n{}", self.log(""));
            thread::sleep(PAUSE);
        }
    }

    /// The same of a field of an object.
    pub(crate) fn until_is(&self, [kind, namespace, name]: [&str; 3], field: &str, is: &Value) {
        let what = format!("{kind} {name} has {is} at {field}");
        let mut last = None;
        let began = Instant::now();
        while last.as_ref().and_then(|object: &Value| object.pointer(field)) != Some(is) {
            let log = || self.log(namespace);
            assert!(began.elapsed() < TIMEOUT, "never: {what}, but {last:?}\n{}", log());
            thread::sleep(PAUSE);
            last = self.get(kind, namespace, name);
        }
    }

    /// Waits until the controller has written nothing there for six seconds.
    pub(crate) fn until_peace(&self, namespace: &str) {
        let (began, mut before) = (Instant::now(), self.writes(namespace));
        loop {
            thread::sleep(Duration::from_secs(6));
            let writes = self.writes(namespace);
            if writes == before {
                return;
            }
            let late = began.elapsed() > TIMEOUT;
            assert!(!late, "never peace: {:?}\n{}", &writes[before.len()..], self.log(namespace));
            before = writes;
        }
    }

    /// Writes that the controller has requested in a namespace.
    pub(crate) fn writes(&self, namespace: &str) -> Vec<String> {
        self.server.writes(namespace)
    }

    /// A place for a file of the test's.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn log_file(&self) -> PathBuf {
        self.file("controller.log")
    }

    /// The controller's last lines with that text.
    fn log(&self, about: &str) -> String {
        let log = fs::read_to_string(self.log_file()).unwrap_or_default();
        let last: Vec<_> = log.lines().filter(|line| line.contains(about)).rev().take(30).collect();
        last.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}

/// Reports NodeConfigs as applied. n2 fails when weft is taken away.
async fn run_agents(kubeconfig: &Path) {
    let store = Store::kubernetes(Some(kubeconfig)).unwrap();
    let mut watch = store.watch(&[Kind::NodeConfig]).unwrap();
    loop {
        let Event::Applied(object) = watch.next().await else { continue };
        let Ok(mut config) = NodeConfig::try_from(object) else { continue };
        let is_dead = config.spec.removed && config.metadata.name.as_deref() == Some("n2");
        if is_dead || config.is_applied() {
            continue;
        }
        let applied_generation = config.metadata.generation.unwrap_or_default();
        config.status = Some(NodeConfigStatus { applied_generation, ..Default::default() });
        // Of one that is gone, or is another by now.
        drop(store.put_status(&config.into()).await);
    }
}

/// Objects that make it a cluster of weft's: its ID, its prefixes and its nodes.
pub(crate) fn own() -> Vec<Value> {
    let network = |name: &str, cidr: &str, fixed: &str| {
        json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
            "metadata": {"name": name, "namespace": "liqo", "labels": {
                "ipam.liqo.io/network-type": name, "ipam.liqo.io/network-not-remapped": fixed,
                "ipam.liqo.io/network-shared": fixed}},
            "spec": {"cidr": cidr}})
    };
    vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "liqo"}}),
        json!({"apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "liqo-clusterid-configmap", "namespace": "liqo",
                "labels": {"app.kubernetes.io/name": "clusterid-configmap"}},
            "data": {"CLUSTER_ID": "rome"}}),
        network("pod-cidr", "10.200.0.0/16", "true"),
        node("n1", 1),
        node("n2", 2),
    ]
}

fn node(name: &str, n: u8) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name},
    "spec": {"podCIDR": format!("10.200.{n}.0/24"), "podCIDRs": [format!("10.200.{n}.0/24")]},
    "status": {"addresses": [
        {"type": "InternalIP", "address": format!("192.0.2.{n}")},
        {"type": "Hostname", "address": name},
    ]}})
}

/// Liqo's own definitions of kinds of a group. `None`, after reporting why, if they are not here.
pub(crate) fn liqo_definitions(group: &str, plurals: &[&str]) -> Option<String> {
    let folder = built("liqo-chart-1.2.0/charts/liqo-crds/crds");
    let files = plurals
        .iter()
        .map(|plural| fs::read_to_string(folder.join(format!("{group}.liqo.io_{plural}.yaml"))));
    let texts: Result<Vec<_>, _> = files.collect();
    texts.map(|texts| texts.join("\n---\n")).map_err(|error| skip(&error.to_string())).ok()
}

/// Events of a namespace.
pub(crate) fn events(cluster: &Cluster, namespace: &str) -> Vec<Value> {
    let printed =
        cluster.kubectl(&["get", "events.events.k8s.io", "-n", namespace, "-o", "json"], "");
    let list: Value = serde_json::from_str(&printed).unwrap();
    list["items"].as_array().unwrap().clone()
}

/// The namespace of a peering.
pub(crate) fn tenant(peer: &str) -> String {
    format!("liqo-tenant-{peer}")
}

pub(crate) fn metadata(name: &str, peer: &str) -> Value {
    json!({"name": name, "namespace": tenant(peer), "labels": {"liqo.io/remote-cluster-id": peer}})
}

/// All that a peering needs but its gateway.
pub(crate) fn peering(peer: &str) -> Vec<Value> {
    let secret = json!({
        "privateKey": "YHztEzTrIe/fVxknCVVsPWqDeBmhvLUVHTmT8GgV6ko=",
        "publicKey": "VQBlodNolSfnUBl5QCtt/y7SPSCRQCQyUQc/jzyrZjE="
    });
    let mut keys = metadata("gw-keys", peer);
    keys["labels"]["networking.liqo.io/gateway-resource"] = json!("true");
    vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": tenant(peer)}}),
        json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "Configuration",
            "metadata": metadata(peer, peer),
            "spec": {"remote": {"cidr": {"pod": ["10.200.0.0/16"], "external": ["10.70.0.0/16"]}}}}),
        json!({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": keys, "data": secret}),
        json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "PublicKey",
            "metadata": metadata("gw-publickey", peer),
            "spec": {"publicKey": "SJbnWw47WiNBxWI4qjL/kxk/kpfvFCwKHSkixFgTt2Q="}}),
    ]
}

pub(crate) fn server(peer: &str, endpoint: &Value) -> Value {
    json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
        "metadata": metadata("server", peer),
        "spec": {"secretRef": {"name": "gw-keys"}, "endpoint": endpoint}})
}

pub(crate) fn client(peer: &str) -> Value {
    json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayClient",
        "metadata": metadata("client", peer),
        "spec": {"secretRef": {"name": ""},
            "endpoint": {"addresses": ["192.0.2.20"], "port": 30742, "protocol": "UDP"}}})
}

pub(crate) fn cluster_ip() -> Value {
    json!({"serviceType": "ClusterIP", "port": 51840})
}

impl Cluster {
    pub(crate) fn apply_all(&self, objects: &[Value]) {
        self.apply(&json!({"apiVersion": "v1", "kind": "List", "items": objects}));
    }

    /// Runs a pod as a ReplicaSet, a scheduler and a kubelet would together.
    pub(crate) fn run_pod(&self, peer: &str, name: &str, node: &str, ip: &str) {
        // Or the API server takes none.
        self.until("its account", || self.get("serviceaccount", &tenant(peer), "gw-server"));
        let mut metadata = metadata(name, peer);
        for (label, value) in
            [("component", "gateway"), ("gateway-name", "server"), ("active", "true")]
        {
            metadata["labels"][format!("networking.liqo.io/{label}")] = json!(value);
        }
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
            "spec": {"nodeName": node, "serviceAccountName": "gw-server",
                "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "gateway", "image": "gateway"}]}});
        self.apply(&pod);
        self.set_status(&pod, &json!({"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}));
        self.set_ready(peer, name, true);
    }

    /// Reports readiness as a kubelet, or the control plane in place of a silent kubelet.
    pub(crate) fn set_ready(&self, peer: &str, name: &str, ready: bool) {
        let ready = if ready { "True" } else { "False" };
        let pod = json!({"kind": "Pod", "metadata": metadata(name, peer)});
        self.set_status(&pod, &json!({"conditions": [{"type": "Ready", "status": ready}]}));
    }

    /// Its grace period is none.
    pub(crate) fn kill_pod(&self, peer: &str, name: &str) {
        self.delete("pod", &tenant(peer), name);
    }
}

/// Starts a controller that ends with this process at the latest.
pub(crate) fn start_controller(server: &ApiServer, ipam: &Path, log: &Path) -> Child {
    let arguments = [
        "--kubernetes".to_owned(),
        format!("--kubeconfig={}", server.admin().display()),
        format!("--ipam=unix:{}", ipam.display()),
    ];
    start_program(env!("CARGO_BIN_EXE_fabric-controller").as_ref(), &arguments, log)
}

/// The command-line tool, which is built with the workspace.
pub(crate) fn weft_program() -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_fabric-controller")).with_file_name("weft");
    assert!(
        program.exists(),
        "expected {}; run `cargo build --workspace --bins`",
        program.display()
    );
    program
}
