//! The `weft` binary as a user runs it.

#![allow(clippy::unwrap_used)] // panicking is how a test fails

mod commands;
mod down;
mod host;
mod status;
mod supervision;
