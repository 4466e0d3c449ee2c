//! Values that a user may set, and the handling of slips.

use serde_json::Value;

use crate::helm::{Helm, MIN_VALUES, chart};

/// A slip, and the words that name it.
const SLIPS: [(&str, &[&str]); 21] = [
    ("netwroking: {}", &["netwroking"]),
    ("networking: {genevePort: 6091}", &["networking", "genevePort"]),
    ("networking: {gatewayTemplates: {ping: {intervall: 2s}}}", &["ping", "intervall"]),
    ("networking: {gatewayTemplates: {ping: {interval: 2}}}", &["ping", "interval"]),
    ("networking: {gatewayTemplates: {ping: {lossThreshold: 0}}}", &["lossThreshold"]),
    ("networking: {fabric: {config: {acceptRules: 'no'}}}", &["acceptRules"]),
    ("controllerManager: {replicas: 0}", &["controllerManager", "replicas"]),
    ("controllerManager: {pod: {label: {a: b}}}", &["pod", "label"]),
    ("ipam: {podCIDRs: [10.200.0.0]}", &["podCIDRs"]),
    ("ipam: {internalCIDR: 'fd00::/64'}", &["internalCIDR"]),
    ("ipam: {podCIDRs: []}", &["ipam.podCIDRs: missing"]),
    ("ipam: {serviceCIDR: ''}", &["ipam.serviceCIDR: missing"]),
    ("ipam: {external: {enabled: true}}", &["ipam.external.url: missing"]),
    ("discovery: {config: {clusterID: Rome}}", &["clusterID"]),
    // All of these become parts of policies.
    ("networking: {gatewayTemplates: {pod: {annotations: {\"a'b\": c}}}}", &["annotations"]),
    ("networking: {gatewayTemplates: {pod: {annotations: {a: \"b' || true\"}}}}", &["annotations"]),
    ("networking: {gatewayTemplates: {images: [\"a'b\"]}}", &["images"]),
    (
        "networking: {gatewayTemplates: {pod: {priorityClassName: \"x' || true\"}}}",
        &["priorityClassName"],
    ),
    ("registry: ''", &["registry"]),
    ("pullPolicy: Sometimes", &["pullPolicy"]),
    ("crds: {liqo: 'yes'}", &["crds", "liqo"]),
];

#[test]
fn slips_are_refused_by_name() {
    let Some(helm) = Helm::find() else { return };
    for (slip, words) in SLIPS {
        let error = helm.template(&[MIN_VALUES, slip]).expect_err(slip);
        assert!(words.iter().all(|word| error.contains(word)), "{slip}: {error}");
    }
}

#[test]
fn kubernetes_must_be_new_enough() {
    let Some(helm) = Helm::find() else { return };
    let arguments = ["template", "weft", "--kube-version=1.26.0"];
    assert!(helm.with(&arguments, &[]).unwrap_err().contains("kubeVersion"));
}

#[test]
fn every_value_has_default_and_comment() {
    let text = std::fs::read_to_string(chart().join("values.yaml")).unwrap();
    let defaults: Value = serde_saphyr::from_str(&text).unwrap();
    let schema = std::fs::read_to_string(chart().join("values.schema.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let mut values = Vec::new();
    leaves(&schema, &schema, String::new(), &mut values);
    let commented: Vec<_> = commented_keys(&text).collect();
    for path in values.iter().filter(|path| *path != "/global") {
        assert!(defaults.pointer(path).is_some(), "{path} has no default");
        let key = path.rsplit('/').next().unwrap();
        let same = |path: &&String| path.rsplit('/').next() == Some(key);
        let comments = commented.iter().filter(|commented| **commented == key).count();
        assert_eq!(comments, values.iter().filter(same).count(), "{key} has no comment");
    }
}

/// JSON pointers to the values that a schema has and does not look into.
fn leaves(root: &Value, schema: &Value, path: String, found: &mut Vec<String>) {
    let pointer = schema["$ref"].as_str().map(|to| to.trim_start_matches('#'));
    let schema = pointer.map_or(schema, |pointer| root.pointer(pointer).unwrap());
    // Kubernetes' own, and explained there.
    let is_ours = pointer != Some("/definitions/resources");
    match schema["properties"].as_object().filter(|_| is_ours) {
        Some(properties) => {
            for (key, value) in properties {
                leaves(root, value, format!("{path}/{key}"), found);
            }
        }
        None => found.push(path),
    }
}

/// Keys right below a comment that begins with `# --`.
fn commented_keys(text: &str) -> impl Iterator<Item = &str> {
    let mut is_commented = false;
    text.lines().map(str::trim).filter_map(move |line| {
        if line.starts_with('#') {
            is_commented |= line.starts_with("# --");
            return None;
        }
        let key = line.split(':').next().filter(|_| is_commented);
        is_commented = false;
        key
    })
}
