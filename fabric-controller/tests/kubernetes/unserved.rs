//! Events and conditions of objects that Liqo's networking applies, and weft does not.

use fabric_api::crds;
use serde_json::{Value, json};

use crate::cluster::{
    Cluster, client, cluster, cluster_alone, cluster_ip, events, liqo_definitions, peering, server,
    tenant,
};
use crate::status::{has_problem, observed};

const OF_LIQO: &str = "networking.liqo.io/v1beta1";

fn firewall(peer: &str, name: &str) -> Value {
    json!({"apiVersion": OF_LIQO, "kind": "FirewallConfiguration",
        "metadata": {"name": name, "namespace": tenant(peer), "labels": {
            "networking.liqo.io/firewall-category": "fabric",
            "networking.liqo.io/firewall-subcategory": "all-nodes"}},
        "spec": {"table": {"name": name, "family": "IPV4", "chains": []}}})
}

fn route(peer: &str, name: &str) -> Value {
    let rule = json!({"dst": "192.0.2.0/24", "routes": [{"dst": "192.0.2.0/24", "dev": "eth0"}]});
    json!({"apiVersion": OF_LIQO, "kind": "RouteConfiguration",
        "metadata": {"name": name, "namespace": tenant(peer), "labels": {
            "networking.liqo.io/route-category": "fabric"}},
        "spec": {"table": {"name": name, "rules": [rule]}}})
}

#[test]
fn user_firewall_and_route_configurations_get_events() {
    let kinds = ["firewallconfigurations", "routeconfigurations"];
    let Some(definitions) = liqo_definitions("networking", &kinds) else { return };
    let Some(cluster) = cluster() else { return };
    let namespace = &tenant("pula");
    cluster.define_all(&definitions);
    cluster.apply_all(&peering("pula"));
    let made = firewall("pula", "pula-masquerade-bypass").to_string();
    let as_liqo = "--field-manager=liqo-controller-manager";
    cluster.kubectl(&["apply", "--server-side", as_liqo, "-f", "-"], &made);
    cluster.apply_all(&[firewall("pula", "mine"), route("pula", "mine")]);
    for (kind, remedy) in
        [("FirewallConfiguration", "use NetworkPolicies"), ("RouteConfiguration", "by an IP")]
    {
        let event = cluster.until(&format!("an event of the {kind}"), || {
            events(cluster, namespace).into_iter().find(|event| event["regarding"]["kind"] == kind)
        });
        assert_eq!(event["regarding"]["name"], "mine");
        let note = event["note"].as_str().unwrap();
        assert!(note.contains(kind) && note.contains(remedy), "{note}");
    }
    let all = events(cluster, namespace);
    let of_liqo = all.iter().find(|event| event["regarding"]["name"] == "pula-masquerade-bypass");
    assert_eq!(of_liqo, None);
    cluster.until_peace(namespace);
}

#[test]
fn unusable_template_is_condition_and_no_pod() {
    let Some(cluster) = cluster() else { return };
    let cases = [
        (
            "split",
            include_str!("../../templates/tests/stock/server.yaml"),
            "WgGatewayServerTemplate",
            ["containers[0].args[", "weft's template"],
        ),
        (
            "split-client",
            include_str!("../../templates/tests/stock/client.yaml"),
            "WgGatewayClientTemplate",
            ["containers[0].args[", "weft's template"],
        ),
        ("kernel", &kernel(), "WgGatewayServerTemplate", ["--implementation=kernel", "userspace"]),
        (
            "sofia",
            "",
            "VpnServerTemplate",
            ["found VpnServerTemplate of", "expected WgGatewayServer"],
        ),
    ];
    for (peer, template, kind, expected) in cases {
        if !template.is_empty() {
            let mut template: Value = serde_saphyr::from_str(template).unwrap();
            template["metadata"] = json!({"name": peer, "namespace": "liqo"});
            cluster.apply(&template);
        }
        refused(cluster, peer, kind, expected);
    }
}

/// If Liqo was installed first, the CRDs are Liqo's, whose gateways have no conditions.
#[test]
fn status_names_faults_that_liqos_crds_drop() {
    let Some(definition) = liqo_definitions("networking", &["gatewayservers"]) else { return };
    let Some((_turn, cluster)) = cluster_alone() else { return };
    let own = crds::liqo().into_iter().map(|crd| json!(crd));
    let mut own = own.filter(|crd| crd["spec"]["names"]["plural"] == "gatewayservers");
    let own = own.next().unwrap().to_string();
    cluster.define_all(&definition);
    cluster.apply_all(&peering("lom"));
    let mut server = server("lom", &cluster_ip());
    server["spec"]["serverTemplateRef"] = json!({"apiVersion": OF_LIQO,
        "kind": "VpnServerTemplate", "name": "a", "namespace": "liqo"});
    server["spec"]["secretRef"] = json!({"name": "none"});
    cluster.apply(&server);
    let parts = [
        "GatewayServer liqo-tenant-lom/server: ",
        "found VpnServerTemplate of",
        "spec.secretRef.name: waits for Secret liqo-tenant-lom/none",
    ];
    let shown = || has_problem(&observed(cluster), &parts);
    cluster.until("weft status names it", || shown().then_some(()));
    let stored = cluster.get("gatewayserver", &tenant("lom"), "server").unwrap();
    assert_eq!(stored.pointer("/status/conditions"), None, "Liqo's definition has none");
    cluster.until_peace(&tenant("lom"));

    cluster.delete("gatewayserver", &tenant("lom"), "server");
    cluster.until("it is solved", || (!shown()).then_some(()));
    cluster.delete("configuration", &tenant("lom"), "lom");
    cluster.define_all(&own);
}

/// Weft's template with an argument of Liqo's.
fn kernel() -> String {
    let arguments = "- --kubernetes\n";
    let more = "- --kubernetes\n                - --implementation=kernel\n";
    gateway_templates::WIREGUARD_SERVER.replacen(arguments, more, 1)
}

/// The template is named like the peer.
fn refused(cluster: &Cluster, peer: &str, kind: &str, expected: [&str; 2]) {
    let namespace = &tenant(peer);
    cluster.apply_all(&peering(peer));
    let (name, mut gateway) = match kind {
        "WgGatewayClientTemplate" => ("client", client(peer)),
        _ => ("server", server(peer, &cluster_ip())),
    };
    gateway["spec"][format!("{name}TemplateRef")] =
        json!({"apiVersion": OF_LIQO, "kind": kind, "name": peer, "namespace": "liqo"});
    cluster.apply(&gateway);
    let message = cluster.until("a condition", || {
        let gateway = cluster.get(&format!("gateway{name}"), namespace, name)?;
        gateway.pointer("/status/conditions/0/message")?.as_str().map(str::to_owned)
    });
    assert!(expected.iter().all(|part| message.contains(part)), "{peer}: {message}");
    assert_eq!(cluster.get("deployment", namespace, &format!("gw-{name}")), None);
    cluster.until("an event", || {
        events(cluster, namespace).into_iter().find(|event| event["note"] == message.as_str())
    });
}
