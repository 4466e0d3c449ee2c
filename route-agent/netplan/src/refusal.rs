use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use fabric_primitives::Cidr;

use crate::firewall::{NO_ERRORS_ABOUT_VXLAN, by_length};

/// Name of the table of refused prefixes, of family `inet`.
pub const TABLE: &str = "weft_refused";

/// Name of the counter of refused packets, in this table and in the firewall's.
pub const COUNTER: &str = "refused";

/// Bound for remembered pairs of source and destination, one set a family. Once it is reached,
/// packets are refused all the same.
const MAX_SENDERS: usize = 4096;

/// nftables table that refuses prefixes no tunnel leads to any more, whole.
///
/// It stands apart from [`crate::Firewall`], needs no route and no agent, and can therefore outlive
/// both: after a peering, after the fabric, and before the network is up. Who sends is in a set
/// of the kernel's own, whose elements time out: a prefix without an element has been quiet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    pub prefixes: BTreeSet<Cidr>,
    /// Networks of the node within these: only what pods send there is refused.
    pub own_networks: BTreeSet<Cidr>,
    /// Pods of the node. Without any, whatever is forwarded counts as theirs.
    pub local_pods: BTreeSet<Cidr>,
    /// Source and destination of refused packets, and the time until the kernel drops them. An
    /// unspecified source holds a prefix to which nothing was sent yet.
    pub senders: BTreeMap<(IpAddr, IpAddr), Duration>,
}

impl Refusal {
    pub fn of(prefixes: BTreeSet<Cidr>) -> Self {
        Self { prefixes, ..Self::default() }
    }

    /// Leaves the node those of its networks that lie in a prefix. Returns false if they were left already.
    pub fn leave(
        &mut self,
        networks: impl IntoIterator<Item = Cidr>,
        pods: &BTreeSet<Cidr>,
    ) -> bool {
        let within = |network: Cidr| self.prefixes.iter().filter_map(move |of| of.and(&network));
        let own: BTreeSet<Cidr> = networks.into_iter().flat_map(within).collect();
        let pods = if own.is_empty() { BTreeSet::new() } else { pods.clone() };
        let before = (&self.own_networks, &self.local_pods);
        let is_new = before != (&own, &pods);
        (self.own_networks, self.local_pods) = (own, pods);
        is_new
    }

    /// Ends the refusal of all other prefixes.
    pub fn retain(&mut self, kept: BTreeSet<Cidr>) {
        self.prefixes = kept;
        let prefixes = &self.prefixes;
        self.senders.retain(|(_, to), _| prefixes.iter().any(|of| of.contains(*to)));
        self.own_networks.retain(|own| prefixes.iter().any(|of| of.overlaps(own)));
        if self.own_networks.is_empty() {
            self.local_pods.clear();
        }
    }

    /// Refuses a prefix, for `quiet` at least.
    pub fn hold(&mut self, prefix: Cidr, quiet: Duration) {
        self.prefixes.insert(prefix);
        self.senders.insert((unspecified(&prefix), prefix.address()), quiet);
    }

    /// Returns whether something was sent to the prefix, or it was first refused, a short while ago.
    pub fn is_held(&self, prefix: &Cidr) -> bool {
        let full = self.senders.len() >= MAX_SENDERS;
        full || self.senders.keys().any(|(_, to)| prefix.contains(*to))
    }

    pub fn is_quiet(&self) -> bool {
        !self.prefixes.iter().any(|prefix| self.is_held(prefix))
    }

    /// Sources that have sent to the prefix.
    pub fn senders_to(&self, prefix: &Cidr) -> BTreeSet<IpAddr> {
        let of = self.senders.keys().filter(|(_, to)| prefix.contains(*to));
        of.map(|(from, _)| *from).filter(|from| !from.is_unspecified()).collect()
    }

    /// Input for `nft -f`: replaces the table in one transaction. A sender is remembered for
    /// `quiet`.
    pub fn script(&self, quiet: Duration) -> String {
        format!("{}{}", Self::removal(), self.addition(quiet))
    }

    /// Input for `nft -f` that adds these prefixes to the table, or makes it.
    pub fn addition(&self, quiet: Duration) -> String {
        format!("table inet {TABLE} {{\n{}}}\n", Body { refusal: self, quiet })
    }

    /// Input for `nft -f` that takes the table away, if there is one.
    pub fn removal() -> String {
        format!("table inet {TABLE}\ndelete table inet {TABLE}\n")
    }

