//! Gateways in Kubernetes: which are to run, and the reported placement of those that do.

use std::net::IpAddr;

use fabric_api::networking::InternalEndpoint;
use fabric_objects::{Kind, Object, ObjectRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::gateway::{End, Gateway};
use super::{Compiler, owner};
use crate::index::key_pair;
use crate::placement::{Placement, PlannedGateway};

impl<'a> Compiler<'a> {
    pub(super) fn placed_gateways(&mut self, gateways: &[Gateway<'_>]) {
        for gateway in gateways {
            self.complete_secret(gateway);
            if let Some(planned) = self.planned(gateway) {
                self.out.gateways.insert(gateway.reference.clone(), planned);
            }
            let status = self.placed_status(gateway);
            self.out.statuses.insert(gateway.reference.clone(), status);
        }
    }

    /// A gateway that has never run is made only as it should be.
    fn planned(&self, gateway: &Gateway<'_>) -> Option<PlannedGateway> {
        if gateway.settings.is_none() && self.placement(gateway).is_none() {
            return None;
        }
        let mut object = self.index.get(&gateway.reference)?.clone();
        object.copy_status(None);
        let secret_name = key_pair(&gateway.reference, gateway.secret_ref()).name;
        Some(PlannedGateway { object, peer: gateway.peer.clone(), secret_name })
    }

    fn placed_status(&self, gateway: &Gateway<'_>) -> Object {
        let placement = self.placement(gateway).cloned().unwrap_or_default();
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

    /// Address and node of the gateway's pod, now or a moment ago.
    pub(super) fn internal_endpoint(&self, gateway: &Gateway<'_>) -> Option<InternalEndpoint> {
        let placement = self.placement(gateway);
        let now = placement.and_then(|placement| placement.internal.clone());
        if now.is_some() || placement.is_some_and(|placement| placement.is_lost) {
            return now;
        }
        match gateway.end {
            End::Server(server) => server.status.as_ref()?.internal_endpoint.clone(),
            End::Client(client) => client.status.as_ref()?.internal_endpoint.clone(),
        }
    }

    /// VXLAN endpoint of the gateway for the nodes.
    pub(super) fn pod_address(&self, gateway: &Gateway<'_>) -> Option<IpAddr> {
        // Standalone, its status has the address of its link, which only its host can use.
        let internal = self.internal_endpoint(gateway).filter(|_| self.index.settings.kubernetes);
        internal?.ip?.parse().ok()
    }

    /// Placement of this very gateway: that of a former one of the same name does not count.
    pub(super) fn placement(&self, gateway: &Gateway<'_>) -> Option<&'a Placement> {
        self.index.placement(&gateway.reference).filter(|placement| placement.uid == gateway.uid)
    }

    /// Reports the faults of the gateway's placement.
    pub(super) fn placement_faults(&mut self, gateway: &Gateway<'_>) {
        let placement = self.placement(gateway);
        for fault in placement.into_iter().flat_map(|placement| &placement.faults) {
            self.fault(&gateway.reference, fault);
        }
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
