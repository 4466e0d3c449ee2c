//! IP resources that request a Service, in Kubernetes.

use fabric_api::ipam::IP;
use fabric_objects::Kind;

use super::Compiler;

impl Compiler<'_> {
    /// Services of IPs, and the faults of those that could not be made.
    pub(super) fn services(&mut self) {
        let index = self.index;
        for (reference, ip) in index.all::<IP>(Kind::Ip) {
            let leaves = ip.metadata.deletion_timestamp.is_some();
            if leaves || ip.spec.service_template.is_none() || ip.spec.address().is_none() {
                continue;
            }
            self.out.services.insert(reference.clone(), IP { status: None, ..ip.clone() });
            let placement = index.placement(reference);
            for fault in placement.into_iter().flat_map(|placement| &placement.faults) {
                self.fault(reference, fault);
            }
        }
    }
}
