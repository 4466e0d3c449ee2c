//! Objects that a gateway consists of in Kubernetes.

use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cluster::{
    Cluster, client, cluster, cluster_alone, cluster_ip, peering, server, tenant,
};

const KINDS: [&str; 5] = ["serviceaccount", "role", "rolebinding", "service", "deployment"];

fn made(cluster: &Cluster, namespace: &str, name: &str, kinds: &[&str]) -> Vec<Value> {
    let made = kinds.iter().map(|kind| {
        cluster.until(&format!("{kind} {name}"), || cluster.get(kind, namespace, name))
    });
    made.collect()
}

fn can(cluster: &Cluster, peer: &str, verb: &str, what: &str, namespace: &str) -> bool {
    let who = format!("system:serviceaccount:{}:gw-server", tenant(peer));
    let question = ["auth", "can-i", verb, what, "-n", namespace, "--as", &who];
    match cluster.server.kubectl(&question, "") {
        Ok(_) => true,
        Err(error) if error.lines().any(|line| line == "no" || line.starts_with("no - ")) => false,
        Err(error) => panic!("kubectl {question:?}: {error}"),
    }
}

#[test]
fn server_gets_deployment_service_and_min_rights() {
    let Some(cluster) = cluster() else { return };
    cluster.apply_all(&peering("paris"));
    cluster.apply(&server("paris", &cluster_ip()));
    let namespace = &tenant("paris");
    for object in made(cluster, namespace, "gw-server", &KINDS) {
        let metadata = &object["metadata"];
        let labels = &metadata["labels"];
        assert_eq!(labels["networking.liqo.io/component"], "gateway", "{}", object["kind"]);
        assert_eq!(labels["networking.liqo.io/gateway-name"], "server");
        assert_eq!(labels["networking.liqo.io/gateway-namespace"], json!(namespace));
        assert_eq!(labels["liqo.io/remote-cluster-id"], "paris");
        assert_eq!(metadata["ownerReferences"][0]["kind"], "GatewayServer");
        assert_eq!(metadata.get("finalizers"), None);
    }
    cluster.until("its config", || cluster.get("gatewayconfig", namespace, "server"));
    for (verb, what) in [
        ("get", "secrets/gw-keys"),
        ("get", "gatewayconfigs.fabric.weft.dev/server"),
        ("watch", "gatewayconfigs.fabric.weft.dev/server"),
        ("create", "connections.networking.liqo.io"),
        ("patch", "connections.networking.liqo.io/gw-server"),
    ] {
        assert!(can(cluster, "paris", verb, what, namespace), "{verb} {what}");
        assert!(!can(cluster, "paris", verb, what, "liqo"), "{verb} {what} elsewhere");
    }
    for (verb, what) in [
        ("get", "secrets/other"),
        ("list", "secrets"),
        ("patch", "gatewayconfigs.fabric.weft.dev/server"),
        ("get", "gatewayconfigs.fabric.weft.dev/other"),
        ("patch", "connections.networking.liqo.io/other"),
        ("get", "pods"),
        ("get", "nodes"),
    ] {
        assert!(!can(cluster, "paris", verb, what, namespace), "{verb} {what}");
    }
}

#[test]
fn client_without_key_gets_one() {
    let Some(cluster) = cluster() else { return };
    cluster.apply_all(&peering("lyon"));
    cluster.delete("secret", &tenant("lyon"), "gw-keys");
    cluster.apply(&client("lyon"));
    let namespace = &tenant("lyon");
    made(cluster, namespace, "gw-client", &["serviceaccount", "role", "rolebinding", "deployment"]);
    let services = cluster.names("services", namespace);
    assert!(services.is_empty(), "{services:?}");
    let secret = cluster.until("its Secret", || cluster.get("secret", namespace, "gw-client"));
    assert_eq!(secret["metadata"]["labels"]["networking.liqo.io/gateway-resource"], "true");
    assert_eq!(secret["metadata"]["labels"]["liqo.io/remote-cluster-id"], "lyon");
    assert_eq!(secret["metadata"]["ownerReferences"][0]["kind"], "GatewayClient");
    for key in ["privateKey", "publicKey"] {
        assert_eq!(secret["data"][key].as_str().unwrap().len(), 44, "32 bytes in base64");
    }
    let gateway = ["gatewayclient", namespace.as_str(), "client"];
    cluster.until_is(gateway, "/status/secretRef/name", &json!("gw-client"));
    cluster.until_is(gateway, "/status/clientRef/kind", &json!("Deployment"));
    cluster.until_is(gateway, "/status/clientRef/name", &json!("gw-client"));
}

