//! Configurations: which peers there are and how this cluster sees their prefixes.

use std::collections::BTreeMap;

use fabric_api::fabric::RemapKind;
use fabric_api::networking::Configuration;
use fabric_api::{Cidr, ClusterId, check, labels};
use fabric_index::{Index, owner};
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::names;
use crate::problems::Problems;

/// A Configuration that was read.
#[derive(Debug)]
pub struct Peering<'a> {
    pub reference: ObjectRef,
    pub configuration: &'a Configuration,
    /// The peer, if that much is right.
    pub id: Option<ClusterId>,
    /// The peer's prefixes in the order written, pods first; empty if any of it is wrong.
    pub remotes: Vec<Remote>,
    /// Fault of the Configuration.
    pub fault: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Remote {
    pub kind: RemapKind,
    pub cidr: Cidr,
    /// The Network that requests its counterpart here.
    pub network: ObjectRef,
    pub granted: Option<Cidr>,
    /// The Network has the label, and a prefix, of the peer that the Configuration had before.
    pub is_of_other: bool,
}

impl Peering<'_> {
    pub fn is_with(&self, peer: &ClusterId) -> bool {
        self.fault.is_none() && self.id.as_ref() == Some(peer)
    }

    /// All prefixes have their counterparts.
    pub fn is_ready(&self) -> bool {
        self.fault.is_none() && self.remotes.iter().all(|remote| remote.granted.is_some())
    }

    /// The peer's prefixes as this cluster sees them.
    pub fn prefixes(&self) -> impl Iterator<Item = Cidr> {
        self.remotes.iter().filter_map(|remote| remote.granted)
    }

    /// Prefixes in the order of a NodeConfig.
    pub fn sorted_prefixes(&self) -> Vec<String> {
        let mut prefixes: Vec<Cidr> = self.prefixes().collect();
        prefixes.sort();
        prefixes.iter().map(Cidr::to_string).collect()
    }

    /// The peer's ID; empty if it is not right.
    pub fn peer(&self) -> String {
        self.id.as_ref().map(ToString::to_string).unwrap_or_default()
    }

    pub fn namespace(&self) -> &str {
        self.reference.namespace.as_deref().unwrap_or_default()
    }
}

/// Reads all Configurations; `own` is the cluster itself, which none may be about.
pub fn read<'a>(
    index: &'a Index,
    own: Option<&ClusterId>,
    problems: &mut Problems,
) -> Vec<Peering<'a>> {
    let all = index.all::<Configuration>(Kind::Configuration);
    let all = all.filter(|(_, of)| of.metadata.deletion_timestamp.is_none());
    let mut peerings: Vec<_> = all.map(|of| peering(index, of, own, problems)).collect();
    one_configuration_for_a_peer(index, &mut peerings, problems);
    peerings
}

fn peering<'a>(
    index: &Index,
    (reference, configuration): (&ObjectRef, &'a Configuration),
    own: Option<&ClusterId>,
    problems: &mut Problems,
) -> Peering<'a> {
    let (id, remotes, fault) = match peer_of(reference, &configuration.metadata, own, problems) {
        // Everything made for the peer that it was about stays.
        Err(fault) => (former_peer(index, reference), Vec::new(), Some(fault)),
        Ok(id) => match check::remotes(configuration) {
            Ok(prefixes) => {
                let remotes = prefixes.into_iter().map(|of| remote(index, (reference, &id), of));
                let remotes = remotes.collect();
                (Some(id), remotes, None)
            }
            Err(faults) => {
                faults.iter().for_each(|fault| problems.fault(reference, fault));
                let texts: Vec<_> = faults.iter().map(ToString::to_string).collect();
                (Some(id), Vec::new(), Some(texts.join("; ")))
            }
        },
    };
    Peering { reference: reference.clone(), configuration, id, remotes, fault }
}

/// The peer that an object is about, by its label. An error is reported.
pub(crate) fn peer_of(
    reference: &ObjectRef,
    metadata: &ObjectMeta,
    own: Option<&ClusterId>,
    problems: &mut Problems,
) -> Result<ClusterId, String> {
    let checked = check::peer(metadata).map_err(|fault| fault.message);
    let checked = checked.and_then(|id| match own {
        Some(own) if *own == id => {
            Err(format!("found {id}, which is this cluster; expected the peer's cluster ID"))
        }
        Some(_) | None => Ok(id),
    });
    checked.map_err(|message| {
        let field = check::label_field(labels::REMOTE_CLUSTER_ID);
        problems.add(reference, &field, message.clone());
        format!("{field}: {message}")
    })
}

fn former_peer(index: &Index, configuration: &ObjectRef) -> Option<ClusterId> {
    let mut networks = index.of_kind(Kind::Network);
    let (_, own) = networks.find(|(_, o)| owner::of(o).as_ref() == Some(configuration))?;
    own.label(labels::REMOTE_CLUSTER_ID)?.parse().ok()
}

fn remote(
    index: &Index,
    (of, peer): (&ObjectRef, &ClusterId),
    (kind, cidr): (RemapKind, Cidr),
) -> Remote {
    let network = network_of(of, kind, &cidr);
    let fits = |granted: &Cidr| granted.len() == cidr.len() && granted.is_ipv4() == cidr.is_ipv4();
    let granted = index.network_grant(&network).filter(fits);
    let label = index.get(&network).and_then(|object| object.label(labels::REMOTE_CLUSTER_ID));
    let is_of_other = label.is_some_and(|label| label != peer.as_str());
    Remote { kind, cidr, network, granted: granted.filter(|_| !is_of_other), is_of_other }
}

/// Selects one of several Configurations for one peer; the one in use stays in use.
fn one_configuration_for_a_peer(
    index: &Index,
    peerings: &mut [Peering<'_>],
    problems: &mut Problems,
) {
    let mut by_peer: BTreeMap<ClusterId, Vec<usize>> = BTreeMap::new();
    for (i, peering) in peerings.iter().enumerate() {
        if let Some(id) = peering.id.clone() {
            by_peer.entry(id).or_default().push(i);
        }
    }
    let is_used = |configuration: &ObjectRef, peer: &ClusterId| {
        let mut networks = index.of_kind(Kind::Network);
        networks.any(|(_, object)| {
            owner::of(object).as_ref() == Some(configuration)
                && object.label(labels::REMOTE_CLUSTER_ID) == Some(peer.as_str())
        })
    };
    for (peer, rivals) in by_peer.into_iter().filter(|(_, rivals)| rivals.len() > 1) {
        let used = rivals.iter().find(|i| is_used(&peerings[**i].reference, &peer));
        let used = used.copied().unwrap_or(rivals[0]);
        let names: Vec<_> = rivals.iter().map(|i| peerings[*i].reference.to_string()).collect();
        let message = format!(
            "{} are about the same peer; expected one. {} is used",
            names.join(" and "),
            peerings[used].reference
        );
        let field = check::label_field(labels::REMOTE_CLUSTER_ID);
        for i in rivals {
            problems.add(&peerings[i].reference, &field, message.clone());
            if i != used {
                peerings[i].fault = Some(format!("{field}: {message}"));
            }
        }
    }
}

/// `<configuration>-<pod|external>-<cidr>`, as Liqo names it.
fn network_of(configuration: &ObjectRef, kind: RemapKind, cidr: &Cidr) -> ObjectRef {
    let cidr = names::dashed(&cidr.to_string());
    let name = format!("{}-{}-{cidr}", configuration.name, kind.name());
    let namespace = configuration.namespace.as_deref().unwrap_or_default();
    ObjectRef::new(Kind::Network, namespace, &name)
}
