//! Events of watches go into the index, and missing objects of the controller's own are written again.

use fabric_api::labels;
use fabric_index::owner::is_own;
use fabric_index::{Grant, compiles_alike, is_acknowledgement};
use fabric_store::{Event, Kind, Object, ObjectRef, Problem};
use futures::FutureExt as _;
use tokio::time::Instant;

use super::{ACKNOWLEDGEMENTS, Controller};
use crate::kinds::{STATUSES, WRITTEN};

impl Controller {
    pub(super) async fn forget_status(&self, of: &ObjectRef) {
        if let Err(error) = self.store.forget(of).await {
            tracing::warn!(object = %of, error = %error, "its status stays behind");
        }
    }

    /// Applies all events that wait, this one first; returns whether anything new follows from them.
    pub(super) async fn absorb_all(&mut self, event: Event) -> bool {
        let mut length = 1;
        let mut is_changed = self.absorb(event).await;
        while let Some(event) = self.watch.next().now_or_never() {
            length += 1;
            is_changed |= self.absorb(event).await;
            self.vitals.heartbeat.beat();
        }
        self.vitals.metrics.set_queue_length(length);
        is_changed
    }

    /// Applies an event; returns whether anything new follows from it. The event may be from before
    /// the own last write: for objects that only the controller writes, the index is newer.
    pub(super) async fn absorb(&mut self, event: Event) -> bool {
        if let Event::Problems(problems) = &event {
            self.repair(problems).await;
        }
        let event = match event {
            Event::Applied(object) => match self.current(object).await {
                Some(object) => Event::Applied(object),
                None => return false,
            },
            Event::Deleted(reference) => {
                if self.index.get(&reference).is_none() || self.is_there(&reference).await {
                    return false;
                }
                self.forget_status(&reference).await;
                Event::Deleted(reference)
            }
            event @ (Event::Problems(_) | Event::Synced) => event,
        };
        let reference = match &event {
            Event::Applied(object) => Some(object.reference()),
            Event::Deleted(reference) => Some(reference.clone()),
            Event::Problems(_) | Event::Synced => None,
        };
        let before = self.index.apply(event);
        let after = reference.and_then(|reference| self.index.get(&reference));
        let grant = before.as_ref().and_then(Grant::of);
        let granted = after.and_then(Grant::of);
        self.releases.extend(grant.filter(|grant| Some(grant) != granted.as_ref()));
        let (Some(before), Some(after)) = (&before, after) else { return true };
        if !is_acknowledgement(before, after) {
            return !compiles_alike(before, after);
        }
        let is_last = self.index.is_applied_by_all();
        if is_last {
            self.schedule.pacing.acknowledged();
        }
        let is_held = self.schedule.pacing.due().is_some();
        let is_awaited = is_last && (self.awaits_nodes || is_held);
        if !is_awaited {
            self.compile_by.get_or_insert_with(|| Instant::now() + ACKNOWLEDGEMENTS);
        }
        is_awaited
    }

    /// Writes again what has become unreadable of the controller's own files.
    async fn repair(&self, problems: &[Problem]) {
        for reference in problems.iter().filter_map(|problem| problem.object.as_ref()) {
            let known = self.index.get(reference).filter(|_| WRITTEN.contains(&reference.kind));
            let ours = known.filter(|o| o.label(labels::MANAGED_BY) == Some(labels::WEFT));
            let Some(object) = ours else { continue };
            if let Err(error) = self.store.put(object).await {
                tracing::warn!(object = %reference, %error, "cannot be repaired");
            }
        }
    }

    async fn current(&self, mut object: Object) -> Option<Object> {
        let reference = object.reference();
        let have = self.index.get(&reference).filter(|have| have.uid() == object.uid());
        match reference.kind {
            Kind::Network | Kind::Ip => {
                if have.is_none() && is_own(&object) {
                    // Perhaps one that was removed a moment ago. An error is no proof of that.
                    if let Ok(found) = self.store.get(&reference).await {
                        object = found?;
                    }
                }
                object.copy_status(have);
            }
            Kind::Configuration | Kind::GatewayServer | Kind::GatewayClient => {
                object.copy_status(have);
            }
            Kind::Namespace
            | Kind::ConfigMap
            | Kind::Secret
            | Kind::Node
            | Kind::Connection
            | Kind::PublicKey
            | Kind::GatewayConfig
            | Kind::NodeConfig => {}
            // Its generation is in the digest that readers go by.
            Kind::FabricRecord | Kind::GatewayRecord => {
                if have.is_some_and(|have| have.generation() > object.generation()) {
                    return None;
                }
            }
        }
        Some(object)
    }

    /// True if an object that was reported as deleted has been written again since. A key pair in Kubernetes
    /// is not asked for: it is watched while its namespace has a gateway, and collected a moment later.
    async fn is_there(&self, reference: &ObjectRef) -> bool {
        let is_file = reference.kind == Kind::Secret && self.store.api_server().is_none();
        let is_written_here = is_file || matches!(reference.kind, Kind::Network | Kind::Ip);
        is_written_here && self.is_stored(reference).await
    }

    /// True if there is no answer, too: what is gone is missed again at the next resync.
    async fn is_stored(&self, reference: &ObjectRef) -> bool {
        !matches!(self.store.get(reference).await, Ok(None))
    }

    /// Writes again what is not there any more.
    pub(super) async fn resync(&mut self) {
        let there = self.watch.seen();
        for kind in STATUSES {
            for (reference, object) in self.index.of_kind(kind) {
                let same = there.get(reference).filter(|o| o.uid() == object.uid());
                if same.is_some_and(|same| same != object)
                    && let Err(error) = self.store.put_status(object).await
                {
                    tracing::warn!(object = %reference, error = %error, "status not written");
                }
                self.vitals.heartbeat.beat();
            }
        }
        let known = WRITTEN.into_iter().flat_map(|kind| self.index.of_kind(kind));
        let gone = known.filter(|(reference, _)| !there.contains_key(reference));
        let gone: Vec<ObjectRef> = gone.map(|(reference, _)| reference.clone()).collect();
        for reference in gone {
            // One that was made a moment ago, or that may not be watched.
            if reference.kind == Kind::Secret && self.is_stored(&reference).await {
                continue;
            }
            let _ = self.absorb(Event::Deleted(reference)).await;
            self.vitals.heartbeat.beat();
        }
    }
}
