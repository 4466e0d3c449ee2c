use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::UdpPath;

/// First time between two initiations, and the longest: a peer behind a NAT may answer each from another endpoint.
const FIRST_WAIT: Duration = Duration::from_secs(5);
const LONGEST_WAIT: Duration = Duration::from_secs(600);
const HURRY: Duration = Duration::from_secs(1);

/// The configured endpoint, as long as no packet has come from it.
///
/// The peer's packets may keep the session elsewhere: nothing else would be sent there then.
#[derive(Default)]
pub(super) struct Unproven(Option<Try>);

#[derive(Clone, Copy)]
struct Try {
    endpoint: SocketAddr,
    due: Instant,
    wait: Duration,
}

impl Unproven {
    pub(super) fn configure(&mut self, endpoint: SocketAddr, now: Instant) {
        self.0 = Some(Try { endpoint, due: now + FIRST_WAIT, wait: FIRST_WAIT });
    }

    /// The peer has begun a session, and perhaps moved before: what was tried in vain is tried again.
    #[cold]
    pub(super) fn hurry(&mut self, now: Instant) {
        if let Some(of) = self.0.as_mut().filter(|of| of.wait > FIRST_WAIT) {
            (of.due, of.wait) = (of.due.min(now + HURRY), FIRST_WAIT);
        }
    }

    pub(super) fn endpoint(&self) -> Option<SocketAddr> {
        self.0.map(|of| of.endpoint)
    }

    /// Notes the source of an authentic packet.
    #[inline]
    pub(super) fn note(&mut self, from: UdpPath) {
        self.0 = self.0.filter(|of| !from.leads_to(of.endpoint));
    }

    /// Returns the endpoint if an initiation is due to it beside a session at `path`.
    pub(super) fn take(&mut self, path: UdpPath, now: Instant) -> Option<UdpPath> {
        let of = self.0.as_mut().filter(|of| now >= of.due && !path.leads_to(of.endpoint))?;
        of.wait = LONGEST_WAIT.min(of.wait * 2);
        of.due = now + of.wait;
        Some(of.endpoint.into())
    }

    /// Deadline of the next [`Self::take`].
    pub(super) fn deadline(&self, path: UdpPath) -> Option<Instant> {
        self.0.filter(|of| !path.leads_to(of.endpoint)).map(|of| of.due)
    }
}
