//! Faults are reported where users look, once, and retried with backoff.

use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster, cluster_ip, events, peering, server, tenant};

#[test]
fn missing_template_is_condition_and_event() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("wien");
    cluster.apply_all(&peering("wien"));
    let mut server = server("wien", &cluster_ip());
    server["spec"]["serverTemplateRef"] = json!({"apiVersion": "networking.liqo.io/v1beta1",
        "kind": "WgGatewayServerTemplate", "name": "late", "namespace": "liqo"});
    cluster.apply(&server);
    let gateway = ["gatewayserver", namespace.as_str(), "server"];
    let message = "spec.serverTemplateRef: there is no WgGatewayServerTemplate liqo/late; expected \
                   the name of one";
    cluster.until_is(gateway, "/status/conditions/0/message", &json!(message));
    let event = cluster.until("an event", || {
        events(cluster, namespace).into_iter().find(|event| event["note"] == message)
    });
    assert_eq!(event["regarding"]["kind"], "GatewayServer");
    assert_eq!(event["regarding"]["name"], "server");
    assert_eq!(event["type"], "Warning");
    cluster.until_peace(namespace);

    let mut template: Value = serde_saphyr::from_str(gateway_templates::WIREGUARD_SERVER).unwrap();
    template["metadata"] = json!({"name": "late", "namespace": "liqo"});
    cluster.apply(&template);
    cluster.until("the Deployment", || cluster.get("deployment", namespace, "gw-server"));
    cluster.until("the condition is gone", || {
        let gateway = cluster.get("gatewayserver", namespace, "server")?;
        gateway.pointer("/status/conditions").is_none().then_some(())
    });
}

#[test]
fn too_long_name_of_gateway_is_condition() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("bern");
    cluster.apply_all(&peering("bern"));
    let (longest, too_long) = ("n".repeat(60), "n".repeat(61));
    let mut server = server("bern", &cluster_ip());
    server["metadata"]["name"] = json!(too_long);
    cluster.apply(&server);
    let gateway = ["gatewayserver", namespace.as_str(), &too_long];
    let message = "metadata.name: found 61 characters; expected at most 60, as its Service is \
                   called gw-NAME: make it anew with a shorter name";
    cluster.until_is(gateway, "/status/conditions/0/message", &json!(message));
    cluster.delete("gatewayserver", namespace, &too_long);
    server["metadata"]["name"] = json!(longest);
    cluster.apply(&server);
    let made = format!("gw-{longest}");
    cluster.until("its Service", || cluster.get("service", namespace, &made));
    cluster.until("its Deployment", || cluster.get("deployment", namespace, &made));
}

#[test]
fn refused_write_blocks_no_other_and_backs_off() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("graz");
    cluster.apply_all(&peering("graz"));
    // Out of the range of node ports.
    let endpoint = json!({"serviceType": "NodePort", "port": 51840, "nodePort": 80});
    cluster.apply(&server("graz", &endpoint));
    let note = cluster.until("an event", || {
        let all = events(cluster, namespace).into_iter();
        let notes = all.filter_map(|event| event["note"].as_str().map(str::to_owned));
        notes.into_iter().find(|note| note.contains("Service liqo-tenant-graz/gw-server"))
    });
    assert!(note.contains("nodePort"), "{note}");
    cluster.until("all else is there", || cluster.get("deployment", namespace, "gw-server"));
    // Statuses follow within a second or two.
    sleep(Duration::from_secs(3));
    let before = cluster.writes(namespace);
    sleep(Duration::from_secs(6));
    let writes = cluster.writes(namespace).split_off(before.len());
    assert!(writes.len() <= 2, "in six seconds: {writes:?}");
    cluster.apply(&server("graz", &cluster_ip()));
    cluster.until("its Service", || cluster.get("service", namespace, "gw-server"));
}

