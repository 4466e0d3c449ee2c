//! Messages of the supervisor to its user.

use std::io::{self, Write as _};

/// Writes one line to stderr. A closed stderr is no reason to stop.
pub fn say(line: &str) {
    drop(writeln!(io::stderr().lock(), "weft: {}", printable(line)));
}

/// Text with its control characters escaped, except for line feeds: users of peers write some of what
/// is shown, and a terminal would execute those.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => printable.push(c),
            c if c.is_control() => printable.extend(c.escape_default()),
            c => printable.push(c),
        }
    }
    printable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(printable("a\u{1b}[2J\u{9b}0m\r\tb\nü"), "a\\u{1b}[2J\\u{9b}0m\\r\\tb\nü");
    }
}
