use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fabric_primitives::{Cidr, Mac};
use sha2::{Digest, Sha256};

/// Name of our table, of family `inet`.
pub const TABLE: &str = "weft";

/// Name of the counter of packets from peers to this node's pods that would have left the node.
pub const DIVERTED: &str = "diverted";

/// Priority of our chain that translates sources.
pub const SOURCES_PRIORITY: i32 = 99;

/// Our nftables table, whole.
///
/// There is no diff to work out: `nft` swaps the table in one transaction, so what is wanted is
/// also what is sent.
///
/// Prints as the table's body; [`Firewall::script`] is what `nft -f` is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Firewall {
    /// Sources on this node that keep their address.
    pub local_pods: BTreeSet<Cidr>,
    /// Pods of the cluster.
    pub pods: BTreeSet<Cidr>,
    /// All peers' prefixes, as this cluster sees them.
    pub peers: BTreeSet<Cidr>,
    /// Those of them that no tunnel carries packets to now: new connections are refused.
    pub unconnected: BTreeSet<Cidr>,
    /// Overlay addresses of gateways that answer probes: sources are translated as for peers.
    pub probed: BTreeSet<Cidr>,
    /// Source address given to all other sources.
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
    /// Links of this host's gateways.
    pub links: BTreeSet<Link>,
    /// Devices by which no pod of this node is reached.
    pub exits: BTreeSet<String>,
    /// Devices by which other hosts are reached.
    pub uplinks: BTreeSet<String>,
    /// Networks of the node's underlay addresses.
    pub underlay: BTreeSet<Cidr>,
    /// Networks of the node within peers' prefixes: only pods' packets to them are kept in.
    pub own_networks: BTreeSet<Cidr>,
    /// Peers' prefixes that no tunnel leads to, as the overlay runs on what is in them: nothing passes between these
    /// and pods.
    pub conflicts: BTreeSet<Cidr>,
    /// Packets of pods come from the devices that routes to those pods lead to.
    pub has_symmetric_pods: bool,
}

/// The link of a gateway that other hosts reach by an address of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Link {
    /// This host's address.
    pub host: IpAddr,
    /// The gateway's, of the same family.
    pub address: IpAddr,
    /// MAC addresses of the gateway's VXLAN devices.
    pub mac: Mac,
}

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

    /// The table's comment: a digest of the text that it was made from.
    pub fn mark(&self) -> String {
        let digest = Sha256::digest(self.to_string());
        digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Input for `nft -f` that takes the table away, if there is one.
    pub fn removal() -> String {
        format!("table inet {TABLE}\ndelete table inet {TABLE}\n")
    }
}

impl Firewall {
    /// Drops errors of pods and containers that would make the overlay's packets smaller.
    ///
    /// The kernel keeps a path's MTU by its end, for all protocols. So what counts is the destination
    /// of the packet that it quotes (8 + 16 bytes behind the error's IP header, 8 + 24 for IPv6): a gateway, or a host
    /// of the underlay. Gateways send to any node, so none of these errors gets to one, or to its host, and there none
    /// counts that is about no flow.
    fn write_too_big(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("  chain too_big {\n")?;
        let ends: BTreeSet<Cidr> = self.vxlan_sources.iter().copied().map(Cidr::host).collect();
        by_length(&ends).iter().try_for_each(|set| set.write(f, "daddr", "drop"))?;
        by_length(&ends).iter().try_for_each(|set| set.write_quoted(f, "drop"))?;
        by_length(&self.local_pods).iter().try_for_each(|set| set.write_quoted(f, "return"))?;
        by_length(&self.underlay).iter().try_for_each(|set| set.write_quoted(f, "drop"))?;
        if !self.links.is_empty() {
            f.write_str("    iifname != { \"weft4\", \"weft6\" } ct state != related drop\n")?;
        }
        f.write_str("  }\n")
    }

