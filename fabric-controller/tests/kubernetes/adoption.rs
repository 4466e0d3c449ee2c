//! A cluster of Liqo's network becomes one of weft's: `weft adopt`, on an API server of its own with
//! Liqo's own definitions and all that Liqo's own controller-manager makes there.
//!
//! There is no garbage collector, and no kubelet: the test makes pods of gateways and what Liqo's
//! daemon on nodes writes.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use api_server::{ApiServer, built, skip, start_program};
use fabric_api::crds;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cluster::{client, own, peering, server, start_controller, tenant, weft_program};
use crate::ipam::FakeIpam;

const NETWORKING: &str = "networking.liqo.io/v1beta1";
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// A peer of weft's time, and the Network of its pods.
const NEW: &str = "oslo";
const NEW_NETWORK: &str = "oslo-pod-10-200-0-0-16";
const TIMEOUT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(250);
/// Kinds that Liqo's network has for itself.
const LIQOS: &str = "wggatewayservers,wggatewayclients,routeconfigurations,internalnodes,internalfabrics,\
    genevetunnels,firewallconfigurations";
/// Kinds of which nothing may change.
const KEPT: &str =
    "networks,ips,configurations,publickeies,secrets,gatewayservers,gatewayclients,services";

struct World {
    server: ApiServer,
    liqo: Child,
    controller: Option<Child>,
    _ipam: FakeIpam,
    dir: TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        for child in [Some(&mut self.liqo), self.controller.as_mut()].into_iter().flatten() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

impl World {
    fn start() -> Result<Self, String> {
        let definitions = built("liqo-chart-1.2.0/charts/liqo-crds/crds");
        let manager = built("liqo-controller-manager");
        if let Some(missing) = [&definitions, &manager].into_iter().find(|path| !path.exists()) {
            return Err(format!("no Liqo here without {}", missing.display()));
        }
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::start(dir.path().join("server"))?;
        let mut ipam = FakeIpam::new(dir.path().join("ipam.sock"));
        ipam.start();
        server.kubectl(&["apply", "--server-side", "-f", definitions.to_str().unwrap()], "")?;
        let wefts = crds::weft().into_iter().map(|crd| serde_json::to_value(crd).unwrap());
        let wefts = json!({"apiVersion": "v1", "kind": "List", "items": wefts.collect::<Vec<_>>()});
        server.kubectl(&["apply", "--server-side", "-f", "-"], &wefts.to_string())?;
        let established = ["wait", "--for=condition=Established", "--timeout=60s", "crd", "--all"];
        server.kubectl(&established, "")?;
        let liqo = Command::new("true").spawn().unwrap();
        let mut world = Self { server, liqo, controller: None, _ipam: ipam, dir };
        world.describe();
        world.liqo = world.run_liqo(&manager);
        Ok(world)
    }

