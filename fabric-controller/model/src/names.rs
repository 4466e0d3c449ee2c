//! Names of objects of weft's own.

use fabric_index::Settings;
use fabric_objects::{Kind, ObjectRef};

/// An address or prefix as part of a name: `/`, `.` and `:` become `-`.
pub fn dashed(address: &str) -> String {
    address.replace(['/', '.', ':'], "-").trim_matches('-').to_owned()
}

/// The IP of a gateway; `what` is `overlay` or `link`.
pub fn of_gateway(gateway: &ObjectRef, what: &str) -> ObjectRef {
    let namespace = gateway.namespace.as_deref().unwrap_or_default();
    ObjectRef::new(Kind::Ip, namespace, &format!("gw-{}-{what}", gateway.name))
}

/// A FabricRecord.
pub fn of_record(name: &str) -> ObjectRef {
    ObjectRef::new(Kind::FabricRecord, "", name)
}

/// The NodeConfig of a node.
pub fn of_node(name: &str) -> ObjectRef {
    ObjectRef::new(Kind::NodeConfig, "", name)
}

/// The IP of a node; `what` is `overlay`, `external-ipv4` or `external-ipv6`.
pub fn of_node_address(settings: &Settings, node: &str, what: &str) -> ObjectRef {
    settings.own(Kind::Ip, &format!("node-{node}-{what}"))
}
