use super::mss;
use super::table::{Address, Table};
use crate::DropReason;
use crate::checksum::Change;
use crate::packet::{Fragment, Headers, L4Checksum, Version, protocol};

/// One direction through the tunnel, for one family.
#[derive(Clone, Debug)]
pub(super) struct Way<A> {
    pub(super) source: Table<A>,
    pub(super) destination: Table<A>,
    /// Source of ICMP errors whose own may not pass.
    pub(super) icmp_source: Option<A>,
    pub(super) tunnel: Option<Tunnel<A>>,
    pub(super) max_mss: u16,
}

/// The addresses inside the tunnel: of the end that sends in this direction, and of the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tunnel<A> {
    pub(super) from: A,
    pub(super) to: A,
}

/// A translation that may be written: both addresses are allowed.
struct Translation<A> {
    addresses: [A; 2],
    /// Difference that they make to a checksum over them.
    change: Change,
}

impl<A: Address> Way<A> {
    #[inline]
    pub(super) fn translate(
        &self,
        packet: &mut [u8],
        headers: &Headers,
        checksum: L4Checksum,
    ) -> Result<(), DropReason> {
        if headers.source_routed {
            return Err(DropReason::SourceRouted);
        }
        if is_icmp_error(packet, headers) {
            return self.translate_error(packet, headers, checksum);
        }
        let header = packet.get(..A::HEADER).ok_or(DropReason::Malformed)?;
        let addresses = A::read(header);
        let source = self.source.translate(addresses[0]).or_else(|| self.tunnel_source(addresses));
        let new = self.with_source(addresses, source.ok_or(DropReason::SourceNotAllowed)?)?;
        write_transport(packet, headers, checksum, new.change)?;
        write_addresses(packet, &new);
        if headers.protocol == protocol::TCP
            && headers.fragment != Fragment::Later
            && mss::is_syn(packet, headers)
        {
            mss::clamp(packet, headers, checksum, self.max_mss);
        }
        Ok(())
    }

    #[inline]
    fn with_source(
        &self,
        [_, destination]: [A; 2],
        (source, change): (A, Change),
    ) -> Result<Translation<A>, DropReason> {
        let (destination, other) =
            self.destination.translate(destination).ok_or(DropReason::NoDestination)?;
        Ok(Translation { addresses: [source, destination], change: change.and(other) })
    }

    /// The sending end's tunnel address, untranslated, on packets to the other end's alone. Answers of
    /// nodes and pods to it would leave by a default route, in clear.
    #[cold]
    fn tunnel_source(&self, addresses: [A; 2]) -> Option<(A, Change)> {
        self.tunnel.filter(|tunnel| addresses == [tunnel.from, tunnel.to])?;
        Some((addresses[0], Change::NONE))
    }

    /// An ICMP error reports a packet that its receiver sent, so the start of that packet, which is
    /// in the payload, is translated the other way round: its source as the error's destination
    /// would be, and its destination as the error's source.
    #[cold]
    fn translate_error(
        &self,
        packet: &mut [u8],
        headers: &Headers,
        checksum: L4Checksum,
    ) -> Result<(), DropReason> {
        let (outer, inner) =
            packet.split_at_mut_checked(headers.l4_offset + 8).ok_or(DropReason::Malformed)?;
        let addresses = A::read(outer.get(..A::HEADER).ok_or(DropReason::Malformed)?);
        let source = self.source_of_error(addresses).ok_or(DropReason::SourceNotAllowed)?;
        let new = self.with_source(addresses, source)?;
        let inner_change = self.translate_embedded(inner)?;

        let field = headers.l4_offset + 2;
        let old = u16::from_be_bytes([outer[field], outer[field + 1]]);
        let pseudo = match headers.version {
            Version::V4 => Change::NONE,
            Version::V6 => new.change,
        };
        let value = match checksum {
            L4Checksum::Complete => pseudo.and(inner_change).apply(old),
            L4Checksum::Partial => pseudo.apply_partial(old),
        };
        outer[field..field + 2].copy_from_slice(&value.to_be_bytes());
        write_addresses(outer, &new);
        Ok(())
    }

    /// Routers on the way send errors from addresses of their own, which mean nothing to the peer,
    /// and so does this gateway, whose tunnel address nobody behind the peer's can route to. From a
    /// peer that does not replace that one, it passes: no error is ever answered (RFC 1122 section
    /// 3.2.2), and path MTU discovery depends on it.
    fn source_of_error(&self, [source, destination]: [A; 2]) -> Option<(A, Change)> {
        let is_from_end = self.tunnel.is_some_and(|tunnel| tunnel.from == source);
        let is_link_local = is_from_end && self.tunnel.is_some_and(|t| t.to != destination);
        let own = self.source.translate(source);
        let own = own.or_else(|| is_from_end.then_some((source, Change::NONE)));
        match (own, self.icmp_source) {
            (Some(own), None) => Some(own),
            (Some(own), Some(_)) if !is_link_local => Some(own),
            (_, stand_in) => stand_in.map(|new| (new, A::change(source, new))),
        }
    }

