//! A folder of files, each parsed once for as long as it stays the same.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::parse::MAX_FILE;

/// File systems stamp files with the time of the last tick: two writes within one look alike.
const TRUSTED_AGE: Duration = Duration::from_secs(1);

/// Parsed form of a file's text.
pub(crate) trait Parse: Default {
    /// `self` is what was made of the file before. A file that is edited in place may have been
    /// read in the middle of that; one that took another's place is whole.
    fn update(&mut self, file: &str, text: Result<String, Unreadable>, in_place: bool);

    /// True if nothing was found in the file so far.
    fn is_empty(&self) -> bool;
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreadable {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("is {0} bytes long; expected at most {MAX_FILE} (1 MiB)")]
    TooLong(u64),
    #[error("is not UTF-8 text; expected YAML or JSON")]
    NotText,
    #[error("is {0}; expected a file")]
    NotAFile(&'static str),
}

#[derive(Debug)]
pub(crate) struct Folder<T> {
    path: PathBuf,
    /// The one file that matters, if not all do.
    only: Option<String>,
    files: BTreeMap<String, Cached<T>>,
}

#[derive(Debug, Default)]
struct Cached<T> {
    stamp: Option<Stamp>,
    inode: u64,
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
    pub(crate) fn new(path: PathBuf, only: Option<String>) -> Self {
        Self { path, only, files: BTreeMap::new() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Reads what is new or changed and drops what is gone. If the folder itself cannot be
    /// read, all stays as it was.
    pub(crate) fn refresh(&mut self) -> io::Result<()> {
        let names = self.names()?;
        self.refresh_if(names, false, |_, _| true);
        Ok(())
    }

    /// The same with these [`Self::names`], but keeps what is gone if `keeps_gone`, and skips a file in which nothing
    /// was found so far unless `may_hold` accepts its name and text.
    pub(crate) fn refresh_if(
        &mut self,
        names: Vec<String>,
        keeps_gone: bool,
        may_hold: impl Fn(&str, &str) -> bool,
    ) {
        let mut found = BTreeMap::new();
        for name in names {
            let path = self.path.join(&name);
            // Follows links. One to nothing is reported; a file removed since is not.
            match fs::metadata(&path) {
                Ok(metadata) => _ = found.insert(name, Some(metadata)),
                Err(_) if fs::symlink_metadata(&path).is_err() => {}
                Err(_) => _ = found.insert(name, None),
            }
        }
        self.files.retain(|name, _| keeps_gone || found.contains_key(name));
        for (name, metadata) in found {
            let cached = self.files.entry(name.clone()).or_default();
            let stamp = metadata.map(|m| Stamp::of(&m));
            let inode = stamp.map_or(0, |stamp| stamp.inode);
            if stamp.is_some() && stamp == cached.stamp {
                continue;
            }
            let in_place = inode == cached.inode;
            let text = read(&self.path.join(&name));
            let skips = text.as_ref().is_ok_and(|text| !may_hold(&name, text));
            if !(skips && cached.parsed.is_empty()) {
                cached.parsed.update(&name, text, in_place);
            }
            cached.stamp = stamp.filter(Stamp::is_trusted);
            cached.inode = inode;
        }
    }

    /// Those of these files that have changed since they were read, and their texts.
    pub(crate) fn changed<'a>(
        &'a self,
        names: &'a [String],
    ) -> impl Iterator<Item = (&'a str, String)> + 'a {
        names.iter().filter_map(|name| {
            let path = self.path.join(name);
            let stamp = fs::metadata(&path).ok().map(|metadata| Stamp::of(&metadata))?;
            let known = self.files.get(name).and_then(|cached| cached.stamp);
            let is_changed = known != Some(stamp);
            is_changed.then(|| read(&path).ok().map(|text| (name.as_str(), text))).flatten()
        })
    }

    /// Names of the files that may be read.
    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(&self.path)?;
        if let Some(only) = &self.only {
            return Ok(vec![only.clone()]);
        }
        let names = entries.map(|entry| Ok(entry?.file_name().into_string()));
        let names = names.filter_map(|name| name.map(Result::ok).transpose());
        names.filter(|name| !name.as_ref().is_ok_and(|name| !is_manifest(name))).collect()
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &T)> {
        self.files.iter().map(|(name, cached)| (name.as_str(), &cached.parsed))
    }
}

impl<T> Folder<T> {
    pub(crate) fn files_mut(&mut self) -> impl Iterator<Item = (&str, &mut T)> {
        self.files.iter_mut().map(|(name, cached)| (name.as_str(), &mut cached.parsed))
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
pub(crate) fn is_manifest(name: &str) -> bool {
    let ending = [".yaml", ".yml", ".json"].iter().any(|ending| name.ends_with(ending));
    ending && !name.starts_with('.')
}

/// Names in a folder of manifests that look like one and are not read, as they are shown.
pub(crate) fn ignored(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| {
        let name = entry.file_name();
        let shown = name.to_string_lossy().into_owned();
        let is_read = name.to_str().is_some_and(is_manifest);
        let looks_like_one = is_manifest(shown.to_lowercase().trim_start_matches('.'));
        (looks_like_one && !is_read).then_some(shown)
    });
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// Reads a file of bounded length, even if it grows meanwhile. Never waits for one that has no end.
pub(crate) fn read(path: &Path) -> Result<String, Unreadable> {
    let mut options = OpenOptions::new();
    let file: File = options.read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        let is = if metadata.is_dir() { "a directory" } else { "a pipe, socket or device" };
        return Err(Unreadable::NotAFile(is));
    }
    let length = metadata.len();
    if length > MAX_FILE {
        return Err(Unreadable::TooLong(length));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(Unreadable::TooLong(bytes.len() as u64));
    }
    String::from_utf8(bytes).map_err(|_| Unreadable::NotText)
}
