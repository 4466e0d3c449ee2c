//! Table of what Liqo's networking does, in deploy/LIQO.md.

use std::fs;

use serde_json::Value;

use crate::life::liqos_chart;
use crate::named_tests::words;

#[test]
fn every_kind_and_value_of_liqo_is_in_its_table() {
    let Some(chart) = liqos_chart() else { return };
    let text = table();
    let words = words(&text);
    for definition in fs::read_dir(chart.join("charts/liqo-crds/crds")).unwrap() {
        let definition = fs::read_to_string(definition.unwrap().path()).unwrap();
        let definition: Value = serde_saphyr::from_str(&definition).unwrap();
        let kind = definition["spec"]["names"]["kind"].as_str().unwrap();
        let group = definition["spec"]["group"].as_str().unwrap();
        let is_networks = ["networking.liqo.io", "ipam.liqo.io"].contains(&group);
        assert!(!is_networks || text.contains(kind), "{kind}");
    }
    let values = fs::read_to_string(chart.join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&values).unwrap();
    for path in leaves(&values["networking"], "") {
        let is_listed =
            |word: &String| path.contains(&format!(".{}.", word.trim_end_matches(".*")));
        assert!(words.iter().any(is_listed), "networking{path}");
    }
}

fn table() -> String {
    fs::read_to_string("../deploy/LIQO.md").unwrap()
}

/// Paths of values, each between dots.
fn leaves(value: &Value, path: &str) -> Vec<String> {
    match value.as_object().filter(|map| !map.is_empty()) {
        Some(map) => {
            map.iter().flat_map(|(key, value)| leaves(value, &format!("{path}.{key}"))).collect()
        }
        None => vec![format!("{path}.")],
    }
}
