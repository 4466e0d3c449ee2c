//! Gateways in Kubernetes: which are to run, and what is told of where they do.

use fabric_api::fabric::{GatewayConfig, NodeGateway};
use fabric_api::labels;
use fabric_api::networking::InternalEndpoint;
use fabric_store::{Kind, Object, ObjectRef};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::gateway::{End, Gateway};
use super::{Compiler, owner};
use crate::index::key_pair;
use crate::placement::{Placement, PlannedGateway};
use crate::publish::copy_status;

impl Compiler<'_> {
    pub(super) fn placed_gateways(&mut self, gateways: &[Gateway<'_>]) {
        for gateway in gateways {
            self.label_secret(gateway);
            if let Some(planned) = self.planned(gateway) {
                self.out.gateways.insert(gateway.reference.clone(), planned);
            }
            let status = self.placed_status(gateway);
            self.out.statuses.insert(gateway.reference.clone(), status);
        }
    }

    /// A gateway that has never run is made only as it should be.
    fn planned(&self, gateway: &Gateway<'_>) -> Option<PlannedGateway> {
        if gateway.settings.is_none() && self.index.placement(&gateway.reference).is_none() {
            return None;
        }
        let mut object = self.index.get(&gateway.reference)?.clone();
        copy_status(None, &mut object);
        let secret_name = key_pair(&gateway.reference, gateway.secret_ref()).name;
        Some(PlannedGateway { object, peer: gateway.peer.clone(), secret_name })
    }

    fn placed_status(&self, gateway: &Gateway<'_>) -> Object {
        let placement = self.index.placement(&gateway.reference).cloned().unwrap_or_default();
        let Placement { workload, endpoint, internal, .. } = placement;
        // While there is no pod, it is found where it was.
        let moving = internal.is_none();
        let internal = self.internal_endpoint(gateway);
        let secret = self.secret_reference(gateway);
        match gateway.end {
            End::Server(server) => {
                let mut server = server.clone();
                let status = server.status.get_or_insert_default();
                status.server_ref = workload;
                status.endpoint = endpoint.or_else(|| status.endpoint.take().filter(|_| moving));
                status.secret_ref = secret;
                status.internal_endpoint = internal;
                server.into()
            }
            End::Client(client) => {
                let mut client = client.clone();
                let status = client.status.get_or_insert_default();
                status.client_ref = workload;
                status.secret_ref = secret;
                status.internal_endpoint = internal;
                client.into()
            }
        }
    }

    /// Where the gateway's pod is, or was last.
    pub(super) fn internal_endpoint(&self, gateway: &Gateway<'_>) -> Option<InternalEndpoint> {
        let placement = self.index.placement(&gateway.reference);
        let now = placement.and_then(|placement| placement.internal.clone());
        now.or_else(|| match gateway.end {
            End::Server(server) => server.status.as_ref()?.internal_endpoint.clone(),
            End::Client(client) => client.status.as_ref()?.internal_endpoint.clone(),
        })
    }

    /// The way from any node to the gateway's pod.
    pub(super) fn pod_gateway(
        &self,
        gateway: &Gateway<'_>,
        config: &GatewayConfig,
    ) -> Option<NodeGateway> {
        let underlay = self.internal_endpoint(gateway)?.ip?.parse().ok()?;
        Some(NodeGateway { overlay: config.spec.overlay.address, underlay, via: None })
    }

    /// What could not be made.
    pub(super) fn placement_faults(&mut self, gateway: &Gateway<'_>) {
        let placement = self.index.placement(&gateway.reference);
        for fault in placement.into_iter().flat_map(|placement| &placement.faults) {
            self.fault(&gateway.reference, fault);
        }
    }

    /// A Secret that the user named may lack the labels. One of another peer's is none of this.
    fn label_secret(&mut self, gateway: &Gateway<'_>) {
        let secret = key_pair(&gateway.reference, gateway.secret_ref());
        let Some(object) = self.index.get(&secret) else { return };
        match object.label(labels::REMOTE_CLUSTER_ID) {
            Some(other) if other != gateway.peer.as_str() => {
                let message = format!("{secret} is labelled as that of the peer {other}");
                self.problem(&gateway.reference, "spec.secretRef.name", message);
            }
            Some(_) if object.label(labels::GATEWAY_RESOURCE) == Some("true") => {}
            Some(_) | None => {
                self.out.unlabelled.insert(secret, gateway.peer.clone());
            }
        }
    }

    /// The Secret with the gateway's keys, if it is there.
    fn secret_reference(&self, gateway: &Gateway<'_>) -> Option<ObjectReference> {
        let secret = key_pair(&gateway.reference, gateway.secret_ref());
        self.index.get(&secret)?;
        Some(ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Secret".to_owned()),
            namespace: secret.namespace,
            name: Some(secret.name),
            ..ObjectReference::default()
        })
    }

    /// In Kubernetes, what an object of that namespace goes away with. A node's leave in an order of
    /// their own, and the cluster's stay.
    pub(super) fn owned_by(
        &self,
        owner: &ObjectRef,
        namespace: Option<&str>,
    ) -> Option<Vec<OwnerReference>> {
        let of_a_peering =
            matches!(owner.kind, Kind::Configuration | Kind::GatewayServer | Kind::GatewayClient);
        let near = of_a_peering && owner.namespace.as_deref() == namespace;
        let object = self.index.get(owner).filter(|object| !object.uid().is_empty())?;
        (self.index.settings.kubernetes && near).then(|| vec![owner::reference_to(object)])
    }
}
