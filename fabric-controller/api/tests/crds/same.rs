//! Our definitions equal Liqo's: no field is missing, none is narrower or wider, except that
//! an address may be of either family and that there may be more fields.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::crds;
use serde_json::{Map, Value, json};

use crate::liqo;

#[test]
fn every_definition_of_liqos_is_ours_too() {
    let (ours, liqos) = (ours(), liqo::definitions());
    assert_eq!(ours.keys().collect::<Vec<_>>(), liqos.keys().collect::<Vec<_>>());
    let different: Vec<_> =
        liqos.iter().flat_map(|(name, liqo)| differences(&ours[name], liqo)).collect();
    assert!(different.is_empty(), "{different:#?}");
}

#[test]
fn liqo_ipv4_fields_accept_both_families() {
    let either = json!({ "type": "string", "anyOf": [{ "format": "ipv4" }, { "format": "ipv6" }] });
    let (v4, cidr) = (
        json!({ "type": "string", "format": "ipv4" }),
        json!({ "type": "string", "format": "cidr" }),
    );
    assert_eq!(fields("x", &either, &v4), Vec::<String>::new());
    assert_ne!(fields("x", &either, &cidr), Vec::<String>::new());
    assert_ne!(fields("x", &v4, &v4), Vec::<String>::new());
}

/// Each of these is a way in which an object of Liqo's could be refused, cut or read differently.
#[test]
fn missing_and_narrower_schemas_are_found() {
    let liqos = liqo::definitions();
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties";
    let server = format!("{schema}/spec/properties/endpoint/properties");
    let damages: [(&str, &str, Value); 12] = [
        ("/spec/names/shortNames/0", "", json!("gw")),
        ("/spec/names/categories", "", json!([])),
        ("/spec/scope", "", json!("Cluster")),
        ("/spec/versions/0/subresources", "", json!({})),
        ("/spec/versions/0/additionalPrinterColumns/1/name", "", json!("Template name")),
        ("/spec/versions/0/additionalPrinterColumns/0/priority", "", json!(0)),
        (server.as_str(), "/ports/maxItems", json!(32)),
        (server.as_str(), "/nodePort", json!(null)),
        (server.as_str(), "/port/format", json!("int64")),
        (server.as_str(), "/serviceType/enum", json!(["ClusterIP", "NodePort"])),
        (server.as_str(), "/serviceType/default", json!("NodePort")),
        (schema, "/spec/properties/endpoint/x-kubernetes-validations/0/rule", json!("true")),
    ];
    for (place, more, damage) in damages {
        let liqo = &liqos["gatewayservers.networking.liqo.io"];
        let (pointer, mut ours) = (format!("{place}{more}"), liqo.clone());
        *ours.pointer_mut(&pointer).unwrap_or_else(|| panic!("{pointer}")) = damage;
        assert_ne!(differences(&ours, liqo), Vec::<String>::new(), "{pointer}");
    }
}

pub(crate) fn ours() -> BTreeMap<String, Value> {
    let named = |crd: Value| (crd["metadata"]["name"].as_str().unwrap().to_owned(), crd);
    crds::liqo().iter().map(|crd| named(serde_json::to_value(crd).unwrap())).collect()
}

fn differences(ours: &Value, liqo: &Value) -> Vec<String> {
    let name = liqo["metadata"]["name"].as_str().unwrap();
    let parts = [
        "/metadata/labels",
        "/spec/group",
        "/spec/names",
        "/spec/scope",
        "/spec/versions/0/name",
        "/spec/versions/0/served",
        "/spec/versions/0/storage",
        "/spec/versions/0/subresources",
        "/spec/versions/0/additionalPrinterColumns",
    ];
    let differ = parts.iter().filter(|part| ours.pointer(part) != liqo.pointer(part));
    let mut found: Vec<_> = differ.map(|part| format!("{name}: {part}")).collect();
    found.extend(differing_fields(ours, liqo));
    found
}

/// Fields of Liqo's that an installed definition does not have, or has otherwise.
pub(crate) fn differing_fields(installed: &Value, liqo: &Value) -> Vec<String> {
    let schema = "/spec/versions/0/schema/openAPIV3Schema";
    let name = liqo["metadata"]["name"].as_str().unwrap();
    fields(name, installed.pointer(schema).unwrap(), liqo.pointer(schema).unwrap())
}

/// Paths at which a schema differs from Liqo's, all the way down.
fn fields(path: &str, ours: &Value, liqo: &Value) -> Vec<String> {
    let (ours, liqo) = (words(ours), of_either_family(words(liqo)));
    let keywords: BTreeSet<_> = ours.keys().chain(liqo.keys()).collect();
    let mut found = Vec::new();
    for keyword in keywords {
        let (here, there) = (&ours.get(keyword), &liqo.get(keyword));
        match (keyword.as_str(), here, there) {
            ("properties", Some(here), Some(there)) => found.extend(properties(path, here, there)),
            ("items", Some(here), Some(there)) => {
                found.extend(fields(&format!("{path}[]"), here, there))
            }
            ("additionalProperties", Some(here), Some(there)) => {
                found.extend(fields(&format!("{path}{{}}"), here, there));
            }
            _ if here == there => {}
            _ => found.push(format!("{path}: {keyword} is {here:?}, Liqo's {there:?}")),
        }
    }
    found
}

fn properties(path: &str, ours: &Value, liqo: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for (name, there) in liqo.as_object().unwrap() {
        match ours.get(name).filter(|here| here.is_object()) {
            Some(here) => found.extend(fields(&format!("{path}.{name}"), here, there)),
            None => found.push(format!("{path}.{name} is missing")),
        }
    }
    found
}

/// A schema's keywords, one spelling for each meaning.
fn words(schema: &Value) -> Map<String, Value> {
    let mut words = schema.as_object().unwrap().clone();
    words.remove("description");
    if words.get("x-kubernetes-list-type") == Some(&json!("atomic")) {
        words.remove("x-kubernetes-list-type"); // what a list is anyway
    }
    for limit in ["minimum", "maximum"] {
        let whole = words.get(limit).and_then(Value::as_f64);
        words.extend(whole.map(|whole| (limit.to_owned(), json!(whole))));
    }
    for unordered in ["enum", "required"] {
        if let Some(Value::Array(values)) = words.get_mut(unordered) {
            values.sort_by_key(ToString::to_string);
        }
    }
    if let Some(Value::Array(rules)) = words.get_mut("x-kubernetes-validations") {
        rules.iter_mut().for_each(|rule| *rule = rule["rule"].take());
    }
    words
}

/// Liqo has IPv4 addresses only.
fn of_either_family(mut words: Map<String, Value>) -> Map<String, Value> {
    if words.get("format") == Some(&json!("ipv4")) {
        words.remove("format");
        words.insert("anyOf".to_owned(), json!([{ "format": "ipv4" }, { "format": "ipv6" }]));
    }
    words
}
