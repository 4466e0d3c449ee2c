//! Liqo's connection probe: a JSON datagram on UDP 12345, answered by its own echo.
//!
//! The sender writes the **remote** cluster's ID; the receiver sends everything back with `msgType`
//! PONG. So the ID identifies which of a sender's peers answers, and clocks need not agree. A weft
//! gateway adds one field, which Liqo's decoder ignores.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric_api::fabric::RemapKind;
use fabric_api::{Cidr, ClusterId};
use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::connection::PeerReport;

/// Longest message read, in bytes: Liqo's own buffer. Blanks behind it do not count: they make a
/// datagram as long as a packet of some size needs it.
pub const MAX_MESSAGE: usize = 1024;
/// Step of the lengths of sealed packets in bytes: WireGuard pads to it.
const SEALED_STEP: usize = 16;
/// Longest datagram there is, in bytes.
pub const MAX_DATAGRAM: usize = 65_535;
/// Number of probes that may be on their way; older ones no longer count.
const MAX_PENDING: usize = 64;

/// A probe. Field names, order and case are those of Liqo's `Msg`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    #[serde(rename = "clusterID")]
    pub cluster_id: String,
    #[serde(rename = "msgType")]
    pub msg_type: MessageType,
    /// RFC 3339 with up to nine digits of fraction. Text, so that the echo is the same text.
    #[serde(rename = "timeStamp")]
    pub time_stamp: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weft: Option<WeftField>,
    /// The sender's CIDRs: in one answered ping of each session, and when they change.
    #[serde(rename = "weftCidrs", default, skip_serializing_if = "Option::is_none")]
    pub cidrs: Option<PeerCidrs>,
}

/// A cluster's own CIDRs, as its gateway reports them to the peer's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerCidrs {
    pub pod: Vec<Cidr>,
    pub external: Vec<Cidr>,
    /// Families that the cluster has configured for the receiver. Both false from older gateways.
    pub joined: Families,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Families {
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub v4: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub v6: bool,
}

#[derive(Serialize, Deserialize)]
struct CidrTexts {
    pod: Vec<String>,
    external: Vec<String>,
    #[serde(default)]
    joined: Families,
}

/// Reason for the end of a weft gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Departure {
    /// Its cluster no longer has this peering.
    Removed,
    /// Its cluster is taken down.
    TakenDown,
    /// Another gateway takes its place.
    Restarting,
    /// A reason of a newer version.
    #[serde(other)]
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MessageType {
    Ping,
    Pong,
}

/// Report of a weft gateway to another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WeftField {
    /// Version of this field: 1.
    pub version: u32,
    /// Interval of the sender's probes; 0 if it does not probe.
    pub interval_ms: u32,
    /// Time since it last got an authentic packet; absent if never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_ms: Option<u64>,
    /// The sender answers probes of any size.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub path_mtu: bool,
    /// Makes this a probe of a path's MTU: nothing counts but whether it comes back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_probe: Option<u32>,
    /// The sender ends now: its successor has none of its sessions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// The sender gets packets with the receiver's key from two gateways.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub duplicate: bool,
    /// Another gateway with the sender's key has handed the tunnel over, and carries packets for a while.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub handed_over: bool,
    /// The sender has replicas: while these find out which has the tunnel, packets of several may come.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_replicas: bool,
    /// Reason for its end; absent from older gateways, which only restart so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub departure: Option<Departure>,
    /// One of a burst: the sender misses answers, and the receiver had better look, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspects: bool,
    /// The receiver's CIDRs are not those that the sender's cluster has configured for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cidrs_differ: bool,
    /// The receiver's pings name another cluster than the sender's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub id_differs: bool,
    /// Share of the sender's probes that get lost, if it is worth reporting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_percent: Option<u8>,
    /// Nodes of the sender's cluster, unless there are some and all of them reach its gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeCount>,
    /// The sender refuses IPv6, whose packets are too large for its tunnel.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub refuses_ipv6: bool,
}

/// Nodes of a cluster, and those of them that reach its gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCount {
    pub reachable: u32,
    pub of: u32,
}

/// Reason why a datagram is no probe.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    #[error("{0} bytes is longer than any probe")]
    TooLong(usize),
    #[error("not a JSON object")]
    NoObject,
    #[error("not a probe's JSON")]
    Json(#[source] serde_json::Error),
}

