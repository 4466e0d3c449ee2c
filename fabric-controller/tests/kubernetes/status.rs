//! `weft status` of a cluster, from its API server.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use api_server::{ApiServer, skip};
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, cluster, cluster_alone, cluster_ip, liqo_definitions, metadata, peering, server,
    tenant, weft_program,
};

/// Its rules have nothing for Helm to fill in.
const STATUS_ROLE: &str = "../deploy/chart/templates/status-reader.yaml";

/// A request is given up after 5 s, all of them together after 15.
const BOUND: Duration = Duration::from_secs(12);

fn weft(arguments: &[&str]) -> Output {
    let mut weft = Command::new(weft_program());
    weft.env_remove("KUBECONFIG").arg("status").args(arguments).output().unwrap()
}

fn of(kubeconfig: &Path, arguments: &[&str]) -> Output {
    let kubeconfig = ["--kubeconfig", kubeconfig.to_str().unwrap()];
    weft(&[&kubeconfig[..], arguments].concat())
}

fn printed(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text)).concat()
}

pub(crate) fn observed(cluster: &Cluster) -> Value {
    let output = of(&cluster.server.admin(), &["-o", "json"]);
    let observed = serde_json::from_slice(&output.stdout);
    observed.unwrap_or_else(|error| panic!("{error}: {}", printed(&output)))
}

fn of_peer(observed: &Value, peer: &str) -> Value {
    let all = observed["peerings"].as_array().unwrap().iter();
    all.into_iter().find(|peering| peering["cluster"] == peer).cloned().unwrap_or_default()
}

pub(crate) fn has_problem(observed: &Value, parts: &[&str]) -> bool {
    let mut all = observed["problems"].as_array().unwrap().iter().filter_map(Value::as_str);
    all.any(|problem| parts.iter().all(|part| problem.contains(part)))
}

/// Runs a pod of the chart, or of a gateway.
fn run(cluster: &Cluster, name: &str, program: &str, node: &str) -> Value {
    run_in(cluster, "liqo", [name, program, node])
}

fn run_in(cluster: &Cluster, namespace: &str, [name, program, node]: [&str; 3]) -> Value {
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"fabric.weft.dev/program": program}},
        "spec": {"nodeName": node, "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "program", "image": "program"}]}});
    cluster.apply(&json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": namespace}}));
    cluster.apply(&pod);
    set_ready(cluster, &pod, "True");
    pod
}

fn set_ready(cluster: &Cluster, pod: &Value, ready: &str) {
    let conditions = json!([{"type": "Ready", "status": ready, "message": "set by the test"}]);
    let state = json!([{"name": "program", "image": "i", "imageID": "", "ready": ready == "True",
        "restartCount": 0, "state": {"running": {}}}]);
    let status = json!({"conditions": conditions, "containerStatuses": state});
    cluster.set_status(pod, &status);
}

/// Writes the status that a gateway would report.
fn report(cluster: &Cluster, peer: &str) {
    let config = json!({"kind": "gatewayconfig",
        "metadata": {"name": "server", "namespace": tenant(peer)}});
    cluster.until("its config", || cluster.get("gatewayconfig", &tenant(peer), "server"));
    cluster.set_status(
        &config,
        &json!({"appliedGeneration": 1, "problems": ["no route to 198.51.100.7"],
            "peerEndpoint": "198.51.100.7:51840", "lastHandshake": "2026-01-31T12:00:00Z",
            "receivedBytes": 1536, "transmittedBytes": 7, "mtu": 1340, "mtuBound": "Spec",
            "pathMtu": 1400}),
    );
    let connection = json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "Connection",
        "metadata": metadata("gw-server", peer),
        "spec": {"type": "Server", "gatewayRef": {"name": "server", "namespace": tenant(peer)}}});
    cluster.apply(&connection);
    let latency = json!({"value": "3ms", "timestamp": "2026-01-31T12:00:00Z"});
    cluster.set_status(&connection, &json!({"value": "Connected", "latency": latency}));
}

