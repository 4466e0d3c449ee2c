//! Configurations: which peers there are and how this cluster sees their prefixes.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::RemapKind;
use fabric_api::ipam::{Network, NetworkSpec};
use fabric_api::networking::Configuration;
use fabric_api::{Cidr, ClusterId, check, labels};
use fabric_objects::{Kind, ObjectRef};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::cluster::Cluster;
use super::{Compiler, names, owner};

/// A Configuration that was read.
#[derive(Debug)]
pub(super) struct Peering<'a> {
    pub(super) reference: ObjectRef,
    pub(super) configuration: &'a Configuration,
    /// The peer, if that much is right.
    pub(super) id: Option<ClusterId>,
    /// The peer's prefixes in the order written, pods first; empty if any of it is wrong.
    pub(super) remotes: Vec<Remote>,
    /// Fault of the Configuration.
    pub(super) fault: Option<String>,
    /// Position of its gateway among the gateways.
    pub(super) gateway: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub(super) kind: RemapKind,
    pub(super) cidr: Cidr,
    /// The Network that requests its counterpart here.
    pub(super) network: ObjectRef,
    pub(super) granted: Option<Cidr>,
}

impl Peering<'_> {
    pub(super) fn is_with(&self, peer: &ClusterId) -> bool {
        self.fault.is_none() && self.id.as_ref() == Some(peer)
    }

    /// All prefixes have their counterparts.
    pub(super) fn is_ready(&self) -> bool {
        self.fault.is_none() && self.remotes.iter().all(|remote| remote.granted.is_some())
    }

    /// The peer's prefixes as this cluster sees them.
    pub(super) fn prefixes(&self) -> impl Iterator<Item = Cidr> {
        self.remotes.iter().filter_map(|remote| remote.granted)
    }

    /// Prefixes in the order of a NodeConfig.
    pub(super) fn sorted_prefixes(&self) -> Vec<String> {
        let mut prefixes: Vec<Cidr> = self.prefixes().collect();
        prefixes.sort();
        prefixes.iter().map(Cidr::to_string).collect()
    }

    /// The peer's ID; empty if it is not right.
    pub(super) fn peer(&self) -> String {
        self.id.as_ref().map(ToString::to_string).unwrap_or_default()
    }

    pub(super) fn namespace(&self) -> &str {
        self.reference.namespace.as_deref().unwrap_or_default()
    }
}

impl<'a> Compiler<'a> {
    pub(super) fn peerings(&mut self, cluster: &Cluster) -> Vec<Peering<'a>> {
        let index = self.index;
        let all = index.all::<Configuration>(Kind::Configuration);
        let all = all.filter(|(_, of)| of.metadata.deletion_timestamp.is_none());
        let mut peerings: Vec<_> = all.map(|(r, c)| self.peering(r, c, cluster)).collect();
        self.one_configuration_for_a_peer(&mut peerings);
        peerings
    }

    fn peering(
        &mut self,
        reference: &ObjectRef,
        configuration: &'a Configuration,
        cluster: &Cluster,
    ) -> Peering<'a> {
        let mut peering = Peering {
            reference: reference.clone(),
            configuration,
            id: None,
            remotes: Vec::new(),
            fault: None,
            gateway: None,
        };
        match self.peer_of(reference, &configuration.metadata, cluster) {
            Ok(id) => peering.id = Some(id),
            Err(fault) => {
                // Everything made for the peer that it was about stays.
                peering.id = self.former_peer(reference);
                peering.fault = Some(fault);
                return peering;
            }
        }
        match check::remotes(configuration) {
            Ok(prefixes) => {
                let remotes = prefixes.into_iter().map(|of| self.remote(reference, of));
                peering.remotes = remotes.collect();
            }
            Err(faults) => {
                faults.iter().for_each(|fault| self.fault(reference, fault));
                let texts: Vec<_> = faults.iter().map(ToString::to_string).collect();
                peering.fault = Some(texts.join("; "));
            }
        }
        peering
    }

    /// The peer that an object is about, by its label. An error is reported.
    pub(super) fn peer_of(
        &mut self,
        reference: &ObjectRef,
        metadata: &ObjectMeta,
        cluster: &Cluster,
    ) -> Result<ClusterId, String> {
        let field = check::label_field(labels::REMOTE_CLUSTER_ID);
        let checked = check::peer(metadata).map_err(|fault| fault.message);
        let checked = checked.and_then(|id| match &cluster.id {
            Some(own) if *own == id => {
                Err(format!("found {id}, which is this cluster; expected the peer's cluster ID"))
            }
            Some(_) | None => Ok(id),
        });
        checked.map_err(|message| {
            self.problem(reference, &field, message.clone());
            format!("{field}: {message}")
        })
    }

    fn former_peer(&self, configuration: &ObjectRef) -> Option<ClusterId> {
        let mut networks = self.index.of_kind(Kind::Network);
        let (_, own) = networks.find(|(_, o)| owner::of(o).as_ref() == Some(configuration))?;
        own.label(labels::REMOTE_CLUSTER_ID)?.parse().ok()
    }

    fn remote(&self, of: &ObjectRef, (kind, cidr): (RemapKind, Cidr)) -> Remote {
        let network = network_of(of, kind, &cidr);
        let granted = self
            .index
            .network_grant(&network)
            .filter(|granted| granted.len() == cidr.len() && granted.is_ipv4() == cidr.is_ipv4());
        Remote { kind, cidr, network, granted }
    }

    /// Selects one of several Configurations for one peer; the one in use stays in use.
    fn one_configuration_for_a_peer(&mut self, peerings: &mut [Peering<'a>]) {
        let mut by_peer: BTreeMap<ClusterId, Vec<usize>> = BTreeMap::new();
        for (i, peering) in peerings.iter().enumerate() {
            if let Some(id) = peering.id.clone() {
                by_peer.entry(id).or_default().push(i);
            }
        }
        let owners: BTreeSet<_> =
            self.index.of_kind(Kind::Network).filter_map(|(_, o)| owner::of(o)).collect();
        for rivals in by_peer.into_values().filter(|rivals| rivals.len() > 1) {
            let used = rivals.iter().find(|i| owners.contains(&peerings[**i].reference));
            let used = used.copied().unwrap_or(rivals[0]);
            let names: Vec<_> = rivals.iter().map(|i| peerings[*i].reference.to_string()).collect();
            for i in rivals {
                let message = format!(
                    "{} are about the same peer; expected one. {} is used",
                    names.join(" and "),
                    peerings[used].reference
                );
                let field = check::label_field(labels::REMOTE_CLUSTER_ID);
                let reference = peerings[i].reference.clone();
                self.problem(&reference, &field, message.clone());
                if i != used {
                    peerings[i].fault = Some(format!("{field}: {message}"));
                }
            }
        }
    }

    /// One Network for each prefix of a peer.
    pub(super) fn peering_networks(&mut self, peerings: &[Peering<'_>]) {
        for peering in peerings {
            if peering.fault.is_some() {
                self.faulty.insert(peering.reference.clone());
                continue;
            }
            for remote in &peering.remotes {
                let spec = NetworkSpec { cidr: remote.cidr.to_string(), pre_allocated: None };
                let mut network = Network::new(&remote.network.name, spec);
                network.metadata.namespace = Some(peering.namespace().to_owned());
                network.metadata.labels = Some(
                    [
                        (labels::REMOTE_CLUSTER_ID.to_owned(), peering.peer()),
                        (labels::CIDR_TYPE.to_owned(), remote.kind.name().to_owned()),
                    ]
                    .into(),
                );
                self.want_owned(network, &peering.reference);
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