impl Message {
    pub fn parse(datagram: &[u8]) -> Result<Self, ParseError> {
        let message = datagram.trim_ascii_end();
        if message.len() > MAX_MESSAGE {
            return Err(ParseError::TooLong(message.len()));
        }
        // serde would take the fields' values in an array, too, which Go does not.
        if message.trim_ascii_start().first() != Some(&b'{') {
            return Err(ParseError::NoObject);
        }
        serde_json::from_slice(message).map_err(ParseError::Json)
    }

    pub fn encode(&self) -> Vec<u8> {
        // Strings and integers: there is nothing that could fail.
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// The message at a place of a train of probes, longer than those before it: datagrams of one length
    /// would leave as one segmented send, and until that is cut to packets they are lost together.
    pub fn encode_in_train(&self, place: usize) -> Vec<u8> {
        let mut message = self.encode();
        message.resize(message.len() + place * SEALED_STEP, b' ');
        message
    }

    /// The answer to this ping.
    pub fn pong(mut self, weft: WeftField) -> Self {
        self.msg_type = MessageType::Pong;
        self.weft = Some(weft);
        self.cidrs = None;
        self
    }

    /// This message with the sender's CIDRs, unless that makes it longer than a message may be.
    #[must_use]
    pub fn with_cidrs(self, cidrs: PeerCidrs) -> Self {
        let with = Self { cidrs: Some(cidrs), ..self };
        if with.encode().len() <= MAX_MESSAGE { with } else { Self { cidrs: None, ..with } }
    }

    /// The time stamp in nanoseconds since 1970.
    pub fn stamp(&self) -> Option<i128> {
        Some(self.time_stamp.parse::<Timestamp>().ok()?.as_nanosecond())
    }

    /// Reason for the sender's end, if that is what this announces.
    pub fn departure(&self) -> Option<Departure> {
        let weft = self.weft.filter(|weft| weft.leaving)?;
        Some(weft.departure.unwrap_or(Departure::Restarting))
    }

    pub fn report(&self) -> Option<PeerReport> {
        self.weft.map(|weft| PeerReport {
            interval: Duration::from_millis(weft.interval_ms.into()),
            received_ago: weft.heard_ms.map(Duration::from_millis),
        })
    }
}

impl PeerCidrs {
    pub fn of(&self, kind: RemapKind) -> &[Cidr] {
        match kind {
            RemapKind::Pod => &self.pod,
            RemapKind::External => &self.external,
        }
    }

    /// Returns true if the cluster has CIDRs of this family configured for the receiver.
    pub fn joins(&self, ipv4: bool) -> bool {
        if ipv4 { self.joined.v4 } else { self.joined.v6 }
    }
}

impl Serialize for PeerCidrs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let texts = |cidrs: &[Cidr]| cidrs.iter().map(ToString::to_string).collect();
        let (pod, external) = (texts(&self.pod), texts(&self.external));
        CidrTexts { pod, external, joined: self.joined }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for PeerCidrs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let parse = |texts: Vec<String>| {
            let parsed: Result<Vec<Cidr>, _> = texts.iter().map(|text| text.parse()).collect();
            parsed.map_err(serde::de::Error::custom)
        };
        let CidrTexts { pod, external, joined } = CidrTexts::deserialize(deserializer)?;
        Ok(Self { pod: parse(pod)?, external: parse(external)?, joined })
    }
}

impl WeftField {
    /// `interval` is zero if this gateway does not probe.
    pub fn new(interval: Duration, received_ago: Option<Duration>) -> Self {
        let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        Self {
            version: 1,
            interval_ms: u32::try_from(interval.as_millis()).unwrap_or(u32::MAX),
            heard_ms: received_ago.map(millis),
            path_mtu: true,
            size_probe: None,
            leaving: false,
            duplicate: false,
            has_replicas: false,
            handed_over: false,
            departure: None,
            suspects: false,
            cidrs_differ: false,
            id_differs: false,
            loss_percent: None,
            nodes: None,
            refuses_ipv6: false,
        }
    }

