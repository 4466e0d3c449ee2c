//! `ipam.liqo.io/v1alpha1`, field for field as Liqo has it.

mod ip;
mod network;

pub use ip::{IP, IPSpec, IPStatus, ServiceMetadata, ServiceTemplate};
pub use network::{Network, NetworkSpec, NetworkStatus};
