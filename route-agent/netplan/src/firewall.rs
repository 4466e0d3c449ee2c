use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fabric_api::Cidr;
use sha2::{Digest, Sha256};

/// Name of our table, of family `inet`.
pub const TABLE: &str = "weft";

/// Our nftables table, whole.
///
/// There is no diff to work out: `nft` swaps the table in one transaction, so what is wanted is
/// also what is sent. The rules are always the same; only sets and maps change.
///
/// Prints as the table's body; [`Firewall::script`] is what `nft -f` is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Firewall {
    /// Sources on this node that keep their address.
    pub local_pods: BTreeSet<Cidr>,
    /// All peers' prefixes, as this cluster sees them.
    pub peers: BTreeSet<Cidr>,
    /// Those of them that no tunnel carries packets to now: new connections are refused.
    pub unconnected: BTreeSet<Cidr>,
    /// What all other sources are given.
    pub external_v4: Option<Ipv4Addr>,
    pub external_v6: Option<Ipv6Addr>,
    /// Pods, too, are given the external address.
    pub full_masquerade: bool,
    /// IP resources: external address to target.
    pub targets: BTreeMap<IpAddr, IpAddr>,
    /// The external addresses whose targets are sent packets with the node's own address.
    pub masqueraded: BTreeSet<IpAddr>,
    /// Underlay addresses that VXLAN is accepted from.
    pub vxlan_sources: BTreeSet<IpAddr>,
}

/// Fixed text. What it relies on:
///
/// * A NAT rule that has spoken for a connection silences all later NAT chains, so
///   `snat to ip saddr` at 99 keeps a source that a CNI's masquerade at 100 would change.
/// * kube-proxy clears its masquerade mark (0x4000) in a rule that is then never reached. The
///   mark would go over to the VXLAN packet, and that would be masqueraded.
/// * New connections are refused before routing, since the ICMP of an `unreachable` route is
///   rate-limited and a client would hang. What is established passes: it survives a short cut.
///   `admin-prohibited`, since Linux tells an application of that, but not of `host-unreachable`.
const RULES: &str = "  chain sources {
    type nat hook postrouting priority 99; policy accept;
    ip saddr @kept_v4 ip daddr @peers_v4 snat ip to ip saddr
    ip6 saddr @kept_v6 ip6 daddr @peers_v6 snat ip6 to ip6 saddr
    ip daddr @peers_v4 snat ip to ip daddr map @external_v4
    ip6 daddr @peers_v6 snat ip6 to ip6 daddr map @external_v6
    ct original ip daddr @masqueraded_v4 masquerade
    ct original ip6 daddr @masqueraded_v6 masquerade
  }
  chain targets {
    type nat hook prerouting priority -101; policy accept;
    dnat ip to ip daddr map @targets_v4
    dnat ip6 to ip6 daddr map @targets_v6
  }
  chain targets_of_own {
    type nat hook output priority -101; policy accept;
    dnat ip to ip daddr map @targets_v4
    dnat ip6 to ip6 daddr map @targets_v6
  }
  chain unmark {
    type filter hook postrouting priority 98; policy accept;
    oifname { \"weft4\", \"weft6\" } meta mark and 0x4000 != 0 meta mark set meta mark and 0xffffbfff
  }
  chain refuse_forwarded {
    type filter hook prerouting priority -90; policy accept;
    ip daddr @unconnected_v4 goto refuse
    ip6 daddr @unconnected_v6 goto refuse
  }
  chain refuse_own {
    type filter hook output priority -90; policy accept;
    ip daddr @unconnected_v4 goto refuse
    ip6 daddr @unconnected_v6 goto refuse
  }
  chain refuse {
    ct state != new return
    tcp flags & (fin | syn | rst | ack) == syn reject with tcp reset
    meta l4proto != tcp reject with icmpx admin-prohibited
  }
  chain underlay {
    type filter hook input priority -10; policy accept;
    udp dport 4879 ip saddr != @vxlan_v4 drop
    udp dport 4879 ip6 saddr != @vxlan_v6 drop
  }
";

impl Firewall {
    /// Input for `nft -f`: replaces the table, whatever it holds, in one transaction.
    ///
    /// Naming the table before deleting it makes the delete safe when there is none yet.
    pub fn script(&self) -> String {
        let mark = self.mark();
        format!(
            "table inet {TABLE}\ndelete table inet {TABLE}\n\
             table inet {TABLE} {{\n  comment \"{mark}\"\n{self}}}\n"
        )
    }

    /// The table's comment, which tells the text it was made from.
    pub fn mark(&self) -> String {
        let digest = Sha256::digest(self.to_string());
        digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Input for `nft -f` that takes the table away, if there is one.
    pub fn removal() -> String {
        format!("table inet {TABLE}\ndelete table inet {TABLE}\n")
    }

    fn kept(&self) -> impl Iterator<Item = &Cidr> {
        self.local_pods.iter().filter(|_| !self.full_masquerade)
    }
}

impl fmt::Display for Firewall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = |ip: &IpAddr| Cidr::host(*ip);
        write_prefixes(f, "kept", self.kept().copied())?;
        write_prefixes(f, "peers", self.peers.iter().copied())?;
        write_prefixes(f, "unconnected", self.unconnected.iter().copied())?;
        write_prefixes(f, "masqueraded", self.masqueraded.iter().map(host))?;
        write_prefixes(f, "vxlan", self.vxlan_sources.iter().map(host))?;
        write_external(f, "external_v4", "ipv4_addr", "0.0.0.0/0", self.external_v4)?;
        write_external(f, "external_v6", "ipv6_addr", "::/0", self.external_v6)?;
        write_targets(f, "targets_v4", "ipv4_addr", |ip| ip.is_ipv4(), &self.targets)?;
        write_targets(f, "targets_v6", "ipv6_addr", |ip| ip.is_ipv6(), &self.targets)?;
        f.write_str(RULES)
    }
}

