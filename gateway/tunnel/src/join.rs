//! Opened packets become one write to the TUN: segments of one TCP flow, and datagrams of one UDP flow,
//! are put together again by the rules of Linux' own GRO (`tcp_gro_receive`, `udp_gro_receive`,
//! `inet_gro_receive`, `ipv6_gro_receive`).
//!
//! A packet is copied to where its payload has to be if it carries on the last train: its headers
//! then lie over the end of that train's payload, which is saved before and put back after. It is
//! copied once as long as segments come in order, as nearly all do.

mod segment;

use self::segment::{MAX_HEADERS, Segment, Transport};
use crate::checksum;
use crate::packet::{Gso, Offload, Version};

const VIRTIO: usize = Offload::LEN;

/// Longest IP packet in bytes, and so the longest train.
const MAX_PACKET: usize = 65_535;

/// Flows that are put together at the same time. Senders' trains arrive whole, so few mix inside
/// one turn; each slot is 64 KiB.
const SLOTS: usize = 4;

/// TCP and UDP over IPv4 or IPv6, put together again.
pub(crate) struct Joiner {
    /// The TUN takes trains of UDP datagrams.
    joins_udp: bool,
    slots: [Slot; SLOTS],
    /// For a packet that goes alone while the slot it was copied to is in use.
    scratch: Box<[u8]>,
    /// The slot that the next packet is copied to.
    guess: usize,
    /// The place in it, and the bytes that lay under the headers there.
    at: usize,
    saved: [u8; MAX_HEADERS],
    saved_len: usize,
    /// Counts trains, so that the oldest can make place.
    started: u64,
}

/// Destination of finished frames.
pub(crate) trait Sink {
    /// `frame` is a virtio header, described by `offload`, and a packet or a train of `packets`
    /// segments.
    fn deliver(&mut self, frame: &mut [u8], offload: &Offload, packets: usize);
}

struct Slot {
    /// A virtio header's room, then the packet.
    buffer: Box<[u8]>,
    /// The train's headers, where no other packet is opened over them.
    headers: [u8; MAX_HEADERS],
    train: Option<Train>,
}

/// A train that can still grow.
#[derive(Clone, Copy)]
struct Train {
    first: Segment,
    /// Bytes from the IP header on.
    len: usize,
    packets: usize,
    next_sequence: u32,
    /// FIN and PSH of the last segment.
    last_flags: u8,
    started: u64,
}

impl Joiner {
    pub(crate) fn new() -> Self {
        let buffer = || vec![0; VIRTIO + MAX_PACKET + 1].into_boxed_slice();
        Self {
            joins_udp: false,
            slots: [(); SLOTS].map(|()| Slot {
                buffer: buffer(),
                headers: [0; MAX_HEADERS],
                train: None,
            }),
            scratch: buffer(),
            guess: 0,
            at: VIRTIO,
            saved: [0; MAX_HEADERS],
            saved_len: 0,
            started: 0,
        }
    }

    pub(crate) fn set_joins_udp(&mut self, joins_udp: bool) {
        self.joins_udp = joins_udp;
    }

    /// Takes a packet of at most [`MAX_PACKET`] bytes.
    #[inline]
    pub(crate) fn push(&mut self, packet: &[u8], sink: &mut impl Sink) {
        self.target(packet.len(), sink)[..packet.len()].copy_from_slice(packet);
        self.accept(packet.len(), sink);
    }

    /// Returns the room for a packet of at most `room` bytes.
    #[inline]
    fn target(&mut self, room: usize, sink: &mut impl Sink) -> &mut [u8] {
        let slot = &mut self.slots[self.guess];
        if slot.train.is_some_and(|train| train.len + room > MAX_PACKET) {
            slot.flush(sink);
        }
        match &slot.train {
            Some(train) => {
                self.saved_len = train.first.headers;
                self.at = VIRTIO + train.len - train.first.headers;
                let under = &slot.buffer[self.at..self.at + self.saved_len];
                self.saved[..self.saved_len].copy_from_slice(under);
            }
            None => {
                self.saved_len = 0;
                self.at = VIRTIO;
            }
        }
        &mut slot.buffer[self.at..]
    }

    /// Puts back what lay under the packet's headers.
    fn discard(&mut self) {
        let under = &mut self.slots[self.guess].buffer[self.at..self.at + self.saved_len];
        under.copy_from_slice(&self.saved[..self.saved_len]);
    }