#[test]
fn status_shows_all_that_gateway_reports() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let programs = [
        ("c", "fabric-controller", "n1"),
        ("i", "ipam", "n1"),
        ("a1", "route-agent", "n1"),
        ("a2", "route-agent", "n2"),
    ];
    let [controller, _, _, _] =
        programs.map(|(name, program, node)| run(cluster, name, program, node));
    cluster.apply_all(&peering("dijon"));
    cluster.apply(&server("dijon", &cluster_ip()));
    cluster.until("its account", || cluster.get("serviceaccount", &tenant("dijon"), "gw-server"));
    cluster.run_pod("dijon", "gw-server-1", "n2", "10.200.2.7");
    report(cluster, "dijon");
    let shown = cluster.until("the peering is connected", || {
        let shown = of_peer(&observed(cluster), "dijon");
        (shown["state"] == "Connected" && shown["node"] == "n2").then_some(shown)
    });
    let remaps = shown["remaps"].as_array().unwrap();
    assert!(remaps.iter().any(|remap| remap["remote"] == "10.200.0.0/16"), "{shown}");
    for (field, is) in [
        ("role", json!("Server")),
        ("namespace", json!(tenant("dijon"))),
        ("gateway", json!("server")),
        ("latency", json!("3ms")),
        ("mtu", json!(1340)),
        ("mtuBound", json!("Spec")),
        ("pathMtu", json!(1400)),
        ("receivedBytes", json!(1536)),
        ("transmittedBytes", json!(7)),
        ("lastHandshake", json!("2026-01-31T12:00:00Z")),
        ("endpoint", json!("198.51.100.7:51840")),
    ] {
        assert_eq!(shown[field], is, "{field}");
    }
    let all = observed(cluster);
    assert_eq!((&all["clusterId"], all.get("node")), (&json!("rome"), None));
    assert!(has_problem(&all, &["gateway liqo-tenant-dijon/server: no route to 198.51.100.7"]));
    assert!(!has_problem(&all, &["ipam:"]) && !has_problem(&all, &["route-agent"]), "{all:#}");
    let table = printed(&of(&cluster.server.admin(), &["--peer=dijon"]));
    let row = table.lines().find(|line| line.starts_with("dijon")).unwrap();
    assert!(table.starts_with("cluster rome\n"), "{table}");
    for cell in ["Server", "Connected", "3ms", "1.5 KiB", "1340 (spec.mtu)", "198.51.100.7:51840"] {
        assert!(row.contains(cell), "{cell}: {row}");
    }

    // Absent objects do not count, even if they were reported last.
    set_ready(cluster, &controller, "False");
    cluster.delete("pod", "liqo", "a2");
    let all = observed(cluster);
    let why = "fabric-controller: pod c is not ready (set by the test)";
    assert!(has_problem(&all, &[why, "changes have no effect"]), "{all:#}");
    assert!(has_problem(&all, &["node n2: route-agent: there is none"]), "{all:#}");
    assert_eq!(of_peer(&all, "dijon")["state"], "Connected", "packets need neither");
    cluster.kill_pod("dijon", "gw-server-1");
    let all = cluster.until("it is down", || {
        let all = observed(cluster);
        (of_peer(&all, "dijon")["state"] == "Down").then_some(all)
    });
    assert!(has_problem(&all, &["gateway liqo-tenant-dijon/server: it has no pod"]), "{all:#}");
    assert_eq!(of_peer(&all, "dijon").get("latency"), None);
    assert_eq!(of(&cluster.server.admin(), &[]).status.code(), Some(3));

    // Faults are reported with object and field.
    let mut wrong = server("dijon", &cluster_ip());
    wrong["spec"]["serverTemplateRef"] = json!({"apiVersion": "networking.liqo.io/v1beta1",
        "kind": "WgGatewayServerTemplate", "name": "none", "namespace": "liqo"});
    cluster.apply(&wrong);
    let parts = ["GatewayServer liqo-tenant-dijon/server: spec.serverTemplateRef: ", "liqo/none"];
    cluster.until("the wrong field", || has_problem(&observed(cluster), &parts).then_some(()));
    for (name, _, _) in programs {
        drop(cluster.server.kubectl(&["delete", "pod", name, "-n", "liqo", "--wait=false"], ""));
    }
}

#[test]
fn status_finds_weft_in_any_namespace() {
    const ELSEWHERE: &str = "default";
    let Some((_turn, cluster)) = cluster_alone() else { return };
    // Nothing shows weft before the first controller has its Lease.
    let admin = cluster.server.admin();
    cluster.until("weft is there", || (of(&admin, &[]).status.code() != Some(4)).then_some(()));
    let missing = || has_problem(&observed(cluster), &["fabric-controller: it has no pod"]);
    cluster.until("none runs", || missing().then_some(()));
    run_in(cluster, ELSEWHERE, ["c", "fabric-controller", "n1"]);
    cluster.until("it is found", || (!missing()).then_some(()));
    cluster.delete("pod", ELSEWHERE, "c");
    cluster.until("it is missed again", || missing().then_some(()));
}

#[test]
fn lease_that_nobody_renews_is_named() {
    const LEASE: [&str; 4] = ["lease", "weft-fabric-controller", "-n", "default"];
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": LEASE[1], "namespace": LEASE[3]},
        "spec": {"holderIdentity": "none", "renewTime": "2026-01-01T00:00:00.000000Z"}});
    cluster.kubectl(&["create", "-f", "-"], &lease.to_string());
    let problem = ["changes have no effect: its Lease has not been renewed", "default"];
    assert!(!has_problem(&observed(cluster), &problem), "by the clock of the API server");
    let shown = ["get", "-o", "json", "--show-managed-fields"];
    let written = cluster.kubectl(&[&shown[..], &LEASE].concat(), "");
    let mut written: Value = serde_json::from_str(&written).unwrap();
    for field in written["metadata"]["managedFields"].as_array_mut().unwrap() {
        field["time"] = json!("2026-01-01T00:00:00Z");
    }
    // A write of nothing but times is none.
    written["metadata"]["annotations"] = json!({"touched": "by another"});
    cluster.kubectl(&["replace", "-f", "-"], &written.to_string());
    assert!(has_problem(&observed(cluster), &problem));
    cluster.kubectl(&[&["delete"], &LEASE[..]].concat(), "");
    cluster.until("it is gone", || (!has_problem(&observed(cluster), &problem)).then_some(()));
}

