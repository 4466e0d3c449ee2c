use std::fmt;
use std::ptr;
use std::sync::Arc;

use fabric_api::check::{self, Fault};
use fabric_api::{fabric, ipam, networking};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde_json::Value;

/// The kinds that weft reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Namespace,
    ConfigMap,
    Secret,
    Node,
    Network,
    Ip,
    Configuration,
    Connection,
    GatewayServer,
    GatewayClient,
    PublicKey,
    GatewayConfig,
    NodeConfig,
    FabricRecord,
    GatewayRecord,
}

/// A resource of one of these kinds. Its clones share it. Prints without what a Secret holds.
#[derive(Clone)]
pub enum Object {
    Namespace(Arc<core::Namespace>),
    ConfigMap(Arc<core::ConfigMap>),
    Secret(Arc<core::Secret>),
    Node(Arc<core::Node>),
    Network(Arc<ipam::Network>),
    Ip(Arc<ipam::IP>),
    Configuration(Arc<networking::Configuration>),
    Connection(Arc<networking::Connection>),
    GatewayServer(Arc<networking::GatewayServer>),
    GatewayClient(Arc<networking::GatewayClient>),
    PublicKey(Arc<networking::PublicKeyObject>),
    GatewayConfig(Arc<fabric::GatewayConfig>),
    NodeConfig(Arc<fabric::NodeConfig>),
    FabricRecord(Arc<fabric::FabricRecord>),
    GatewayRecord(Arc<fabric::GatewayRecord>),
}

/// Names a resource. Prints as `kind namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectRef {
    pub kind: Kind,
    /// Absent for cluster-wide kinds.
    pub namespace: Option<String>,
    pub name: String,
}

impl Kind {
    pub const ALL: [Self; 15] = [
        Self::Namespace,
        Self::ConfigMap,
        Self::Secret,
        Self::Node,
        Self::Network,
        Self::Ip,
        Self::Configuration,
        Self::Connection,
        Self::GatewayServer,
        Self::GatewayClient,
        Self::PublicKey,
        Self::GatewayConfig,
        Self::NodeConfig,
        Self::FabricRecord,
        Self::GatewayRecord,
    ];

    /// Group and version, such as `networking.liqo.io/v1beta1`.
    pub fn api_version(self) -> &'static str {
        match self {
            Self::Namespace | Self::ConfigMap | Self::Secret | Self::Node => "v1",
            Self::Network | Self::Ip => "ipam.liqo.io/v1alpha1",
            Self::Configuration
            | Self::Connection
            | Self::GatewayServer
            | Self::GatewayClient
            | Self::PublicKey => "networking.liqo.io/v1beta1",
            Self::GatewayConfig | Self::NodeConfig | Self::FabricRecord | Self::GatewayRecord => {
                "fabric.weft.dev/v1alpha1"
            }
        }
    }

    /// The kind as manifests spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Namespace => "Namespace",
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::Node => "Node",
            Self::Network => "Network",
            Self::Ip => "IP",
            Self::Configuration => "Configuration",
            Self::Connection => "Connection",
            Self::GatewayServer => "GatewayServer",
            Self::GatewayClient => "GatewayClient",
            Self::PublicKey => "PublicKey",
            Self::GatewayConfig => "GatewayConfig",
            Self::NodeConfig => "NodeConfig",
            Self::FabricRecord => "FabricRecord",
            Self::GatewayRecord => "GatewayRecord",
        }
    }

    /// The plural, which also names folders.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Namespace => "namespaces",
            Self::ConfigMap => "configmaps",
            Self::Secret => "secrets",
            Self::Node => "nodes",
            Self::Network => "networks",
            Self::Ip => "ips",
            Self::Configuration => "configurations",
            Self::Connection => "connections",
            Self::GatewayServer => "gatewayservers",
            Self::GatewayClient => "gatewayclients",
            Self::PublicKey => "publickeies",
            Self::GatewayConfig => "gatewayconfigs",
            Self::NodeConfig => "nodeconfigs",
            Self::FabricRecord => "fabricrecords",
            Self::GatewayRecord => "gatewayrecords",
        }
    }

    pub fn is_namespaced(self) -> bool {
        !matches!(
            self,
            Self::Namespace
                | Self::Node
                | Self::NodeConfig
                | Self::FabricRecord
                | Self::GatewayRecord
        )
    }

    /// The kind that a manifest's `apiVersion` and `kind` name; `None` if weft has no use for it.
    pub fn from_type(api_version: &str, kind: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|k| k.api_version() == api_version && k.as_str() == kind)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The same expression for every kind.
