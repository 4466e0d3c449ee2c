//! Standalone store: the user's manifests, and two directories of weft's own.
//!
//! [`Directory`] reads each object from its manifest or weft's own file, and its status from a file
//! beside. Every file appears whole and has one writer. [`Watch`] reports changes, which inotify or
//! the supervisor's [`ChangeServer`] notifies it of.

mod copies;
mod directory;
mod error;
mod file;
mod folder;
mod folders;
mod hub;
mod identity;
mod last_good;
mod layout;
mod limits;
mod lines;
mod manifests;
mod notifier;
mod outline;
mod parse;
mod reader;
mod watch;

pub use directory::{Directory, Places};
pub use error::DirectoryError;
pub use hub::ChangeServer;
pub use watch::Watch;

use std::path::Path;

use fabric_objects::{Object, Problem};

/// Returns the names in a folder of manifests that look like one and are not read: hidden ones, those
/// that are not UTF-8, and those that end in other letters than `.yaml`, `.yml` or `.json`.
pub fn ignored_manifests(folder: &Path) -> Vec<String> {
    folder::ignored(folder)
}

/// Reads the text of a manifest file, called `file` in problems: its objects, and what is wrong.
pub fn parse(file: &str, text: &str) -> (Vec<Object>, Vec<Problem>) {
    let parsed = parse::parse(file, text);
    (parsed.objects.into_iter().map(|located| located.object).collect(), parsed.problems)
}
