//! Gateways that have had no pod for long.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_objects::ObjectRef;
use tokio::time::Instant;

use fabric_index::placement::Placement;

/// Time for which the address of a pod that is gone is taken for its gateway's. A pod in its place
/// is there within seconds; networks give a free address to another pod after some time.
const GRACE: Duration = Duration::from_secs(60);

/// Time since which those without a pod have been observed to have none.
#[derive(Debug, Default)]
pub(super) struct Absence(BTreeMap<ObjectRef, Instant>);

impl Absence {
    /// Marks those whose time is over.
    pub(super) fn mark(&mut self, placements: &mut BTreeMap<ObjectRef, Placement>, now: Instant) {
        let absent = |gateway: &ObjectRef| placements.get(gateway).is_some_and(is_absent);
        self.0.retain(|gateway, _| absent(gateway));
        for (gateway, placement) in placements.iter_mut().filter(|(_, p)| is_absent(p)) {
            let since = *self.0.entry(gateway.clone()).or_insert(now);
            placement.is_lost = now >= since + GRACE;
        }
    }

    /// Time at which the next one expires.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        self.0.values().map(|since| *since + GRACE).filter(|due| *due > now).min()
    }
}

fn is_absent(placement: &Placement) -> bool {
    placement.internal.as_ref().is_none_or(|internal| internal.ip.is_none())
}

#[cfg(test)]
mod tests {
    use fabric_api::networking::InternalEndpoint;
    use fabric_objects::Kind;

    use super::*;

    #[test]
    fn gateway_without_pod_is_lost_then_found_again() {
        let gateway = ObjectRef::new(Kind::GatewayServer, "tenant", "server");
        let mut absence = Absence::default();
        let start = Instant::now();
        let mut is_lost = |internal: Option<&str>, seconds| {
            let internal = internal.map(|ip| InternalEndpoint {
                ip: Some(ip.to_owned()),
                node: Some("n1".to_owned()),
            });
            let placement = Placement { internal, ..Placement::default() };
            let mut placements = [(gateway.clone(), placement)].into();
            let now = start + Duration::from_secs(seconds);
            absence.mark(&mut placements, now);
            (placements[&gateway].is_lost, absence.due(now).map(|due| due.duration_since(start)))
        };
        let at = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(is_lost(Some("10.200.1.7"), 0), (false, None));
        assert_eq!(is_lost(None, 10), (false, at(70)));
        assert_eq!(is_lost(None, 69), (false, at(70)));
        assert_eq!(is_lost(None, 70), (true, None));
        assert_eq!(is_lost(None, 500), (true, None));
        assert_eq!(is_lost(Some("10.200.1.8"), 501), (false, None));
        assert_eq!(is_lost(None, 502), (false, at(562)));
    }
}
