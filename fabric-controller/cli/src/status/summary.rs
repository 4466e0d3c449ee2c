//! Selection of what `weft status` shows, and a summary of what is too much for a table.

use std::collections::BTreeMap;

use anyhow::bail;
use fabric_observation::{Observation, State};

/// More peerings than fit on a screen are summarised.
const MAX_ROWS: usize = 20;

/// Which peerings are shown.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct Filters {
    /// Only the peerings with this cluster; may be repeated.
    #[arg(long, value_name = "ID")]
    peer: Vec<String>,
    /// Only peerings that are not Connected, and the problems.
    #[arg(long)]
    only_problems: bool,
    /// Every peering in the table, however many there are.
    #[arg(long)]
    all: bool,
}

/// Content of the table.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) observation: Observation,
    /// Present if not all peerings are in the table, or there is none.
    pub(super) summary: Option<String>,
}

impl Filters {
    /// Leaves what was asked for. Fails for a peer without a peering.
    pub(super) fn apply(&self, mut observation: Observation) -> anyhow::Result<Observation> {
        for peer in &self.peer {
            if !observation.peerings.iter().any(|peering| peering.cluster == *peer) {
                bail!("--peer {peer}: there is no peering with that cluster");
            }
        }
        if !self.peer.is_empty() {
            observation.peerings.retain(|peering| self.peer.contains(&peering.cluster));
            let namespaces: Vec<_> =
                observation.peerings.iter().map(|peering| peering.namespace.clone()).collect();
            let is_about = |problem: &String| {
                let names = self.peer.iter().chain(&namespaces);
                names.filter(|name| !name.is_empty()).any(|name| mentions(problem, name))
            };
            observation.problems.retain(is_about);
        }
        if self.only_problems {
            observation.peerings.retain(|peering| peering.state != State::Connected);
        }
        Ok(observation)
    }

    /// Shortens a long table to what needs attention.
    pub(super) fn shorten(&self, observation: &Observation) -> Shown {
        let mut observation = observation.clone();
        if self.only_problems && observation.peerings.is_empty() {
            let is_well = observation.problems.is_empty();
            let summary = if is_well { "no problems\n" } else { "" };
            return Shown { observation, summary: Some(summary.to_owned()) };
        }
        if self.all || observation.peerings.len() <= MAX_ROWS {
            return Shown { observation, summary: None };
        }
        let summary = counts(&observation);
        observation.peerings.retain(|peering| peering.state != State::Connected);
        let hidden = observation.peerings.len().saturating_sub(MAX_ROWS);
        observation.peerings.truncate(MAX_ROWS);
        let more = observation.problems.len().saturating_sub(MAX_ROWS);
        observation.problems.truncate(MAX_ROWS);
        if more > 0 {
            observation.problems.push(format!("{more} more; -o json has all of them"));
        }
        let hidden = match hidden {
            0 => String::new(),
            hidden => format!("; {hidden} that are not Connected are not shown"),
        };
        let summary = format!("{summary}{hidden} (--all or --peer ID shows more)\n");
        Shown { observation, summary: Some(summary) }
    }
}

/// `300 peerings: 298 Connected, 2 Error`
fn counts(observation: &Observation) -> String {
    let mut states = BTreeMap::<String, usize>::new();
    for peering in &observation.peerings {
        *states.entry(format!("{:?}", peering.state)).or_default() += 1;
    }
    let states: Vec<_> = states.iter().map(|(state, count)| format!("{count} {state}")).collect();
    format!("{} peerings: {}", observation.peerings.len(), states.join(", "))
}

/// Returns true if a text holds the name, not only as part of a longer one.
fn mentions(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(start, _)| {
        let goes_on = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let before = text[..start].chars().next_back().is_some_and(goes_on);
        let after = text[start + name.len()..].chars().next().is_some_and(goes_on);
        !before && !after
    })
}

#[cfg(test)]
mod tests {
    use fabric_api::fabric::GatewayConfig;
    use fabric_observation::{Found, observe};
    use fabric_store::{Object, Snapshot};

    use super::*;

    /// Config of the gateway of a peering, in the peer's namespace.
    fn config(peer: &str) -> GatewayConfig {
        let spec = serde_json::from_value(serde_json::json!({
            "clusterId": "rome", "peerClusterId": peer, "role": "Client", "gatewayUid": "u",
            "secretName": "gw-keys", "mtu": 1340,
            "tunnelAddress": "169.254.18.2", "peerTunnelAddress": "169.254.18.1",
            "remaps": [], "podCidrs": ["10.200.0.0/16"], "externalCidrs": ["10.70.0.0/16"],
            "overlay": {"address": "10.80.0.2", "node": "n1"}, "nodes": [],
            "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5},
        }));
        let mut config = GatewayConfig::new("client", spec.unwrap());
        config.metadata.namespace = Some(format!("liqo-tenant-{peer}"));
        config
    }

    /// Peerings with peer0, peer1, ..., all waiting.
    fn observation(count: usize) -> Observation {
        let objects = (0..count).map(|number| {
            let object = Object::from(config(&format!("peer{number}")));
            (object.reference(), object)
        });
        let snapshot = Snapshot { objects: objects.collect(), problems: Vec::new() };
        observe(&snapshot, &Found::default())
    }

    #[test]
    fn many_peerings_are_summarised() {
        let mut many = observation(300);
        many.peerings.iter_mut().for_each(|peering| peering.state = State::Connected);
        many.peerings[7].state = State::Error;
        many.problems.truncate(1);
        let shown = Filters::default().shorten(&many);
        let summary = shown.summary.unwrap_or_default();
        assert!(summary.starts_with("300 peerings: 299 Connected, 1 Error"), "{summary}");
        assert_eq!(shown.observation.peerings, [many.peerings[7].clone()]);
        let all = Filters { all: true, ..Filters::default() };
        assert_eq!(all.shorten(&many).observation, many);
        assert!(Filters::default().shorten(&observation(20)).summary.is_none());
    }

    #[test]
    fn filters_select_peers_and_states() {
        let peer = Filters { peer: vec!["peer1".to_owned()], ..Filters::default() };
        let mut seen = peer.apply(observation(12)).unwrap();
        assert_eq!(seen.peerings.len(), 1);
        assert_eq!(
            seen.problems,
            ["gateway liqo-tenant-peer1/client: no PublicKey of cluster peer1 yet"]
        );
        seen.peerings[0].state = State::Connected;
        let sick = Filters { only_problems: true, ..Filters::default() };
        let mut shown = sick.shorten(&sick.apply(seen).unwrap());
        assert_eq!(shown.summary.as_deref(), Some(""), "problems follow");
        assert!(shown.observation.peerings.is_empty());
        shown.observation.problems.clear();
        assert_eq!(sick.shorten(&shown.observation).summary.as_deref(), Some("no problems\n"));
        let nobody = Filters { peer: vec!["nobody".to_owned()], ..Filters::default() };
        assert!(nobody.apply(observation(1)).is_err());
    }
}
