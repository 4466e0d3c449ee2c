//! State of the networking with each peer, in the terms of Liqo's ForeignCluster.

use std::collections::BTreeSet;

use fabric_api::ClusterId;
use fabric_api::fabric::Role;
use fabric_api::networking::ConnectionValue;
use fabric_index::Index;
use fabric_index::placement::{Peer, PeerCondition, Peers};
use fabric_model::{Gateway, Peering};

use super::placed;

pub(super) fn peers(index: &Index, peerings: &[Peering<'_>], gateways: &[Gateway<'_>]) -> Peers {
    let configured: BTreeSet<&ClusterId> =
        peerings.iter().filter_map(|peering| peering.id.as_ref()).collect();
    let all: BTreeSet<&ClusterId> =
        configured.iter().copied().chain(gateways.iter().map(|g| &g.peer)).collect();
    let peers = all.into_iter().map(|peer| {
        let gateway = gateways.iter().find(|gateway| gateway.peer == *peer);
        let mut conditions = vec![configuration(configured.contains(peer)), presence(gateway)];
        conditions.extend(gateway.map(|gateway| workload(index, gateway)));
        conditions.push(connection(gateway.and_then(|gateway| value(index, gateway))));
        let enabled = peerings.iter().filter(|p| p.id.as_ref() == Some(peer)).all(is_seen);
        (peer.clone(), Peer { enabled, conditions })
    });
    peers.collect()
}

fn workload(index: &Index, gateway: &Gateway<'_>) -> PeerCondition {
    let type_ = match gateway.role() {
        Role::Server => "NetworkGatewayServerStatus",
        Role::Client => "NetworkGatewayClientStatus",
    };
    let placement = placed::placement(index, gateway);
    let (ready, missing) = placement.map_or((0, 0), |p| (p.ready, p.unavailable));
    let (status, reason, message) = match (ready, missing) {
        (0, _) => ("NotReady", "GatewaysNotReady", "no pod of the gateway is ready"),
        (_, 0) => ("Ready", "GatewaysReady", "all pods of the gateway are ready"),
        _ => ("SomeNotReady", "GatewaysSomeNotReady", "some pods of the gateway are not ready"),
    };
    PeerCondition { type_, status, reason, message }
}

fn value(index: &Index, gateway: &Gateway<'_>) -> Option<ConnectionValue> {
    let own = index.connections(&gateway.reference, &gateway.uid).next()?;
    Some(own.status.as_ref().map(|status| status.value).unwrap_or_default())
}

/// True if its status has the peer's prefixes as this cluster sees them.
fn is_seen(peering: &Peering<'_>) -> bool {
    peering.configuration.status.as_ref().is_some_and(|status| status.remote.is_some())
}

fn configuration(is_there: bool) -> PeerCondition {
    let type_ = "NetworkConfigurationStatus";
    let (status, reason, message) = if is_there {
        ("Ready", "NetworkConfigurationPresence", "there is a Configuration")
    } else {
        ("NotReady", "NetworkConfigurationMissing", "there is no Configuration")
    };
    PeerCondition { type_, status, reason, message }
}

fn presence(gateway: Option<&Gateway<'_>>) -> PeerCondition {
    let type_ = "NetworkGatewayPresence";
    let (status, reason, message) = if gateway.is_some() {
        ("Ready", "GatewayPresence", "there is a gateway")
    } else {
        ("NotReady", "GatewayMissing", "there is no GatewayServer or GatewayClient")
    };
    PeerCondition { type_, status, reason, message }
}

fn connection(value: Option<ConnectionValue>) -> PeerCondition {
    let type_ = "NetworkConnectionStatus";
    let (status, reason, message) = match value {
        Some(ConnectionValue::Connected) => {
            ("Established", "ConnectionEstablished", "packets get through")
        }
        Some(ConnectionValue::Connecting) => {
            ("Pending", "ConnectionPending", "the gateway is connecting")
        }
        Some(ConnectionValue::Error) => ("Error", "ConnectionError", "packets get lost"),
        None => ("NotReady", "ConnectionMissing", "there is no Connection"),
    };
    PeerCondition { type_, status, reason, message }
}
