//! The Service of an IP resource, and the EndpointSlice that leads to its address. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::ipam::{IP, ServiceMetadata};
use fabric_api::labels;
use fabric_objects::{Kind, Object, ObjectRef};
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DynamicObject;

use super::live::{Key, SLICE_OF, SLICE_OF_WEFT, Watched};
use super::objects::dynamic;
use fabric_index::owner::reference_to;
use fabric_index::placement::Plan;

/// Label with the Service of an EndpointSlice.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// Objects named as the IP, and gone when it is. As in Liqo, the way leads to `spec.ip` itself, and
/// each port to the same one there: a `targetPort` has no effect.
pub(super) fn objects_of(ip: &IP) -> serde_json::Result<Vec<DynamicObject>> {
    let Some((template, address)) = ip.spec.service_template.as_ref().zip(ip.spec.address()) else {
        return Ok(Vec::new());
    };
    let mut spec = template.spec.clone();
    for port in spec.ports.iter_mut().flatten() {
        // The API server would fill it in, and merges ports by it.
        port.protocol.get_or_insert_with(|| "TCP".to_owned());
    }
    let slice = slice(ip, address, &spec);
    let service = Service {
        metadata: metadata(ip, &template.metadata),
        spec: Some(spec),
        ..Service::default()
    };
    Ok(vec![dynamic(&service)?, dynamic(&slice)?])
}

/// True of an object that was made for an IP that is to have none, or for one that was before.
pub(super) fn is_stale(object: &DynamicObject, plan: &Plan) -> bool {
    ip_of(object).is_some_and(|(ip, uid)| {
        plan.services.get(&ip).is_none_or(|ip| ip.metadata.uid.as_deref() != Some(uid))
    })
}

pub(super) fn is_wanted(key: &Key, plan: &Plan) -> bool {
    let ip = ObjectRef::new(Kind::Ip, &key.namespace, &key.name);
    Watched::EXPOSED.contains(&key.of) && plan.services.contains_key(&ip)
}

/// The IP that an object was made for, with its uid.
fn ip_of(object: &DynamicObject) -> Option<(ObjectRef, &str)> {
    let owners = object.metadata.owner_references.as_ref()?;
    let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
    owners.iter().find_map(|owner| {
        let is_ip = Kind::from_type(&owner.api_version, &owner.kind) == Some(Kind::Ip);
        is_ip.then(|| (ObjectRef::new(Kind::Ip, namespace, &owner.name), owner.uid.as_str()))
    })
}

fn slice(ip: &IP, address: IpAddr, service: &ServiceSpec) -> EndpointSlice {
    let mut metadata = metadata(ip, &ServiceMetadata::default());
    let name = metadata.name.clone().unwrap_or_default();
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(SERVICE_NAME.to_owned(), name);
    labels.insert(SLICE_OF.to_owned(), SLICE_OF_WEFT.to_owned());
    let conditions = EndpointConditions { ready: Some(true), ..EndpointConditions::default() };
    EndpointSlice {
        metadata,
        address_type: if address.is_ipv4() { "IPv4" } else { "IPv6" }.to_owned(),
        endpoints: Some(vec![Endpoint {
            addresses: vec![address.to_string()],
            conditions: Some(conditions),
            ..Endpoint::default()
        }]),
        ports: Some(service.ports.iter().flatten().map(port).collect()),
    }
}

fn port(of: &ServicePort) -> EndpointPort {
    EndpointPort {
        name: Some(of.name.clone().unwrap_or_default()),
        protocol: of.protocol.clone(),
        port: Some(of.port),
        app_protocol: of.app_protocol.clone(),
    }
}

fn metadata(ip: &IP, wanted: &ServiceMetadata) -> ObjectMeta {
    let mut all = wanted.labels.clone();
    all.insert(labels::MANAGED_BY.to_owned(), labels::WEFT.to_owned());
    let some = |map: &BTreeMap<String, String>| Some(map.clone()).filter(|map| !map.is_empty());
    ObjectMeta {
        name: ip.metadata.name.clone(),
        namespace: ip.metadata.namespace.clone(),
        labels: Some(all),
        annotations: some(&wanted.annotations),
        owner_references: Some(vec![reference_to(&Object::from(ip.clone()))]),
        ..ObjectMeta::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn objects(spec: Value) -> Vec<Value> {
        let ip: IP = serde_json::from_value(json!({
            "apiVersion": "ipam.liqo.io/v1alpha1", "kind": "IP",
            "metadata": {"name": "database", "namespace": "shop", "uid": "u"}, "spec": spec,
        }))
        .unwrap();
        let objects = objects_of(&ip).unwrap();
        objects.into_iter().map(|object| serde_json::to_value(object).unwrap()).collect()
    }

    fn template() -> Value {
        let ports = json!([{"name": "sql", "port": 5432, "targetPort": 6432},
            {"name": "dns", "port": 53, "protocol": "UDP", "appProtocol": "example.com/dns"}]);
        json!({
            "metadata": {"name": "other", "labels": {"app": "database"},
                "annotations": {"example.com/x": "y"}},
            "spec": {"type": "ClusterIP", "ports": ports},
        })
    }

    #[test]
    fn service_and_slice_are_owned_by_ip() {
        let objects = objects(json!({"ip": "192.0.2.7", "serviceTemplate": template()}));
        let [service, slice] = objects.as_slice() else { panic!("{objects:?}") };
        for object in [service, slice] {
            let metadata = &object["metadata"];
            assert_eq!(
                (&metadata["name"], &metadata["namespace"]),
                (&json!("database"), &json!("shop"))
            );
            let owner = json!([{"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "IP",
                "name": "database", "uid": "u", "controller": true}]);
            assert_eq!(metadata["ownerReferences"], owner);
            assert_eq!(metadata["labels"]["app.kubernetes.io/managed-by"], "weft");
            let object = serde_json::from_value(object.clone()).unwrap();
            let (ip, uid) = ip_of(&object).unwrap();
            assert_eq!((ip.to_string().as_str(), uid), ("IP shop/database", "u"));
        }
        assert_eq!(service["metadata"]["labels"]["app"], "database");
        assert_eq!(service["metadata"]["annotations"], json!({"example.com/x": "y"}));
        assert_eq!(service["spec"]["ports"][0]["protocol"], "TCP");
        assert_eq!(slice["metadata"]["labels"]["kubernetes.io/service-name"], "database");
        assert_eq!(slice["metadata"].get("annotations"), None);
    }

    #[test]
    fn slice_has_address_and_ports_of_ip() {
        let of = |address: &str| {
            objects(json!({"ip": address, "serviceTemplate": template()})).remove(1)
        };
        let slice = of("192.0.2.7");
        assert_eq!(slice["addressType"], "IPv4");
        let ready = json!([{"addresses": ["192.0.2.7"], "conditions": {"ready": true}}]);
        assert_eq!(slice["endpoints"], ready);
        let ports = json!([{"name": "sql", "port": 5432, "protocol": "TCP"},
            {"name": "dns", "port": 53, "protocol": "UDP", "appProtocol": "example.com/dns"}]);
        assert_eq!(slice["ports"], ports);
        assert_eq!(of("2001:db8::7")["addressType"], "IPv6");
    }

    #[test]
    fn no_service_without_template_or_address() {
        assert!(objects(json!({"ip": "192.0.2.7"})).is_empty());
        assert!(objects(json!({"ip": "x", "serviceTemplate": template()})).is_empty());
    }
}
