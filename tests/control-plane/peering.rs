//! A peering, from its manifests to the config published for gateways and nodes.

use std::time::Duration;

use serde_json::{Value, json};

use crate::stage::Stage;

const CLUSTER: &str = include_str!("cluster.yaml");
const PEERING: &str = include_str!("peering.yaml");
const ADDRESSES: &str = include_str!("addresses.yaml");
/// The chart brings it; the peering names it.
const TEMPLATE: &str = "../deploy/chart/gateway-templates/wireguard-client.yaml";
const TENANT: &str = "liqo-tenant-lyon";
/// CIDR of pods, and external: the same in both clusters.
const OWN: [&str; 2] = ["10.200.0.0/16", "10.70.0.0/16"];

/// Whichever comes first, the programs or the manifests.
#[test]
fn peering_is_remapped_published_and_removed() {
    let Some(stage) = Stage::set("peering") else { return };
    let mut controller = stage.start_controller();
    stage.apply(CLUSTER);
    stage.apply_statuses(CLUSTER);
    stage.server.kubectl(&["apply", "--server-side", "-n", "liqo", "-f", TEMPLATE], "").unwrap();
    let mut ipam = stage.start_ipam();
    stage.apply(PEERING);
    let seen_as = remapped(&stage);
    published(&stage, &seen_as);
    reachable(&stage);
    stage.until("nothing is wrong with it", || wrong(&stage).is_null().then_some(()));
    assert!(!stage.logs().contains("/UtkTntb"), "a key in a log");

    // Both are killed, and write nothing that is there.
    let before = settled(&stage);
    controller.kill();
    ipam.kill();
    ipam = stage.start_ipam();
    controller = stage.start_controller();
    // The one before had no time to let go.
    stage.until("it is elected", || stage.logs().contains("elected").then_some(()));
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(stage.versions(), before, "{}", stage.logs());

    stage.server.kubectl(&["delete", "--wait=false", "-f", "-"], PEERING).unwrap();
    // Namespaces are emptied by a program of Kubernetes that does not run here.
    stage.until("nothing is left", || {
        let config = stage.get("gatewayconfigs", TENANT, "lyon");
        let networks = stage.server.kubectl(&["get", "networks", "-n", TENANT], "");
        (config.is_none() && networks.is_err_and(|error| error.contains("No resources")))
            .then_some(())
    });
    let node = stage.get("nodeconfigs", "", "n2").unwrap();
    assert_eq!(node["spec"]["peerings"], json!([]));
    controller.kill();
    ipam.kill();
}

/// Prefixes as which this cluster sees the peer's.
fn remapped(stage: &Stage) -> [String; 2] {
    let configuration = stage.until("the Configuration is remapped", || {
        let found = stage.get("configurations", TENANT, "lyon")?;
        let cidr = &found["status"]["remote"]["cidr"];
        (cidr["pod"][0].is_string() && cidr["external"][0].is_string()).then_some(found)
    });
    let own = json!({"pod": [OWN[0]], "external": [OWN[1]]});
    assert_eq!(configuration["spec"]["local"]["cidr"], own);
    assert_eq!(configuration["spec"]["remote"]["cidr"], own, "as the user has it");
    let cidr = &configuration["status"]["remote"]["cidr"];
    let seen_as = ["pod", "external"].map(|what| cidr[what][0].as_str().unwrap().to_owned());
    let is_free = |cidr: &String| cidr.ends_with(".0.0/16") && !OWN.contains(&cidr.as_str());
    assert!(seen_as.iter().all(is_free) && seen_as[0] != seen_as[1], "{seen_as:?}");
    seen_as
}

fn published(stage: &Stage, seen_as: &[String]) {
    let gateway = stage.until("the GatewayConfig is published", || {
        let found = stage.get("gatewayconfigs", TENANT, "lyon")?;
        found["spec"]["peerPublicKey"].is_string().then_some(found)
    });
    let spec = &gateway["spec"];
    assert_eq!((&spec["clusterId"], &spec["peerClusterId"]), (&json!("turin"), &json!("lyon")));
    assert_eq!((&spec["role"], &spec["secretName"]), (&json!("Client"), &json!("keys")));
    let remaps = spec["remaps"].to_string();
    assert!(seen_as.iter().all(|cidr| remaps.contains(cidr)), "{remaps}");
    for node in ["n1", "n2"] {
        stage.until("the NodeConfig is published", || {
            let found = stage.get("nodeconfigs", "", node)?;
            let peerings = found["spec"]["peerings"].to_string();
            seen_as.iter().all(|cidr| peerings.contains(cidr)).then_some(())
        });
    }
}

/// Targets that peers reach by an address of this cluster: a database of no cluster's, a pod of n2.
fn reachable(stage: &Stage) {
    stage.apply(ADDRESSES);
    let granted = ["database", "pod"].map(|name| {
        stage.until("it has an address", || {
            let ip = stage.get("ips.ipam.liqo.io", TENANT, name)?;
            assert!(ip["status"]["cidr"].is_null() || ip["status"]["cidr"] == OWN[1]);
            ip["status"]["ip"].as_str().map(str::to_owned)
        })
    });
    let [database, pod] = granted.each_ref().map(String::as_str);
    assert!(granted.iter().all(|ip| ip.starts_with("10.70.")) && database != pod, "{granted:?}");
    let is_mapped = |ips: &Value, external: &str, target: &str| {
        let mut all = ips.as_array().into_iter().flatten();
        all.any(|ip| ip["external"] == external && ip["target"] == target)
    };
    for node in ["n1", "n2"] {
        stage.until("the nodes have both", || {
            let ips = &stage.get("nodeconfigs", "", node)?["spec"]["ips"];
            let both = [(database, "192.0.2.200"), (pod, "10.200.2.9")];
            both.iter().all(|(external, target)| is_mapped(ips, external, target)).then_some(())
        });
    }
    stage.until("the gateway rewrites the one that is no pod", || {
        let ips = &stage.get("gatewayrecords", "", "cluster")?["spec"]["cluster"]["ips"];
        assert!(!is_mapped(ips, pod, "10.200.2.9"), "its node does");
        is_mapped(ips, database, "192.0.2.200").then_some(())
    });
    stage.until("it has its Service", || {
        let slice = stage.get("endpointslices", TENANT, "database")?;
        assert_eq!(slice["endpoints"][0]["addresses"], json!(["192.0.2.200"]));
        assert_eq!(slice["ports"][0]["port"], 5432);
        stage.get("services", TENANT, "database")
    });
}

/// The condition that reports what is wrong with the client.
fn wrong(stage: &Stage) -> Value {
    let client = stage.get("gatewayclients", TENANT, "lyon").unwrap_or_default();
    let conditions = client["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.into_iter().find(|condition| condition["type"] == "Accepted").unwrap_or_default()
}

/// Versions of all objects once nothing changes any more.
fn settled(stage: &Stage) -> Vec<String> {
    let mut before = stage.versions();
    stage.until("nothing changes", || {
        std::thread::sleep(Duration::from_secs(1));
        let now = stage.versions();
        let same = now == before;
        before.clone_from(&now);
        same.then_some(now)
    })
}
