//! Log lines about a connection that changes, and about its faults.

use fabric_api::ClusterId;
use fabric_api::networking::ConnectionValue;
use reachability::connection::latency_text;

use crate::state::{TimedFault, View};

pub(super) fn changes(peer: &ClusterId, before: &View, after: &View) {
    let is_in = |view: &View, of: &TimedFault| {
        view.faults.iter().any(|known| known.fault.reason == of.fault.reason)
    };
    for TimedFault { fault, .. } in after.faults.iter().filter(|of| !is_in(before, of)) {
        let (reason, message, remedy) = (fault.reason.as_str(), &fault.message, &fault.remedy);
        tracing::warn!(%peer, reason, remedy, "{message}");
    }
    for TimedFault { fault, .. } in before.faults.iter().filter(|of| !is_in(after, of)) {
        tracing::info!(%peer, reason = fault.reason.as_str(), "solved: {}", fault.message);
    }
    if before.value == after.value {
        return;
    }
    let latency = latency_text(after.latency);
    match after.value {
        ConnectionValue::Connected => tracing::info!(%peer, latency, "connected"),
        ConnectionValue::Connecting => tracing::info!(%peer, "connecting"),
        ConnectionValue::Error => tracing::warn!(%peer, "connection lost"),
    }
}