    /// The cluster, Liqo's templates, a server for milan, and a client for turin by a template of the user's.
    fn describe(&self) {
        let mut objects = own();
        for (name, cidr) in [
            ("service-cidr", "10.96.0.0/24"),
            ("external-cidr", "10.70.0.0/16"),
            ("internal-cidr", "10.80.0.0/16"),
        ] {
            objects.push(json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
                "metadata": {"name": name, "namespace": "liqo",
                    "labels": {"ipam.liqo.io/network-type": name},
                    "annotations": {"liqo.io/preinstalled": "true"}},
                "spec": {"cidr": cidr, "preAllocated": 1}}));
        }
        let mut templates = ["server", "client"].map(stock_template);
        templates[1]["metadata"] = json!({"name": "mine", "namespace": "liqo"});
        objects.extend(templates);
        objects.push(program("Deployment", "controller-manager", "--networking-enabled=true"));
        // Liqo makes milan's keys, and finds turin's by their label.
        let is_not_made = |object: &Value| object["kind"] != "Secret";
        objects.extend(peering("milan").into_iter().filter(is_not_made));
        objects.extend(peering("turin"));
        let template = |side: &str, name: &str| {
            json!({"apiVersion": NETWORKING, "kind": format!("WgGateway{side}Template"),
                "name": name, "namespace": "liqo"})
        };
        let mut milan = server("milan", &json!({"serviceType": "NodePort", "port": 51840}));
        milan["spec"]["serverTemplateRef"] = template("Server", "wireguard-server");
        milan["spec"].as_object_mut().unwrap().remove("secretRef");
        let mut turin = client("turin");
        turin["spec"]["clientTemplateRef"] = template("Client", "mine");
        objects.extend([milan, turin]);
        for object in objects {
            self.apply(&object);
            if let Some(status) = object.get("status") {
                self.set_status(&object, status);
            }
        }
    }

    fn run_liqo(&self, manager: &Path) -> Child {
        let socket = self.dir.path().join("ipam.sock");
        let arguments = [
            "--cluster-id=rome".to_owned(),
            "--authentication-enabled=false".to_owned(),
            "--offloading-enabled=false".to_owned(),
            "--metrics-address=0".to_owned(),
            "--health-probe-address=0".to_owned(),
            format!("--ipam-server=unix:{}", socket.display()),
            "--gateway-masquerade-bypass-enabled=true".to_owned(),
            format!("--gateway-server-resources={NETWORKING}/wggatewayservers"),
            format!("--gateway-client-resources={NETWORKING}/wggatewayclients"),
        ];
        let kubeconfig = format!("KUBECONFIG={}", self.server.admin().display());
        let program = [kubeconfig, manager.display().to_string()];
        let arguments: Vec<_> = program.into_iter().chain(arguments).collect();
        start_program("env".as_ref(), &arguments, &self.dir.path().join("liqo.log"))
    }

    fn kubectl(&self, arguments: &[&str], input: &str) -> String {
        let printed = self.server.kubectl(arguments, input);
        printed.unwrap_or_else(|error| panic!("kubectl {arguments:?}: {error}"))
    }

    fn apply(&self, object: &Value) {
        self.kubectl(
            &["apply", "--server-side", "--force-conflicts", "-f", "-"],
            &object.to_string(),
        );
    }

    fn set_status(&self, object: &Value, status: &Value) {
        let patch = json!({"status": status}).to_string();
        let [kind, name, namespace] =
            [&object["kind"], &object["metadata"]["name"], &object["metadata"]["namespace"]]
                .map(|text| text.as_str().unwrap_or("default"));
        let what = ["patch", kind, name, "-n", namespace, "--subresource=status"];
        self.kubectl(&[&what[..], &["--type=merge", "-p", &patch]].concat(), "");
    }

    fn merge(&self, kind: &str, (namespace, name): (&str, &str), patch: &Value) {
        let patch = patch.to_string();
        self.kubectl(&["patch", kind, name, "-n", namespace, "--type=merge", "-p", &patch], "");
    }

    fn list(&self, kinds: &str) -> Vec<Value> {
        let list = self.kubectl(&["get", kinds, "-A", "-o", "json", "--show-managed-fields"], "");
        serde_json::from_str::<Value>(&list).unwrap()["items"].as_array().unwrap().clone()
    }

    fn get(&self, kind: &str, namespace: &str, name: &str) -> Option<Value> {
        let get = ["get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found"];
        let text = self.kubectl(&get, "");
        (!text.is_empty()).then(|| serde_json::from_str(&text).unwrap())
    }

    fn until<T>(&self, what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
        let log = |name: &str| {
            let text = fs::read_to_string(self.dir.path().join(name)).unwrap_or_default();
            let last: Vec<_> = text.lines().rev().take(25).collect();
            last.into_iter().rev().collect::<Vec<_>>().join("\n")
        };
        let began = Instant::now();
        loop {
            if let Some(answer) = ask() {
                return answer;
            }
            let late = began.elapsed() > TIMEOUT;
            assert!(!late, "never: {what}\n{}\n{}", log("liqo.log"), log("controller.log"));
            sleep(PAUSE);
        }
    }

    fn adopt(&self, more: &[&str]) -> Command {
        let mut weft = Command::new(weft_program());
        weft.arg("adopt").args(more).arg("--kubeconfig").arg(self.server.admin());
        weft.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        weft
    }

    fn adopted(&self, more: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.adopt(more).output().unwrap();
        let printed = [stdout, stderr].map(|text| String::from_utf8(text).unwrap()).concat();
        assert!(status.success(), "{printed}");
        printed
    }
}

/// Template of Liqo's own chart.
fn stock_template(side: &str) -> Value {
    let mut helm = Command::new(built("helm"));
    helm.args(["template", "liqo", "--namespace=liqo", "--set=tag=v1.2.0"])
        .arg(built("liqo-chart-1.2.0"));
    helm.arg(format!("--show-only=templates/liqo-wireguard-gateway-{side}-template.yaml"));
    let Output { status, stdout, stderr } = helm.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    let mut template: Value = serde_saphyr::from_str(&String::from_utf8(stdout).unwrap()).unwrap();
    template["metadata"]["namespace"] = json!("liqo");
    template
}

