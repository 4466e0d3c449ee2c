use std::time::Instant;

use noise::{BATCH, DATA_OVERHEAD, Sealer};

use crate::ecn;
use crate::session::{DATA, Peer};
use crate::{Counters, Datagrams, DropReason, UdpPath, Wire};

/// Longest UDP payload over IPv4, in bytes, and so the longest segmented send (Linux refuses more
/// even over IPv6, where it would fit).
const MAX_TRAIN: usize = 65_507;

/// Datagrams of one send: UDP_MAX_SEGMENTS of kernels before 6.9; later ones take 128, but that
/// many full ones do not fit anyway.
const MAX_DATAGRAMS: usize = 64;

/// Packets are padded to a multiple of this (WireGuard whitepaper section 5.4.6), within the MTU.
const PADDING: usize = 16;

/// The send buffer: datagrams are written one behind the other until one does not fit the train, and
/// encrypted several at once.
///
/// A train's datagrams have one size, except that the last may be shorter, one destination and one
/// traffic class.
pub(crate) struct Outbox {
    buffer: Box<[u8]>,
    len: usize,
    segment_size: usize,
    count: usize,
    /// The datagrams before this are encrypted, those behind it are to be by `sealer`.
    encrypted: usize,
    sealer: Option<Sealer>,
    /// A shorter datagram ended the train.
    is_ended: bool,
    tos: u8,
    path: Option<UdpPath>,
    /// The tunnel's MTU, which bounds the padding.
    pub(crate) mtu: usize,
}

impl Outbox {
    pub(crate) fn new(mtu: usize) -> Self {
        Self {
            buffer: vec![0; MAX_TRAIN].into(),
            len: 0,
            segment_size: 0,
            count: 0,
            encrypted: 0,
            sealer: None,
            is_ended: false,
            tos: 0,
            path: None,
            mtu,
        }
    }

    /// Puts `packet`, a whole IP packet, behind what is there already; sends that first if the
    /// packet does not belong to its train. Without a session the packet waits for one.
    pub(crate) fn push<W: Wire>(&mut self, packet: &[u8], peer: &mut Peer, port: &mut Port<'_, W>) {
        let Some(path) = peer.path() else {
            return port.drop_outbound(DropReason::NoSession, 1);
        };
        let size = packet.len().max(packet.len().next_multiple_of(PADDING).min(self.mtu));
        if size + DATA_OVERHEAD > MAX_TRAIN {
            return port.drop_outbound(DropReason::Oversized, 1);
        }
        if !peer.can_seal(port.now) {
            if !peer.wait(packet, port.now) {
                port.drop_outbound(DropReason::NoSession, 1);
            }
            return;
        }
        // The outer ECN field is a copy of the inner one (RFC 6040 section 4.1, normal mode).
        self.make_room(size + DATA_OVERHEAD, ecn::of(packet), path, port);
        let room = &mut self.buffer[self.len..];
        let Some((length, sealer)) = peer.prepare((packet, size), room, port.now) else {
            return port.drop_outbound(DropReason::NoSession, 1);
        };
        if !self.sealer.as_ref().is_some_and(|current| current.is_same(sealer)) {
            self.encrypt();
            self.sealer = Some(sealer.clone());
        }
        self.append(length);
        if self.len - self.encrypted >= BATCH * self.segment_size {
            self.encrypt();
        }
        port.counters.tx_packets += 1;
        port.counters.tx_bytes += packet.len() as u64;
    }

    /// Sends what is there.
    pub(crate) fn flush<W: Wire>(&mut self, port: &mut Port<'_, W>) {
        self.encrypt();
        if let (Some(path), 1..) = (self.path, self.count) {
            let train = Datagrams {
                path,
                bytes: &self.buffer[..self.len],
                segment_size: self.segment_size,
                tos: self.tos,
            };
            port.send(train, self.count);
        }
        self.len = 0;
        self.count = 0;
        self.encrypted = 0;
        self.is_ended = false;
    }

    /// Encrypts what is not yet.
    fn encrypt(&mut self) {
        if let Some(sealer) = self.sealer.take()
            && self.encrypted < self.len
        {
            sealer.encrypt(&mut self.buffer[self.encrypted..self.len], self.segment_size);
        }
        self.encrypted = self.len;
    }

    /// Sends the train if a datagram of `size` bytes cannot become part of it.
    #[inline]
    fn make_room<W: Wire>(&mut self, size: usize, tos: u8, path: UdpPath, port: &mut Port<'_, W>) {
        let fits = size <= self.segment_size
            && !self.is_ended
            && self.count < MAX_DATAGRAMS
            && self.len + size <= MAX_TRAIN
            && self.tos == tos
            && self.path == Some(path);
        if self.count > 0 && !fits {
            self.flush(port);
        }
        self.tos = tos;
        self.path = Some(path);
    }

    #[inline]
    fn append(&mut self, size: usize) {
        if self.count == 0 {
            self.segment_size = size;
        }
        self.is_ended = size < self.segment_size;
        self.len += size;
        self.count += 1;
    }
}

/// The wire, and the counters of what becomes of things there.
pub(crate) struct Port<'a, W> {
    pub(crate) wire: &'a mut W,
    pub(crate) counters: &'a mut Counters,
    pub(crate) now: Instant,
}

/// TOS of handshake messages: DSCP AF41, as Linux's WireGuard has it (HANDSHAKE_DSCP).
const HANDSHAKE_TOS: u8 = 0x88;

impl<W: Wire> Port<'_, W> {
    /// Sends a message that carries no packet.
    pub(crate) fn send_message(&mut self, path: UdpPath, bytes: &[u8]) {
        let tos = if bytes.first() == Some(&DATA) { 0 } else { HANDSHAKE_TOS };
        self.send(Datagrams { path, bytes, segment_size: bytes.len(), tos }, 1);
    }

    pub(crate) fn send(&mut self, train: Datagrams<'_>, count: usize) {
        if count > 1 {
            self.counters.trains_sent += 1;
        }
        if let Err(reason) = self.wire.send(train) {
            self.drop_outbound(reason, count);
        }
    }

    pub(crate) fn drop_outbound(&mut self, reason: DropReason, packets: usize) {
        self.counters.dropped_outbound[reason.index()] += packets as u64;
    }

    pub(crate) fn drop_inbound(&mut self, reason: DropReason, packets: usize) {
        self.counters.dropped_inbound[reason.index()] += packets as u64;
    }
}
