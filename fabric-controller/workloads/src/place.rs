//! Placement of gateways. Pure.

use std::collections::BTreeMap;

use fabric_api::check::Fault;
use fabric_api::fabric::GatewayReplica;
use fabric_api::networking::InternalEndpoint;
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::api::core::v1::{ObjectReference, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::DynamicObject;
use serde::de::DeserializeOwned;

use super::Nodes;
use super::endpoint::endpoint;
use super::live::{Key, Objects, Watched};
use super::pods::GatewayPod;
use fabric_index::placement::{Placement, PlannedGateway};

/// Observed state that decides where gateways are.
#[derive(Clone, Copy)]
pub(super) struct World<'a> {
    pub(super) live: &'a Objects,
    pub(super) nodes: &'a Nodes,
    pub(super) pods: &'a [&'a GatewayPod],
}

/// Placement of every gateway that has a Deployment.
pub(super) fn placements(world: World<'_>) -> BTreeMap<ObjectRef, Placement> {
    let deployments = world.live.all(Watched::Deployment);
    let placed = deployments.filter_map(|(_, deployment)| {
        let (gateway, uid) = owner_of(&deployment.metadata)?;
        let placement = placement(&gateway, uid, deployment, world);
        Some((gateway, placement))
    });
    placed.collect()
}

/// The GatewayServer or GatewayClient that an object was made for.
pub(super) fn gateway_of(object: &DynamicObject) -> Option<ObjectRef> {
    owner_of(&object.metadata).map(|(gateway, _)| gateway)
}

/// Uid of the ServiceAccount that was made for that gateway.
pub(super) fn account_uid(live: &Objects, gateway: &PlannedGateway) -> Option<String> {
    let namespace = gateway.object.namespace().unwrap_or_default();
    let key = Key::new(Watched::Account, namespace, &format!("gw-{}", gateway.object.name()));
    let account = &live.get(&key)?.metadata;
    let is_own = owner_of(account).is_some_and(|(_, uid)| uid == gateway.object.uid());
    let stays = is_own && account.deletion_timestamp.is_none();
    account.uid.clone().filter(|_| stays)
}

/// True if an object was made for a gateway of the same name as the one that it is wanted for.
pub(super) fn is_of_a_namesake(there: &ObjectMeta, want: &ObjectMeta) -> bool {
    owner_of(there).zip(owner_of(want)).is_some_and(|((_, uid), (_, wanted))| uid != wanted)
}

/// The gateway of an object, with its uid: it may be gone, and another of that name be there.
fn owner_of(of: &ObjectMeta) -> Option<(ObjectRef, &str)> {
    let owners = of.owner_references.as_ref()?;
    owners.iter().find_map(|owner| {
        let kind = Kind::from_type(&owner.api_version, &owner.kind)?;
        let is_gateway = matches!(kind, Kind::GatewayServer | Kind::GatewayClient);
        let namespace = of.namespace.as_deref().unwrap_or_default();
        let gateway = ObjectRef::new(kind, namespace, &owner.name);
        is_gateway.then_some((gateway, owner.uid.as_str()))
    })
}

fn placement(
    gateway: &ObjectRef,
    uid: &str,
    deployment: &DynamicObject,
    world: World<'_>,
) -> Placement {
    let namespace = gateway.namespace.as_deref().unwrap_or_default();
    let replicas = |count: &str| {
        let count = deployment.data["status"][count].as_i64();
        count.and_then(|count| i32::try_from(count).ok()).unwrap_or_default()
    };
    let own = || world.pods.iter().filter(|pod| pod.is_of(namespace, &gateway.name));
    let pod = own().max();
    let host = pod.and_then(|pod| world.nodes.get(&pod.node));
    let service = Key::new(Watched::Service, namespace, &format!("gw-{}", gateway.name));
    let service = world.live.get(&service).filter(|service| {
        // A Service that a load balancer still holds on to has an address that is about to go.
        service.metadata.deletion_timestamp.is_none()
            && owner_of(&service.metadata).is_some_and(|(_, of)| of == uid)
    });
    let service: Option<Service> = service.and_then(typed);
    Placement {
        uid: uid.to_owned(),
        workload: Some(reference(deployment)),
        endpoint: service.and_then(|service| endpoint(&service, host)),
        is_served: own().any(|pod| pod.stays && pod.is_ready),
        internal: pod.map(|pod| InternalEndpoint {
            ip: Some(pod.address.clone()),
            node: Some(pod.node.clone()),
        }),
        replicas: replicas_of(own().copied(), world.nodes),
        is_lost: false,
        ready: replicas("readyReplicas"),
        unavailable: replicas("unavailableReplicas"),
        faults: Vec::<Fault>::new(),
        pod_fault: None,
    }
}