/// Takes weft away, and runs Liqo's network again.
fn give_back(world: &mut World, before: &BTreeMap<String, Value>) {
    let port = before["Service liqo-tenant-milan gw-server"].pointer("/2/ports/0/nodePort");
    let pinned = json!({"spec": {"endpoint": {"nodePort": port}}});
    world.merge("gatewayserver", (&tenant("milan"), "server"), &pinned);
    for peer in ["milan", "turin"] {
        let pod = ["delete", "pod", "of-liqo", "-n", &tenant(peer), "--grace-period=0", "--force"];
        // kubectl warns, which counts as an error.
        drop(world.server.kubectl(&pod, ""));
    }
    let new = world.get("network", &tenant(NEW), NEW_NETWORK).unwrap();
    let mut program = Command::new(env!("CARGO_BIN_EXE_fabric-controller"));
    program.args(["withdraw", "--patience=1s", "--keep-prefixes", "--kubeconfig"]);
    let output = program.arg(world.server.admin()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    if let Some(mut controller) = world.controller.take() {
        drop(controller.kill());
        drop(controller.wait());
    }
    let after = world.get("network", &tenant(NEW), NEW_NETWORK).unwrap();
    assert_eq!(after["metadata"]["uid"], new["metadata"]["uid"]);
    assert_eq!(after["status"], new["status"]);
    assert_eq!(after["metadata"]["labels"].get(MANAGED_BY), None);
    for kind in ["deployment", "service"] {
        assert_eq!(world.get(kind, &tenant("milan"), "gw-server"), None);
    }
    for side in ["server", "client"] {
        world.apply(&stock_template(side));
    }
    world.liqo = world.run_liqo(&built("liqo-controller-manager"));
    for (peer, gateway) in [("milan", "server"), ("turin", "client")] {
        world.until("Liqo's gateway has its three containers", || {
            let deployment = world.get("deployment", &tenant(peer), &format!("gw-{gateway}"))?;
            let containers = deployment["spec"]["template"]["spec"]["containers"].as_array()?.len();
            (containers == 3).then_some(())
        });
    }
    world.until("Liqo's Service", || world.get("service", &tenant("milan"), "gw-server"));
    for (object, pointers) in [
        ("Service liqo-tenant-milan gw-server", ["/2/ports/0/nodePort", "/2/type"]),
        ("Secret liqo-tenant-milan gw-server", ["/0", "/4"]),
        ("Configuration liqo-tenant-milan milan", ["/2", "/3/remote"]),
        ("Network liqo-tenant-milan milan-pod-10-200-0-0-16", ["/0", "/3/cidr"]),
        ("IP default printer", ["/0", "/3/ip"]),
    ] {
        let after = kept(world);
        for pointer in pointers {
            let [after, before] = [&after, before].map(|all| field(all, object, pointer));
            assert_eq!(after, before, "{object} {pointer}");
        }
    }
    for object in world.list("networks,configurations") {
        assert!(!object["metadata"].to_string().contains("weft.dev/owner"), "{object}");
    }
}

fn field(objects: &BTreeMap<String, Value>, object: &str, pointer: &str) -> Option<Value> {
    let found = objects.get(object).unwrap_or_else(|| panic!("{object}: {:?}", objects.keys()));
    found.pointer(pointer).cloned()
}

/// A gateway's pod, as its Deployment has it.
fn pod(peer: &str, gateway: &str, address: &str) -> (Value, Value) {
    let labels = json!({"networking.liqo.io/component": "gateway", "networking.liqo.io/active": "true",
        "networking.liqo.io/gateway-name": gateway,
        "networking.liqo.io/gateway-namespace": tenant(peer),
        "app.kubernetes.io/name": gateway, "liqo.io/remote-cluster-id": peer});
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "of-liqo", "namespace": tenant(peer), "labels": labels},
        "spec": {"nodeName": "n1", "serviceAccountName": gateway,
            "automountServiceAccountToken": false,
            "containers": [{"name": "gateway", "image": "gateway"}]}});
    let ready = json!([{"type": "Ready", "status": "True"}]);
    let status = json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
        "conditions": ready});
    (pod, status)
}