    /// Takes the packet of `len` bytes in the room for it.
    #[inline]
    fn accept(&mut self, len: usize, sink: &mut impl Sink) {
        let packet = &self.slots[self.guess].buffer[self.at..self.at + len];
        let segment = match Segment::parse(packet) {
            Some(segment) if segment.transport == Transport::Tcp || self.joins_udp => segment,
            Some(_) | None => return self.pass_alone(len, sink),
        };
        match self.slot_of(len, &segment) {
            Some(index) if index == self.guess && self.extends(index, len, &segment) => {
                self.discard();
                self.slots[index].grow(len, &segment, sink);
            }
            Some(index) if index != self.guess && self.extends(index, len, &segment) => {
                self.copy_payload(index, len, &segment);
                self.discard();
                self.slots[index].grow(len, &segment, sink);
                self.guess = index;
            }
            Some(index) => self.begin_anew(index, len, segment, sink),
            None => {
                let index = self.free_slot(sink);
                self.begin_anew(index, len, segment, sink);
            }
        }
    }

    /// Hands over everything, oldest first.
    pub(crate) fn flush(&mut self, sink: &mut impl Sink) {
        while let Some(index) = self.oldest() {
            self.slots[index].flush(sink);
        }
    }

    fn oldest(&self) -> Option<usize> {
        let age = |index: &usize| self.slots[*index].train.map_or(u64::MAX, |train| train.started);
        (0..SLOTS).filter(|&index| self.slots[index].train.is_some()).min_by_key(age)
    }

    /// The slot that holds a train of the opened packet's flow.
    #[inline]
    fn slot_of(&self, len: usize, segment: &Segment) -> Option<usize> {
        let packet = &self.slots[self.guess].buffer[self.at..self.at + len];
        let holds = |&index: &usize| {
            let slot = &self.slots[index];
            slot.train.is_some_and(|train| {
                train.first.version == segment.version
                    && train.first.transport == segment.transport
                    && slot.headers[segment.flow()] == packet[segment.flow()]
            })
        };
        std::iter::once(self.guess).chain((0..SLOTS).filter(|&i| i != self.guess)).find(holds)
    }

    /// Returns whether the opened packet, of the flow of slot `index`, carries on its train.
    #[inline]
    fn extends(&mut self, index: usize, len: usize, segment: &Segment) -> bool {
        let Some(train) = self.slots[index].train else { return false };
        let packet = &self.slots[self.guess].buffer[self.at..self.at + len];
        let header = &self.slots[index].headers;
        let fits = segment.is_at(train.next_sequence)
            && segment.may_follow(train.packets)
            && len - segment.headers <= train.first.payload()
            && train.len + len - segment.headers <= MAX_PACKET
            && segment.is_like(packet, &train.first, header, train.packets)
            && segment.has_valid_checksum(packet);
        if !fits || train.packets > 1 {
            return fits;
        }
        // A train's checksum is made anew, so that of its first packet has to be right as well.
        self.is_first_valid(index, &train)
    }

    fn is_first_valid(&mut self, index: usize, train: &Train) -> bool {
        if index != self.guess {
            return train
                .first
                .has_valid_checksum(&self.slots[index].buffer[VIRTIO..][..train.len]);
        }
        self.swap_saved();
        let first = &self.slots[index].buffer[VIRTIO..][..train.len];
        let is_valid = train.first.has_valid_checksum(first);
        self.swap_saved();
        is_valid
    }

    /// Exchanges the opened packet's headers and what lay under them.
    fn swap_saved(&mut self) {
        let under = &mut self.slots[self.guess].buffer[self.at..self.at + self.saved_len];
        under.swap_with_slice(&mut self.saved[..self.saved_len]);
    }

    /// Copies the opened packet's payload behind the train of another slot.
    fn copy_payload(&mut self, index: usize, len: usize, segment: &Segment) {
        let (from, end) = (self.at + segment.headers, self.at + len);
        let to = VIRTIO + self.slots[index].train.map_or(0, |train| train.len);
        if let Ok([to_slot, from_slot]) = self.slots.get_disjoint_mut([index, self.guess]) {
            to_slot.buffer[to..to + end - from].copy_from_slice(&from_slot.buffer[from..end]);
        }
    }

    /// Begins a train in slot `index` with the opened packet, after what is there has gone.
    fn begin_anew(&mut self, index: usize, len: usize, segment: Segment, sink: &mut impl Sink) {
        let (from, to) = (self.at..self.at + len, VIRTIO..VIRTIO + len);
        if let Ok([slot, guessed]) = self.slots.get_disjoint_mut([index, self.guess]) {
            slot.flush(sink);
            slot.buffer[to].copy_from_slice(&guessed.buffer[from]);
            self.discard();
        } else if self.saved_len > 0 {
            self.scratch[..len].copy_from_slice(&self.slots[index].buffer[from]);
            self.discard();
            self.slots[index].flush(sink);
            self.slots[index].buffer[to].copy_from_slice(&self.scratch[..len]);
        }
        self.guess = index;
        self.started += 1;
        let slot = &mut self.slots[index];
        slot.headers[..segment.headers]
            .copy_from_slice(&slot.buffer[VIRTIO..VIRTIO + segment.headers]);
        slot.train = Some(Train {
            first: segment,
            len,
            packets: 1,
            next_sequence: segment.next_sequence(),
            last_flags: 0,
            started: self.started,
        });
        if segment.ends_train() {
            slot.flush(sink);
        }
    }

