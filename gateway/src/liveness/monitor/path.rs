//! Finds the path's MTU with the peer's help, if the peer is a weft gateway.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_api::fabric::PROBE_PORT;
use gateway_dataplane::overlay::Way;
use lane::LaneHandle;
use reachability::path_mtu::trains::{Round, TrainCheck};
use reachability::path_mtu::{PathMtu, Probe};
use reachability::probe::{Message, MessageType, WeftField};
use tunnel::checksum;

use crate::state::Running;

/// Lengths in bytes of what precedes a probe's message in a frame of the TUN.
const VIRTIO: usize = 10;
const IPV4: usize = 20;
const UDP: usize = 8;

/// Problem of a path on which segmented sends vanish.
pub const TRAINS_VANISH: &str = "UDP segmentation is off on the path to the peer: trains of \
     datagrams vanish on it, single ones arrive; throughput is lower; it is tried again after a \
     minute, then less often (--no-gso keeps it off)";

/// The search for the path's MTU, and what it takes to send its probes.
pub(super) struct PathProber {
    lane: Arc<LaneHandle>,
    /// The way that is probed; `None` while no address of the peer is known.
    way: Option<(Way, PathMtu)>,
    addresses: (Ipv4Addr, Ipv4Addr),
    endpoint: Option<SocketAddr>,
    /// Path MTU that an earlier gateway found.
    remembered: Option<u32>,
    enabled: bool,
    /// The peer reports that it answers, and is to be probed.
    asks: bool,
    trains: TrainCheck,
}

impl PathProber {
    pub(super) fn new(running: &Running, now: Instant) -> Self {
        let mut prober = Self {
            lane: running.lane.clone(),
            way: None,
            addresses: (running.desired.tunnel_address, running.desired.peer_tunnel_address),
            endpoint: running.lane.changes().borrow().endpoint,
            remembered: running.remembered_path_mtu,
            enabled: false,
            asks: false,
            trains: TrainCheck::new(now),
        };
        prober.follow(running, now);
        prober
    }

    /// The dataplane has changed.
    pub(super) fn follow(&mut self, running: &Running, now: Instant) {
        let desired = &running.desired;
        self.addresses = (desired.tunnel_address, desired.peer_tunnel_address);
        if !Arc::ptr_eq(&self.lane, &running.lane) {
            self.lane = running.lane.clone();
            self.lane.set_path_probing(self.asks);
            self.lane.set_segmenting(self.trains.may_segment());
        }
        match (&mut self.way, running.way) {
            (Some((way, path)), Some(new)) => {
                path.set_limit(new.limit, now);
                *way = new;
            }
            (None, Some(new)) => {
                self.way = Some((new, PathMtu::new(new.limit, self.remembered, now)));
            }
            (_, None) => {}
        }
        self.enabled = desired.probe.enabled;
        if !self.enabled {
            self.stop(now);
        }
    }

    /// The largest outer packet known to get through, in bytes.
    pub(super) fn found(&self) -> Option<u32> {
        self.way.as_ref().and_then(|(_, path)| path.found())
    }