/// Happens where Liqo's own definitions are older than what weft reports.
#[test]
fn refused_status_is_not_resent_on_every_event() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("linz");
    cluster.apply_all(&peering("linz"));
    cluster.apply(&server("linz", &cluster_ip()));
    let gateway = ["gatewayserver", namespace.as_str(), "server"];
    cluster.until_is(gateway, "/status/serverRef/name", &json!("gw-server"));
    let policy = Policy::refusing(
        cluster,
        namespace,
        ("UPDATE", "networking.liqo.io", "gatewayservers/status"),
    );
    let probe = json!({"status": {"endpoint": {"port": 1}}}).to_string();
    cluster.until("it is in force", || {
        let patch = ["patch", gateway[0], "server", "-n", namespace, "--dry-run=server"];
        let how = ["--subresource=status", "--type=merge", "-p", &probe];
        let refusal =
            cluster.server.kubectl(&[patch.as_slice(), how.as_slice()].concat(), "").err()?;
        refusal.contains("not in this namespace").then_some(())
    });

    cluster.run_pod("linz", "a", "n1", "10.200.1.31");
    cluster.until("it is reported", || {
        let all = events(cluster, namespace).into_iter();
        let mut notes = all.filter_map(|event| event["note"].as_str().map(str::to_owned));
        notes.find(|note| note.contains("not in this namespace"))
    });
    let before = cluster.writes(namespace);
    let connection = connection(namespace);
    cluster.apply(&connection);
    for latency in 1..=20 {
        let latency = json!({"value": format!("{latency}ms")});
        cluster.set_status(&connection, &json!({"value": "Error", "latency": latency}));
        sleep(Duration::from_millis(200));
    }
    let writes = cluster.writes(namespace).split_off(before.len());
    assert!(writes.len() <= 3, "{writes:?}");

    drop(policy);
    cluster.until_is(gateway, "/status/internalEndpoint/ip", &json!("10.200.1.31"));
    cluster.kill_pod("linz", "a");
}

#[test]
fn refused_deletion_backs_off_and_blocks_none() {
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("steyr");
    cluster.apply_all(&peering("steyr"));
    cluster.apply(&server("steyr", &cluster_ip()));
    cluster.until("a gateway", || cluster.get("deployment", namespace, "gw-server"));
    let policy = Policy::refusing(cluster, namespace, ("DELETE", "", "serviceaccounts"));
    let account = ["serviceaccount", "gw-server", "-n", namespace];
    cluster.until("it is in force", || {
        let delete = [&["delete"], &account[..], &["--dry-run=server"]].concat();
        let refusal = cluster.server.kubectl(&delete, "").err()?;
        refusal.contains("not in this namespace").then_some(())
    });
    cluster.delete("gatewayserver", namespace, "server");
    for kind in ["role", "rolebinding", "service", "deployment"] {
        let gone = || cluster.get(kind, namespace, "gw-server").is_none().then_some(());
        cluster.until(&format!("the {kind} is gone"), gone);
    }
    // Statuses follow within a second or two.
    sleep(Duration::from_secs(3));
    let before = cluster.writes(namespace);
    sleep(Duration::from_secs(6));
    let writes = cluster.writes(namespace).split_off(before.len());
    assert!(writes.len() <= 2, "in six seconds: {writes:?}");
    assert!(cluster.get(account[0], namespace, account[1]).is_some(), "it was not refused");
    drop(policy);
    let gone = || cluster.get(account[0], namespace, account[1]).is_none().then_some(());
    cluster.until("the account is gone", gone);
}

fn connection(namespace: &str) -> Value {
    json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "Connection",
        "metadata": {"name": "gw-server", "namespace": namespace},
        "spec": {"type": "Server", "gatewayRef": {"name": "server"}}})
}

/// Forbids one kind of request in a namespace until it is dropped.
struct Policy<'a> {
    cluster: &'a Cluster,
    objects: [Value; 2],
}

impl<'a> Policy<'a> {
    fn refusing(
        cluster: &'a Cluster,
        namespace: &str,
        (operation, group, resources): (&str, &str, &str),
    ) -> Self {
        let name = format!("no-{}", operation.to_lowercase());
        let of = |kind: &str, spec: Value| {
            json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
                "metadata": {"name": name}, "spec": spec})
        };
        let matched = json!({"apiGroups": [group], "apiVersions": ["*"],
            "operations": [operation], "resources": [resources]});
        let rule = json!({"expression": format!("request.namespace != '{namespace}'"),
            "message": "not in this namespace"});
        let objects = [
            of(
                "ValidatingAdmissionPolicy",
                json!({"failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [matched]}, "validations": [rule]}),
            ),
            of(
                "ValidatingAdmissionPolicyBinding",
                json!({"policyName": name, "validationActions": ["Deny"]}),
            ),
        ];
        cluster.apply_all(&objects);
        Self { cluster, objects }
    }
}

impl Drop for Policy<'_> {
    fn drop(&mut self) {
        for object in &self.objects {
            drop(self.cluster.server.kubectl(&["delete", "-f", "-"], &object.to_string()));
        }
    }
}
