//! One GatewayServer or GatewayClient, and what it is to do.

use fabric_api::check::Fault;
use fabric_api::fabric::{GatewayConfig, NO_MTU, PeerEndpoint, Role};
use fabric_api::networking::{GatewayClient, GatewayServer};
use fabric_api::{ClusterId, PublicKey, check, labels};
use fabric_index::{Index, key_pair};
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::api::core::v1::LocalObjectReference;

use crate::problems::Problems;

/// A gateway that is to run, or goes on as it did.
#[derive(Debug)]
pub struct Gateway<'a> {
    pub reference: ObjectRef,
    pub uid: String,
    pub peer: ClusterId,
    pub end: End<'a>,
    /// `None` if something is wrong: then what is published of it stays.
    pub settings: Option<GatewaySettings>,
    /// Objects with the keys that it requires.
    pub needed: Vec<ObjectRef>,
}

#[derive(Clone, Copy, Debug)]
pub enum End<'a> {
    Server(&'a GatewayServer),
    Client(&'a GatewayClient),
}

#[derive(Clone, Debug)]
pub struct GatewaySettings {
    pub listen_port: Option<u16>,
    pub endpoint: Option<PeerEndpoint>,
    pub mtu: u32,
    pub secret_name: String,
    pub peer_public_key: Option<PublicKey>,
}

impl<'a> Gateway<'a> {
    pub fn config(&self) -> ObjectRef {
        ObjectRef { kind: Kind::GatewayConfig, ..self.reference.clone() }
    }

    pub fn role(&self) -> Role {
        match self.end {
            End::Server(_) => Role::Server,
            End::Client(_) => Role::Client,
        }
    }

    pub fn namespace(&self) -> &str {
        self.reference.namespace.as_deref().unwrap_or_default()
    }

    pub fn secret_ref(&self) -> Option<&LocalObjectReference> {
        match self.end {
            End::Server(server) => server.spec.secret_ref.as_ref(),
            End::Client(client) => client.spec.secret_ref.as_ref(),
        }
    }

    /// The Secret with its key pair: the one named, or one that is made for it.
    pub fn key_pair(&self) -> ObjectRef {
        key_pair(&self.reference, self.secret_ref())
    }

    fn mtu(&self) -> Option<i64> {
        match self.end {
            End::Server(server) => server.spec.mtu,
            End::Client(client) => client.spec.mtu,
        }
    }

    /// GatewayConfig in use for this very gateway.
    pub fn published(&self, index: &'a Index) -> Option<&'a GatewayConfig> {
        running(index, &self.reference, &self.uid)
    }
}

pub(crate) fn running<'a>(
    index: &'a Index,
    gateway: &ObjectRef,
    uid: &str,
) -> Option<&'a GatewayConfig> {
    let config = ObjectRef { kind: Kind::GatewayConfig, ..gateway.clone() };
    let config = index.typed::<GatewayConfig>(&config)?;
    (config.spec.gateway_uid == uid).then_some(config)
}

/// Settings in the gateway's own manifest, without the peer's key. `None` if any is at fault.
pub(crate) fn settings(
    index: &Index,
    gateway: &Gateway<'_>,
    problems: &mut Problems,
) -> Option<GatewaySettings> {
    let (mut faults, ends) = match gateway.end {
        End::Server(server) => {
            let port = listen_port(index, server).map(|port| (Some(port), None));
            (check::gateway_server(server), port)
        }
        End::Client(client) => {
            let addresses = client.spec.endpoint.addresses.clone();
            let port = check::client_port(client);
            let endpoint = port.map(|port| (None, Some(PeerEndpoint { addresses, port })));
            (check::gateway_client(client), endpoint)
        }
    };
    let peer_label = check::label_field(labels::REMOTE_CLUSTER_ID);
    faults.retain(|fault| fault.field != peer_label); // reported already
    faults.iter().for_each(|fault| problems.fault(&gateway.reference, fault));
    let (listen_port, endpoint) = ends.ok().filter(|_| faults.is_empty())?;
    let mtu = gateway.mtu().and_then(|mtu| u32::try_from(mtu).ok()).unwrap_or(NO_MTU);
    let secret_name = gateway.key_pair().name;
    Some(GatewaySettings { listen_port, endpoint, mtu, secret_name, peer_public_key: None })
}

/// A pod has all ports for itself; standalone, a node port is the host's.
fn listen_port(index: &Index, server: &GatewayServer) -> Result<u16, Fault> {
    if index.settings.kubernetes { check::service_port(server) } else { check::listen_port(server) }
}
