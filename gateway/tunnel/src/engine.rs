use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use fabric_primitives::{PrivateKey, PublicKey};
use noise::{BATCH, Stamper, Tai64n, receiver_index};

use crate::join::{Joiner, Sink};
use crate::outbox::{Outbox, Port};
use crate::packet::{Gso, Headers, L4Checksum, Malformed, Offload};
use crate::random::Random;
use crate::session::{
    DATA, MAX_HANDSHAKE, MIN_DATA, Opened, PACKET, Peer, Rejections, Unconfirmed,
};
use crate::split::split;
use crate::{DropReason, Rules, UdpPath, checksum, ecn};

/// The deadline of an engine that has nothing to wait for.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Settings of an [`Engine`] for its peering. Cheap to replace.
#[derive(Clone, Debug)]
pub struct Config {
    pub private_key: PrivateKey,
    /// Without it nothing is sent and nothing that arrives is believed.
    pub peer_key: Option<PublicKey>,
    /// Endpoint of the peer until an authentic packet moves it; `None` waits for the peer.
    pub endpoint: Option<SocketAddr>,
    /// A configured endpoint that has not answered an earlier gateway, which found the peer at [`Self::endpoint`].
    /// Handshakes begin there, too, ever less often.
    pub unproven: Option<SocketAddr>,
    /// Starts handshakes without traffic, and repeats them for as long as it takes.
    pub initiate: bool,
    /// For 180 s, while there is no session, initiates to the source of data under unknown keys, too: those of
    /// an earlier gateway, which the peer still has. For a server, whose client may be behind a NAT.
    pub calls_back: bool,
    /// Address of an earlier gateway that passes packets on. What the peer still sends by way of that does not
    /// lead back there once there is another way.
    pub relay: Option<IpAddr>,
    /// WireGuard's persistent keepalive.
    pub keepalive: Option<Duration>,
    /// The tunnel's MTU in bytes, up to which packets are padded to 16.
    pub mtu: usize,
    pub rules: Rules,
}

/// Sink for the output of an [`Engine`]. Neither may block; both return why what they were given
/// was dropped, if it was.
pub trait Wire {
    /// Sends the datagrams that lie one after the other in `train.bytes`.
    fn send(&mut self, train: Datagrams<'_>) -> Result<(), DropReason>;

    /// Writes to the TUN: a virtio header and one packet or one train of TCP segments or UDP datagrams.
    fn write(&mut self, frame: &[u8]) -> Result<(), DropReason>;
}

/// UDP datagrams to one address, as `UDP_SEGMENT` has them.
#[derive(Clone, Copy, Debug)]
pub struct Datagrams<'a> {
    pub path: UdpPath,
    pub bytes: &'a [u8],
    /// Length of each datagram; only the last may be shorter.
    pub segment_size: usize,
    /// IPv4 TOS or IPv6 traffic class of them all: DSCP and ECN.
    pub tos: u8,
}

/// UDP datagrams from one address, as `UDP_GRO` has them. They are opened in place.
#[derive(Debug)]
pub struct Received<'a> {
    /// Sender, and the address of this host that they were sent to.
    pub path: UdpPath,
    pub bytes: &'a mut [u8],
    /// Length of each datagram; only the last may be shorter.
    pub segment_size: usize,
    /// IPv4 TOS or IPv6 traffic class of them all: DSCP and ECN.
    pub tos: u8,
}

/// The dataplane of one peering, without sockets and without a clock.
///
/// Input is frames, datagrams and time, output goes through a [`Wire`]. Packets may be held back
/// until [`Engine::flush`], so that neighbours leave as one train.
pub struct Engine {
    config: Config,
    pub(crate) peer: Peer,
    outbox: Outbox,
    joiner: Joiner,
    counters: Counters,
    started: Instant,
}

/// Events counted since the engine was made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Inner packets (segments of trains), and their bytes from the IP header on.
    pub rx_packets: u64,
    pub rx_bytes: u64,
    pub tx_packets: u64,
    pub tx_bytes: u64,
    /// Trains of several packets: read from the TUN, written to it, sent to and got from the peer.
    pub tun_trains_read: u64,
    pub tun_trains_written: u64,
    pub trains_sent: u64,
    pub trains_received: u64,
    /// Handshake initiations sent, and handshakes that led to a session.
    pub handshake_attempts: u64,
    pub handshakes: u64,
    /// Moves of the peer's endpoint that its packets made.
    pub endpoint_changes: u64,
    /// By [`DropReason::index`]: on the way from the peer, and to it.
    pub dropped_inbound: [u64; DropReason::COUNT],
    pub dropped_outbound: [u64; DropReason::COUNT],
}

