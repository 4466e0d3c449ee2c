//! Pods of gateways that have not started.

use fabric_api::labels;
use fabric_index::pod_start::Delay;
use fabric_kube_client::requests::{Name, name};
use jiff::Timestamp;
use kube::ResourceExt as _;

use super::{Condition, Read, Status};

/// Pod of a gateway that has not started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StartingPod {
    pub(super) gateway: Name,
    pub(super) delay: Delay,
}

impl StartingPod {
    /// `None` for a pod that runs, that ends, or is none of a gateway.
    pub(super) fn of(read: &Read) -> Option<Self> {
        let gateway = read.labels().get(labels::GATEWAY_NAME)?;
        let component = read.labels().get(labels::COMPONENT);
        let stays = read.metadata.deletion_timestamp.is_none();
        let status = read.status.as_ref()?;
        if component.is_none_or(|of| of != labels::GATEWAY) || !stays || status.is_ready() {
            return None;
        }
        let since = read.metadata.creation_timestamp.as_ref().map(|created| created.0);
        let (namespace, _) = name(&read.metadata);
        let delay = status.delay(since)?;
        Some(Self { gateway: (namespace, gateway.clone()), delay })
    }
}

impl Status {
    fn delay(&self, since: Option<Timestamp>) -> Option<Delay> {
        let containers = self.init_container_statuses.iter().chain(&self.container_statuses);
        let waiting = containers.filter_map(|container| container.state.waiting.as_ref());
        let waiting = waiting.map(|of| (&of.reason, &of.message));
        let is_unplaced = |of: &&Condition| of.type_ == "PodScheduled" && of.status == "False";
        let unplaced = self.conditions.iter().filter(is_unplaced);
        let all = waiting.chain(unplaced.map(|of| (&of.reason, &of.message)));
        Delay::first(all.map(|(reason, message)| Delay {
            reason: reason.clone(),
            message: message.clone(),
            since,
        }))
    }
}
