//! Gateways whose reports are too old to be true: of other hosts, of which a host has nothing but what
//! they have published, and of its own if they cannot write any more.

use fabric_api::fabric::{GatewayConfig, NodeConfig};
use fabric_api::networking::ConnectionValue;
use fabric_supervisor::workloads::names;
use jiff::Timestamp;

use super::faults::of_silence;
use super::{Life, Liveness, View};

/// Age in seconds at which the status Connected of a Connection is stale. A gateway writes one at
/// least every 12 s; clocks of hosts may differ by the rest.
const STALE_AFTER: i64 = 30;
/// The same for a gateway of this host, whose clock is the same.
const OWN_STALE_AFTER: i64 = 15;

/// Returns [`Liveness::Silent`] for a gateway of another host that does not answer this host's agent,
/// or whose Connection is not written any more: its host may be down while what it has published is
/// still there. `None` for any other.
pub(super) fn silent(
    view: &View<'_>,
    config: &GatewayConfig,
    (node, now): (&str, Timestamp),
) -> Option<Life> {
    let host = config.spec.overlay.node.as_deref().filter(|host| *host != node)?;
    let own = view.nodes.iter().find(|own| own.metadata.name.as_deref() == Some(node));
    let unanswered = own.and_then(|own| unanswered_since(own, config));
    let outdated = || outdated_since(view, config, (STALE_AFTER, now));
    let (sign, since) = match unanswered {
        Some(since) => ("has not answered this host over VXLAN", since),
        None => ("has reported nothing", outdated()?),
    };
    let seconds = (now.as_second() - since.as_second()).max(0);
    let (namespace, name) = names(config);
    // The agent reports a chain that drops its packets only while gateways do not answer it.
    let mut drops = own.iter().flat_map(|own| &own.status).flat_map(|status| &status.packet_drops);
    let remedy = match drops.next().filter(|_| unanswered.is_some()) {
        Some(drop) => format!(
            "{}: on this host, {}; else see whether {host}, where it runs, is up",
            drop.cause, drop.remedy
        ),
        None => format!(
            "see whether {host}, where it runs, is up, and UDP 4879 passes between it and this host"
        ),
    };
    let problem = format!(
        "gateway {namespace}/{name} {sign} for {seconds} s: what is shown of it is at least as old; \
         {remedy}"
    );
    Some(Life { liveness: Liveness::Silent, problem: Some(problem), node: None })
}

/// As the agent of this host reports it.
fn unanswered_since(own: &NodeConfig, config: &GatewayConfig) -> Option<Timestamp> {
    let mut reports = own.status.as_ref()?.unreachable_gateways.iter();
    let report = reports.find(|of| of.peer_cluster_id == config.spec.peer_cluster_id)?;
    report.since.parse().ok()
}

/// The same for a gateway that answers on this host, but whose Connection is not written any more.
pub(super) fn unreported(
    view: &View<'_>,
    config: &GatewayConfig,
    (life, now): (Life, Timestamp),
    run_option: &str,
) -> Life {
    let interval = i64::from(config.spec.probe.interval_ms / 1000);
    let since = (life.liveness == Liveness::Answers)
        .then(|| outdated_since(view, config, (OWN_STALE_AFTER + interval, now)));
    let Some(since) = since.flatten() else { return life };
    let (seconds, (namespace, name)) = (now.as_second() - since.as_second(), names(config));
    let problem = format!(
        "gateway {namespace}/{name} has reported nothing for {seconds} s: what is shown of it is at \
         least as old; see its log (`weft logs{run_option}`) for why it cannot report"
    );
    Life { liveness: Liveness::Silent, problem: Some(problem), ..life }
}

fn outdated_since(
    view: &View<'_>,
    config: &GatewayConfig,
    (stale_after, now): (i64, Timestamp),
) -> Option<Timestamp> {
    let status = view.connection_of(config)?;
    let answered = status.latency.as_ref()?.timestamp.as_ref()?.parse::<Timestamp>().ok()?;
    // While the peer does not answer, the gateway reports that alone, and Error in the end.
    let mut faults = config.status.iter().flat_map(|status| &status.faults);
    let silence = faults.find(|fault| of_silence(fault)).and_then(|of| of.since.parse().ok());
    let at = silence.map_or(answered, |since: Timestamp| since.max(answered));
    let probe = &config.spec.probe;
    let until_error = i64::from(probe.interval_ms) * i64::from(probe.loss_threshold) / 1000;
    let stale_after = stale_after + silence.map_or(0, |_| until_error);
    let is_outdated = now.as_second() - at.as_second() > stale_after;
    (status.value == ConnectionValue::Connected && is_outdated).then_some(at)
}
