//! Strict decoding of an untyped value to a typed object: unknown fields are reported, not dropped.

use std::sync::Arc;

use fabric_api::labels;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{Kind, Object, expectation};

/// A field that could not be read.
#[derive(Debug)]
pub struct FieldError {
    /// Path such as `spec.endpoint.port`; empty for the object as a whole.
    pub path: String,
    /// Names what was found and what is expected.
    pub message: String,
}

/// A field that a kind does not have.
#[derive(Debug)]
pub struct UnknownField {
    pub path: String,
    /// Fields that it has in the same place; empty if that is not known.
    pub siblings: &'static [&'static str],
}

/// Reads an object, and the fields that its kind does not have.
pub fn object(kind: Kind, value: Value) -> Result<(Object, Vec<UnknownField>), FieldError> {
    match kind {
        Kind::Namespace => typed(value, Object::Namespace),
        Kind::ConfigMap => typed(value, Object::ConfigMap),
        Kind::Secret => typed(value, Object::Secret),
        Kind::Node => typed(value, Object::Node),
        Kind::Network => typed(value, Object::Network),
        Kind::Ip => typed(value, Object::Ip),
        Kind::Configuration => typed(value, Object::Configuration),
        Kind::Connection => typed(value, Object::Connection),
        Kind::GatewayServer => typed(value, Object::GatewayServer),
        Kind::GatewayClient => typed(value, Object::GatewayClient),
        Kind::PublicKey => typed(value, Object::PublicKey),
        Kind::GatewayConfig => typed(value, Object::GatewayConfig),
        Kind::NodeConfig => typed(value, Object::NodeConfig),
        Kind::FabricRecord => typed(value, Object::FabricRecord),
        Kind::GatewayRecord => typed(value, Object::GatewayRecord),
    }
}

/// Gives an object the status that a status file holds. Of kinds that have none, nothing changes.
pub fn set_status(object: &mut Object, status: Value) -> Result<(), serde_json::Error> {
    match object {
        Object::Network(x) => Arc::make_mut(x).status = serde_json::from_value(status)?,
        Object::Ip(x) => Arc::make_mut(x).status = serde_json::from_value(status)?,
        Object::Configuration(x) => Arc::make_mut(x).status = serde_json::from_value(status)?,
        Object::Connection(x) => Arc::make_mut(x).status = serde_json::from_value(status)?,
        Object::GatewayServer(x) => Arc::make_mut(x).status = serde_json::from_value(status)?,
        Object::GatewayClient(x) => Arc::make_mut(x).status = serde_json::from_value(status)?,
        Object::GatewayConfig(x) => Arc::make_mut(x).status = serde_json::from_value(status)?,
        Object::NodeConfig(x) => Arc::make_mut(x).status = serde_json::from_value(status)?,
        Object::Namespace(_)
        | Object::ConfigMap(_)
        | Object::Secret(_)
        | Object::Node(_)
        | Object::PublicKey(_)
        | Object::FabricRecord(_)
        | Object::GatewayRecord(_) => {}
    }
    Ok(())
}

/// Part of a Configuration's spec that weft fills in, which is kept with the status.
pub const LOCAL: &str = "local";

/// Returns `spec.local` of a Configuration.
pub fn local(object: &Object) -> Option<Value> {
    let Object::Configuration(configuration) = object else { return None };
    serde_json::to_value(configuration.spec.local.as_ref()?).ok()
}

/// Sets `spec.local` of a Configuration; of other kinds, nothing changes.
pub fn set_local(object: &mut Object, local: Value) -> Result<(), serde_json::Error> {
    if let Object::Configuration(configuration) = object {
        Arc::make_mut(configuration).spec.local = Some(serde_json::from_value(local)?);
    }
    Ok(())
}

/// Labels the object as weft's own.
pub fn mark_ours(object: &mut Object) {
    let labels = object.metadata_mut().labels.get_or_insert_default();
    labels.insert(labels::MANAGED_BY.to_owned(), labels::WEFT.to_owned());
}

fn typed<T: DeserializeOwned>(
    value: Value,
    wrap: fn(Arc<T>) -> Object,
) -> Result<(Object, Vec<UnknownField>), FieldError> {
    let mut unknown: Vec<String> = Vec::new();
    let mut note = |path: serde_ignored::Path<'_>| unknown.push(path_text(&path));
    let ignored = serde_ignored::Deserializer::new(value, &mut note);
    let read = serde_path_to_error::deserialize(ignored).map_err(|error| FieldError {
        path: Some(error.path().to_string()).filter(|p| p != ".").unwrap_or_default(),
        message: expectation::value_message(&error.inner().to_string()),
    })?;
    unknown.retain(|path| path != "apiVersion" && path != "kind");
    let unknown = unknown.into_iter().map(|path| {
        let parent = path.rsplit_once('.').map_or("", |(parent, _)| parent);
        UnknownField { siblings: expectation::fields::<T>(parent), path }
    });
    Ok((wrap(Arc::new(read)), unknown.collect()))
}

fn path_text(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path;
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", path_text(parent)),
        Path::Map { parent, key } => match path_text(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => path_text(parent),
    }
}
