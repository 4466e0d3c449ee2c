//! Key pairs of gateways, and the public keys of their peers.

use std::collections::BTreeMap;

use fabric_api::networking::{PublicKeyObject, secret_name};
use fabric_api::{ClusterId, PublicKey};
use fabric_index::{Index, owner};
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use crate::gateway::Gateway;
use crate::peering::peer_of;
use crate::problems::Problems;

/// A key pair that is to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyPair {
    pub peer: String,
    /// Owner in Kubernetes, deleted together with it.
    pub owner: Option<OwnerReference>,
}

/// Secrets that no user named and that do not exist yet.
pub(crate) fn missing(index: &Index, gateways: &[Gateway<'_>]) -> BTreeMap<ObjectRef, KeyPair> {
    let own = gateways.iter().filter(|gateway| secret_name(gateway.secret_ref()).is_none());
    let missing = own.filter_map(|gateway| {
        let secret = gateway.key_pair();
        // One that runs has a key, whose public half the peer has: perhaps it just cannot be read
        // now.
        let unread = gateway.published(index).is_some() && index.may_be_unread(&secret);
        if unread || index.get(&secret).is_some() {
            return None;
        }
        let owners = owner::references(index, &gateway.reference, Some(gateway.namespace()));
        let owner = owners.and_then(|owners| owners.into_iter().next());
        Some((secret, KeyPair { peer: gateway.peer.to_string(), owner }))
    });
    missing.collect()
}

/// This gateway's own public key, to compare only. Problems with the Secret are reported; its
/// gateway waits for a good one by itself.
pub(crate) fn own(
    index: &Index,
    gateway: &Gateway<'_>,
    is_made: bool,
    problems: &mut Problems,
) -> Option<PublicKey> {
    let secret = gateway.key_pair();
    let Some(public) = index.own_key(&secret) else {
        if !is_made {
            let message = format!("waits for {secret}");
            problems.add(&gateway.reference, "spec.secretRef.name", message);
        }
        return None;
    };
    problems.accepted(&secret, public)
}

/// Public keys of peers.
#[derive(Default)]
pub(crate) struct Keys {
    /// Keys by namespace and peer; none if there is a wrong one, or two.
    of: BTreeMap<(String, ClusterId), (ObjectRef, Option<PublicKey>)>,
    /// A PublicKey without a label for its peer, by namespace.
    unlabelled: BTreeMap<String, ObjectRef>,
}

impl Keys {
    pub(crate) fn read(index: &Index, own: Option<&ClusterId>, problems: &mut Problems) -> Self {
        let mut keys = Self::default();
        for (reference, object) in index.all::<PublicKeyObject>(Kind::PublicKey) {
            let namespace = reference.namespace.clone().unwrap_or_default();
            let Ok(peer) = peer_of(reference, &object.metadata, own, problems) else {
                keys.unlabelled.insert(namespace, reference.clone());
                continue;
            };
            let key = PublicKey::from_base64(&object.spec.public_key);
            let key = key.map_err(|error| {
                problems.add(reference, "spec.publicKey", error.to_string());
            });
            let mut key = key.ok();
            if let Some((first, Some(known))) = keys.of.get(&(namespace.clone(), peer.clone()))
                && key.is_some_and(|key| key != *known)
            {
                let message = format!("{first} has another key of {peer}; expected one");
                problems.add(reference, "spec.publicKey", message);
                key = None;
            }
            keys.of.insert((namespace, peer), (reference.clone(), key));
        }
        keys
    }

    fn theirs(&self, gateway: &Gateway<'_>) -> Option<&(ObjectRef, Option<PublicKey>)> {
        self.of.get(&(gateway.namespace().to_owned(), gateway.peer.clone()))
    }

    /// Objects with the keys that a gateway requires.
    pub(crate) fn needed(&self, gateway: &Gateway<'_>, secret: &ObjectRef) -> Vec<ObjectRef> {
        let unlabelled = self.unlabelled.get(gateway.namespace());
        let public = self.theirs(gateway).map(|(reference, _)| reference).or(unlabelled);
        [Some(secret), public].into_iter().flatten().cloned().collect()
    }

    /// The peer's key: `None` if it is unfit, `Some(None)` if it is not there yet.
    pub(crate) fn of_peer(
        &self,
        index: &Index,
        gateway: &Gateway<'_>,
        own: Option<PublicKey>,
        problems: &mut Problems,
    ) -> Option<Option<PublicKey>> {
        let unlabelled = self.unlabelled.contains_key(gateway.namespace());
        match self.theirs(gateway) {
            Some((reference, Some(key))) if own == Some(*key) => {
                let message = "this is this cluster's own public key; expected the peer's";
                problems.add(reference, "spec.publicKey", message);
                None
            }
            Some((_, key)) => key.map(Some),
            // One that has lost its label, or cannot be read, may be the one in use.
            None if (unlabelled || !index.is_whole())
                && gateway.published(index).is_some_and(|c| c.spec.peer_public_key.is_some()) =>
            {
                None
            }
            None => {
                let message = format!("waits for a PublicKey of {} in its namespace", gateway.peer);
                problems.add(&gateway.reference, "", message);
                Some(None)
            }
        }
    }
}
