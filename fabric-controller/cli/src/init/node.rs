use std::net::IpAddr;
use std::str::FromStr;

use fabric_api::{Cidr, ParseCidrError};

use crate::manifest::is_dns_name;

/// A node as `--node` gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeArg {
    pub(crate) name: String,
    /// At most one a family; the first is preferred.
    pub(crate) addresses: Vec<IpAddr>,
    /// At most one a family.
    pub(crate) pod_cidrs: Vec<Cidr>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ParseNodeError {
    #[error(
        "expected NAME=ADDRESS[,ADDRESS6]=PODCIDR[,PODCIDR6], such as n1=192.0.2.11=10.200.1.0/24"
    )]
    Shape,
    #[error("{0:?} cannot name a node; expected a DNS name such as n1")]
    Name(String),
    #[error(
        "{0:?} is not an address of a node; expected one that other hosts can reach, such as 192.0.2.11"
    )]
    Address(String),
    #[error(
        "two {what} of one family: {first} and {second}; expected at most one IPv4 and one IPv6"
    )]
    Twice { what: &'static str, first: String, second: String },
    #[error(transparent)]
    Cidr(#[from] ParseCidrError),
}

impl FromStr for NodeArg {
    type Err = ParseNodeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts: Vec<_> = text.split('=').collect();
        let [name, addresses, pod_cidrs] = parts[..] else {
            return Err(ParseNodeError::Shape);
        };
        if !is_dns_name(name) {
            return Err(ParseNodeError::Name(name.to_owned()));
        }
        let addresses = addresses.split(',').map(address).collect::<Result<Vec<_>, _>>()?;
        let pod_cidrs = pod_cidrs.split(',').map(Cidr::from_str).collect::<Result<Vec<_>, _>>()?;
        one_a_family("addresses", &addresses, IpAddr::is_ipv4)?;
        one_a_family("pod CIDRs", &pod_cidrs, Cidr::is_ipv4)?;
        Ok(Self { name: name.to_owned(), addresses, pod_cidrs })
    }
}

fn address(text: &str) -> Result<IpAddr, ParseNodeError> {
    let wrong = || ParseNodeError::Address(text.to_owned());
    let address: IpAddr = text.parse().map_err(|_| wrong())?;
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    let unusable =
        address.is_loopback() || address.is_unspecified() || address.is_multicast() || link_local;
    if unusable { Err(wrong()) } else { Ok(address) }
}

fn one_a_family<T: ToString>(
    what: &'static str,
    items: &[T],
    is_ipv4: impl Fn(&T) -> bool,
) -> Result<(), ParseNodeError> {
    for (i, second) in items.iter().enumerate() {
        if let Some(first) = items[..i].iter().find(|first| is_ipv4(first) == is_ipv4(second)) {
            let (first, second) = (first.to_string(), second.to_string());
            return Err(ParseNodeError::Twice { what, first, second });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_has_a_name_addresses_and_pod_cidrs() {
        let node: NodeArg = "n1=192.0.2.11,2001:db8::1=10.200.1.0/24,fd00::/64".parse().unwrap();
        assert_eq!(node.name, "n1");
        assert_eq!(node.addresses.len(), 2);
        assert_eq!(node.pod_cidrs[1].to_string(), "fd00::/64");
    }

    #[test]
    fn wrong_node_is_refused_with_its_fault() {
        for (text, says) in [
            ("n1", "NAME=ADDRESS"),
            ("N1=192.0.2.1=10.0.0.0/24", "cannot name a node"),
            ("n1=127.0.0.1=10.0.0.0/24", "127.0.0.1"),
            ("n1=192.0.2.1,192.0.2.2=10.0.0.0/24", "192.0.2.1 and 192.0.2.2"),
            ("n1=192.0.2.1=10.0.0.7/24", "did you mean 10.0.0.0/24"),
            ("n1=192.0.2.1=10.0.0.0/24,10.0.1.0/24", "two pod CIDRs"),
        ] {
            let error = text.parse::<NodeArg>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
