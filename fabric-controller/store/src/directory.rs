//! Standalone: the user's manifests, and two directories of weft's own.

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
pub(crate) mod parse;
mod reader;
mod watch;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fabric_objects::{Kind, Object, ObjectRef, Problem, Snapshot, decode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::file::Mode;
use self::layout::Layout;
use self::parse::{MAX_OWN_NAME, check_names};
use self::reader::{Reader, Scope};
use crate::StoreError;

pub use hub::ChangeServer;
pub(crate) use watch::Watch;

/// Socket of the supervisor's change notifications, in the run directory.
const CHANGES: &str = "changes.sock";

/// The resources of a cluster on this host.
#[derive(Clone, Debug)]
pub(crate) struct Directory {
    layout: Arc<Layout>,
}

/// Paths of the directories.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    pub(crate) manifests: Option<PathBuf>,
    pub(crate) run_dir: PathBuf,
    pub(crate) state_dir: Option<PathBuf>,
}

impl Directory {
    /// Makes the directories of weft's own.
    pub(crate) fn open(places: Places) -> Result<Self, StoreError> {
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

    /// May be read-only; then statuses cannot be written.
    pub(crate) fn open_published(dir: &Path) -> Result<Self, StoreError> {
        let read = fs::read_dir(dir);
        read.map_err(|source| StoreError::Read { path: dir.to_owned(), source })?;
        let layout =
            Layout { manifests: None, published: dir.to_owned(), state: None, changes: None };
        Ok(Self { layout: Arc::new(layout) })
    }

    pub(crate) fn open_manifests(dir: &Path) -> Self {
        let (manifests, published) = (Some(dir.to_owned()), PathBuf::new());
        Self { layout: Arc::new(Layout { manifests, published, state: None, changes: None }) }
    }

    pub(crate) fn serve_changes(&self) -> Result<ChangeServer, StoreError> {
        let socket = self.layout.changes.as_ref().ok_or(StoreError::NoPlace)?;
        ChangeServer::start(socket).map_err(|source| {
            match limits::inotify_instance(source.raw_os_error()) {
                Some(limit) => StoreError::Limit { limit },
                None => StoreError::Serve { path: socket.clone(), source },
            }
        })
    }

    pub(crate) fn watch(&self, kinds: &[Kind]) -> Watch {
        Watch::start(&self.layout, Scope::all(kinds))
    }

    pub(crate) fn follow(&self, object: &ObjectRef, with: &[Kind]) -> Watch {
        Watch::start(&self.layout, Scope::follow(object, with))
    }

    pub(crate) fn file_of(&self, object: &ObjectRef) -> Option<PathBuf> {
        self.object_path(object).ok()
    }

    pub(crate) fn read(&self, kinds: &[Kind]) -> Result<Snapshot, StoreError> {
        self.read_scope(Scope::all(kinds))
    }

    fn read_scope(&self, scope: Scope) -> Result<Snapshot, StoreError> {
        let (snapshot, error) = Reader::new(&self.layout, scope).read();
        error.map_or(Ok(snapshot), Err)
    }

    pub(crate) fn get(&self, object: &ObjectRef) -> Result<Option<Object>, StoreError> {
        Ok(self.read_scope(Scope::follow(object, &[]))?.objects.remove(object))
    }

    /// The uid is random, made at creation; the generation is one higher after each change of the
    /// spec. An object that was read from the store before is put back as it was.
    pub(crate) fn put(&self, object: &Object) -> Result<Object, StoreError> {
        let reference = object.reference();
        let path = self.object_path(&reference)?;
        let have = read_value(&path)?.and_then(|v| decode::object(reference.kind, v).ok());
        let mut want = object.clone();
        decode::mark_ours(&mut want);
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
        file::write(&path, &yaml(&reference, &after)?, Mode { secret, durable })?;
        Ok(want)
    }

    pub(crate) fn put_status(&self, object: &Object) -> Result<bool, StoreError> {
        let reference = object.reference();
        let path = self.status_path(&reference)?;
        if object.uid().is_empty() {
            return Err(StoreError::NoUid { object: reference });
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
            return Err(StoreError::Write { path: published.clone(), source });
        }
        let durable = matches!(reference.kind, Kind::Network | Kind::Ip);
        file::write(&path, &text, Mode { secret: false, durable })?;
        Ok(true)
    }

    /// Removes an object of weft's own with its status; of a user's object the status only.
    pub(crate) fn delete(&self, object: &ObjectRef) -> Result<(), StoreError> {
        if self.layout.objects(object.kind).is_some() {
            file::remove(&self.object_path(object)?)?;
        }
        match self.status_path(object) {
            Ok(path) => file::remove(&path),
            Err(StoreError::NoStatus { .. } | StoreError::NoFolder { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// None while there are manifests that cannot be read.
    pub(crate) fn orphaned_statuses(&self) -> Result<Vec<ObjectRef>, StoreError> {
        let mut reader = Reader::new(&self.layout, Scope::all(&Kind::ALL));
        let (snapshot, error) = reader.read();
        match error {
            Some(error) => Err(error),
            None if snapshot.problems.is_empty() => Ok(reader.orphans(&snapshot)),
            None => Ok(Vec::new()),
        }
    }

    pub(crate) fn put_problems(&self, problems: &[Problem]) -> Result<bool, StoreError> {
        let path = self.problems_path();
        let problems: Vec<_> = problems.iter().map(PublishedProblem::from).collect();
        let text = serde_saphyr::to_string(&problems)
            .map_err(|source| StoreError::EncodeProblems { source })?;
        if folder::read(&path).is_ok_and(|have| have == text) {
            return Ok(false);
        }
        file::write(&path, &text, Mode { secret: false, durable: false })?;
        Ok(true)
    }

    pub(crate) fn problems(&self) -> Vec<Problem> {
        let text = folder::read(&self.problems_path()).unwrap_or_default();
        let read: Result<Vec<PublishedProblem>, _> = serde_saphyr::from_str(&text);
        read.unwrap_or_default().into_iter().map(Problem::from).collect()
    }

    /// Whole or not at all even after a power cut.
    pub(crate) fn put_note(&self, name: &str, note: &impl Serialize) -> Result<bool, StoreError> {
        let path = self.note_path(name).ok_or(StoreError::NoState)?;
        let text = serde_saphyr::to_string(note)
            .map_err(|source| StoreError::EncodeNote { name: name.to_owned(), source })?;
        if folder::read(&path).is_ok_and(|have| have == text) {
            return Ok(false);
        }
        file::write(&path, &text, Mode { secret: true, durable: true })?;
        Ok(true)
    }

    pub(crate) fn note<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let text = folder::read(&self.note_path(name)?).ok()?;
        let note = serde_saphyr::from_str(&text);
        note.inspect_err(|error| tracing::warn!(name, %error, "a note is unreadable")).ok()
    }

    pub(crate) fn delete_note(&self, name: &str) -> Result<(), StoreError> {
        self.note_path(name).map_or(Ok(()), |path| file::remove(&path))
    }

    fn note_path(&self, name: &str) -> Option<PathBuf> {
        Some(self.layout.state.as_ref()?.join("notes").join(format!("{name}.yaml")))
    }

    fn problems_path(&self) -> PathBuf {
        self.layout.published.join("problems.yaml")
    }

    fn object_path(&self, object: &ObjectRef) -> Result<PathBuf, StoreError> {
        let folder = self.layout.objects(object.kind).ok_or_else(|| {
            if matches!(object.kind, Kind::Network | Kind::Ip | Kind::Secret) {
                no_state(object)
            } else {
                StoreError::NotOurs { object: object.clone() }
            }
        })?;
        checked_path(folder, object)
    }

    fn status_path(&self, object: &ObjectRef) -> Result<PathBuf, StoreError> {
        let folder = self.layout.statuses(object.kind).ok_or_else(|| {
            if matches!(object.kind, Kind::Network | Kind::Ip) {
                no_state(object)
            } else {
                StoreError::NoStatus { object: object.clone() }
            }
        })?;
        checked_path(folder, object)
    }
}

fn no_state(object: &ObjectRef) -> StoreError {
    StoreError::NoFolder { object: object.clone(), missing: "--state-dir" }
}

fn checked_path(folder: PathBuf, object: &ObjectRef) -> Result<PathBuf, StoreError> {
    check_names(object, MAX_OWN_NAME).map_err(|(field, expected)| StoreError::Name {
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

fn yaml(object: &ObjectRef, value: &Value) -> Result<String, StoreError> {
    serde_saphyr::to_string(value)
        .map_err(|source| StoreError::Encode { object: object.clone(), source })
}

/// `None` if there is no such file, or none that can be understood: then it is written anew.
fn read_value(path: &Path) -> Result<Option<Value>, StoreError> {
    match folder::read(path) {
        Ok(text) => Ok(parse::value(&text).ok()),
        Err(folder::Unreadable::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(folder::Unreadable::Io(source)) => {
            Err(StoreError::Read { path: path.to_owned(), source })
        }
        Err(
            folder::Unreadable::TooLong(_)
            | folder::Unreadable::NotText
            | folder::Unreadable::NotAFile(_),
        ) => Ok(None),
    }
}

fn new_uid() -> Result<String, StoreError> {
    let path = Path::new("/proc/sys/kernel/random/uuid");
    let read = fs::read_to_string(path);
    let read = read.map_err(|source| StoreError::Read { path: path.to_owned(), source })?;
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
