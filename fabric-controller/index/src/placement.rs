//! Interface between controller and Kubernetes: gateways to run, and where they do.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fabric_api::check::Fault;
use fabric_api::fabric::GatewayReplica;
use fabric_api::ipam::IP;
use fabric_api::networking::{EndpointStatus, InternalEndpoint};
use fabric_api::{ClusterId, PublicKey};
use fabric_objects::{Object, ObjectRef, Problem};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// State of a cluster as observed in Kubernetes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placements {
    /// Placement of each gateway, and the faults of the Service of an IP.
    pub of: BTreeMap<ObjectRef, Placement>,
    /// Addresses of a node's pods that lie outside its pod CIDRs.
    pub pods: PodAddresses,
}

/// Addresses of pods, by node.
pub type PodAddresses = BTreeMap<String, BTreeSet<IpAddr>>;

/// The gateways that are to run.
pub type PlannedGateways = BTreeMap<ObjectRef, PlannedGateway>;

/// The IPs that are to have a Service, without their status.
pub type PlannedServices = BTreeMap<ObjectRef, IP>;

/// State of the networking with each peer, for Liqo's ForeignClusters.
pub type Peers = BTreeMap<ClusterId, Peer>;

/// The Secrets with key pairs that lack something.
pub type SecretGaps = BTreeMap<ObjectRef, SecretGap>;

/// Node and addresses of a gateway that Kubernetes runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placement {
    /// The uid of the gateway that it is the place of. Another of the same name may be there by now.
    pub uid: String,
    /// Its Deployment, once there is one.
    pub workload: Option<ObjectReference>,
    /// Endpoint of a server for clients; absent until it is known.
    pub endpoint: Option<EndpointStatus>,
    /// Address and node of the pod that has the tunnel by its label, readiness and age; absent while there is
    /// none.
    pub internal: Option<InternalEndpoint>,
    /// All its pods with addresses.
    pub replicas: Vec<GatewayReplica>,
    /// There has been none for so long that the address of the last one may be another pod's.
    pub is_lost: bool,
    /// True if one of its pods stays and is ready.
    pub is_served: bool,
    /// Number of its pods that are ready, and of those that should be and are not.
    pub ready: i32,
    pub unavailable: i32,
    /// Reasons why it cannot be made as its manifest requires. What runs goes on.
    pub faults: Vec<Fault>,
    /// Fault of a pod of it that does not start, whether another one is ready or not.
    pub pod_fault: Option<PodFault>,
}

/// Reason for which a pod does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFault {
    /// As Kubernetes names it, such as `ErrImagePull`.
    pub reason: String,
    /// Cause, and where to look.
    pub message: String,
}

/// Desired state in Kubernetes beyond the store's own kinds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// True if all objects are known: what is not named here is not to run.
    pub whole: bool,
    pub gateways: PlannedGateways,
    pub secrets: SecretGaps,
    pub services: PlannedServices,
    /// All problems, each with the uid of the object that it is about.
    pub problems: BTreeMap<Problem, String>,
    pub peers: Peers,
}

/// A gateway that is to run.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedGateway {
    /// The GatewayServer or GatewayClient, without its status.
    pub object: Object,
    pub peer: ClusterId,
    /// The Secret with its key pair.
    pub secret_name: String,
}

/// Parts missing from a Secret with a key pair.
#[derive(Clone, Debug, PartialEq)]
pub struct SecretGap {
    /// Uid of the Secret.
    pub uid: String,
    /// The labels by which Liqo finds it, which name the peer.
    pub peer: Option<ClusterId>,
    /// The gateway that it is to go away with, instead of one of the same name that is gone.
    pub owner: Option<OwnerReference>,
    /// The half that liqoctl gives to the peer.
    pub public_key: Option<PublicKey>,
}

/// State of the networking with a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// False while the peer's CIDRs have no counterparts yet: readers of an enabled networking
    /// (liqoctl is one) take them for granted.
    pub enabled: bool,
    pub conditions: Vec<PeerCondition>,
}

/// A condition of the module `networking`. Unlike those of Kubernetes, its status is no boolean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerCondition {
    pub type_: &'static str,
    pub status: &'static str,
    pub reason: &'static str,
    pub message: &'static str,
}