    /// Drops errors to gateways by their links, and about packets to them, of which there are none: packets of others
    /// are for this host, and its own cannot be too big for a link. Those to another address of such a host than
    /// VXLAN has are about no VXLAN, and count if they are about a flow: pods of other nodes reach these addresses.
    fn write_errors_of_links(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let links: BTreeSet<Cidr> =
            self.links.iter().map(|link| Cidr::host(link.address)).collect();
        f.write_str("  chain errors_of_links {\n")?;
        for set in by_length(&links) {
            set.write(f, "daddr", "drop")?;
            set.write_quoted(f, "drop")?;
        }
        let families = [("ipv4", "ip", true), ("ipv6", "ip6", false)];
        for (family, ip, is_ipv4) in families.into_iter().filter(|_| !self.links.is_empty()) {
            let hosts =
                self.links.iter().map(|link| link.host).filter(|ip| ip.is_ipv4() == is_ipv4);
            let mut hosts: Vec<String> = hosts.map(|host| host.to_string()).collect();
            hosts.dedup();
            let others = match hosts.is_empty() {
                true => String::new(),
                false => format!("{ip} daddr != {{ {} }} ", hosts.join(", ")),
            };
            let verdict = "fib daddr type local ct state != related drop";
            writeln!(f, "    meta nfproto {family} {others}{verdict}")?;
        }
        f.write_str("  }\n")
    }

    /// Drops errors of a gateway's host's containers about answers to themselves: once translated, these are about
    /// answers to this host, and any other one would make its path to the gateway smaller.
    fn write_masqueraded_errors(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.links.is_empty() {
            return Ok(());
        }
        f.write_str(
            "  chain masqueraded_errors {\n    type filter hook postrouting priority 101; policy accept;\n",
        )?;
        TOO_BIG.iter().try_for_each(|error| {
            writeln!(f, "    {error} meta iif != 0 fib saddr type local drop")
        })?;
        f.write_str("  }\n")
    }

    fn write_pods_stay(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cidrs = self.local_pods.iter().filter(|pods| **pods != Cidr::host(pods.address()));
        let pods = by_length(cidrs);
        if self.exits.is_empty() || pods.is_empty() {
            return Ok(());
        }
        writeln!(f, "  counter {DIVERTED} {{\n  }}\n  chain drop_pods {{")?;
        let verdict = format!("counter name {DIVERTED} drop");
        pods.iter().try_for_each(|set| set.write(f, "daddr", &verdict))?;
        write!(
            f,
            "  }}\n  chain from_peers {{\n    type filter hook forward priority 0; policy accept;\n    \
             iifname {{ \"weft4\", \"weft6\" }} oifname {{ {} }} goto drop_pods\n  }}\n",
            quoted(&self.exits)
        )
    }
}

