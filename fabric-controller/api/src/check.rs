//! Faults of one object by itself, whatever else there is. Each names the field, what was found and
//! what is expected.
//!
//! The store checks before it takes a new version of a manifest; the controller checks again, because
//! an object may have come another way.

mod gateways;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

pub use gateways::{client_port, gateway_client, gateway_server, listen_port, service_port};

use crate::fabric::RemapKind;
use crate::ipam::{IP, Network};
use crate::networking::{Configuration, PublicKeyObject};
use crate::{Cidr, ClusterId, ParseCidrError, PrivateKey, PublicKey, labels};

/// One thing that is wrong. Prints as `field: message`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fault {
    /// Path of the field, such as `spec.remote.cidr.pod[0]`.
    pub field: String,
    /// Found and expected value.
    pub message: String,
}

impl Fault {
    fn new(field: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { field: field.into(), message: message.to_string() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

/// The peer that an object is about, by its label.
pub fn peer(metadata: &ObjectMeta) -> Result<ClusterId, Fault> {
    let found = metadata.labels.as_ref().and_then(|labels| labels.get(labels::REMOTE_CLUSTER_ID));
    let parsed = match found {
        None => Err("missing; expected the peer's cluster ID".to_owned()),
        Some(found) => found.parse().map_err(|error: crate::ParseClusterIdError| error.to_string()),
    };
    parsed.map_err(|message| Fault::new(label_field(labels::REMOTE_CLUSTER_ID), message))
}

pub fn label_field(key: &str) -> String {
    format!("metadata.labels.{key}")
}

pub fn configuration(of: &Configuration) -> Vec<Fault> {
    let mut faults: Vec<_> = peer(&of.metadata).err().into_iter().collect();
    faults.extend(remotes(of).err().unwrap_or_default());
    faults
}

/// The peer's prefixes in the order written, pods first, each once: `liqoctl generate configuration` lists a
/// pod CIDR as often as its cluster has Networks of it.
pub fn remotes(of: &Configuration) -> Result<Vec<(RemapKind, Cidr)>, Vec<Fault>> {
    let cidrs = &of.spec.remote.cidr;
    let lists = [(RemapKind::Pod, &cidrs.pod.0), (RemapKind::External, &cidrs.external.0)];
    let mut found: Vec<(String, RemapKind, Cidr)> = Vec::new();
    let mut faults = Vec::new();
    if cidrs.pod.0.is_empty() {
        let message = "missing; expected the peer's pod CIDR";
        faults.push(Fault::new("spec.remote.cidr.pod", message));
    }
    for (kind, list) in lists {
        for (i, text) in list.iter().enumerate() {
            let field = format!("spec.remote.cidr.{}[{i}]", kind.name());
            let cidr = match usable(text) {
                Ok(cidr) => cidr,
                Err(message) => {
                    faults.push(Fault::new(field, message));
                    continue;
                }
            };
            if found.iter().any(|(_, of, c)| *of == kind && *c == cidr) {
                continue;
            }
            if let Some((other, _, first)) = found.iter().find(|(_, _, c)| c.overlaps(&cidr)) {
                let message = format!(
                    "{cidr} overlaps {other}, {first}; expected prefixes apart from each other"
                );
                faults.push(Fault::new(field, message));
                continue;
            }
            found.push((field, kind, cidr));
        }
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    Ok(found.into_iter().map(|(_, kind, cidr)| (kind, cidr)).collect())
}

/// A prefix that a peer can have.
fn usable(text: &str) -> Result<Cidr, String> {
    let cidr: Cidr = text.parse().map_err(|error: ParseCidrError| error.to_string())?;
    match is_unicast(&cidr) {
        true => Ok(cidr),
        false => Err(format!("found {cidr}; expected {UNICAST}")),
    }
}

/// Expectation of [`is_unicast`].
pub const UNICAST: &str = "a prefix of ordinary unicast addresses";

/// Returns whether hosts can have addresses of the prefix.
pub fn is_unicast(cidr: &Cidr) -> bool {
    !cidr.is_everything() && is_unicast_address(cidr.address())
}

fn is_unicast_address(address: IpAddr) -> bool {
    let special = match address {
        IpAddr::V4(a) => a.is_loopback() || a.is_link_local() || a.octets()[0] >= 224,
        IpAddr::V6(a) => {
            let is_ipv4 = a.to_ipv4_mapped().is_some();
            a.is_loopback() || a.is_multicast() || a.is_unicast_link_local() || is_ipv4
        }
    };
    !special && !address.is_unspecified()
}

/// Expectation where a prefix that nodes, gateways or pods get addresses of is too long for that.
pub fn lacks_room(cidr: &Cidr) -> Option<String> {
    let longest = if cidr.is_ipv4() { 30 } else { 126 };
    let expected = || format!("expected at most /{longest}, with room for several addresses");
    (cidr.len() > longest).then(expected)
}

pub fn public_key(of: &PublicKeyObject) -> Vec<Fault> {
    let mut faults: Vec<_> = peer(&of.metadata).err().into_iter().collect();
    let key = PublicKey::from_base64(&of.spec.public_key);
    faults.extend(key.err().map(|error| Fault::new("spec.publicKey", error)));
    faults
}

/// Faults of a Secret that has a key pair, or is labelled as one.
pub fn secret(of: &core::Secret) -> Vec<Fault> {
    let has = |labels: &BTreeMap<String, String>| labels.contains_key(labels::GATEWAY_RESOURCE);
    let is_gateways = of.metadata.labels.as_ref().is_some_and(has);
    let has_key = of.data.as_ref().is_some_and(|data| data.contains_key(PRIVATE_KEY));
    if !has_key && !is_gateways {
        return Vec::new();
    }
    private_key(of).err().into_iter().collect()
}

/// Entries of a Secret with a key pair: raw bytes, as Liqo has them.
const PRIVATE_KEY: &str = "privateKey";
const PUBLIC_KEY: &str = "publicKey";

/// The private key of a gateway. If its Secret has a public half, too, the two belong together.
pub fn private_key(of: &core::Secret) -> Result<PrivateKey, Fault> {
    let data = |key: &str| of.data.as_ref().and_then(|data| data.get(key));
    let at = |key: &str, message: &dyn fmt::Display| Fault::new(format!("data.{key}"), message);
    let private = data(PRIVATE_KEY)
        .ok_or_else(|| at(PRIVATE_KEY, &"missing; expected 32 bytes in base64"))?;
    let key = PrivateKey::from_bytes(&private.0).map_err(|error| at(PRIVATE_KEY, &error))?;
    let public = key.public();
    let is_its =
        |given: &[u8]| given == public.as_bytes() || given == public.to_string().as_bytes();
    match data(PUBLIC_KEY) {
        Some(given) if !is_its(&given.0) => {
            let message = format!("does not belong to the private key; expected {public}");
            Err(at(PUBLIC_KEY, &message))
        }
        Some(_) | None => Ok(key),
    }
}

pub fn network(of: &Network) -> Vec<Fault> {
    let mut faults: Vec<_> = network_cidr(of)
        .err()
        .map(|message| Fault::new("spec.cidr", message))
        .into_iter()
        .collect();
    if of.metadata.namespace.as_deref() == Some(labels::LIQO_NAMESPACE) {
        faults.extend(network_type(of));
    }
    faults
}

/// A reserved prefix is kept from peers, whatever it is.
fn network_cidr(of: &Network) -> Result<(), String> {
    let kind = of.metadata.labels.as_ref().and_then(|labels| labels.get(labels::NETWORK_TYPE));
    let kind = kind.map_or("", String::as_str);
    if kind == "reserved" {
        return of.spec.cidr.parse::<Cidr>().map(drop).map_err(|error| error.to_string());
    }
    let cidr = usable(&of.spec.cidr)?;
    let has_hosts =
        ["pod-cidr", "external-cidr", "external-cidr-v6", "internal-cidr"].contains(&kind);
    match lacks_room(&cidr).filter(|_| has_hosts) {
        Some(expected) => Err(format!("found {cidr}; {expected}")),
        None => Ok(()),
    }
}

/// Fault in the type of one of the cluster's own Networks, whatever its namespace.
pub fn network_type(of: &Network) -> Option<Fault> {
    let kind = of.metadata.labels.as_ref().and_then(|labels| labels.get(labels::NETWORK_TYPE))?;
    let (last, others) = labels::NETWORK_TYPES.split_last()?;
    let message = format!("found {kind:?}; expected {} or {last}", others.join(", "));
    let known = labels::NETWORK_TYPES.contains(&kind.as_str());
    (!known).then(|| Fault::new(label_field(labels::NETWORK_TYPE), message))
}

/// One of weft's own stands for no host: its address is unspecified.
pub fn ip(of: &IP) -> Vec<Fault> {
    let labels = of.metadata.labels.as_ref();
    let is_hostless = labels.is_some_and(|has| has.contains_key(labels::HOST_UNREACHABLE));
    let expected = match of.spec.address() {
        Some(address) if is_unicast_address(address) => return Vec::new(),
        Some(address) if is_hostless && address.is_unspecified() => return Vec::new(),
        Some(_) => "an ordinary unicast address, which this cluster's hosts can reach",
        None => "an IP address",
    };
    vec![Fault::new("spec.ip", format!("found {:?}; expected {expected}", of.spec.ip))]
}

/// Faults of the ConfigMap that names the cluster.
pub fn config_map(of: &core::ConfigMap) -> Vec<Fault> {
    let name = of.metadata.name.as_deref() == Some(labels::CLUSTER_ID_CONFIGMAP);
    let ours = of.metadata.namespace.as_deref() == Some(labels::LIQO_NAMESPACE);
    if name && ours { cluster_id(of).err().into_iter().collect() } else { Vec::new() }
}

/// The cluster's ID, of the ConfigMap that has it.
pub fn cluster_id(of: &core::ConfigMap) -> Result<ClusterId, Fault> {
    let field = format!("data.{}", labels::CLUSTER_ID_KEY);
    match of.data.as_ref().and_then(|data| data.get(labels::CLUSTER_ID_KEY)) {
        None => Err(Fault::new(field, "missing; expected the cluster's ID")),
        Some(found) => found.parse().map_err(|error| Fault::new(field, error)),
    }
}

pub fn node(of: &core::Node) -> Vec<Fault> {
    let (underlay, mut faults) = node_addresses(of);
    if underlay.is_empty() {
        let message = "no address of type InternalIP; expected one or one of each family";
        faults.push(Fault::new("status.addresses", message));
    }
    let wrong =
        node_pod_cidrs(of).into_iter().filter_map(|(field, cidr)| Some((field, cidr.err()?)));
    faults.extend(wrong.map(|(field, error)| Fault::new(field, error)));
    faults
}

/// Returns true if an address means something on one link only: an IPv6 link-local one needs a device, and
/// IPv4's broadcast address is all hosts of the link.
fn is_of_one_link(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// The node's internal addresses, the first of each family.
pub fn node_addresses(of: &core::Node) -> (Vec<IpAddr>, Vec<Fault>) {
    let (mut underlay, mut faults) = (Vec::<IpAddr>::new(), Vec::new());
    let addresses = of.status.as_ref().and_then(|status| status.addresses.as_ref());
    for (i, address) in addresses.into_iter().flatten().enumerate() {
        if address.type_ != "InternalIP" {
            continue;
        }
        let field = format!("status.addresses[{i}].address");
        match address.address.parse::<IpAddr>() {
            Ok(ip)
                if ip.is_unspecified()
                    || ip.is_loopback()
                    || ip.is_multicast()
                    || is_of_one_link(ip) =>
            {
                let message = format!("found {ip}; expected an address other nodes can reach");
                faults.push(Fault::new(field, message));
            }
            Ok(ip) if underlay.iter().any(|known| known.is_ipv4() == ip.is_ipv4()) => {}
            Ok(ip) => underlay.push(ip),
            Err(_) => {
                let message = format!("found {:?}; expected an IP address", address.address);
                faults.push(Fault::new(field, message));
            }
        }
    }
    (underlay, faults)
}

/// The node's pod CIDRs with their fields.
pub fn node_pod_cidrs(of: &core::Node) -> Vec<(String, Result<Cidr, ParseCidrError>)> {
    let spec = of.spec.as_ref();
    let many = spec.and_then(|spec| spec.pod_cidrs.clone()).filter(|list| !list.is_empty());
    let one = spec.and_then(|spec| spec.pod_cidr.clone()).map(|cidr| vec![cidr]);
    let texts = many.or(one).unwrap_or_default();
    let parsed = texts.iter().enumerate();
    parsed.map(|(i, text)| (format!("spec.podCIDRs[{i}]"), text.parse())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_prefixes_are_no_peers() {
        for special in [
            "0.0.0.0/0",
            "0.0.0.0/8",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "224.0.0.0/4",
            "240.0.0.0/4",
            "::/0",
            "::1/128",
            "fe80::/10",
            "fe80::/64",
            "ff00::/8",
        ] {
            assert!(usable(special).is_err(), "{special}");
        }
        for ordinary in
            ["10.0.0.0/8", "100.64.0.0/10", "192.168.1.1/32", "fd00::/8", "2001:db8::/32"]
        {
            assert!(usable(ordinary).is_ok(), "{ordinary}");
        }
    }

    #[test]
    fn special_prefixes_are_no_networks() {
        let faults = |kind: &str, cidr: &str| {
            let spec = crate::ipam::NetworkSpec { cidr: cidr.to_owned(), pre_allocated: None };
            let mut of = Network::new("a", spec);
            of.metadata.labels = Some([(labels::NETWORK_TYPE.to_owned(), kind.to_owned())].into());
            network(&of).iter().map(Fault::to_string).collect::<Vec<_>>()
        };
        let fault =
            "spec.cidr: found 127.0.0.0/16; expected a prefix of ordinary unicast addresses";
        assert_eq!(faults("pod-cidr", "127.0.0.0/16"), [fault]);
        assert_eq!(faults("pod-cidr", "10.200.0.0/16"), [""; 0]);
        assert_eq!(faults("reserved", "169.254.0.0/16"), [""; 0], "kept from peers, never used");
        let tiny = faults("pod-cidr", "10.200.0.0/32");
        assert!(tiny[0].contains("expected at most /30"), "{tiny:?}");
        assert_eq!(faults("service-cidr", "10.96.0.1/32"), [""; 0]);
    }

    #[test]
    fn special_addresses_are_no_ips() {
        for (address, is_fine) in [
            ("192.0.2.50", true),
            ("2001:db8::1", true),
            ("127.0.0.1", false),
            ("0.0.0.0", false),
            ("224.0.0.1", false),
            ("169.254.0.1", false),
            ("255.255.255.255", false),
            ("240.0.0.1", false),
            ("::1", false),
            ("fe80::1", false),
            ("::ffff:192.0.2.50", false),
            ("here", false),
        ] {
            let spec = crate::ipam::IPSpec { ip: address.to_owned(), ..Default::default() };
            assert_eq!(ip(&IP::new("a", spec)).is_empty(), is_fine, "{address}");
        }
        let spec = crate::ipam::IPSpec { ip: "0.0.0.0".to_owned(), ..Default::default() };
        let mut own = IP::new("a", spec);
        own.metadata.labels = Some([(labels::HOST_UNREACHABLE.to_owned(), "true".into())].into());
        assert_eq!(ip(&own).len(), 0, "weft's own");
    }

    #[test]
    fn node_has_the_first_internal_address_of_each_family() {
        let addresses = |all: &[(&str, &str)]| {
            let all = all.iter().map(|(kind, address)| core::NodeAddress {
                type_: kind.to_string(),
                address: address.to_string(),
            });
            let status = core::NodeStatus { addresses: Some(all.collect()), ..Default::default() };
            let (found, faults) =
                node_addresses(&core::Node { status: Some(status), ..core::Node::default() });
            assert_eq!(faults, []);
            found.iter().map(IpAddr::to_string).collect::<Vec<_>>()
        };
        let (a, b, c, d) = ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2");
        let internal = "InternalIP";
        let four = [(internal, a), (internal, b), (internal, c), (internal, d)];
        assert_eq!(addresses(&four), [a, c]);
        assert_eq!(addresses(&[("ExternalIP", b), (internal, d), (internal, a)]), [d, a]);
        assert_eq!(addresses(&[(internal, c), (internal, d)]), [c]);
    }
}
