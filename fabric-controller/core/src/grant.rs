use std::net::IpAddr;

use fabric_api::Cidr;
use fabric_api::ipam::{IPStatus, NetworkStatus};
use fabric_store::Object;

use crate::index::{ip_grant, network_grant};

/// What ipam granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grant {
    Network(Cidr),
    Address { ip: IpAddr, cidr: Cidr },
}

impl Grant {
    /// What the status of an object says it was granted.
    pub fn of(object: &Object) -> Option<Self> {
        if let Ok(network) = object.try_into() {
            return network_grant(network).map(Self::Network);
        }
        let ip = object.try_into().ok()?;
        ip_grant(ip).map(|(ip, cidr)| Self::Address { ip, cidr })
    }

    /// Writes it into the status of the object that wished for it.
    pub fn write_to(self, object: &mut Object) {
        match (object, self) {
            (Object::Network(network), Self::Network(cidr)) => {
                network.status = Some(NetworkStatus { cidr: Some(cidr.to_string()) });
            }
            (Object::Ip(own), Self::Address { ip, cidr }) => {
                own.status =
                    Some(IPStatus { ip: Some(ip.to_string()), cidr: Some(cidr.to_string()) });
            }
            (_, Self::Network(_) | Self::Address { .. }) => {}
        }
    }
}
