use std::path::{Path, PathBuf};

use fabric_directory::{ChangeServer, Directory, Places};
use fabric_kube_client::{ApiServer, StoreMetrics};
use fabric_objects::{Kind, Object, ObjectRef, Problem, Snapshot};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::args::StoreArgs;
use crate::error::StoreError;
use crate::kubernetes::{Kubernetes, YieldsTo};
use crate::watch::{self, Watch};
use crate::write_count::count;

/// The resources of a cluster. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    backend: Backend,
    metrics: StoreMetrics,
}

#[derive(Clone, Debug)]
enum Backend {
    Directory(Directory),
    Kubernetes(Kubernetes),
}

/// Data kept for a program's next start, by a name that suits a file and an object of
/// Kubernetes. One program writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note<'a> {
    /// Data known nowhere else.
    Only(&'a str),
    /// A copy of what the store holds, for when that turns bad. In Kubernetes there is none: what
    /// is bad does not get in.
    Copy(&'a str),
}

impl Store {
    /// The store of a program that was started with these arguments: the API server, or all
    /// directories of this host; makes those of weft's own. For the API server it must be called
    /// within a tokio runtime; nothing is sent yet.
    pub fn open(args: &StoreArgs) -> Result<Self, StoreError> {
        if args.kubernetes || args.kubeconfig.is_some() {
            let namespace = args.liqo_namespace.clone();
            return Self::kubernetes_of(args.kubeconfig.as_deref(), None, namespace);
        }
        let places = Places {
            manifests: args.manifests.clone(),
            run_dir: args.run_dir.clone().ok_or(StoreError::NoPlace)?,
            state_dir: args.state_dir.clone(),
        };
        Ok(Backend::Directory(Directory::open(places)?).into())
    }

    /// The API server that a kubeconfig names: this one, or that of `KUBECONFIG`, or of the pod's
    /// service account, or of the user. Must be called within a tokio runtime; nothing is sent yet.
    pub fn kubernetes(kubeconfig: Option<&Path>) -> Result<Self, StoreError> {
        Self::kubernetes_of(kubeconfig, None, None)
    }

    /// The same, of a context of the kubeconfig that is not its current one.
    pub fn kubernetes_context(
        kubeconfig: Option<&Path>,
        context: Option<&str>,
    ) -> Result<Self, StoreError> {
        Self::kubernetes_of(kubeconfig, context, None)
    }

    /// The same of an installation in another namespace than that of the pod, or liqo.
    fn kubernetes_of(
        kubeconfig: Option<&Path>,
        context: Option<&str>,
        namespace: Option<String>,
    ) -> Result<Self, StoreError> {
        Ok(Backend::Kubernetes(Kubernetes::open(kubeconfig, context, namespace)?).into())
    }

    /// The API server, for what is in Kubernetes and no resource of a store; none if that is a
    /// directory.
    pub fn api_server(&self) -> Option<ApiServer> {
        match &self.backend {
            Backend::Directory(_) => None,
            Backend::Kubernetes(store) => Some(store.api_server()),
        }
    }

    /// Counters of this store and its clones.
    pub fn metrics(&self) -> &StoreMetrics {
        &self.metrics
    }

    /// Counts with the counters of an earlier store of the same program.
    #[must_use]
    pub fn counting(mut self, metrics: StoreMetrics) -> Self {
        if let Backend::Kubernetes(store) = &mut self.backend {
            store.set_metrics(metrics.clone());
        }
        self.metrics = metrics;
        self
    }

    /// The store of a further host, which has only the published directory. It may be read-only;
    /// then statuses cannot be written.
    pub fn open_published(dir: &Path) -> Result<Self, StoreError> {
        Ok(Backend::Directory(Directory::open_published(dir)?).into())
    }

    /// Opens only the user's manifests, for a caller without their cluster's ID yet. Makes
    /// nothing, and has no object or status of weft's own.
    pub fn open_manifests(dir: &Path) -> Self {
        Backend::Directory(Directory::open_manifests(dir)).into()
    }

    /// Notifies the watches of all programs of this run directory of changes, so that one inotify
    /// instance serves them all. For its one supervisor. Must be called within a tokio runtime.
    pub fn serve_changes(&self) -> Result<ChangeServer, StoreError> {
        match &self.backend {
            Backend::Directory(store) => Ok(store.serve_changes()?),
            Backend::Kubernetes(_) => Err(StoreError::NoPlace),
        }
    }

    /// Copies the files of granted prefixes and addresses that lack a copy. For a program that starts
    /// while no other one writes them.
    pub fn copy_grants(&self) -> Result<(), StoreError> {
        match &self.backend {
            Backend::Directory(store) => Ok(store.copy_grants()?),
            Backend::Kubernetes(_) => Ok(()),
        }
    }

    /// Files of granted prefixes and addresses that are damaged and have no copy.
    pub fn lost_grants(&self) -> Vec<PathBuf> {
        match &self.backend {
            Backend::Directory(store) => store.lost_grants(),
            Backend::Kubernetes(_) => Vec::new(),
        }
    }

    /// Restores files of granted prefixes and addresses that are damaged or gone, and returns those.
    pub fn restore_grants(&self) -> Result<Vec<PathBuf>, StoreError> {
        match &self.backend {
            Backend::Directory(store) => Ok(store.restore_grants()?),
            Backend::Kubernetes(_) => Ok(Vec::new()),
        }
    }

    /// Reports all that is there of these kinds, its problems, then [`fabric_objects::Event::Synced`], then
    /// every change. Must be called within a tokio runtime.
    ///
    /// In Kubernetes, ConfigMaps are the one with the cluster's ID only, and Secrets those that have
    /// the label of gateways; see [`Watch::name`].
    pub fn watch(&self, kinds: &[Kind]) -> Result<Watch, StoreError> {
        Ok(match &self.backend {
            Backend::Directory(store) => watch::Inner::Directory(Box::new(store.watch(kinds))),
            Backend::Kubernetes(store) => watch::Inner::Kubernetes(Box::new(store.watch(kinds))),
        }
        .into())
    }

    /// Like [`Self::watch`], for one object that weft publishes, and for all of other kinds. That
    /// one's status is reported as it was when the rest of it last changed: this is for its writer.
    /// Changes of other objects of its kind, however many, cost nothing. In Kubernetes, where a
    /// Connection may have two gateways for a while, its status is reported as well. See
    /// [`Watch::also`].
    pub fn follow(&self, object: &ObjectRef, with: &[Kind]) -> Result<Watch, StoreError> {
        Ok(match &self.backend {
            Backend::Directory(store) => {
                watch::Inner::Directory(Box::new(store.follow(object, with)))
            }
            Backend::Kubernetes(store) => {
                watch::Inner::Kubernetes(Box::new(store.follow(object, with)))
            }
        }
        .into())
    }

    /// Path of the file that weft publishes an object in; none in Kubernetes.
    pub fn file_of(&self, object: &ObjectRef) -> Option<PathBuf> {
        match &self.backend {
            Backend::Directory(store) => store.file_of(object),
            Backend::Kubernetes(_) => None,
        }
    }

    /// Reads all objects of these kinds, and their problems.
    pub async fn read(&self, kinds: &[Kind]) -> Result<Snapshot, StoreError> {
        match &self.backend {
            Backend::Directory(store) => Ok(store.read(kinds)?),
            Backend::Kubernetes(store) => store.read(kinds).await,
        }
    }

    /// Returns why objects of these kinds cannot be read, if so; cheap however many there are.
    /// Directories can always be read.
    pub async fn check(&self, kinds: &[Kind]) -> Vec<Problem> {
        match &self.backend {
            Backend::Directory(_) => Vec::new(),
            Backend::Kubernetes(store) => store.check(kinds).await,
        }
    }

    pub async fn get(&self, object: &ObjectRef) -> Result<Option<Object>, StoreError> {
        match &self.backend {
            Backend::Directory(store) => Ok(store.get(object)?),
            Backend::Kubernetes(store) => store.get(object).await,
        }
    }

    pub async fn list(&self, kind: Kind) -> Result<Vec<Object>, StoreError> {
        Ok(self.read(&[kind]).await?.objects.into_values().collect())
    }

    /// Creates an object of weft's own (Network, IP, Secret, GatewayConfig, NodeConfig, FabricRecord,
    /// GatewayRecord, Connection), or replaces its metadata and spec. Writes nothing if nothing changed. Gives back the object
    /// as stored, with its uid, and its generation, which is higher after each change of the spec.
    pub async fn put(&self, object: &Object) -> Result<Object, StoreError> {
        let put = match &self.backend {
            Backend::Directory(store) => Ok(store.put(object)?),
            Backend::Kubernetes(store) => store.put(object).await,
        };
        count(&self.metrics, object.kind(), &put, |_| true);
        put
    }

    /// Replaces the status of an object read from the store, and of a Configuration `spec.local`.
    /// Writes nothing if nothing changed. True if it was written.
    pub async fn put_status(&self, object: &Object) -> Result<bool, StoreError> {
        self.put_status_yielding(object, None).await
    }

    /// The same, but not over a version by another writer for which `yields_to` returns true:
    /// [`StoreError::Overtaken`]. In a directory that is not checked.
    pub async fn put_status_unless(
        &self,
        object: &Object,
        yields_to: impl Fn(&Object) -> bool + Sync,
    ) -> Result<bool, StoreError> {
        self.put_status_yielding(object, Some(&yields_to)).await
    }

    async fn put_status_yielding(
        &self,
        object: &Object,
        yields_to: Option<YieldsTo<'_>>,
    ) -> Result<bool, StoreError> {
        let put = match &self.backend {
            Backend::Directory(store) => Ok(store.put_status(object)?),
            Backend::Kubernetes(store) => store.put_status(object, yields_to).await,
        };
        count(&self.metrics, object.kind(), &put, |written| *written);
        put
    }

    /// Same as [`Self::put_status`], unless another program has written the object since this one
    /// last wrote its status: the later write takes precedence. In a directory that is not checked.
    pub async fn put_status_if_last(&self, object: &Object) -> Result<bool, StoreError> {
        let put = match &self.backend {
            Backend::Directory(store) => Ok(store.put_status(object)?),
            Backend::Kubernetes(store) => store.put_status_if_last(object).await,
        };
        count(&self.metrics, object.kind(), &put, |written| *written);
        put
    }

    /// Removes an object of weft's own with its status. Not being there is no error.
    pub async fn delete(&self, object: &ObjectRef) -> Result<(), StoreError> {
        let deleted = match &self.backend {
            Backend::Directory(store) => Ok(store.delete(object)?),
            Backend::Kubernetes(store) => store.delete(object).await,
        };
        count(&self.metrics, object.kind, &deleted, |()| true);
        deleted
    }

    /// Removes what the store keeps of an object that was removed by others: its status. In
    /// Kubernetes, that went with it.
    pub async fn forget(&self, gone: &ObjectRef) -> Result<(), StoreError> {
        match &self.backend {
            Backend::Directory(store) => Ok(store.delete(gone)?),
            Backend::Kubernetes(_) => Ok(()),
        }
    }

    /// Objects that are gone and have left a status behind, because no program ran to see it.
    pub async fn orphaned_statuses(&self) -> Result<Vec<ObjectRef>, StoreError> {
        match &self.backend {
            Backend::Directory(store) => Ok(store.orphaned_statuses()?),
            Backend::Kubernetes(_) => Ok(Vec::new()),
        }
    }

    /// Publishes all problems that the controller found. In Kubernetes the objects' conditions
    /// report them; there they are known only to [`Self::problems`] of the same program.
    pub async fn put_problems(&self, problems: &[Problem]) -> Result<bool, StoreError> {
        match &self.backend {
            Backend::Directory(store) => Ok(store.put_problems(problems)?),
            Backend::Kubernetes(store) => Ok(store.put_problems(problems)),
        }
    }

    /// Returns the problems that the controller last found; empty before it ever ran.
    pub async fn problems(&self) -> Vec<Problem> {
        match &self.backend {
            Backend::Directory(store) => store.problems(),
            Backend::Kubernetes(store) => store.problems(),
        }
    }

    /// Writes a note. In Kubernetes that fails with [`StoreError::NoteChanged`] if another program has
    /// written it since this one read or wrote it.
    pub async fn put_note(&self, name: Note<'_>, note: &impl Serialize) -> Result<(), StoreError> {
        match (&self.backend, name) {
            (Backend::Directory(store), Note::Only(name) | Note::Copy(name)) => {
                Ok(store.put_note(name, note).map(drop)?)
            }
            (Backend::Kubernetes(store), Note::Only(name)) => store.put_note(name, note).await,
            (Backend::Kubernetes(_), Note::Copy(_)) => Ok(()),
        }
    }

    /// Returns whether no other program has written a note since this one read or wrote it. In directories
    /// there is one writer.
    pub async fn is_note_current(&self, name: Note<'_>) -> Result<bool, StoreError> {
        match (&self.backend, name) {
            (Backend::Kubernetes(store), Note::Only(name)) => store.is_note_current(name).await,
            (Backend::Directory(_), _) | (Backend::Kubernetes(_), Note::Copy(_)) => Ok(true),
        }
    }

    /// Returns the note kept under that name; `None` if there is none, or none that can be decoded.
    pub async fn note<T: DeserializeOwned>(&self, name: Note<'_>) -> Result<Option<T>, StoreError> {
        match (&self.backend, name) {
            (Backend::Directory(store), Note::Only(name) | Note::Copy(name)) => {
                Ok(store.note(name))
            }
            (Backend::Kubernetes(store), Note::Only(name)) => store.note(name).await,
            (Backend::Kubernetes(_), Note::Copy(_)) => Ok(None),
        }
    }

    /// Deletes a note; an absent one is no error.
    pub async fn delete_note(&self, name: Note<'_>) -> Result<(), StoreError> {
        match (&self.backend, name) {
            (Backend::Directory(store), Note::Only(name) | Note::Copy(name)) => {
                Ok(store.delete_note(name)?)
            }
            (Backend::Kubernetes(store), Note::Only(name)) => store.delete_note(name).await,
            (Backend::Kubernetes(_), Note::Copy(_)) => Ok(()),
        }
    }
}

impl From<Backend> for Store {
    fn from(backend: Backend) -> Self {
        let metrics = match &backend {
            Backend::Directory(_) => StoreMetrics::default(),
            Backend::Kubernetes(store) => store.metrics().clone(),
        };
        Self { backend, metrics }
    }
}
