//! Installed manifests, as text: read the golden files as documentation.

use std::path::Path;

use crate::helm::{BLESS, EVERYTHING, Helm, MIN_VALUES};
use crate::strict;

#[test]
fn minimal_values_give_golden_manifests() {
    compare("minimal.yaml", MIN_VALUES);
}

#[test]
fn all_values_give_golden_manifests() {
    compare("everything.yaml", EVERYTHING);
}

#[test]
fn packed_chart_gives_same_manifests() {
    let Some(helm) = Helm::find() else { return };
    let dir = tempfile::tempdir().unwrap();
    let destination = format!("--destination={}", dir.path().display());
    helm.run(&["package", "../deploy/chart", &destination]).unwrap();
    let packed = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    let values = dir.path().join("values.yaml");
    std::fs::write(&values, MIN_VALUES).unwrap();
    let values = format!("--values={}", values.display());
    let packed = packed.display().to_string();
    let rendered = helm.run(&["template", "weft", "--kube-version=1.34.0", &packed, &values]);
    assert!(rendered.unwrap() == helm.template(&[MIN_VALUES]).unwrap());
}

#[test]
fn helm_lint_reports_nothing() {
    let Some(helm) = Helm::find() else { return };
    let printed = helm.with(&["lint", "--strict"], &[]).unwrap();
    assert!(!printed.contains("WARNING") && !printed.contains("ERROR"), "{printed}");
}

#[test]
fn manifests_have_only_fields_of_their_kind() {
    let Some(helm) = Helm::find() else { return };
    let with_crds = "crds: {liqo: auto, weft: auto}";
    for values in [MIN_VALUES, EVERYTHING] {
        for object in helm.objects(&[values, with_crds]) {
            if let Err(wrong) = strict::check(&object) {
                panic!("{} {}: {wrong}", object["kind"], object["metadata"]["name"]);
            }
        }
    }
}

#[test]
fn cluster_without_id_gets_generated_one() {
    let Some(helm) = Helm::find() else { return };
    let ids: Vec<_> = (0..2)
        .map(|_| {
            let objects = helm.objects(&[MIN_VALUES, "discovery: {config: {clusterID: ''}}"]);
            let is_it = |o: &&serde_json::Value| !o["data"]["CLUSTER_ID"].is_null();
            objects.iter().find(is_it).unwrap()["data"]["CLUSTER_ID"].to_string()
        })
        .collect();
    assert_ne!(ids[0], ids[1]);
    assert!(ids[0].trim_matches('"').parse::<fabric_api::ClusterId>().is_ok(), "{}", ids[0]);
}

fn compare(name: &str, values: &str) {
    let Some(helm) = Helm::find() else { return };
    let rendered = helm.template(&[values]).unwrap();
    let file = Path::new("chart/golden").join(name);
    if std::env::var_os(BLESS).is_some() {
        std::fs::write(&file, &rendered).unwrap();
    }
    let golden = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = rendered.lines().zip(golden.lines()).find(|(now, before)| now != before);
    assert!(
        rendered == golden,
        "{} differs ({differs:?}); if that is meant: \
         {BLESS}=1 cargo test -p weft-tests --test chart",
        file.display()
    );
}
