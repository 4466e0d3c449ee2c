//! Source of resources, and destination of status and published config.
//!
//! In Kubernetes, that is the API server. Standalone, it is a directory of manifests and two
//! directories of weft's own. Nothing else in the workspace depends on which of the two it is.
//!
//! Nothing of the user's is ever written but its status.

mod args;
mod error;
mod kubernetes;
mod store;
mod watch;
mod write_count;

pub use args::StoreArgs;
pub use error::StoreError;
pub use fabric_directory::{ChangeServer, ignored_manifests};
pub use fabric_kube_client::{ApiError, ApiServer, StoreMetrics};
pub use fabric_objects::{Event, Kind, Object, ObjectRef, Problem, Snapshot};
pub use store::{Note, Store};
pub use watch::Watch;
