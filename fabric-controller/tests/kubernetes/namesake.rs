//! A gateway that is deleted and made anew at once with other settings, as liqoctl does it. What
//! was made for the first is still there: no garbage collector runs here, so it stays as long as it can.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{
    Cluster, client, cluster, cluster_alone, cluster_ip, peering, server, tenant,
};

/// Shorter than the interval of resyncs, of which one may come at any time.
const SOON: Duration = Duration::from_secs(4);

/// History of a gateway's status, one line for each change.
struct StatusHistory {
    watch: Child,
    file: PathBuf,
}

impl StatusHistory {
    /// Records the uid, the endpoint's port and the Secret's name.
    fn of(cluster: &Cluster, kind: &str, peer: &str, name: &str) -> Self {
        let file = cluster.file(&format!("history-{peer}"));
        let line = "--output=jsonpath={.metadata.uid} {.status.endpoint.port} {.status.secretRef.name}{\"\\n\"}";
        let what = ["get", kind, name, "--namespace", &tenant(peer), "--watch", line];
        let mut watch = cluster.server.command(&what);
        let watch = watch.stdout(File::create(&file).unwrap()).spawn().unwrap();
        let history = Self { watch, file };
        cluster.until("it is watched", || (!history.lines().is_empty()).then_some(()));
        history
    }

    fn lines(&self) -> Vec<Vec<String>> {
        let text = fs::read_to_string(&self.file).unwrap();
        text.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
    }

    /// Values in that column of one with that uid, without empty ones.
    fn values(&self, uid: &Value, column: usize) -> Vec<String> {
        let lines = self.lines().into_iter().filter(|line| uid == line[0].as_str());
        lines.map(|line| line[column].clone()).filter(|value| !value.is_empty()).collect()
    }
}

impl Drop for StatusHistory {
    fn drop(&mut self) {
        drop(self.watch.kill());
        drop(self.watch.wait());
    }
}

/// The port is one of the first 86, of which Kubernetes gives none to Services that request no certain one
/// (KEP-3668).
fn node_port(port: u16) -> Value {
    json!({"serviceType": "NodePort", "port": 51840, "nodePort": port})
}

fn owner(cluster: &Cluster, kind: &str, peer: &str, name: &str) -> Option<Value> {
    let object = cluster.get(kind, &tenant(peer), name)?;
    Some(object["metadata"]["ownerReferences"][0]["uid"].clone())
}

fn uid(cluster: &Cluster, kind: &str, peer: &str, name: &str) -> Value {
    cluster.get(kind, &tenant(peer), name).unwrap()["metadata"]["uid"].clone()
}

#[test]
fn node_port_of_namesake_is_not_reused() {
    let Some(cluster) = cluster() else { return };
    cluster.apply_all(&peering("gent"));
    cluster.apply(&server("gent", &node_port(30011)));
    cluster.run_pod("gent", "a", "n1", "10.200.1.11");
    let gateway = ["gatewayserver", &tenant("gent"), "server"];
    let field = "/status/endpoint/port";
    cluster.until_is(gateway, field, &json!(30011));
    let history = StatusHistory::of(cluster, "gatewayserver", "gent", "server");
    for port in [30012, 30013, 30014] {
        cluster.delete("gatewayserver", &tenant("gent"), "server");
        cluster.apply(&server("gent", &node_port(port)));
        cluster.until_is(gateway, field, &json!(port));
        let now = uid(cluster, "gatewayserver", "gent", "server");
        let values = cluster.until("its endpoint is published", || {
            let values = history.values(&now, 1);
            (!values.is_empty()).then_some(values)
        });
        assert!(values.iter().all(|value| *value == port.to_string()), "{values:?}");
        for kind in ["deployment", "service", "role"] {
            let owner = || owner(cluster, kind, "gent", "gw-server").filter(|uid| *uid == now);
            cluster.until(&format!("the {kind} is its"), owner);
        }
    }
    cluster.kill_pod("gent", "a");
}

#[test]
fn second_gateway_gets_objects_of_its_own() {
    const KINDS: [&str; 5] = ["serviceaccount", "role", "rolebinding", "service", "deployment"];
    let Some(cluster) = cluster() else { return };
    let namespace = tenant("aalst");
    cluster.apply_all(&peering("aalst"));
    cluster.apply(&server("aalst", &node_port(30016)));
    let uids = || KINDS.map(|kind| cluster.get(kind, &namespace, "gw-server")).map(uid_of);
    let first =
        cluster.until("all of the first", || uids().into_iter().collect::<Option<Vec<_>>>());
    let hold = |finalizers: &Value| {
        let patch = json!({"metadata": {"finalizers": finalizers}});
        cluster.merge("service", &namespace, "gw-server", &patch);
    };
    hold(&json!(["example.com/balancer"]));
    cluster.delete("gatewayserver", &namespace, "server");
    cluster.apply(&server("aalst", &node_port(30017)));
    let second = uid(cluster, "gatewayserver", "aalst", "server");
    let service = || cluster.get("service", &namespace, "gw-server");
    let touched = cluster.until("the first one's Service is touched", || {
        service().filter(|service| {
            service["metadata"]["deletionTimestamp"].is_string()
                || service["metadata"]["ownerReferences"][0]["uid"] == second
        })
    });
    assert_eq!(touched["spec"]["ports"][0]["nodePort"], 30016, "{touched}");
    hold(&Value::Null);
    cluster.until("a Service of its own", || {
        service().filter(|service| service["spec"]["ports"][0]["nodePort"] == 30017)
    });
    let all = cluster.until("all of the second", || uids().into_iter().collect::<Option<Vec<_>>>());
    for ((kind, first), now) in KINDS.into_iter().zip(first).zip(all) {
        assert_ne!(first, now, "the {kind} is the first one's");
        assert_eq!(owner(cluster, kind, "aalst", "gw-server"), Some(second.clone()), "{kind}");
    }
}

