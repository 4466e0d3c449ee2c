//! Strict decoding of an untyped value to a typed object: unknown fields are reported, not dropped.

use std::sync::Arc;

use fabric_api::labels;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{Kind, Object, expectation};

/// A field that could not be read.
#[derive(Debug)]
pub(crate) struct FieldError {
    /// Path such as `spec.endpoint.port`; empty for the object as a whole.
    pub(crate) path: String,
    /// Names what was found and what is expected.
    pub(crate) message: String,
}

/// A field that a kind does not have.
#[derive(Debug)]
pub(crate) struct UnknownField {
    pub(crate) path: String,
    /// Fields that it has in the same place; empty if that is not known.
    pub(crate) siblings: &'static [&'static str],
}

/// Reads an object, and the fields that its kind does not have.
pub(crate) fn object(kind: Kind, value: Value) -> Result<(Object, Vec<UnknownField>), FieldError> {
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
pub(crate) fn set_status(object: &mut Object, status: Value) -> Result<(), serde_json::Error> {
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
pub(crate) const LOCAL: &str = "local";

pub(crate) fn local(object: &Object) -> Option<Value> {
    let Object::Configuration(configuration) = object else { return None };
    serde_json::to_value(configuration.spec.local.as_ref()?).ok()
}

pub(crate) fn set_local(object: &mut Object, local: Value) -> Result<(), serde_json::Error> {
    if let Object::Configuration(configuration) = object {
        Arc::make_mut(configuration).spec.local = Some(serde_json::from_value(local)?);
    }
    Ok(())
}

/// A user's manifest has neither uid nor generation. Both are derived, so that all programs of a
/// cluster agree on them without sharing anything: the uid from the name, the generation from the
/// spec (so it is equal for equal specs, and not in order).
pub(crate) fn identify(object: &mut Object) {
    let uid = uuid_of(&object.reference().to_string());
    let value = object.to_value();
    let metadata = object.metadata_mut();
    metadata.uid = Some(uid);
    metadata.generation = value.get("spec").map(|spec| {
        let digest = Sha256::digest(spec.to_string());
        let [a, b, c, d] = [digest[0], digest[1], digest[2], digest[3]];
        i64::from(u32::from_be_bytes([a & 0x7f, b, c, d])).max(1)
    });
}

/// Version 8 (RFC 9562 section 5.8): a hash, in the shape of a UUID.
fn uuid_of(text: &str) -> String {
    let digest = Sha256::digest(text);
    let mut bytes = [0_u8; 16];
    bytes.copy_from_slice(&digest[..16]);
    bytes[6] = (bytes[6] & 0x0f) | 0x80;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// Labels the object as weft's own.
pub(crate) fn mark_ours(object: &mut Object) {
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
