//! One slice of one tunnel, while the others are idle.

use crate::statistics::percentile;

/// Slices of which the hypervisor took more than this away do not count.
const MAX_STEAL: f64 = 0.01;

/// Measurements of one slice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slice {
    /// Received data.
    pub(crate) gbit: f64,
    pub(crate) seconds: f64,
    /// Share of all that was sent that never arrived.
    pub(crate) lost_share: f64,
    /// Datagrams.
    pub(crate) duplicates: u64,
    pub(crate) reordered: u64,
    pub(crate) retransmits: u64,
    /// Used by the gateways' processes.
    pub(crate) cpu_seconds: f64,
    /// Used by all of the machine in softirq, whomever it is charged to.
    pub(crate) softirq_seconds: f64,
    pub(crate) steal_share: f64,
    /// Share of all CPU time that programs used which are not part of the measurement.
    pub(crate) others_share: f64,
    /// Memory of the larger of the two gateways.
    pub(crate) rss_bytes: u64,
    /// Seconds, in ascending order.
    pub(crate) latencies: Vec<f64>,
}

impl Slice {
    pub(crate) fn is_sound(&self) -> bool {
        self.steal_share <= MAX_STEAL
    }

    /// Latency below which this share of the responses arrived.
    pub(crate) fn latency_ms(&self, share: f64) -> f64 {
        percentile(&self.latencies, share).map_or(f64::NAN, |seconds| seconds * 1e3)
    }
}
