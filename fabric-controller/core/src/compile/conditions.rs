//! Conditions as Kubernetes defines them: the time is that of the last change of the status.

use fabric_api::fabric::PeeringFault;
use fabric_api::networking::{ACCEPTED, NETWORK_CIDRS_CONFIGURED, PEER_HEALTHY};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Reason of a condition while something that the controller needs cannot be read.
const UNREADABLE: &str = "CannotRead";

/// Reason why a Configuration's prefixes are ready or not.
#[derive(Clone, Debug)]
pub(super) enum Readiness {
    Configured,
    /// With the CIDRs that ipam is to grant.
    Waiting(String),
    /// With the nodes that have no routes yet.
    Routing(String),
    /// With what is wrong.
    Invalid(String),
}

impl Readiness {
    fn parts(&self) -> (&'static str, &'static str, &str) {
        match self {
            Self::Configured => {
                ("True", "NetworkCIDRsConfigured", "all CIDRs have their counterparts here")
            }
            Self::Waiting(what) => ("False", "WaitingForNetworks", what),
            Self::Routing(nodes) => ("False", "WaitingForNodes", nodes),
            Self::Invalid(what) => ("False", "InvalidConfiguration", what),
        }
    }
}

/// Sets the condition [`NETWORK_CIDRS_CONFIGURED`] among those that are there.
pub(super) fn set(
    conditions: &mut Vec<Condition>,
    readiness: &Readiness,
    generation: i64,
    now: Timestamp,
) {
    let (status, reason, message) = readiness.parts();
    put(conditions, (NETWORK_CIDRS_CONFIGURED, status, reason, message), generation, now);
}

/// The generation that the condition [`NETWORK_CIDRS_CONFIGURED`] was last set for.
pub(super) fn observed(conditions: &[Condition]) -> Option<i64> {
    let of = conditions.iter().find(|condition| condition.type_ == NETWORK_CIDRS_CONFIGURED);
    of.and_then(|condition| condition.observed_generation)
}

/// Sets the condition [`ACCEPTED`] to what is wrong, or takes it away.
pub(super) fn accept(
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
pub(super) fn report_peer(
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

/// Sets the condition [`ACCEPTED`] to why the controller cannot work yet; the next compilation
/// corrects it.
pub(super) fn unreadable(
    conditions: &mut Vec<Condition>,
    why: &str,
    generation: i64,
    now: Timestamp,
) {
    put(conditions, (ACCEPTED, "False", UNREADABLE, why), generation, now);
}

pub(super) fn put(
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
