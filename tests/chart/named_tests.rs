//! Tests that tables of documents name.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders with tests.
const FOLDERS: [&str; 5] = ["../fabric-controller", "../gateway", "../ipam", "../route-agent", "."];
/// First column of the table of rights.
const RIGHTS: &str = "| right |";

#[test]
fn tests_named_for_liqos_users_exist() {
    exist("../deploy/LIQO.md", 31);
}

#[test]
fn tests_named_for_rights_exist() {
    let file = "../deploy/chart/README.md";
    exist(file, 15);
    let text = fs::read_to_string(file).unwrap();
    let table = text.lines().skip_while(|line| !line.starts_with(RIGHTS));
    let rows: Vec<_> = table.skip(2).take_while(|line| line.starts_with('|')).collect();
    let last = |row: &str| words(&format!("|{}", row.rsplit('|').nth(1).unwrap()));
    let without = rows.iter().filter(|row| !last(row).iter().any(|word| is_test(word)));
    let without: Vec<_> = without.collect();
    assert!(without.is_empty() && rows.len() > 20, "{without:#?} of {}", rows.len());
}

/// Fails if a test that the tables of a file name is missing, or if fewer are named.
fn exist(file: &str, min: usize) {
    let code: String = FOLDERS.iter().map(|folder| code(Path::new(folder))).collect();
    let named: BTreeSet<_> = words(&fs::read_to_string(file).unwrap()).into_iter().collect();
    let named: Vec<_> = named.into_iter().filter(|word| is_test(word)).collect();
    let missing: Vec<_> =
        named.iter().filter(|name| !code.contains(&format!("fn {name}("))).collect();
    assert!(missing.is_empty() && named.len() >= min, "{missing:?} of {}", named.len());
}

/// All that is between backticks in tables.
pub(crate) fn words(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| line.starts_with('|'));
    lines.flat_map(|line| line.split('`').skip(1).step_by(2).map(str::to_owned)).collect()
}

/// True for a name of at least three words.
fn is_test(word: &str) -> bool {
    let is_plain = word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    is_plain && word.matches('_').count() >= 2 && !word.starts_with("liqo_")
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
