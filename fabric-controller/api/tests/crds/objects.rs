//! Which objects the definitions take, their rules included.

use std::collections::BTreeMap;

use fabric_api::networking::Configuration;
use fabric_api::{crds, fabric, ipam, liqo_core, networking};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::accept::problems;

/// Two clusters that peer; one writes strings for CIDRs, the other lists.
pub(crate) const PEERING: &str = include_str!("peering.yaml");
/// Every field that there is, but for those that exclude each other.
pub(crate) const WHOLE: &str = include_str!("whole.yaml");
const BAD: &str = include_str!("bad.yaml");

/// An object that must be refused.
#[derive(Deserialize)]
pub(crate) struct Bad {
    /// Part of the fault that is reported.
    pub(crate) because: String,
    /// The object before the refused change.
    pub(crate) was: Option<Value>,
    pub(crate) object: Value,
}

#[test]
fn manifests_of_peering_are_accepted() {
    let definitions = definitions();
    let refused = |object: &Value| {
        let found = problems(definition(&definitions, object), object, None);
        (!found.is_empty()).then(|| (object["metadata"]["namespace"].clone(), found))
    };
    let refused: Vec<_> = resources(PEERING).iter().filter_map(refused).collect();
    let [(namespace, found)] = refused.as_slice() else { panic!("{refused:#?}") };
    assert_eq!(namespace, "liqo-tenant-lyon", "the one with strings: {found:?}");
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn strings_become_lists_when_decoded() {
    let definitions = definitions();
    let configurations = resources(PEERING).into_iter().filter(|o| o["kind"] == "Configuration");
    let mut seen = Vec::new();
    for configuration in configurations {
        let read: Configuration = serde_json::from_value(configuration).unwrap();
        let written = serde_json::to_value(&read).unwrap();
        assert_eq!(
            problems(definition(&definitions, &written), &written, None),
            Vec::<String>::new()
        );
        seen.push(read.spec.remote);
    }
    assert_eq!(seen.len(), 2);
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn every_field_survives_types_and_definitions() {
    let definitions = definitions();
    let objects = resources(WHOLE);
    for object in &objects {
        assert_eq!(problems(definition(&definitions, object), object, None), Vec::<String>::new());
        assert_eq!(&through_types(object), object);
    }
    let kinds: Vec<_> = objects.iter().map(|object| object["kind"].as_str().unwrap()).collect();
    assert!(definitions.keys().all(|(_, kind)| kinds.contains(&kind.as_str())), "{kinds:?}");
}

#[test]
fn bad_objects_are_refused() {
    let definitions = definitions();
    for bad in bad() {
        let found = problems(definition(&definitions, &bad.object), &bad.object, bad.was.as_ref());
        let reported = found.iter().any(|problem| problem.contains(&bad.because));
        assert!(reported, "expected {:?}, found {found:?} in {}", bad.because, bad.object);
    }
}

#[test]
fn grant_is_set_once_and_can_be_removed() {
    let definitions = definitions();
    let ip = |status: Value| {
        let mut ip = resources(WHOLE).into_iter().find(|object| object["kind"] == "IP").unwrap();
        ip["status"] = status;
        ip
    };
    let granted = ip(json!({ "ip": "10.70.0.9", "cidr": "10.70.0.0/16" }));
    let none = ip(json!({}));
    let problems = |old, new| problems(definition(&definitions, new), new, Some(old));
    for (old, new) in [(&none, &granted), (&granted, &granted), (&granted, &none)] {
        assert_eq!(problems(old, new), Vec::<String>::new());
    }
    let moved = ip(json!({ "ip": "10.71.0.9", "cidr": "10.71.0.0/16" }));
    assert_ne!(problems(&granted, &moved), Vec::<String>::new());
}

pub(crate) fn bad() -> Vec<Bad> {
    serde_saphyr::from_str(BAD).unwrap()
}

/// The custom resources of a text.
pub(crate) fn resources(text: &str) -> Vec<Value> {
    let objects: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    objects.into_iter().filter(|object| object["apiVersion"] != "v1").collect()
}

type Definitions = BTreeMap<(String, String), Value>;

/// Definitions by group and kind.
fn definitions() -> Definitions {
    let all = crds::liqo().into_iter().chain(crds::weft());
    let keyed = all.map(|crd| {
        let key = (crd.spec.group.clone(), crd.spec.names.kind.clone());
        (key, serde_json::to_value(crd).unwrap())
    });
    keyed.collect()
}

fn definition<'a>(definitions: &'a Definitions, object: &Value) -> &'a Value {
    let group = object["apiVersion"].as_str().unwrap().split('/').next().unwrap();
    &definitions[&(group.to_owned(), object["kind"].as_str().unwrap().to_owned())]
}

fn through_types(object: &Value) -> Value {
    fn through<T: DeserializeOwned + Serialize>(object: &Value) -> Value {
        serde_json::to_value(serde_json::from_value::<T>(object.clone()).unwrap()).unwrap()
    }
    match object["kind"].as_str().unwrap() {
        "Configuration" => through::<Configuration>(object),
        "Connection" => through::<networking::Connection>(object),
        "GatewayClient" => through::<networking::GatewayClient>(object),
        "GatewayServer" => through::<networking::GatewayServer>(object),
        "PublicKey" => through::<networking::PublicKeyObject>(object),
        "WgGatewayClientTemplate" => through::<networking::WgGatewayClientTemplate>(object),
        "WgGatewayServerTemplate" => through::<networking::WgGatewayServerTemplate>(object),
        "IP" => through::<ipam::IP>(object),
        "Network" => through::<ipam::Network>(object),
        "ForeignCluster" => through::<liqo_core::ForeignCluster>(object),
        "GatewayConfig" => through::<fabric::GatewayConfig>(object),
        "NodeConfig" => through::<fabric::NodeConfig>(object),
        "FabricRecord" => through::<fabric::FabricRecord>(object),
        "GatewayRecord" => through::<fabric::GatewayRecord>(object),
        other => panic!("no type for {other}"),
    }
}
