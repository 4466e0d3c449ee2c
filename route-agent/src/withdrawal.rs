//! Withdrawal of a node from the fabric: everything is removed but the refusal of what is still sent to
//! peers.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use fabric_runtime::chain;
use netlink::Handle;

use crate::cleanup::{self, Stays};
use crate::parsed_config::ParsedConfig;
use crate::refusal::Refuser;
use crate::table::Table;

pub(crate) struct Withdrawal {
    /// Time for which a node that leaves a cluster of Kubernetes refuses packets to peers: then its
    /// agent ends. On a host that lasts until nobody sends, or for as long as the config names a prefix.
    linger: Option<Duration>,
    /// Time at which everything was removed, if the config demands it.
    since: Option<Instant>,
}

impl Withdrawal {
    pub(crate) fn new(linger: Option<Duration>) -> Self {
        Self { linger, since: None }
    }

    pub(crate) fn cancel(&mut self) {
        self.since = None;
    }

    /// Time at which refusals end, if they do by themselves.
    pub(crate) fn end(&self) -> Option<Instant> {
        Some(self.since? + self.linger?)
    }

    /// Takes everything away. Returns the problems.
    pub(crate) async fn enforce(
        &mut self,
        handle: &Handle,
        table: &mut Table,
        refuser: &mut Refuser,
        config: &ParsedConfig<'_>,
    ) -> BTreeSet<String> {
        let quiet = config.spec.quiet_after();
        let kept = if self.linger.is_some() { BTreeSet::new() } else { config.refused.clone() };
        let began = Instant::now();
        let removed = match self.since {
            Some(_) => cleanup::dataplane(handle, table).await,
            None => {
                let local_pods = config.local_pods.iter().copied().collect();
                let stays = Stays { prefixes: kept.clone(), local_pods };
                cleanup::withdraw(handle, table, quiet, stays).await.problems
            }
        };
        let mut problems = BTreeSet::from_iter(removed);
        let since = *self.since.get_or_insert(began);
        let at_once = self.linger.is_some_and(|linger| since.elapsed() >= linger);
        let looked = refuser.look(handle.netns(), at_once, &kept);
        let saved = looked.and_then(|()| refuser.save_refused());
        problems.extend(saved.err().map(|error| chain(&error)));
        let senders: Vec<_> = refuser.senders().iter().map(ToString::to_string).collect();
        if let Some(linger) = self.linger.filter(|_| !senders.is_empty()) {
            problems.insert(format!(
                "packets of {} to peers are refused for {} s",
                senders.join(", "),
                linger.as_secs()
            ));
        }
        problems
    }
}