    /// Adds an element of a kernel set, whose name has its kind and, of networks, their length.
    pub fn add_element(&mut self, name: &str, key: &[u8], left: Duration) {
        match (name, key.len()) {
            ("senders_v4", 8) | ("senders_v6", 32) => {
                let (from, to) = key.split_at(key.len() / 2);
                if let (Some(from), Some(to)) = (address(from), address(to)) {
                    self.senders.insert((from, to), left);
                }
            }
            _ => {
                let kind = name.split('_').next().unwrap_or_default();
                let Some((_, networks)) = self.networks().into_iter().find(|(of, _)| *of == kind)
                else {
                    return;
                };
                let len = name.rsplit('_').next().and_then(|len| len.parse().ok());
                let network = address(key).zip(len);
                networks.extend(network.and_then(|(network, len)| Cidr::around(network, len)));
            }
        }
    }

    /// All networks, by the kind of their sets.
    fn networks(&mut self) -> [(&'static str, &mut BTreeSet<Cidr>); 3] {
        [
            (PREFIXES, &mut self.prefixes),
            (OWN_NETWORKS, &mut self.own_networks),
            (LOCAL_PODS, &mut self.local_pods),
        ]
    }
}

/// First parts of the names of sets.
const PREFIXES: &str = "prefixes";
const OWN_NETWORKS: &str = "own";
const LOCAL_PODS: &str = "pods";

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn unspecified(prefix: &Cidr) -> IpAddr {
    if prefix.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
}

struct Body<'a> {
    refusal: &'a Refusal,
    quiet: Duration,
}

/// Assumptions of the rules:
///
/// * The chains come right after destination NAT (-100): a Service's endpoint may be a peer's pod.
/// * Established connections are reset, too: nothing will carry them again.
/// * An error about a VXLAN packet would quote what is in it; so there is none, also while there is no other table: a
///   host whose Node is gone may still be sent some.
/// * The node's own networks within prefixes are its own: it goes on to reach them, and others do so through it.
/// * Networks are in sets, which can be read back; the set's name has their length.
impl fmt::Display for Body<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_senders(f, 4, "ipv4_addr")?;
        self.write_senders(f, 6, "ipv6_addr")?;
        let Refusal { prefixes, own_networks, local_pods, .. } = self.refusal;
        let refused = write_sets(f, (PREFIXES, prefixes), "daddr")?;
        let own = write_sets(f, (OWN_NETWORKS, own_networks), "daddr")?;
        let of_pods = write_sets(f, (LOCAL_PODS, local_pods), "saddr")?;
        write!(f, "  counter {COUNTER} {{\n  }}\n  chain refuse {{\n{}", self.remember())?;
        write!(f, "    goto deny\n  }}\n{DENY}")?;
        for (chain, hook) in [("forwarded", "prerouting"), ("own", "output")] {
            writeln!(f, "  chain {chain} {{")?;
            writeln!(f, "    type filter hook {hook} priority -91; policy accept;")?;
            for network in &own {
                if hook == "output" {
                    writeln!(f, "    {network} accept")?;
                    continue;
                }
                // Packets for the node itself never leave it.
                writeln!(f, "    {network} fib daddr type local accept")?;
                if !of_pods.is_empty() {
                    let family = |condition: &str| condition.starts_with("ip6 ");
                    let mut same = of_pods.iter().filter(|pods| family(pods) == family(network));
                    same.try_for_each(|pods| writeln!(f, "    {network} {pods} goto deny"))?;
                    writeln!(f, "    {network} accept")?;
                }
            }
            refused.iter().try_for_each(|prefix| writeln!(f, "    {prefix} goto refuse"))?;
            writeln!(f, "  }}")?;
        }
        writeln!(f, "  chain errors {{")?;
        writeln!(f, "    type filter hook postrouting priority 97; policy accept;")?;
        writeln!(f, "{NO_ERRORS_ABOUT_VXLAN}  }}")
    }
}

/// Writes networks as sets of a kind. Returns the conditions for packets with `field` (saddr, daddr) in them.
fn write_sets(
    f: &mut fmt::Formatter<'_>,
    (kind, networks): (&str, &BTreeSet<Cidr>),
    field: &str,
) -> Result<Vec<String>, fmt::Error> {
    let mut conditions = Vec::new();
    for set in by_length(networks) {
        let (version, family) = if set.is_ipv4() { ("v4", "ip") } else { ("v6", "ip6") };
        let (len, mask) = (set.len(), set.mask);
        let networks: Vec<_> = set.networks.iter().map(IpAddr::to_string).collect();
        writeln!(f, "  set {kind}_{version}_{len} {{")?;
        writeln!(f, "    type ip{version}_addr;")?;
        writeln!(f, "    elements = {{ {} }}\n  }}", networks.join(", "))?;
        conditions.push(format!("{family} {field} and {mask} @{kind}_{version}_{len}"));
    }
    Ok(conditions)
}

