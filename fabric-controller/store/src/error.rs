use std::io;
use std::path::{Path, PathBuf};

use fabric_objects::{Kind, ObjectRef, Problem};

/// Reason for which the store could not read or write.
///
/// Faults of a manifest are not among them: those are [`Problem`]s, and the rest goes on.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot make folder {}", path.display())]
    MakeFolder { path: PathBuf, source: io::Error },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(
        "cannot write {}, as its file system is full: what is there is an older version; make room \
         (`df -h {0}`, `df -i {0}`)", path.display()
    )]
    Full { path: PathBuf, source: io::Error },
    #[error("cannot remove {}", path.display())]
    Remove { path: PathBuf, source: io::Error },
    #[error("{limit}")]
    Limit { limit: String },
    #[error("cannot listen at {}", path.display())]
    Serve { path: PathBuf, source: io::Error },
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
    #[error("nothing says where the resources are; expected --run-dir DIR or --kubernetes")]
    NoPlace,
    #[error("cannot tell how to reach the API server of a Kubernetes cluster")]
    Config(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot {step} {object}")]
    Request { step: &'static str, object: ObjectRef, source: ApiError },
    #[error("cannot list every {kind}")]
    List { kind: Kind, source: ApiError },
    #[error("{object} is gone, or another has taken its name")]
    Gone { object: ObjectRef },
    #[error("{0} cannot be understood")]
    Foreign(Box<Problem>),
    #[error("cannot {step} the note {name}")]
    Note { step: &'static str, name: String, source: ApiError },
    #[error("cannot write the note {name} as JSON")]
    EncodeJson { name: String, source: serde_json::Error },
}

/// Error answer of the API server, or the reason for no answer.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("the API server did not answer within {seconds} s")]
    Timeout { seconds: u64 },
    /// The code is HTTP's.
    #[error("the API server refused ({code}): {message}")]
    Refused { code: u16, message: String },
    #[error("the API server cannot be reached")]
    Unreachable(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the API server's answer is no JSON")]
    Answer(#[source] serde_json::Error),
}

impl ApiError {
    /// Remedy for a refusal to list or watch a kind that waiting does not end; none for any other
    /// error.
    pub fn refusal(&self, kind: &str, api_version: &str, plural: &str) -> Option<String> {
        let Self::Refused { code, message } = self else { return None };
        let resource = match api_version.split_once('/') {
            Some((group, _)) => format!("{plural}.{group}"),
            None => plural.to_owned(),
        };
        match code {
            401 => Some(format!(
                "the API server does not accept this program's credentials: {message}"
            )),
            403 => Some(format!(
                "may not watch {kind}: {message}; give this program's user the verbs get, list and \
                 watch on {resource}"
            )),
            404 => Some(format!(
                "the API server knows no {kind} of {api_version}; install the \
                 CustomResourceDefinition {resource}, which weft's chart brings"
            )),
            _ => None,
        }
    }
}

impl StoreError {
    /// Error of a file that could not be written.
    pub(crate) fn unwritten(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        if is_full(&source) { Self::Full { path, source } } else { Self::Write { path, source } }
    }

    /// True if the object is not there any more, or not the one that was meant.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }

    /// Remedy for a list that is refused; see [`ApiError::refusal`].
    pub fn refusal(&self) -> Option<String> {
        let Self::List { kind, source } = self else { return None };
        source.refusal(kind.as_str(), kind.api_version(), kind.plural())
    }

    /// True if there was no answer: whatever comes next is likely to fare no better.
    pub fn is_unreachable(&self) -> bool {
        let (Self::Request { source, .. } | Self::List { source, .. } | Self::Note { source, .. }) =
            self
        else {
            return false;
        };
        matches!(source, ApiError::Timeout { .. } | ApiError::Unreachable(_))
    }
}

/// True if a file system has no room left, for anybody or for this user.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use fabric_runtime::chain;

    use super::*;

    #[test]
    fn full_file_system_is_named_with_a_remedy() {
        let path = Path::new("/run/weft/rome/published/nodeconfigs/n1.yaml");
        for full in [libc::ENOSPC, libc::EDQUOT] {
            let error = StoreError::unwritten(path, io::Error::from_raw_os_error(full));
            let text = chain(&error);
            let expected = format!("cannot write {0}, as its file system is full", path.display());
            assert!(text.starts_with(&expected) && text.contains("make room"), "{text}");
        }
        let error = StoreError::unwritten(path, io::ErrorKind::PermissionDenied.into());
        assert!(!error.to_string().contains("full"));
    }
}
