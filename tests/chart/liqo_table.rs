//! Table of what Liqo's networking does, in deploy/LIQO.md.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::life::liqos_chart;

/// Folders with tests.
const FOLDERS: [&str; 5] = ["../fabric-controller", "../gateway", "../ipam", "../route-agent", "."];

#[test]
fn tests_named_for_liqos_users_exist() {
    let code: String = FOLDERS.iter().map(|folder| code(Path::new(folder))).collect();
    let named: BTreeSet<_> = words().into_iter().filter(|word| is_test(word)).collect();
    let missing: Vec<_> =
        named.iter().filter(|name| !code.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty() && named.len() > 30, "{missing:?} of {}", named.len());
}

#[test]
fn every_kind_and_value_of_liqo_is_in_its_table() {
    let Some(chart) = liqos_chart() else { return };
    let words = words();
    let text = table();
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

/// All that is between backticks.
fn words() -> Vec<String> {
    let lines = table();
    let lines = lines.lines().filter(|line| line.starts_with('|'));
    lines.flat_map(|line| line.split('`').skip(1).step_by(2).map(str::to_owned)).collect()
}

/// True for a name of at least three words.
fn is_test(word: &str) -> bool {
    let is_plain = word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    is_plain && word.matches('_').count() >= 2 && !word.starts_with("liqo_")
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

fn code(folder: &Path) -> String {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: PathBuf| {
        if path.is_dir() {
            code(&path)
        } else if path.extension().is_some_and(|end| end == "rs") {
            fs::read_to_string(&path).unwrap()
        } else {
            String::new()
        }
    };
    entries.map(read).collect()
}
