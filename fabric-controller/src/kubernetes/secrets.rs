//! Completes the Secrets with keys, as Liqo does and liqoctl expects.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_api::labels;
use fabric_store::ObjectRef;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{PartialObjectMeta, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::writer::answer;
use crate::placement::{SecretGap, SecretGaps};

/// After one try, until the next of the same.
const RETRY: Duration = Duration::from_secs(60);

pub(super) struct Secrets {
    client: Client,
    tried: BTreeMap<ObjectRef, (SecretGap, Instant)>,
}

impl Secrets {
    pub(super) fn new(client: Client) -> Self {
        Self { client, tried: BTreeMap::new() }
    }

    pub(super) async fn complete(&mut self, gaps: &SecretGaps) {
        self.tried.retain(|secret, (tried, at)| {
            gaps.get(secret).is_some_and(|gap| gap == tried) && at.elapsed() < RETRY
        });
        for (secret, gap) in gaps {
            if self.tried.contains_key(secret) {
                continue;
            }
            self.tried.insert(secret.clone(), (gap.clone(), Instant::now()));
            match self.patch(secret, gap).await {
                Ok(_) => tracing::info!(%secret, "completed"),
                Err(error) => tracing::warn!(%secret, %error, "cannot be completed"),
            }
        }
    }

    /// It makes none: one that is gone stays so, and so does another of its name. What it holds is
    /// not even read.
    async fn patch(
        &self,
        secret: &ObjectRef,
        gap: &SecretGap,
    ) -> kube::Result<PartialObjectMeta<Secret>> {
        let namespace = secret.namespace.as_deref().unwrap_or_default();
        let api = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let patch = Patch::Merge(change(gap));
        answer(api.patch_metadata(&secret.name, &PatchParams::default(), &patch)).await
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
