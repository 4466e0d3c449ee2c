use std::net::SocketAddr;
use std::time::{Duration, Instant};

use fabric_primitives::PublicKey;

/// Shortest time between two records of one kind, which bounds the cost of a flood.
const RECORD_INTERVAL: Duration = Duration::from_millis(250);

/// The newest initiation that the keys in use do not account for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectedInitiation {
    /// Source address and UDP port, which anybody can forge.
    pub from: SocketAddr,
    pub at: Instant,
    /// Time of the record before this one, if there was one.
    pub previous: Option<Instant>,
    /// The initiator's static key; `None` if the initiation is for another responder's key.
    pub key: Option<PublicKey>,
}

/// Initiations that were rejected because of their keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rejections {
    /// The initiator knows our public key, and we do not know its own.
    pub unknown_key: Option<RejectedInitiation>,
    /// The initiator takes another public key for ours (`mac1` does not fit).
    pub wrong_responder: Option<RejectedInitiation>,
}

impl Rejections {
    /// Records an initiation whose `mac1` fits none of our keys.
    pub(super) fn record_wrong_responder(&mut self, from: SocketAddr, now: Instant) {
        record(&mut self.wrong_responder, (from, None), now);
    }

    /// Records an initiation of a stranger, who claims to have that static key.
    pub(super) fn record_unknown_key(
        &mut self,
        from: SocketAddr,
        key: Option<PublicKey>,
        now: Instant,
    ) {
        record(&mut self.unknown_key, (from, key), now);
    }
}

fn record(
    last: &mut Option<RejectedInitiation>,
    (from, key): (SocketAddr, Option<PublicKey>),
    now: Instant,
) {
    let previous = last.map(|last| last.at);
    if previous.is_none_or(|at| now.saturating_duration_since(at) >= RECORD_INTERVAL) {
        *last = Some(RejectedInitiation { from, at: now, previous, key });
    }
}
