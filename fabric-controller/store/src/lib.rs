//! Where resources come from and where status and published config go.
//!
//! Standalone, that is a directory of manifests and two directories of weft's own; in Kubernetes
//! it will be the API server. Nothing else in the workspace knows which of the two it is.
//!
//! Every resource is read as one [`Object`] in which metadata, spec and status are together,
//! whichever files they come from. Nothing in the user's manifests is ever written.

mod decode;
mod error;
mod file;
mod folder;
mod last_good;
mod layout;
mod lines;
mod manifests;
mod object;
mod outline;
mod parse;
mod reader;
mod store;
mod watch;

pub use error::{Problem, StoreError};
pub use object::{Kind, Object, ObjectRef};
pub use store::{Snapshot, Store};
pub use watch::Watch;

use std::path::PathBuf;

/// Where the store keeps its files. The same for every program of a cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct StoreArgs {
    /// Directory of the user's manifests (*.yaml, *.yml, *.json); never written to.
    #[arg(long, env = "WEFT_MANIFESTS", value_name = "DIR")]
    pub manifests: Option<PathBuf>,
    /// Directory of what is gone after a reboot: published config, status, sockets, logs.
    #[arg(long, env = "WEFT_RUN_DIR", value_name = "DIR")]
    pub run_dir: PathBuf,
    /// Directory of what must outlive a reboot: granted prefixes and addresses, generated keys.
    #[arg(long, env = "WEFT_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
}

/// Reads the text of a manifest file, called `file` in problems: its objects, and what is wrong.
pub fn parse(file: &str, text: &str) -> (Vec<Object>, Vec<Problem>) {
    let parsed = parse::parse(file, text);
    (parsed.objects.into_iter().map(|located| located.object).collect(), parsed.problems)
}

/// Something happened to a resource.
#[derive(Clone, Debug)]
pub enum Event {
    /// It is new, or its spec, metadata or status is.
    Applied(Box<Object>),
    Deleted(ObjectRef),
    /// All that is wrong with the manifests now; replaces what was said before.
    Problems(Vec<Problem>),
    /// All that was there when the watch began has been told.
    Synced,
}
