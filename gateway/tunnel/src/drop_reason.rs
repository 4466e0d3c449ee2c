use crate::packet::Malformed;

/// Why a packet or datagram was not passed on.
///
/// The names of [`DropReason::as_str`] are label values of a metric, so they never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DropReason {
    /// Not a whole IP packet, or headers that contradict each other.
    Malformed,
    /// The source lies outside what the sending side may use.
    SourceNotAllowed,
    /// The destination is neither ours nor the peer's.
    NoDestination,
    /// An ICMP error about a packet that did not come through this tunnel.
    IcmpPayloadNotAllowed,
    /// An IPv4 source route or an IPv6 routing header with segments left: the destination that was
    /// checked would not be the one the packet ends at.
    SourceRouted,
    /// Longer than the buffers, or than the tunnel's MTU allows.
    Oversized,
    /// The authentication tag did not fit.
    DecryptFailed,
    /// The counter was seen before, or is older than the window.
    Replay,
    /// There is no session, and too much is waiting for one already.
    NoSession,
    /// A handshake message that is not the peer's, or that came too often.
    HandshakeRejected,
    /// Congestion was marked on the way, and the packet's ends do not understand such marks
    /// (RFC 6040 section 4.2).
    CongestionUnmarkable,
    /// The tunnel device had no room.
    TunFull,
    /// The tunnel device refused the packet for another reason: it is down, or is being deleted.
    TunError,
    /// The UDP socket's send buffer was full, and so was the queue before it.
    SocketFull,
    /// The kernel had no memory for the datagram, or the device's queue no room (ENOBUFS, ENOMEM).
    SendNoBuffers,
    /// There is no route, address or device to send with (ENETUNREACH, EHOSTUNREACH and others).
    SendUnreachable,
    /// A firewall rule of this host forbids the datagram (EPERM, EACCES).
    SendNotPermitted,
    /// The datagram is longer than the device or the path takes (EMSGSIZE).
    SendTooLong,
    /// The kernel refused the datagram for another reason.
    SendError,
    /// Dropped on purpose before the receive buffer overflows, to slow TCP senders down.
    EarlyDrop,
}

impl DropReason {
    /// Every reason, in the order of [`DropReason::index`].
    pub const ALL: [Self; 20] = [
        Self::Malformed,
        Self::SourceNotAllowed,
        Self::NoDestination,
        Self::IcmpPayloadNotAllowed,
        Self::SourceRouted,
        Self::Oversized,
        Self::DecryptFailed,
        Self::Replay,
        Self::NoSession,
        Self::HandshakeRejected,
        Self::CongestionUnmarkable,
        Self::TunFull,
        Self::TunError,
        Self::SocketFull,
        Self::SendNoBuffers,
        Self::SendUnreachable,
        Self::SendNotPermitted,
        Self::SendTooLong,
        Self::SendError,
        Self::EarlyDrop,
    ];

    /// Number of reasons: the length of an array of counters.
    pub const COUNT: usize = Self::ALL.len();

    /// Position in an array of [`DropReason::COUNT`] counters.
    pub const fn index(self) -> usize {
        self as usize
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::SourceNotAllowed => "source_not_allowed",
            Self::NoDestination => "no_destination",
            Self::IcmpPayloadNotAllowed => "icmp_payload_not_allowed",
            Self::SourceRouted => "source_routed",
            Self::Oversized => "oversized",
            Self::DecryptFailed => "decrypt_failed",
            Self::Replay => "replay",
            Self::NoSession => "no_session",
            Self::HandshakeRejected => "handshake_rejected",
            Self::CongestionUnmarkable => "congestion_unmarkable",
            Self::TunFull => "tun_full",
            Self::TunError => "tun_error",
            Self::SocketFull => "socket_full",
            Self::SendNoBuffers => "send_no_buffers",
            Self::SendUnreachable => "send_unreachable",
            Self::SendNotPermitted => "send_not_permitted",
            Self::SendTooLong => "send_too_long",
            Self::SendError => "send_error",
            Self::EarlyDrop => "early_drop",
        }
    }
}

impl From<Malformed> for DropReason {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_reason_has_its_own_index_and_name() {
        for (i, reason) in DropReason::ALL.into_iter().enumerate() {
            assert_eq!(reason.index(), i);
        }
        let names: BTreeSet<_> = DropReason::ALL.into_iter().map(DropReason::as_str).collect();
        assert_eq!(names.len(), DropReason::COUNT);
        assert!(names.iter().all(|n| n.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')));
    }
}
