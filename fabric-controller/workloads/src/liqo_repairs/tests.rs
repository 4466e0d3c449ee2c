use serde_json::{Value, json};

use super::*;
use crate::live::Watched;
use crate::slow_server::slow_server;

const NOW: &str = "2026-01-31T12:00:00Z";

fn put(objects: &mut Objects, of: Watched, mut object: Value) {
    let resource = of.resource();
    object["apiVersion"] = json!(resource.api_version);
    object["kind"] = json!(resource.kind);
    objects.put(of, serde_json::from_value(object).unwrap());
}

fn foreign_cluster(objects: &mut Objects, enabled: bool) {
    let object = json!({"metadata": {"name": "milan"}, "spec": {"clusterID": "milan"},
        "status": {"modules": {"networking": {"enabled": enabled}}}});
    put(objects, Watched::ForeignCluster, object);
}

fn configuration(objects: &mut Objects, own: &str, seen: &str) {
    let remote = |pod: &str, external: &str| json!({"remote": {"cidr": {"pod": [pod], "external": [external]}}});
    let object = json!({"metadata": {"name": "milan", "namespace": "liqo-tenant-milan",
            "labels": {"liqo.io/remote-cluster-id": "milan"}},
        "spec": remote(own, "10.70.0.0/16"), "status": remote(seen, "10.71.0.0/16")});
    put(objects, Watched::Configuration, object);
}

/// Networking with milan is on, and its pods 10.200.0.0/16 are 10.64.0.0/16 here.
fn peered() -> Objects {
    let mut objects = Objects::default();
    foreign_cluster(&mut objects, true);
    configuration(&mut objects, "10.200.0.0/16", "10.64.0.0/16");
    objects
}

fn endpoints(addresses: &[&str]) -> Value {
    addresses.iter().map(|address| json!({"addresses": [address]})).collect()
}

/// Slice of milan, and what Liqo has made of it.
fn slice(objects: &mut Objects, of_milan: &[&str], stored: &[&str]) {
    let metadata = json!({"name": "web", "namespace": "demo", "uid": "s",
        "labels": {"offloading.liqo.io/origin": "milan"}});
    let template = json!({"endpoints": endpoints(of_milan)});
    let shadow = json!({"metadata": metadata, "spec": {"template": template}});
    put(objects, Watched::ShadowSlice, shadow);
    let owner =
        json!({"apiVersion": "o/v1", "kind": "ShadowEndpointSlice", "name": "web", "uid": "s"});
    let metadata =
        json!({"name": "web", "namespace": "demo", "uid": "e", "ownerReferences": [owner]});
    let stored = json!({"metadata": metadata, "endpoints": endpoints(stored)});
    put(objects, Watched::ReflectedSlice, stored);
}

fn kubelet(objects: &mut Objects, created: &str) {
    let labels =
        json!({"liqo.io/virtual-node": "milan-node", "liqo.io/remote-cluster-id": "milan"});
    let metadata = json!({"name": "vk-1", "namespace": "liqo-tenant-milan", "uid": "k",
        "labels": labels, "creationTimestamp": created});
    let object = json!({"metadata": metadata, "status": {"phase": "Running"}});
    put(objects, Watched::VirtualKubelet, object);
}

fn pod(objects: &mut Objects, node: &str, phase: &str, address: &str) {
    let object = json!({"metadata": {"name": "far", "namespace": "demo", "uid": "p"},
        "spec": {"nodeName": node}, "status": {"phase": phase, "podIP": address}});
    put(objects, Watched::ShadowPod, object);
}

fn found(objects: &Objects) -> Vec<(String, Option<Repair>)> {
    let found = unmapped(objects, NOW.parse().unwrap());
    found.into_iter().map(|(key, unmapped)| (key.name, unmapped.repair)).collect()
}