/// Refusal without a note of the sender: pods' packets to the node's own networks are not for the peer, and would keep
/// the prefix from being quiet.
const DENY: &str = "  chain deny {
    counter name refused
    udp dport 4879 drop
    tcp flags & rst == rst drop
    meta l4proto tcp reject with tcp reset
    reject with icmpx admin-prohibited
  }
";

impl Body<'_> {
    fn remember(&self) -> String {
        let quiet = self.quiet.as_millis().max(1);
        let of = |family, version| {
            format!(
                "    update @senders_v{version} {{ {family} saddr . {family} daddr timeout {quiet}ms }}\n"
            )
        };
        of("ip", 4) + &of("ip6", 6)
    }

    fn write_senders(&self, f: &mut fmt::Formatter<'_>, version: u8, kind: &str) -> fmt::Result {
        writeln!(f, "  set senders_v{version} {{")?;
        writeln!(f, "    type {kind} . {kind};")?;
        writeln!(f, "    size {MAX_SENDERS};\n    flags dynamic,timeout;")?;
        let quiet = self.quiet.as_millis().max(1);
        let own =
            self.refusal.senders.iter().filter(|((from, _), _)| from.is_ipv4() == (version == 4));
        // A set with more would be refused as a whole, and the prefixes with it.
        let own = own.take(MAX_SENDERS);
        let elements: Vec<_> = own
            .map(|((from, to), left)| {
                let left = left.as_millis().clamp(1, quiet);
                format!("{from} . {to} timeout {quiet}ms expires {left}ms")
            })
            .collect();
        if !elements.is_empty() {
            writeln!(f, "    elements = {{ {} }}", elements.join(", "))?;
        }
        writeln!(f, "  }}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: Duration = Duration::from_secs(300);

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn held_prefix_is_quiet_without_elements() {
        let mut refusal = Refusal::default();
        refusal.hold(cidr("10.201.0.0/16"), QUIET);
        refusal.hold(cidr("fd00:201::/48"), QUIET);
        assert!(refusal.is_held(&cidr("10.201.0.0/16")) && !refusal.is_quiet());
        assert!(refusal.senders_to(&cidr("10.201.0.0/16")).is_empty());
        refusal.senders.clear();
        assert!(refusal.is_quiet());
        let pod: IpAddr = [10, 200, 1, 2].into();
        refusal.senders.insert((pod, [10, 201, 9, 9].into()), QUIET);
        assert!(!refusal.is_held(&cidr("fd00:201::/48")));
        assert_eq!(refusal.senders_to(&cidr("10.201.0.0/16")), [pod].into());
    }

    #[test]
    fn networks_outside_of_prefixes_need_no_rules() {
        let mut refusal = Refusal::of([cidr("10.201.0.0/16"), cidr("10.202.0.0/16")].into());
        let networks = ["192.0.2.0/24", "10.201.5.0/24", "10.202.5.1/32"].map(cidr);
        let pods = BTreeSet::from([cidr("10.200.1.0/24")]);
        assert!(refusal.leave(networks, &pods));
        assert_eq!(refusal.own_networks, networks[1..].iter().copied().collect());
        assert!(!refusal.leave(networks, &pods), "nothing is new");
        refusal.retain([cidr("10.202.0.0/16")].into());
        assert_eq!(refusal.own_networks, [networks[2]].into());
        refusal.retain(BTreeSet::new());
        assert_eq!(refusal, Refusal::default());
    }

    #[test]
    fn full_sender_set_counts_as_sending() {
        let mut refusal = Refusal::of([cidr("10.202.0.0/16")].into());
        for i in 0..MAX_SENDERS as u32 {
            let from = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 200, 0, 1)) + i);
            refusal.senders.insert((from.into(), [10, 201, 0, 1].into()), QUIET);
        }
        assert!(refusal.is_held(&cidr("10.202.0.0/16")));
    }

    #[test]
    fn elements_of_sets_are_read_by_set_name() {
        let mut refusal = Refusal::default();
        refusal.add_element("prefixes_v4_16", &[10, 201, 0, 0], Duration::ZERO);
        refusal.add_element("senders_v4", &[10, 200, 1, 2, 10, 201, 0, 9], QUIET);
        refusal.add_element("unknown", &[1, 2, 3], QUIET);
        refusal.add_element("own_v4_24", &[10, 201, 5, 0], Duration::ZERO);
        refusal.add_element("pods_v4_24", &[10, 200, 1, 0], Duration::ZERO);
        assert_eq!(refusal.own_networks, [cidr("10.201.5.0/24")].into());
        assert_eq!(refusal.local_pods, [cidr("10.200.1.0/24")].into());
        assert_eq!(refusal.prefixes, [cidr("10.201.0.0/16")].into());
        let pair = ([10, 200, 1, 2].into(), [10, 201, 0, 9].into());
        assert_eq!(refusal.senders, [(pair, QUIET)].into());
    }
}