/// Known state of the peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerState {
    /// Source of the last authentic packet, or the configured endpoint.
    pub endpoint: Option<SocketAddr>,
    /// It is that source, not merely configured.
    pub is_endpoint_authentic: bool,
    /// The configured endpoint, as long as nothing authentic has come from it: packets of the peer may have
    /// moved [`Self::endpoint`] elsewhere.
    pub unproven_endpoint: Option<SocketAddr>,
    /// Packets can be sealed for the peer.
    pub has_session: bool,
    pub last_handshake: Option<Instant>,
    pub last_authentic: Option<Instant>,
    /// Packets are sealed with keys that newer ones have superseded.
    pub on_superseded_keys: bool,
    pub rejections: Rejections,
    /// Responses that do not arrive at the peer; `None` while it is but one.
    pub unconfirmed: Option<Unconfirmed>,
    /// Two endpoints from which gateways with the peer's private key send in turn, as long as both
    /// do. There must be only one such gateway.
    pub duplicate: Option<[SocketAddr; 2]>,
}

impl Engine {
    /// `seed` is any random number, another one for every engine; jitter comes from it. `stamper`
    /// makes the timestamps of initiations, which the peer believes if they are later than any before
    /// with the same private key. With an endpoint and [`Config::initiate`] a handshake is due at once.
    pub fn new(config: Config, seed: u64, stamper: Stamper, now: Instant) -> Self {
        let mut peer = Peer::new(Random::new(seed), stamper, now);
        peer.configure(&config, now);
        Self {
            peer,
            outbox: Outbox::new(config.mtu),
            joiner: Joiner::new(),
            counters: Counters::default(),
            started: now,
            config,
        }
    }

    /// Sets whether UDP datagrams are joined as TCP segments are: the TUN has to take such trains, as
    /// Linux does from 6.2 on.
    pub fn set_joins_udp(&mut self, joins_udp: bool) {
        self.joiner.set_joins_udp(joins_udp);
    }

    /// Takes a new config over. An endpoint that is the configured one of before does not undo what
    /// roaming found. Other keys are tried at once; until the peer has them, too, and for 180 s at
    /// most, the superseded ones carry on, so that the ends may change theirs in any order. Only
    /// without the peer's key everything ends at once.
    pub fn configure(&mut self, config: Config, now: Instant) {
        self.outbox.mtu = config.mtu;
        self.peer.configure(&config, now);
        self.config = config;
    }

    /// Begins a handshake at the next [`Engine::handle_timeout`], whatever session there is: the
    /// way to the peer may have changed.
    pub fn initiate(&mut self, now: Instant) {
        self.peer.initiate_now(now);
    }

    /// The same from the address that the kernel chooses, as its route to the peer has changed. Packets keep
    /// their source until the peer answers there.
    pub fn reroute(&mut self, now: Instant) {
        self.peer.reroute(now);
    }

    /// Begins a handshake at the configured endpoint, if there is one: the peer is silent where its last packet
    /// came from, such as a port that a NAT has closed since.
    pub fn go_back(&mut self, now: Instant) {
        self.peer.go_back(&self.config, now);
    }

    /// Sets whether attempts follow each other every five seconds, instead of every second: an answer would not arrive,
    /// and another gateway with the same keys has the session.
    pub fn set_slow(&mut self, is_slow: bool, now: Instant) {
        self.peer.set_slow(is_slow, now);
    }

    /// Goes on under the keys that there are, and neither begins nor answers handshakes any more: another
    /// gateway with the same keys has the session, and the peer believes whose handshake was last.
    pub fn retire(&mut self) {
        self.peer.retire();
    }

    /// Returns whether a datagram is none that this engine can open: a handshake message, or data under the
    /// keys of another gateway.
    pub fn is_foreign(&self, datagram: &[u8]) -> bool {
        data_run(datagram, datagram.len().max(1)) == 0
            || !self.peer.has_key(receiver_index(datagram))
    }

    /// One read from the TUN: a virtio header and a packet or train. `frame` is used as scratch
    /// space.
    pub fn handle_frame(&mut self, frame: &mut [u8], now: Instant, wire: &mut impl Wire) {
        let port = &mut Port { wire, counters: &mut self.counters, now };
        let (outbox, rules) = (&mut self.outbox, &self.config.rules);
        if let Err(reason) = handle_frame(frame, rules, outbox, &mut self.peer, port) {
            port.drop_outbound(reason, 1);
        }
    }

