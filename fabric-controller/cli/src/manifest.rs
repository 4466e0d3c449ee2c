//! Manifests written for the user: checks of what goes in, and files that are never lost.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use anyhow::{Context as _, bail};

/// A file to write.
#[derive(Debug)]
pub(crate) struct NewFile {
    pub(crate) name: String,
    pub(crate) text: String,
    /// Permission bits, such as 0o600 for what holds a key.
    pub(crate) mode: u32,
}

/// True for a DNS subdomain (RFC 1123), which is what Kubernetes takes as an object's name.
pub(crate) fn is_dns_name(name: &str) -> bool {
    let label = |part: &str| {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !part.is_empty()
            && part.chars().all(legal)
            && !part.starts_with('-')
            && !part.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}

/// Clap parser of a DNS name.
pub(crate) fn dns_name(text: &str) -> Result<String, String> {
    if is_dns_name(text) {
        return Ok(text.to_owned());
    }
    Err("expected a DNS name: a-z, 0-9, - and ., starting and ending with a letter or digit"
        .to_owned())
}

/// Writes all files or, unless `force`, none if one is there already.
pub(crate) fn write_all(dir: &Path, files: &[NewFile], force: bool) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make folder {}", dir.display()))?;
    let there: Vec<_> = files
        .iter()
        .map(|file| dir.join(&file.name))
        .filter(|path| path.symlink_metadata().is_ok())
        .map(|path| path.display().to_string())
        .collect();
    if !force && !there.is_empty() {
        let verb = if there.len() == 1 { "is" } else { "are" };
        bail!("{} {verb} there already; give --force to overwrite", there.join(" and "));
    }
    files.iter().try_for_each(|file| {
        let path = dir.join(&file.name);
        write_one(&path, file).with_context(|| format!("cannot write {}", path.display()))
    })
}

/// Writes a new file and renames it, so that the mode is right from the start and readers see all
/// or nothing. The leading dot keeps a running fabric from reading it half written.
fn write_one(path: &Path, file: &NewFile) -> io::Result<()> {
    let temporary = path.with_file_name(format!(".{}.tmp", file.name));
    drop(fs::remove_file(&temporary));
    let mut out =
        OpenOptions::new().write(true).create_new(true).mode(file.mode).open(&temporary)?;
    out.write_all(file.text.as_bytes())?;
    out.sync_all()?;
    fs::rename(&temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dns_names_name_objects() {
        for good in ["a", "edge-1", "n1.site.example"] {
            assert!(is_dns_name(good), "{good}");
        }
        for bad in ["", "-a", "a-", "a..b", "Edge", "a/b", "a b", "a\nb", &"x".repeat(254)] {
            assert!(!is_dns_name(bad), "{bad}");
        }
    }
}
