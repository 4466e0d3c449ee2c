//! Own objects that are there and should not be.

use std::collections::BTreeSet;

use fabric_api::networking::Connection;
use fabric_index::{Index, owner};
use fabric_objects::{Kind, Object, ObjectRef};

use super::desired::Desired;
use super::uncertain::Uncertain;

pub(super) fn deleted(
    index: &Index,
    desired: &Desired,
    uncertain: &Uncertain<'_>,
) -> BTreeSet<ObjectRef> {
    let is_owner_gone =
        |object: &Object| owner::of(object).is_some_and(|owner| !uncertain.may_still_be(&owner));
    let is_ground_gone = |(reference, object): &(&ObjectRef, &Object)| match reference.kind {
        Kind::Network | Kind::Ip => is_owner_gone(object),
        Kind::GatewayConfig => !uncertain.gateway_may_be_unread(reference),
        Kind::NodeConfig => !uncertain.node_may_still_be(&reference.name),
        Kind::FabricRecord | Kind::GatewayRecord => true,
        Kind::Namespace
        | Kind::ConfigMap
        | Kind::Secret
        | Kind::Node
        | Kind::Configuration
        | Kind::Connection
        | Kind::GatewayServer
        | Kind::GatewayClient
        | Kind::PublicKey => false,
    };
    let all = Kind::ALL.into_iter().flat_map(|kind| index.of_kind(kind));
    let undesired = all.filter(|(reference, _)| !desired.stays(reference));
    let all = undesired.filter(is_ground_gone).map(|(reference, _)| reference);
    let mut deleted: BTreeSet<ObjectRef> = all.cloned().collect();
    deleted.extend(connections(index, desired, &deleted));
    deleted
}

/// Connections of removed gateways, which would stay `Connected` for ever. Another program's has none of them as
/// owner.
fn connections(index: &Index, desired: &Desired, deleted: &BTreeSet<ObjectRef>) -> Vec<ObjectRef> {
    let has_gateway = |reference: &ObjectRef, connection: &Connection| {
        let gateway = &connection.spec.gateway_ref;
        let name = gateway.name.as_deref().unwrap_or_default();
        let namespace = reference.namespace.as_deref().unwrap_or_default();
        let config = ObjectRef::new(Kind::GatewayConfig, namespace, name);
        desired.objects.contains_key(&config)
            || (index.get(&config).is_some() && !deleted.contains(&config))
    };
    let is_weft = |connection: &Connection| {
        let owners = connection.metadata.owner_references.iter().flatten();
        let gateways = [Kind::GatewayServer, Kind::GatewayClient].map(Kind::as_str);
        owners.into_iter().any(|owner| gateways.contains(&owner.kind.as_str()))
    };
    let all = index.all::<Connection>(Kind::Connection);
    let lost = all.filter(|(reference, connection)| {
        is_weft(connection) && !has_gateway(reference, connection)
    });
    lost.map(|(reference, _)| reference.clone()).collect()
}
