//! Events of watches go into the index, and missing objects of the controller's own are written again.

use fabric_api::labels;
use fabric_index::owner::{self, is_own, keeps_refused_prefix};
use fabric_index::{Grant, compiles_alike, is_acknowledgement};
use fabric_runtime::chain;
use fabric_store::{Event, Kind, Object, ObjectRef, Problem, StoreError};
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
                match self.restore(&reference).await {
                    Ok(Some(object)) => Event::Applied(object),
                    Ok(None) => {
                        self.forget_status(&reference).await;
                        Event::Deleted(reference)
                    }
                    Err(error) => {
                        tracing::error!(object = %reference, "{}", chain(&error));
                        return false;
                    }
                }
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

    /// Writes the file of a granted prefix or address again that another program has removed, and returns it as
    /// it is stored now: nodes have it, and ipam would grant it to another. The same for a gateway's key pair.
    /// Returns `None` for what may go. Who removes an object from an API server means that.
    async fn restore(&self, reference: &ObjectRef) -> Result<Option<Object>, StoreError> {
        let Some(object) = self.index.get(reference).filter(|of| self.is_kept(of)) else {
            return Ok(None);
        };
        let mut stored = self.store.put(object).await?;
        if let Some(grant) = Grant::of(object) {
            grant.write_to(&mut stored);
            self.store.put_status(&stored).await?;
        }
        tracing::warn!(object = %reference, "another program removed its file: written again");
        Ok(Some(stored))
    }

    /// True if nothing but the controller is to remove it.
    fn is_kept(&self, object: &Object) -> bool {
        if self.store.api_server().is_some() {
            return false;
        }
        if object.kind() == Kind::Secret {
            return object.label(labels::MANAGED_BY) == Some(labels::WEFT);
        }
        let owner = owner::of(object).and_then(|owner| self.index.get(&owner));
        Grant::of(object).is_some() && (owner.is_some() || keeps_refused_prefix(object))
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
                let is_lost = Grant::of(&object).is_none();
                object.copy_status(have);
                // Its file may have been removed: ipam frees what none has.
                if is_lost
                    && Grant::of(&object).is_some()
                    && self.store.api_server().is_none()
                    && let Err(error) = self.store.put_status(&object).await
                {
                    tracing::warn!(object = %reference, %error, "status not written");
                }
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

    /// True if there is no answer, too: what is gone is missed again at the next resync. In a directory that
    /// means that its folder is gone, and what is kept is to be written again.
    async fn is_stored(&self, reference: &ObjectRef) -> bool {
        match self.store.get(reference).await {
            Ok(stored) => stored.is_some(),
            Err(_) => !self.index.get(reference).is_some_and(|object| self.is_kept(object)),
        }
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