macro_rules! each {
    ($object:expr, $x:ident => $body:expr) => {
        match $object {
            Object::Namespace($x) => $body,
            Object::ConfigMap($x) => $body,
            Object::Secret($x) => $body,
            Object::Node($x) => $body,
            Object::Network($x) => $body,
            Object::Ip($x) => $body,
            Object::Configuration($x) => $body,
            Object::Connection($x) => $body,
            Object::GatewayServer($x) => $body,
            Object::GatewayClient($x) => $body,
            Object::PublicKey($x) => $body,
            Object::GatewayConfig($x) => $body,
            Object::NodeConfig($x) => $body,
            Object::FabricRecord($x) => $body,
            Object::GatewayRecord($x) => $body,
        }
    };
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Secret(_) = self {
            return write!(f, "{} <redacted>", self.reference());
        }
        each!(self, x => fmt::Debug::fmt(x, f))
    }
}

impl PartialEq for Object {
    fn eq(&self, other: &Self) -> bool {
        each!(self, x => is_same(&**x, other))
    }
}

fn is_same<'a, T: PartialEq + 'a>(one: &T, other: &'a Object) -> bool
where
    &'a T: TryFrom<&'a Object>,
{
    <&T>::try_from(other).is_ok_and(|other| ptr::eq(one, other) || one == other)
}

impl Object {
    pub fn kind(&self) -> Kind {
        match self {
            Self::Namespace(_) => Kind::Namespace,
            Self::ConfigMap(_) => Kind::ConfigMap,
            Self::Secret(_) => Kind::Secret,
            Self::Node(_) => Kind::Node,
            Self::Network(_) => Kind::Network,
            Self::Ip(_) => Kind::Ip,
            Self::Configuration(_) => Kind::Configuration,
            Self::Connection(_) => Kind::Connection,
            Self::GatewayServer(_) => Kind::GatewayServer,
            Self::GatewayClient(_) => Kind::GatewayClient,
            Self::PublicKey(_) => Kind::PublicKey,
            Self::GatewayConfig(_) => Kind::GatewayConfig,
            Self::NodeConfig(_) => Kind::NodeConfig,
            Self::FabricRecord(_) => Kind::FabricRecord,
            Self::GatewayRecord(_) => Kind::GatewayRecord,
        }
    }

    /// Conditions in the status; none of kinds that have none.
    pub fn conditions(&self) -> &[Condition] {
        match self {
            Self::Configuration(x) => x.status.as_ref().map(|status| &status.conditions),
            Self::GatewayServer(x) => x.status.as_ref().map(|status| &status.conditions),
            Self::GatewayClient(x) => x.status.as_ref().map(|status| &status.conditions),
            Self::Namespace(_)
            | Self::ConfigMap(_)
            | Self::Secret(_)
            | Self::Node(_)
            | Self::Network(_)
            | Self::Ip(_)
            | Self::Connection(_)
            | Self::PublicKey(_)
            | Self::GatewayConfig(_)
            | Self::NodeConfig(_)
            | Self::FabricRecord(_)
            | Self::GatewayRecord(_) => None,
        }
        .map_or(&[], Vec::as_slice)
    }

    /// The same, to be changed; `make` a status if there is none.
    pub fn conditions_mut(&mut self, make: bool) -> Option<&mut Vec<Condition>> {
        fn status<T: Default>(of: &mut Option<T>, make: bool) -> Option<&mut T> {
            if make { Some(of.get_or_insert_default()) } else { of.as_mut() }
        }
        match self {
            Self::Configuration(x) => {
                Some(&mut status(&mut Arc::make_mut(x).status, make)?.conditions)
            }
            Self::GatewayServer(x) => {
                Some(&mut status(&mut Arc::make_mut(x).status, make)?.conditions)
            }
            Self::GatewayClient(x) => {
                Some(&mut status(&mut Arc::make_mut(x).status, make)?.conditions)
            }
            Self::Namespace(_)
            | Self::ConfigMap(_)
            | Self::Secret(_)
            | Self::Node(_)
            | Self::Network(_)
            | Self::Ip(_)
            | Self::Connection(_)
            | Self::PublicKey(_)
            | Self::GatewayConfig(_)
            | Self::NodeConfig(_)
            | Self::FabricRecord(_)
            | Self::GatewayRecord(_) => None,
        }
    }

    /// Takes over the status of `from`, or has none. Of a Configuration, `spec.local` goes with it.
    pub fn copy_status(&mut self, from: Option<&Self>) {
        macro_rules! copy {
            ($variant:ident, $to:expr) => {{
                let status = match from {
                    Some(Self::$variant(from)) => &from.status,
                    Some(_) | None => &None,
                };
                if $to.status != *status {
                    Arc::make_mut($to).status.clone_from(status);
                }
            }};
        }
        match self {
            Self::Network(to) => copy!(Network, to),
            Self::Ip(to) => copy!(Ip, to),
            Self::GatewayServer(to) => copy!(GatewayServer, to),
            Self::GatewayClient(to) => copy!(GatewayClient, to),
            Self::GatewayConfig(to) => copy!(GatewayConfig, to),
            Self::NodeConfig(to) => copy!(NodeConfig, to),
            Self::Configuration(to) => {
                copy!(Configuration, to);
                if let Some(Self::Configuration(from)) = from
                    && to.spec.local != from.spec.local
                {
                    Arc::make_mut(to).spec.local.clone_from(&from.spec.local);
                }
            }
            Self::Namespace(_)
            | Self::ConfigMap(_)
            | Self::Secret(_)
            | Self::Node(_)
            | Self::Connection(_)
            | Self::PublicKey(_)
            | Self::FabricRecord(_)
            | Self::GatewayRecord(_) => {}
        }
    }

    pub fn metadata(&self) -> &ObjectMeta {
        each!(self, x => &x.metadata)
    }

    pub fn metadata_mut(&mut self) -> &mut ObjectMeta {
        each!(self, x => &mut Arc::make_mut(x).metadata)
    }

    pub fn reference(&self) -> ObjectRef {
        ObjectRef {
            kind: self.kind(),
            namespace: self.namespace().map(str::to_owned),
            name: self.name().to_owned(),
        }
    }

    /// Empty only in an object that never was in a store.
    pub fn name(&self) -> &str {
        self.metadata().name.as_deref().unwrap_or_default()
    }

    /// Absent for cluster-wide kinds.
    pub fn namespace(&self) -> Option<&str> {
        self.metadata().namespace.as_deref().filter(|_| self.kind().is_namespaced())
    }

    /// Empty only in an object that never was in a store.
    pub fn uid(&self) -> &str {
        self.metadata().uid.as_deref().unwrap_or_default()
    }

    /// 0 only in an object that never was in a store.
    /// Uid and generation, which stand for all but the status.
    pub fn version(&self) -> (Option<String>, Option<i64>) {
        (self.metadata().uid.clone(), self.metadata().generation)
    }

    pub fn generation(&self) -> i64 {
        self.metadata().generation.unwrap_or_default()
    }

    pub fn label(&self, key: &str) -> Option<&str> {
        self.metadata().labels.as_ref()?.get(key).map(String::as_str)
    }

    /// Returns its own faults, independent of all other objects.
    pub fn faults(&self) -> Vec<Fault> {
        match self {
            Self::ConfigMap(x) => check::config_map(x),
            Self::Secret(x) => check::secret(x),
            Self::Node(x) => check::node(x),
            Self::Network(x) => check::network(x),
            Self::Ip(x) => check::ip(x),
            Self::Configuration(x) => check::configuration(x),
            Self::GatewayServer(x) => check::gateway_server(x),
            Self::GatewayClient(x) => check::gateway_client(x),
            Self::PublicKey(x) => check::public_key(x),
            Self::Namespace(_)
            | Self::Connection(_)
            | Self::GatewayConfig(_)
            | Self::NodeConfig(_)
            | Self::FabricRecord(_)
            | Self::GatewayRecord(_) => Vec::new(),
        }
    }

    /// The whole resource, `apiVersion` and `kind` included, as the API server would show it.
    pub fn to_value(&self) -> Value {
        let value = each!(self, x => serde_json::to_value(&**x));
        // Maps with text keys, numbers and text only: JSON has a form for all of it.
        value.unwrap_or(Value::Null)
    }
}

impl ObjectRef {
    /// `namespace` is ignored for cluster-wide kinds.
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        let namespace = kind.is_namespaced().then(|| namespace.to_owned());
        Self { kind, namespace, name: name.to_owned() }
    }
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind, self.name),
            None => write!(f, "{} {}", self.kind, self.name),
        }
    }
}