#[test]
fn user_secret_gets_liqo_labels() {
    let Some(cluster) = cluster() else { return };
    let mut objects = peering("brest");
    objects[2]["metadata"].as_object_mut().unwrap().remove("labels");
    cluster.apply_all(&objects);
    cluster.apply(&server("brest", &cluster_ip()));
    let secret = ["secret", &tenant("brest"), "gw-keys"];
    cluster.until_is(
        secret,
        "/metadata/labels/networking.liqo.io~1gateway-resource",
        &json!("true"),
    );
    cluster.until_is(secret, "/metadata/labels/liqo.io~1remote-cluster-id", &json!("brest"));
}

#[test]
fn foreign_change_is_reverted_once() {
    let Some(cluster) = cluster() else { return };
    cluster.apply_all(&peering("lille"));
    cluster.apply(&server("lille", &cluster_ip()));
    let namespace = &tenant("lille");
    made(cluster, namespace, "gw-server", &KINDS);
    let deployment = ["deployment", namespace.as_str(), "gw-server"];
    cluster.merge("deployment", namespace, "gw-server", &json!({"spec": {"replicas": 3}}));
    cluster.until_is(deployment, "/spec/replicas", &json!(1));
    cluster.merge("role", namespace, "gw-server", &json!({"rules": []}));
    cluster.until_is(
        ["role", namespace, "gw-server"],
        "/rules/0/resourceNames/0",
        &json!("server"),
    );
    cluster.delete("service", namespace, "gw-server");
    made(cluster, namespace, "gw-server", &["service"]);
    // Fields of other managers stay.
    let theirs = json!({"metadata": {"annotations": {"example.com/theirs": "yes"}}});
    cluster.merge("deployment", namespace, "gw-server", &theirs);
    cluster.until_peace(namespace);
    let deployment = cluster.get("deployment", namespace, "gw-server").unwrap();
    assert_eq!(deployment["metadata"]["annotations"]["example.com/theirs"], "yes");
}

/// A server made from a template of the user, which is given back.
fn templated(cluster: &Cluster, peer: &str, name: &str) -> Value {
    cluster.apply_all(&peering(peer));
    let mut template: Value = serde_saphyr::from_str(gateway_templates::WIREGUARD_SERVER).unwrap();
    template["metadata"] = json!({"name": name, "namespace": "liqo"});
    cluster.apply(&template);
    let mut server = server(peer, &cluster_ip());
    server["spec"]["serverTemplateRef"] = json!({"apiVersion": "networking.liqo.io/v1beta1",
        "kind": "WgGatewayServerTemplate", "name": name, "namespace": "liqo"});
    cluster.apply(&server);
    made(cluster, &tenant(peer), "gw-server", &KINDS);
    template
}

/// Makes of a template what Kubernetes does not let become of a Deployment that is there.
fn select_anew(template: &mut Value) {
    let deployment = &mut template["spec"]["template"]["spec"]["deployment"]["spec"];
    deployment["selector"]["matchLabels"] = json!({"mine": "{{ .Name }}"});
    deployment["template"]["metadata"]["labels"] = json!({"mine": "{{ .Name }}"});
}