    /// Deadline of the next [`Self::send`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        let (_, path) = self.way.as_ref()?;
        path.deadline().into_iter().chain(self.trains.deadline()).min().filter(|_| self.asks)
    }

    /// True if trains of datagrams arrive, as far as is known.
    pub(super) fn may_segment(&self) -> bool {
        self.trains.may_segment()
    }

    /// Returns when packets are sent that a smaller path would not take, after a time without any.
    pub(super) async fn large_packet(&self) {
        match self.way.as_ref().and_then(|(_, path)| path.rests_at()).filter(|_| self.asks) {
            Some(seen) => self.lane.large_sends_other_than(seen).await,
            None => std::future::pending().await,
        }
    }

    /// An ordinary message came from the peer, an answer with its round trip.
    pub(super) fn handle_life(&mut self, message: &Message, rtt: Option<Duration>, now: Instant) {
        let answers = message.weft.is_some_and(|weft| weft.path_mtu);
        if !answers || !self.enabled {
            return self.stop(now);
        }
        if !self.asks {
            self.asks = true;
            self.lane.set_path_probing(true);
        }
        if let Some((_, path)) = &mut self.way {
            path.handle_life(rtt, now);
        }
    }

    pub(super) fn handle_answer(&mut self, nonce: u32, now: Instant) {
        if TrainCheck::is_nonce(nonce) {
            let before = self.trains.may_segment();
            self.trains.handle_answer(nonce, now);
            return self.apply_segmenting(before);
        }
        if let Some((_, path)) = &mut self.way {
            path.handle_answer(nonce, now);
        }
    }

    /// The session or the peer's address may be another one.
    pub(super) fn handle_session(&mut self, now: Instant) {
        let state = *self.lane.changes().borrow();
        let has_moved = state.endpoint != self.endpoint;
        self.endpoint = state.endpoint;
        if has_moved {
            self.forget_trains(now);
        }
        let Some((_, path)) = &mut self.way else { return };
        if !state.has_session {
            path.pause(now);
        } else if has_moved {
            path.search(now);
        }
    }

    /// Without anyone to ask, what was found may be wrong at any time.
    fn stop(&mut self, now: Instant) {
        if std::mem::take(&mut self.asks) {
            self.lane.set_path_probing(false);
            self.forget_trains(now);
        }
        self.remembered = None;
        if let Some((way, path)) = &mut self.way {
            *path = PathMtu::new(way.limit, None, now);
        }
    }

    /// Sends the probes that are due.
    pub(super) fn send(&mut self, peer: &str, now: Instant) {
        let Some((way, path)) = &mut self.way else { return };
        let probes = path.poll(self.lane.large_sends(), now);
        if !probes.is_empty() {
            let frame = |probe| frame(probe, way.overhead, peer, self.addresses);
            self.lane.send_probes(probes.into_iter().map(frame));
        }
        self.check_trains(peer, now);
    }

    /// Sends a train and a single datagram of the size in force, if they are due.
    fn check_trains(&mut self, peer: &str, now: Instant) {
        let Some((way, path)) = &self.way else { return };
        let Some(size) = path.found().filter(|_| self.asks) else { return };
        let (before, overhead) = (self.trains.may_segment(), way.overhead);
        if let Some(Round { train, single }) = self.trains.poll(self.lane.large_sends(), now) {
            let frame = |nonce| frame(Probe { nonce, size }, overhead, peer, self.addresses);
            self.lane.send_train_probe(train.map(frame), frame(single));
        }
        self.apply_segmenting(before);
    }

    /// Another path: what is known of trains counts for the one before.
    fn forget_trains(&mut self, now: Instant) {
        let before = self.trains.may_segment();
        self.trains = TrainCheck::new(now);
        self.apply_segmenting(before);
    }

    fn apply_segmenting(&self, before: bool) {
        let may_segment = self.trains.may_segment();
        if may_segment == before {
            return;
        }
        self.lane.set_segmenting(may_segment);
        match may_segment {
            true => tracing::info!("trains of datagrams arrive on the path to the peer again"),
            false => tracing::warn!("{TRAINS_VANISH}"),
        }
    }
}

/// A probe as a frame of the TUN: it may be larger than the device takes. Behind `overhead` of the
/// outer packet lies an IPv4 packet (RFC 791) of one UDP datagram without a checksum (RFC 768),
/// which the tunnel's own makes needless.
fn frame(probe: Probe, overhead: u32, peer: &str, (from, to): (Ipv4Addr, Ipv4Addr)) -> Vec<u8> {
    let message = Message {
        cluster_id: peer.to_owned(),
        msg_type: MessageType::Ping,
        time_stamp: String::new(),
        weft: Some(WeftField::size_probe(probe.nonce)),
        cidrs: None,
    };
    let message = message.encode();
    let length = u16::try_from(probe.size.saturating_sub(overhead)).unwrap_or(u16::MAX);
    let length = length.max((IPV4 + UDP + message.len()) as u16);
    let mut frame = vec![0; VIRTIO];
    frame.extend([0x45, 0]);
    frame.extend(length.to_be_bytes());
    // Never to be fragmented, 64 hops, UDP, no checksum yet.
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend(from.octets());
    frame.extend(to.octets());
    let sum = !checksum::fold(checksum::sum(&frame[VIRTIO..]));
    frame[VIRTIO + 10..VIRTIO + 12].copy_from_slice(&sum.to_be_bytes());
    frame.extend(PROBE_PORT.to_be_bytes());
    frame.extend(PROBE_PORT.to_be_bytes());
    frame.extend((length - IPV4 as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(message);
    frame.resize(VIRTIO + usize::from(length), b' ');
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_a_valid_packet_of_exactly_its_size() {
        let ends = ([169, 254, 18, 1].into(), [169, 254, 18, 2].into());
        for (size, overhead) in [(1280, 80), (1500, 60), (9000, 60), (65_535, 60)] {
            let frame = frame(Probe { nonce: 7, size }, overhead, "milan", ends);
            let packet = &frame[VIRTIO..];
            assert_eq!(packet.len(), (size - overhead) as usize);
            assert_eq!(checksum::fold(checksum::sum(&packet[..IPV4])), 0xffff);
            let headers = tunnel::packet::Headers::parse(packet).unwrap();
            assert_eq!(headers.total_len, packet.len());
            let message = Message::parse(&packet[IPV4 + UDP..]).unwrap();
            assert_eq!(message.weft.unwrap().size_probe, Some(7));
        }
    }
}
