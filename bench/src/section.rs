//! Sections of `RESULTS.md`, each written by the benchmark whose marks enclose it.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Context, Result};

const TITLE: &str = "# Results\n\nWritten by the benchmarks themselves; figures of different machines cannot be \
                     compared.\n";

/// Writes a section into a file in place of the one it has of this name, or at its end.
pub(crate) fn write(path: &Path, name: &str, body: &str) -> Result<()> {
    let before = fs::read_to_string(path).unwrap_or_else(|_| TITLE.to_owned());
    fs::write(path, replace(&before, name, body))
        .with_context(|| format!("writing {}", path.display()))
}

fn replace(text: &str, name: &str, body: &str) -> String {
    let [begin, end] = ["begin", "end"].map(|edge| format!("<!-- bench {name}: {edge} -->"));
    let section = format!("{begin}\n{body}{end}\n");
    let around = text.split_once(&begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(&end)?;
        Some((before, after.trim_start_matches('\n')))
    });
    match around {
        Some((before, "")) => format!("{before}{section}"),
        Some((before, after)) => format!("{before}{section}\n{after}"),
        None => format!("{}\n\n{section}", text.trim_end()),
    }
}

/// Version, with the commit in a git repository, as of the first call.
pub(crate) fn revision() -> &'static str {
    static REVISION: LazyLock<String> = LazyLock::new(|| {
        let version = env!("CARGO_PKG_VERSION");
        let git = Command::new("git").args(["describe", "--always", "--dirty"]).output();
        match git.ok().filter(|out| out.status.success()) {
            Some(out) => format!("{version} ({})", String::from_utf8_lossy(&out.stdout).trim()),
            None => version.to_owned(),
        }
    });
    &REVISION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_section_replaces_the_old_one_alone() {
        let first = replace("# Results\n", "scale", "one\n");
        let section = "<!-- bench scale: begin -->\none\n<!-- bench scale: end -->\n";
        assert_eq!(first, format!("# Results\n\n{section}"));
        let two = replace(&first, "data plane", "other\n");
        assert_eq!(replace(&two, "scale", "one\n"), two);
        assert_eq!(replace(&two, "scale", "new\n"), two.replace("one", "new"));
    }
}