#[test]
fn stuck_deployment_is_retried_with_backoff() {
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let mut template = templated(cluster, "troyes", "stays");
    let namespace = &tenant("troyes");
    let finalizers = |list: Value| {
        cluster.merge(
            "deployment",
            namespace,
            "gw-server",
            &json!({"metadata": {"finalizers": list}}),
        )
    };
    finalizers(json!(["example.com/stays"]));
    select_anew(&mut template);
    cluster.apply(&template);
    let deployment = ["deployment", namespace.as_str(), "gw-server"];
    cluster.until("it is to go", || {
        cluster
            .get("deployment", namespace, "gw-server")?
            .pointer("/metadata/deletionTimestamp")
            .cloned()
    });
    let before = cluster.writes(namespace).len();
    sleep(Duration::from_secs(6));
    let tries = cluster.writes(namespace).split_off(before);
    assert!(tries.len() <= 30, "in six seconds: {tries:?}");
    // On a busy machine it may have come to a long wait by now.
    cluster.until("it is tried again, twice", || {
        let writes = cluster.writes(namespace).split_off(before);
        let tries = writes.iter().filter(|write| write.starts_with("patch deployments"));
        (tries.count() >= 2).then_some(())
    });
    finalizers(json!([]));
    let began = Instant::now();
    cluster.until_is(deployment, "/spec/selector/matchLabels", &json!({"mine": "server"}));
    assert!(began.elapsed() < Duration::from_secs(3), "at once when there is room");
}

#[test]
fn template_of_user_is_applied() {
    let Some(cluster) = cluster() else { return };
    let mut template = templated(cluster, "nice", "mine");
    let namespace = tenant("nice");
    let deployment = &mut template["spec"]["template"]["spec"]["deployment"]["spec"];
    deployment["template"]["spec"]["containers"][0]["image"] = json!("example.com/mine");
    cluster.apply(&template);
    let image = "/spec/template/spec/containers/0/image";
    let deployed = ["deployment", namespace.as_str(), "gw-server"];
    cluster.until_is(deployed, image, &json!("example.com/mine"));
    // What Kubernetes does not let change is made anew.
    let uid =
        cluster.get("deployment", &namespace, "gw-server").unwrap()["metadata"]["uid"].clone();
    select_anew(&mut template);
    cluster.apply(&template);
    cluster.until_is(deployed, "/spec/selector/matchLabels", &json!({"mine": "server"}));
    let now = cluster.get("deployment", &namespace, "gw-server").unwrap();
    assert_ne!(now["metadata"]["uid"], uid);
}

/// A change of a template that several gateways have: those are replaced first of which nothing works, then
/// a tenth of all at a time.
#[test]
fn common_change_is_made_in_waves() {
    const IMAGE: &str = "/spec/template/spec/containers/0/image";
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let peers: Vec<String> = (0..8).map(|number| format!("wave-{number}")).collect();
    let templates = peers.iter().map(|peer| templated(cluster, peer, "waves"));
    let mut template = templates.last().unwrap();
    let deployment = |peer: &str| cluster.get("deployment", &tenant(peer), "gw-server").unwrap();
    let settle = |peer: &str| {
        let deployment = deployment(peer);
        let status = json!({"observedGeneration": deployment["metadata"]["generation"],
            "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1});
        cluster.set_status(&deployment, &status);
    };
    peers[1..].iter().for_each(|peer| settle(peer));
    cluster.until_peace(&tenant(&peers[7]));
    let all = cluster.kubectl(&["get", "deployments", "--all-namespaces", "-o", "name"], "");
    let all = all.lines().count();
    let container = "/spec/template/spec/deployment/spec/template/spec/containers/0/image";
    *template.pointer_mut(container).unwrap() = json!("example.com/next");
    cluster.apply(&template);
    let is_new =
        |peer: &&String| deployment(peer).pointer(IMAGE) == Some(&json!("example.com/next"));
    let wave = (all / 10).max(1);
    assert!(wave < 7, "{all} gateways are too many for this test");
    cluster.until("a wave is replaced", || {
        (peers[1..].iter().filter(is_new).count() == wave).then_some(())
    });
    assert!(is_new(&&peers[0]), "it does not wait");
    sleep(Duration::from_secs(2));
    assert_eq!(peers[1..].iter().filter(is_new).count(), wave, "the next one waits for its pods");
    // The user's own change of a gateway does not wait.
    let last = peers.iter().rfind(|peer| !is_new(peer)).unwrap();
    let port = json!({"spec": {"endpoint": {"port": 51841}}});
    cluster.merge("gatewayserver", &tenant(last), "server", &port);
    cluster.until("it is replaced", || is_new(&last).then_some(()));
    cluster.until("all are replaced", || {
        peers.iter().filter(is_new).for_each(|peer| settle(peer));
        peers.iter().all(|peer| is_new(&peer)).then_some(())
    });
}