    /// Frames whose packets are sent as long as they are, without padding and apart from all others:
    /// they are to find out how much the path takes. Several of one length are one train.
    pub fn handle_probe(&mut self, frames: &mut [Vec<u8>], now: Instant, wire: &mut impl Wire) {
        self.flush(now, wire);
        self.outbox.mtu = 0;
        for frame in frames {
            self.handle_frame(frame, now, wire);
        }
        self.outbox.mtu = self.config.mtu;
        self.flush(now, wire);
    }

    /// One read from the socket.
    pub fn handle_datagrams(&mut self, train: Received<'_>, now: Instant, wire: &mut impl Wire) {
        if train.bytes.len() > train.segment_size {
            self.counters.trains_received += 1;
        }
        let Received { path, bytes, tos, .. } = train;
        let segment_size = train.segment_size.max(1);
        let mut rest = bytes;
        while !rest.is_empty() {
            let len = data_run(rest, segment_size);
            let (first, others) = match len {
                0 => rest.split_at_mut(segment_size.min(rest.len())),
                _ => rest.split_at_mut(len),
            };
            match len {
                0 => self.handle_handshake(path, first, now, wire),
                _ => {
                    let run = Received { path, bytes: first, segment_size, tos };
                    self.handle_data(run, now, wire);
                }
            }
            rest = others;
        }
    }

    /// Hands everything that is held back to `wire`.
    pub fn flush(&mut self, now: Instant, wire: &mut impl Wire) {
        let Self { joiner, outbox, counters, config, .. } = self;
        joiner.flush(&mut Delivery { rules: &config.rules, counters, wire });
        outbox.flush(&mut Port { wire, counters, now });
    }

    /// To be called when [`Engine::deadline`] has come; at other times it does no harm.
    pub fn handle_timeout(&mut self, now: Instant, wire: &mut impl Wire) {
        let mut port = Port { wire, counters: &mut self.counters, now };
        let mut message = [0; MAX_HANDSHAKE];
        while let Some((path, length)) = self.peer.poll(now, &mut message) {
            port.send_message(path, &message[..length]);
        }
        port.counters.note_peer(&self.peer);
    }

    /// Deadline of the next [`Engine::handle_timeout`].
    pub fn deadline(&self) -> Instant {
        self.peer.deadline().unwrap_or(self.started + NEVER)
    }

    /// Counts a datagram from the peer that the driver dropped early.
    pub fn count_early_drop(&mut self) {
        self.counters.dropped_inbound[DropReason::EarlyDrop.index()] += 1;
    }

