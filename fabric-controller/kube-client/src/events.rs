//! Events at objects, of one program.

use fabric_api::labels::CONTROLLER_MANAGER;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::ApiResource;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::ApiError;
use crate::requests::{Part, Requests, Target};

/// Maximum length of a text that an API server accepts.
const LONGEST: usize = 1000;

/// Emits Events of one program.
pub struct Emitter {
    requests: Requests,
    /// Name and identity of the program.
    reporter: [String; 2],
    action: &'static str,
}

impl Emitter {
    pub fn new(client: Client, reporter: [&str; 2], action: &'static str) -> Self {
        let reporter = reporter.map(str::to_owned);
        Self { requests: Requests::new(client, CONTROLLER_MANAGER), reporter, action }
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
    fn notes_end_where_a_character_does() {
        assert_eq!(shortened("short".to_owned()), "short");
        assert_eq!(shortened("μ".repeat(600)).chars().count(), 500);
        assert_eq!(shortened(format!("a{}", "μ".repeat(600))).len(), 999);
    }
}
