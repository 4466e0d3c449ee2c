//! `deploy/chart/crds-*` has what is generated from the types.

use std::fs;
use std::path::{Path, PathBuf};

use fabric_api::crds;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

const HEAD: &str = "# Generated from fabric-controller/api; `make crds` writes them.\n";

#[test]
fn chart_has_definitions_generated_from_types() {
    let mut wrong = check("crds-liqo", &crds::liqo());
    wrong.extend(check("crds-weft", &crds::weft()));
    assert!(wrong.is_empty(), "{wrong:#?} differ from the types; `make crds` writes them");
}

/// The files that differ, after writing them if `WEFT_BLESS` is 1.
fn check(folder: &str, crds: &[CustomResourceDefinition]) -> Vec<PathBuf> {
    let folder = Path::new("../../deploy/chart").join(folder);
    let want: Vec<_> = crds.iter().map(|crd| (folder.join(name(crd)), text(crd))).collect();
    if std::env::var_os("WEFT_BLESS").is_some_and(|bless| bless == "1") {
        write(&folder, &want);
    }
    let differs =
        |(path, text): &&(PathBuf, String)| fs::read_to_string(path).ok().as_ref() != Some(text);
    let mut wrong: Vec<_> = want.iter().filter(differs).map(|(path, _)| path.clone()).collect();
    wrong.extend(present(&folder).into_iter().filter(|path| !want.iter().any(|(w, _)| w == path)));
    wrong
}

fn write(folder: &Path, want: &[(PathBuf, String)]) {
    fs::create_dir_all(folder).unwrap();
    present(folder).iter().for_each(|old| fs::remove_file(old).unwrap());
    want.iter().for_each(|(path, text)| fs::write(path, text).unwrap());
}

fn present(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
}

/// Named as controller-gen names them: group, then plural.
fn name(crd: &CustomResourceDefinition) -> String {
    format!("{}_{}.yaml", crd.spec.group, crd.spec.names.plural)
}

fn text(crd: &CustomResourceDefinition) -> String {
    let mut crd = serde_json::to_value(crd).unwrap();
    whole_numbers(&mut crd);
    format!("{HEAD}{}", serde_saphyr::to_string(&crd).unwrap())
}

/// Limits are of type f64, and 64.0 reads badly.
fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            let whole = number.as_f64().filter(|float| number.is_f64() && float.fract() == 0.0);
            if let Some(whole) = whole {
                *value = Value::from(whole as i64);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(whole_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}
