//! `core.liqo.io/v1beta1`, field for field as Liqo has it: what tells how peers are.

mod foreign_cluster;

pub use foreign_cluster::{
    ForeignCluster, ForeignClusterSpec, ForeignClusterStatus, Module, ModuleCondition, Modules,
    TenantNamespaces,
};