    fn free_slot(&mut self, sink: &mut impl Sink) -> usize {
        if self.slots[self.guess].train.is_none() {
            return self.guess;
        }
        if let Some(index) = self.slots.iter().position(|slot| slot.train.is_none()) {
            return index;
        }
        let oldest = self.oldest().unwrap_or(0);
        if oldest == self.guess {
            // The opened packet lies behind that train: begin_anew copies it away first.
            return oldest;
        }
        self.slots[oldest].flush(sink);
        oldest
    }

    /// Hands over the opened packet as it is, after everything it must not overtake.
    fn pass_alone(&mut self, len: usize, sink: &mut impl Sink) {
        let at = self.at;
        if self.slots[self.guess].train.is_none() {
            self.flush_before(at, len, sink);
            let frame = &mut self.slots[self.guess].buffer[..at + len];
            return sink.deliver(frame, &Offload::NONE, 1);
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch[VIRTIO..VIRTIO + len].copy_from_slice(&self.slots[self.guess].buffer[at..at + len]);
        self.discard();
        for index in 0..SLOTS {
            if self.slots[index].may_precede(&scratch[VIRTIO..VIRTIO + len]) {
                self.slots[index].flush(sink);
            }
        }
        sink.deliver(&mut scratch[..VIRTIO + len], &Offload::NONE, 1);
        self.scratch = scratch;
    }

    /// Flushes the slots whose trains the packet in the guessed slot, which is empty, must follow.
    fn flush_before(&mut self, at: usize, len: usize, sink: &mut impl Sink) {
        for index in (0..SLOTS).filter(|&index| index != self.guess) {
            if let Ok([slot, guessed]) = self.slots.get_disjoint_mut([index, self.guess])
                && slot.may_precede(&guessed.buffer[at..at + len])
            {
                slot.flush(sink);
            }
        }
    }
}

impl Slot {
    /// The train takes in a segment whose payload is in place behind it.
    #[inline]
    fn grow(&mut self, len: usize, segment: &Segment, sink: &mut impl Sink) {
        let Some(train) = &mut self.train else { return };
        let payload = len - segment.headers;
        train.len += payload;
        train.packets += 1;
        train.next_sequence = segment.next_sequence();
        train.last_flags = segment.end_flags();
        if segment.ends_train() || payload < train.first.payload() {
            self.flush(sink);
        }
    }

    /// Returns whether `packet`, which cannot be joined, may be of the same flow as the train here.
    fn may_precede(&self, packet: &[u8]) -> bool {
        self.train.is_some_and(|train| train.first.may_share_flow(&self.headers, packet))
    }

    fn flush(&mut self, sink: &mut impl Sink) {
        let Some(train) = self.train.take() else { return };
        let frame = &mut self.buffer[..VIRTIO + train.len];
        if train.packets == 1 {
            return sink.deliver(frame, &Offload::NONE, 1);
        }
        let offload = train.finish(&mut frame[VIRTIO..]);
        sink.deliver(frame, &offload, train.packets);
    }
}

impl Train {
    /// Makes the first packet's headers those of the train.
    fn finish(&self, packet: &mut [u8]) -> Offload {
        let Segment { l4, version, transport, headers, .. } = self.first;
        let l4_len = packet.len() - l4;
        let addresses = match version {
            Version::V4 => {
                let total = packet.len() as u16;
                packet[2..4].copy_from_slice(&total.to_be_bytes());
                packet[10..12].fill(0);
                let sum = !checksum::fold(checksum::sum(&packet[..l4]));
                packet[10..12].copy_from_slice(&sum.to_be_bytes());
                12..20
            }
            Version::V6 => {
                packet[4..6].copy_from_slice(&(l4_len as u16).to_be_bytes());
                8..40
            }
        };
        match transport {
            Transport::Tcp => packet[l4 + 13] |= self.last_flags,
            Transport::Udp => {
                packet[l4 + 4..l4 + 6].copy_from_slice(&(l4_len as u16).to_be_bytes())
            }
        }
        let checksum = transport.checksum_offset();
        let partial = checksum::pseudo_header(&packet[addresses], transport.protocol(), l4_len);
        packet[l4 + checksum..l4 + checksum + 2]
            .copy_from_slice(&checksum::fold(partial).to_be_bytes());
        Offload {
            needs_checksum: true,
            gso: match (transport, version) {
                (Transport::Tcp, Version::V4) => Gso::TcpV4,
                (Transport::Tcp, Version::V6) => Gso::TcpV6,
                (Transport::Udp, _) => Gso::UdpL4,
            },
            header_len: headers as u16,
            gso_size: self.first.payload() as u16,
            checksum_start: l4 as u16,
            checksum_offset: checksum as u16,
            ..Offload::NONE
        }
    }
}