    /// The field of a ping that announces the sender's end.
    pub fn leaving(departure: Departure) -> Self {
        Self { leaving: true, departure: Some(departure), ..Self::new(Duration::ZERO, None) }
    }

    /// Returns a probe of a path's MTU; the nonce identifies it and its answer.
    pub fn size_probe(nonce: u32) -> Self {
        Self { size_probe: Some(nonce), ..Self::new(Duration::ZERO, None) }
    }
}

/// Our probes that have not come back yet.
///
/// Each is known by its time stamp, but its round trip is measured on the monotonic clock, so a
/// step of the wall clock changes no latency, and an answer to nothing is no answer.
#[derive(Debug)]
pub struct Pending {
    peer: ClusterId,
    sent: VecDeque<(i128, Instant)>,
}

impl Pending {
    pub fn new(peer: ClusterId) -> Self {
        Self { peer, sent: VecDeque::new() }
    }

    /// The next ping. `wall` is moved on a little if the clock stood still or went back, since a
    /// stamp must not be used twice.
    pub fn ping(&mut self, wall: Timestamp, now: Instant, weft: WeftField) -> Message {
        let mut nanos = wall.as_nanosecond();
        while self.sent.iter().any(|(stamp, _)| *stamp == nanos) {
            nanos += 1;
        }
        let stamp = Timestamp::from_nanosecond(nanos).unwrap_or(wall);
        if self.sent.len() == MAX_PENDING {
            self.sent.pop_front();
        }
        self.sent.push_back((stamp.as_nanosecond(), now));
        Message {
            cluster_id: self.peer.to_string(),
            msg_type: MessageType::Ping,
            time_stamp: format!("{stamp:.9}"),
            weft: Some(weft),
            cidrs: None,
        }
    }

