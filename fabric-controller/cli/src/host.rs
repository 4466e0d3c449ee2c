//! Name, addresses and network namespace of this host.

use std::fs;
use std::net::{IpAddr, UdpSocket};
use std::os::unix::fs::MetadataExt as _;

use anyhow::{Context as _, bail};

use super::manifest::is_dns_name;

/// Addresses that are nobody's (RFC 5737, RFC 3849): only the default route leads there.
const ANYWHERE: [(&str, &str); 2] =
    [("0.0.0.0:0", "198.51.100.1:9"), ("[::]:0", "[2001:db8::1]:9")];

/// The host's name, in lower case as Kubernetes has node names.
pub(crate) fn name() -> anyhow::Result<String> {
    let path = "/proc/sys/kernel/hostname";
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let name = text.trim().to_ascii_lowercase();
    if !is_dns_name(&name) {
        bail!(
            "the host name {name:?} cannot name a node; expected a DNS name such as edge-1. \
             Give the node's name on the command line"
        );
    }
    Ok(name)
}

/// The source address of the default route, IPv4 if there is one. Nothing is sent.
pub(crate) fn default_source() -> Option<IpAddr> {
    ANYWHERE.into_iter().find_map(|(from, to)| {
        let socket = UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        let address = socket.local_addr().ok()?.ip();
        (!address.is_loopback() && !address.is_unspecified()).then_some(address)
    })
}

/// True if the address is on an interface of this host: only then can a socket be bound to it.
pub(crate) fn has_address(address: IpAddr) -> bool {
    UdpSocket::bind((address, 0)).is_ok()
}

/// Returns the network namespace of this process, by inode; 0 if it cannot be determined.
pub(crate) fn netns() -> u64 {
    fs::metadata("/proc/self/ns/net").map(|meta| meta.ino()).unwrap_or(0)
}
