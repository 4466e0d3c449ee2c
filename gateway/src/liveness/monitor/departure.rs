//! Announcement of this gateway's end to the peer.

use std::time::{Duration, Instant};

use fabric_api::fabric::Role;
use jiff::Timestamp;
use reachability::probe::{Departure, WeftField};
use tokio::time::sleep;

use super::Peering;

/// Checks for the announcement having been sent, and the time between two of them.
const LOOKS: u32 = 20;
const LOOK: Duration = Duration::from_millis(2);

impl Peering {
    /// Announces the end of this gateway to the peer, and waits until the lane has sent that. A peer
    /// that is not probed may be no weft, and is sent nothing that it would not understand. A server
    /// has no use for a restart of its client, which would make it send to the one that ends.
    pub(super) async fn announce_end(&mut self, departure: Departure) {
        let is_final = matches!(departure, Departure::Removed | Departure::TakenDown);
        let matters = is_final || self.desired().role == Role::Server;
        let is_received = self.changes.borrow().has_session && matters;
        if !is_received || self.desired().probe_interval().is_zero() {
            return;
        }
        let before = self.running.lane.snapshot().counters.tx_packets;
        let field = WeftField::leaving(departure);
        let ping = self.pending.ping(Timestamp::now(), Instant::now(), field);
        // One of them may be lost.
        (0..2).for_each(|_| self.socket.send(&ping.encode(), self.peer_socket()));
        for _ in 0..LOOKS {
            sleep(LOOK).await;
            if self.running.lane.snapshot().counters.tx_packets >= before + 2 {
                return;
            }
        }
    }
}