fn uid_of(object: Option<Value>) -> Option<Value> {
    object.map(|object| object["metadata"]["uid"].clone())
}

#[test]
fn key_of_first_namesake_is_kept_for_second() {
    let Some(cluster) = cluster() else { return };
    cluster.apply_all(&peering("lier"));
    cluster.apply(&client("lier"));
    let gateway = ["gatewayclient", &tenant("lier"), "client"];
    let (field, name) = ("/status/secretRef/name", json!("gw-client"));
    cluster.until_is(gateway, field, &name);
    let key = cluster.get("secret", gateway[1], "gw-client").unwrap()["data"].clone();
    let history = StatusHistory::of(cluster, "gatewayclient", "lier", "client");
    cluster.delete("gatewayclient", gateway[1], "client");
    cluster.apply(&client("lier"));
    cluster.until_is(gateway, field, &name);
    let now = uid(cluster, "gatewayclient", "lier", "client");
    assert_eq!(
        owner(cluster, "secret", "lier", "gw-client"),
        Some(now.clone()),
        "before it is published"
    );
    sleep(Duration::from_secs(1));
    assert_eq!(cluster.get("secret", gateway[1], "gw-client").unwrap()["data"], key);
    assert!(!history.values(&now, 2).is_empty());
}

/// Kubernetes collects the Secret of a gateway some time after it.
#[test]
fn key_that_went_before_the_second_is_made_anew() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    cluster.apply_all(&peering("geel"));
    cluster.apply(&client("geel"));
    let namespace = tenant("geel");
    let secret = || cluster.get("secret", &namespace, "gw-client");
    cluster.until("it has a key pair", secret);
    cluster.delete("gatewayclient", &namespace, "client");
    cluster.until("its config is gone", || {
        cluster.get("gatewayconfig", &namespace, "client").is_none().then_some(())
    });
    cluster.delete("secret", &namespace, "gw-client");
    cluster.apply(&client("geel"));
    let began = Instant::now();
    cluster.until("it has another key pair", secret);
    assert!(began.elapsed() < SOON, "after {:?}", began.elapsed());
}

#[test]
fn user_secret_gets_public_key() {
    let Some(cluster) = cluster() else { return };
    let mut objects = peering("mons");
    let public = objects[2]["data"].as_object_mut().unwrap().remove("publicKey").unwrap();
    cluster.apply_all(&objects);
    cluster.apply(&server("mons", &node_port(30015)));
    let gateway = ["gatewayserver", &tenant("mons"), "server"];
    cluster.until_is(gateway, "/status/secretRef/name", &json!("gw-keys"));
    let secret = cluster.get("secret", &tenant("mons"), "gw-keys").unwrap();
    assert_eq!(secret["data"]["publicKey"], public);
}

/// Objects of users that have the names of a gateway's.
#[test]
fn foreign_namesakes_are_left_as_they_are() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("genk");
    cluster.apply_all(&peering("genk"));
    let metadata = json!({"name": "gw-server", "namespace": namespace, "labels": {"app": "mine"}});
    let labels = json!({"app": "mine"});
    let rbac = "rbac.authorization.k8s.io";
    let pod = json!({"metadata": {"labels": labels},
        "spec": {"containers": [{"name": "mine", "image": "mine"}]}});
    let foreign = [
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata,
            "spec": {"selector": {"matchLabels": labels}, "template": pod}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {"ports": [{"port": 80}]}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}),
        json!({"apiVersion": format!("{rbac}/v1"), "kind": "Role", "metadata": metadata,
            "rules": []}),
        json!({"apiVersion": format!("{rbac}/v1"), "kind": "RoleBinding", "metadata": metadata,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "gw-server"}}),
        json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata,
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}}}),
    ];
    cluster.apply_all(&foreign);
    let kinds = foreign.map(|object| object["kind"].as_str().unwrap().to_lowercase());
    let read = || {
        let all = kinds.each_ref().map(|kind| cluster.get(kind, namespace, "gw-server").unwrap());
        all.map(|object| object["metadata"].clone())
    };
    let before = read();
    cluster.apply(&template_of_two());
    let mut server = server("genk", &cluster_ip());
    server["spec"]["serverTemplateRef"] = json!({"apiVersion": "networking.liqo.io/v1beta1",
        "kind": "WgGatewayServerTemplate", "name": "two", "namespace": "liqo"});
    cluster.apply(&server);
    let condition = "/status/conditions/0/message";
    let why = "there is one of another owner; expected another name";
    cluster.until("its condition names one", || {
        let gateway = cluster.get("gatewayserver", namespace, "server")?;
        gateway.pointer(condition)?.as_str()?.contains(why).then_some(())
    });
    cluster.until_peace(namespace);
    assert_eq!(read(), before);
    cluster.delete("gatewayserver", namespace, "server");
    cluster.until("its config is gone", || {
        cluster.get("gatewayconfig", namespace, "server").is_none().then_some(())
    });
    cluster.until_peace(namespace);
    assert_eq!(read(), before);
}

/// Template of gateways with two replicas, which have a PodDisruptionBudget.
fn template_of_two() -> Value {
    let text = include_str!("../../../deploy/chart/gateway-templates/wireguard-server.yaml");
    let mut template: Value = serde_saphyr::from_str(text).unwrap();
    template["metadata"] = json!({"name": "two", "namespace": "liqo"});
    template["spec"]["template"]["spec"]["deployment"]["spec"]["replicas"] = json!(2);
    template
}
