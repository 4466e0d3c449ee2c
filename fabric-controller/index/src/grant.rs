use std::net::IpAddr;
use std::sync::Arc;

use fabric_api::Cidr;
use fabric_api::ipam::{IP, IPStatus, Network, NetworkStatus};
use fabric_objects::Object;

/// Prefix or address granted by ipam.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    Network(Cidr),
    Address { ip: IpAddr, cidr: Cidr },
}

impl Grant {
    /// Grant recorded in the status of an object.
    pub fn of(object: &Object) -> Option<Self> {
        if let Ok(network) = object.try_into() {
            return network_grant(network).map(Self::Network);
        }
        let ip = object.try_into().ok()?;
        ip_grant(ip).map(|(ip, cidr)| Self::Address { ip, cidr })
    }

    /// Writes it into the status of the object that requested it.
    pub fn write_to(self, object: &mut Object) {
        match (object, self) {
            (Object::Network(network), Self::Network(cidr)) => {
                Arc::make_mut(network).status =
                    Some(NetworkStatus { cidr: Some(cidr.to_string()) });
            }
            (Object::Ip(own), Self::Address { ip, cidr }) => {
                Arc::make_mut(own).status =
                    Some(IPStatus { ip: Some(ip.to_string()), cidr: Some(cidr.to_string()) });
            }
            (_, Self::Network(_) | Self::Address { .. }) => {}
        }
    }
}

pub fn network_grant(network: &Network) -> Option<Cidr> {
    network.status.as_ref()?.cidr.as_deref()?.parse().ok()
}

/// The address and the prefix it was taken from.
pub fn ip_grant(ip: &IP) -> Option<(IpAddr, Cidr)> {
    let status = ip.status.as_ref()?;
    Some((status.ip.as_deref()?.parse().ok()?, status.cidr.as_deref()?.parse().ok()?))
}