/// `From<T> for Object`, and `TryFrom<Object> for T` and `TryFrom<&Object> for &T`, which give the
/// object back if it is another.
macro_rules! conversions {
    ($($variant:ident: $t:ty),* $(,)?) => {$(
        impl From<$t> for Object {
            fn from(x: $t) -> Self {
                Self::$variant(Arc::new(x))
            }
        }

        impl TryFrom<Object> for $t {
            type Error = Object;

            fn try_from(object: Object) -> Result<Self, Self::Error> {
                if let Object::$variant(x) = object { Ok(Arc::unwrap_or_clone(x)) } else { Err(object) }
            }
        }

        impl<'a> TryFrom<&'a Object> for &'a $t {
            type Error = &'a Object;

            fn try_from(object: &'a Object) -> Result<Self, Self::Error> {
                if let Object::$variant(x) = object { Ok(x) } else { Err(object) }
            }
        }
    )*};
}

conversions! {
    Namespace: core::Namespace,
    ConfigMap: core::ConfigMap,
    Secret: core::Secret,
    Node: core::Node,
    Network: ipam::Network,
    Ip: ipam::IP,
    Configuration: networking::Configuration,
    Connection: networking::Connection,
    GatewayServer: networking::GatewayServer,
    GatewayClient: networking::GatewayClient,
    PublicKey: networking::PublicKeyObject,
    GatewayConfig: fabric::GatewayConfig,
    NodeConfig: fabric::NodeConfig,
    FabricRecord: fabric::FabricRecord,
    GatewayRecord: fabric::GatewayRecord,
}