/// Liqo's network, as it is while it runs.
fn liqo_runs(world: &World) {
    for (peer, gateway, address) in
        [("milan", "server", "10.200.1.3"), ("turin", "client", "10.200.1.4")]
    {
        world.until("the account of a gateway", || {
            world.get("serviceaccount", &tenant(peer), gateway)
        });
        let (pod, status) = pod(peer, gateway, address);
        world.apply(&pod);
        world.set_status(&pod, &status);
        world.until("a fabric", || {
            world.get("routeconfiguration", &tenant(peer), &format!("{peer}-node-gw"))
        });
        let firewall = format!("{peer}-masquerade-bypass");
        world.until("a firewall", || world.get("firewallconfiguration", &tenant(peer), &firewall));
        world.until("tunnels", || {
            let all = world.list("genevetunnels");
            (all.iter().filter(|of| of["metadata"]["namespace"] == tenant(peer)).count() == 2)
                .then_some(())
        });
        // As Liqo's daemons on nodes do.
        let of_daemons = json!({"metadata": {"finalizers": ["firewallconfigurations-controller.liqo.io/finalizer"]}});
        world.merge("firewallconfiguration", (&tenant(peer), &firewall), &of_daemons);
    }
    let table = json!({"name": "mine", "family": "IPV4", "chains": []});
    let finalizers = ["firewallconfigurations-controller.liqo.io/finalizer", "example.org/mine"];
    world.apply(&json!({"apiVersion": NETWORKING, "kind": "FirewallConfiguration",
        "metadata": {"name": "mine", "namespace": "liqo", "finalizers": finalizers},
        "spec": {"table": table}}));
    world.apply(&json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "IP",
        "metadata": {"name": "printer", "namespace": "default"}, "spec": {"ip": "192.0.2.99"}}));
    world.until("an address is mapped", || {
        world.get("ip", "default", "printer")?["status"]["ip"].as_str().map(str::to_owned)
    });
}

/// Objects without finalizers, owners, and names of templates and Secrets: all that must not change.
fn kept(world: &World) -> BTreeMap<String, Value> {
    let of = |object: Value| {
        let mut spec = object["spec"].clone();
        if let Some(spec) = spec.as_object_mut() {
            spec.retain(|field, _| !field.ends_with("TemplateRef") && field != "secretRef");
        }
        let mut metadata = object["metadata"].clone();
        if let Some(labels) = metadata["labels"].as_object_mut() {
            labels.remove(MANAGED_BY);
        }
        let [kind, namespace, name] =
            [&object["kind"], &metadata["namespace"], &metadata["name"]].map(|text| text.as_str());
        let name = [kind, namespace, name].map(Option::unwrap_or_default).join(" ");
        let content =
            [&metadata["uid"], &metadata["labels"], &spec, &object["status"], &object["data"]];
        (name, json!(content))
    };
    world.list(KEPT).into_iter().map(of).collect()
}

