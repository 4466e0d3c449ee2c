//! Liqo's definitions, built from the facts in `liqo.yaml`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// One definition's facts; `liqo.yaml` explains the keywords.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    version: String,
    kind: String,
    /// Cluster, or Namespaced, which is the default.
    #[serde(default = "namespaced")]
    scope: String,
    #[serde(default)]
    short: Vec<String>,
    #[serde(default)]
    status: bool,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    columns: Vec<Vec<String>>,
    #[serde(default)]
    required: BTreeMap<String, Vec<String>>,
    fields: BTreeMap<String, String>,
    #[serde(default)]
    rules: BTreeMap<String, Vec<String>>,
}

/// All of Liqo's definitions that clients read, by name.
pub(crate) fn definitions() -> BTreeMap<String, Value> {
    let facts: BTreeMap<String, Facts> = serde_saphyr::from_str(include_str!("liqo.yaml")).unwrap();
    let built = facts.into_iter().map(|(name, facts)| (name.clone(), definition(&name, &facts)));
    built.collect()
}

fn definition(name: &str, facts: &Facts) -> Value {
    let (plural, group) = name.split_once('.').unwrap();
    let mut version = json!({
        "name": facts.version,
        "served": true,
        "storage": true,
        "schema": { "openAPIV3Schema": schema(facts) },
    });
    if facts.status {
        version["subresources"] = json!({ "status": {} });
    }
    if !facts.columns.is_empty() {
        version["additionalPrinterColumns"] = facts.columns.iter().map(|c| column(c)).collect();
    }
    let mut names = json!({
        "categories": ["liqo"],
        "kind": facts.kind,
        "plural": plural,
        "singular": facts.kind.to_lowercase(),
    });
    if !facts.short.is_empty() {
        names["shortNames"] = json!(facts.short);
    }
    let mut metadata = json!({ "name": name });
    if !facts.labels.is_empty() {
        metadata["labels"] = json!(facts.labels);
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": { "group": group, "names": names, "scope": facts.scope, "versions": [version] },
    })
}

fn namespaced() -> String {
    "Namespaced".to_owned()
}

fn column(facts: &[String]) -> Value {
    let mut column = json!({ "name": facts[0], "type": facts[1], "jsonPath": facts[2] });
    if facts.get(3).is_some_and(|word| word == "wide") {
        column["priority"] = json!(1);
    }
    column
}

fn schema(facts: &Facts) -> Value {
    let mut root = json!({ "type": "object" });
    for (path, words) in &facts.fields {
        let field = field(words);
        at(&mut root, path).extend(field);
    }
    for (path, names) in &facts.required {
        at(&mut root, path).insert("required".to_owned(), json!(names));
    }
    for (path, rules) in &facts.rules {
        let rules = rules.iter().map(|rule| json!({ "rule": rule })).collect();
        at(&mut root, path).insert("x-kubernetes-validations".to_owned(), rules);
    }
    root
}

/// The schema at a path, made with all that lies above.
fn at<'a>(root: &'a mut Value, path: &str) -> &'a mut Map<String, Value> {
    let separated = path.replace("[]", ".[]").replace("{}", ".{}");
    let mut here = root;
    for step in separated.split('.').filter(|step| !step.is_empty()) {
        here = match step {
            "[]" => below(here, "array", "items"),
            "{}" => below(here, "object", "additionalProperties"),
            name => &mut below(here, "object", "properties")[name],
        };
    }
    if here.is_null() {
        *here = json!({});
    }
    here.as_object_mut().unwrap()
}

fn below<'a>(schema: &'a mut Value, kind: &str, keyword: &str) -> &'a mut Value {
    schema["type"] = json!(kind);
    &mut schema[keyword]
}

fn field(words: &str) -> Map<String, Value> {
    let (first, more) = words.split_once(' ').unwrap_or((words, ""));
    let mut field = match first {
        "string" | "boolean" | "object" | "array" | "integer" => json!({ "type": first }),
        "int32" | "int64" => json!({ "type": "integer", "format": first }),
        "any" => json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true }),
        "int-or-string" => json!({ "x-kubernetes-int-or-string": true }),
        "reference" => reference(),
        "local-reference" => local_reference(),
        format => json!({ "type": "string", "format": format }),
    };
    for word in more.split_whitespace() {
        let (keyword, value) = word.split_once('=').unwrap();
        field[keyword] = serde_json::from_str(value).unwrap();
    }
    let Value::Object(field) = field else { unreachable!("every arm is an object") };
    field
}

fn reference() -> Value {
    let names = ["apiVersion", "fieldPath", "kind", "name", "namespace", "resourceVersion", "uid"];
    let properties: Map<_, _> =
        names.map(|name| (name.to_owned(), json!({ "type": "string" }))).into_iter().collect();
    json!({ "type": "object", "properties": properties, "x-kubernetes-map-type": "atomic" })
}

fn local_reference() -> Value {
    let name = json!({ "type": "string", "default": "" });
    json!({ "type": "object", "properties": { "name": name }, "x-kubernetes-map-type": "atomic" })
}
