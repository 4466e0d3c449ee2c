//! `helm uninstall`, with a test in place of the controller of Jobs.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use api_server::ApiServer;
use serde_json::{Map, Value, json};

use crate::helm::MIN_VALUES;
use crate::life::{NAMELESS, Release};
use crate::policies::rights_of_withdrawal;

const JOB: &str = "liqo-withdrawal";
const NOW: &str = "2026-01-31T12:00:00Z";
/// Kinds of its rights.
const RIGHTS: &str = "serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings";
const OURS: &str = "app.kubernetes.io/managed-by=weft";
/// Kinds that programs make.
const KINDS: &str = "deployments,poddisruptionbudgets,services,endpointslices,serviceaccounts,roles,rolebindings,secrets,\
    networks,ips,connections,gatewayconfigs,nodeconfigs,fabricrecords,gatewayrecords,foreignclusters";

/// The program that the release runs before it goes, by the rights that it gives it.
pub(crate) fn uninstall(release: &Release) {
    let dir = match weft_tests::bin_dir() {
        Ok(dir) => dir,
        Err(error) => {
            weft_tests::skip(&format!("{error:#}"));
            release.plain(&["uninstall", "weft", "--no-hooks", "--wait"]);
            return;
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| run_job(release, &dir));
        release.plain(&["uninstall", "weft", "--wait", "--timeout=60s"]);
    });
}

fn run_job(release: &Release, dir: &Path) {
    let job = release.server.wait_until("there is a Job", || job_of(release));
    let job: Value = serde_json::from_str(&job).unwrap();
    let pod = &job["spec"]["template"]["spec"];
    let account = pod["serviceAccountName"].as_str().unwrap();
    let user = release.server.user(&format!("system:serviceaccount:liqo:{account}"));
    let container = &pod["containers"][0];
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let arguments = container["args"].as_array().unwrap().iter().map(text);
    // It is in no pod.
    let arguments = arguments.filter(|argument| argument != "--kubernetes");
    let mut program = Command::new(dir.join(text(&container["command"][0])));
    program.args(arguments).arg("--kubeconfig").arg(user);
    let output = program.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    complete(release);
}

fn complete(release: &Release) {
    let is = |what: &str| json!({"type": what, "status": "True", "lastTransitionTime": NOW});
    let conditions = match ApiServer::is_older_than(31) {
        true => json!([is("Complete")]),
        false => json!([is("SuccessCriteriaMet"), is("Complete")]),
    };
    set_status(
        release,
        &json!({"startTime": NOW, "completionTime": NOW, "succeeded": 1, "conditions": conditions}),
    );
}

fn job_of(release: &Release) -> Result<String, String> {
    release.server.kubectl(&["get", "job", JOB, "--namespace=liqo", "--output=json"], "")
}

fn set_status(release: &Release, status: &Value) {
    let status = json!({ "status": status }).to_string();
    let patch = ["patch", "job", JOB, "--namespace=liqo", "--subresource=status", "--type=merge"];
    let patch = [&patch[..], &["--patch", &status]].concat();
    release.server.kubectl(&patch, "").unwrap();
}

#[test]
fn failed_uninstall_leaves_no_rights() {
    let Some(release) = Release::prepare() else { return };
    release.helm("install", &[MIN_VALUES, NAMELESS]).unwrap();
    let left = || release.labelled(RIGHTS, "app.kubernetes.io/component=withdrawal");
    thread::scope(|scope| {
        scope.spawn(|| {
            release.server.wait_until("there is a Job", || job_of(&release));
            assert_eq!(left().lines().count(), 5);
            let is =
                |what: &str| json!({"type": what, "status": "True", "lastTransitionTime": NOW});
            let conditions = json!([is("FailureTarget"), is("Failed")]);
            set_status(&release, &json!({"startTime": NOW, "conditions": conditions}));
        });
        release.helm_run(&["uninstall", "weft", "--timeout=60s"]).unwrap_err();
    });
    assert_eq!(left(), "");
    release.apply(&rights_of_withdrawal(&release));
    assert_eq!(left().lines().count(), 5, "as after a Helm that was killed");
    for line in removal_by_hand() {
        let arguments: Vec<_> =
            line.split_whitespace().skip(1).chain(["--ignore-not-found"]).collect();
        release.server.kubectl(&arguments, "").unwrap();
    }
    assert_eq!(left(), "");
}

