//! Files that appear whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

use crate::error::DirectoryError;

/// Mode in which a file is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mode {
    /// Readable by its owner only.
    pub(crate) secret: bool,
    /// Must be whole or absent after a power cut.
    pub(crate) durable: bool,
}

/// Bounds what killed writers leave behind.
const WRITERS: u32 = 64;

/// Writes a temporary file in the same folder and renames it.
pub(crate) fn write(path: &Path, text: &str, mode: Mode) -> Result<(), DirectoryError> {
    let fail = |source| DirectoryError::unwritten(path, source);
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(fail(io::ErrorKind::InvalidInput.into()));
    };
    make_folder(folder, mode.secret)?;
    // A status may have two writers at once. What lies there was left by one that was killed.
    let name = name.to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}.tmp", std::process::id() % WRITERS));
    let written = unlink(&temporary).and_then(|()| fill(&temporary, text, mode));
    let moved = written.and_then(|()| fs::rename(&temporary, path));
    if moved.is_err() {
        // A full disk takes the name, but not the text.
        let _ = unlink(&temporary);
    }
    moved.map_err(fail)?;
    if mode.durable && mode.secret {
        // A key that a peer may already have must be there, too.
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(fail)?;
    }
    Ok(())
}

fn fill(path: &Path, text: &str, mode: Mode) -> io::Result<()> {
    let permissions = if mode.secret { 0o600 } else { 0o644 };
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(permissions).open(path)?;
    file.write_all(text.as_bytes())?;
    if mode.durable { file.sync_all() } else { Ok(()) }
}

pub(crate) fn make_folder(path: &Path, secret: bool) -> Result<(), DirectoryError> {
    let mode = if secret { 0o700 } else { 0o755 };
    let made = fs::DirBuilder::new().recursive(true).mode(mode).create(path);
    made.map_err(|source| {
        let error = DirectoryError::unwritten(path, source);
        if let DirectoryError::Write { path, source } = error {
            DirectoryError::MakeFolder { path, source }
        } else {
            error
        }
    })
}

/// Removes a file; an absent one is no error.
pub(crate) fn remove(path: &Path) -> Result<(), DirectoryError> {
    unlink(path).map_err(|source| DirectoryError::Remove { path: path.to_owned(), source })
}

fn unlink(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_write_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        // What is in the way cannot be replaced, as on a full disk nothing can be written.
        let path = dir.path().join("status.yaml");
        fs::create_dir_all(path.join("in-the-way")).unwrap();
        write(&path, "text", Mode { secret: false, durable: true }).unwrap_err();
        let left: Vec<_> = fs::read_dir(dir.path()).unwrap().flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }
}
