//! The Service of an IP, and its EndpointSlice.

use std::thread::sleep;
use std::time::Duration;

use serde_json::{Value, json};

use crate::cluster::{Cluster, cluster};

const NAMESPACE: &str = "default";
const KINDS: [&str; 2] = ["service", "endpointslice"];

/// An IP with the address `192.0.2.200`.
fn ip(name: &str, template: &Value) -> Value {
    json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "IP",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"ip": "192.0.2.200", "serviceTemplate": template}})
}

fn template(port: u16) -> Value {
    json!({"metadata": {"labels": {"app": "sql"}},
        "spec": {"type": "ClusterIP", "ports": [{"name": "sql", "port": port}]}})
}

fn until_there(cluster: &Cluster, name: &str, is: bool) {
    for kind in KINDS {
        let what = format!("{kind} {name}: {is}");
        let found = || (cluster.get(kind, NAMESPACE, name).is_some() == is).then_some(());
        cluster.until(&what, found);
    }
}

#[test]
fn ip_has_service_while_it_requests_one() {
    let Some(cluster) = cluster() else { return };
    cluster.apply(&ip("sql", &template(5432)));
    let service = ["service", NAMESPACE, "sql"];
    let slice = ["endpointslice", NAMESPACE, "sql"];
    cluster.until_is(slice, "/endpoints/0/addresses", &json!(["192.0.2.200"]));
    cluster.until_is(slice, "/metadata/labels/kubernetes.io~1service-name", &json!("sql"));
    cluster.until_is(slice, "/ports/0/port", &json!(5432));
    cluster.until_is(service, "/metadata/labels/app", &json!("sql"));
    cluster.until_is(service, "/metadata/ownerReferences/0/kind", &json!("IP"));

    cluster.apply(&ip("sql", &template(3306)));
    cluster.until_is(slice, "/ports", &json!([{"name": "sql", "port": 3306, "protocol": "TCP"}]));
    cluster.until_is(service, "/spec/ports/0/port", &json!(3306));
    assert_eq!(cluster.get("service", NAMESPACE, "sql").unwrap()["spec"]["ports"][1], Value::Null);

    // Changes by others are undone, and then nothing is written any more.
    cluster.merge("endpointslice", NAMESPACE, "sql", &json!({"endpoints": []}));
    cluster.until_is(slice, "/endpoints/0/addresses", &json!(["192.0.2.200"]));
    cluster.delete("service", NAMESPACE, "sql");
    until_there(cluster, "sql", true);
    cluster.until_peace(NAMESPACE);

    let none = json!({"spec": {"serviceTemplate": null}});
    cluster.merge("ips.ipam.liqo.io", NAMESPACE, "sql", &none);
    until_there(cluster, "sql", false);
    cluster.apply(&ip("sql", &template(5432)));
    until_there(cluster, "sql", true);
    // Of one that is made anew, what was made for its namesake goes.
    let old = cluster.get("service", NAMESPACE, "sql").unwrap()["metadata"]["uid"].clone();
    cluster.delete("ips.ipam.liqo.io", NAMESPACE, "sql");
    cluster.apply(&ip("sql", &template(5432)));
    cluster.until("a Service of the new one", || {
        let service = cluster.get("service", NAMESPACE, "sql")?;
        (service["metadata"]["uid"] != old).then_some(())
    });
    until_there(cluster, "sql", true);
    let events = cluster.kubectl(&["get", "events", "-n", NAMESPACE, "-o", "json"], "");
    assert!(!events.contains("default/sql cannot be written"), "there is no conflict: {events}");
    cluster.delete("ips.ipam.liqo.io", NAMESPACE, "sql");
    until_there(cluster, "sql", false);
}

#[test]
fn foreign_service_stays_and_is_condition_of_ip() {
    let Some(cluster) = cluster() else { return };
    let theirs = json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "web", "namespace": NAMESPACE},
        "spec": {"ports": [{"port": 80}]}});
    cluster.apply(&theirs);
    cluster.apply(&ip("web", &template(443)));
    let note = cluster.until("an Event", || {
        let events = cluster.kubectl(&["get", "events", "-n", NAMESPACE, "-o", "json"], "");
        let events: Value = serde_json::from_str(&events).unwrap();
        let all = events["items"].as_array()?.iter();
        // The API server reports Events of Services, too.
        let mut about = all.filter(|event| {
            let object = &event["involvedObject"];
            object["kind"] == "IP" && object["name"] == "web"
        });
        about.find_map(|event| event["message"].as_str().map(str::to_owned))
    });
    assert_eq!(
        note,
        "Service default/web cannot be written: there is one of another owner; expected another name"
    );
    cluster.delete("ips.ipam.liqo.io", NAMESPACE, "web");
    sleep(Duration::from_secs(2));
    let service = cluster.get("service", NAMESPACE, "web").unwrap();
    assert_eq!(service["spec"]["ports"][0]["port"], 80);
    assert_eq!(service["metadata"].get("ownerReferences"), None);
    cluster.delete("service", NAMESPACE, "web");
}
