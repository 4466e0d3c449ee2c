//! Probes between nodes and gateways through the overlay: the datagram, and what is reported.
//!
//! A route-agent sends a probe to a gateway's overlay address, with a source that the node's own
//! rules translate as they do any other; the gateway sends it back. A datagram is a JSON object, and spaces up to
//! the size that is tried.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ActiveReplica;

/// Longest object that is parsed, in bytes: a node's name has 253 at most.
const MAX_LENGTH: usize = 512;

/// Result of a node's probes of a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GatewayProbe {
    /// UDP port at the gateway's overlay address.
    pub port: u16,
    /// Name of the node that the gateway runs on: gateways of one node are probed in turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// A probe, or with `reply` the gateway's echo of it, or with `active` a notice of the replica that has taken
/// the gateway's tunnel over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OverlayProbe {
    /// Name of the sending node.
    pub node: String,
    /// Identifies the probe among those of its sender.
    pub nonce: u64,
    /// Time until the sender's next probe to this gateway, in milliseconds.
    pub next_ms: u32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reply: bool,
    /// The reply is as long as the probe.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_size: bool,
    /// No reply of this gateway has arrived for longer than a burst of probes takes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unanswered: bool,
    /// The sender cannot read its NodeConfig any more; in a reply: it cannot report whether it is connected.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut_off: bool,
    /// The replica that has the tunnel now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active: Option<ActiveReplica>,
}

impl OverlayProbe {
    /// Room for the datagram of any packet of an Ethernet with large frames, in bytes.
    pub const MAX_DATAGRAM: usize = 9216;

    /// Returns `None` for anything but a probe.
    pub fn parse(datagram: &[u8]) -> Option<Self> {
        let datagram = datagram.trim_ascii_end();
        let is_object = datagram.first() == Some(&b'{') && datagram.len() <= MAX_LENGTH;
        is_object.then(|| serde_json::from_slice(datagram).ok()).flatten()
    }

    pub fn encode(&self) -> Vec<u8> {
        // Strings, integers and booleans: there is nothing that could fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The same in a datagram of so many bytes, if it needs no more.
    pub fn encode_in(&self, length: usize) -> Vec<u8> {
        let mut datagram = self.encode();
        datagram.resize(length.min(Self::MAX_DATAGRAM).max(datagram.len()), b' ');
        datagram
    }
}

/// A node whose path to a gateway fails.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct UnreachableNode {
    /// Name of the node.
    pub node: String,
    /// Part that fails.
    pub fault: PathFault,
    /// The setting, the other node's pod CIDR, the chain, or the step undone that is at fault, the share
    /// or the size lost, for faults that have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// When the path last worked (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

/// A gateway that does not answer a node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnreachableGateway {
    /// The other cluster of its peering.
    pub peer_cluster_id: String,
    /// When the first probe that stayed unanswered was sent (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

/// A gateway that answers a node's probes, but cannot report whether it is connected.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CutOffGateway {
    /// The other cluster of its peering.
    pub peer_cluster_id: String,
    /// Arrival of its first such reply (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

/// A gateway that answers some of a node's probes only.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LossyGateway {
    /// The other cluster of its peering.
    pub peer_cluster_id: String,
    /// Share of the probes that stay unanswered, in percent, in steps of ten.
    pub lost_percent: u8,
    /// When the first of them was sent (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

/// A gateway that answers none of a node's probes that are as large as packets of its peer may be.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CrampedGateway {
    /// The other cluster of its peering.
    pub peer_cluster_id: String,
    /// Size of the packets that are lost, in bytes.
    pub bytes: u32,
    /// When the first of them was sent (RFC 3339).
    #[schemars(extend("format" = "date-time"))]
    pub since: String,
}

/// Part of the path between a node and a gateway that fails.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum PathFault {
    /// Nothing arrives from the node over VXLAN.
    NoAnswer,
    /// The node's kernel answers over VXLAN, but no probes of its route-agent arrive.
    NoAgent,
    /// The node's probes arrive, but the replies do not reach it.
    OneWay,
    /// The path works, but the node's route-agent cannot read its NodeConfig.
    CutOff,
    /// The path works, but the gateway cannot report whether it is connected.
    GatewayCutOff,
    /// No route-agent of the node has acknowledged a NodeConfig, and none sends probes.
    NotStarted,
    /// The node's kernel forwards no packets of a family that the peer has.
    NotForwarding,
    /// The node's pod CIDR overlaps that of another node, which packets to its pods go to.
    PodCidrOverlap,
    /// The node's pod CIDR lies in none of the cluster's, so peers do not accept packets of its pods.
    PodCidrOutside,
    /// A rule or route of another program takes the node's packets to the peer.
    Diverted,
    /// Some of the node's probes or of the replies are lost.
    Lossy,
    /// Packets as large as those of pods are lost, smaller ones pass.
    Cramped,
    /// Another program keeps undoing what the node's route-agent sets in its kernel.
    Undone,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_probe_parses_to_the_same() {
        let probe = OverlayProbe {
            node: "n2".to_owned(),
            nonce: u64::MAX,
            next_ms: 1000,
            unanswered: true,
            ..OverlayProbe::default()
        };
        let text = probe.encode();
        assert_eq!(
            String::from_utf8_lossy(&text),
            r#"{"node":"n2","nonce":18446744073709551615,"nextMs":1000,"unanswered":true}"#
        );
        assert_eq!(OverlayProbe::parse(&text), Some(probe));
    }

    #[test]
    fn probe_fills_a_datagram() {
        let probe = OverlayProbe { node: "n2".to_owned(), ..OverlayProbe::default() };
        let full = probe.encode_in(1412);
        assert_eq!((full.len(), OverlayProbe::parse(&full)), (1412, Some(probe.clone())));
        assert_eq!(probe.encode_in(1), probe.encode());
        assert_eq!(probe.encode_in(100_000).len(), OverlayProbe::MAX_DATAGRAM);
    }

    #[test]
    fn other_datagrams_are_no_probes() {
        let long = format!(r#"{{"node":"n2","nonce":1,"nextMs":1{}}}"#, " ".repeat(MAX_LENGTH));
        for bad in ["", "null", r#"["n2",1,1]"#, r#"{"node":"n2"}"#, &long] {
            assert_eq!(OverlayProbe::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
