//! Pods that do not start, and why. Pure.

use jiff::{SignedDuration, Timestamp};

use crate::placement::PodFault;

/// Time for which the creation of a container is none of a pod's faults: its image may be pulled.
pub const CREATION: SignedDuration = SignedDuration::from_secs(10);

/// Reason for which a pod has not started, as Kubernetes reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delay {
    /// `ErrImagePull`, `CrashLoopBackOff`, `Unschedulable`, ...
    pub reason: String,
    pub message: String,
    /// Creation of the pod.
    pub since: Option<Timestamp>,
}

impl Delay {
    /// True while Kubernetes reports no fault, but that it is at work.
    fn is_creation(&self) -> bool {
        matches!(self.reason.as_str(), "ContainerCreating" | "PodInitializing")
    }

    /// Time at which it becomes a fault, unless it is one anyhow.
    pub fn fault_at(&self) -> Option<Timestamp> {
        self.since.filter(|_| self.is_creation()).map(|since| since + CREATION)
    }

    pub fn is_fault(&self, now: Timestamp) -> bool {
        !self.is_creation() || self.fault_at().is_some_and(|at| at <= now)
    }

    /// The most informative one.
    pub fn first(delays: impl IntoIterator<Item = Self>) -> Option<Self> {
        delays.into_iter().min_by_key(Self::is_creation)
    }

    /// The fault of a pod that does not start for it.
    pub fn fault_of(&self, namespace: &str, pod: &str) -> PodFault {
        let parts = [self.reason.as_str(), self.message.as_str()];
        let parts = parts.into_iter().filter(|part| !part.is_empty());
        let message = format!(
            "pod {pod} does not start ({}); see `kubectl describe pod -n {namespace} {pod}`",
            parts.collect::<Vec<_>>().join(": ")
        );
        PodFault { reason: self.reason.clone(), message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delay(reason: &str) -> Delay {
        let since = Some(Timestamp::UNIX_EPOCH);
        Delay { reason: reason.to_owned(), message: "m".to_owned(), since }
    }

    #[test]
    fn creation_alone_has_time_until_it_is_fault() {
        let after = |seconds| Timestamp::UNIX_EPOCH + SignedDuration::from_secs(seconds);
        for reason in ["ErrImagePull", "CrashLoopBackOff", "Unschedulable"] {
            assert!(delay(reason).is_fault(after(0)), "{reason}");
        }
        for reason in ["ContainerCreating", "PodInitializing"] {
            let is_fault = |seconds| delay(reason).is_fault(after(seconds));
            assert_eq!((is_fault(9), is_fault(10)), (false, true), "{reason}");
        }
        let both = [delay("PodInitializing"), delay("CrashLoopBackOff")];
        assert_eq!(Delay::first(both).unwrap().reason, "CrashLoopBackOff");
    }

    #[test]
    fn fault_names_pod_cause_and_where_to_look() {
        let fault = delay("ErrImagePull").fault_of("t", "gw-server-1");
        let expected = "pod gw-server-1 does not start (ErrImagePull: m); see `kubectl describe pod -n t gw-server-1`";
        assert_eq!((fault.reason.as_str(), fault.message.as_str()), ("ErrImagePull", expected));
    }
}
