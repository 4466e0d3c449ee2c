//! Known state in the API server of what weft writes, so that nothing is sent that is there.

use std::collections::BTreeMap;

use fabric_objects::{Kind, Object, ObjectRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::content::{content, is_held, local, status};
use super::intake::Stored;

#[derive(Debug, Default)]
pub(super) struct Cache {
    entries: BTreeMap<ObjectRef, Entry>,
}

#[derive(Debug)]
struct Entry {
    seen: Stored,
    /// Requested and resulting value, where the API server fills in more than was requested.
    content: Option<Written>,
    status: Option<Written>,
    /// The version that came of the last status that was written here.
    wrote: Option<u64>,
}

/// Requested value, and the value that resulted.
#[derive(Debug)]
struct Written {
    want: Value,
    got: Value,
}

/// Part of an object that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Content,
    Status,
    Local,
}

impl Cache {
    /// Takes in a report of an object. One that comes late is replaced by the newest known version, or
    /// its reader would undo what was written meanwhile; one that equals it, too, so that there is but one.
    pub(super) fn saw(&mut self, stored: &mut Stored) {
        // A key is never sent but when it is made.
        if stored.object.kind() == Kind::Secret || !is_written(stored.object.kind()) {
            return;
        }
        let reference = stored.object.reference();
        match self.entries.get_mut(&reference) {
            Some(entry) if entry.seen.version > stored.version => {
                if entry.seen.object.uid() == stored.object.uid() {
                    *stored = entry.seen.clone();
                }
            }
            Some(entry) if entry.seen.object.uid() == stored.object.uid() => {
                if entry.seen.object == stored.object {
                    stored.object = entry.seen.object.clone();
                }
                entry.seen = stored.clone();
            }
            Some(_) | None => {
                let entry = Entry::of(stored);
                self.entries.insert(reference, entry);
            }
        }
    }

    /// The object as it was written here, if a watch reports that very version.
    pub(super) fn written(&self, object: &ObjectRef, reported: &ObjectMeta) -> Option<Stored> {
        let seen = &self.entries.get(object)?.seen;
        let version: u64 = reported.resource_version.as_ref()?.parse().ok()?;
        let is_same = seen.version == version && reported.uid.as_deref() == Some(seen.object.uid());
        is_same.then(|| seen.clone())
    }

    /// The object is gone, or is no longer understood.
    pub(super) fn lost(&mut self, object: &ObjectRef) {
        self.entries.remove(object);
    }

    /// A part of an object was written, and the object is now this.
    pub(super) fn wrote(&mut self, stored: &mut Stored, part: Part, want: Value) {
        let written = stored.clone();
        self.saw(stored);
        let Some(entry) = self.entries.get_mut(&written.object.reference()) else { return };
        match part {
            Part::Content => {
                entry.content = (!is_held(&written, &want))
                    .then(|| Written { want, got: content(&written.object) });
            }
            Part::Status => {
                let got = status(&written.object);
                entry.status = (got != want).then_some(Written { want, got });
                entry.wrote = Some(written.version);
            }
            Part::Local => {}
        }
    }

    /// The object, if that is what it holds.
    pub(super) fn holding(&self, object: &ObjectRef, want: &Value) -> Option<Object> {
        let entry = self.entries.get(object)?;
        let written = entry.content.as_ref().filter(|written| written.want == *want);
        let stands = written.is_some_and(|written| written.got == content(&entry.seen.object));
        (stands || is_held(&entry.seen, want)).then(|| entry.seen.object.clone())
    }

    /// True if the status of the very object is this one.
    pub(super) fn has_status(&self, object: &Object, want: &Value) -> bool {
        let Some(entry) = self.the(object) else { return false };
        let have = status(&entry.seen.object);
        let written = entry.status.as_ref().filter(|written| written.want == *want);
        have == *want || written.is_some_and(|written| written.got == have)
    }

    pub(super) fn has_local(&self, object: &Object, want: &Value) -> bool {
        self.the(object).is_some_and(|entry| local(&entry.seen.object).as_ref() == Some(want))
    }

    /// The version of the very object, as it was last seen.
    pub(super) fn version(&self, object: &Object) -> Option<String> {
        let version = self.the(object)?.seen.version;
        (version > 0).then(|| version.to_string())
    }

    /// The same, if no other write of the object is known since its status was written here.
    pub(super) fn version_written(&self, object: &Object) -> Option<String> {
        let entry = self.the(object)?;
        entry.wrote.filter(|version| *version == entry.seen.version)?;
        self.version(object)
    }

    pub(super) fn uid(&self, object: &ObjectRef) -> Option<String> {
        Some(self.entries.get(object)?.seen.object.uid().to_owned())
    }

    fn the(&self, object: &Object) -> Option<&Entry> {
        let entry = self.entries.get(&object.reference());
        entry.filter(|entry| entry.seen.object.uid() == object.uid())
    }
}

