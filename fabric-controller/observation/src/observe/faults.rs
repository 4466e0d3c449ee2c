//! Faults between two gateways, as `weft status` shows them.

use fabric_api::fabric::{GatewayConfig, PeeringFault};
use fabric_supervisor::workloads::names;
use jiff::Timestamp;

use super::View;

/// The faults that a gateway reports, with their ages where these matter.
pub(super) fn shown(config: &GatewayConfig, now: Timestamp) -> Vec<PeeringFault> {
    let faults = config.status.iter().flat_map(|status| &status.faults);
    faults.map(|fault| PeeringFault { message: text(fault, now), ..fault.clone() }).collect()
}

/// Cause and remedy of each fault, behind the object that it is about.
pub(super) fn problems(view: &View<'_>, config: &GatewayConfig, now: Timestamp) -> Vec<String> {
    let (namespace, name) = names(config);
    let line = |fault: PeeringFault| {
        let configuration = view.configuration_of(namespace, &config.spec.peer_cluster_id);
        let object = match configuration.filter(|_| fault.reason == PeeringFault::CIDR_MISMATCH) {
            Some(name) => format!("Configuration {namespace}/{name}"),
            None => format!("gateway {namespace}/{name}"),
        };
        format!("{object}: {}; {}", fault.message, fault.remedy)
    };
    shown(config, now).into_iter().map(line).collect()
}

/// Returns whether a fault is that nothing comes from the peer.
pub(super) fn of_silence(fault: &PeeringFault) -> bool {
    let reasons = [PeeringFault::NO_ANSWER, PeeringFault::NOT_RECEIVED, PeeringFault::NO_HANDSHAKE];
    reasons.contains(&fault.reason.as_str())
}

fn text(fault: &PeeringFault, now: Timestamp) -> String {
    let since = fault.since.parse::<Timestamp>();
    match since.ok().filter(|_| of_silence(fault)) {
        Some(since) => {
            let seconds = (now.as_millisecond() - since.as_millisecond() + 500).max(0) / 1000;
            format!("{} for {seconds} s", fault.message)
        }
        None => fault.message.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_answer_is_shown_with_age() {
        let now: Timestamp = "2026-01-31T12:00:00Z".parse().unwrap();
        let fault = |reason: &str| PeeringFault {
            reason: reason.to_owned(),
            message: "no answer from milan".to_owned(),
            remedy: String::new(),
            since: "2026-01-31T11:59:56.1Z".to_owned(),
        };
        assert_eq!(text(&fault("NoAnswer"), now), "no answer from milan for 4 s");
        assert_eq!(text(&fault("ProbeLoss"), now), "no answer from milan");
    }
}