/// Two sets, one a family.
fn write_prefixes(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    prefixes: impl Iterator<Item = Cidr>,
) -> fmt::Result {
    let (v4, v6): (Vec<Cidr>, Vec<Cidr>) = prefixes.partition(Cidr::is_ipv4);
    for (version, kind, prefixes) in [(4, "ipv4_addr", v4), (6, "ipv6_addr", v6)] {
        writeln!(f, "  set {name}_v{version} {{")?;
        writeln!(f, "    type {kind}; flags interval; auto-merge;")?;
        write_elements(f, prefixes.iter().map(Cidr::to_string))?;
        writeln!(f, "  }}")?;
    }
    Ok(())
}

/// A map with one element, for a rule can look an address up but not be left out.
fn write_external<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    kind: &str,
    everything: &str,
    external: Option<T>,
) -> fmt::Result {
    writeln!(f, "  map {name} {{")?;
    writeln!(f, "    type {kind} : {kind}; flags interval;")?;
    write_elements(f, external.iter().map(|address| format!("{everything} : {address}")))?;
    writeln!(f, "  }}")
}

fn write_targets(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    kind: &str,
    of_family: fn(&IpAddr) -> bool,
    targets: &BTreeMap<IpAddr, IpAddr>,
) -> fmt::Result {
    writeln!(f, "  map {name} {{")?;
    writeln!(f, "    type {kind} : {kind};")?;
    let targets = targets.iter().filter(|(from, to)| of_family(from) && of_family(to));
    write_elements(f, targets.map(|(from, to)| format!("{from} : {to}")))?;
    writeln!(f, "  }}")
}

/// Nothing at all for no elements: `nft` refuses an empty list.
fn write_elements(
    f: &mut fmt::Formatter<'_>,
    elements: impl Iterator<Item = String>,
) -> fmt::Result {
    let elements: Vec<String> = elements.collect();
    if elements.is_empty() {
        return Ok(());
    }
    writeln!(f, "    elements = {{ {} }}", elements.join(", "))
}
