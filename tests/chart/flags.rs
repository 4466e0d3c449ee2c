//! Programs understand what their pods tell them.

use std::process::Command;

use serde_json::Value;

use crate::helm::{EVERYTHING, Helm, LEAST};
use crate::references::containers;

#[test]
fn programs_understand_their_arguments() {
    let Some(helm) = Helm::find() else { return };
    let dir = match weft_tests::bin_dir() {
        Ok(dir) => dir,
        Err(error) => return weft_tests::skip(&format!("{error:#}")),
    };
    // Arguments of which no program knows.
    let others = "common: {extraArgs: []}";
    for values in [LEAST, EVERYTHING] {
        let objects = helm.objects(&[values, others]);
        for container in containers(&objects) {
            let program = container["command"][0].as_str().unwrap();
            let arguments = texts(&container["args"]).filter(|text| !text.contains("--example"));
            // Help is given after all before it was understood.
            let mut command = Command::new(dir.join(program));
            let output = command.args(arguments).arg("--help").output().unwrap();
            let told = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{program}: {told}");
        }
    }
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap())
}
