//! Gateways in Kubernetes: which are to run, and the reported placement of those that do.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fabric_api::fabric::{GatewayConfig, GatewayReplica};
use fabric_api::networking::InternalEndpoint;
use fabric_index::Index;
use fabric_index::placement::{Placement, PlannedGateway, PlannedGateways};
use fabric_model::gateway::End;
use fabric_model::{Gateway, Problems};
use fabric_objects::{Object, ObjectRef};

use super::secrets;

/// A gateway that has never run is made only as it should be.
pub(super) fn planned(index: &Index, gateways: &[Gateway<'_>]) -> PlannedGateways {
    let made =
        |gateway: &&Gateway<'_>| gateway.settings.is_some() || placement(index, gateway).is_some();
    let planned = gateways.iter().filter(made).filter_map(|gateway| {
        let mut object = index.get(&gateway.reference)?.clone();
        object.copy_status(None);
        let secret_name = gateway.key_pair().name;
        let planned = PlannedGateway { object, peer: gateway.peer.clone(), secret_name };
        Some((gateway.reference.clone(), planned))
    });
    planned.collect()
}

pub(super) fn statuses(index: &Index, gateways: &[Gateway<'_>]) -> BTreeMap<ObjectRef, Object> {
    let statuses = gateways.iter().map(|of| (of.reference.clone(), with_status(index, of)));
    statuses.collect()
}

fn with_status(index: &Index, gateway: &Gateway<'_>) -> Object {
    let placement = placement(index, gateway).cloned().unwrap_or_default();
    let Placement { workload, endpoint, internal, .. } = placement;
    // While there is no pod, it is found where it was.
    let moving = internal.is_none();
    let internal = internal_endpoint(index, gateway);
    let secret = secrets::reference(index, gateway);
    match gateway.end {
        End::Server(server) => {
            let mut server = server.clone();
            let status = server.status.get_or_insert_default();
            status.server_ref = workload;
            status.endpoint = endpoint.or_else(|| status.endpoint.take().filter(|_| moving));
            status.secret_ref = secret;
            status.internal_endpoint = internal;
            server.into()
        }
        End::Client(client) => {
            let mut client = client.clone();
            let status = client.status.get_or_insert_default();
            status.client_ref = workload;
            status.secret_ref = secret;
            status.internal_endpoint = internal;
            client.into()
        }
    }
}

/// Address and node of the pod that has the gateway's tunnel, now or a moment ago.
pub(super) fn internal_endpoint(index: &Index, gateway: &Gateway<'_>) -> Option<InternalEndpoint> {
    let placement = placement(index, gateway);
    let now = match active_replica(index, gateway) {
        Some(GatewayReplica { address, node }) => {
            Some(InternalEndpoint { ip: Some(address.to_string()), node: Some(node.clone()) })
        }
        None => placement.and_then(|placement| placement.internal.clone()),
    };
    if now.is_some() || placement.is_some_and(|placement| placement.is_lost) {
        return now;
    }
    match gateway.end {
        End::Server(server) => server.status.as_ref()?.internal_endpoint.clone(),
        End::Client(client) => client.status.as_ref()?.internal_endpoint.clone(),
    }
}

/// All pods of the gateway, of which any may have the tunnel next.
pub(super) fn replicas<'a>(index: &'a Index, gateway: &Gateway<'_>) -> &'a [GatewayReplica] {
    placement(index, gateway).map(|placement| placement.replicas.as_slice()).unwrap_or_default()
}

/// The pod that reports that it has the tunnel, while there is one.
fn active_replica<'a>(index: &'a Index, gateway: &Gateway<'_>) -> Option<&'a GatewayReplica> {
    let config = index.typed::<GatewayConfig>(&gateway.config())?;
    let active = config.status.as_ref()?.active?;
    replicas(index, gateway).iter().find(|replica| replica.address == active.address)
}

/// VXLAN endpoint of the gateway for the nodes.
pub(super) fn pod_address(index: &Index, gateway: &Gateway<'_>) -> Option<IpAddr> {
    // Standalone, its status has the address of its link, which only its host can use.
    let internal = internal_endpoint(index, gateway).filter(|_| index.settings.kubernetes);
    internal?.ip?.parse().ok()
}

/// Placement of this very gateway: that of a former one of the same name does not count.
pub(super) fn placement<'a>(index: &'a Index, gateway: &Gateway<'_>) -> Option<&'a Placement> {
    index.placement(&gateway.reference).filter(|placement| placement.uid == gateway.uid)
}

/// Reports the faults of gateways' placements.
pub(super) fn report(index: &Index, gateways: &[Gateway<'_>], problems: &mut Problems) {
    for gateway in gateways {
        let placement = placement(index, gateway);
        for fault in placement.into_iter().flat_map(|placement| &placement.faults) {
            problems.fault(&gateway.reference, fault);
        }
    }
}