    /// The round trip of `pong`, unless it answers nothing of ours or a later answer came first.
    pub fn take_pong(&mut self, pong: &Message, now: Instant) -> Option<Duration> {
        if pong.cluster_id != self.peer.as_str() {
            return None;
        }
        let stamp = pong.stamp()?;
        let at = self.sent.iter().position(|(sent, _)| *sent == stamp)?;
        let (_, sent_at) = self.sent.drain(..=at).next_back()?;
        Some(now.saturating_duration_since(sent_at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe_log::TRAIN;

    /// Output of Go's `json.Marshal` for Liqo's `Msg`.
    const FROM_LIQO: &str =
        r#"{"clusterID":"rome","msgType":"PING","timeStamp":"2026-11-21T07:30:00.12345678+01:00"}"#;

    #[test]
    fn a_ping_is_what_liqo_sends_plus_one_field() {
        let wall: Timestamp = "2026-11-21T07:30:00.5Z".parse().unwrap();
        let weft = WeftField::new(Duration::from_secs(2), Some(Duration::from_millis(40)));
        let ping = pending().ping(wall, Instant::now(), weft);
        assert_eq!(
            String::from_utf8(ping.encode()).unwrap(),
            r#"{"clusterID":"milan","msgType":"PING","timeStamp":"2026-11-21T07:30:00.500000000Z","weft":{"version":1,"intervalMs":2000,"heardMs":40,"pathMtu":true}}"#
        );
    }

    #[test]
    fn liqo_ping_is_echoed_with_type_changed() {
        let ping = Message::parse(FROM_LIQO.as_bytes()).unwrap();
        assert_eq!(ping.report(), None);
        let pong = ping.pong(WeftField::new(Duration::ZERO, None)).encode();
        let expected = FROM_LIQO
            .replace("PING", "PONG")
            .replace("}", r#","weft":{"version":1,"intervalMs":0,"pathMtu":true}}"#);
        assert_eq!(String::from_utf8(pong).unwrap(), expected);
    }

    #[test]
    fn probes_of_a_train_share_no_segmented_send() {
        let ping = pending().ping(
            Timestamp::UNIX_EPOCH,
            Instant::now(),
            WeftField::leaving(Departure::Removed),
        );
        let train: Vec<_> = (0..TRAIN).map(|place| ping.encode_in_train(place)).collect();
        let sealed: Vec<_> = train.iter().map(|probe| probe.len().div_ceil(16)).collect();
        // Only a shorter datagram than those before it may end a segmented send.
        assert!(sealed.is_sorted_by(|one, next| one < next), "{sealed:?}");
        assert!(train.iter().all(|probe| Message::parse(probe).unwrap() == ping));
    }

    #[test]
    fn cidrs_and_departure_survive_the_wire() {
        let cidrs = |n: u8| -> Vec<Cidr> {
            (0..n).map(|i| format!("10.{i}.0.0/16").parse().unwrap()).collect()
        };
        let weft = WeftField::leaving(Departure::Removed);
        let ping = pending().ping(Timestamp::UNIX_EPOCH, Instant::now(), weft);
        let joined = Families { v4: true, v6: false };
        let own = PeerCidrs { pod: cidrs(2), external: cidrs(1), joined };
        let read = Message::parse(&ping.clone().with_cidrs(own.clone()).encode()).unwrap();
        assert_eq!(read.cidrs.as_ref(), Some(&own));
        assert_eq!(read.departure(), Some(Departure::Removed));
        assert_eq!(read.pong(weft).cidrs, None, "an echo repeats nothing");
        let many = PeerCidrs { pod: cidrs(200), ..own };
        assert_eq!(ping.with_cidrs(many).cidrs, None, "longer than a message may be");
    }

    #[test]
    fn departure_of_newer_version_is_unknown() {
        let text = FROM_LIQO.replace(
            "}",
            r#","weft":{"version":1,"intervalMs":0,"leaving":true,"departure":"Moved"}}"#,
        );
        let message = Message::parse(text.as_bytes()).unwrap();
        assert_eq!(message.departure(), Some(Departure::Unknown));
    }

    #[test]
    fn blanks_make_a_message_as_long_as_need_be() {
        let mut long = FROM_LIQO.as_bytes().to_vec();
        long.resize(9000, b' ');
        assert_eq!(Message::parse(&long).unwrap(), Message::parse(FROM_LIQO.as_bytes()).unwrap());
    }

    #[test]
    fn echo_with_other_time_format_is_accepted() {
        let (mut pending, start) = (pending(), Instant::now());
        let wall: Timestamp = "2026-11-21T07:30:00.5Z".parse().unwrap();
        pending.ping(wall, start, WeftField::new(Duration::ZERO, None));
        // Go drops trailing zeros.
        let pong = r#"{"clusterID":"milan","msgType":"PONG","timeStamp":"2026-11-21T07:30:00.5Z"}"#;
        let pong = Message::parse(pong.as_bytes()).unwrap();
        let later = start + Duration::from_millis(7);
        assert_eq!(pending.take_pong(&pong, later), Some(Duration::from_millis(7)));
        assert_eq!(pending.take_pong(&pong, later), None, "a repeated answer is none");
    }

    #[test]
    fn answers_that_are_late_or_foreign_do_not_count() {
        let (mut pending, now) = (pending(), Instant::now());
        let wall: Timestamp = "2026-11-21T07:30:00.5Z".parse().unwrap();
        let weft = WeftField::new(Duration::ZERO, None);
        let first = pending.ping(wall, now, weft).pong(weft);
        let second = pending.ping(wall, now, weft).pong(weft);
        assert_ne!(first.time_stamp, second.time_stamp, "a clock that stands still");
        let foreign = Message { cluster_id: "rome".to_owned(), ..second.clone() };
        assert_eq!(pending.take_pong(&foreign, now), None);
        assert!(pending.take_pong(&second, now).is_some());
        assert_eq!(pending.take_pong(&first, now), None);
    }

    #[test]
    fn non_probes_are_refused_pending_is_bounded() {
        for bad in ["", "{}", "null", r#"{"clusterID":1,"msgType":"PING","timeStamp":""}"#] {
            assert!(Message::parse(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(Message::parse(&[b' '; MAX_DATAGRAM]).is_err());
        assert!(Message::parse(&[b'['; MAX_MESSAGE + 1]).is_err());
        let mut pending = pending();
        for _ in 0..1000 {
            pending.ping(
                Timestamp::UNIX_EPOCH,
                Instant::now(),
                WeftField::new(Duration::ZERO, None),
            );
        }
        assert_eq!(pending.sent.len(), MAX_PENDING);
    }

    fn pending() -> Pending {
        Pending::new("milan".parse().unwrap())
    }
}
