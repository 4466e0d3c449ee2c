//! Results of Go for the cases: obtained now if there is a Go, read from `expected.json` otherwise.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::folder;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum Outcome {
    Value { value: Value },
    Error { error: String },
}

/// Versions of Go word their errors differently.
impl PartialEq for Outcome {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Value { value: own }, Self::Value { value: other }) => own == other,
            (Self::Error { .. }, Self::Error { .. }) => true,
            (Self::Value { .. }, Self::Error { .. }) | (Self::Error { .. }, Self::Value { .. }) => {
                false
            }
        }
    }
}

pub(crate) type Outcomes = BTreeMap<String, Outcome>;

#[derive(Deserialize)]
struct Named {
    name: String,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Set to write down Go's results.
const BLESS: &str = "WEFT_BLESS";

/// # Panics
///
/// If Go's results differ from what is written down.
pub(crate) fn outcomes(input: &Value) -> Outcomes {
    let path = folder().join("expected.json");
    let rendered = render(input);
    if std::env::var_os(BLESS).is_some() {
        let rendered = rendered.as_ref().expect("WEFT_BLESS needs Go");
        fs::write(&path, serde_json::to_string_pretty(rendered).unwrap() + "\n").unwrap();
    }
    let written: Outcomes = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    if let Some(rendered) = rendered {
        assert_eq!(
            rendered, written,
            "Go's results differ from expected.json; {BLESS}=1 writes it anew"
        );
    }
    written
}

/// `None` if there is no Go here.
fn render(input: &Value) -> Option<Outcomes> {
    let mut oracle = Command::new("go")
        .args(["run", "."])
        .current_dir(folder().join("go"))
        .envs([("GOTOOLCHAIN", "local"), ("GOFLAGS", ""), ("GOWORK", "off")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .ok()?;
    oracle.stdin.take().unwrap().write_all(input.to_string().as_bytes()).unwrap();
    let output = oracle.wait_with_output().unwrap();
    assert!(output.status.success(), "the Go program failed");
    let outcomes: Vec<Named> = serde_json::from_slice(&output.stdout).unwrap();
    Some(outcomes.into_iter().map(|named| (named.name, named.outcome)).collect())
}
