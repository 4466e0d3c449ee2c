use std::time::Instant;

use crate::UdpPath;

/// Responses to authentic initiations of the peer, none of which the peer has confirmed: it initiates again
/// and again, because they do not arrive there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unconfirmed {
    /// The peer's address, and that of this host which it initiates to.
    pub path: UdpPath,
    pub responses: u32,
    pub last: Instant,
}
