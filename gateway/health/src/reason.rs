//! Reasons of faults.

/// Names of the causes, as they stand in statuses and conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    NameNotResolved,
    EndpointIsOwn,
    EndpointUnanswered,
    PeeringRemoved,
    PeerTakenDown,
    PeerKeyShared,
    KeyShared,
    UnknownKey,
    WrongResponder,
    SupersededKeys,
    SendRefused,
    NoHandshake,
    NoAnswer,
    NoProbeAnswer,
    NotReceived,
    ProbeLoss,
    CidrMismatch,
    PeerCidrMismatch,
    IdMismatch,
    PeerIdMismatch,
    TooSmallForIpv6,
    PeerTooSmallForIpv6,
    PeerNodesUnreachable,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 23] = [
        Self::NameNotResolved,
        Self::EndpointIsOwn,
        Self::EndpointUnanswered,
        Self::PeeringRemoved,
        Self::PeerTakenDown,
        Self::PeerKeyShared,
        Self::KeyShared,
        Self::UnknownKey,
        Self::WrongResponder,
        Self::SupersededKeys,
        Self::SendRefused,
        Self::NoHandshake,
        Self::NoAnswer,
        Self::NoProbeAnswer,
        Self::NotReceived,
        Self::ProbeLoss,
        Self::CidrMismatch,
        Self::PeerCidrMismatch,
        Self::IdMismatch,
        Self::PeerIdMismatch,
        Self::TooSmallForIpv6,
        Self::PeerTooSmallForIpv6,
        Self::PeerNodesUnreachable,
    ];

    /// Returns the name as it stands in statuses.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NameNotResolved => "NameNotResolved",
            Self::EndpointIsOwn => "EndpointIsOwn",
            Self::EndpointUnanswered => "EndpointUnanswered",
            Self::PeeringRemoved => "PeeringRemoved",
            Self::PeerTakenDown => "PeerTakenDown",
            Self::PeerKeyShared => "PeerKeyShared",
            Self::KeyShared => "KeyShared",
            Self::UnknownKey => "UnknownKey",
            Self::WrongResponder => "WrongResponder",
            Self::SupersededKeys => "SupersededKeys",
            Self::SendRefused => "SendRefused",
            Self::NoHandshake => "NoHandshake",
            Self::NoAnswer => "NoAnswer",
            Self::NoProbeAnswer => "NoProbeAnswer",
            Self::NotReceived => "NotReceived",
            Self::ProbeLoss => "ProbeLoss",
            Self::CidrMismatch => "CidrMismatch",
            Self::PeerCidrMismatch => "PeerCidrMismatch",
            Self::IdMismatch => "IdMismatch",
            Self::PeerIdMismatch => "PeerIdMismatch",
            Self::TooSmallForIpv6 => "TooSmallForIpv6",
            Self::PeerTooSmallForIpv6 => "PeerTooSmallForIpv6",
            Self::PeerNodesUnreachable => "PeerNodesUnreachable",
        }
    }
}
