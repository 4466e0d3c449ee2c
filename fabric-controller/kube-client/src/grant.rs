//! Rights that a program gives itself, in one namespace at a time.

use std::time::Duration;

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::rbac::v1::RoleBinding;
use kube::api::{ApiResource, PostParams};
use kube::{Api, Client, ResourceExt as _};
use tokio::time::sleep;

use crate::answer::answer;
use crate::error::ApiError;
use crate::requests::{Part, Requests, Target};

/// Intervals in milliseconds between looks at whether a binding that was written is in force.
const CHECKS: [u64; 5] = [20, 50, 100, 300, 1000];

/// Right to list objects of a kind in a namespace, by a RoleBinding.
#[derive(Clone, Debug)]
pub struct Grant {
    binding: RoleBinding,
    manager: &'static str,
}

impl Grant {
    /// `manager` is the field manager of the binding.
    pub fn new(binding: RoleBinding, manager: &'static str) -> Self {
        Self { binding, manager }
    }

    /// Writes the binding unless the right is there, and waits until it is in force.
    pub(crate) async fn acquire(
        &self,
        client: &Client,
        resource: &ApiResource,
    ) -> Result<(), ApiError> {
        if self.is_in_force(client, resource).await? {
            return Ok(());
        }
        let kind = ApiResource::erase::<RoleBinding>(&());
        let name = (self.binding.namespace().unwrap_or_default(), self.binding.name_any());
        let requests = Requests::new(client.clone(), self.manager);
        requests.apply(&Target::new(kind, name), Part::AllButStatus, &self.binding).await?;
        for pause in CHECKS {
            sleep(Duration::from_millis(pause)).await;
            if self.is_in_force(client, resource).await? {
                return Ok(());
            }
        }
        let message = format!("RoleBinding {} has no effect", self.binding.name_any());
        Err(ApiError::Refused { code: 403, message })
    }

    async fn is_in_force(&self, client: &Client, resource: &ApiResource) -> Result<bool, ApiError> {
        let attributes = ResourceAttributes {
            namespace: self.binding.namespace(),
            verb: Some("list".to_owned()),
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
}
