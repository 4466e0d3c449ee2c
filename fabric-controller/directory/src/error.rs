use std::io;
use std::path::{Path, PathBuf};

use fabric_objects::ObjectRef;

/// Reason for which a directory could not be read or written.
///
/// Faults of a manifest are not among them: those are [`fabric_objects::Problem`]s, and the rest
/// goes on.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    #[error("cannot make folder {}", path.display())]
    MakeFolder { path: PathBuf, source: io::Error },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(
        "cannot write {}, as its file system is full: what is there is an older version; make room \
         (`df -h {1}`, `df -i {1}`)", path.display(), path.parent().unwrap_or(path).display()
    )]
    Full { path: PathBuf, source: io::Error },
    #[error(
        "cannot write {}, as its file system is read-only: what is there is an older version; make it \
         writable (`findmnt -T {1}`, `mount -o remount,rw`)",
        path.display(), path.parent().unwrap_or(path).display()
    )]
    ReadOnly { path: PathBuf, source: io::Error },
    #[error("cannot remove {}", path.display())]
    Remove { path: PathBuf, source: io::Error },
    #[error("{limit}")]
    Limit { limit: String },
    #[error("cannot listen at {}", path.display())]
    Serve { path: PathBuf, source: io::Error },
    #[error("changes are served in a run directory, and there is none; expected --run-dir DIR")]
    NoRunDir,
    #[error("{object} belongs to the user: weft writes its status only")]
    NotOurs { object: ObjectRef },
    #[error("{object} has no status of its own")]
    NoStatus { object: ObjectRef },
    #[error("{object} needs {missing}, which this program was not given")]
    NoFolder { object: ObjectRef, missing: &'static str },
    #[error("{object} cannot be stored: {field} {expected}")]
    Name { object: ObjectRef, field: &'static str, expected: String },
    #[error("{object} has no uid: only what was read from the store can be given a status")]
    NoUid { object: ObjectRef },
    #[error("cannot write {object} as YAML")]
    Encode { object: ObjectRef, source: serde_saphyr::SerializeError },
    #[error("this program was given no --state-dir to keep anything in")]
    NoState,
    #[error("cannot write the note {name} as YAML")]
    EncodeNote { name: String, source: serde_saphyr::SerializeError },
    #[error("cannot write the list of problems as YAML")]
    EncodeProblems { source: serde_saphyr::SerializeError },
}

impl DirectoryError {
    /// Error of a file that could not be written.
    pub(crate) fn unwritten(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        let kind = source.kind();
        if matches!(kind, io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            Self::Full { path, source }
        } else if kind == io::ErrorKind::ReadOnlyFilesystem {
            Self::ReadOnly { path, source }
        } else {
            Self::Write { path, source }
        }
    }
}

#[cfg(test)]
mod tests {
    use fabric_runtime::chain;

    use super::*;

    #[test]
    fn full_or_read_only_file_system_has_a_remedy() {
        let path = Path::new("/run/weft/rome/published/nodeconfigs/n1.yaml");
        for full in [libc::ENOSPC, libc::EDQUOT] {
            let error = DirectoryError::unwritten(path, io::Error::from_raw_os_error(full));
            let text = chain(&error);
            let expected = format!("cannot write {0}, as its file system is full", path.display());
            assert!(text.starts_with(&expected) && text.contains("make room"), "{text}");
        }
        let error = DirectoryError::unwritten(path, io::Error::from_raw_os_error(libc::EROFS));
        assert!(error.to_string().contains("read-only") && error.to_string().contains("findmnt"));
        let error = DirectoryError::unwritten(path, io::ErrorKind::PermissionDenied.into());
        assert!(!error.to_string().contains("full"));
    }
}
