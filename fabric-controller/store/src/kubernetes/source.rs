//! One watch: of all objects of a kind, or of a single one.

use fabric_api::labels;
use fabric_kube_client::reflector::Selection;
use fabric_kube_client::resource;
use fabric_objects::{Kind, ObjectRef};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Source {
    All(Kind),
    /// Objects that are labelled as of gateways.
    Labelled(Kind),
    /// Secrets in the namespace of a gateway, labelled as of gateways.
    Keys(String),
    One(ObjectRef),
}

impl Source {
    /// Source of the objects of a kind that weft needs: a cluster has many unrelated Secrets and
    /// ConfigMaps. `installation` is the namespace of the cluster's own objects.
    pub(super) fn of(kind: Kind, installation: &str) -> Self {
        match kind {
            Kind::Secret => Self::Labelled(kind),
            Kind::ConfigMap => {
                Self::One(ObjectRef::new(kind, installation, labels::CLUSTER_ID_CONFIGMAP))
            }
            Kind::Namespace
            | Kind::Node
            | Kind::Network
            | Kind::Ip
            | Kind::Configuration
            | Kind::Connection
            | Kind::GatewayServer
            | Kind::GatewayClient
            | Kind::PublicKey
            | Kind::GatewayConfig
            | Kind::NodeConfig
            | Kind::FabricRecord
            | Kind::GatewayRecord => Self::All(kind),
        }
    }

    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::All(kind) | Self::Labelled(kind) => *kind,
            Self::Keys(_) => Kind::Secret,
            Self::One(object) => object.kind,
        }
    }

    pub(super) fn selection(&self) -> Selection {
        let resource = resource(self.kind());
        let label = || format!("{}=true", labels::GATEWAY_RESOURCE);
        match self {
            Self::All(_) => Selection::all(resource),
            Self::Labelled(_) => Selection::all(resource).labels(&label()),
            Self::Keys(namespace) => Selection::all(resource).inside(namespace).labels(&label()),
            Self::One(object) => Selection::one(resource, object),
        }
    }
}