/// Commands of the chart's README for rights that Helm has left.
fn removal_by_hand() -> Vec<String> {
    let text = fs::read_to_string("../deploy/chart/README.md").unwrap();
    let is_one = |line: &&str| line.starts_with("    kubectl delete") && line.contains(JOB);
    text.lines().filter(is_one).map(str::to_owned).collect()
}

/// A webhook must not outlive what answers it, nor end while peerings are still there.
#[test]
fn webhooks_end_with_job_before_controllers() {
    const WEBHOOKS: (&str, &str) = ("mutatingwebhookconfiguration", "weft-cidr-lists");
    const CONTROLLERS: (&str, &str) = ("deployment", "liqo-fabric-controller");
    let Some(release) = Release::prepare() else { return };
    let Ok(dir) = weft_tests::bin_dir() else {
        return weft_tests::skip("without programs there is none that removes webhooks");
    };
    release.helm("install", &[MIN_VALUES, NAMELESS]).unwrap();
    // Deleted objects stay, with the version of their deletion.
    let finalizers = json!({"metadata": {"finalizers": ["weft.dev/test"]}});
    for (kind, name) in [WEBHOOKS, CONTROLLERS] {
        release.patch(kind, name, &finalizers);
    }
    let deleted_at = |(kind, name): (&str, &str)| {
        let metadata = release.get(kind, name)["metadata"].clone();
        let version = metadata["resourceVersion"].as_str()?.parse::<u64>().ok();
        version.filter(|_| !metadata["deletionTimestamp"].is_null())
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            release.server.wait_until("there is a Job", || job_of(&release));
            assert_eq!(deleted_at(WEBHOOKS), None, "the Job has not begun");
            run_job(&release, &dir);
        });
        release.plain(&["uninstall", "weft", "--timeout=60s"]);
    });
    let [webhooks, controllers] = [WEBHOOKS, CONTROLLERS].map(|of| deleted_at(of).unwrap());
    assert!(webhooks < controllers, "webhooks at {webhooks}, controllers at {controllers}");
}

#[test]
fn uninstall_removes_objects_of_programs() {
    let Some(release) = Release::prepare() else { return };
    if weft_tests::bin_dir().is_err() {
        return weft_tests::skip("without programs there is none that removes their objects");
    }
    release.helm("install", &[MIN_VALUES, NAMELESS]).unwrap();
    release.apply(&[json!({"apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": "tenant", "labels": {"liqo.io/tenant-namespace": "true"}}})]);
    let apply = ["apply", "--server-side", "--field-manager=weft", "--filename=-"];
    for object in made() {
        let text = object.to_string();
        release.server.wait_until("it is made", || release.server.kubectl(&apply, &text));
    }
    let gateway = json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
        "metadata": {"name": "made", "namespace": "tenant"},
        "spec": {"endpoint": {"serviceType": "ClusterIP", "port": 51840}}});
    release.apply(&[configuration(json!({"remote": {"cidr": side()}})), gateway]);
    let own = configuration(json!({"local": {"cidr": side()}}));
    let force = [&apply[..], &["--force-conflicts"]].concat();
    release.server.kubectl(&force, &own.to_string()).unwrap();
    let spec = json!({"endpoint": {"addresses": ["192.0.2.1"], "port": 51840}});
    let at = |ip: &str, node: &str| json!({"internalEndpoint": {"ip": ip, "node": node}});
    let by_liqo = ["replace", "--subresource=status", "--field-manager=liqo", "--filename=-"];
    let condition = json!({"type": "Ready", "status": "False", "reason": "Invalid", "message": "",
        "lastTransitionTime": "2026-01-31T12:00:00Z"});
    let liqos = [
        ("moved", at("10.200.1.9", "n1"), at("10.200.2.9", "n2")),
        ("unused", json!({}), json!({"conditions": [condition]})),
    ];
    for (name, status, _) in &liqos {
        let made = gateway_client(name, json!({"spec": spec}));
        release.server.kubectl(&["apply", "--filename=-"], &made).unwrap();
        let was = gateway_client(name, json!({"spec": spec, "status": status}));
        release.server.kubectl(&by_liqo, &was).unwrap();
    }
    let status = json!({"remote": {"cidr": side()}});
    let with_status = json!({"apiVersion": own["apiVersion"], "kind": own["kind"], "status": status,
        "metadata": own["metadata"]});
    let apply_status = [&force[..], &["--subresource=status"]].concat();
    release.server.kubectl(&apply_status, &with_status.to_string()).unwrap();
    for (name, _, status) in &liqos {
        let status = gateway_client(name, json!({"status": status}));
        release.server.kubectl(&apply_status, &status).unwrap();
    }

    uninstall(&release);
    assert_eq!(release.labelled(KINDS, OURS), "");
    let get = ["get", "configuration", "milan", "--namespace=tenant", "--output=json"];
    let left: Value = serde_json::from_str(&release.server.kubectl(&get, "").unwrap()).unwrap();
    assert_eq!(left["spec"], json!({"remote": {"cidr": side()}}));
    assert!(left["status"].as_object().is_none_or(|status| status.is_empty()), "{left}");
    for (name, ..) in liqos {
        let get = ["get", "gatewayclient", name, "--namespace=tenant", "--output=json"];
        let left: Value = serde_json::from_str(&release.server.kubectl(&get, "").unwrap()).unwrap();
        let is_empty = |status: &Map<String, Value>| status.is_empty();
        assert!(left["status"].as_object().is_none_or(is_empty), "{left}");
    }
}