#[test]
fn status_without_rights_names_missing_ones() {
    let Some(cluster) = cluster() else { return };
    let output = of(&cluster.server.user("nobody"), &[]);
    assert_eq!(output.status.code(), Some(1));
    let all = [
        "does not let this user list",
        "gatewayconfigs",
        "nodeconfigs",
        "connections",
        "expected the verb list",
        "https://127.0.0.1:",
    ];
    let printed = printed(&output);
    assert!(all.iter().all(|part| printed.contains(part)), "{printed}");
    // With these alone it reports what it cannot see.
    let resources = "configurations.networking.liqo.io,connections.networking.liqo.io,\
        gatewayservers.networking.liqo.io,gatewayclients.networking.liqo.io,\
        gatewayconfigs.fabric.weft.dev,nodeconfigs.fabric.weft.dev,fabricrecords.fabric.weft.dev";
    let role = ["create", "clusterrole", "little", "--verb=list", "--resource", resources];
    cluster.kubectl(&role, "");
    let binding =
        ["create", "clusterrolebinding", "little", "--clusterrole=little", "--user=little"];
    cluster.kubectl(&binding, "");
    let user = cluster.server.user("little");
    let all: Value = cluster.until("the right counts", || {
        serde_json::from_slice(&of(&user, &["-o", "json"]).stdout).ok()
    });
    assert!(has_problem(&all, &["pods cannot be listed", "forbidden"]), "{all:#}");
    assert!(
        has_problem(
            &all,
            &["cannot list every IP", "refused (403)", "expected the verb list on ips"]
        ),
        "{all:#}"
    );
    assert!(has_problem(&all, &["leases cannot be listed", "expected the verb list"]), "{all:#}");
    assert!(!has_problem(&all, &["ListMeta"]), "{all:#}");
    assert_eq!(all["clusterId"], "rome", "as it is published");
}

#[test]
fn role_of_the_chart_is_all_that_status_needs() {
    let Some(cluster) = cluster() else { return };
    let template = fs::read_to_string(STATUS_ROLE).unwrap();
    let (_, rules) = template.split_once("\nrules:").unwrap();
    let rules: Value = serde_saphyr::from_str(rules).unwrap();
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "weft-status"}, "rules": rules});
    cluster.apply(&role);
    let binding = ["create", "clusterrolebinding", "reader", "--clusterrole=weft-status"];
    cluster.kubectl(&[&binding[..], &["--user=reader"]].concat(), "");
    let user = cluster.server.user("reader");
    let all: Value = cluster.until("the right counts", || {
        serde_json::from_slice(&of(&user, &["-o", "json"]).stdout).ok()
    });
    assert!(!has_problem(&all, &["cannot", "list"]), "{all:#}");
}

#[test]
fn status_of_hung_api_server_ends_soon() {
    let Some(cluster) = cluster() else { return };
    let admin = fs::read_to_string(cluster.server.admin()).unwrap();
    let (before, after) = admin.split_once("https://127.0.0.1:").unwrap();
    let end = after.find('\'').unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let open = listener.local_addr().unwrap().port();
    for (port, why) in [(open, "did not answer within"), (1, "Connection refused")] {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{port}.kubeconfig"));
        fs::write(&path, format!("{before}https://127.0.0.1:{port}{}", &after[end..])).unwrap();
        let began = Instant::now();
        let output = of(&path, &[]);
        assert_eq!(output.status.code(), Some(1));
        let printed = printed(&output);
        assert!(
            printed.contains(why) && printed.contains(&format!("127.0.0.1:{port}")),
            "{printed}"
        );
        assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
    }
    let output = of(&cluster.server.admin(), &["--context", "other"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(printed(&output).contains("other"), "{}", printed(&output));
    assert!(of(&cluster.server.admin(), &["--context", "c"]).status.code() != Some(1));
}

#[test]
fn cluster_without_weft_differs_from_healthy_one() {
    let dir = tempfile::tempdir().unwrap();
    let server = ApiServer::start(dir.path().join("server"));
    let Ok(server) = server.map_err(|why| skip(&why)) else { return };
    let is_without = || {
        let output = of(&server.admin(), &[]);
        let printed = printed(&output);
        assert_eq!(output.status.code(), Some(4), "{printed}");
        assert!(printed.contains("weft is not installed in this cluster"), "{printed}");
    };
    is_without();
    let kinds = ["configurations", "connections", "gatewayservers", "gatewayclients"];
    let Some(definitions) = liqo_definitions("networking", &kinds) else { return };
    let gateway = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "gw", "namespace": "default",
        "labels": {"networking.liqo.io/component": "gateway"}},
        "spec": {"automountServiceAccountToken": false, "containers": [{"name": "a", "image": "a"}]}});
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": "default"}});
    for objects in [definitions, account.to_string(), gateway.to_string()] {
        server.kubectl(&["apply", "--server-side", "-f", "-"], &objects).unwrap();
    }
    is_without();
}
