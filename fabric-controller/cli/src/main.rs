//! `weft`: sets up, runs and shows the fabric on a host. One module a command, and what they share.
//!
//! * [`selection`] chooses a fabric of the host, [`up`] and [`agent`] run it with `fabric_supervisor`.
//! * [`adopt`] takes a Kubernetes cluster over from Liqo's own network.
//! * [`status`] shows what `fabric_observation` finds.

mod adopt;
mod agent;
mod cli;
mod cluster;
mod completion;
mod down;
mod example;
mod get;
mod host;
mod init;
mod keys;
mod logs;
mod manifest;
mod output;
mod preconditions;
mod selection;
mod status;
mod up;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run(cli::parse(std::env::args_os())) {
        Ok(code) => code,
        Err(error) => cli::report(&error),
    }
}