#[test]
fn unmapped_slice_is_found() {
    let mut objects = peered();
    let annotate = || Some(Repair::Annotate { uid: "s".to_owned() });
    slice(&mut objects, &["10.200.1.7", "10.70.0.3"], &["10.200.1.7", "10.71.0.3"]);
    assert_eq!(found(&objects), [("web".to_owned(), annotate())]);
    slice(&mut objects, &["10.200.1.7", "10.70.0.3"], &["10.64.1.7", "10.70.0.3"]);
    assert_eq!(found(&objects), [("web".to_owned(), annotate())], "external addresses, too");
    foreign_cluster(&mut objects, false);
    assert_eq!(found(&objects), [], "networking is off");
}

#[test]
fn right_slices_are_not_found() {
    let mut objects = peered();
    for (of_milan, stored) in [
        (
            &["10.200.1.7", "10.70.0.3", "192.0.2.1"][..],
            &["10.64.1.7", "10.71.0.3", "192.0.2.1"][..],
        ),
        // Liqo has not reconciled the last change yet.
        (&["10.200.1.8"], &["10.64.1.7"]),
        (&["10.200.1.8"], &[]),
        (&[], &["10.64.1.7"]),
    ] {
        slice(&mut objects, of_milan, stored);
        assert_eq!(found(&objects), [], "{of_milan:?} {stored:?}");
    }
    configuration(&mut objects, "10.200.0.0/16", "10.200.0.0/16");
    slice(&mut objects, &["10.200.1.7"], &["10.200.1.7"]);
    assert_eq!(found(&objects), [], "milan's pods have the same addresses here");
    assert_eq!(found(&Objects::default()), []);
}

#[test]
fn overlapping_cidrs_hide_no_unmapped_slice() {
    let mut objects = Objects::default();
    foreign_cluster(&mut objects, true);
    let swapped =
        |own: &str, seen: &str| json!({"remote": {"cidr": {"pod": [own, seen], "external": []}}});
    let object = json!({"metadata": {"name": "milan", "namespace": "t",
            "labels": {"liqo.io/remote-cluster-id": "milan"}},
        "spec": swapped("10.1.0.0/16", "10.2.0.0/16"),
        "status": swapped("10.2.0.0/16", "10.3.0.0/16")});
    put(&mut objects, Watched::Configuration, object);
    slice(&mut objects, &["10.1.0.7", "10.2.0.7"], &["10.2.0.7", "10.3.0.7"]);
    assert_eq!(found(&objects), []);
    slice(&mut objects, &["10.1.0.7", "10.2.0.7"], &["10.1.0.7", "10.2.0.7"]);
    assert_eq!(found(&objects).len(), 1);

    kubelet(&mut objects, "2026-01-31T11:00:00Z");
    slice(&mut objects, &[], &[]);
    pod(&mut objects, "milan-node", "Running", "10.2.0.7");
    assert_eq!(found(&objects), [], "it may be mapped");
    pod(&mut objects, "milan-node", "Running", "10.1.0.7");
    assert_eq!(found(&objects).len(), 1);
}

#[test]
fn nothing_is_found_before_all_cidrs_are_mapped() {
    let mut objects = peered();
    slice(&mut objects, &["10.200.1.7"], &["10.200.1.7"]);
    let object = json!({"metadata": {"name": "milan", "namespace": "liqo-tenant-milan",
            "labels": {"liqo.io/remote-cluster-id": "milan"}},
        "spec": {"remote": {"cidr": {"pod": ["10.200.0.0/16", "10.201.0.0/16"], "external": []}}},
        "status": {"remote": {"cidr": {"pod": ["10.64.0.0/16"], "external": []}}}});
    put(&mut objects, Watched::Configuration, object);
    assert_eq!(found(&objects), []);
}

#[test]
fn slice_of_another_owner_is_not_found() {
    let mut objects = peered();
    slice(&mut objects, &["10.200.1.7"], &["10.200.1.7"]);
    let metadata = json!({"name": "web", "namespace": "demo", "uid": "other"});
    let own = json!({"metadata": metadata, "endpoints": endpoints(&["10.200.1.7"])});
    put(&mut objects, Watched::ReflectedSlice, own);
    assert_eq!(found(&objects), []);
}