    /// Returns what the translation adds to a checksum over the embedded packet, of which there may
    /// be no more than the IP header and 8 bytes.
    fn translate_embedded(&self, packet: &mut [u8]) -> Result<Change, DropReason> {
        let header = packet.get(..A::HEADER).ok_or(DropReason::Malformed)?;
        if header[0] >> 4 != A::VERSION {
            return Err(DropReason::Malformed);
        }
        let refused = DropReason::IcmpPayloadNotAllowed;
        let [source, destination] = A::read(header);
        let (source, one) = self.destination.translate(source).ok_or(refused)?;
        let end = || self.tunnel_source([destination, source]);
        let (destination, other) =
            self.source.translate(destination).or_else(end).ok_or(refused)?;
        let new = Translation { addresses: [source, destination], change: one.and(other) };

        let mut total = new.change;
        if let Some(at) = A::CHECKSUM {
            total = total.and(rewrite(packet, at, |old| new.change.apply(old)));
        }
        // Behind extension headers that were cut off there is no checksum to mend either.
        if let Ok(headers) = Headers::parse_train(packet)
            && let Some(at) = headers.checksum_offset()
        {
            let is_udp = is_udp(headers.protocol);
            total = total.and(rewrite(packet, at, |old| complete(old, new.change, is_udp)));
        }
        A::write(packet, new.addresses);
        Ok(total)
    }
}

/// Writes the new addresses into the IP header and mends its checksum.
#[inline(always)]
fn write_addresses<A: Address>(packet: &mut [u8], new: &Translation<A>) {
    let Some(header) = packet.get_mut(..A::HEADER) else { return };
    A::write(header, new.addresses);
    if let Some(at) = A::CHECKSUM {
        let old = u16::from_be_bytes([header[at], header[at + 1]]);
        header[at..at + 2].copy_from_slice(&new.change.apply(old).to_be_bytes());
    }
}

/// Mends the checksum of the transport header, if it covers the addresses. A first fragment that
/// leaves the checksum to a later one (RFC 1858's tiny fragments) can't be translated.
#[inline(always)]
fn write_transport(
    packet: &mut [u8],
    headers: &Headers,
    checksum: L4Checksum,
    change: Change,
) -> Result<(), DropReason> {
    let Some(at) = headers.checksum_offset() else { return Ok(()) };
    let Some(field) = packet.get_mut(at..at + 2) else { return Err(DropReason::Malformed) };
    let old = u16::from_be_bytes([field[0], field[1]]);
    let value = match checksum {
        L4Checksum::Complete => complete(old, change, is_udp(headers.protocol)),
        L4Checksum::Partial => change.apply_partial(old),
    };
    field.copy_from_slice(&value.to_be_bytes());
    Ok(())
}

/// The new value of a complete checksum. To UDP 0 means that there is none, which stays so (legal
/// over IPv4, and over IPv6 for tunnels: RFC 6935), so a computed 0 is written 0xffff.
#[inline(always)]
fn complete(old: u16, change: Change, is_udp: bool) -> u16 {
    let new = change.apply(old);
    match (is_udp, old, new) {
        (true, 0, _) => 0,
        (true, _, 0) => 0xffff,
        _ => new,
    }
}

#[inline(always)]
fn is_udp(protocol: u8) -> bool {
    protocol == protocol::UDP || protocol == protocol::UDP_LITE
}

/// Replaces the word at `at` and returns what that adds to a checksum over it. A word that was cut
/// off is no change.
fn rewrite(packet: &mut [u8], at: usize, new: impl FnOnce(u16) -> u16) -> Change {
    let Some(field) = packet.get_mut(at..at + 2) else { return Change::NONE };
    let old = u16::from_be_bytes([field[0], field[1]]);
    let new = new(old);
    field.copy_from_slice(&new.to_be_bytes());
    Change::of_word(old, new)
}

/// ICMP: unreachable, source quench, redirect, time exceeded, parameter problem (RFC 792).
/// ICMPv6: every type below 128 (RFC 4443 section 2.1).
#[inline]
fn is_icmp_error(packet: &[u8], headers: &Headers) -> bool {
    let is_icmp = match headers.version {
        Version::V4 => headers.protocol == protocol::ICMP,
        Version::V6 => headers.protocol == protocol::ICMPV6,
    };
    is_icmp
        && headers.fragment != Fragment::Later
        && packet.get(headers.l4_offset).is_some_and(|kind| match headers.version {
            Version::V4 => matches!(kind, 3 | 4 | 5 | 11 | 12),
            Version::V6 => *kind < 128,
        })
}
