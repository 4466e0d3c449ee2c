//! Completes the Secrets with keys, as Liqo does and liqoctl expects.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_api::labels;
use fabric_kube_client::ApiError;
use fabric_kube_client::requests::{Requests, Target};
use fabric_objects::ObjectRef;
use fabric_runtime::{Heartbeat, chain};
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::ApiResource;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::writer::MANAGER;
use fabric_index::placement::{SecretGap, SecretGaps};

/// Interval between tries of the same.
const RETRY: Duration = Duration::from_secs(60);

pub(super) struct Secrets {
    requests: Requests,
    tried: BTreeMap<ObjectRef, (SecretGap, Instant)>,
}

impl Secrets {
    pub(super) fn new(client: Client) -> Self {
        Self { requests: Requests::new(client, MANAGER), tried: BTreeMap::new() }
    }

    /// Time of the next retry for one that still lacks something, if nothing happens before.
    pub(super) fn due(&self) -> Option<Instant> {
        self.tried.values().map(|(_, at)| *at + RETRY).min()
    }

    pub(super) async fn complete(&mut self, gaps: &SecretGaps, heartbeat: &Heartbeat) {
        self.tried.retain(|secret, (tried, at)| {
            gaps.get(secret).is_some_and(|gap| gap == tried) && at.elapsed() < RETRY
        });
        for (secret, gap) in gaps {
            if self.tried.contains_key(secret) {
                continue;
            }
            heartbeat.beat();
            self.tried.insert(secret.clone(), (gap.clone(), Instant::now()));
            match self.patch(secret, gap).await {
                Ok(()) => tracing::info!(%secret, "completed"),
                Err(error) => {
                    tracing::warn!(%secret, error = chain(&error), "cannot be completed");
                }
            }
        }
    }

    /// It makes none: one that is gone stays so, and so does another of its name. What it holds is
    /// not even read.
    async fn patch(&self, secret: &ObjectRef, gap: &SecretGap) -> Result<(), ApiError> {
        let name = (secret.namespace.clone().unwrap_or_default(), secret.name.clone());
        let target = Target::new(ApiResource::erase::<Secret>(&()), name);
        self.requests.merge_unread(&target, &change(gap)).await
    }
}

fn change(gap: &SecretGap) -> Value {
    let mut change = json!({"metadata": {"uid": gap.uid}});
    if let Some(peer) = &gap.peer {
        change["metadata"]["labels"] = json!({
            (labels::REMOTE_CLUSTER_ID): peer.as_str(), (labels::GATEWAY_RESOURCE): "true",
        });
    }
    if let Some(owner) = &gap.owner {
        change["metadata"]["ownerReferences"] = json!([owner]);
    }
    if let Some(public) = &gap.public_key {
        change["data"] = json!({"publicKey": public.to_string()});
    }
    change
}

#[cfg(test)]
mod tests {

    use fabric_objects::Kind;

    use super::*;

    #[tokio::test]
    async fn failed_completion_is_retried() {
        let unreachable = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let mut secrets = Secrets::new(Client::try_from(unreachable).unwrap());
        assert_eq!(secrets.due(), None);
        let gap = SecretGap { uid: "u".to_owned(), peer: None, owner: None, public_key: None };
        let (before, heartbeat) = (Instant::now(), Heartbeat::default());
        secrets
            .complete(&[(ObjectRef::new(Kind::Secret, "t", "keys"), gap)].into(), &heartbeat)
            .await;
        assert!(secrets.due().is_some_and(|due| due >= before + RETRY));
        secrets.complete(&SecretGaps::new(), &heartbeat).await;
        assert_eq!(secrets.due(), None, "it is no longer needed");
    }
}
