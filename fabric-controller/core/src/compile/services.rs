//! IP resources that request a Service, in Kubernetes.

use fabric_api::ipam::IP;
use fabric_index::Index;
use fabric_index::placement::PlannedServices;
use fabric_model::Problems;
use fabric_objects::Kind;

/// Services of IPs, and the faults of those that could not be made.
pub(super) fn planned(index: &Index, problems: &mut Problems) -> PlannedServices {
    let mut services = PlannedServices::new();
    for (reference, ip) in index.all::<IP>(Kind::Ip) {
        let leaves = ip.metadata.deletion_timestamp.is_some();
        if leaves || ip.spec.service_template.is_none() || ip.spec.address().is_none() {
            continue;
        }
        services.insert(reference.clone(), IP { status: None, ..ip.clone() });
        let placement = index.placement(reference);
        for fault in placement.into_iter().flat_map(|placement| &placement.faults) {
            problems.fault(reference, fault);
        }
    }
    services
}
