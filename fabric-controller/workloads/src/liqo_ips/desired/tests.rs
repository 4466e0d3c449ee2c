use serde_json::{Value, json};

use super::*;

fn put(objects: &mut Objects, of: Watched, object: Value) {
    let resource = of.resource();
    let types = json!({"apiVersion": resource.api_version, "kind": resource.kind});
    let mut whole = types.as_object().unwrap().clone();
    whole.extend(object.as_object().unwrap().clone());
    objects.put(of, serde_json::from_value(Value::Object(whole)).unwrap());
}

fn manager(name: &str, argument: &str) -> Value {
    let containers = json!([{"name": "x"}, {"name": "m", "args": ["--a=b", argument]}]);
    json!({"metadata": {"name": name, "namespace": "liqo"},
        "spec": {"template": {"spec": {"containers": containers}}}})
}

fn pod(uid: &str, address: Value) -> Value {
    json!({"metadata": {"name": "web", "namespace": "shop", "uid": uid},
        "status": {"podIP": address}})
}

/// Liqo's Services, a pod that runs in milan and milan's Configuration.
fn objects() -> Objects {
    let mut objects = Objects::default();
    let service = |namespace: &str, name: &str, ip: &str| json!({"metadata": {"name": name, "namespace": namespace}, "spec": {"clusterIP": ip}});
    put(&mut objects, Watched::ApiServer, service("default", "kubernetes", "10.96.0.1"));
    put(&mut objects, Watched::LiqoProxy, service("liqo", "liqo-proxy", "10.96.0.9"));
    put(&mut objects, Watched::ShadowPod, pod("u", json!("10.64.0.9")));
    let labels = json!({"liqo.io/remote-cluster-id": "milan"});
    let metadata = json!({"name": "to-milan", "namespace": "liqo-tenant-milan", "uid": "c",
        "labels": labels});
    let remote = json!({"cidr": {"pod": ["10.64.0.0/16"], "external": ["10.71.0.0/16"]}});
    let configuration = json!({"metadata": metadata, "status": {"remote": remote}});
    put(&mut objects, Watched::Configuration, configuration);
    objects
}

/// Puts the desired IPs there, each with a uid.
fn store(objects: &mut Objects) {
    for ip in wanted(objects, "liqo").ips.into_values() {
        let mut ip = serde_json::to_value(ip).unwrap();
        ip["metadata"]["uid"] = json!("of-ip");
        put(objects, Watched::Ip, ip);
    }
}

/// Names of the IPs that are applied, and of those that are deleted.
fn planned(objects: &Objects, wanted: &Wanted) -> (Vec<String>, Vec<String>) {
    let Changes { apply, delete } = changes(objects, wanted);
    let deleted = delete.into_iter().map(|(key, _)| key.name);
    (apply.iter().map(IP::name_any).collect(), deleted.collect())
}

#[test]
fn networking_is_off_if_off_in_every_manager() {
    let mut objects = Objects::default();
    assert_eq!(Liqo::of(&objects), Liqo::Absent);
    put(&mut objects, Watched::LiqoManager, manager("a", "--networking-enabled=false"));
    assert_eq!(Liqo::of(&objects), Liqo::WithoutNetworking);
    let mut ending = manager("a", "--networking-enabled=false");
    ending["metadata"]["annotations"] = json!({"liqo.io/uninstalling": "true"});
    put(&mut objects, Watched::LiqoManager, ending);
    assert_eq!(Liqo::of(&objects), Liqo::Ending);
    put(&mut objects, Watched::LiqoManager, manager("b", "--networking-enabled=true"));
    assert_eq!(Liqo::of(&objects), Liqo::WithNetworking);
}

