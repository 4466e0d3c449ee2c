//! Nodes that are to be notified of a take-over. Knows no socket and no clock.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fabric_api::fabric::{ActiveReplica, OverlayProbe};

/// Time between two notices to a node that has not probed this replica yet.
const INTERVAL: Duration = Duration::from_millis(200);
/// Time after which a node goes by what the controller publishes only.
const GIVE_UP: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub struct Notices {
    current: Option<Current>,
}

#[derive(Debug)]
struct Current {
    active: ActiveReplica,
    began: Instant,
    next: Instant,
    /// Names of the nodes that may still send to another replica.
    nodes: BTreeSet<String>,
}

impl Notices {
    /// Notifies these nodes. Returns false if they are being notified of this take-over already.
    pub fn begin<'a>(
        &mut self,
        active: ActiveReplica,
        nodes: impl Iterator<Item = &'a str>,
        now: Instant,
    ) -> bool {
        let is_new = self.current.as_ref().is_none_or(|current| current.active != active);
        if is_new {
            let nodes = nodes.map(str::to_owned).collect();
            self.current = Some(Current { active, began: now, next: now, nodes });
        }
        is_new
    }

    /// The node's probes arrive here.
    pub fn forget(&mut self, node: &str) {
        if let Some(current) = &mut self.current {
            current.nodes.remove(node);
        }
    }

    /// Returns the notices that are due.
    pub fn poll(&mut self, now: Instant) -> Vec<OverlayProbe> {
        let Some(current) = self.current.as_mut().filter(|current| current.next <= now) else {
            return Vec::new();
        };
        if now - current.began >= GIVE_UP {
            current.nodes.clear();
        }
        current.next = now + INTERVAL;
        let active = Some(current.active);
        let notice = |node: &String| OverlayProbe {
            node: node.clone(),
            reply: true,
            active,
            ..OverlayProbe::default()
        };
        current.nodes.iter().map(notice).collect()
    }

    /// Deadline of the next [`Self::poll`].
    pub fn deadline(&self) -> Option<Instant> {
        let current = self.current.as_ref().filter(|current| !current.nodes.is_empty());
        current.map(|current| current.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn active(epoch: u64) -> ActiveReplica {
        ActiveReplica { address: [10, 200, 1, 7].into(), epoch }
    }

    fn names(notices: &[OverlayProbe]) -> Vec<&str> {
        notices.iter().map(|notice| notice.node.as_str()).collect()
    }

    #[test]
    fn nodes_are_notified_until_their_probes_arrive() {
        let (mut notices, start) = (Notices::default(), Instant::now());
        assert_eq!(notices.deadline(), None);
        assert!(notices.begin(active(2), ["n1", "n2"].into_iter(), start));
        let first = notices.poll(start);
        assert_eq!(names(&first), ["n1", "n2"]);
        assert!(first.iter().all(|notice| notice.active == Some(active(2)) && notice.reply));
        assert!(notices.poll(start + INTERVAL / 2).is_empty(), "before it is time");

        notices.forget("n1");
        assert!(!notices.begin(active(2), ["n1", "n2"].into_iter(), start));
        assert_eq!(notices.deadline(), Some(start + INTERVAL));
        assert_eq!(names(&notices.poll(start + INTERVAL)), ["n2"]);
        notices.forget("n2");
        assert_eq!(notices.deadline(), None);

        notices.begin(active(4), ["n1"].into_iter(), start + INTERVAL);
        assert_eq!(names(&notices.poll(start + INTERVAL)), ["n1"], "the next take-over");
        assert!(notices.poll(start + INTERVAL + GIVE_UP).is_empty());
        assert_eq!(notices.deadline(), None);
    }
}
