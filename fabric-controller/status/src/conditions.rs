//! Conditions as Kubernetes defines them: the time is that of the last change of the status.

use fabric_api::fabric::PeeringFault;
use fabric_api::networking::{
    ACCEPTED, NETWORK_CIDRS_CONFIGURED, NODES_REACHABLE, PEER_HEALTHY, PODS_STARTED,
};
use fabric_index::node_paths::{NodePaths, describe_steadily};
use fabric_index::placement::PodFault;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::readiness::Readiness;

/// Reason of a condition while something that the controller needs cannot be read.
const UNREADABLE: &str = "CannotRead";

/// Sets the condition [`NETWORK_CIDRS_CONFIGURED`] among those that are there.
pub(crate) fn set(
    conditions: &mut Vec<Condition>,
    readiness: &Readiness,
    generation: i64,
    now: Timestamp,
) {
    let (status, reason, message) = readiness.parts();
    put(conditions, (NETWORK_CIDRS_CONFIGURED, status, reason, message), generation, now);
}

/// The generation that the condition [`NETWORK_CIDRS_CONFIGURED`] was last set for.
pub(crate) fn observed(conditions: &[Condition]) -> Option<i64> {
    let of = conditions.iter().find(|condition| condition.type_ == NETWORK_CIDRS_CONFIGURED);
    of.and_then(|condition| condition.observed_generation)
}

/// Sets the condition [`ACCEPTED`] to what is wrong, or takes it away.
pub(crate) fn accept(
    conditions: &mut Vec<Condition>,
    wrong: &str,
    generation: i64,
    now: Timestamp,
) {
    if wrong.is_empty() {
        conditions.retain(|condition| condition.type_ != ACCEPTED);
    } else {
        put(conditions, (ACCEPTED, "False", "Invalid", wrong), generation, now);
    }
}

/// Sets the condition [`PEER_HEALTHY`] to what a gateway reports, or takes it away.
pub(crate) fn report_peer(
    conditions: &mut Vec<Condition>,
    faults: &[&PeeringFault],
    generation: i64,
    now: Timestamp,
) {
    let Some(first) = faults.first() else {
        return conditions.retain(|condition| condition.type_ != PEER_HEALTHY);
    };
    let lines: Vec<_> = faults.iter().map(|f| format!("{}; {}", f.message, f.remedy)).collect();
    put(conditions, (PEER_HEALTHY, "False", &first.reason, &lines.join("; ")), generation, now);
}

/// Sets the condition [`PODS_STARTED`] to why a pod does not start, or takes it away.
pub(crate) fn report_pods(
    conditions: &mut Vec<Condition>,
    fault: Option<&PodFault>,
    generation: i64,
    now: Timestamp,
) {
    let Some(PodFault { reason, message }) = fault else {
        return conditions.retain(|condition| condition.type_ != PODS_STARTED);
    };
    let reason = if reason.is_empty() { "NotStarted" } else { reason };
    put(conditions, (PODS_STARTED, "False", reason, message), generation, now);
}

/// Sets the condition [`NODES_REACHABLE`].
pub(crate) fn report_nodes(
    conditions: &mut Vec<Condition>,
    paths: &NodePaths,
    generation: i64,
    now: Timestamp,
) {
    let (status, reason) = match paths.unreachable.is_empty() {
        true if paths.is_without_nodes => ("False", "NoNodes"),
        true => ("True", "AllNodesReachable"),
        false => ("False", "NodesUnreachable"),
    };
    put(conditions, (NODES_REACHABLE, status, reason, &message(paths)), generation, now);
}

/// Changes with the faults only, never with time.
fn message(paths: &NodePaths) -> String {
    let count = match paths.is_without_nodes {
        true => "the cluster has no node".to_owned(),
        false => format!("{} of {} nodes reach the gateway", paths.reachable(), paths.nodes),
    };
    let faults = paths.unreachable.iter().map(describe_steadily);
    std::iter::once(count).chain(faults).collect::<Vec<_>>().join("; ")
}

/// Sets the condition [`ACCEPTED`] to why the controller cannot work yet; the next compilation
/// corrects it.
pub(crate) fn unreadable(
    conditions: &mut Vec<Condition>,
    why: &str,
    generation: i64,
    now: Timestamp,
) {
    put(conditions, (ACCEPTED, "False", UNREADABLE, why), generation, now);
}

fn put(
    conditions: &mut Vec<Condition>,
    (type_, status, reason, message): (&str, &str, &str, &str),
    generation: i64,
    now: Timestamp,
) {
    let at = conditions.iter().position(|c| c.type_ == type_);
    let since = at.map(|at| &conditions[at]).filter(|have| have.status == status);
    let condition = Condition {
        type_: type_.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        observed_generation: Some(generation),
        last_transition_time: since.map_or(Time(now), |have| have.last_transition_time.clone()),
    };
    match at {
        Some(at) => conditions[at] = condition,
        None => conditions.push(condition),
    }
}
