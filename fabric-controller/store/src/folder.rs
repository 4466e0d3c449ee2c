//! A folder of files, each parsed once for as long as it stays the same.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::parse::MAX_FILE;

/// File systems stamp files with the time of the last tick: two writes within one look alike.
const TRUSTED_AGE: Duration = Duration::from_secs(1);

/// What became of a file's text.
pub(crate) trait Parse: Default {
    /// `self` is what was made of the file before.
    fn update(&mut self, file: &str, text: Result<String, Unreadable>);
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreadable {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("is {0} bytes long; expected at most {MAX_FILE} (1 MiB)")]
    TooLong(u64),
    #[error("is not UTF-8 text")]
    NotText,
}

#[derive(Debug)]
pub(crate) struct Folder<T> {
    path: PathBuf,
    files: BTreeMap<String, Cached<T>>,
}

#[derive(Debug, Default)]
struct Cached<T> {
    stamp: Option<Stamp>,
    parsed: T,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    modified: SystemTime,
    changed: (i64, i64),
    length: u64,
    inode: u64,
}

impl<T: Parse> Folder<T> {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, files: BTreeMap::new() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads what is new or changed and forgets what is gone. If the folder itself cannot be
    /// read, all stays as it was.
    pub(crate) fn refresh(&mut self) -> io::Result<()> {
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| is_manifest(name)) else { continue };
            // Follows links. What is no file (a folder, a pipe that would block) is no manifest.
            match fs::metadata(entry.path()) {
                Ok(metadata) if !metadata.is_file() => {}
                Ok(metadata) => {
                    found.insert(name.to_owned(), Some(metadata));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(_) => {
                    found.insert(name.to_owned(), None);
                }
            }
        }
        self.files.retain(|name, _| found.contains_key(name));
        for (name, metadata) in found {
            let cached = self.files.entry(name.clone()).or_default();
            let stamp = metadata.map(|m| Stamp::of(&m));
            if stamp.is_some() && stamp == cached.stamp {
                continue;
            }
            cached.parsed.update(&name, read(&self.path.join(&name)));
            cached.stamp = stamp.filter(Stamp::is_trusted);
        }
        Ok(())
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &T)> {
        self.files.iter().map(|(name, cached)| (name.as_str(), &cached.parsed))
    }
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            modified: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
            length: metadata.len(),
            inode: metadata.ino(),
        }
    }

    fn is_trusted(&self) -> bool {
        self.modified.elapsed().is_ok_and(|age| age > TRUSTED_AGE)
    }
}

/// Hidden files are editors' and our own temporary ones.
fn is_manifest(name: &str) -> bool {
    let ending = [".yaml", ".yml", ".json"].iter().any(|ending| name.ends_with(ending));
    ending && !name.starts_with('.')
}

/// Reads a file of bounded length, even if it grows meanwhile.
pub(crate) fn read(path: &Path) -> Result<String, Unreadable> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    if length > MAX_FILE {
        return Err(Unreadable::TooLong(length));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(Unreadable::TooLong(bytes.len() as u64));
    }
    String::from_utf8(bytes).map_err(|_| Unreadable::NotText)
}
