//! `core.liqo.io/v1beta1`, field for field as Liqo has it: the states of peers.

mod foreign_cluster;

pub use foreign_cluster::{
    ForeignCluster, ForeignClusterSpec, ForeignClusterStatus, Module, ModuleCondition, Modules,
    TenantNamespaces,
};
