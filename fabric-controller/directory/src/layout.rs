//! Paths of the store's files.

use std::path::PathBuf;

use fabric_objects::{Kind, ObjectRef};

/// The directories of one cluster on this host.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) manifests: Option<PathBuf>,
    pub(crate) published: PathBuf,
    pub(crate) state: Option<PathBuf>,
    /// Socket of the supervisor's change notifications.
    pub(crate) changes: Option<PathBuf>,
}

impl Layout {
    /// Weft's own objects of this kind.
    pub(crate) fn objects(&self, kind: Kind) -> Option<PathBuf> {
        let base = match kind {
            Kind::GatewayConfig
            | Kind::NodeConfig
            | Kind::FabricRecord
            | Kind::GatewayRecord
            | Kind::Connection => Some(&self.published),
            Kind::Network | Kind::Ip | Kind::Secret => self.state.as_ref(),
            Kind::Namespace
            | Kind::ConfigMap
            | Kind::Node
            | Kind::Configuration
            | Kind::GatewayServer
            | Kind::GatewayClient
            | Kind::PublicKey => None,
        };
        base.map(|base| base.join(kind.plural()))
    }

    /// Folder of the last good manifests, one file for each of the user's.
    pub(crate) fn last_good(&self) -> Option<PathBuf> {
        self.state.as_ref().map(|base| base.join("last-good"))
    }

    /// Statuses of objects of this kind, the user's as well as weft's own.
    pub(crate) fn statuses(&self, kind: Kind) -> Option<PathBuf> {
        let base = match kind {
            Kind::Configuration
            | Kind::GatewayServer
            | Kind::GatewayClient
            | Kind::GatewayConfig
            | Kind::Connection
            | Kind::NodeConfig => Some(&self.published),
            Kind::Network | Kind::Ip => self.state.as_ref(),
            Kind::Namespace
            | Kind::ConfigMap
            | Kind::Secret
            | Kind::Node
            | Kind::PublicKey
            | Kind::FabricRecord
            | Kind::GatewayRecord => None,
        };
        base.map(|base| base.join("status").join(kind.plural()))
    }

    /// True for kinds that the user has no manifests of.
    pub(crate) fn is_published(kind: Kind) -> bool {
        matches!(
            kind,
            Kind::GatewayConfig
                | Kind::NodeConfig
                | Kind::FabricRecord
                | Kind::GatewayRecord
                | Kind::Connection
        )
    }

    /// `<namespace>.<name>.yaml`, or `<name>.yaml` for cluster-wide kinds. A namespace has no dots.
    pub(crate) fn file_name(of: &ObjectRef) -> String {
        match &of.namespace {
            Some(namespace) => format!("{namespace}.{}.yaml", of.name),
            None => format!("{}.yaml", of.name),
        }
    }

    /// The other way round.
    pub(crate) fn reference(kind: Kind, file: &str) -> Option<ObjectRef> {
        let stem = file.strip_suffix(".yaml")?;
        if !kind.is_namespaced() {
            return Some(ObjectRef::new(kind, "", stem));
        }
        let (namespace, name) = stem.split_once('.')?;
        Some(ObjectRef::new(kind, namespace, name))
    }
}
