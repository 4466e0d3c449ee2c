use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fabric_objects::{Kind, Object, ObjectRef, Problem, Snapshot, decode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::copies;
use crate::error::DirectoryError;
use crate::file::{self, Mode};
use crate::folder;
use crate::hub::ChangeServer;
use crate::layout::Layout;
use crate::limits;
use crate::parse::{self, MAX_OWN_NAME, check_names};
use crate::reader::{Reader, Scope};
use crate::watch::Watch;

/// Socket of the supervisor's change notifications, in the run directory.
const CHANGES: &str = "changes.sock";

/// The resources of a cluster on this host.
#[derive(Clone, Debug)]
pub struct Directory {
    layout: Arc<Layout>,
}

/// Paths of the directories.
#[derive(Clone, Debug)]
pub struct Places {
    pub manifests: Option<PathBuf>,
    pub run_dir: PathBuf,
    pub state_dir: Option<PathBuf>,
}

impl Directory {
    /// Opens all directories of this host; makes those of weft's own.
    pub fn open(places: Places) -> Result<Self, DirectoryError> {
        let layout = Layout {
            manifests: places.manifests,
            published: places.run_dir.join("published"),
            state: places.state_dir,
            changes: Some(places.run_dir.join(CHANGES)),
        };
        for kind in Kind::ALL {
            for folder in [layout.objects(kind), layout.statuses(kind)].into_iter().flatten() {
                file::make_folder(&folder, kind == Kind::Secret)?;
            }
        }
        Ok(Self { layout: Arc::new(layout) })
    }

    /// Opens the published directory of another host. It may be read-only; then statuses cannot be
    /// written.
    pub fn open_published(dir: &Path) -> Result<Self, DirectoryError> {
        let read = fs::read_dir(dir);
        read.map_err(|source| DirectoryError::Read { path: dir.to_owned(), source })?;
        let layout =
            Layout { manifests: None, published: dir.to_owned(), state: None, changes: None };
        Ok(Self { layout: Arc::new(layout) })
    }

    /// Opens only the user's manifests; makes nothing.
    pub fn open_manifests(dir: &Path) -> Self {
        let (manifests, published) = (Some(dir.to_owned()), PathBuf::new());
        Self { layout: Arc::new(Layout { manifests, published, state: None, changes: None }) }
    }

    /// Notifies the watches of all programs of this run directory. Must be called within a tokio
    /// runtime.
    pub fn serve_changes(&self) -> Result<ChangeServer, DirectoryError> {
        let socket = self.layout.changes.as_ref().ok_or(DirectoryError::NoRunDir)?;
        ChangeServer::start(socket).map_err(|source| {
            match limits::inotify_instance(source.raw_os_error()) {
                Some(limit) => DirectoryError::Limit { limit },
                None => DirectoryError::Serve { path: socket.clone(), source },
            }
        })
    }

    /// Reports all objects of these kinds, then every change. Must be called within a tokio runtime.
    pub fn watch(&self, kinds: &[Kind]) -> Watch {
        Watch::start(&self.layout, Scope::all(kinds))
    }

    /// Same as [`Self::watch`], for one object, and for all of other kinds.
    pub fn follow(&self, object: &ObjectRef, with: &[Kind]) -> Watch {
        Watch::start(&self.layout, Scope::follow(object, with))
    }

    /// Path of the file of an object of weft's own.
    pub fn file_of(&self, object: &ObjectRef) -> Option<PathBuf> {
        self.object_path(object).ok()
    }

    /// Reads all objects of these kinds, and their problems.
    pub fn read(&self, kinds: &[Kind]) -> Result<Snapshot, DirectoryError> {
        self.read_scope(Scope::all(kinds))
    }

    fn read_scope(&self, scope: Scope) -> Result<Snapshot, DirectoryError> {
        let (snapshot, error) = Reader::new(&self.layout, scope).read();
        error.map_or(Ok(snapshot), Err)
    }

    /// Reads one object.
    pub fn get(&self, object: &ObjectRef) -> Result<Option<Object>, DirectoryError> {
        Ok(self.read_scope(Scope::follow(object, &[]))?.objects.remove(object))
    }

    /// Writes an object of weft's own if its content differs, and returns it as stored.
    ///
    /// The uid is random, made at creation; the generation is one higher after each change of the
    /// spec. An object that was read from the store before is put back as it was.
    pub fn put(&self, object: &Object) -> Result<Object, DirectoryError> {
        let reference = object.reference();
        let path = self.object_path(&reference)?;
        let mut want = object.clone();
        decode::mark_ours(&mut want);
        // Most often one that was read before is there as it was, and equal text need not be understood.
        let is_same = |text| folder::read(&path).is_ok_and(|have| have == text);
        if !object.uid().is_empty() && is_same(yaml(&reference, &content(&want))?) {
            return Ok(want);
        }
        let have = read_value(&path)?.and_then(|v| decode::object(reference.kind, v).ok());
        let repairs = have.is_none() && !object.uid().is_empty();
        let (uid, generation) = match &have {
            Some((have, _)) if !have.uid().is_empty() => (have.uid().to_owned(), have.generation()),
            // Its file is gone or damaged, but the caller knows its uid and generation.
            Some(_) | None if repairs => (object.uid().to_owned(), object.generation()),
            Some(_) | None => (new_uid()?, 0),
        };
        let metadata = want.metadata_mut();
        metadata.uid = Some(uid);
        metadata.generation = Some(generation.max(1));
        let (before, mut after) =
            (have.map(|(have, _)| content(&have)).unwrap_or_default(), content(&want));
        if before == after {
            return Ok(want);
        }
        if !repairs && before.get("spec") != after.get("spec") {
            want.metadata_mut().generation = Some(generation + 1);
            after["metadata"]["generation"] = json!(generation + 1);
        }
        let secret = reference.kind == Kind::Secret;
        let durable = !Layout::is_published(reference.kind);
        let text = yaml(&reference, &after)?;
        file::write(&path, &text, Mode { secret, durable })?;
        copies::write(&self.layout, &path, &text)?;
        Ok(want)
    }

    /// Writes the status of an object that was read; returns whether it differed.
    pub fn put_status(&self, object: &Object) -> Result<bool, DirectoryError> {
        let reference = object.reference();
        let path = self.status_path(&reference)?;
        if object.uid().is_empty() {
            return Err(DirectoryError::NoUid { object: reference });
        }
        let status = object.to_value().get("status").cloned().unwrap_or_default();
        let mut want = json!({ "uid": object.uid(), "status": status });
        if let Some(local) = decode::local(object) {
            want[decode::LOCAL] = local;
        }
        let text = yaml(&reference, &want)?;
        // Most often there is nothing to write, and equal text need not be understood.
        if folder::read(&path).is_ok_and(|have| have == text)
            || read_value(&path)?.as_ref() == Some(&want)
        {
            return Ok(false);
        }
        // Another host took it down, or its mount is gone: it is not for a reader to make.
        let published = &self.layout.published;
        if self.layout.changes.is_none() && !published.is_dir() {
            let source = io::ErrorKind::NotFound.into();
            return Err(DirectoryError::Write { path: published.clone(), source });
        }
        let durable = matches!(reference.kind, Kind::Network | Kind::Ip);
        file::write(&path, &text, Mode { secret: false, durable })?;
        copies::write(&self.layout, &path, &text)?;
        Ok(true)
    }

    /// Copies the files of granted prefixes and addresses that lack a copy. For a program that starts
    /// while no other one writes them.
    pub fn copy_grants(&self) -> Result<(), DirectoryError> {
        copies::complete(&self.layout)
    }

    /// Restores files of granted prefixes and addresses that are damaged or gone, and returns those.
    pub fn restore_grants(&self) -> Result<Vec<PathBuf>, DirectoryError> {
        copies::restore(&self.layout)
    }

    /// Files of granted prefixes and addresses that are damaged and have no copy.
    pub fn lost_grants(&self) -> Vec<PathBuf> {
        copies::lost(&self.layout)
    }

    /// Removes an object of weft's own with its status; of a user's object the status only.
    pub fn delete(&self, object: &ObjectRef) -> Result<(), DirectoryError> {
        if self.layout.objects(object.kind).is_some() {
            self.remove(&self.object_path(object)?)?;
        }
        match self.status_path(object) {
            Ok(path) => self.remove(&path),
            Err(DirectoryError::NoStatus { .. } | DirectoryError::NoFolder { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn remove(&self, path: &Path) -> Result<(), DirectoryError> {
        copies::remove(&self.layout, path)?;
        file::remove(path)
    }

    /// Objects that are gone and have left a status behind; none while there are manifests that cannot
    /// be read.
    pub fn orphaned_statuses(&self) -> Result<Vec<ObjectRef>, DirectoryError> {
        let mut reader = Reader::new(&self.layout, Scope::all(&Kind::ALL));
        let (snapshot, error) = reader.read();
        match error {
            Some(error) => Err(error),
            None if snapshot.problems.is_empty() => Ok(reader.orphans(&snapshot)),
            None => Ok(Vec::new()),
        }
    }

    /// Publishes all problems; returns whether they differed.
    pub fn put_problems(&self, problems: &[Problem]) -> Result<bool, DirectoryError> {
        let path = self.problems_path();
        let problems: Vec<_> = problems.iter().map(PublishedProblem::from).collect();
        let text = serde_saphyr::to_string(&problems)
            .map_err(|source| DirectoryError::EncodeProblems { source })?;
        if folder::read(&path).is_ok_and(|have| have == text) {
            return Ok(false);
        }
        file::write(&path, &text, Mode { secret: false, durable: false })?;
        Ok(true)
    }

    /// Returns the problems published last.
    pub fn problems(&self) -> Vec<Problem> {
        let text = folder::read(&self.problems_path()).unwrap_or_default();
        let read: Result<Vec<PublishedProblem>, _> = serde_saphyr::from_str(&text);
        read.unwrap_or_default().into_iter().map(Problem::from).collect()
    }

    /// Keeps a note under a name, whole or not at all even after a power cut; returns whether it
    /// differed.
    pub fn put_note(&self, name: &str, note: &impl Serialize) -> Result<bool, DirectoryError> {
        let path = self.note_path(name).ok_or(DirectoryError::NoState)?;
        let text = serde_saphyr::to_string(note)
            .map_err(|source| DirectoryError::EncodeNote { name: name.to_owned(), source })?;
        if folder::read(&path).is_ok_and(|have| have == text) {
            return Ok(false);
        }
        file::write(&path, &text, Mode { secret: true, durable: true })?;
        Ok(true)
    }

    /// Returns the note kept under that name; `None` if there is none, or none that can be decoded.
    pub fn note<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let text = folder::read(&self.note_path(name)?).ok()?;
        let note = serde_saphyr::from_str(&text);
        note.inspect_err(|error| tracing::warn!(name, %error, "a note is unreadable")).ok()
    }

    /// Deletes a note; an absent one is no error.
    pub fn delete_note(&self, name: &str) -> Result<(), DirectoryError> {
        self.note_path(name).map_or(Ok(()), |path| file::remove(&path))
    }

    fn note_path(&self, name: &str) -> Option<PathBuf> {
        Some(self.layout.state.as_ref()?.join("notes").join(format!("{name}.yaml")))
    }

    fn problems_path(&self) -> PathBuf {
        self.layout.published.join("problems.yaml")
    }

    fn object_path(&self, object: &ObjectRef) -> Result<PathBuf, DirectoryError> {
        let folder = self.layout.objects(object.kind).ok_or_else(|| {
            if matches!(object.kind, Kind::Network | Kind::Ip | Kind::Secret) {
                no_state(object)
            } else {
                DirectoryError::NotOurs { object: object.clone() }
            }
        })?;
        checked_path(folder, object)
    }

    fn status_path(&self, object: &ObjectRef) -> Result<PathBuf, DirectoryError> {
        let folder = self.layout.statuses(object.kind).ok_or_else(|| {
            if matches!(object.kind, Kind::Network | Kind::Ip) {
                no_state(object)
            } else {
                DirectoryError::NoStatus { object: object.clone() }
            }
        })?;
        checked_path(folder, object)
    }
}

fn no_state(object: &ObjectRef) -> DirectoryError {
    DirectoryError::NoFolder { object: object.clone(), missing: "--state-dir" }
}

fn checked_path(folder: PathBuf, object: &ObjectRef) -> Result<PathBuf, DirectoryError> {
    check_names(object, MAX_OWN_NAME).map_err(|(field, expected)| DirectoryError::Name {
        object: object.clone(),
        field,
        expected,
    })?;
    Ok(folder.join(Layout::file_name(object)))
}

/// Content of an object's own file: all but the status.
fn content(object: &Object) -> Value {
    let mut value = object.to_value();
    if let Some(map) = value.as_object_mut() {
        map.remove("status");
    }
    value
}

fn yaml(object: &ObjectRef, value: &Value) -> Result<String, DirectoryError> {
    serde_saphyr::to_string(value)
        .map_err(|source| DirectoryError::Encode { object: object.clone(), source })
}

/// `None` if there is no such file, or none that can be understood: then it is written anew.
fn read_value(path: &Path) -> Result<Option<Value>, DirectoryError> {
    match folder::read(path) {
        Ok(text) => Ok(parse::value(&text).ok()),
        Err(folder::Unreadable::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(folder::Unreadable::Io(source)) => {
            Err(DirectoryError::Read { path: path.to_owned(), source })
        }
        Err(
            folder::Unreadable::TooLong(_)
            | folder::Unreadable::NotText
            | folder::Unreadable::NotAFile(_),
        ) => Ok(None),
    }
}

fn new_uid() -> Result<String, DirectoryError> {
    let path = Path::new("/proc/sys/kernel/random/uuid");
    let read = fs::read_to_string(path);
    let read = read.map_err(|source| DirectoryError::Read { path: path.to_owned(), source })?;
    Ok(read.trim().to_owned())
}

/// A [`Problem`] as `problems.yaml` holds it.
#[derive(Serialize, Deserialize)]
struct PublishedProblem {
    source: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    field: Option<String>,
    message: String,
}

impl From<&Problem> for PublishedProblem {
    fn from(problem: &Problem) -> Self {
        let object = problem.object.as_ref();
        Self {
            source: problem.source.clone(),
            kind: object.map(|o| o.kind.to_string()),
            namespace: object.and_then(|o| o.namespace.clone()),
            name: object.map(|o| o.name.clone()),
            field: problem.field.clone(),
            message: problem.message.clone(),
        }
    }
}

impl From<PublishedProblem> for Problem {
    fn from(problem: PublishedProblem) -> Self {
        let kind = Kind::ALL.into_iter().find(|k| problem.kind.as_deref() == Some(k.as_str()));
        let object = kind.zip(problem.name).map(|(kind, name)| {
            ObjectRef::new(kind, problem.namespace.as_deref().unwrap_or_default(), &name)
        });
        Self { source: problem.source, object, field: problem.field, message: problem.message }
    }
}
