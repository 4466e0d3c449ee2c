//! CRDs that the chart has objects of lie in crds/, too: Helm installs that folder first.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::helm::{BLESS, EVERYTHING, Helm, MIN_VALUES, chart};

const WITH_CRDS: &str = "crds: {liqo: auto, weft: auto}";

#[test]
fn crds_are_rendered_before_their_objects() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&[EVERYTHING]);
    let is_used = |crd: &Value| {
        let group = crd["spec"]["group"].as_str().unwrap();
        let kind = &crd["spec"]["names"]["kind"];
        let is_one = |object: &Value| {
            let version = object["apiVersion"].as_str().unwrap();
            version.starts_with(&format!("{group}/")) && &object["kind"] == kind
        };
        objects.iter().any(is_one)
    };
    let all = all().into_iter();
    let used = all.filter(|(_, text)| is_used(&serde_saphyr::from_str(text).unwrap()));
    assert_eq!(names(&used.collect()), names(&files("crds")));
}

#[test]
fn early_crds_equal_the_definitions() {
    let (all, copies) = (all(), files("crds"));
    if std::env::var_os(BLESS).is_some() {
        let copy = |name: &String| fs::write(chart().join("crds").join(name), &all[name]).unwrap();
        copies.keys().for_each(copy);
    }
    for (name, text) in files("crds") {
        assert!(all.get(&name) == Some(&text), "crds/{name} is no copy; `make crds` writes it");
    }
}

#[test]
fn every_crd_is_installed_once() {
    let Some(helm) = Helm::find() else { return };
    let mut installed: Vec<_> = files("crds").into_keys().collect();
    for crd in crds(&helm, WITH_CRDS) {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let (group, plural) = (text(&crd["spec"]["group"]), text(&crd["spec"]["names"]["plural"]));
        installed.push(format!("{group}_{plural}.yaml"));
    }
    installed.sort();
    assert_eq!(installed, all().into_keys().collect::<Vec<_>>());
}

#[test]
fn crds_outlive_the_release() {
    let Some(helm) = Helm::find() else { return };
    for crd in crds(&helm, WITH_CRDS) {
        assert_eq!(crd["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
    }
}

#[test]
fn crds_can_be_left_to_others() {
    let Some(helm) = Helm::find() else { return };
    assert_eq!(crds(&helm, ""), Vec::<Value>::new());
}

/// CRDs of Liqo's kinds.
pub(crate) fn liqo() -> impl Iterator<Item = Value> {
    files("crds-liqo").into_values().map(|text| serde_saphyr::from_str(&text).unwrap())
}

fn crds(helm: &Helm, values: &str) -> Vec<Value> {
    let mut objects = helm.objects(&[MIN_VALUES, values]);
    objects.retain(|object| object["kind"] == "CustomResourceDefinition");
    objects
}

/// All that the types make.
fn all() -> BTreeMap<String, String> {
    let mut all = files("crds-liqo");
    all.extend(files("crds-weft"));
    all
}

/// The files of a folder of the chart, with what is in them.
fn files(folder: &str) -> BTreeMap<String, String> {
    let entries = fs::read_dir(chart().join(folder)).into_iter().flatten();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.map(|path| (name(&path), fs::read_to_string(&path).unwrap())).collect()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

fn names(files: &BTreeMap<String, String>) -> BTreeSet<&String> {
    files.keys().collect()
}
