//! Secrets with keys of gateways: a program that reads gateways reads Secrets in their namespaces only.

use std::collections::{BTreeMap, VecDeque};

use fabric_api::networking::{GatewayClient, GatewayServer, secret_name};
use fabric_kube_client::reflector::Selection;
use fabric_kube_client::{ApiServer, Grant};
use fabric_objects::{Event, Kind, Object, ObjectRef};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::source::Source;

/// Events of gateways by their namespaces, until the Secrets there are known.
pub(super) type Held = BTreeMap<String, VecDeque<Event>>;

pub(super) fn are_read_by_gateways(kinds: &[Kind]) -> bool {
    [Kind::Secret, Kind::GatewayServer, Kind::GatewayClient].iter().all(|kind| kinds.contains(kind))
}

/// Namespace of a GatewayServer or GatewayClient.
pub(super) fn namespace_of_gateway(object: &ObjectRef) -> Option<&str> {
    let is_gateway = matches!(object.kind, Kind::GatewayServer | Kind::GatewayClient);
    object.namespace.as_deref().filter(|_| is_gateway)
}

/// Secrets in the namespace of a gateway.
pub(super) fn selection(server: &ApiServer, gateway: &Object, namespace: &str) -> Selection {
    let kind = gateway.kind();
    let owner = OwnerReference {
        api_version: kind.api_version().to_owned(),
        kind: kind.as_str().to_owned(),
        name: gateway.name().to_owned(),
        uid: gateway.uid().to_owned(),
        ..OwnerReference::default()
    };
    let grant = Grant::of_gateway_keys(owner, namespace, &server.namespace);
    Source::Keys(namespace.to_owned()).selection().granted(grant, &key_pair(gateway))
}

fn key_pair(gateway: &Object) -> ObjectRef {
    let named = if let Ok(server) = <&GatewayServer>::try_from(gateway) {
        server.spec.secret_ref.as_ref()
    } else {
        <&GatewayClient>::try_from(gateway).ok().and_then(|client| client.spec.secret_ref.as_ref())
    };
    let name = secret_name(named).map_or_else(|| format!("gw-{}", gateway.name()), str::to_owned);
    ObjectRef::new(Kind::Secret, gateway.namespace().unwrap_or_default(), &name)
}