#[test]
fn direct_connections_are_not_of_this_peering() {
    let mut objects = peered();
    slice(&mut objects, &["10.200.1.7"], &["10.200.1.7"]);
    let direct = json!({"clusterAddresses": {"turin": ["10.200.1.7"]}}).to_string();
    let metadata = json!({"name": "web", "namespace": "demo", "uid": "s",
        "labels": {"offloading.liqo.io/origin": "milan"},
        "annotations": {"liqo.io/direct-connections-data": direct}});
    let template = json!({"endpoints": endpoints(&["10.200.1.7"])});
    let shadow = json!({"metadata": metadata, "spec": {"template": template}});
    put(&mut objects, Watched::ShadowSlice, shadow);
    assert_eq!(found(&objects), []);
}

#[test]
fn virtual_kubelet_with_unmapped_pod_is_found() {
    let mut objects = peered();
    kubelet(&mut objects, "2026-01-31T11:59:00Z");
    pod(&mut objects, "milan-node", "Running", "10.200.1.7");
    let pods = vec![("vk-1".to_owned(), "k".to_owned())];
    let node = || "milan-node".to_owned();
    assert_eq!(found(&objects), [(node(), Some(Repair::Delete { pods }))]);
    kubelet(&mut objects, "2026-01-31T11:59:01Z");
    assert_eq!(found(&objects), [(node(), None)], "it is too young");
    foreign_cluster(&mut objects, false);
    assert_eq!(found(&objects), [], "networking is off");
}

#[test]
fn right_virtual_kubelets_are_not_found() {
    let mut objects = peered();
    kubelet(&mut objects, "2026-01-31T11:00:00Z");
    for (node, phase, address) in [
        ("milan-node", "Running", "10.64.1.7"),
        ("milan-node", "Running", "192.0.2.1"),
        ("milan-node", "Succeeded", "10.200.1.7"),
        ("milan-node", "Pending", ""),
        ("other-node", "Running", "10.200.1.7"),
    ] {
        pod(&mut objects, node, phase, address);
        assert_eq!(found(&objects), [], "{node} {phase} {address}");
    }
}

fn repairs() -> LiqoRepairs {
    LiqoRepairs::new(slow_server().client, "test")
}

/// Seconds after the first check at which something is repaired, of checks each second.
async fn repaired(repairs: &mut LiqoRepairs, objects: &Objects, seconds: u64) -> Vec<u64> {
    let began = Instant::now();
    let mut at = Vec::new();
    while began.elapsed().as_secs() < seconds {
        let found = unmapped(objects, NOW.parse().unwrap());
        let due: Vec<Key> = repairs
            .take_due(&found, Instant::now())
            .into_iter()
            .map(|(key, _)| key.clone())
            .collect();
        for key in due {
            at.push(began.elapsed().as_secs());
            repairs.known.get_mut(&key).unwrap().note = Some("unmapped".to_owned());
            repairs.repaired(&key, Ok(()));
        }
        tokio::time::sleep(CHECK).await;
    }
    at
}

#[tokio::test(start_paused = true)]
async fn repairs_of_one_object_are_ever_rarer() {
    let mut objects = peered();
    slice(&mut objects, &["10.200.1.7"], &["10.200.1.7"]);
    let at = repaired(&mut repairs(), &objects, 1000).await;
    assert_eq!(at, [3, 63, 183, 423, 903]);
}

#[tokio::test(start_paused = true)]
async fn fault_that_returns_within_minute_waits() {
    let (mut wrong, mut right) = (peered(), peered());
    slice(&mut wrong, &["10.200.1.7"], &["10.200.1.7"]);
    slice(&mut right, &["10.200.1.7"], &["10.64.1.7"]);
    let mut repairs = repairs();
    assert!(repaired(&mut repairs, &wrong, 2).await.is_empty(), "Liqo may repair it itself");
    assert!(repaired(&mut repairs, &right, 10).await.is_empty());
    assert_eq!(repaired(&mut repairs, &wrong, 4).await, [3]);
    assert!(repaired(&mut repairs, &right, 10).await.is_empty());
    assert_eq!(repairs.notes().len(), 1, "it is named for a minute");
    assert_eq!(repaired(&mut repairs, &wrong, 60).await, [49]);
    assert!(repaired(&mut repairs, &right, 200).await.is_empty());
    assert_eq!(repairs.notes().len(), 0);
}
