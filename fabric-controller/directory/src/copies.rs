//! Second copies of Networks and IPs and of their statuses: a damaged file would lose what ipam has
//! granted, and a peer's prefix with it.

use std::fs;
use std::path::{Path, PathBuf};

use fabric_objects::Kind;
use serde_json::Value;

use crate::error::DirectoryError;
use crate::file::{self, Mode};
use crate::folder;
use crate::layout::Layout;
use crate::parse;

/// Folder of the copies, below that of notes.
const COPIES: &str = "copies";
const COPIED: Mode = Mode { secret: true, durable: false };

/// Path of the copy of a file of the state directory; `None` for files without one.
pub(crate) fn path_of(layout: &Layout, file: &Path) -> Option<PathBuf> {
    let state = layout.state.as_ref()?;
    let below = file.strip_prefix(state).ok()?;
    folders(layout).any(|folder| file.starts_with(&folder)).then(|| copies(state).join(below))
}

/// Copies a file that was just written.
pub(crate) fn write(layout: &Layout, file: &Path, text: &str) -> Result<(), DirectoryError> {
    path_of(layout, file).map_or(Ok(()), |copy| file::write(&copy, text, COPIED))
}

/// Removes the copy of a file that is to be removed.
pub(crate) fn remove(layout: &Layout, file: &Path) -> Result<(), DirectoryError> {
    path_of(layout, file).map_or(Ok(()), |copy| file::remove(&copy))
}

/// Copies files of which no equal copy is there. For a program that starts while no other one writes them.
pub(crate) fn complete(layout: &Layout) -> Result<(), DirectoryError> {
    for (folder, copies) in pairs(layout) {
        for name in names(&folder) {
            let (file, copy) = (folder.join(&name), copies.join(&name));
            if let Some(text) = intact(&file).filter(|text| intact(&copy).as_ref() != Some(text)) {
                file::write(&copy, &text, COPIED)?;
            }
        }
    }
    Ok(())
}

/// Restores files that are damaged or gone, and returns those. Another program may write or remove them
/// meanwhile: it removes a copy before its file, so what is gone with its copy there was not removed.
pub(crate) fn restore(layout: &Layout) -> Result<Vec<PathBuf>, DirectoryError> {
    let mut restored = Vec::new();
    for (folder, copies) in pairs(layout) {
        for name in names(&copies) {
            let (file, copy) = (folder.join(&name), copies.join(&name));
            if intact(&file).is_some() {
                continue;
            }
            if let Some(text) = intact(&copy).filter(|_| intact(&file).is_none()) {
                file::write(&file, &text, Mode { secret: false, durable: true })?;
                restored.push(file);
            }
        }
    }
    Ok(restored)
}

/// Files that are damaged and cannot be restored.
pub(crate) fn lost(layout: &Layout) -> Vec<PathBuf> {
    let files = folders(layout)
        .flat_map(|folder| names(&folder).into_iter().map(move |name| folder.join(name)));
    files.filter(|file| file.exists() && intact(file).is_none()).collect()
}

/// Folders of files, each with that of their copies.
fn pairs(layout: &Layout) -> impl Iterator<Item = (PathBuf, PathBuf)> {
    folders(layout).filter_map(|folder| Some((folder.clone(), path_of(layout, &folder)?)))
}

fn copies(state: &Path) -> PathBuf {
    state.join("notes").join(COPIES)
}

/// Folders of the files that have copies.
fn folders(layout: &Layout) -> impl Iterator<Item = PathBuf> {
    let kinds = [Kind::Network, Kind::Ip];
    kinds.into_iter().flat_map(|kind| [layout.objects(kind), layout.statuses(kind)]).flatten()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| folder::is_manifest(name)).collect()
}

/// Text of a file that has all that weft writes there: an object, or a status with its uid.
fn intact(file: &Path) -> Option<String> {
    let text = folder::read(file).ok()?;
    let value = parse::value(&text).ok()?;
    let has = |key: &str| value.get(key).is_some_and(Value::is_object);
    let is_status = value.get("uid").is_some_and(Value::is_string) && has("status");
    (is_status || has("metadata") && has("spec")).then_some(text)
}