    /// Counts datagrams to the peer that failed after [`Wire::send`] had taken them.
    pub fn count_unsent(&mut self, reason: DropReason, datagrams: usize) {
        self.counters.dropped_outbound[reason.index()] += datagrams as u64;
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Timestamp of the last initiation: the floor of a successor with the same private key.
    pub fn last_stamp(&self) -> Tai64n {
        self.peer.last_stamp()
    }

    /// Returns the path of packets to the peer.
    pub fn path(&self) -> Option<UdpPath> {
        self.peer.path()
    }

    pub fn peer_state(&self) -> PeerState {
        self.peer.state()
    }

    /// Opens data messages with one receiver index, at most [`BATCH`].
    #[inline]
    fn handle_data(&mut self, run: Received<'_>, now: Instant, wire: &mut impl Wire) {
        let index = receiver_index(run.bytes);
        let opened = self.peer.open(run.bytes, run.segment_size, now);
        for (datagram, opened) in run.bytes.chunks_mut(run.segment_size).zip(opened) {
            let Self { joiner, counters, config, peer, .. } = self;
            let mut sink = Delivery { rules: &config.rules, counters, wire };
            peer.note_opened(run.path, index, opened, now);
            if matches!(opened, Opened::Rejected(DropReason::NoSession)) {
                peer.note_stray(run.path, now);
            }
            match opened {
                Opened::Packet(len) => {
                    let packet = &mut datagram[PACKET..][..len];
                    match run.tos & ecn::CE == ecn::CE && !ecn::mark(packet) {
                        true => sink.drop(DropReason::CongestionUnmarkable, 1),
                        false => joiner.push(packet, &mut sink),
                    }
                }
                Opened::NotIp => sink.drop(DropReason::Malformed, 1),
                Opened::Keepalive => {}
                Opened::Rejected(reason) => sink.drop(reason, 1),
            }
            if peer.is_anything_waiting(now) {
                self.send_waiting(now, wire);
            }
        }
    }

    #[cold]
    fn handle_handshake(
        &mut self,
        from: UdpPath,
        datagram: &[u8],
        now: Instant,
        wire: &mut impl Wire,
    ) {
        let mut port = Port { wire, counters: &mut self.counters, now };
        let mut answer = [0; MAX_HANDSHAKE];
        match self.peer.handle_handshake(from, datagram, &mut answer, now) {
            Ok(0) => {}
            Ok(length) => port.send_message(from, &answer[..length]),
            Err(reason) => port.drop_inbound(reason, 1),
        }
        self.send_waiting(now, wire);
    }

    /// Sends the packets that waited for a session.
    #[cold]
    fn send_waiting(&mut self, now: Instant, wire: &mut impl Wire) {
        let mut port = Port { wire, counters: &mut self.counters, now };
        while let Some(packet) = self.peer.next_waiting(now) {
            self.outbox.push(&packet, &mut self.peer, &mut port);
        }
        self.outbox.flush(&mut port);
        port.counters.note_peer(&self.peer);
    }
}

/// Bytes of the data messages at the start of a train that have one receiver index, at most
/// [`BATCH`]; 0 if it starts with something else.
#[inline]
fn data_run(train: &[u8], segment_size: usize) -> usize {
    let is_data = |datagram: &&[u8]| {
        datagram.len() >= MIN_DATA
            && datagram[..4] == [DATA, 0, 0, 0]
            && receiver_index(datagram) == receiver_index(train)
    };
    train.chunks(segment_size).take(BATCH).take_while(is_data).map(<[u8]>::len).sum()
}

/// Translates what was read from the TUN, cuts it to packets, seals them into `outbox`.
#[inline]
fn handle_frame<W: Wire>(
    frame: &mut [u8],
    rules: &Rules,
    outbox: &mut Outbox,
    peer: &mut Peer,
    port: &mut Port<'_, W>,
) -> Result<(), DropReason> {
    let (header, packet) = frame.split_first_chunk_mut().ok_or(Malformed::Truncated)?;
    let offload = Offload::parse(header)?;
    let headers = match offload.gso {
        Gso::None => Headers::parse(packet)?,
        Gso::TcpV4 | Gso::TcpV6 | Gso::UdpL4 => Headers::parse_train(packet)?,
    };
    let packet = &mut packet[..headers.total_len];
    offload.check(packet, &headers)?;
    rules.outbound(packet, offload.l4_checksum(&headers))?;
    if offload.gso != Gso::None {
        port.counters.tun_trains_read += 1;
        split(packet, &headers, &offload, |segment| outbox.push(segment, peer, port))?;
        return Ok(());
    }
    let (start, offset) = (offload.checksum_start.into(), offload.checksum_offset.into());
    if offload.needs_checksum && !checksum::complete(packet, start, offset) {
        return Err(DropReason::Malformed);
    }
    outbox.push(packet, peer, port);
    Ok(())
}

/// The last step of what came from the peer: checked, translated, written.
struct Delivery<'a, W> {
    rules: &'a Rules,
    counters: &'a mut Counters,
    wire: &'a mut W,
}

impl<W: Wire> Delivery<'_, W> {
    fn drop(&mut self, reason: DropReason, packets: usize) {
        self.counters.dropped_inbound[reason.index()] += packets as u64;
    }
}

impl<W: Wire> Sink for Delivery<'_, W> {
    #[inline]
    fn deliver(&mut self, frame: &mut [u8], offload: &Offload, packets: usize) {
        let Some((header, packet)) = frame.split_first_chunk_mut() else { return };
        *header = offload.write();
        let state = match offload.needs_checksum {
            true => L4Checksum::Partial,
            false => L4Checksum::Complete,
        };
        if let Err(reason) = self.rules.inbound(packet, state) {
            return self.drop(reason, packets);
        }
        // The headers of a train stand for those of all its packets.
        let bytes = packet.len() + (packets - 1) * usize::from(offload.header_len);
        if let Err(reason) = self.wire.write(frame) {
            return self.drop(reason, packets);
        }
        self.counters.rx_packets += packets as u64;
        self.counters.rx_bytes += bytes as u64;
        self.counters.tun_trains_written += u64::from(packets > 1);
    }
}

impl Counters {
    fn note_peer(&mut self, peer: &Peer) {
        self.endpoint_changes = peer.moves();
        self.handshake_attempts = peer.attempts;
        self.handshakes = peer.handshakes;
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("peer", &self.peer_state()).finish_non_exhaustive()
    }
}
