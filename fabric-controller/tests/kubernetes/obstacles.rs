//! A controller that may not read all that it needs: a definition is missing, a list is denied. On an
//! API server of its own.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use api_server::{ApiServer, skip};
use fabric_api::crds;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cluster::{client, cluster_ip, peering, server, tenant, weft_program};

const MISSING: &str = "wggatewayclienttemplates.networking.liqo.io";
const TIMEOUT: Duration = Duration::from_secs(60);

struct World {
    server: ApiServer,
    controller: Option<Child>,
    dir: TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(mut controller) = self.controller.take() {
            drop(controller.kill());
            drop(controller.wait());
        }
    }
}

impl World {
    /// Starts without one definition, and with a user for the controller that may not read Nodes.
    fn start() -> Result<Self, String> {
        let dir = tempfile::tempdir().unwrap();
        let api_server = ApiServer::start(dir.path().join("server"))?;
        let world = Self { server: api_server, controller: None, dir };
        let all = crds::liqo().into_iter().chain(crds::weft());
        let all = all.map(|crd| serde_json::to_value(crd).unwrap());
        world.define(all.filter(|crd| crd["metadata"]["name"] != MISSING).collect());
        world.apply(json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "liqo"}}));
        world.grant(json!([
            "namespaces",
            "configmaps",
            "secrets",
            "pods",
            "services",
            "serviceaccounts",
            "events"
        ]));
        peering("bern").into_iter().for_each(|object| world.apply(object));
        world.apply(client("bern"));
        world.apply(server("bern", &cluster_ip()));
        Ok(world)
    }

    fn define(&self, definitions: Vec<Value>) {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": definitions}).to_string();
        self.kubectl(&["apply", "--server-side", "-f", "-"], &list);
        let wait = ["wait", "--for=condition=Established", "--timeout=60s", "-f", "-"];
        self.kubectl(&wait, &list);
    }

    /// Lets the controller do everything with these resources of the core group, and with all others.
    fn grant(&self, core: Value) {
        let all = json!(["*"]);
        let groups = json!([
            "apps",
            "policy",
            "networking.liqo.io",
            "ipam.liqo.io",
            "core.liqo.io",
            "fabric.weft.dev",
            "coordination.k8s.io",
            "events.k8s.io",
            "discovery.k8s.io",
            "rbac.authorization.k8s.io",
            "admissionregistration.k8s.io"
        ]);
        self.apply(json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
            "metadata": {"name": "controller"},
            "rules": [{"apiGroups": [""], "resources": core, "verbs": all},
                {"apiGroups": groups, "resources": all, "verbs": all}]}));
        self.apply(json!({"apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding", "metadata": {"name": "controller"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole",
                "name": "controller"},
            "subjects": [{"kind": "User", "name": "controller",
                "apiGroup": "rbac.authorization.k8s.io"}]}));
    }

    fn run_controller(&mut self) {
        let mut program = Command::new(env!("CARGO_BIN_EXE_fabric-controller"));
        program.args(["--kubernetes", "--ipam=127.0.0.1:1", "--webhook-listen=127.0.0.1:0"]);
        program.arg("--kubeconfig").arg(self.server.user("controller"));
        program.arg(format!("--http=unix:{}", self.dir.path().join("http").display()));
        program.env("POD_NAME", "weft-7").stderr(Stdio::null()).stdin(Stdio::null());
        self.controller = Some(program.spawn().unwrap());
    }

    fn kubectl(&self, arguments: &[&str], input: &str) -> String {
        let answer = self.server.kubectl(arguments, input);
        answer.unwrap_or_else(|error| panic!("kubectl {arguments:?}: {error}"))
    }

    fn apply(&self, object: Value) {
        let apply = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
        self.kubectl(&apply, &object.to_string());
    }

    fn ready(&self) -> String {
        let mut answer = String::new();
        let socket = self.dir.path().join("http");
        let Ok(mut stream) = UnixStream::connect(socket) else { return answer };
        write!(stream, "GET /readyz HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn status(&self) -> String {
        let mut weft = Command::new(weft_program());
        weft.args(["status", "--kubeconfig"]).arg(self.server.admin());
        String::from_utf8(weft.output().unwrap().stdout).unwrap()
    }

    fn condition(&self, kind: &str, name: &str) -> Option<Value> {
        let get = ["get", kind, name, "-n", &tenant("bern"), "-o", "json"];
        let object: Value = serde_json::from_str(&self.kubectl(&get, "")).unwrap();
        let conditions = object["status"]["conditions"].as_array()?;
        conditions.iter().find(|condition| condition["type"] == "Accepted").cloned()
    }

    fn events(&self) -> String {
        let get = ["get", "events.events.k8s.io", "-n", "liqo", "-o", "json"];
        let list: Value = serde_json::from_str(&self.kubectl(&get, "")).unwrap();
        let about = list["items"].as_array().unwrap().iter();
        let about = about.filter(|event| event["regarding"]["name"] == "weft-7");
        about.map(|event| format!("{} {}\n", event["reason"], event["note"])).collect()
    }
}

fn until(what: &str, mut ask: impl FnMut() -> Result<(), String>) {
    let began = Instant::now();
    while let Err(last) = ask() {
        assert!(began.elapsed() < TIMEOUT, "never: {what}: {last}");
        sleep(Duration::from_millis(250));
    }
}

/// Returns true if all of these are in a text.
fn has(text: String, words: &[&str]) -> Result<(), String> {
    if words.iter().all(|word| text.contains(word)) { Ok(()) } else { Err(text) }
}

#[test]
fn unreadable_kind_is_reported_with_remedy() {
    let mut world = match World::start() {
        Ok(world) => world,
        Err(why) => return skip(&why),
    };
    world.run_controller();
    let definition = ["installs the CustomResourceDefinition", MISSING];
    let right = ["may not watch Node", "verbs get, list and watch on nodes"];
    for words in [definition, right] {
        until("it is not ready, with the reason", || {
            has(world.ready(), &[&[" 503 "], &words[..]].concat())
        });
        until("an Event", || has(world.events(), &[&["CannotRead"], &words[..]].concat()));
        for (kind, name) in [("gatewayclient", "client"), ("configuration", "bern")] {
            until("a condition", || {
                let condition = world.condition(kind, name).unwrap_or_default();
                has(condition.to_string(), &[&["CannotRead", "False"], &words[..]].concat())
            });
        }
        until("weft status", || {
            has(
                world.status(),
                &[&["fabric-controller: changes have no effect"], &words[..]].concat(),
            )
        });
    }

    let all = crds::liqo().into_iter().map(|crd| serde_json::to_value(crd).unwrap());
    world.define(all.filter(|crd| crd["metadata"]["name"] == MISSING).collect());
    world.grant(json!(["*"]));
    until("it is ready", || has(world.ready(), &[" 200 "]));
    until("the condition is corrected", || {
        let condition = world.condition("gatewayclient", "client").unwrap_or_default().to_string();
        if condition.contains("CannotRead") { Err(condition) } else { Ok(()) }
    });
    until("weft status has no such problem", || {
        let status = world.status();
        if status.contains("may not watch") { Err(status) } else { Ok(()) }
    });
}
