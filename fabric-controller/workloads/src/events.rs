//! Events for problems, at the objects that they are about.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_kube_client::ApiError;
use fabric_kube_client::requests::{Part, Requests, Target};
use fabric_objects::{Kind, Problem};
use fabric_runtime::Heartbeat;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::ApiResource;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::writer::MANAGER;

/// Minimum time between Events for a problem that comes and goes, and time until it is a new one.
const QUIET: Duration = Duration::from_secs(60);
const MEMORY: Duration = Duration::from_secs(600);
/// Token bucket of Events, to limit the load of the API server.
const BURST: u32 = 25;
const REFILL: Duration = Duration::from_secs(5);
/// Maximum length of a text that an API server accepts.
const LONGEST: usize = 1000;
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

/// Emits Events of one program.
pub struct Emitter {
    requests: Requests,
    /// Name and identity of the program.
    reporter: [String; 2],
    action: &'static str,
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

impl Emitter {
    pub fn new(client: Client, reporter: [&str; 2], action: &'static str) -> Self {
        let reporter = reporter.map(str::to_owned);
        Self { requests: Requests::new(client, MANAGER), reporter, action }
    }

    /// Emits the Event of a note about an object, always of the same name. One that is there was
    /// emitted before, if only by the previous program: it is counted up, and nothing else of it can
    /// change. Returns false if there was no answer.
    pub async fn warn(
        &self,
        regarding: ObjectReference,
        reason: &str,
        note: String,
        count: i32,
    ) -> bool {
        let event = self.event(regarding, reason, note);
        let metadata = &event.metadata;
        let inside = metadata.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let name = (inside, metadata.name.clone().unwrap_or_default());
        let target = Target::new(ApiResource::erase::<Event>(&()), name);
        let result = match self.requests.create(&target, &event).await {
            Err(ApiError::Refused { code: 409, .. }) => {
                let series = json!({"count": count.max(2), "lastObservedTime": event.event_time});
                let repeat = json!({"series": series});
                self.requests.merge(&target, Part::AllButStatus, &repeat).await
            }
            created => created,
        };
        if let Err(error) = &result {
            tracing::debug!(%error, "cannot emit an Event");
        }
        matches!(result, Ok(_) | Err(ApiError::Refused { .. }))
    }

    fn event(&self, regarding: ObjectReference, reason: &str, note: String) -> Event {
        let uid = regarding.uid.as_deref().unwrap_or_default();
        let digest = Sha256::digest(format!("{uid} {note}"));
        let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let name = regarding.name.as_deref().unwrap_or_default();
        let [controller, identity] = &self.reporter;
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{name}.{digest}")),
                namespace: regarding.namespace.clone(),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            action: Some(self.action.to_owned()),
            reason: Some(reason.to_owned()),
            note: Some(shortened(note)),
            type_: Some("Warning".to_owned()),
            regarding: Some(regarding),
            reporting_controller: Some(format!("weft.dev/{controller}")),
            reporting_instance: Some(identity.clone()),
            ..Event::default()
        }
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

fn shortened(mut note: String) -> String {
    if note.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|end| note.is_char_boundary(*end));
        note.truncate(end.unwrap_or_default());
    }
    note
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

    #[test]
    fn notes_end_where_a_character_does() {
        assert_eq!(shortened("short".to_owned()), "short");
        assert_eq!(shortened("μ".repeat(600)).chars().count(), 500);
        assert_eq!(shortened(format!("a{}", "μ".repeat(600))).len(), 999);
    }
}
