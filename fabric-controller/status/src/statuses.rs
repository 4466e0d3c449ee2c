//! Statuses of the user's own objects, conditions aside.

use std::collections::BTreeMap;

use fabric_api::fabric::GatewayConfig;
use fabric_api::networking::{
    CidrList, ClusterCidrs, Configuration, EndpointStatus, InternalEndpoint, SideConfig,
};
use fabric_index::Index;
use fabric_model::gateway::End;
use fabric_model::{Cluster, Gateway, Peering};
use fabric_objects::{Kind, Object, ObjectRef};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;

use crate::conditions;
use crate::readiness::{Readiness, as_seen_here};

/// Objects of the user with the status they should have.
pub type Statuses = BTreeMap<ObjectRef, Object>;

/// Configurations with the prefixes as seen here, and whether those are ready.
pub fn of_configurations(
    index: &Index,
    cluster: &Cluster,
    readiness: &[(&Peering<'_>, Readiness)],
    now: Timestamp,
) -> Statuses {
    let mut statuses = Statuses::new();
    for (peering, readiness) in readiness {
        let mut configuration: Configuration = peering.configuration.clone();
        let status = configuration.status.get_or_insert_default();
        if matches!(readiness, Readiness::Configured) {
            status.remote = Some(as_seen_here(peering));
        }
        let newest = configuration.metadata.generation.unwrap_or_default();
        // A newer version that is not used is not covered by this condition.
        let used = conditions::observed(&status.conditions).filter(|_| is_kept(index, peering));
        let generation = used.unwrap_or(newest);
        conditions::set(&mut status.conditions, readiness, generation, now);
        if cluster.is_ready() {
            configuration.spec.local = Some(own_side(cluster));
        }
        statuses.insert(peering.reference.clone(), configuration.into());
    }
    statuses
}

/// Its newest version is wrong, and the last good one stays in use.
fn is_kept(index: &Index, peering: &Peering<'_>) -> bool {
    let mut faulty = index.file_problems().iter().filter_map(|p| p.object.as_ref());
    peering.fault.is_none() && faulty.any(|object| *object == peering.reference)
}

/// Standalone gateways with their endpoints; `config_of` is what is published for one.
pub fn of_gateways<'a>(
    cluster: &Cluster,
    gateways: &[Gateway<'_>],
    config_of: impl Fn(&Gateway<'_>) -> Option<&'a GatewayConfig>,
) -> Statuses {
    let configured = gateways.iter().filter_map(|gateway| {
        let object = of_gateway(cluster, gateway, config_of(gateway)?)?;
        Some((gateway.reference.clone(), object))
    });
    configured.collect()
}

fn of_gateway(cluster: &Cluster, gateway: &Gateway<'_>, config: &GatewayConfig) -> Option<Object> {
    let secret = ObjectReference {
        namespace: gateway.reference.namespace.clone(),
        name: Some(gateway.settings.as_ref()?.secret_name.clone()),
        ..ObjectReference::default()
    };
    let internal = config.spec.overlay.link_address.map(|link| InternalEndpoint {
        ip: Some(link.to_string()),
        node: config.spec.overlay.node.clone(),
    });
    Some(match gateway.end {
        End::Server(server) => {
            let mut server = server.clone();
            let status = server.status.get_or_insert_default();
            status.server_ref = Some(reference_to(config));
            status.secret_ref = Some(secret);
            status.internal_endpoint = internal;
            let balancer = server.spec.endpoint.load_balancer_ip.clone();
            status.endpoint = Some(endpoint(cluster, config, balancer));
            server.into()
        }
        End::Client(client) => {
            let mut client = client.clone();
            let status = client.status.get_or_insert_default();
            status.client_ref = Some(reference_to(config));
            status.secret_ref = Some(secret);
            status.internal_endpoint = internal;
            client.into()
        }
    })
}

fn own_side(cluster: &Cluster) -> SideConfig {
    let pod = CidrList(cluster.pods.iter().map(ToString::to_string).collect());
    let external = CidrList(cluster.external_cidrs().map(|cidr| cidr.to_string()).collect());
    SideConfig { cidr: ClusterCidrs { pod, external } }
}

/// Endpoint of this server for the peer's client.
fn endpoint(cluster: &Cluster, config: &GatewayConfig, balancer: Option<String>) -> EndpointStatus {
    let host = config.spec.overlay.node.as_deref().and_then(|name| cluster.node(name));
    let own = host.map(|host| host.underlay.iter().map(ToString::to_string).collect());
    let balancer = balancer.filter(|address| !address.is_empty()).map(|address| vec![address]);
    EndpointStatus {
        addresses: balancer.or(own).unwrap_or_default(),
        port: config.spec.listen_port.map(i32::from),
        ports: Vec::new(),
        protocol: Some("UDP".to_owned()),
    }
}

/// Reference to the GatewayConfig made from a gateway's manifest.
fn reference_to(config: &GatewayConfig) -> ObjectReference {
    ObjectReference {
        api_version: Some(Kind::GatewayConfig.api_version().to_owned()),
        kind: Some(Kind::GatewayConfig.as_str().to_owned()),
        namespace: config.metadata.namespace.clone(),
        name: config.metadata.name.clone(),
        ..ObjectReference::default()
    }
}
