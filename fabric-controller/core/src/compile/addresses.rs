//! IP resources of weft's own: addresses of nodes and gateways.

use fabric_api::ipam::{IP, IPSpec};
use fabric_api::labels;
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::api::core::v1::ObjectReference;

use super::Compiler;
use super::cluster::{Cluster, Granted};
use super::gateway::Gateway;
use super::names::of_gateway;

impl Compiler<'_> {
    /// `what` is `overlay`, `external-ipv4` or `external-ipv6`.
    pub(super) fn of_node(&self, node: &str, what: &str) -> ObjectRef {
        self.own(Kind::Ip, &format!("node-{node}-{what}"))
    }

    pub(super) fn own_addresses(&mut self, cluster: &Cluster, gateways: &[Gateway<'_>]) {
        let owners = cluster.nodes.iter().map(|n| ObjectRef::new(Kind::Node, "", &n.name));
        let ready = cluster.is_ready();
        for node in owners {
            let family = |ipv4| cluster.external_of(ipv4);
            self.own_address(
                self.of_node(&node.name, "overlay"),
                cluster.internal.as_ref(),
                &node,
                ready,
            );
            self.own_address(self.of_node(&node.name, "external-ipv4"), family(true), &node, ready);
            self.own_address(
                self.of_node(&node.name, "external-ipv6"),
                family(false),
                &node,
                ready,
            );
        }
        // A pod has its own address; standalone, the veth to the host needs one.
        let of_gateways: &[&str] =
            if self.index.settings.kubernetes { &["overlay"] } else { &["overlay", "link"] };
        for gateway in gateways {
            for what in of_gateways {
                let ip = of_gateway(&gateway.reference, what);
                self.own_address(ip, cluster.internal.as_ref(), &gateway.reference, ready);
            }
        }
    }

    fn own_address(
        &mut self,
        ip: ObjectRef,
        network: Option<&Granted>,
        of: &ObjectRef,
        ready: bool,
    ) {
        let Some(Granted { network, cidr }) = network else {
            if !ready {
                self.keep(ip); // its prefix may come back
            }
            return;
        };
        // Liqo's field must not be empty; this address has no other meaning.
        let unspecified = if cidr.is_ipv4() { "0.0.0.0" } else { "::" };
        let spec = IPSpec {
            ip: unspecified.to_owned(),
            network_ref: Some(ObjectReference {
                api_version: Some(Kind::Network.api_version().to_owned()),
                kind: Some(Kind::Network.as_str().to_owned()),
                namespace: network.namespace.clone(),
                name: Some(network.name.clone()),
                ..ObjectReference::default()
            }),
            ..IPSpec::default()
        };
        let mut own = IP::new(&ip.name, spec);
        own.metadata.namespace = ip.namespace;
        own.metadata.labels =
            Some([(labels::HOST_UNREACHABLE.to_owned(), "true".to_owned())].into());
        self.want_owned(own, of);
    }
}
