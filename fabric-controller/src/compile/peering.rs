//! Configurations: which peers there are and how this cluster sees their prefixes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::fabric::RemapKind;
use fabric_api::ipam::{Network, NetworkSpec};
use fabric_api::networking::Configuration;
use fabric_api::{Cidr, ClusterId, labels};
use fabric_store::{Kind, ObjectRef};

use super::cluster::Cluster;
use super::{Compiler, addresses, owner};

/// A Configuration that was read.
#[derive(Debug)]
pub(super) struct Peering<'a> {
    pub(super) reference: ObjectRef,
    pub(super) configuration: &'a Configuration,
    /// The peer, if that much is right.
    pub(super) id: Option<ClusterId>,
    /// The peer's prefixes in the order written, pods first; empty if any of it is wrong.
    pub(super) remotes: Vec<Remote>,
    /// What is wrong with it.
    pub(super) fault: Option<String>,
    /// Position of its gateway among the gateways.
    pub(super) gateway: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub(super) kind: RemapKind,
    pub(super) cidr: Cidr,
    /// The Network that asks for its counterpart here.
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

    /// How this cluster sees the peer's prefixes.
    pub(super) fn prefixes(&self) -> impl Iterator<Item = Cidr> {
        self.remotes.iter().filter_map(|remote| remote.granted)
    }

    pub(super) fn namespace(&self) -> &str {
        self.reference.namespace.as_deref().unwrap_or_default()
    }
}

impl<'a> Compiler<'a> {
    pub(super) fn peerings(&mut self, cluster: &Cluster) -> Vec<Peering<'a>> {
        let index = self.index;
        let all = index.all::<Configuration>(Kind::Configuration);
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
        let labels = configuration.metadata.labels.as_ref();
        match self.peer_of(reference, labels, cluster) {
            Ok(id) => peering.id = Some(id),
            Err(fault) => {
                peering.fault = Some(fault);
                return peering;
            }
        }
        match self.remotes(reference, configuration) {
            Ok(remotes) => peering.remotes = remotes,
            Err(fault) => peering.fault = Some(fault),
        }
        peering
    }

    /// The peer that an object is about, by its label. The error is told, and given back.
    pub(super) fn peer_of(
        &mut self,
        reference: &ObjectRef,
        labels: Option<&BTreeMap<String, String>>,
        cluster: &Cluster,
    ) -> Result<ClusterId, String> {
        let field = format!("metadata.labels.{}", labels::REMOTE_CLUSTER_ID);
        let found = labels.and_then(|labels| labels.get(labels::REMOTE_CLUSTER_ID));
        let checked = match found {
            None => Err("missing; expected the peer's cluster ID".to_owned()),
            Some(found) => found.parse::<ClusterId>().map_err(|error| error.to_string()),
        };
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

    fn remotes(&mut self, of: &ObjectRef, c: &Configuration) -> Result<Vec<Remote>, String> {
        let cidrs = &c.spec.remote.cidr;
        let lists = [(RemapKind::Pod, &cidrs.pod.0), (RemapKind::External, &cidrs.external.0)];
        let mut remotes: Vec<(String, Remote)> = Vec::new();
        let mut faults = Vec::new();
        let mut fault = |compiler: &mut Self, field: &str, message: String| {
            faults.push(format!("{field}: {message}"));
            compiler.problem(of, field, message);
        };
        if cidrs.pod.0.is_empty() {
            fault(self, "spec.remote.cidr.pod", "missing; expected the peer's pod CIDR".to_owned());
        }
        for (kind, list) in lists {
            for (i, text) in list.iter().enumerate() {
                let field = format!("spec.remote.cidr.{}[{i}]", kind_name(kind));
                let cidr = match usable(text) {
                    Ok(cidr) => cidr,
                    Err(message) => {
                        fault(self, &field, message);
                        continue;
                    }
                };
                if let Some((other, first)) = remotes.iter().find(|(_, r)| r.cidr.overlaps(&cidr)) {
                    let message = format!(
                        "{cidr} overlaps {other}, {}; expected prefixes apart from each other",
                        first.cidr
                    );
                    fault(self, &field, message);
                    continue;
                }
                let network = network_of(of, kind, &cidr);
                let granted = self.index.network_grant(&network).filter(|granted| {
                    granted.len() == cidr.len() && granted.is_ipv4() == cidr.is_ipv4()
                });
                remotes.push((field, Remote { kind, cidr, network, granted }));
            }
        }
        if faults.is_empty() {
            Ok(remotes.into_iter().map(|(_, remote)| remote).collect())
        } else {
            Err(faults.join("; "))
        }
    }

    /// Of two Configurations for one peer, the one in use stays in use.
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
                let field = format!("metadata.labels.{}", labels::REMOTE_CLUSTER_ID);
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
                let peer = peering.id.as_ref().map(ToString::to_string).unwrap_or_default();
                network.metadata.labels = Some(
                    [
                        (labels::REMOTE_CLUSTER_ID.to_owned(), peer),
                        (labels::CIDR_TYPE.to_owned(), kind_name(remote.kind).to_owned()),
                    ]
                    .into(),
                );
                self.want_owned(network, &peering.reference);
            }
        }
    }
}

pub(super) fn kind_name(kind: RemapKind) -> &'static str {
    match kind {
        RemapKind::Pod => "pod",
        RemapKind::External => "external",
    }
}

/// `<configuration>-<pod|external>-<cidr>`, as Liqo names it.
fn network_of(configuration: &ObjectRef, kind: RemapKind, cidr: &Cidr) -> ObjectRef {
    let cidr = addresses::dashed(&cidr.to_string());
    let name = format!("{}-{}-{cidr}", configuration.name, kind_name(kind));
    let namespace = configuration.namespace.as_deref().unwrap_or_default();
    ObjectRef::new(Kind::Network, namespace, &name)
}

/// A prefix that a peer can have.
fn usable(text: &str) -> Result<Cidr, String> {
    let cidr: Cidr = text.parse().map_err(|error: fabric_api::ParseCidrError| error.to_string())?;
    let special = match cidr.address() {
        IpAddr::V4(a) => a.is_loopback() || a.is_link_local() || a.octets()[0] >= 224,
        IpAddr::V6(a) => a.is_loopback() || a.is_multicast() || a.is_unicast_link_local(),
    };
    if cidr.is_everything() || special || cidr.address().is_unspecified() {
        return Err(format!("found {cidr}; expected a prefix of ordinary unicast addresses"));
    }
    Ok(cidr)
}