impl Entry {
    fn of(stored: &Stored) -> Self {
        Self { seen: stored.clone(), content: None, status: None, wrote: None }
    }
}

/// True for kinds of which weft writes the object or its status.
fn is_written(kind: Kind) -> bool {
    is_ours(kind) || has_status(kind)
}

/// True for kinds that weft makes objects of.
pub(super) fn is_ours(kind: Kind) -> bool {
    match kind {
        Kind::Network
        | Kind::Ip
        | Kind::Secret
        | Kind::Connection
        | Kind::GatewayConfig
        | Kind::NodeConfig
        | Kind::FabricRecord
        | Kind::GatewayRecord => true,
        Kind::Namespace
        | Kind::ConfigMap
        | Kind::Node
        | Kind::Configuration
        | Kind::GatewayServer
        | Kind::GatewayClient
        | Kind::PublicKey => false,
    }
}

/// True for kinds whose status weft writes.
pub(super) fn has_status(kind: Kind) -> bool {
    match kind {
        Kind::Network
        | Kind::Ip
        | Kind::Configuration
        | Kind::Connection
        | Kind::GatewayServer
        | Kind::GatewayClient
        | Kind::GatewayConfig
        | Kind::NodeConfig => true,
        Kind::Namespace
        | Kind::ConfigMap
        | Kind::Secret
        | Kind::Node
        | Kind::PublicKey
        | Kind::FabricRecord
        | Kind::GatewayRecord => false,
    }
}

#[cfg(test)]
mod tests {
    use fabric_objects::decode;
    use serde_json::json;

    use super::*;

    fn stored(uid: &str, version: u64, cidr: &str) -> Stored {
        let network = json!({
            "apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
            "metadata": {"name": "n", "namespace": "t", "uid": uid}, "spec": {"cidr": cidr},
            "status": {"cidr": "10.9.0.0/16"},
        });
        let object = decode::object(Kind::Network, network).unwrap().0;
        Stored { object, version, owned: Default::default() }
    }

    #[test]
    fn late_watch_event_yields_newest_version() {
        let mut cache = Cache::default();
        let mut new = stored("u", 5, "10.2.0.0/16");
        let want = content(&new.object);
        cache.wrote(&mut new, Part::Content, want);
        let mut late = stored("u", 4, "10.1.0.0/16");
        cache.saw(&mut late);
        assert_eq!((late.version, &late.object), (5, &new.object));
        let mut namesake = stored("v", 4, "10.1.0.0/16");
        cache.saw(&mut namesake);
        assert_eq!(namesake.object.uid(), "v");
        let reference = new.object.reference();
        assert!(cache.holding(&reference, &content(&new.object)).is_some());
        cache.saw(&mut stored("u", 6, "10.1.0.0/16"));
        assert!(
            cache.holding(&reference, &content(&new.object)).is_none(),
            "another writer changed it"
        );
        cache.lost(&reference);
        assert_eq!(cache.uid(&reference), None);
    }

    #[test]
    fn only_the_version_written_is_known_without_decoding() {
        let mut cache = Cache::default();
        let mut written = stored("u", 5, "10.2.0.0/16");
        let want = content(&written.object);
        cache.wrote(&mut written, Part::Content, want);
        let reference = written.object.reference();
        let is_known = |uid: &str, version: &str| {
            let (uid, resource_version) = (Some(uid.to_owned()), Some(version.to_owned()));
            let reported = ObjectMeta { uid, resource_version, ..ObjectMeta::default() };
            cache.written(&reference, &reported).is_some()
        };
        assert_eq!(
            [is_known("u", "5"), is_known("u", "6"), is_known("v", "5")],
            [true, false, false]
        );
    }

    #[test]
    fn same_object_is_held_once() {
        let mut cache = Cache::default();
        let [mut first, mut second] = [5, 6].map(|version| stored("u", version, "10.2.0.0/16"));
        cache.saw(&mut first);
        cache.saw(&mut second);
        assert!(std::ptr::eq(first.object.metadata(), second.object.metadata()));
    }

    #[test]
    fn server_defaults_are_not_sent_again() {
        let mut cache = Cache::default();
        let mut got = stored("u", 5, "10.2.0.0/16");
        let mut want = content(&got.object);
        want["spec"]["preAllocated"] = json!(0);
        cache.wrote(&mut got, Part::Content, want.clone());
        assert!(cache.holding(&got.object.reference(), &want).is_some());
    }

    #[test]
    fn status_of_namesake_is_not_reused() {
        let mut cache = Cache::default();
        let mut first = stored("u1", 5, "10.2.0.0/16");
        cache.saw(&mut first);
        assert!(cache.has_status(&first.object, &status(&first.object)));
        assert!(!cache.has_status(&first.object, &json!({})));
        let second = stored("u2", 9, "10.2.0.0/16");
        assert!(!cache.has_status(&second.object, &status(&second.object)));
    }
}
