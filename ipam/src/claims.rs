//! Claims in the statuses of Networks and IPs: what is taken, and by which object.

use std::net::{AddrParseError, IpAddr};

use fabric_api::ipam::{IP, Network};
use fabric_api::{Cidr, ParseCidrError, labels};
use fabric_store::{Kind, Object, ObjectRef, Snapshot};

use crate::pools::RequestMode;

/// The kinds that hold claims.
pub(crate) const KINDS: [Kind; 2] = [Kind::Network, Kind::Ip];

/// All that is taken according to the store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claims {
    pub(crate) prefixes: Vec<PrefixClaim>,
    pub(crate) addresses: Vec<AddressClaim>,
    /// Statuses that could not be understood; what they claim is unknown.
    pub(crate) faults: Vec<Fault>,
    /// False if something in the store could not be read: what is missing here may still be taken.
    pub(crate) complete: bool,
}

/// A Network holds a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PrefixClaim {
    pub(crate) network: ObjectRef,
    pub(crate) cidr: Cidr,
    pub(crate) shared: bool,
    pub(crate) pre_allocated: u32,
}

/// An IP holds an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddressClaim {
    pub(crate) ip: ObjectRef,
    pub(crate) address: IpAddr,
    pub(crate) cidr: Cidr,
}

/// Fault of the claims in the store. None of them stops ipam.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("{a} holds {a_cidr} and {b} holds {b_cidr}, which overlap and are not both shared")]
    Overlap { a: ObjectRef, a_cidr: Cidr, b: ObjectRef, b_cidr: Cidr },
    #[error("{a} and {b} both hold the address {address}")]
    SameAddress { a: ObjectRef, b: ObjectRef, address: IpAddr },
    #[error("{ip} holds {address} of {cidr}, which no Network holds")]
    NoNetwork { ip: ObjectRef, address: IpAddr, cidr: Cidr },
    #[error("{ip} holds {address}, which is outside of its prefix {cidr}")]
    AddressOutside { ip: ObjectRef, address: IpAddr, cidr: Cidr },
    #[error("{network} holds {cidr}, which lies in none of the pools")]
    OutsidePools { network: ObjectRef, cidr: Cidr },
    #[error("{object}: status.cidr: {error}")]
    BadCidr { object: ObjectRef, error: ParseCidrError },
    #[error("{object}: status.ip: {found:?} is not an address ({error})")]
    BadAddress { object: ObjectRef, found: String, error: AddrParseError },
}

impl Fault {
    /// True if two resources hold the same: somebody has to give one of them up.
    pub(crate) fn is_conflict(&self) -> bool {
        match self {
            Self::Overlap { .. } | Self::SameAddress { .. } => true,
            Self::NoNetwork { .. }
            | Self::AddressOutside { .. }
            | Self::OutsidePools { .. }
            | Self::BadCidr { .. }
            | Self::BadAddress { .. } => false,
        }
    }
}

impl Claims {
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let mut claims = Self { complete: snapshot.problems.is_empty(), ..Self::default() };
        for (reference, object) in &snapshot.objects {
            let outcome = match object {
                Object::Network(network) => claims.add_network(reference, object, network),
                Object::Ip(ip) => claims.add_ip(reference, ip),
                Object::Namespace(_)
                | Object::ConfigMap(_)
                | Object::Secret(_)
                | Object::Node(_)
                | Object::Configuration(_)
                | Object::Connection(_)
                | Object::GatewayServer(_)
                | Object::GatewayClient(_)
                | Object::PublicKey(_)
                | Object::GatewayConfig(_)
                | Object::NodeConfig(_)
                | Object::FabricRecord(_)
                | Object::GatewayRecord(_) => Ok(()),
            };
            let Err(fault) = outcome else { continue };
            claims.complete &= !matches!(*fault, Fault::BadCidr { .. } | Fault::BadAddress { .. });
            claims.faults.push(*fault);
        }
        claims
    }

    fn add_network(
        &mut self,
        reference: &ObjectRef,
        object: &Object,
        network: &Network,
    ) -> Result<(), Box<Fault>> {
        let Some(granted) = network.status.as_ref().and_then(|status| status.cidr.as_deref())
        else {
            return Ok(());
        };
        self.prefixes.push(PrefixClaim {
            network: reference.clone(),
            cidr: parse_cidr(reference, granted)?,
            shared: mode_of(object) == RequestMode::Shared,
            pre_allocated: network.spec.pre_allocated.unwrap_or(0),
        });
        Ok(())
    }

    fn add_ip(&mut self, reference: &ObjectRef, ip: &IP) -> Result<(), Box<Fault>> {
        let Some(status) = &ip.status else { return Ok(()) };
        let (Some(address), Some(cidr)) = (&status.ip, &status.cidr) else { return Ok(()) };
        let cidr = parse_cidr(reference, cidr)?;
        let address = address.parse().map_err(|error| {
            let found = address.clone();
            Box::new(Fault::BadAddress { object: reference.clone(), found, error })
        })?;
        if !cidr.contains(address) {
            let ip = reference.clone();
            return Err(Box::new(Fault::AddressOutside { ip, address, cidr }));
        }
        self.addresses.push(AddressClaim { ip: reference.clone(), address, cidr });
        Ok(())
    }
}

