//! Compiler from the index to everything to publish. No I/O, no clock: same input, same output.
//!
//! Each module is a stage: a function from what it needs to what it makes. [`Problems`] collects what all
//! of them find.

mod addresses;
mod deleted;
mod desired;
mod gateway_config;
mod gateway_records;
mod ipam_requests;
mod networks;
mod node_config;
mod peers;
mod placed;
mod records;
mod refused;
mod seal;
mod secrets;
mod services;
mod unacknowledged;
mod uncertain;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use fabric_index::placement::{Peers, PlannedGateways, PlannedServices, SecretGaps};
use fabric_index::{Index, owner};
use fabric_model::{KeyPair, Model, Problems};
use fabric_objects::{Kind, Object, ObjectRef, Problem};
use fabric_status::{Findings, Readiness};
use jiff::Timestamp;

pub use fabric_status::{unreadable, unshown_faults};
pub use ipam_requests::{Allocation, IpamRequest};

use desired::Desired;
use gateway_records::GatewayRecords;
use uncertain::Uncertain;

/// Desired state, as the controller publishes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Published {
    /// Weft's own objects, without status.
    pub objects: BTreeMap<ObjectRef, Object>,
    /// Own objects that are there and should not be, and statuses of what is gone.
    pub deleted: BTreeSet<ObjectRef>,
    /// Objects of the user with the status they should have.
    pub statuses: BTreeMap<ObjectRef, Object>,
    /// Secrets to create a key pair for. Never deleted while their gateway exists: the peer has the
    /// public half.
    pub keys: BTreeMap<ObjectRef, KeyPair>,
    /// Gateways that are to run in Kubernetes.
    pub gateways: PlannedGateways,
    pub secrets: SecretGaps,
    pub peers: Peers,
    /// IPs that request a Service, in Kubernetes.
    pub services: PlannedServices,
    /// A peering waits for acknowledgements of nodes.
    pub awaits_nodes: bool,
    /// Requests to ipam, in this order.
    pub ipam_requests: Vec<IpamRequest>,
    /// All problems, with the manifests and with their content. Sorted.
    pub problems: Vec<Problem>,
}

/// `now` is the timestamp of conditions that change, and ends the wait for nodes that are gone and for
/// gateways that start.
pub fn compile(index: &Index, now: Timestamp) -> Published {
    let mut problems = Problems::new(index.file_problems());
    let model = Model::read(index, &mut problems);
    let Model { cluster, peerings, gateways, .. } = &model;
    let uncertain = Uncertain::new(index, &model);

    let mut desired = networks::of_cluster(index, cluster);
    desired += networks::of_peerings(index, peerings);
    desired += refused::replaced(index, cluster, peerings);
    desired += addresses::of_nodes(index, cluster);
    desired += addresses::of_gateways(index, cluster, &gateways.all);
    desired += for_gateways((index, now), &model, &uncertain, &mut problems);
    desired += for_nodes(index, &model, &desired);
    desired += node_config::of_removed_nodes(index, cluster, &uncertain, now);

    let returned = refused::returned(index, peerings);
    let stays = |reference: &ObjectRef, object: &Object| {
        desired.stays(reference)
            || owner::of(object).is_none_or(|owner| uncertain.may_still_be(&owner))
    };
    let mut ipam_requests =
        ipam_requests::of_networks(index, cluster, &returned, stays, &mut problems);
    ipam_requests.extend(ipam_requests::of_ips(index, cluster, stays, &mut problems));
    ipam_requests::report_refusals(index, &ipam_requests, &mut problems);
    unacknowledged::report(index, cluster, &mut problems);

    let readiness = peerings.iter().map(|of| (of, Readiness::of(index, cluster, of)));
    let readiness: Vec<_> = readiness.collect();
    let mut statuses = returned;
    statuses.extend(fabric_status::of_configurations(index, cluster, &readiness, now));
    let mut out = Published {
        deleted: deleted::deleted(index, &desired, &uncertain),
        keys: gateways.keys.clone(),
        awaits_nodes: readiness.iter().any(|(_, of)| matches!(of, Readiness::Routing(_))),
        ipam_requests,
        ..Published::default()
    };
    if index.settings.kubernetes {
        placed::report(index, &gateways.all, &mut problems);
        statuses.extend(placed::statuses(index, &gateways.all));
        out.gateways = placed::planned(index, &gateways.all);
        out.secrets = secrets::gaps(index, &gateways.all, &mut problems);
        out.peers = peers::peers(index, peerings, &gateways.all);
        out.services = services::planned(index, &mut problems);
    } else {
        statuses.extend(fabric_status::of_gateways(cluster, &gateways.all, |gateway| {
            desired.config_of(index, gateway)
        }));
    }
    let paths = fabric_status::paths(index, peerings, &gateways.all);
    let findings = Findings::new(index, &problems, &gateways.all, &paths);
    out.statuses = findings.complete(statuses, now);
    out.objects = desired.objects;
    out.problems = problems.into_sorted();
    out.seal(index);
    out
}

/// GatewayRecords and GatewayConfigs. While too little is known of the cluster, those that are there
/// stay.
fn for_gateways(
    (index, now): (&Index, Timestamp),
    model: &Model<'_>,
    uncertain: &Uncertain<'_>,
    problems: &mut Problems,
) -> Desired {
    let Model { cluster, peerings, gateways, mappings } = model;
    let records = cluster.is_ready().then(|| GatewayRecords {
        nodes: gateway_records::of_nodes(index, cluster, mappings, uncertain),
        cluster: gateway_records::of_cluster(cluster, peerings, mappings),
    });
    let host = gateway_config::host(index, cluster, problems);
    let sources =
        gateway_config::Sources { index, cluster, peerings, records: records.as_ref(), host, now };
    gateway_config::check_families(&sources, &gateways.all, problems);
    let mut desired = gateway_config::configs(&sources, &gateways.all);
    let config = |of: &ObjectRef| ObjectRef { kind: Kind::GatewayConfig, ..of.clone() };
    desired.kept.extend(gateways.faulty.iter().map(config));
    match &records {
        Some(records) => desired += records.objects(),
        None => desired.keep_all(index.of_kind(Kind::GatewayRecord)),
    }
    desired
}

/// FabricRecords, NodeConfigs, and Networks of refused prefixes. While too little is known of the cluster,
/// those that are there stay.
fn for_nodes(index: &Index, model: &Model<'_>, desired: &Desired) -> Desired {
    let Model { cluster, peerings, gateways, mappings } = model;
    let mut of_nodes = Desired::default();
    if !cluster.is_ready() {
        of_nodes.keep_all(index.of_kind(Kind::FabricRecord));
        of_nodes.keep_all(refused::held(index));
        of_nodes.keep_all(refused::of_peerings(index));
        let configs = index.of_kind(Kind::NodeConfig);
        of_nodes.keep_all(configs.filter(|(config, _)| cluster.node(&config.name).is_some()));
        return of_nodes;
    }
    let sources = records::Sources { index, cluster, gateways: &gateways.all, desired };
    let records = records::of_peerings(&sources, peerings);
    let carried = refused::carried(peerings, &records);
    let refused = refused::refused(index, cluster, &carried);
    let of_cluster = records::of_cluster(cluster, mappings, refused::entries(&refused));
    let mut held = refused::left(index, peerings, &records);
    held.extend(refused);
    of_nodes += refused::networks(index, &held);
    of_nodes += records::objects(&of_cluster, &records);
    of_nodes += node_config::configs(index, cluster, &of_cluster, &records);
    of_nodes
}
