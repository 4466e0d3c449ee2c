//! Rights that a program has, and those that it gives itself, in one namespace at a time.

use std::time::Duration;

use fabric_api::labels;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::rbac::v1::{RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{ApiResource, PostParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::time::sleep;

use crate::answer::answer;
use crate::error::ApiError;
use crate::requests::{Part, Requests, Target};

/// Name of the binding of the right to read keys of gateways.
const GATEWAY_KEYS: &str = "weft-gateway-keys";
/// ClusterRole that may read Secrets, and account that may bind it to itself; the release has both.
const KEYS_ROLE: &str = "liqo-gateway-keys";
const CONTROLLER: &str = "liqo-fabric-controller";
const RBAC: &str = "rbac.authorization.k8s.io";
/// Intervals in milliseconds between looks at whether a binding that was written is in force.
const CHECKS: [u64; 5] = [20, 50, 100, 300, 1000];

/// Right to list objects of a kind in a namespace, by a RoleBinding.
#[derive(Clone, Debug)]
pub struct Grant {
    binding: RoleBinding,
}

impl Grant {
    /// Right of the fabric-controller to read Secrets in the namespace of a gateway, with which it goes.
    /// `installation` is the namespace of weft.
    pub fn of_gateway_keys(gateway: OwnerReference, namespace: &str, installation: &str) -> Self {
        let labels = [(labels::MANAGED_BY, labels::WEFT)];
        let metadata = ObjectMeta {
            name: Some(GATEWAY_KEYS.to_owned()),
            namespace: Some(namespace.to_owned()),
            owner_references: Some(vec![gateway]),
            labels: Some(labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into()),
            ..ObjectMeta::default()
        };
        let role_ref = RoleRef {
            api_group: Some(RBAC.to_owned()),
            kind: "ClusterRole".to_owned(),
            name: KEYS_ROLE.to_owned(),
        };
        let subject = Subject {
            kind: "ServiceAccount".to_owned(),
            name: CONTROLLER.to_owned(),
            namespace: Some(installation.to_owned()),
            ..Subject::default()
        };
        Self { binding: RoleBinding { metadata, role_ref, subjects: Some(vec![subject]) } }
    }

    /// Writes the binding unless the right is there without one, and waits until it is in force.
    pub async fn acquire(&self, client: &Client, resource: &ApiResource) -> Result<(), ApiError> {
        let kind = ApiResource::erase::<RoleBinding>(&());
        let name = (self.binding.namespace().unwrap_or_default(), self.binding.name_any());
        let (requests, target) =
            (Requests::new(client.clone(), labels::CONTROLLER_MANAGER), Target::new(kind, name));
        // One that is there may be about to go with another gateway.
        let is_in_force =
            async || may(client, ("list", resource), self.binding.metadata.namespace.clone()).await;
        if requests.get(&target).await?.is_none() && is_in_force().await? {
            return Ok(());
        }
        requests.apply(&target, Part::AllButStatus, &self.binding).await?;
        for pause in CHECKS {
            sleep(Duration::from_millis(pause)).await;
            if is_in_force().await? {
                return Ok(());
            }
        }
        let message = format!("RoleBinding {} has no effect", self.binding.name_any());
        Err(ApiError::Refused { code: 403, message })
    }
}

/// Returns whether the client has the right to that verb on a kind, in a namespace or in all.
pub async fn may(
    client: &Client,
    (verb, resource): (&str, &ApiResource),
    namespace: Option<String>,
) -> Result<bool, ApiError> {
    let attributes = ResourceAttributes {
        namespace,
        verb: Some(verb.to_owned()),
        group: Some(resource.group.clone()),
        resource: Some(resource.plural.clone()),
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec {
        resource_attributes: Some(attributes),
        ..SelfSubjectAccessReviewSpec::default()
    };
    let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
    let (api, parameters) = (Api::all(client.clone()), PostParams::default());
    let reviewed = answer("SelfSubjectAccessReview", api.create(&parameters, &review)).await?;
    Ok(reviewed.status.is_some_and(|status| status.allowed))
}
