//! Puts each object together from its manifest or weft's own file, and its status file.

use std::collections::BTreeSet;

use fabric_objects::{Kind, Object, ObjectRef, Problem, Snapshot, decode};
use serde_json::Value;

use crate::error::DirectoryError;
use crate::folder::{Folder, Parse, Unreadable};
use crate::layout::Layout;
use crate::manifests::Manifests;
use crate::parse;

/// Selection of the objects that are read.
#[derive(Clone, Debug)]
pub(crate) struct Scope {
    pub(crate) kinds: Vec<Kind>,
    /// The only objects read of their kinds; at most one of a kind.
    only: Vec<ObjectRef>,
}

impl Scope {
    pub(crate) fn all(kinds: &[Kind]) -> Self {
        Self { kinds: kinds.to_vec(), only: Vec::new() }
    }

    pub(crate) fn follow(object: &ObjectRef, with: &[Kind]) -> Self {
        let mut scope = Self::all(with);
        scope.also(object);
        scope
    }

    /// Reads only this object of its kind from now on.
    fn also(&mut self, object: &ObjectRef) {
        self.only.retain(|only| only.kind != object.kind);
        self.only.push(object.clone());
        if !self.kinds.contains(&object.kind) {
            self.kinds.push(object.kind);
        }
    }

    pub(crate) fn has_manifests(&self) -> bool {
        self.kinds.iter().any(|kind| !Layout::is_published(*kind))
    }

    /// The objects that manifests may hold, if each is a single one.
    fn manifest_objects(&self) -> Option<Vec<&ObjectRef>> {
        let kinds = self.kinds.iter().filter(|kind| !Layout::is_published(**kind));
        kinds.map(|kind| self.only.iter().find(|only| only.kind == *kind)).collect()
    }

    /// The one file of weft's own of that kind that is to be read.
    pub(crate) fn file_of(&self, kind: Kind) -> Option<String> {
        self.only.iter().find(|only| only.kind == kind).map(Layout::file_name)
    }

    fn takes(&self, object: &ObjectRef) -> bool {
        let only = self.only.iter().find(|only| only.kind == object.kind);
        self.kinds.contains(&object.kind) && only.is_none_or(|only| only == object)
    }
}

/// Reads objects of some kinds, again and again, and each file once for each change.
#[derive(Debug)]
pub(crate) struct Reader {
    scope: Scope,
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
    /// Set while the file cannot be understood.
    error: Option<String>,
}

impl Reader {
    pub(crate) fn new(layout: &Layout, scope: Scope) -> Self {
        let (own, statuses) = (Vec::new(), Vec::new());
        let mut reader = Self { scope, manifests: None, own, statuses };
        for kind in reader.scope.kinds.clone() {
            reader.read_folders(layout, kind);
        }
        reader.read_manifests(layout);
        reader
    }

    /// Reads only this object of its kind from now on.
    pub(crate) fn also(&mut self, layout: &Layout, object: &ObjectRef) {
        self.scope.also(object);
        self.own.retain(|(kind, _)| *kind != object.kind);
        self.statuses.retain(|(kind, _)| *kind != object.kind);
        self.read_folders(layout, object.kind);
        // Files may have been skipped that hold this one.
        self.manifests = None;
        self.read_manifests(layout);
    }

    pub(crate) fn scope(&self) -> &Scope {
        &self.scope
    }

    fn read_folders(&mut self, layout: &Layout, kind: Kind) {
        let only = self.scope.file_of(kind);
        let own = layout.objects(kind).map(|path| (kind, Folder::new(path, only.clone())));
        let statuses = layout.statuses(kind).map(|path| (kind, Folder::new(path, only)));
        self.own.extend(own);
        self.statuses.extend(statuses);
    }

    fn read_manifests(&mut self, layout: &Layout) {
        let dir = layout.manifests.as_ref().filter(|_| self.scope.has_manifests());
        if let (None, Some(dir)) = (&self.manifests, dir) {
            let only = self.scope.manifest_objects().unwrap_or_default();
            let only = only.into_iter().cloned().collect();
            self.manifests = Some(Manifests::new(dir.clone(), layout.last_good(), only));
        }
    }

    /// The user's files that hold all of the scope, if that is known: no other one matters then.
    pub(crate) fn manifests_in_use(&self) -> Option<BTreeSet<String>> {
        let manifests = self.manifests.as_ref()?;
        let mut files = BTreeSet::new();
        for object in self.scope.manifest_objects()? {
            let holding = manifests.files_of(object)?;
            if holding.is_empty() && !self.is_own(object) {
                return None;
            }
            files.extend(holding);
        }
        Some(files)
    }

    /// Returns true if a file of weft's own holds the object.
    fn is_own(&self, object: &ObjectRef) -> bool {
        let files = self.own.iter().flat_map(|(_, folder)| folder.files());
        let mut objects = files.filter_map(|(_, own)| own.object.as_ref());
        objects.any(|own| own.reference() == *object)
    }

    /// Returns the present content. A folder of weft's own that cannot be read counts as unchanged,
    /// and is returned as the error.
    pub(crate) fn read(&mut self) -> (Snapshot, Option<DirectoryError>) {
        let mut snapshot = Snapshot::default();
        let own = self.own.iter_mut().map(|(_, folder)| refresh(folder));
        let statuses = self.statuses.iter_mut().map(|(_, folder)| refresh(folder));
        let error = own.chain(statuses).filter_map(Result::err).last();
        self.read_own(&mut snapshot);
        if let Some(manifests) = &mut self.manifests {
            manifests.refresh();
            manifests.collect(&mut snapshot.objects, &mut snapshot.problems);
        }
        snapshot.objects.retain(|reference, _| self.scope.takes(reference));
        self.read_statuses(&mut snapshot);
        snapshot.problems.sort();
        (snapshot, error)
    }

    pub(crate) fn locate(&self, object: &ObjectRef, field: &str) -> Option<String> {
        self.manifests.as_ref()?.locate(object, field)
    }

    /// Remembers the last good version of each manifest from now on.
    pub(crate) fn remember(&mut self) {
        self.manifests.iter_mut().for_each(Manifests::remember);
    }

    /// True if something was edited a moment ago and must be looked at again.
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
                // Others are written again and again.
                let holds_grant = matches!(kind, Kind::Network | Kind::Ip);
                if let Some(error) = own.error.as_ref().filter(|_| holds_grant) {
                    snapshot.problems.push(Problem {
                        source: folder.path().join(file).display().to_string(),
                        object: Some(reference.clone()),
                        field: Some("status".to_owned()),
                        message: error.clone(),
                    });
                }
                let Some(value) = &own.value else { continue };
                // Another uid: left behind by a namesake.
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
fn refresh<T: Parse>(folder: &mut Folder<T>) -> Result<(), DirectoryError> {
    match folder.refresh() {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(DirectoryError::Read { path: folder.path().to_owned(), source })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

impl Parse for OwnFile {
    fn is_empty(&self) -> bool {
        self.object.is_none() && self.problem.is_none()
    }

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
    fn is_empty(&self) -> bool {
        self.value.is_none() && self.error.is_none()
    }

    fn update(&mut self, file: &str, text: Result<String, Unreadable>, _in_place: bool) {
        match value(text) {
            Ok(value) => *self = Self { value: Some(value), error: None },
            Err(error) => {
                tracing::warn!(file, error, "a status file is unreadable");
                self.error = Some(error);
            }
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
