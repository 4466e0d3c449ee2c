//! What the statuses of Networks and IPs say is taken, and by whom.

use std::net::{AddrParseError, IpAddr};

use fabric_api::ipam::{IP, Network};
use fabric_api::{Cidr, ParseCidrError, labels};
use fabric_store::{Kind, Object, ObjectRef, Snapshot};

use crate::pools::Wish;

/// The kinds that say what is taken.
pub(crate) const KINDS: [Kind; 2] = [Kind::Network, Kind::Ip];

/// All that the store says is taken.
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

/// What is wrong with the store's account of what is taken. None of it stops ipam.
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
                | Object::NodeConfig(_) => Ok(()),
            };
            claims.faults.extend(outcome.err().map(|fault| *fault));
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
            shared: wish_of(object) == Wish::Shared,
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

/// How a Network asks for its prefix. Only a Network that is not remapped can be shared: another
/// prefix in place of the one asked for is always granted to one alone.
fn wish_of(network: &Object) -> Wish {
    let not_remapped =
        network.label(labels::NETWORK_NOT_REMAPPED).is_some_and(|value| value != "false");
    let shared = network.label(labels::NETWORK_SHARED) == Some("true");
    match (not_remapped, shared) {
        (true, true) => Wish::Shared,
        (true, false) => Wish::Exclusive,
        (false, _) => Wish::Mutable,
    }
}

fn parse_cidr(object: &ObjectRef, text: &str) -> Result<Cidr, Box<Fault>> {
    text.parse().map_err(|error| Box::new(Fault::BadCidr { object: object.clone(), error }))
}
