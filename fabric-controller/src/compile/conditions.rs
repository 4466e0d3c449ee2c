//! Conditions as Kubernetes defines them: the time is that of the last change of the status.

use fabric_api::networking::NETWORK_CIDRS_CONFIGURED;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Why a Configuration's prefixes are ready or not.
#[derive(Clone, Debug)]
pub(super) enum Readiness {
    Configured,
    /// With what is waited for.
    Waiting(String),
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
            Self::Invalid(what) => ("False", "InvalidConfiguration", what),
        }
    }
}

/// Sets the condition among those that are there.
pub(super) fn set(
    conditions: &mut Vec<Condition>,
    readiness: &Readiness,
    generation: i64,
    now: Timestamp,
) {
    let (status, reason, message) = readiness.parts();
    let at = conditions.iter().position(|c| c.type_ == NETWORK_CIDRS_CONFIGURED);
    let since = at.map(|at| &conditions[at]).filter(|have| have.status == status);
    let condition = Condition {
        type_: NETWORK_CIDRS_CONFIGURED.to_owned(),
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
