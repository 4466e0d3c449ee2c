//! Meaning of an index: the cluster, its nodes, peerings, gateways and mapped IPs, and the faults found
//! in reading them. No I/O, no clock.
//!
//! Each module reads one of them from the index and what was read before; [`Model`] is all of them.

pub mod cluster;
pub mod gateway;
mod gateways;
mod keys;
pub mod mappings;
pub mod names;
pub mod peering;
mod problems;

pub use cluster::Cluster;
pub use gateway::Gateway;
pub use gateways::Gateways;
pub use keys::KeyPair;
pub use mappings::Mapping;
pub use peering::Peering;
pub use problems::Problems;

use fabric_index::Index;

/// All that the index means. Nothing of it is changed later.
#[derive(Debug)]
pub struct Model<'a> {
    pub cluster: Cluster,
    pub peerings: Vec<Peering<'a>>,
    pub gateways: Gateways<'a>,
    pub mappings: Vec<Mapping>,
}

impl<'a> Model<'a> {
    pub fn read(index: &'a Index, problems: &mut Problems) -> Self {
        let cluster = Cluster::read(index, problems);
        let peerings = peering::read(index, cluster.id.as_ref(), problems);
        let gateways = gateways::read(index, cluster.id.as_ref(), &peerings, problems);
        let mappings = mappings::read(index, &cluster, problems);
        Self { cluster, peerings, gateways, mappings }
    }
}