fn program(kind: &str, name: &str, argument: &str) -> Value {
    let labels = json!({"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "liqo",
        "app.kubernetes.io/component": if name == "fabric" { "networking" } else { name }});
    let container = json!({"name": name, "image": "liqo", "args": [argument]});
    json!({"apiVersion": "apps/v1", "kind": kind,
        "metadata": {"name": format!("liqo-{name}"), "namespace": "liqo", "labels": labels},
        "spec": {"selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}}})
}

/// Switches Liqo's network off, as its chart does; before, nothing can be taken over.
fn switch_off(world: &mut World) {
    world.apply(&program("DaemonSet", "fabric", "--nodename=n1"));
    for running in ["DaemonSet liqo/liqo-fabric", "Deployment liqo/liqo-controller-manager"] {
        let output = world.adopt(&[]).output().unwrap();
        let printed = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{printed}");
        let remedy =
            printed.contains("helm upgrade") && printed.contains("networking.enabled=false");
        assert!(printed.contains(running) && remedy, "{printed}");
        world.kubectl(&["delete", "daemonset", "-n", "liqo", "--all", "--cascade=background"], "");
    }
    world.apply(&program("Deployment", "controller-manager", "--networking-enabled=false"));
    drop(world.liqo.kill());
    drop(world.liqo.wait());
    ends_late(world);
}

/// In another namespace than Liqo's, and by a user without rights.
fn misuse_is_refused(world: &World) {
    let refused = |mut weft: Command| {
        let output = weft.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    let elsewhere = refused(world.adopt(&["--namespace=weft"]));
    assert!(elsewhere.contains("found Liqo in namespace liqo; expected it in weft"), "{elsewhere}");
    let mut nobody = Command::new(weft_program());
    nobody.args(["adopt", "--kubeconfig"]).arg(world.server.user("nobody"));
    let denied = refused(nobody);
    for lacking in [
        "list, patch, delete wggatewayservers.networking.liqo.io",
        "list, get, patch deployments.apps",
        "get, patch services",
        "get, patch serviceaccounts",
    ] {
        assert!(denied.contains(lacking), "{denied}");
    }
}

/// The former pod of Liqo's controller-manager is waited for.
fn ends_late(world: &World) {
    let mut pod = program("Deployment", "controller-manager", "--networking-enabled=true")["spec"]
        ["template"]
        .clone();
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!("former");
    pod["metadata"]["namespace"] = json!("liqo");
    pod["spec"]["automountServiceAccountToken"] = json!(false);
    world.kubectl(&["create", "serviceaccount", "default", "-n", "liqo"], "");
    world.apply(&pod);
    let mut weft = world.adopt(&["--dry-run"]).spawn().unwrap();
    sleep(Duration::from_secs(2));
    assert_eq!(weft.try_wait().unwrap(), None, "it waits");
    world.kubectl(&["delete", "pod", "former", "-n", "liqo"], "");
    let output = weft.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Stops it in the midst of its work.
fn interrupt(world: &World) {
    let mut weft = world.adopt(&[]).spawn().unwrap();
    let lines = BufReader::new(weft.stdout.take().unwrap()).lines();
    let seen = lines.take(3).count();
    weft.kill().unwrap();
    weft.wait().unwrap();
    assert_eq!(seen, 3, "it has much to do");
}

#[test]
fn liqos_network_becomes_wefts() {
    let mut world = match World::start() {
        Ok(world) => world,
        Err(why) => return skip(&why),
    };
    liqo_runs(&world);
    let binding = "liqo-gateway-liqo-tenant-milan-server";
    assert!(world.get("clusterrolebinding", "", binding).is_some());
    switch_off(&mut world);
    misuse_is_refused(&world);
    let before = kept(&world);
    let versions = |world: &World| -> Vec<Value> {
        let all = world.list(&format!("{KEPT},{LIQOS}"));
        all.into_iter().map(|object| object["metadata"]["resourceVersion"].clone()).collect()
    };
    let unchanged = versions(&world);
    let planned = world.adopted(&["--dry-run"]);
    assert_eq!(versions(&world), unchanged, "{planned}");
    for step in [
        "Service liqo-tenant-milan/gw-server: owned by GatewayServer server",
        "GatewayClient liqo-tenant-turin/client: template liqo/wireguard-client, no longer liqo/mine; \
         keys gw-keys",
        "ServiceAccount liqo-tenant-turin/client: owned by GatewayClient client",
        "InternalNode n1: removed",
    ] {
        assert!(planned.contains(step), "{step}: {planned}");
    }

    interrupt(&world);
    let of_another = json!({"metadata": {"finalizers": ["example.org/other"]}});
    world.merge("internalnode", ("", "n1"), &of_another);
    for arguments in [&[][..], &["--dry-run"], &[]] {
        let output = world.adopt(arguments).output().unwrap();
        let printed = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{printed}");
        let held = "InternalNode n1: finalizers example.org/other; expected nothing of Liqo's";
        assert!(printed.contains(held), "{printed}");
    }
    world.merge("internalnode", ("", "n1"), &json!({"metadata": {"finalizers": null}}));
    let done = world.adopted(&[]);
    assert!(done.contains("nothing of Liqo's network is left"), "{done}");
    assert_eq!(kept(&world), before);
    for kind in ["deployment", "service"] {
        let part = world.get(kind, &tenant("milan"), "gw-server").unwrap();
        assert_eq!(part["metadata"]["labels"][MANAGED_BY], "weft", "or its watch leaves it out");
    }
    // Liqo calls a peer's gateway and its virtual kubelet the same, and so their accounts.
    for (peer, gateway, owner) in
        [("milan", "server", "GatewayServer"), ("turin", "client", "GatewayClient")]
    {
        let account = world.get("serviceaccount", &tenant(peer), gateway).unwrap();
        let owners = &account["metadata"]["ownerReferences"];
        let is_the_gateway = owners[0]["kind"] == owner && owners[0].get("controller").is_none();
        assert!(is_the_gateway && owners[1].is_null(), "{owners}");
    }
    let left: Vec<_> = world.list(LIQOS).into_iter().map(|of| of["metadata"].clone()).collect();
    assert!(left.len() == 1 && left[0]["name"] == "mine", "{left:?}");
    assert_eq!(left[0]["finalizers"], json!(["example.org/mine"]));
    assert_eq!(world.get("clusterrolebinding", "", binding), None);
    for object in world.list("networks,ips") {
        assert_eq!(object["metadata"].get("finalizers"), None, "{object}");
    }
    let again = world.adopted(&[]);
    assert!(again.contains("nothing of Liqo's network is left"), "{again}");
    mistakes_stay(&world);
    weft_goes_on(&mut world, &before);
    give_back(&mut world, &before);
}

/// The name of a template that there never was is a mistake, and no leftover of Liqo's.
fn mistakes_stay(world: &World) {
    let name_template = |name: &str| {
        let reference = json!({"spec": {"clientTemplateRef": {"name": name}}});
        world.merge("gatewayclient", (&tenant("turin"), "client"), &reference);
    };
    name_template("absent");
    let planned = world.adopted(&["--dry-run"]);
    assert!(planned.contains("nothing of Liqo's network is left"), "{planned}");
    name_template("wireguard-client");
}

/// Prefixes, addresses, keys and Services stay what they were.
fn weft_goes_on(world: &mut World, before: &BTreeMap<String, Value>) {
    // As helm does: Liqo's go with its network, and weft's come with weft.
    for (side, text) in [
        ("server", gateway_templates::WIREGUARD_SERVER),
        ("client", gateway_templates::WIREGUARD_CLIENT),
    ] {
        let mut template: Value = serde_saphyr::from_str(text).unwrap();
        template["metadata"] = json!({"name": format!("wireguard-{side}"), "namespace": "liqo"});
        let name = format!("wggateway{side}template/wireguard-{side}");
        world.kubectl(&["delete", &name, "-n", "liqo", "--ignore-not-found"], "");
        world.apply(&template);
    }
    let (socket, log) =
        (world.dir.path().join("ipam.sock"), world.dir.path().join("controller.log"));
    world.controller = Some(start_controller(&world.server, &socket, &log));
    for (peer, gateway) in [("milan", "server"), ("turin", "client")] {
        world.until("weft's gateway is the only container", || {
            let deployment = world.get("deployment", &tenant(peer), &format!("gw-{gateway}"))?;
            let containers =
                deployment["spec"]["template"]["spec"]["containers"].as_array()?.clone();
            (containers.len() == 1 && containers[0]["name"] == "gateway").then_some(())
        });
    }
    let after = kept(world);
    for (object, pointers) in [
        ("Service liqo-tenant-milan gw-server", ["/0", "/2/ports/0/nodePort", "/2/clusterIP"]),
        ("Secret liqo-tenant-milan gw-server", ["/0", "/4", "/4/publicKey"]),
        ("Configuration liqo-tenant-milan milan", ["/0", "/2", "/3/remote"]),
        ("Network liqo-tenant-milan milan-pod-10-200-0-0-16", ["/0", "/2", "/3/cidr"]),
        ("IP default printer", ["/0", "/3/ip", "/3/cidr"]),
    ] {
        for pointer in pointers {
            let [after, before] = [&after, before].map(|all| field(all, object, pointer));
            assert!(
                before.is_some() && after == before,
                "{object} {pointer}: {before:?} {after:?}"
            );
        }
    }
    for (kind, peer, gateway, keys) in [
        ("gatewayserver", "milan", "server", "gw-server"),
        ("gatewayclient", "turin", "client", "gw-keys"),
    ] {
        let gateway = world.get(kind, &tenant(peer), gateway).unwrap();
        assert_eq!(gateway["status"]["secretRef"]["name"], keys);
    }
    assert_eq!(world.get("secret", &tenant("turin"), "gw-client"), None);
    peering(NEW).into_iter().for_each(|object| world.apply(&object));
    world.until("a peering that weft has begun has its prefixes", || {
        world.get("network", &tenant(NEW), NEW_NETWORK)?["status"]["cidr"].as_str().map(drop)
    });
}