/// Assumptions of the rules:
///
/// * A NAT rule that has spoken for a connection silences all later NAT chains, so
///   `snat to ip saddr` at 99 keeps a source that a CNI's masquerade at 100 would change. So it does for
///   the node's VXLAN: the kernel cannot correct the UDP checksum of a packet whose inner one is left
///   to the device.
/// * kube-proxy clears its masquerade mark (0x4000) in a rule that is then never reached. The
///   mark would go over to the VXLAN packet, and that would be masqueraded.
/// * New connections are refused before routing, since the ICMP of an `unreachable` route is
///   rate-limited and a client would hang. What is established passes: it survives a short cut.
///   `admin-prohibited`, since Linux reports that to an application, but not `host-unreachable`.
/// * Nothing for a peer leaves but through the overlay, even for the moment that it takes to put a
///   rule or a route back that another has deleted. While a gateway is gone, or has no device yet, there is no
///   ICMP error about a VXLAN packet.
/// * What peers send to this node's pods leaves by no uplink, whatever rules and routes others have. Pods outside the node's pod CIDRs, targets of IP resources and a CNI's own tunnels
///   are none of this chain's.
/// * VXLAN for a gateway of this host is addressed to the host and recognised by the MAC address of
///   the inner frame, 16 bytes behind the UDP header. It is translated packet by packet, untracked:
///   without this table nothing is translated any more, and the host refuses what has no socket.
///   What is translated leaves by the gateway's link or not at all, whatever routes there are.
///   The source is translated behind routing, which takes no local one from a device.
/// * Only the node itself sends anything to a gateway's overlay address: a pod could flood the probes there.
///   Nor does VXLAN of pods leave for other hosts, where one that is masqueraded would be taken for the node's.
///   Gateways may be pods, and pods may send each other what they like.
/// * VXLAN that is translated to this node's address is a gateway's, and any comes from the device that leads to its
///   source: no pod can take another host's address. Nor does anything from its port, whatever conntrack takes it for:
///   a program on a node would answer to that port. Uplinks are left out, since hosts may be reached by several, and
///   addresses of pods where packets of pods come from other devices than routes lead to.
/// * Chains of others accept what comes out of the overlay from the port of overlay probes: nothing
///   but answers to this node's own probes gets there, and by no other device: conntrack would take a pod's
///   packet for one.
/// * While a table takes another's place, Linux finds nothing in a set of intervals for a moment
///   (seen with 6.18; hash sets stay whole). So a prefix is looked up as what is left of an
///   address under its mask: one set and one rule a length.
impl fmt::Display for Firewall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = self.local_pods.iter().filter(|_| !self.full_masquerade);
        let (kept, peers) = (by_length(kept), by_length(self.peers.iter().chain(&self.probed)));
        let (unconnected, probed) = (by_length(&self.unconnected), by_length(&self.probed));
        write_hosts(f, "vxlan", &self.vxlan_sources)?;
        write_hosts(f, "masqueraded", &self.masqueraded)?;
        write_targets(f, "targets_v4", "ipv4_addr", |ip| ip.is_ipv4(), &self.targets)?;
        write_targets(f, "targets_v6", "ipv6_addr", |ip| ip.is_ipv6(), &self.targets)?;
        writeln!(f, "  chain sources {{")?;
        writeln!(f, "    type nat hook postrouting priority {SOURCES_PRIORITY}; policy accept;")?;
        let own_networks = by_length(&self.own_networks);
        own_networks.iter().try_for_each(|set| set.write(f, "daddr", "goto other_sources"))?;
        kept.iter().try_for_each(|set| set.write(f, "saddr", "jump keep"))?;
        for set in &peers {
            let external = match set.is_ipv4() {
                true => self.external_v4.map(IpAddr::from),
                false => self.external_v6.map(IpAddr::from),
            };
            if let Some(external) = external {
                set.write(f, "daddr", &format!("snat {} to {external}", set.family()))?;
            }
        }
        f.write_str(OTHER_SOURCES)?;
        f.write_str("  chain keep {\n")?;
        for set in &peers {
            set.write(f, "daddr", &format!("snat {0} to {0} saddr", set.family()))?;
        }
        f.write_str(TARGETS)?;
        f.write_str(NO_ERRORS_ABOUT_VXLAN)?;
        own_networks.iter().try_for_each(|set| set.write(f, "daddr", "jump own_networks"))?;
        let conflicts = by_length(&self.conflicts);
        conflicts.iter().try_for_each(|set| set.write(f, "daddr", "jump conflicts"))?;
        peers.iter().try_for_each(|set| set.write(f, "daddr", "drop"))?;
        f.write_str(UNMARK)?;
        if !own_networks.is_empty() {
            f.write_str("  chain own_networks {\n")?;
            by_length(&self.local_pods)
                .iter()
                .try_for_each(|set| set.write(f, "saddr", "return"))?;
            f.write_str("    accept\n  }\n")?;
        }
        if !conflicts.is_empty() {
            f.write_str(CONFLICTS)?;
            let local = by_length(&self.local_pods);
            local.iter().try_for_each(|set| set.write(f, "saddr", "drop"))?;
            f.write_str("  }\n")?;
        }
        self.write_pods_stay(f)?;
        for (chain, hook) in [("refuse_forwarded", "prerouting"), ("refuse_own", "output")] {
            writeln!(f, "  chain {chain} {{")?;
            writeln!(f, "    type filter hook {hook} priority -90; policy accept;")?;
            unconnected.iter().try_for_each(|set| set.write(f, "daddr", "goto refuse"))?;
            if hook == "prerouting" {
                f.write_str(NO_VXLAN_OF_PEERS)?;
                let of_peers = "iifname { \"weft4\", \"weft6\" } drop";
                conflicts.iter().try_for_each(|set| set.write(f, "saddr", of_peers))?;
                let inside = match self.uplinks.is_empty() {
                    true => "iifname != \"weft-*\"".to_owned(),
                    false => {
                        format!("iifname != \"weft-*\" iifname != {{ {} }}", quoted(&self.uplinks))
                    }
                };
                writeln!(f, "    udp dport 4879 {inside} jump forged_vxlan")?;
                writeln!(f, "    udp sport 4879 {inside} jump forged_vxlan")?;
                for error in TOO_BIG {
                    let links = "iifname != \"weft-*\" jump errors_of_links";
                    writeln!(f, "    {error} iifname != \"lo\" {links}")?;
                    writeln!(f, "    {error} iifname != \"lo\" {inside} jump too_big")?;
                }
                f.write_str("    udp dport 4879 ct status dnat jump pods_only\n")?;
                probed.iter().try_for_each(|set| set.write(f, "daddr", "drop"))?;
                let local = by_length(&self.local_pods);
                let vxlan = "udp dport 4879 goto vxlan_of_pods";
                local.iter().try_for_each(|set| set.write(f, "saddr", vxlan))?;
            }
            writeln!(f, "  }}")?;
        }
        self.write_errors_of_links(f)?;
        self.write_too_big(f)?;
        f.write_str("  chain forged_vxlan {\n")?;
        if !self.has_symmetric_pods {
            by_length(&self.pods).iter().try_for_each(|set| set.write(f, "saddr", "return"))?;
        }
        f.write_str("    fib saddr . iif oif missing drop\n  }\n")?;
        f.write_str(MASQUERADED_VXLAN)?;
        let local = by_length(&self.local_pods);
        local.iter().try_for_each(|set| set.write(f, "daddr", "return"))?;
        f.write_str("    drop\n  }\n")?;
        f.write_str(VXLAN_OF_PODS)?;
        by_length(&self.pods).iter().try_for_each(|set| set.write(f, "daddr", "return"))?;
        f.write_str("    drop\n  }\n")?;
        self.write_masqueraded_errors(f)?;
        writeln!(f, "  counter refused {{\n  }}\n  chain refuse {{")?;
        own_networks.iter().try_for_each(|set| set.write(f, "daddr", "return"))?;
        f.write_str(REFUSE)?;
        let of_others = "iifname != { \"weft4\", \"weft6\" } drop";
        probed.iter().try_for_each(|set| set.write(f, "saddr", of_others))?;
        f.write_str("  }\n")?;
        write_links(f, &self.links)
    }
}

