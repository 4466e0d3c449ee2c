use fabric_api::ClusterId;
use fabric_api::networking::{
    EndpointStatus, GatewayClient, GatewayClientSpec, GatewayServer, GatewayServerSpec,
    ServerEndpoint, ServiceType, secret_name,
};
use gotmpl::{Value, tmap};
use k8s_openapi::api::core::v1::{LocalObjectReference, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Variables that a template can use.
#[derive(Clone, Debug, PartialEq)]
pub struct Variables {
    /// `.Spec`
    pub spec: GatewaySpec,
    /// `.Name`, of the GatewayServer or GatewayClient.
    pub name: String,
    /// `.Namespace`, of the same.
    pub namespace: String,
    /// `.GatewayUID`, of the same.
    pub gateway_uid: String,
    /// `.ClusterID`, the peer's.
    pub cluster_id: String,
    /// `.SecretName`, the one in the gateway's spec. Empty if that has none.
    pub secret_name: String,
}

/// The whole spec of a gateway.
#[derive(Clone, Debug, PartialEq)]
pub enum GatewaySpec {
    Server(GatewayServerSpec),
    Client(GatewayClientSpec),
}

impl Variables {
    pub fn of_server(of: &GatewayServer, peer: &ClusterId) -> Self {
        let spec = GatewaySpec::Server(of.spec.clone());
        Self::new(&of.metadata, peer, of.spec.secret_ref.as_ref(), spec)
    }

    pub fn of_client(of: &GatewayClient, peer: &ClusterId) -> Self {
        let spec = GatewaySpec::Client(of.spec.clone());
        Self::new(&of.metadata, peer, of.spec.secret_ref.as_ref(), spec)
    }

    fn new(
        of: &ObjectMeta,
        peer: &ClusterId,
        secret: Option<&LocalObjectReference>,
        spec: GatewaySpec,
    ) -> Self {
        Self {
            spec,
            name: of.name.clone().unwrap_or_default(),
            namespace: of.namespace.clone().unwrap_or_default(),
            gateway_uid: of.uid.clone().unwrap_or_default(),
            cluster_id: peer.to_string(),
            secret_name: named(secret),
        }
    }

    /// The same as Liqo's Go types: every field is there, with its zero value if it is not set.
    pub(crate) fn data(&self) -> Value {
        tmap! {
            "Spec" => match &self.spec {
                GatewaySpec::Server(spec) => server(spec),
                GatewaySpec::Client(spec) => client(spec),
            },
            "Name" => self.name,
            "Namespace" => self.namespace,
            "GatewayUID" => self.gateway_uid,
            "ClusterID" => self.cluster_id,
            "SecretName" => self.secret_name,
        }
    }
}

fn server(spec: &GatewayServerSpec) -> Value {
    tmap! {
        "ServerTemplateRef" => reference(spec.server_template_ref.as_ref()),
        "MTU" => spec.mtu.unwrap_or_default(),
        "Endpoint" => server_endpoint(&spec.endpoint),
        "SecretRef" => tmap! { "Name" => named(spec.secret_ref.as_ref()) },
        "ServiceAnnotations" => spec.service_annotations,
        "ServiceLabels" => spec.service_labels,
    }
}

fn server_endpoint(of: &ServerEndpoint) -> Value {
    tmap! {
        "Port" => of.port.unwrap_or_default(),
        "Ports" => of.ports,
        "ServiceType" => service_type(of.service_type),
        "NodePort" => of.node_port,
        "NodePorts" => of.node_ports,
        "LoadBalancerIP" => of.load_balancer_ip,
    }
}

fn service_type(of: ServiceType) -> &'static str {
    match of {
        ServiceType::ClusterIP => "ClusterIP",
        ServiceType::NodePort => "NodePort",
        ServiceType::LoadBalancer => "LoadBalancer",
        ServiceType::ExternalName => "ExternalName",
    }
}

fn client(spec: &GatewayClientSpec) -> Value {
    tmap! {
        "ClientTemplateRef" => reference(spec.client_template_ref.as_ref()),
        "MTU" => spec.mtu.unwrap_or_default(),
        "Endpoint" => client_endpoint(&spec.endpoint),
        "SecretRef" => tmap! { "Name" => named(spec.secret_ref.as_ref()) },
    }
}

fn client_endpoint(of: &EndpointStatus) -> Value {
    tmap! {
        "Addresses" => of.addresses,
        "Port" => of.port.unwrap_or_default(),
        "Protocol" => of.protocol,
        "Ports" => of.ports,
    }
}

fn reference(of: Option<&ObjectReference>) -> Value {
    let of = of.cloned().unwrap_or_default();
    tmap! {
        "Kind" => of.kind.unwrap_or_default(),
        "Namespace" => of.namespace.unwrap_or_default(),
        "Name" => of.name.unwrap_or_default(),
        "UID" => of.uid.unwrap_or_default(),
        "APIVersion" => of.api_version.unwrap_or_default(),
        "ResourceVersion" => of.resource_version.unwrap_or_default(),
        "FieldPath" => of.field_path.unwrap_or_default(),
    }
}

fn named(secret: Option<&LocalObjectReference>) -> String {
    secret_name(secret).unwrap_or_default().to_owned()
}
