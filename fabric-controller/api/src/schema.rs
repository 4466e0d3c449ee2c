//! Parts of a field's schema that the API server needs and Rust's types do not have.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// True if a field is left out, as Go's `omitempty` does. The API server has no default for such
/// fields.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// An IP address of either family. Kubernetes has no format for that, but takes one of several.
pub(crate) fn address(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "anyOf": [{ "format": "ipv4" }, { "format": "ipv6" }] })
}

/// An integer of no particular size, as Go's `int` is.
pub(crate) fn integer(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "integer" })
}

/// A count that Go has as `uint32` and the API server takes as far as `int32` goes.
pub(crate) fn count(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "integer", "format": "int32", "minimum": 0 })
}

/// An object whose fields are not checked here.
pub(crate) fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// The name of a Secret of the same namespace; empty is as good as none.
pub(crate) fn secret_reference(_: &mut SchemaGenerator) -> Schema {
    let description = "Name of the Secret, in the same namespace.";
    json_schema!({
        "type": "object",
        "properties": { "name": { "description": description, "type": "string", "default": "" } },
        "x-kubernetes-map-type": "atomic",
    })
}

/// Kubernetes' standard conditions, with the limits that its Go types have.
pub(crate) fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "items": {
            "description": "One aspect of the object's state.",
            "type": "object",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "lastTransitionTime": {
                    "description": "When status last changed.",
                    "type": "string",
                    "format": "date-time",
                },
                "message": {
                    "description": "What is so, and what to do about it, in a sentence.",
                    "type": "string",
                    "maxLength": 32768,
                },
                "observedGeneration": {
                    "description": "The metadata.generation that the condition was found for.",
                    "type": "integer",
                    "format": "int64",
                    "minimum": 0,
                },
                "reason": {
                    "description": "Why, in one word for programs.",
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "status": {
                    "description": "Whether it is so.",
                    "type": "string",
                    "enum": ["True", "False", "Unknown"],
                },
                "type": {
                    "description": "Which aspect.",
                    "type": "string",
                    "maxLength": 316,
                    "pattern": CONDITION_TYPE,
                },
            },
        },
    })
}

/// A qualified name, as Kubernetes spells it for every condition's type.
const CONDITION_TYPE: &str = concat!(
    r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?",
    r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$"
);

/// The rule of a field that keeps its first value. It may be absent before and after.
pub(crate) fn immutable(remedy: &str) -> Value {
    json!([{ "rule": "self == oldSelf", "message": remedy }])
}

/// The rule of an object that names one port, or several different ones, but some.
pub(crate) fn ports() -> Value {
    json!([one_or_many("port", "ports"), at_least_one_port(), distinct("ports")])
}

/// The same of a server, which has ports of nodes, too.
pub(crate) fn server_ports() -> Value {
    json!([
        one_or_many("port", "ports"),
        one_or_many("nodePort", "nodePorts"),
        at_least_one_port(),
        distinct("ports"),
        distinct("nodePorts"),
    ])
}

fn one_or_many(one: &str, many: &str) -> Value {
    json!({
        "rule": format!("!(has(self.{one}) && has(self.{many}))"),
        "message": format!("{one} and {many} exclude each other: write one of them"),
    })
}

fn at_least_one_port() -> Value {
    json!({
        "rule": "has(self.port) || (has(self.ports) && size(self.ports) > 0)",
        "message": "no port: write port or ports",
    })
}

fn distinct(many: &str) -> Value {
    let twice = format!("self.{many}.filter(q, q == p).size() == 1");
    json!({
        "rule": format!("!(has(self.{many})) || self.{many}.all(p, {twice})"),
        "message": format!("{many} names a port twice"),
    })
}

/// Removes the default that an optional field has in Rust only.
pub(crate) fn no_default(schema: &mut Schema) {
    schema.remove("default");
}

/// A Service's spec as Kubernetes has it, without the essays, and merged as Kubernetes merges it.
pub(crate) fn service_spec(generator: &mut SchemaGenerator) -> Schema {
    let mut spec = generator.subschema_for::<k8s_openapi::api::core::v1::ServiceSpec>();
    schemars::transform::transform_subschemas(&mut without_description, &mut spec);
    let pointers: [(&str, Value); 3] = [
        ("/properties/selector", json!({ "x-kubernetes-map-type": "atomic" })),
        ("/properties/ports/items/properties/protocol", json!({ "default": "TCP" })),
        (
            "/properties/ports",
            json!({ "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["port", "protocol"] }),
        ),
    ];
    for (pointer, more) in pointers {
        if let (Some(Value::Object(at)), Value::Object(more)) = (spec.pointer_mut(pointer), more) {
            at.extend(more);
        }
    }
    spec
}

fn without_description(schema: &mut Schema) {
    schema.remove("description");
    schemars::transform::transform_subschemas(&mut without_description, schema);
}
