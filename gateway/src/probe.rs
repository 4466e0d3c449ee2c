//! Liqo's connection probe: a JSON datagram on UDP 12345, answered by its own echo.
//!
//! The sender writes the **remote** cluster's ID; the receiver sends everything back with
//! `msgType` PONG. So the ID tells a sender which of its peers answers, and clocks need not agree.
//! A weft gateway adds one field, which Liqo's decoder ignores.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fabric_api::ClusterId;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::connection::PeerReport;

/// Longest message read, in bytes: Liqo's own buffer. Blanks behind it do not count: they make a
/// datagram as long as a packet of some size needs it.
pub const MAX_MESSAGE: usize = 1024;
/// Longest datagram there is, in bytes.
pub const MAX_DATAGRAM: usize = 65_535;
/// How many probes may be on their way; older ones no longer count.
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MessageType {
    Ping,
    Pong,
}

/// What a weft gateway tells another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WeftField {
    /// Version of this field: 1.
    pub version: u32,
    /// How often the sender probes; 0 if it does not.
    pub interval_ms: u32,
    /// How long ago it last got an authentic packet; absent if never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_ms: Option<u64>,
    /// Whether the sender answers probes of any size.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub path_mtu: bool,
    /// Makes this a probe of a path's MTU: nothing counts but whether it comes back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_probe: Option<u32>,
    /// The sender ends now: whoever takes its place has none of its sessions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// The sender gets packets with the receiver's key from two gateways.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub duplicate: bool,
}

/// Why a datagram is no probe.
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

    /// The answer to this ping.
    pub fn pong(mut self, weft: WeftField) -> Self {
        self.msg_type = MessageType::Pong;
        self.weft = Some(weft);
        self
    }

    pub fn report(&self) -> Option<PeerReport> {
        self.weft.map(|weft| PeerReport {
            interval: Duration::from_millis(weft.interval_ms.into()),
            heard_ago: weft.heard_ms.map(Duration::from_millis),
        })
    }
}

impl WeftField {
    /// `interval` is zero if this gateway does not probe.
    pub fn new(interval: Duration, heard_ago: Option<Duration>) -> Self {
        let millis = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        Self {
            version: 1,
            interval_ms: u32::try_from(interval.as_millis()).unwrap_or(u32::MAX),
            heard_ms: heard_ago.map(millis),
            path_mtu: true,
            size_probe: None,
            leaving: false,
            duplicate: false,
        }
    }

    /// What makes a ping a goodbye.
    pub fn leaving() -> Self {
        Self { leaving: true, ..Self::new(Duration::ZERO, None) }
    }

    /// What distinguishes a probe of a path's MTU, and its answer.
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
        }
    }

    /// The round trip of `pong`, unless it answers nothing of ours or a later answer came first.
    pub fn take_pong(&mut self, pong: &Message, now: Instant) -> Option<Duration> {
        if pong.cluster_id != self.peer.as_str() {
            return None;
        }
        let stamp = pong.time_stamp.parse::<Timestamp>().ok()?.as_nanosecond();
        let at = self.sent.iter().position(|(sent, _)| *sent == stamp)?;
        let (_, sent_at) = self.sent.drain(..=at).next_back()?;
        Some(now.saturating_duration_since(sent_at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Go's `json.Marshal` makes of Liqo's `Msg`.
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
    fn a_ping_of_liqo_is_echoed_unchanged_but_for_its_type() {
        let ping = Message::parse(FROM_LIQO.as_bytes()).unwrap();
        assert_eq!(ping.report(), None);
        let pong = ping.pong(WeftField::new(Duration::ZERO, None)).encode();
        let expected = FROM_LIQO
            .replace("PING", "PONG")
            .replace("}", r#","weft":{"version":1,"intervalMs":0,"pathMtu":true}}"#);
        assert_eq!(String::from_utf8(pong).unwrap(), expected);
    }

    #[test]
    fn blanks_make_a_message_as_long_as_need_be() {
        let mut long = FROM_LIQO.as_bytes().to_vec();
        long.resize(9000, b' ');
        assert_eq!(Message::parse(&long).unwrap(), Message::parse(FROM_LIQO.as_bytes()).unwrap());
    }

    #[test]
    fn an_echo_with_another_spelling_of_the_same_time_is_ours() {
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
    fn what_is_no_probe_is_refused_and_the_number_on_the_way_is_bounded() {
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
