use std::fs::OpenOptions;
use std::io::Write;

/// Names the file that `make test` counts skipped tests by.
const SKIPPED: &str = "WEFT_SKIPPED";
/// Lets a test fail that would be skipped, where everything has to be there.
const NO_SKIP: &str = "WEFT_NO_SKIP";

/// Reports that the calling test does nothing here, and why. Past the test runner, which captures
/// the output of tests that pass.
///
/// # Panics
///
/// Panics if the environment has `WEFT_NO_SKIP`.
pub fn skip(why: &str) {
    assert!(std::env::var_os(NO_SKIP).is_none(), "{NO_SKIP} is set, but {why}");
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    let line = format!("skipped: {test}: {why}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    let Some(path) = std::env::var_os(SKIPPED) else { return };
    let file = OpenOptions::new().create(true).append(true).open(path);
    let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
}
