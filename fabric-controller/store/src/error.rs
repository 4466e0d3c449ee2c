use fabric_directory::DirectoryError;
use fabric_kube_client::{ApiError, ConnectError};
use fabric_objects::{Kind, ObjectRef, Problem};

/// Reason for which the store could not read or write.
///
/// Faults of a manifest are not among them: those are [`Problem`]s, and the rest goes on.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("no source of resources: expected --run-dir DIR or --kubernetes")]
    NoPlace,
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error("{object} belongs to the user: weft writes its status only")]
    NotOurs { object: ObjectRef },
    #[error("{object} has no status of its own")]
    NoStatus { object: ObjectRef },
    #[error("{object} has no uid: only what was read from the store can be given a status")]
    NoUid { object: ObjectRef },
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot {step} {object}")]
    Request { step: &'static str, object: ObjectRef, source: ApiError },
    #[error("cannot list every {kind}")]
    List { kind: Kind, source: ApiError },
    #[error("{object} is gone, or another has taken its name")]
    Gone { object: ObjectRef },
    #[error("another program has taken the place of this one, and has written {object}")]
    Overtaken { object: ObjectRef },
    #[error("{0} cannot be understood")]
    Foreign(Box<Problem>),
    #[error("cannot {step} the note {name}")]
    Note { step: &'static str, name: String, source: ApiError },
    #[error("another program has written the note {0} meanwhile")]
    NoteChanged(String),
    #[error("cannot write the note {name} as JSON")]
    EncodeJson { name: String, source: serde_json::Error },
}

impl StoreError {
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
