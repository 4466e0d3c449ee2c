//! Messages of the supervisor to its user.

use std::io::{self, Write as _};

/// Writes one line to stderr. A closed stderr is no reason to stop.
pub fn say(line: &str) {
    drop(writeln!(io::stderr().lock(), "weft: {line}"));
}
