//! Runs the processes of a fabric on a host, and finds them again after its own end.
//!
//! * [`rundir`] locates files, [`lock`] admits one supervisor to a run directory.
//! * [`process`] is one supervised process, [`workloads`] defines the set of them, [`published`] follows
//!   the gateways in it, [`supervise`] keeps that set running.
//! * [`health`] and [`metrics`] ask the processes, [`log_file`] reads what they wrote.

pub mod health;
mod limits;
pub mod lock;
pub mod log_file;
mod messages;
pub mod metrics;
pub mod process;
pub mod published;
pub mod rundir;
pub mod supervise;
mod supervisor;
pub mod workloads;

pub use messages::{printable, say};
