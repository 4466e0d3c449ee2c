//! Gateways of other hosts, of which a host has nothing but what they have published.

use fabric_api::fabric::GatewayConfig;
use fabric_api::networking::ConnectionValue;
use jiff::Timestamp;

use super::{Life, Liveness, View};
use crate::workloads::names;

/// Age in seconds at which the status Connected of a Connection is stale. A gateway writes one at
/// least every 12 s; clocks of hosts may differ by the rest.
const STALE_AFTER: i64 = 30;

/// Returns [`Liveness::Silent`] for a gateway of another host that does not answer this host's agent,
/// or whose Connection is not written any more: its host may be down while what it has published is
/// still there. `None` for any other.
pub(super) fn silent(
    view: &View<'_>,
    config: &GatewayConfig,
    (node, now): (&str, Timestamp),
) -> Option<Life> {
    let host = config.spec.overlay.node.as_deref().filter(|host| *host != node)?;
    let unanswered = unanswered_since(view, config, node);
    let outdated = || outdated_since(view, config, now);
    let (sign, since) = match unanswered {
        Some(since) => ("has not answered this host over VXLAN", since),
        None => ("has reported nothing", outdated()?),
    };
    let seconds = (now.as_second() - since.as_second()).max(0);
    let (namespace, name) = names(config);
    let problem = format!(
        "gateway {namespace}/{name} {sign} for {seconds} s: what is shown of it is at least as old; \
         see whether {host}, where it runs, is up"
    );
    Some(Life { liveness: Liveness::Silent, problem: Some(problem), node: None })
}

/// As the agent of this host reports it.
fn unanswered_since(view: &View<'_>, config: &GatewayConfig, node: &str) -> Option<Timestamp> {
    let mut configs = view.nodes.iter();
    let own = configs.find(|config| config.metadata.name.as_deref() == Some(node))?;
    let mut reports = own.status.as_ref()?.unreachable_gateways.iter();
    let report = reports.find(|of| of.peer_cluster_id == config.spec.peer_cluster_id)?;
    report.since.parse().ok()
}

fn outdated_since(view: &View<'_>, config: &GatewayConfig, now: Timestamp) -> Option<Timestamp> {
    let status = view.connection_of(config)?;
    let at = status.latency.as_ref()?.timestamp.as_ref()?.parse::<Timestamp>().ok()?;
    let is_outdated = now.as_second() - at.as_second() > STALE_AFTER;
    (status.value == ConnectionValue::Connected && is_outdated).then_some(at)
}