/// Mode in which a Network requests its prefix. Only a Network that is not remapped can be shared:
/// another prefix in place of the requested one is always granted to one alone.
fn mode_of(network: &Object) -> RequestMode {
    let not_remapped =
        network.label(labels::NETWORK_NOT_REMAPPED).is_some_and(|value| value != "false");
    let shared = network.label(labels::NETWORK_SHARED) == Some("true");
    match (not_remapped, shared) {
        (true, true) => RequestMode::Shared,
        (true, false) => RequestMode::Exclusive,
        (false, _) => RequestMode::Mutable,
    }
}

fn parse_cidr(object: &ObjectRef, text: &str) -> Result<Cidr, Box<Fault>> {
    text.parse().map_err(|error| Box::new(Fault::BadCidr { object: object.clone(), error }))
}

#[cfg(test)]
mod tests {
    use fabric_api::ipam::{IPStatus, NetworkStatus};

    use super::*;

    fn network(labels: &[(&str, &str)]) -> Object {
        let mut network = Network::new("a", Default::default());
        let labels = labels.iter().map(|(key, value)| (key.to_string(), value.to_string()));
        network.metadata.labels = Some(labels.collect());
        network.status = Some(NetworkStatus { cidr: Some("10.1.0.0/16".to_owned()) });
        network.into()
    }

    fn ip(address: &str, cidr: &str) -> Object {
        let mut ip = IP::new("a", Default::default());
        let (address, cidr) = (Some(address.to_owned()), Some(cidr.to_owned()));
        ip.status = Some(IPStatus { ip: address, cidr });
        ip.into()
    }

    fn claims(object: Object) -> Claims {
        Claims::of(&Snapshot { objects: [(object.reference(), object)].into(), problems: vec![] })
    }

    #[test]
    fn remapped_network_is_never_shared() {
        const FIXED: &str = labels::NETWORK_NOT_REMAPPED;
        const SHARED: &str = labels::NETWORK_SHARED;
        for (labels, shared) in [
            (&[(FIXED, "true"), (SHARED, "true")][..], true),
            (&[(FIXED, "true"), (SHARED, "false")], false),
            (&[(FIXED, "true")], false),
            (&[(FIXED, "false"), (SHARED, "true")], false),
            (&[(SHARED, "true")], false),
            (&[], false),
        ] {
            let claims = claims(network(labels));
            assert_eq!(claims.prefixes[0].shared, shared, "{labels:?}");
        }
    }

    #[test]
    fn address_outside_its_prefix_is_no_claim() {
        for (address, cidr) in
            [("10.2.0.1", "10.1.0.0/16"), ("10.1.0.1", "fd00::/8"), ("fe00::1", "fd00::/8")]
        {
            let claims = claims(ip(address, cidr));
            assert_eq!(claims.addresses, []);
            assert!(matches!(claims.faults[..], [Fault::AddressOutside { .. }]), "{address}");
        }
        let claims = claims(ip("10.1.255.255", "10.1.0.0/16"));
        assert_eq!((claims.addresses.len(), claims.faults), (1, vec![]));
    }

    #[test]
    fn unreadable_status_is_a_fault() {
        let bad_cidr = claims(ip("10.1.0.1", "10.1.0.0/33"));
        assert!(matches!(bad_cidr.faults[..], [Fault::BadCidr { .. }]));
        assert!(!bad_cidr.complete, "it may still be taken");
        let bad_address = claims(ip("10.1.0", "10.1.0.0/16"));
        assert!(matches!(bad_address.faults[..], [Fault::BadAddress { .. }]));
        assert!(!bad_address.complete);
    }
}
