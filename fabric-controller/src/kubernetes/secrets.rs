//! Labels the users' Secrets with keys as Liqo does.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_api::{ClusterId, labels};
use fabric_store::ObjectRef;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{PartialObjectMeta, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;

use super::writer::answer;

/// After one try, until the next.
const RETRY: Duration = Duration::from_secs(60);

pub(super) struct Secrets {
    client: Client,
    tried: BTreeMap<ObjectRef, Instant>,
}

impl Secrets {
    pub(super) fn new(client: Client) -> Self {
        Self { client, tried: BTreeMap::new() }
    }

    pub(super) async fn label(&mut self, unlabelled: &BTreeMap<ObjectRef, ClusterId>) {
        self.tried.retain(|secret, at| unlabelled.contains_key(secret) && at.elapsed() < RETRY);
        for (secret, peer) in unlabelled {
            if self.tried.contains_key(secret) {
                continue;
            }
            self.tried.insert(secret.clone(), Instant::now());
            match self.patch(secret, peer).await {
                Ok(_) => tracing::info!(%secret, %peer, "labelled"),
                Err(error) => tracing::warn!(%secret, %error, "cannot be labelled"),
            }
        }
    }

    /// It makes none: one that is gone stays so. What it holds is not even read.
    async fn patch(
        &self,
        secret: &ObjectRef,
        peer: &ClusterId,
    ) -> kube::Result<PartialObjectMeta<Secret>> {
        let namespace = secret.namespace.as_deref().unwrap_or_default();
        let api = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let all = json!({
            (labels::REMOTE_CLUSTER_ID): peer.as_str(), (labels::GATEWAY_RESOURCE): "true",
        });
        let patch = Patch::Merge(json!({"metadata": {"labels": all}}));
        answer(api.patch_metadata(&secret.name, &PatchParams::default(), &patch)).await
    }
}
