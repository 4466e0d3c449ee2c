//! Faults that an API server finds in an object, as far as definitions of ours go.

use std::net::{Ipv4Addr, Ipv6Addr};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::core::cel::Validator;
use serde_json::{Value, json};

/// Empty if the object is taken; `old` is what it was before, if there was one.
pub(crate) fn problems(crd: &Value, object: &Value, old: Option<&Value>) -> Vec<String> {
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut body = object.clone();
    for implied in ["apiVersion", "kind", "metadata"] {
        body.as_object_mut().unwrap().remove(implied);
    }
    let mut found = Vec::new();
    check(schema, &body, "", &mut found);
    if let Err(broken) = Validator::new().validate(schema, object, old) {
        found.push(broken.to_string());
    }
    found
}

fn check(schema: &Value, value: &Value, path: &str, found: &mut Vec<String>) {
    let mut wrong = |what: String| found.push(format!("{path}: {what}, found {value}"));
    if !is_of_type(schema, value) {
        return wrong(format!("expected {}", schema["type"]));
    }
    if schema["enum"].as_array().is_some_and(|allowed| !allowed.contains(value)) {
        wrong(format!("expected one of {}", schema["enum"]));
    }
    let either = schema["anyOf"].as_array().filter(|_| schema["type"] == "string");
    let formats = either.cloned().unwrap_or_else(|| vec![schema.clone()]);
    if !formats.iter().any(|schema| has_format(&schema["format"], value)) {
        wrong(format!("expected {}", json!(formats)));
    }
    limits(schema, value).into_iter().for_each(wrong);
    below(schema, value, path, found);
}

fn is_of_type(schema: &Value, value: &Value) -> bool {
    match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_i64() || value.is_u64(),
        _ => value.is_i64() || value.is_string(),
    }
}

fn has_format(format: &Value, value: &Value) -> bool {
    let number = value.as_i64().unwrap_or_default();
    let text = value.as_str().unwrap_or_default();
    match format.as_str() {
        None => true,
        Some("int32") => i32::try_from(number).is_ok(),
        Some("int64") => value.is_i64(),
        Some("ipv4") => text.parse::<Ipv4Addr>().is_ok(),
        Some("ipv6") => text.parse::<Ipv6Addr>().is_ok(),
        Some("cidr") => text.parse::<ipnet::IpNet>().is_ok(),
        Some("byte") => BASE64_STANDARD.decode(text).is_ok(),
        Some("date-time") => serde_json::from_value::<Time>(value.clone()).is_ok(),
        Some(unknown) => panic!("the API server would warn of format {unknown}"),
    }
}

fn limits(schema: &Value, value: &Value) -> Vec<String> {
    let size = match value {
        Value::Array(items) => items.len() as f64,
        Value::String(text) => text.chars().count() as f64,
        Value::Number(number) => number.as_f64().unwrap_or_default(),
        Value::Null | Value::Bool(_) | Value::Object(_) => 0.0,
    };
    let at_most = ["maximum", "maxItems", "maxLength"];
    let at_least = ["minimum", "minItems", "minLength"];
    let limit = |keyword: &str| schema[keyword].as_f64();
    let over = at_most.into_iter().filter(|k| limit(k).is_some_and(|limit| size > limit));
    let under = at_least.into_iter().filter(|k| limit(k).is_some_and(|limit| size < limit));
    over.chain(under).map(|keyword| format!("{keyword} is {}", schema[keyword])).collect()
}

fn below(schema: &Value, value: &Value, path: &str, found: &mut Vec<String>) {
    for name in schema["required"].as_array().into_iter().flatten() {
        if value.get(name.as_str().unwrap()).is_none() {
            found.push(format!("{path}: {name} is missing"));
        }
    }
    for (i, item) in value.as_array().into_iter().flatten().enumerate() {
        check(&schema["items"], item, &format!("{path}[{i}]"), found);
    }
    for (name, field) in value.as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let known = schema["properties"].get(name).or_else(|| schema.get("additionalProperties"));
        match known {
            Some(schema) => check(schema, field, &path, found),
            None if schema["x-kubernetes-preserve-unknown-fields"] == true => {}
            None => found.push(format!("{path}: there is no such field")),
        }
    }
}
