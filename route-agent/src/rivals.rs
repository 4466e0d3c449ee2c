//! Other agents that report for the same node, such as those of two hosts that were given one name.

use std::fs;
use std::time::{Duration, Instant};

use fabric_api::fabric::ReportingAgent;
use jiff::Timestamp;

/// Time after the start in which a report of the agent before may still arrive.
const SETTLE: Duration = Duration::from_secs(5);
/// Interval of reports while another agent reports, so that each of both knows of the other.
const BEAT: Duration = Duration::from_secs(10);
/// Time without a report of another agent after which it is gone. In a directory that comes from another host,
/// it is read up to half a minute late.
const QUIET: Duration = Duration::from_secs(75);

#[derive(Debug)]
pub(crate) struct Rivals {
    own: ReportingAgent,
    started: Instant,
    last: Option<Sighting>,
}

/// Another agent, and when its report was read.
#[derive(Debug)]
struct Sighting {
    agent: ReportingAgent,
    at: Instant,
    reported: Instant,
}

impl Rivals {
    pub(crate) fn new(now: Instant) -> Self {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let own = ReportingAgent {
            host: host.trim().to_owned(),
            process: std::process::id(),
            started: format!("{:.3}", Timestamp::now()),
            contested: None,
        };
        Self { own, started: now, last: None }
    }

    /// Takes in who has reported last. Returns whether that is to be reported now. `has_reported` is whether this
    /// agent has; before, the report is that of the one it follows.
    pub(crate) fn read(
        &mut self,
        by: Option<&ReportingAgent>,
        has_reported: bool,
        now: Instant,
    ) -> bool {
        let is_other = |by: &&ReportingAgent| !by.is_same(&self.own);
        let Some(other) = by.filter(is_other).filter(|_| has_reported) else { return false };
        if now - self.started < SETTLE {
            return false;
        }
        let before = self.last.take();
        let reported = before.as_ref().map_or(now, |before| before.reported);
        self.last = Some(Sighting { agent: other.clone(), at: now, reported });
        before.is_none()
    }

    /// Time of the next report.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.last.as_ref().map(|last| (last.reported + BEAT).min(last.at + QUIET))
    }

    /// Own part of a report of now.
    pub(crate) fn reporter(&mut self, now: Instant) -> ReportingAgent {
        self.last = self.last.take().filter(|last| now < last.at + QUIET);
        let contested = self.last.as_mut().map(|last| {
            last.reported = now;
            format!("{:.3}", Timestamp::now())
        });
        ReportingAgent { contested, ..self.own.clone() }
    }

    pub(crate) fn problem(&self, node: &str) -> Option<String> {
        let ReportingAgent { host, process, started, .. } = &self.last.as_ref()?.agent;
        Some(format!(
            "another route-agent reports as {node}, too (process {process} on host {host}, since \
             {started}), and packets for its pods go to one of both: start each with --node and the \
             name of its own node, or end one"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An agent that started a minute ago, and another.
    fn two() -> (Rivals, ReportingAgent, Instant) {
        let start = Instant::now();
        let other = ReportingAgent { process: 0, ..Rivals::new(start).own };
        (Rivals::new(start), other, start + Duration::from_secs(60))
    }

    #[test]
    fn other_agent_is_named_until_it_is_quiet() {
        let (mut rivals, other, now) = two();
        assert!(!rivals.read(Some(&rivals.own.clone()), true, now));
        assert_eq!((rivals.problem("b"), rivals.due()), (None, None));
        assert!(rivals.read(Some(&other), true, now));
        assert!(rivals.reporter(now).contested.is_some());
        assert!(rivals.problem("b").unwrap().contains("reports as b, too (process 0"));
        assert_eq!(rivals.due(), Some(now + BEAT));

        let later = now + BEAT;
        assert!(!rivals.read(Some(&other), true, later), "it is reported with the next beat");
        rivals.reporter(later);
        assert_eq!(rivals.due(), Some(later + BEAT));
        let end = later + QUIET;
        assert!(rivals.reporter(end - BEAT).contested.is_some());
        assert_eq!(rivals.due(), Some(end));
        assert_eq!(rivals.reporter(end).contested, None);
        assert_eq!((rivals.problem("b"), rivals.due()), (None, None));
    }

    #[test]
    fn agent_before_this_one_is_no_other() {
        let (mut rivals, before, now) = two();
        assert!(!rivals.read(Some(&before), false, now), "this one has not reported yet");
        assert!(!rivals.read(Some(&before), true, rivals.started + SETTLE / 2), "read late");
        assert!(!rivals.read(None, true, now), "an older one does not say who it is");
        assert_eq!(rivals.problem("b"), None);
    }
}
