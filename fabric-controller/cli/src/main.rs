//! `weft`: sets up, runs and shows the fabric on a host. One module a command, and what they share.
//!
//! * [`rundir`] locates files, [`selection`] chooses a fabric of the host, [`process`] is one
//!   supervised process, [`supervisor`] keeps a set of them running, [`workloads`] defines that set.
//! * [`observe`] reads what is known of the peerings; [`status`] shows it.

mod agent;
mod cli;
mod cluster;
mod completion;
mod down;
mod get;
mod health;
mod host;
mod init;
mod keys;
mod limits;
mod lock;
mod log_file;
mod logs;
mod manifest;
mod metrics;
mod observe;
mod output;
mod preconditions;
mod process;
mod rundir;
mod selection;
mod status;
mod supervise;
mod supervisor;
mod up;
mod workloads;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    match cli::run(cli::Cli::parse()) {
        Ok(code) => code,
        Err(error) => cli::report(&error),
    }
}
