use std::collections::{BTreeMap, BTreeSet};

use fabric_objects::{Event, Object, ObjectRef};

use crate::kubernetes;

/// A running watch. Dropping it ends it.
#[derive(Debug)]
pub struct Watch {
    inner: Inner,
}

#[derive(Debug)]
pub(crate) enum Inner {
    Directory(Box<fabric_directory::Watch>),
    Kubernetes(Box<kubernetes::Watch>),
}

impl Watch {
    /// The next event. Cancel safe: an event is either returned or still to come.
    pub async fn next(&mut self) -> Event {
        match &mut self.inner {
            Inner::Directory(watch) => watch.next().await,
            Inner::Kubernetes(watch) => watch.next().await,
        }
    }

    /// Reports this one object, too, from now on, and no other of its kind. If it is there, it is
    /// the next event; if it is not, there is none.
    pub fn also(&mut self, object: &ObjectRef) {
        match &mut self.inner {
            Inner::Directory(watch) => watch.also(object),
            Inner::Kubernetes(watch) => watch.also(object),
        }
    }

    /// Reports these, too, from now on, and no others that were named so before. For objects that
    /// the watch would leave out: in Kubernetes, Secrets without the label of gateways. True if
    /// there are new ones: a caller that cannot wait for their events may get them.
    pub fn name(&mut self, objects: &BTreeSet<ObjectRef>) -> bool {
        match &mut self.inner {
            Inner::Directory(_) => false,
            Inner::Kubernetes(watch) => watch.name(objects),
        }
    }

    /// Remembers the last good version of each manifest in the state directory from now on, so that
    /// a program that starts while a manifest is bad still finds it. For the one program that owns
    /// those files. In Kubernetes there is nothing to remember.
    #[must_use]
    pub fn remembering(mut self) -> Self {
        if let Inner::Directory(watch) = &mut self.inner {
            watch.remember();
        }
        self
    }

    /// All objects as of its last look, those not reported yet included.
    pub fn seen(&self) -> &BTreeMap<ObjectRef, Object> {
        match &self.inner {
            Inner::Directory(watch) => watch.seen(),
            Inner::Kubernetes(watch) => watch.seen(),
        }
    }

    /// Returns the position of an object's manifest, or of a field of it: `file:line`.
    pub fn locate(&self, object: &ObjectRef, field: &str) -> Option<String> {
        match &self.inner {
            Inner::Directory(watch) => watch.locate(object, field),
            Inner::Kubernetes(_) => None,
        }
    }
}

impl From<Inner> for Watch {
    fn from(inner: Inner) -> Self {
        Self { inner }
    }
}
