//! Puts each object together from its manifest or weft's own file, and its status file.

use serde_json::Value;

use crate::folder::{Folder, Parse, Unreadable};
use crate::layout::Layout;
use crate::manifests::Manifests;
use crate::{Kind, Object, ObjectRef, Problem, Snapshot, StoreError, decode, parse};

/// Which objects are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scope<'a> {
    pub(crate) kinds: &'a [Kind],
    /// Of its kind, only this one; the kind is one that the user has no manifests of.
    pub(crate) only: Option<&'a ObjectRef>,
}

impl<'a> Scope<'a> {
    pub(crate) fn all(kinds: &'a [Kind]) -> Self {
        Self { kinds, only: None }
    }

    pub(crate) fn has_manifests(&self) -> bool {
        self.kinds.iter().any(|kind| !Layout::is_published(*kind))
    }

    /// The one file of that kind that is to be read.
    pub(crate) fn file_of(&self, kind: Kind) -> Option<String> {
        self.only.filter(|only| only.kind == kind).map(Layout::file_name)
    }
}

/// Reads objects of some kinds, again and again, and each file once for each change.
#[derive(Debug)]
pub(crate) struct Reader {
    kinds: Vec<Kind>,
    manifests: Option<Manifests>,
    own: Vec<(Kind, Folder<OwnFile>)>,
    statuses: Vec<(Kind, Folder<StatusFile>)>,
}

/// An object that weft wrote. What has become unreadable keeps its last good version.
#[derive(Debug, Default)]
struct OwnFile {
    object: Option<Object>,
    problem: Option<Problem>,
}

/// A status that weft wrote, with the uid of the object it is of.
#[derive(Debug, Default)]
struct StatusFile {
    value: Option<Value>,
}

impl Reader {
    pub(crate) fn new(layout: &Layout, scope: &Scope<'_>) -> Self {
        let manifests = layout.manifests.clone().filter(|_| scope.has_manifests());
        let manifests = manifests.map(|dir| Manifests::new(dir, layout.last_good()));
        let kinds = || scope.kinds.iter().copied();
        let own = kinds().filter_map(|kind| {
            Some((kind, Folder::new(layout.objects(kind)?, scope.file_of(kind))))
        });
        let statuses = kinds().filter_map(|kind| {
            Some((kind, Folder::new(layout.statuses(kind)?, scope.file_of(kind))))
        });
        let (own, statuses) = (own.collect(), statuses.collect());
        Self { kinds: scope.kinds.to_vec(), manifests, own, statuses }
    }

    /// What is there now. A folder of weft's own that cannot be read counts as unchanged, and is
    /// told as the error.
    pub(crate) fn read(&mut self) -> (Snapshot, Option<StoreError>) {
        let mut snapshot = Snapshot::default();
        let own = self.own.iter_mut().map(|(_, folder)| refresh(folder));
        let statuses = self.statuses.iter_mut().map(|(_, folder)| refresh(folder));
        let error = own.chain(statuses).filter_map(Result::err).last();
        self.read_own(&mut snapshot);
        if let Some(manifests) = &mut self.manifests {
            manifests.refresh();
            manifests.collect(&mut snapshot.objects, &mut snapshot.problems);
        }
        snapshot.objects.retain(|reference, _| self.kinds.contains(&reference.kind));
        self.read_statuses(&mut snapshot);
        snapshot.problems.sort();
        (snapshot, error)
    }

    pub(crate) fn locate(&self, object: &ObjectRef, field: &str) -> Option<String> {
        self.manifests.as_ref()?.locate(object, field)
    }

    /// From now on, remembers the last good version of each manifest.
    pub(crate) fn remember(&mut self) {
        self.manifests.iter_mut().for_each(Manifests::remember);
    }

    /// Whether something was edited a moment ago and must be looked at again.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.manifests.as_ref().is_some_and(Manifests::is_unsettled)
    }

    fn read_own(&self, snapshot: &mut Snapshot) {
        for (kind, folder) in &self.own {
            for (file, own) in folder.files() {
                let object = Layout::reference(*kind, file);
                let problem = own.problem.clone();
                snapshot.problems.extend(problem.map(|problem| Problem { object, ..problem }));
                if let Some(object) = &own.object {
                    snapshot.objects.insert(object.reference(), object.clone());
                }
            }
        }
    }

    fn read_statuses(&self, snapshot: &mut Snapshot) {
        for (kind, folder) in &self.statuses {
            for (file, own) in folder.files() {
                let Some(reference) = Layout::reference(*kind, file) else { continue };
                let Some(object) = snapshot.objects.get_mut(&reference) else { continue };
                let Some(value) = &own.value else { continue };
                // Of another uid: left behind by a namesake.
                if value.get("uid").and_then(Value::as_str) != Some(object.uid()) {
                    continue;
                }
                let part = |key: &str| value.get(key).cloned();
                let set = decode::set_status(object, part("status").unwrap_or_default());
                let local = part(decode::LOCAL).map(|local| decode::set_local(object, local));
                if let Err(error) = set.and_then(|()| local.unwrap_or(Ok(()))) {
                    tracing::warn!(object = %reference, %error, "a status file is unreadable");
                }
            }
        }
    }

    /// Status files whose object is gone.
    pub(crate) fn orphans(&self, snapshot: &Snapshot) -> Vec<ObjectRef> {
        let references = self.statuses.iter().flat_map(|(kind, folder)| {
            folder.files().filter_map(|(file, _)| Layout::reference(*kind, file))
        });
        references.filter(|r| !snapshot.objects.contains_key(r)).collect()
    }
}

/// Weft's own folders come to be when the first file does.
fn refresh<T: Parse>(folder: &mut Folder<T>) -> Result<(), StoreError> {
    match folder.refresh() {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(StoreError::Read { path: folder.path().to_owned(), source })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

impl Parse for OwnFile {
    fn update(&mut self, file: &str, text: Result<String, Unreadable>, _in_place: bool) {
        match value(text).and_then(own_object) {
            Ok(object) => *self = Self { object: Some(object), problem: None },
            Err(message) => {
                let source = file.to_owned();
                self.problem = Some(Problem { source, object: None, field: None, message });
            }
        }
    }
}

impl Parse for StatusFile {
    fn update(&mut self, file: &str, text: Result<String, Unreadable>, _in_place: bool) {
        match value(text) {
            Ok(value) => self.value = Some(value),
            Err(error) => tracing::warn!(file, error, "a status file is unreadable"),
        }
    }
}

fn value(text: Result<String, Unreadable>) -> Result<Value, String> {
    let text = text.map_err(|error| error.to_string())?;
    parse::value(&text).map_err(|error| format!("not as weft wrote it: {error}"))
}

fn own_object(value: Value) -> Result<Object, String> {
    let text = |key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default();
    let kind = Kind::from_type(text("apiVersion"), text("kind"));
    let kind = kind.ok_or("not as weft wrote it: of another kind")?;
    match decode::object(kind, value) {
        Ok((object, _)) => Ok(object),
        Err(error) => Err(format!("not as weft wrote it: {}: {}", error.path, error.message)),
    }
}
