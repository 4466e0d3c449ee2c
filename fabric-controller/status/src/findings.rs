//! Conditions of the user's objects: whether the newest manifest is used, the peer is healthy, and nodes
//! reach the gateway.

use std::collections::{BTreeMap, BTreeSet};

use fabric_api::fabric::{GatewayConfig, GatewayConfigStatus, PeeringFault};
use fabric_api::labels::REMOTE_CLUSTER_ID;
use fabric_api::networking::ACCEPTED;
use fabric_index::Index;
use fabric_index::node_paths::NodePaths;
use fabric_model::{Gateway, Problems};
use fabric_objects::{Kind, Object, ObjectRef, Problem};
use jiff::Timestamp;

use crate::conditions;
use crate::statuses::Statuses;

/// Kinds whose status has conditions.
const KINDS: [Kind; 3] = [Kind::Configuration, Kind::GatewayServer, Kind::GatewayClient];

/// All that the conditions of an object follow from.
pub struct Findings<'a> {
    index: &'a Index,
    problems: &'a Problems,
    /// By gateway, the objects with the keys that it requires. Those have no status of their own.
    needed: BTreeMap<&'a ObjectRef, &'a [ObjectRef]>,
    paths: &'a BTreeMap<ObjectRef, NodePaths>,
}

impl<'a> Findings<'a> {
    pub fn new(
        index: &'a Index,
        problems: &'a Problems,
        gateways: &'a [Gateway<'_>],
        paths: &'a BTreeMap<ObjectRef, NodePaths>,
    ) -> Self {
        let needed = gateways.iter().map(|gateway| (&gateway.reference, &gateway.needed[..]));
        Self { index, problems, needed: needed.collect(), paths }
    }

    /// All objects with conditions; those without a status in `statuses` keep theirs.
    pub fn complete(&self, mut statuses: Statuses, now: Timestamp) -> Statuses {
        for (reference, object) in KINDS.into_iter().flat_map(|kind| self.index.of_kind(kind)) {
            let mut object = statuses.remove(reference).unwrap_or_else(|| object.clone());
            self.set_conditions(reference, &mut object, now);
            statuses.insert(reference.clone(), object);
        }
        statuses
    }

    fn set_conditions(&self, reference: &ObjectRef, object: &mut Object, now: Timestamp) {
        let (wrong, faults) = (self.wrong_with(reference), self.faults_of(reference, object));
        let paths = self.paths.get(reference);
        let placement = self.index.placement(reference).filter(|of| of.uid == object.uid());
        let pod_fault = placement.and_then(|placement| placement.pod_fault.as_ref());
        let is_faulty = !faults.is_empty() || pod_fault.is_some();
        let has_news = !wrong.is_empty() || is_faulty || paths.is_some();
        let generation = object.generation();
        let Some(conditions) = object.conditions_mut(has_news) else { return };
        if let Some(paths) = paths {
            conditions::report_nodes(conditions, paths, generation, now);
        }
        conditions::accept(conditions, &wrong, generation, now);
        conditions::report_peer(conditions, &faults, generation, now);
        conditions::report_pods(conditions, pod_fault, generation, now);
    }

    /// The trouble with a peer that gateways report and that concerns an object.
    fn faults_of(&self, reference: &ObjectRef, object: &Object) -> Vec<&'a PeeringFault> {
        let index = self.index;
        let faults = |config: &'a GatewayConfig| {
            config.status.iter().flat_map(|status: &'a GatewayConfigStatus| &status.faults)
        };
        let Object::Configuration(configuration) = object else {
            let config = ObjectRef { kind: Kind::GatewayConfig, ..reference.clone() };
            return index.typed::<GatewayConfig>(&config).into_iter().flat_map(faults).collect();
        };
        let labels = configuration.metadata.labels.as_ref();
        let Some(peer) = labels.and_then(|labels| labels.get(REMOTE_CLUSTER_ID)) else {
            return Vec::new();
        };
        let namespace = reference.namespace.as_deref();
        let configs = index.all_in::<GatewayConfig>(Kind::GatewayConfig, namespace);
        let of_peer = configs.filter(|(_, of)| of.spec.peer_cluster_id == *peer);
        let all = of_peer.flat_map(|(_, config)| faults(config));
        all.filter(|fault| fault.reason == PeeringFault::CIDR_MISMATCH).collect()
    }

    /// All problems of an object but what it merely waits for. Those of keys are reported by the gateway
    /// that needs them.
    fn wrong_with(&self, object: &ObjectRef) -> String {
        let is_wrong = |problem: &&Problem| !waits(problem);
        let own = self.problems.of(object).iter().filter(is_wrong);
        let own = own.map(|problem| Problem { object: None, ..problem.clone() }.to_string());
        let needed = self.needed.get(object).copied().unwrap_or_default();
        let needed = needed.iter().flat_map(|one| self.problems.of(one)).filter(is_wrong);
        let texts: BTreeSet<String> = own.chain(needed.map(Problem::to_string)).collect();
        texts.into_iter().collect::<Vec<_>>().join("; ")
    }
}

/// Faults that the objects themselves may not show, by object: messages of the condition [`ACCEPTED`] of gateways
/// whose newest manifest is not used, what gateways wait for (but for the peer's key: the lack of it shows in the
/// gateway's config), and what is wrong with the ConfigMap of the cluster's ID, which may not even be there.
pub fn unshown_faults(statuses: &Statuses, problems: &[Problem]) -> BTreeMap<String, String> {
    let is_gateway = |of: &ObjectRef| matches!(of.kind, Kind::GatewayServer | Kind::GatewayClient);
    let gateways = statuses.iter().filter(|(reference, _)| is_gateway(reference));
    let faulty = gateways.filter_map(|(reference, object)| {
        let mut conditions = object.conditions().iter();
        let fault = conditions.find(|of| of.type_ == ACCEPTED && of.status == "False")?;
        Some((reference.to_string(), fault.message.clone()))
    });
    let mut faults: BTreeMap<String, String> = faulty.collect();
    let is_key = |problem: &Problem| problem.message.starts_with("waits for a PublicKey");
    for problem in problems {
        let is_unshown = |of: &&ObjectRef| {
            of.kind == Kind::ConfigMap || is_gateway(of) && waits(problem) && !is_key(problem)
        };
        let Some(object) = problem.object.as_ref().filter(is_unshown) else { continue };
        let text = Problem { object: None, ..problem.clone() }.to_string();
        let fault = faults.entry(object.to_string()).or_default();
        fault.push_str(if fault.is_empty() { "" } else { "; " });
        fault.push_str(&text);
    }
    faults
}

/// True for a problem that other objects end, such as those of a peering that is being made.
fn waits(problem: &Problem) -> bool {
    problem.message.starts_with("waits for")
}

/// Objects of the user as they are while something that the controller needs cannot be read, for which
/// reason `why` nothing is compiled.
pub fn unreadable(index: &Index, why: &str, now: Timestamp) -> Vec<Object> {
    let mut objects: Vec<Object> =
        KINDS.into_iter().flat_map(|kind| index.of_kind(kind)).map(|(_, o)| o.clone()).collect();
    for object in &mut objects {
        let generation = object.generation();
        if let Some(conditions) = object.conditions_mut(true) {
            conditions::unreadable(conditions, why, generation, now);
        }
    }
    objects
}