/// Replicas that nodes reach: a node without its Node takes no packets, whatever still runs there.
fn replicas_of<'a>(
    pods: impl Iterator<Item = &'a GatewayPod>,
    nodes: &Nodes,
) -> Vec<GatewayReplica> {
    let started: Vec<_> = pods.filter(|pod| pod.is_started).collect();
    let has_node = |pod: &&&GatewayPod| nodes.get(&pod.node).is_some();
    let on_nodes: Vec<_> = started.iter().filter(has_node).copied().collect();
    let of = if on_nodes.is_empty() { started } else { on_nodes };
    of.into_iter().filter_map(replica).collect()
}

fn replica(pod: &GatewayPod) -> Option<GatewayReplica> {
    Some(GatewayReplica { address: pod.address.parse().ok()?, node: pod.node.clone() })
}

fn reference(deployment: &DynamicObject) -> ObjectReference {
    ObjectReference {
        api_version: Some("apps/v1".to_owned()),
        kind: Some("Deployment".to_owned()),
        namespace: deployment.metadata.namespace.clone(),
        name: deployment.metadata.name.clone(),
        uid: deployment.metadata.uid.clone(),
        ..ObjectReference::default()
    }
}

fn typed<T: DeserializeOwned>(object: &DynamicObject) -> Option<T> {
    let value = serde_json::to_value(object);
    value.and_then(serde_json::from_value).ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use serde_json::{Value, json};

    use super::*;

    /// All placements, of objects of these kinds.
    fn all(objects: &[(&str, Value)]) -> BTreeMap<ObjectRef, Placement> {
        let (mut live, mut nodes, mut pods) = (Objects::default(), BTreeMap::new(), Vec::new());
        for (kind, object) in objects.iter().cloned() {
            match kind {
                "Node" => {
                    let node: Node = serde_json::from_value(object).unwrap();
                    nodes.insert(node.metadata.name.clone().unwrap(), node);
                }
                "Pod" => pods.extend(GatewayPod::of(&serde_json::from_value(object).unwrap())),
                kind => {
                    let of = Watched::of_kind(kind).unwrap();
                    live.put(of, serde_json::from_value(object).unwrap());
                }
            }
        }
        let pods: Vec<&GatewayPod> = pods.iter().collect();
        placements(World { live: &live, nodes: &nodes.into(), pods: &pods })
    }

    fn owned(uid: &str) -> Value {
        let owner = json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
            "name": "server", "uid": uid});
        json!({"name": "gw-server", "namespace": "t", "uid": "d", "ownerReferences": [owner]})
    }

    fn deployment() -> (&'static str, Value) {
        let metadata = owned("u");
        let status = json!({"readyReplicas": 1});
        (
            "Deployment",
            json!({"metadata": metadata,
            "spec": {"selector": {}, "template": {}}, "status": status}),
        )
    }

    fn service() -> (&'static str, Value) {
        (
            "Service",
            json!({"metadata": owned("u"),
            "spec": {"type": "NodePort",
                "ports": [{"port": 51840, "nodePort": 30742, "protocol": "UDP"}]}}),
        )
    }

    fn node(name: &str, address: &str) -> (&'static str, Value) {
        let addresses = json!([{"type": "InternalIP", "address": address}]);
        ("Node", json!({"metadata": {"name": name}, "status": {"addresses": addresses}}))
    }

    fn pod(name: &str, node: &str, ip: &str, ready: &str) -> (&'static str, Value) {
        let labels = json!({"networking.liqo.io/component": "gateway",
            "networking.liqo.io/gateway-name": "server",
            "networking.liqo.io/active": "true"});
        (
            "Pod",
            json!({
                "metadata": {"name": name, "namespace": "t", "labels": labels,
                    "creationTimestamp": "2026-01-31T12:00:00Z"},
                "spec": {"nodeName": node, "containers": []},
                "status": {"phase": "Running", "podIP": ip,
                    "conditions": [{"type": "Ready", "status": ready}]},
            }),
        )
    }

    fn placed(objects: &[(&'static str, Value)]) -> Placement {
        let gateway = ObjectRef::new(Kind::GatewayServer, "t", "server");
        all(objects).remove(&gateway).unwrap()
    }

    fn place(objects: &[(&'static str, Value)]) -> Option<(String, String, Vec<String>)> {
        let placement = placed(objects);
        let internal = placement.internal?;
        let addresses = placement.endpoint.map(|endpoint| endpoint.addresses);
        Some((internal.ip?, internal.node?, addresses.unwrap_or_default()))
    }

    #[test]
    fn gateway_without_pod_has_deployment_only() {
        let placement = placed(&[deployment(), service(), node("n1", "192.0.2.11")]);
        assert_eq!((placement.internal, placement.endpoint), (None, None));
        let workload = placement.workload.unwrap();
        assert_eq!(workload.name.as_deref(), Some("gw-server"));
        assert_eq!(workload.uid.as_deref(), Some("d"));
        assert_eq!((placement.ready, placement.unavailable), (1, 0));
        assert_eq!(placement.uid, "u");
        assert!(all(&[service()]).is_empty(), "no Deployment");
    }

    #[test]
    fn gateway_is_placed_at_its_active_pod() {
        let mut passive = pod("b", "n2", "10.200.2.7", "True");
        passive.1["metadata"]["labels"]["networking.liqo.io/active"] = json!("false");
        let nodes = [node("n1", "192.0.2.11"), node("n2", "192.0.2.12")];
        let [n1, n2] = nodes;
        let all = [deployment(), service(), n1, n2, pod("a", "n1", "10.200.1.7", "True"), passive];
        let expected = ("10.200.1.7", "n1", "192.0.2.11");
        let (ip, node, addresses) = place(&all).unwrap();
        assert_eq!((ip.as_str(), node.as_str(), addresses[0].as_str()), expected);
    }

    #[test]
    fn service_of_namesake_gives_no_endpoint() {
        let endpoint = |uid: &str| {
            let mut service = service();
            service.1["metadata"] = owned(uid);
            let pod = pod("a", "n1", "10.200.1.7", "True");
            placed(&[deployment(), service, node("n1", "192.0.2.11"), pod]).endpoint
        };
        assert!(endpoint("u").is_some());
        assert_eq!(endpoint("of one that is gone"), None);
    }

    #[test]
    fn deleted_service_gives_no_endpoint() {
        let mut service = service();
        service.1["spec"]["type"] = json!("LoadBalancer");
        service.1["status"] = json!({"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}]}});
        let endpoint = |service| placed(&[deployment(), service]).endpoint;
        assert!(endpoint(service.clone()).is_some());
        service.1["metadata"]["deletionTimestamp"] = json!("2026-01-31T12:00:02Z");
        assert_eq!(endpoint(service), None);
    }

    #[test]
    fn of_two_pods_the_one_counts_that_will_be_left() {
        let node_of = |pods: [(&'static str, Value); 2]| {
            let [one, other] = pods;
            place(&[deployment(), one, other]).unwrap().1
        };
        let old = || pod("z", "n1", "10.200.1.7", "True");
        let new = |ready| pod("a", "n2", "10.200.2.7", ready);
        assert_eq!(node_of([old(), new("False")]), "n1", "the new one is not ready yet");
        let mut later = new("True");
        later.1["metadata"]["creationTimestamp"] = json!("2026-01-31T12:00:01Z");
        assert_eq!(node_of([old(), later]), "n2");
        let mut leaving = old();
        leaving.1["metadata"]["deletionTimestamp"] = json!("2026-01-31T12:00:02Z");
        assert_eq!(node_of([leaving.clone(), new("False")]), "n2");
        assert_eq!(place(&[deployment(), leaving]).unwrap().1, "n1", "better than none");
    }

    #[test]
    fn pod_is_a_replica_once_it_runs() {
        let replicas = |pod| placed(&[deployment(), pod]).replicas.len();
        let mut pod = pod("a", "n1", "10.200.1.7", "False");
        assert_eq!(replicas(pod.clone()), 1);
        pod.1["status"]["phase"] = json!("Pending");
        assert_eq!(replicas(pod), 0, "its image may not exist");
    }

    #[test]
    fn pod_without_node_is_no_replica_beside_others() {
        let pods = || [pod("a", "n1", "10.200.1.7", "True"), pod("b", "n2", "10.200.2.7", "True")];
        let nodes = |with: &[(&'static str, Value)]| {
            let all: Vec<_> = [deployment()].iter().chain(with).chain(&pods()).cloned().collect();
            placed(&all).replicas.into_iter().map(|replica| replica.node).collect::<Vec<_>>()
        };
        let [n1, n2] = [node("n1", "192.0.2.11"), node("n2", "192.0.2.12")];
        assert_eq!(nodes(&[n1, n2.clone()]), ["n1", "n2"]);
        assert_eq!(nodes(&[n2]), ["n2"]);
        assert_eq!(nodes(&[]), ["n1", "n2"], "no Node is known yet");
    }

    #[test]
    fn ready_pod_serves_gateway() {
        let is_served = |pod| placed(&[deployment(), pod]).is_served;
        assert!(is_served(pod("a", "n1", "10.200.1.7", "True")));
        assert!(!is_served(pod("a", "n1", "10.200.1.7", "False")));
        let mut leaving = pod("a", "n1", "10.200.1.7", "True");
        leaving.1["metadata"]["deletionTimestamp"] = json!("2026-01-31T12:00:02Z");
        assert!(!is_served(leaving));
        assert!(!placed(&[deployment()]).is_served);
        let active = pod("a", "n1", "10.200.1.7", "False");
        let mut standby = pod("b", "n2", "10.200.2.7", "True");
        standby.1["metadata"]["labels"]["networking.liqo.io/active"] = json!("false");
        assert!(placed(&[deployment(), active, standby]).is_served, "it takes over");
    }
}
