//! Secrets with keys of gateways: a program that reads gateways reads Secrets in their namespaces only.

use std::collections::{BTreeMap, VecDeque};

use fabric_api::labels;
use fabric_api::networking::{GatewayClient, GatewayServer, secret_name};
use fabric_kube_client::reflector::Selection;
use fabric_kube_client::{ApiServer, Grant};
use fabric_objects::{Event, Kind, Object, ObjectRef};
use k8s_openapi::api::rbac::v1::{RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::source::Source;

/// ClusterRole that may read Secrets, and account that may bind it to itself; the release has both.
const ROLE: &str = "liqo-gateway-keys";
const ACCOUNT: &str = "liqo-fabric-controller";
/// Name of the binding.
const BINDING: &str = "weft-gateway-keys";
const RBAC: &str = "rbac.authorization.k8s.io";

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
    let grant = Grant::new(binding(namespace, &server.namespace), labels::CONTROLLER_MANAGER);
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

fn binding(namespace: &str, installation: &str) -> RoleBinding {
    let labels = [(labels::MANAGED_BY, labels::WEFT)];
    let metadata = ObjectMeta {
        name: Some(BINDING.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
        ..ObjectMeta::default()
    };
    let role_ref = RoleRef {
        api_group: Some(RBAC.to_owned()),
        kind: "ClusterRole".to_owned(),
        name: ROLE.to_owned(),
    };
    let subject = Subject {
        kind: "ServiceAccount".to_owned(),
        name: ACCOUNT.to_owned(),
        namespace: Some(installation.to_owned()),
        ..Subject::default()
    };
    RoleBinding { metadata, role_ref, subjects: Some(vec![subject]) }
}