const OTHER_SOURCES: &str = "    goto other_sources
  }
  chain other_sources {
    udp dport 4879 fib saddr type local snat ip to ip saddr
    udp dport 4879 fib saddr type local snat ip6 to ip6 saddr
    ct original ip daddr @masqueraded_v4 masquerade
    ct original ip6 daddr @masqueraded_v6 masquerade
  }
";

const TARGETS: &str = "  }
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
  chain overlay_only {
    type filter hook postrouting priority 97; policy accept;
    oifname { \"weft4\", \"weft6\" } accept
";

/// Drop of errors about a VXLAN packet, which would carry a piece of what is in it. (The protocol of the packet that
/// an error quotes is 8 + 9 bytes behind the error's IP header, 8 + 6 for IPv6; its destination port 8 + 20 + 2, or
/// 8 + 40 + 2.)
pub(crate) const NO_ERRORS_ABOUT_VXLAN: &str =
    "    icmp type destination-unreachable icmp code != 4 @th,136,8 17 @th,240,16 4879 drop
    icmp type redirect @th,136,8 17 @th,240,16 4879 drop
    icmpv6 type destination-unreachable @th,112,8 17 @th,400,16 4879 drop
";

const UNMARK: &str = "  }
  chain unmark {
    type filter hook postrouting priority 98; policy accept;
    oifname { \"weft4\", \"weft6\" } meta mark and 0x4000 != 0 meta mark set meta mark and 0xffffbfff
  }
";

/// Packets to an address that is the peer's and the node's. VXLAN and WireGuard of gateways that are pods pass, and so
/// do answers, since connections from the peer's are dropped.
const CONFLICTS: &str = "  chain conflicts {
    ip saddr @vxlan_v4 return
    ip6 saddr @vxlan_v6 return
    ip daddr @vxlan_v4 return
    ip6 daddr @vxlan_v6 return
    ct direction reply return
";

/// Drop of VXLAN from peers: a node that masquerades it for an IP resource would send it under its own address, from
/// which the other nodes accept VXLAN.
const NO_VXLAN_OF_PEERS: &str = "    iifname { \"weft4\", \"weft6\" } udp dport 4879 drop\n";

/// VXLAN of the node itself has the device that wrapped it for its incoming one, or none. Replies are no gateway's: in a
/// connection that a gateway or its host seems to have opened, a container would send them under the node's address.
/// Nothing is masqueraded to the port of VXLAN: a program on another node would answer to it, and the answer be VXLAN
/// from that node before conntrack leads it back.
const MASQUERADED_VXLAN: &str = "  chain masqueraded_vxlan {
    type filter hook postrouting priority 101; policy accept;
    udp sport 4879 meta iif != 0 fib saddr type local drop
    iifname { \"weft4\", \"weft6\" } accept
    udp dport 4879 meta iif != 0 fib saddr type local goto vxlan_of_gateways
  }
  chain vxlan_of_gateways {
    ct direction reply drop
    ct original ip saddr @vxlan_v4 return
    ct original ip6 saddr @vxlan_v6 return
";

const VXLAN_OF_PODS: &str = "  chain vxlan_of_pods {
    ip saddr @vxlan_v4 return
    ip6 saddr @vxlan_v6 return
    goto pods_only
  }
  chain pods_only {
    fib daddr type { local, broadcast, multicast } drop
";

/// Errors with the size that would pass. The host's own come by `lo`.
const TOO_BIG: [&str; 2] =
    ["icmp type destination-unreachable icmp code 4", "icmpv6 type packet-too-big"];

const REFUSE: &str = "    ct state != new return
    counter name refused
    tcp flags & (fin | syn | rst | ack) == syn reject with tcp reset
    meta l4proto != tcp reject with icmpx admin-prohibited
  }
  chain underlay {
    type filter hook input priority -10; policy accept;
    udp dport 4879 ip saddr != @vxlan_v4 drop
    udp dport 4879 ip6 saddr != @vxlan_v6 drop
    iifname { \"weft4\", \"weft6\" } udp sport 12346 ct state != established drop
";

/// An address as it stands in a packet.
fn hex(address: &IpAddr) -> String {
    match address {
        IpAddr::V4(ip) => format!("{:#010x}", ip.to_bits()),
        IpAddr::V6(ip) => format!("{:#034x}", ip.to_bits()),
    }
}

/// Elements of a set of devices.
fn quoted(devices: &BTreeSet<String>) -> String {
    devices.iter().map(|device| format!("\"{device}\"")).collect::<Vec<_>>().join(", ")
}

/// Prefixes of one family and length.
pub(crate) struct SameLength {
    pub(crate) mask: IpAddr,
    pub(crate) networks: Vec<IpAddr>,
}

pub(crate) fn by_length<'a>(prefixes: impl IntoIterator<Item = &'a Cidr>) -> Vec<SameLength> {
    let mut sets: BTreeMap<IpAddr, Vec<IpAddr>> = BTreeMap::new();
    for prefix in prefixes {
        sets.entry(prefix.net().netmask()).or_default().push(prefix.net().network());
    }
    sets.into_iter().map(|(mask, networks)| SameLength { mask, networks }).collect()
}

impl SameLength {
    pub(crate) fn is_ipv4(&self) -> bool {
        self.mask.is_ipv4()
    }

    /// In bits.
    pub(crate) fn len(&self) -> u32 {
        match self.mask {
            IpAddr::V4(mask) => mask.to_bits().count_ones(),
            IpAddr::V6(mask) => mask.to_bits().count_ones(),
        }
    }

    fn family(&self) -> &'static str {
        if self.is_ipv4() { "ip" } else { "ip6" }
    }

    /// The rule that does `verdict` to what has `field` (saddr, daddr) in one of the prefixes.
    fn write(&self, f: &mut fmt::Formatter<'_>, field: &str, verdict: &str) -> fmt::Result {
        let networks: Vec<String> = self.networks.iter().map(IpAddr::to_string).collect();
        let (family, mask, networks) = (self.family(), self.mask, networks.join(", "));
        writeln!(f, "    {family} {field} and {mask} {{ {networks} }} {verdict}")
    }

    /// The rule that does `verdict` to errors about packets to one of the prefixes.
    fn write_quoted(&self, f: &mut fmt::Formatter<'_>, verdict: &str) -> fmt::Result {
        let networks: Vec<String> = self.networks.iter().map(hex).collect();
        let (mask, networks) = (hex(&self.mask), networks.join(", "));
        let quoted = match self.is_ipv4() {
            true => "meta nfproto ipv4 @th,192,32",
            false => "meta nfproto ipv6 @th,256,128",
        };
        writeln!(f, "    {quoted} and {mask} {{ {networks} }} {verdict}")
    }
}

/// Translation between this host's addresses and those of its gateways' links; nothing without links.
fn write_links(f: &mut fmt::Formatter<'_>, links: &BTreeSet<Link>) -> fmt::Result {
    if links.is_empty() {
        return Ok(());
    }
    let mut hosts: BTreeMap<IpAddr, Vec<&Link>> = BTreeMap::new();
    links.iter().for_each(|link| hosts.entry(link.host).or_default().push(link));
    let [mut inward, mut outward] = [String::new(), String::new()];
    for (host, links) in &hosts {
        let ip = if host.is_ipv4() { "ip" } else { "ip6" };
        let hex = |mac: Mac| mac.0.map(|byte| format!("{byte:02x}")).concat();
        let by_mac: Vec<_> =
            links.iter().map(|link| format!("0x{} : {}", hex(link.mac), link.address)).collect();
        let all: Vec<_> = links.iter().map(|link| link.address.to_string()).collect();
        let (by_mac, all) = (by_mac.join(", "), all.join(", "));
        // Their addresses come from their links only: a stranger could write them, too.
        inward += &format!(
            "    udp dport 4879 {ip} saddr {{ {all} }} iifname != \"weft-*\" drop\n    \
             udp dport 4879 {ip} daddr {host} {ip} daddr set @th,128,48 map {{ {by_mac} }} notrack\n    \
             udp dport 4879 {ip} daddr != {host} {ip} saddr {{ {all} }} notrack\n"
        );
        outward += &format!(
            "    udp dport 4879 {ip} daddr {{ {all} }} oifname != \"weft-*\" drop\n    \
             udp dport 4879 {ip} saddr {{ {all} }} {ip} saddr set {host}\n"
        );
    }
    write!(
        f,
        "  chain to_gateways {{\n    type filter hook prerouting priority -300; policy accept;\n{inward}  }}\n  \
         chain from_gateways {{\n    type filter hook postrouting priority 300; policy accept;\n{outward}  }}\n"
    )
}

/// Two sets, one a family.
fn write_hosts(f: &mut fmt::Formatter<'_>, name: &str, hosts: &BTreeSet<IpAddr>) -> fmt::Result {
    for (version, kind) in [(4, "ipv4_addr"), (6, "ipv6_addr")] {
        writeln!(f, "  set {name}_v{version} {{")?;
        writeln!(f, "    type {kind};")?;
        let hosts = hosts.iter().filter(|host| host.is_ipv4() == (version == 4));
        write_elements(f, hosts.map(IpAddr::to_string))?;
        writeln!(f, "  }}")?;
    }
    Ok(())
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