#[test]
fn cluster_pods_and_peers_have_ips_as_liqo_makes_them() {
    let ips = wanted(&objects(), "liqo").ips;
    let of =
        |namespace: &str, name: &str| serde_json::to_value(&ips[&key(namespace, name)]).unwrap();
    assert_eq!(ips.len(), 4);
    for (name, address) in [("api-server", "10.96.0.1"), ("api-server-proxy", "10.96.0.9")] {
        let ip = of("liqo", name);
        assert_eq!(ip["spec"], json!({"ip": address}));
        assert_eq!(ip["metadata"]["labels"]["ipam.liqo.io/ip-type"], name);
        assert_eq!(ip["metadata"]["annotations"], json!({"liqo.io/preinstalled": "true"}));
    }
    let ip = of("shop", "web");
    assert_eq!(ip["spec"], json!({"ip": "10.64.0.9"}));
    let owner = json!([{"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u"}]);
    assert_eq!(ip["metadata"]["ownerReferences"], owner);
    let labels = &ip["metadata"]["labels"];
    let pod = ["offloading.liqo.io/pod-namespace", "offloading.liqo.io/pod-name"];
    assert_eq!(pod.map(|label| &labels[label]), ["shop", "web"]);
    let ip = of("liqo-tenant-milan", "to-milan-unknown-source");
    assert_eq!(ip["spec"], json!({"ip": "10.71.0.0"}));
    assert_eq!(ip["metadata"]["labels"]["liqo.io/remote-cluster-id"], "milan");
    assert_eq!(ip["metadata"]["ownerReferences"][0]["uid"], "c");
}

#[test]
fn no_ip_is_made_for_a_service_that_is_missing() {
    let mut objects = Objects::default();
    let headless = json!({"metadata": {"name": "p", "namespace": "liqo"},
        "spec": {"clusterIP": "None"}});
    put(&mut objects, Watched::LiqoProxy, headless);
    assert!(wanted(&objects, "liqo").ips.is_empty());
}

#[test]
fn pod_of_a_peer_without_networking_has_no_ip() {
    let mut objects = objects();
    let labels = json!({"ipam.liqo.io/network-type": "pod-cidr"});
    let metadata = json!({"name": "pod-cidr", "namespace": "liqo", "labels": labels});
    let own = json!({"metadata": metadata, "status": {"cidr": "10.200.0.0/16"}});
    put(&mut objects, Watched::Network, own);
    put(&mut objects, Watched::ShadowPod, pod("u", json!("10.200.0.9")));
    assert!(!wanted(&objects, "liqo").ips.contains_key(&key("shop", "web")));
}

#[test]
fn what_is_there_is_not_written_again() {
    let mut objects = objects();
    assert_eq!(planned(&objects, &wanted(&objects, "liqo")).0.len(), 4);
    store(&mut objects);
    assert_eq!(planned(&objects, &wanted(&objects, "liqo")), (Vec::new(), Vec::new()));
}

#[test]
fn ip_is_replaced_once_its_pod_has_another_address() {
    let mut objects = objects();
    store(&mut objects);
    let web = || vec!["web".to_owned()];
    put(&mut objects, Watched::ShadowPod, pod("u", Value::Null));
    let unchanged = (Vec::new(), Vec::new());
    assert_eq!(planned(&objects, &wanted(&objects, "liqo")), unchanged, "not known for now");
    put(&mut objects, Watched::ShadowPod, pod("u", json!("10.64.0.10")));
    assert_eq!(planned(&objects, &wanted(&objects, "liqo")), (Vec::new(), web()));
    // A pod of that name that was made anew, with the same address.
    put(&mut objects, Watched::ShadowPod, pod("v", json!("10.64.0.9")));
    assert_eq!(planned(&objects, &wanted(&objects, "liqo")), (web(), Vec::new()));
}

#[test]
fn ip_of_the_user_with_the_name_of_a_pod_stays() {
    let mut objects = objects();
    let theirs = |owners: Value| {
        json!({"metadata": {"name": "web", "namespace": "shop", "uid": "x",
            "ownerReferences": owners}, "spec": {"ip": "192.0.2.7"}})
    };
    put(&mut objects, Watched::Ip, theirs(json!([])));
    let (applied, deleted) = planned(&objects, &wanted(&objects, "liqo"));
    assert!(applied.len() == 3 && deleted.is_empty(), "{applied:?} {deleted:?}");
    // Liqo's networking has left one of the same pod.
    let pod = json!([{"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": "u"}]);
    put(&mut objects, Watched::Ip, theirs(pod));
    assert_eq!(planned(&objects, &wanted(&objects, "liqo")).1, ["web"]);
}

#[test]
fn ips_go_with_liqo_and_those_of_the_user_stay() {
    let mut objects = objects();
    store(&mut objects);
    let theirs = json!({"metadata": {"name": "mine", "namespace": "shop"},
        "spec": {"ip": "192.0.2.7"}});
    put(&mut objects, Watched::Ip, theirs);
    let (applied, deleted) = planned(&objects, &Wanted::default());
    assert!(applied.is_empty());
    assert_eq!(deleted, ["api-server", "api-server-proxy", "to-milan-unknown-source", "web"]);
}
