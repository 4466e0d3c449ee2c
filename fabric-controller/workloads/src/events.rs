//! Events for problems, at the objects that they are about.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_kube_client::Emitter;
use fabric_objects::{Kind, Problem};
use fabric_runtime::Heartbeat;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::time::Instant;

use super::writer::MANAGER;

/// Minimum time between Events for a problem that comes and goes, and time until it is a new one.
const QUIET: Duration = Duration::from_secs(60);
const MEMORY: Duration = Duration::from_secs(600);
/// Token bucket of Events, to limit the load of the API server.
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(5);
const KINDS: [Kind; 6] = [
    Kind::Configuration,
    Kind::GatewayServer,
    Kind::GatewayClient,
    Kind::PublicKey,
    Kind::Secret,
    Kind::Ip,
];

/// kube's own recorder takes two problems with one object for the same if their reasons are.
pub(super) struct Events {
    emitter: Emitter,
    /// Object of problems that name none.
    own: Option<ObjectReference>,
    /// Events by problem and uid of the object.
    emitted: BTreeMap<(Problem, String), EmittedEvent>,
    bucket: TokenBucket,
    /// Time at which an Event can be sent that could not be sent yet.
    again: Option<Instant>,
}

struct EmittedEvent {
    at: Instant,
    count: i32,
    stands: bool,
}

struct TokenBucket {
    tokens: u32,
    filled: Instant,
}

impl Events {
    pub(super) fn new(client: Client, identity: &str) -> Self {
        let bucket = TokenBucket { tokens: BURST, filled: Instant::now() };
        let emitter = Emitter::new(client, [MANAGER, identity], "Compile");
        Self { emitter, own: None, emitted: BTreeMap::new(), bucket, again: None }
    }

    /// Problems that name no object are this one's.
    pub(super) fn set_own(&mut self, own: ObjectReference) {
        self.own = Some(own);
    }

    /// Emits Events for all current problems. Those emitted already are not emitted again.
    pub(super) async fn emit_new(
        &mut self,
        problems: &BTreeMap<Problem, String>,
        heartbeat: &Heartbeat,
    ) {
        let now = Instant::now();
        self.again = None;
        self.emitted.retain(|(problem, uid), event| {
            event.stands &= problems.get(problem) == Some(uid);
            event.stands || now.duration_since(event.at) < MEMORY
        });
        for (problem, uid) in problems {
            heartbeat.beat();
            let Some(regarding) = self.regarding(problem, uid) else { continue };
            if problem.message.starts_with("waits for") {
                continue;
            }
            let known = self.emitted.get(&(problem.clone(), uid.clone()));
            if known.is_some_and(|known| known.stands) {
                continue;
            }
            let count = known.map_or(1, |known| known.count + 1);
            let early = known.map(|known| known.at + QUIET).filter(|until| *until > now);
            if early.is_some() || !self.bucket.spend(now) {
                self.put_off(early.unwrap_or(now + REFILL));
                continue;
            }
            let note = Problem { object: None, ..problem.clone() }.to_string();
            let reason = if problem.object.is_some() { "Invalid" } else { "CannotRead" };
            if self.emitter.warn(regarding, reason, note, count).await {
                let event = EmittedEvent { at: now, count, stands: true };
                self.emitted.insert((problem.clone(), uid.clone()), event);
            } else {
                self.put_off(now + REFILL);
            }
        }
    }

    /// Time of the next Events, even if nothing changes.
    pub(super) fn again(&self) -> Option<Instant> {
        self.again
    }

    fn put_off(&mut self, until: Instant) {
        self.again = self.again.into_iter().chain([until]).min();
    }

    /// Object that an Event of the problem is about.
    fn regarding(&self, problem: &Problem, uid: &str) -> Option<ObjectReference> {
        let Some(object) = &problem.object else { return self.own.clone() };
        KINDS.contains(&object.kind).then(|| ObjectReference {
            api_version: Some(object.kind.api_version().to_owned()),
            kind: Some(object.kind.as_str().to_owned()),
            namespace: object.namespace.clone(),
            name: Some(object.name.clone()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        })
    }
}

impl TokenBucket {
    fn spend(&mut self, now: Instant) -> bool {
        while self.tokens < BURST && now.duration_since(self.filled) >= REFILL {
            self.tokens += 1;
            self.filled += REFILL;
        }
        if self.tokens == BURST {
            self.filled = now;
        }
        let some = self.tokens > 0;
        self.tokens -= u32::from(some);
        some
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_bucket_allows_burst_then_refill() {
        let start = Instant::now();
        let mut bucket = TokenBucket { tokens: BURST, filled: start };
        let spent = |bucket: &mut TokenBucket, now| (0..1000).filter(|_| bucket.spend(now)).count();
        assert_eq!(spent(&mut bucket, start), 25);
        assert_eq!(spent(&mut bucket, start + REFILL / 2), 0);
        assert_eq!(spent(&mut bucket, start + REFILL * 3), 3);
        assert_eq!(spent(&mut bucket, start + REFILL * 1000), 25, "no more are saved up");
    }
}