fn gateway_client(name: &str, rest: Value) -> String {
    let mut client = json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayClient",
        "metadata": {"name": name, "namespace": "tenant"}});
    client.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    client.to_string()
}

fn side() -> Value {
    json!({"pod": ["10.200.0.0/16"], "external": ["10.70.0.0/16"]})
}

fn configuration(spec: Value) -> Value {
    json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "Configuration",
        "metadata": {"name": "milan", "namespace": "tenant",
            "labels": {"liqo.io/remote-cluster-id": "milan"}}, "spec": spec})
}

/// One of each.
fn made() -> Vec<Value> {
    let ours = |kind: &str, version: &str, rest: Value| {
        let labels = json!({"app.kubernetes.io/managed-by": "weft",
            "networking.liqo.io/gateway-resource": "true",
            "endpointslice.kubernetes.io/managed-by": "weft.dev"});
        let mut object = json!({"apiVersion": version, "kind": kind,
            "metadata": {"name": "gw-made", "namespace": "tenant", "labels": labels}});
        object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        object
    };
    let rbac = "rbac.authorization.k8s.io/v1";
    let role = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "gw-made"});
    let pod = json!({"metadata": {"labels": {"a": "b"}},
        "spec": {"containers": [{"name": "a", "image": "a"}]}});
    let deployment = json!({"selector": {"matchLabels": {"a": "b"}}, "template": pod});
    let port = json!({"port": 51840, "protocol": "UDP"});
    let gateway = json!({"kind": "GatewayClient", "name": "made", "namespace": "tenant"});
    let node = json!({"clusterId": "rome", "underlay": [], "localPods": [], "podCidrs": [],
        "external": [], "peerings": [], "vxlanSources": []});
    let config = json!({"clusterId": "rome", "peerClusterId": "milan", "role": "Client",
        "gatewayUid": "u", "secretName": "made", "mtu": 1340, "tunnelAddress": "169.254.18.2",
        "peerTunnelAddress": "169.254.18.1", "remaps": [], "podCidrs": [], "externalCidrs": [],
        "overlay": {"address": "10.80.0.2"}, "nodes": [],
        "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5}});
    let networking = "networking.liqo.io/v1beta1";
    vec![
        ours("ServiceAccount", "v1", json!({})),
        ours("Role", rbac, json!({"rules": []})),
        ours("RoleBinding", rbac, json!({"roleRef": role})),
        ours("Service", "v1", json!({"spec": {"ports": [port]}})),
        ours(
            "EndpointSlice",
            "discovery.k8s.io/v1",
            json!({"addressType": "IPv4", "endpoints": []}),
        ),
        ours("Deployment", "apps/v1", json!({"spec": deployment})),
        ours("Secret", "v1", json!({})),
        ours("Connection", networking, json!({"spec": {"type": "Client", "gatewayRef": gateway}})),
        ours("Network", "ipam.liqo.io/v1alpha1", json!({"spec": {"cidr": "10.9.0.0/16"}})),
        ours("IP", "ipam.liqo.io/v1alpha1", json!({"spec": {"ip": "0.0.0.0"}})),
        ours("GatewayConfig", "fabric.weft.dev/v1alpha1", json!({"spec": config})),
        ours("ForeignCluster", "core.liqo.io/v1beta1", json!({"spec": {"clusterID": "milan"}})),
        ours("NodeConfig", "fabric.weft.dev/v1alpha1", json!({"spec": node})),
    ]
}
