//! A train from the TUN becomes segments, in the very buffer it was read into.
//!
//! Every segment's headers are written over the end of the payload before it, so each segment must
//! have been used up when the next is made. What Linux does to the same train in software is the
//! model: `tcp_gso_segment`, `__udp_gso_segment`, `inet_gso_segment`.

use crate::checksum::{fold, pseudo_header, sum};
use crate::packet::{Gso, Headers, Malformed, Offload, Version};

/// Longest headers of a train, in bytes: IPv6, 120 bytes of extension headers and the longest TCP
/// header, or less.
const MAX_HEADERS: usize = 220;

const TCP_FIN: u8 = 0x01;
const TCP_PSH: u8 = 0x08;
const TCP_CWR: u8 = 0x80;

/// Cuts `train`, whose headers and `offload` were checked against each other
/// ([`Offload::check`]), and hands each segment to `each`, complete checksums and all.
pub(crate) fn split(
    train: &mut [u8],
    headers: &Headers,
    offload: &Offload,
    mut each: impl FnMut(&[u8]),
) -> Result<(), Malformed> {
    let template = Template::new(train, headers, offload)?;
    let size = usize::from(offload.gso_size);
    let payload = train.len() - template.len;
    let count = payload.div_ceil(size).max(1);
    for index in 0..count {
        let start = index * size;
        let end = template.len + payload.min(start + size);
        let segment = &mut train[start..end];
        template.write(segment, index, start, index + 1 == count);
        each(segment);
    }
    Ok(())
}

/// The headers of all segments, with what differs between them set to 0, and the sums of that.
struct Template {
    bytes: [u8; MAX_HEADERS],
    /// Bytes of headers.
    len: usize,
    l4: usize,
    version: Version,
    is_tcp: bool,
    /// IPv4 identification, TCP sequence number and flags of the first segment.
    id: u16,
    sequence: u32,
    flags: u8,
    ip_sum: u64,
    /// Sum of the transport header and of the addresses and protocol before it.
    l4_sum: u64,
}

impl Template {
    fn new(train: &[u8], headers: &Headers, offload: &Offload) -> Result<Self, Malformed> {
        let len = headers.payload_offset(train).ok_or(Malformed::Truncated)?;
        let l4 = headers.l4_offset;
        let mut bytes = [0; MAX_HEADERS];
        bytes.get_mut(..len).ok_or(Malformed::HeaderLength)?.copy_from_slice(&train[..len]);
        let mut template = Self {
            len,
            l4,
            version: headers.version,
            is_tcp: offload.gso != Gso::UdpL4,
            id: u16::from_be_bytes([bytes[4], bytes[5]]),
            sequence: 0,
            flags: 0,
            ip_sum: 0,
            l4_sum: 0,
            bytes,
        };
        template.clear(headers);
        Ok(template)
    }

    fn clear(&mut self, headers: &Headers) {
        let (ip, l4) = self.bytes.split_at_mut(self.l4);
        match self.version {
            Version::V4 => {
                ip[2..6].fill(0);
                ip[10..12].fill(0);
            }
            Version::V6 => ip[4..6].fill(0),
        }
        if self.is_tcp {
            self.sequence = u32::from_be_bytes([l4[4], l4[5], l4[6], l4[7]]);
            self.flags = l4[13];
            l4[4..8].fill(0);
            l4[13] = 0;
            l4[16..18].fill(0);
        } else {
            l4[4..8].fill(0);
        }
        self.ip_sum = sum(ip);
        self.l4_sum = sum(&l4[..self.len - self.l4])
            + pseudo_header(&ip[headers.addresses()], headers.protocol, 0);
    }

    /// Makes `segment`, whose payload is in place, a packet: the `index`th of its train, `start`
    /// bytes of payload after the first.
    #[inline]
    fn write(&self, segment: &mut [u8], index: usize, start: usize, is_last: bool) {
        let total = segment.len();
        let l4_len = total - self.l4;
        let (header, payload) = segment.split_at_mut(self.len);
        header.copy_from_slice(&self.bytes[..self.len]);
        let (ip, l4) = header.split_at_mut(self.l4);
        match self.version {
            Version::V4 => {
                let (total, id) = (total as u16, self.id.wrapping_add(index as u16));
                ip[2..4].copy_from_slice(&total.to_be_bytes());
                ip[4..6].copy_from_slice(&id.to_be_bytes());
                let sum = self.ip_sum + u64::from(total) + u64::from(id);
                ip[10..12].copy_from_slice(&(!fold(sum)).to_be_bytes());
            }
            Version::V6 => ip[4..6].copy_from_slice(&((total - 40) as u16).to_be_bytes()),
        }
        let sum = self.l4_sum + l4_len as u64 + sum(payload);
        if self.is_tcp {
            let sequence = self.sequence.wrapping_add(start as u32);
            let flags = self.flags_of(index, is_last);
            l4[4..8].copy_from_slice(&sequence.to_be_bytes());
            l4[13] = flags;
            let sum = sum + u64::from(sequence) + u64::from(flags);
            l4[16..18].copy_from_slice(&(!fold(sum)).to_be_bytes());
        } else {
            l4[4..6].copy_from_slice(&(l4_len as u16).to_be_bytes());
            let checksum = match !fold(sum + l4_len as u64) {
                0 => 0xffff,
                checksum => checksum,
            };
            l4[6..8].copy_from_slice(&checksum.to_be_bytes());
        }
    }

    /// FIN and PSH belong to the last segment, CWR to the first (RFC 3168 section 6.1.2).
    fn flags_of(&self, index: usize, is_last: bool) -> u8 {
        let mut flags = self.flags;
        if !is_last {
            flags &= !(TCP_FIN | TCP_PSH);
        }
        if index > 0 {
            flags &= !TCP_CWR;
        }
        flags
    }
}
