use std::time::{Duration, Instant};

use super::REJECT_AFTER_TIME;
use crate::UdpPath;

/// Time for which a gateway that follows another one initiates to such sources: that of the earlier keys. An idle
/// peer sends a keepalive every 25 s, or nothing, and initiates 15 s after data that has no answer.
const ENABLED_FOR: Duration = REJECT_AFTER_TIME;
/// Minimum time between two initiations, and between two to one source.
const INTERVAL: Duration = Duration::from_millis(500);
const INTERVAL_OF_SOURCE: Duration = Duration::from_secs(1);

/// Sources of data under the keys of an earlier gateway, each of which is sent one initiation.
///
/// Such data can be sent by anybody, so no endpoint follows from it, but from the answer to the initiation.
#[derive(Default)]
pub(super) struct Strays {
    until: Option<Instant>,
    /// The last source, and the time of its data.
    last: Option<(UdpPath, Instant)>,
    /// Its initiation has not been sent yet.
    is_due: bool,
}

impl Strays {
    /// Begins at the first call with true.
    pub(super) fn set_enabled(&mut self, enabled: bool, now: Instant) {
        self.until = enabled.then(|| self.until.unwrap_or(now + ENABLED_FOR));
    }

    pub(super) fn note(&mut self, from: UdpPath, now: Instant) {
        let is_late = |(source, at): (UdpPath, Instant)| {
            now >= at + if source == from { INTERVAL_OF_SOURCE } else { INTERVAL }
        };
        if self.until.is_some_and(|until| now < until) && self.last.is_none_or(is_late) {
            (self.last, self.is_due) = (Some((from, now)), true);
        }
    }

    /// Returns the source that an initiation is due to, once.
    pub(super) fn take(&mut self) -> Option<UdpPath> {
        let (source, _) = self.last.filter(|_| std::mem::take(&mut self.is_due))?;
        Some(source)
    }

    /// Deadline of the next [`Self::take`].
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.last.filter(|_| self.is_due).map(|(_, at)| at)
    }
}
