//! The custom resource definitions of this crate's types, as they are installed.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt;

use crate::fabric::{FabricRecord, GatewayConfig, GatewayRecord, NodeConfig};
use crate::ipam::{IP, Network};
use crate::liqo_core::ForeignCluster;
use crate::networking::{
    Configuration, Connection, GatewayClient, GatewayServer, PublicKeyObject,
    WgGatewayClientTemplate, WgGatewayServerTemplate,
};

/// Liqo's resources that users, liqoctl and Liqo's other modules read or write. They take whatever
/// Liqo's own definitions take, and IPv6 addresses besides, so either may replace the other.
pub fn liqo() -> Vec<CustomResourceDefinition> {
    let without_spec = [
        ForeignCluster::crd(),
        Configuration::crd(),
        Connection::crd(),
        GatewayClient::crd(),
        GatewayServer::crd(),
        PublicKeyObject::crd(),
        WgGatewayClientTemplate::crd(),
        WgGatewayServerTemplate::crd(),
    ];
    let ipam = [IP::crd(), Network::crd()];
    let without_spec = without_spec.map(with_optional_spec);
    without_spec.into_iter().chain(ipam).map(installed).collect()
}

/// Definitions of what weft publishes for its own gateways and route-agents.
pub fn weft() -> Vec<CustomResourceDefinition> {
    [FabricRecord::crd(), GatewayConfig::crd(), GatewayRecord::crd(), NodeConfig::crd()]
        .map(installed)
        .into()
}

/// Liqo takes these without a spec; a condition reports what then is missing.
fn with_optional_spec(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    schemas(&mut crd).for_each(|schema| schema.required = None);
    crd
}

/// Helm deletes what a release had and the next one has not, as one that was restored by hand, but for what is marked.
fn installed(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    let annotations = crd.metadata.annotations.get_or_insert_default();
    annotations.insert("helm.sh/resource-policy".to_owned(), "keep".to_owned());
    schemas(&mut crd).for_each(|schema| schema.title = None); // the name of a Rust type
    schemas(&mut crd).for_each(kubernetes_words);
    crd
}

fn schemas(crd: &mut CustomResourceDefinition) -> impl Iterator<Item = &mut JSONSchemaProps> {
    let validations = crd.spec.versions.iter_mut().filter_map(|version| version.schema.as_mut());
    validations.filter_map(|validation| validation.open_api_v3_schema.as_mut())
}

/// Replaces keywords of schemars by those of the API server, all the way down.
///
/// An absent field is absent: were it nullable, too, a `null` would be stored and count as present
/// in rules. The API server would warn of formats that it does not have.
fn kubernetes_words(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    match schema.format.as_deref() {
        Some("uint8" | "uint16") => schema.format = Some("int32".to_owned()),
        Some("uint" | "uint32" | "uint64") => schema.format = Some("int64".to_owned()),
        Some("ip") => either_family(schema),
        None | Some(_) => {}
    }
    children(schema).for_each(kubernetes_words);
}

fn either_family(schema: &mut JSONSchemaProps) {
    let family = |format: &str| JSONSchemaProps {
        format: Some(format.to_owned()),
        ..JSONSchemaProps::default()
    };
    schema.format = None;
    schema.any_of = Some(vec![family("ipv4"), family("ipv6")]);
}

fn children(schema: &mut JSONSchemaProps) -> impl Iterator<Item = &mut JSONSchemaProps> {
    let items = schema.items.iter_mut().flat_map(|items| match items {
        JSONSchemaPropsOrArray::Schema(one) => std::slice::from_mut(one.as_mut()),
        JSONSchemaPropsOrArray::Schemas(many) => many.as_mut_slice(),
    });
    let values = schema.additional_properties.iter_mut().filter_map(|values| match values {
        JSONSchemaPropsOrBool::Schema(schema) => Some(schema.as_mut()),
        JSONSchemaPropsOrBool::Bool(_) => None,
    });
    let properties = schema.properties.iter_mut().flat_map(|properties| properties.values_mut());
    properties.chain(items).chain(values)
}
