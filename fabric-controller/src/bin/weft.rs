//! `weft`: sets up, runs and shows the fabric on a host.

#[path = "../weft/mod.rs"]
mod weft;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let cli = weft::Cli::parse();
    match weft::run(cli) {
        Ok(code) => code,
        Err(error) => weft::report(&error),
    }
}
