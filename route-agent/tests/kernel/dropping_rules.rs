//! Rules of others that drop packets between pods and peers, or translate them, while an agent runs. See `node`
//! for the topology.

use crate::node::{eventually, sh};
use crate::policy::{SOON, guarded};

/// Rules of others, each with what it takes.
const DROPS: [(&str, &str); 95] = [
    ("iptables-nft -I FORWARD -d 10.201.0.0/16 -j DROP", "the peers' prefix 10.201.0.0/16"),
    ("iptables-nft -I FORWARD -s 10.201.4.0/22 -j REJECT", "the peers' prefix 10.201.0.0/16"),
    ("iptables-legacy -I FORWARD -d 10.201.0.0/16 -i pod0 -j DROP", "prefix 10.201.0.0/16"),
    ("iptables-legacy -I FORWARD -o weft4 -j REJECT", "packets of the overlay"),
    ("iptables-legacy -I INPUT -i eth0 -p udp --dport 4879 -j DROP", "UDP port 4879 (VXLAN)"),
    ("iptables-nft -I INPUT -p udp --dport 4879 -j DROP", "UDP port 4879 (VXLAN)"),
    ("nft insert rule inet f c oifname weft4 counter drop", "packets of the overlay"),
    ("nft insert rule inet f c ip6 daddr fd00:201::/32 reject", "prefix fd00:201::/32"),
    ("nft insert rule inet f in udp dport 4879 drop", "UDP port 4879 (VXLAN)"),
    ("nft insert rule inet f in udp dport 4800-4900 drop", "UDP port 4879 (VXLAN)"),
    ("nft insert rule inet f in udp dport { 53, 4800-4879 } drop", "UDP port 4879 (VXLAN)"),
    ("nft insert rule inet f in udp dport '>=' 4879 drop", "UDP port 4879 (VXLAN)"),
    ("iptables-nft -I INPUT -p udp --dport 4800:4900 -j DROP", "UDP port 4879 (VXLAN)"),
    ("iptables-legacy -I INPUT -p udp --dport :4879 -j DROP", "UDP port 4879 (VXLAN)"),
    (
        "iptables-nft -I INPUT -p udp -m multiport --dports 53,4800:4900 -j DROP",
        "UDP port 4879 (VXLAN)",
    ),
    (
        "iptables-nft -I INPUT -p udp -m multiport --dports 4800:4878,4879,9 -j DROP",
        "UDP port 4879 (VXLAN)",
    ),
    (
        "iptables-legacy -I INPUT -p udp -m multiport --dports 4879,4900:5000 -j REJECT",
        "UDP port 4879 (VXLAN)",
    ),
    (
        "iptables-legacy -t nat -I PREROUTING -p udp --dport 4800:4900 -j DNAT --to 10.200.1.5",
        "VXLAN) another dest",
    ),
    ("nft insert rule inet f c ip saddr 10.200.1.0/24 oifname weft4 drop", OF_PODS),
    ("nft insert rule inet f c iifname pod0 oifname != pod0 drop", OF_PODS),
    ("nft insert rule inet f c ip daddr 10.200.0.0/16 iifname weft4 drop", OF_PODS),
    ("iptables-nft -I FORWARD -s 10.200.1.0/24 -o weft+ -j DROP", OF_PODS),
    ("iptables-legacy -I FORWARD -s 10.200.0.0/16 ! -d 10.200.0.0/16 -j REJECT", OF_PODS),
    ("nft add rule inet f c ct state new drop", OF_PODS),
    ("nft insert rule inet f c ct state established,new drop", OF_PODS),
    ("nft insert rule inet f c ct state != established drop", OF_PODS),
    ("nft insert rule inet f c ct direction original drop", OF_PODS),
    ("nft insert rule inet f c ct state established drop", OF_PODS),
    ("nft insert rule inet f c ct state != { new, invalid } drop", OF_PODS),
    ("iptables-legacy -I FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j DROP", OF_PODS),
    ("nft insert rule inet f c ct direction reply drop", OF_PODS),
    ("nft insert rule inet f c meta nfproto ipv4 counter name n drop", OF_PODS),
    ("nft insert rule ip6 six c iifname pod0 drop", "packets between pods of fd00:200:1::/64"),
    ("nft insert rule inet f c iifname pod0 jump end", OF_PODS),
    ("nft insert rule inet f c ip saddr 10.200.1.0/24 jump end2", OF_PODS),
    ("nft insert rule inet f c ip daddr 10.201.4.0/22 jump end2", OF_PODS),
    ("nft insert rule inet f pre ip daddr 10.201.4.0/22 jump end2", OF_PODS),
    ("nft add rule netdev f ing ip daddr 10.201.0.0/16 drop", OF_PODS),
    ("nft add rule netdev f ing drop", OF_PODS),
    ("nft add rule netdev f egr ip saddr 10.201.0.0/16 counter drop", OF_PODS),
    ("nft add rule inet f dev meta protocol ip drop", OF_PODS),
    ("iptables-nft -I FORWARD -m conntrack --ctstate NEW -j DROP", OF_PODS),
    ("iptables-nft -A FORWARD -m state --state NEW,RELATED -j DROP", OF_PODS),
    ("iptables-legacy -I FORWARD -m conntrack ! --ctstate ESTABLISHED -j DROP", OF_PODS),
    ("nft insert rule inet f c ct state { new, untracked } drop", OF_PODS),
    ("nft insert rule inet f c ct state { new, related } drop", OF_PODS),
    (
        "nft insert rule inet f c ct state vmap '{ established : accept, new : drop, untracked : drop }'",
        OF_PODS,
    ),
    ("nft insert rule inet f c ip saddr { 10.200.1.0/24, 10.9.0.0/16 } drop", OF_PODS),
    ("nft insert rule inet f c ip saddr { 10.200.1.0/25, 10.200.1.128/25 } drop", OF_PODS),
    ("nft insert rule inet f c ip saddr @bad drop", OF_PODS),
    ("nft add element inet f late { 10.200.0.0/16 }", OF_PODS),
    ("nft insert rule inet f c iifname { pod0, eth9 } ct state { new } drop", OF_PODS),
    ("nft insert rule inet f raw ip saddr 10.200.1.0/24 counter drop", OF_PODS),
    ("nft insert rule inet f raw iifname pod0 drop", OF_PODS),
    ("nft insert rule inet f raw ct state invalid drop", OF_PODS),
    ("nft insert rule inet f raw drop", OF_PODS),
    ("nft insert rule inet f raw meta nfproto ipv4 jump rest", OF_PODS),
    ("nft insert rule inet f pre ip daddr 10.201.0.0/16 drop", "the peers' prefix 10.201.0.0/16"),
    ("nft insert rule inet f pre iifname pod0 ct state new drop", OF_PODS),
    ("nft insert rule inet f pre ip saddr 10.201.0.0/16 drop", "the peers' prefix 10.201.0.0/16"),
    (
        "nft insert rule inet f pre iifname weft4 ct state { new, untracked } drop",
        "packets of the overlay",
    ),
    ("nft insert rule inet f post oifname weft4 drop", "packets of the overlay"),
    (
        "nft insert rule inet f post ip daddr { 10.201.0.0/16 } drop",
        "the peers' prefix 10.201.0.0/16",
    ),
    ("iptables-nft -t raw -I PREROUTING -s 10.200.1.0/24 -j DROP", OF_PODS),
    (
        "iptables-nft -t mangle -I POSTROUTING -d 10.201.0.0/16 -j DROP",
        "the peers' prefix 10.201.0.0/16",
    ),
    ("iptables-legacy -t raw -I PREROUTING -s 10.200.1.0/24 -j DROP", OF_PODS),
    (
        "iptables-legacy -t raw -I PREROUTING -i pod0 -m conntrack --ctstate INVALID -j DROP",
        OF_PODS,
    ),
    ("iptables-legacy -t mangle -I PREROUTING -i pod0 -j DROP", OF_PODS),
    (
        "iptables-legacy -t mangle -I FORWARD -d 10.201.0.0/16 -j DROP",
        "the peers' prefix 10.201.0.0/16",
    ),
    ("iptables-legacy -t mangle -I POSTROUTING -o weft4 -j DROP", "packets of the overlay"),
    ("nft add rule netdev f eth udp dport 4879 drop", "UDP port 4879 (VXLAN)"),
    ("iptables-nft -t mangle -I OUTPUT -p udp --dport 4879 -j DROP", "UDP port 4879 (VXLAN)"),
    ("iptables-nft -t mangle -A FORWARD -i pod0 -j DROP", OF_PODS),
    ("iptables-legacy -t mangle -A FORWARD -i pod0 -j DROP", OF_PODS),
    ("nft chain inet f post '{ policy drop; }'", OF_PODS),
    ("nft chain inet f raw '{ policy drop; }'", OF_PODS),
    ("nft chain netdev f egr '{ policy drop; }'", OF_PODS),
    ("iptables-nft -t raw -P PREROUTING DROP", OF_PODS),
    ("iptables-legacy -t mangle -P POSTROUTING DROP", OF_PODS),
    ("nft insert rule inet f c meta mark != 0x2 drop", OF_PODS),
    ("nft insert rule inet f c meta mark and 0x2 == 0 drop", OF_PODS),
    ("nft insert rule inet f pre ct mark != { 0x2, 0x8 } ct state new drop", OF_PODS),
    ("nft insert rule inet f nat oifname != lo masquerade", OTHER_SOURCE),
    ("nft insert rule inet f nat ip saddr 10.200.0.0/16 snat ip to 192.0.2.5", OTHER_SOURCE),
    ("nft insert rule inet f target ip daddr 10.201.0.0/16 dnat ip to 192.0.2.9", OTHER_TARGET),
    (
        "nft insert rule inet f target dnat ip to ip daddr map '{ 10.9.0.0/16 : 192.0.2.8, 10.201.0.0/16 : 192.0.2.9 }'",
        OTHER_TARGET,
    ),
    (
        "nft insert rule inet f target dnat ip prefix to ip daddr map '{ 10.201.0.0/16 : 10.99.0.0/16 }'",
        OTHER_TARGET,
    ),
    ("nft insert rule inet f target iifname pod0 redirect", OTHER_TARGET),
    ("nft insert rule inet f target udp dport 4879 dnat ip to 10.200.1.5", "VXLAN) another dest"),
    ("iptables-nft -t nat -I PREROUTING -d 10.201.0.0/16 -j DNAT --to 192.0.2.9", OTHER_TARGET),
    ("iptables-legacy -t nat -I PREROUTING -d 10.201.0.0/16 -j DNAT --to 192.0.2.9", OTHER_TARGET),
    (
        "iptables-legacy -t nat -I PREROUTING -d 10.200.0.0/14 -j NETMAP --to 10.60.0.0/14",
        OTHER_TARGET,
    ),
    (
        "iptables-legacy -t nat -I PREROUTING -p udp --dport 4879 -j DNAT --to 10.200.1.5",
        "VXLAN) another dest",
    ),
    (
        "nft add rule inet f part ip daddr 10.201.4.0/22 iifname pod0 drop",
        "the peers' prefix 10.201.0.0/16",
    ),
    ("nft add table inet dormant", "the peers' prefix 10.201.0.0/16"),
];
const OF_PODS: &str = "packets between pods of 10.200.1.0/24 and peers";
const OTHER_TARGET: &str = "gives packets of pods to peers another destination";
const OTHER_SOURCE: &str = "gives packets of pods to peers another source";
/// Decisions about some packets, or about none of weft's.
const NO_DROPS: &str = "iptables-nft -A FORWARD -p tcp --dport 6666 -j DROP
    iptables-nft -A FORWARD -d 10.9.0.0/16 -j DROP
    iptables-nft -A FORWARD -d 10.201.0.0/16 -p tcp --dport 22 -j DROP
    iptables-nft -A FORWARD ! -d 10.200.0.0/14 -i eth7 -j DROP
    iptables-nft -A FORWARD -i eth7 -d 10.0.0.0/8 -j DROP
    iptables-legacy -A FORWARD -o eth0 -d 10.0.0.0/8 -j DROP
    iptables-nft -A INPUT -p udp --dport 4879 -m limit --limit 9/s -j DROP
    iptables-nft -A INPUT -p udp --dport 53 -j DROP
    iptables-nft -A INPUT -p udp --dport 4880:4900 -j DROP
    iptables-nft -A INPUT -p udp -m multiport --dports 53,4000:4878,4880 -j DROP
    iptables-nft -A INPUT -p udp -m multiport ! --dports 53,54 -m limit --limit 9/s -j DROP
    iptables-nft -A INPUT -p udp -m multiport --ports 4879 -m limit --limit 9/s -j DROP
    iptables-legacy -A INPUT -p udp -m multiport --dports 53,4000:4878,4880 -j DROP
    iptables-legacy -A INPUT -p udp -m multiport ! --dports 53 -s 192.0.2.99 -j DROP
    iptables-legacy -A INPUT -p udp -m udp ! --dport 53 -m limit --limit 9/s -j DROP
    nft add rule inet f in udp dport 4000-4878 drop
    nft add rule inet f in udp dport { 53, 4000-4878, 4880-4900 } drop
    nft add rule inet f in udp dport '>' 4879 drop
    nft add rule inet f in udp dport != { 4800-4900 } ip saddr 192.0.2.99 drop
    iptables-nft -A INPUT -s 192.0.2.0/24 -p udp --dport 4879 -j ACCEPT
    iptables-nft -A INPUT -p udp --dport 4879 -j DROP
    iptables-legacy -A INPUT -s 192.0.2.0/24 -j ACCEPT
    iptables-legacy -A INPUT -p udp --dport 4879 -j REJECT
    nft add rule inet f in ip saddr { 192.0.2.7, 192.0.2.9 } udp dport { 4789, 4879 } accept
    nft add rule inet f in udp dport 4879 drop
    iptables-legacy -A FORWARD ! -d 10.201.0.0/16 -i eth7 -j DROP
    iptables-legacy -A INPUT -p tcp --dport 4879 -j DROP
    nft add rule inet f c ip daddr 10.201.0.0/16 meta mark 7 drop
    nft add rule inet f c ip saddr != 10.0.0.0/8 ip daddr 192.0.2.0/24 drop
    nft add rule inet f in udp sport 4879 drop
    iptables-nft -A FORWARD ! -s 10.200.1.0/24 -i pod0 -j DROP
    iptables-nft -A FORWARD -i pod0 -o eth0 -j DROP
    iptables-legacy -A FORWARD -s 10.200.1.9/32 -j DROP
    nft add rule inet f c ip saddr 10.200.1.0/24 tcp dport 25 drop
    nft add rule inet f c iifname eth0 drop
    nft add rule inet f c ct state established,related accept
    nft add rule inet f c ct state invalid drop
    nft add rule inet f c ct state != new drop
    nft add rule inet f c ct direction reply drop
    nft add rule inet f c ct mark 0 drop
    nft add rule inet f c meta mark 0 drop
    iptables-legacy -A FORWARD -m conntrack ! --ctstate ESTABLISHED,DNAT -j DROP
    iptables-nft -A FORWARD -m conntrack --ctstate INVALID,UNTRACKED -j DROP
    iptables-legacy -A FORWARD -m conntrack ! --ctstate NEW,ESTABLISHED,RELATED -j DROP
    nft add rule inet f c ct state { established, related } accept
    nft add rule inet f c ct state vmap '{ established : accept, related : accept, invalid : drop }'
    nft add rule inet f c ct state untracked drop
    nft add rule inet f c ip saddr { 10.9.0.0/16, 10.200.1.9 } drop
    nft add rule inet f c ip saddr != { 10.0.0.0/8, 192.168.0.0/16 } drop
    nft add rule inet f c ip saddr @few drop
    nft add rule inet f c ip saddr . tcp dport { 10.200.1.0/24 . 25 } drop
    nft add rule inet f c meta nfproto ipv6 ct state invalid drop
    nft add rule inet f raw ct state { new, established } drop
    nft add rule inet f raw oifname weft4 drop
    iptables-nft -t raw -A PREROUTING -m conntrack --ctstate NEW -j DROP
    iptables-legacy -t raw -A PREROUTING -m conntrack --ctstate NEW -j DROP
    iptables-legacy -t mangle -A FORWARD -m conntrack --ctstate INVALID -j DROP
    iptables-legacy -t mangle -A PREROUTING -m mark --mark 0x7 -j DROP
    iptables-legacy -t mangle -A POSTROUTING -o eth0 -s 10.200.0.0/16 -j DROP
    iptables-legacy -t mangle -A FORWARD -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
    iptables-nft -t mangle -A FORWARD -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --set-mss 1200
    nft add rule inet f c ip saddr @none tcp dport { 80, 443 } drop
    nft add rule inet f c ip saddr @late drop
    nft add rule inet f c ip ttl != 64 drop
    nft add rule inet f c ip ttl != { 64, 128 } drop
    nft add rule inet f c ip saddr and 0.0.0.255 != 0.0.0.254 drop
    nft add rule inet f c meta mark and 0xff xor 0x2 == 0x2 drop
    nft add rule netdev f ing ip daddr 10.202.0.0/16 drop
    nft add rule netdev f ing tcp dport 25 drop
    nft add rule netdev f egr ip6 saddr fd00:201::/32 tcp sport 80 drop
    nft add rule netdev f eth ip saddr 10.0.0.0/8 drop
    nft add rule inet f dev ip6 daddr fd00:202::/32 drop
    nft add rule inet f raw iifname eth0 ip saddr { 10.0.0.0/8, 172.16.0.0/12 } drop
    nft add rule inet f raw fib saddr . iif oif missing drop
    nft add rule inet f raw ip saddr 10.9.0.0/16 drop
    nft add rule inet f raw meta mark set 5
    nft add rule inet f pre ct state invalid drop
    nft add rule inet f pre iifname eth0 drop
    nft add rule inet f pre ip daddr { 10.202.0.0/16, 192.0.2.0/28 } tcp dport 22 drop
    nft add rule inet f pre fib daddr type { broadcast, multicast } drop
    nft add rule inet f post oifname eth0 ip saddr 10.200.0.0/16 drop
    nft add rule inet f nat ip saddr 10.200.1.0/24 ip daddr 10.0.0.0/8 jump exempt
    nft add rule inet f exempt ip daddr 10.200.0.0/15 accept
    nft add rule inet f nat meta nfproto ipv4 oifname eth0 masquerade
    nft add rule inet f nat ip saddr 10.200.1.0/24 masquerade
    nft add rule inet f nat ip6 saddr fd00:200::/32 ip6 daddr fd00:201::/32 return
    nft add rule inet f nat meta nfproto ipv6 masquerade
    nft add rule inet f target iifname pod0 tcp dport 80 redirect to :8080
    nft add rule inet f target ip daddr 10.9.0.1 dnat ip to 10.200.1.9
    nft add rule inet f target ip daddr @none dnat ip to 10.200.1.9
    nft add rule inet f target dnat ip to ip daddr map '{ 10.9.0.0/16 : 192.0.2.8 }'
    iptables-nft -t nat -A PREROUTING -p tcp -j REDIRECT --to-ports 15001
    iptables-legacy -t nat -A PREROUTING -p tcp -j REDIRECT --to-ports 15001
    iptables-legacy -t nat -N DOCKER
    iptables-legacy -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
    iptables-legacy -t nat -A DOCKER ! -i docker0 -p tcp --dport 80 -j DNAT --to 172.17.0.2
    iptables-legacy -t nat -A POSTROUTING -s 10.200.0.0/16 -j MASQUERADE
    nft 'add table inet dormant { flags dormant; }; add chain inet dormant c { type filter hook forward priority 0; }'
    nft 'add chain inet f after { type filter hook forward priority 9; }'
    nft add rule inet f after ip daddr 10.201.0.0/16 accept
    nft add rule inet f after ip daddr 10.201.4.0/22 iifname pod0 drop
    nft add rule inet dormant c ip daddr 10.201.0.0/16 drop
    iptables-nft -t nat -A POSTROUTING -s 10.200.0.0/16 -j MASQUERADE";

#[test]
fn drop_of_a_peers_packets_is_named_with_its_rule() {
    let chain = |name: &str, hook: &str| {
        format!("add chain inet f {name} {{ type filter hook {hook}; }}; ")
    };
    let sets = "add counter inet f n; add set inet f none { type ipv4_addr; }; \
                add set inet f late { type ipv4_addr; flags interval; }; \
                add table ip6 six; add chain ip6 six c { type filter hook forward priority 0; }; \
                add chain inet f end; add rule inet f end counter drop; \
                add chain inet f end2; add rule inet f end2 drop; \
                add table netdev f; add chain inet f dev { type filter hook ingress device pod0 priority 0; }; \
                add chain netdev f ing { type filter hook ingress device pod0 priority 0; }; \
                add chain netdev f egr { type filter hook egress device pod0 priority 0; }; \
                add chain netdev f eth { type filter hook ingress device eth0 priority 0; }; \
                add set inet f bad { type ipv4_addr; flags interval; }; \
                add element inet f bad { 10.200.0.0/16, 192.0.2.128-192.0.2.200 }; \
                add set inet f few { type ipv4_addr; }; add element inet f few { 10.200.1.9 }; \
                add chain inet f rest; add rule inet f rest ip daddr 10.200.0.0/14 drop; ";
    let part = "add chain inet f part { type filter hook forward priority 8; }; add chain inet f some; \
                add rule inet f some ip saddr 10.200.1.9 return; \
                add rule inet f some ip daddr 10.201.0.0/16 accept; add rule inet f part jump some; ";
    let nat = "add chain inet f exempt; \
               add chain inet f target { type nat hook prerouting priority dstnat; }; \
               add chain inet f nat { type nat hook postrouting priority 90; }; ";
    let chains = chain("c", "forward priority 0")
        + &chain("in", "input priority 0")
        + &chain("raw", "prerouting priority -300")
        + &chain("pre", "prerouting priority -150")
        + &chain("post", "postrouting priority 0")
        + sets
        + part
        + nat;
    let world = guarded(&format!("nft 'add table inet f; {chains}'\n{NO_DROPS}"), &[]);
    assert_eq!(world.problems(), [""; 0]);
    for (command, taken) in DROPS {
        sh(&world.node, command);
        let mut remedy = None;
        eventually(&format!("`{command}` is named"), SOON, || {
            let problems = world.problems();
            let problem = problems.iter().find(|problem| problem.contains(taken));
            remedy = problem.and_then(|problem| Some(problem.rsplit('`').nth(1)?.to_owned()));
            remedy.is_some()
        });
        let remedy = remedy.unwrap_or_default();
        let is_certain = !["PUT", " in ", "/22", " eth ", "udp dport", "--dport"]
            .iter()
            .any(|part| command.contains(part));
        eventually(&format!("`{command}` is a fault of its peers, if certain"), SOON, || {
            let found = world.status().unwrap().1.diversions;
            let removals: Vec<_> = found.iter().map(|diversion| &diversion.removal).collect();
            removals == if is_certain { vec![&remedy] } else { Vec::new() }
        });
        sh(&world.node, &remedy);
        eventually(&format!("`{command}` is solved"), SOON, || {
            world.problems().is_empty() && world.status().unwrap().1.diversions.is_empty()
        });
    }
}

#[test]
fn drop_by_mark_is_named_unless_marks_are_set() {
    let chain =
        |name, hook| format!("add chain inet f {name} {{ type filter hook {hook} priority 0; }}");
    let chains = [chain("pre", "prerouting"), chain("c", "forward")].join("; ");
    let world = guarded(&format!("nft 'add table inet f; {chains}'"), &[]);
    for rule in ["meta mark != 0x1 drop", "ct mark 0x0 ct state new drop", "meta mark { 0 } drop"] {
        sh(&world.node, &format!("nft 'add rule inet f c {rule}'"));
        eventually(rule, SOON, || world.problems().iter().any(|p| p.contains(OF_PODS)));
        for setter in
            ["meta mark set 5", "ct mark set meta mark or 1", "meta mark set jhash ip saddr mod 4"]
        {
            sh(&world.node, &format!("nft 'add rule inet f pre {setter}'"));
            eventually(setter, SOON, || world.problems().is_empty());
            sh(&world.node, "nft flush chain inet f pre");
            eventually(rule, SOON, || world.problems().len() == 1);
        }
        sh(&world.node, "nft flush chain inet f c");
        eventually("all is solved", SOON, || world.problems().is_empty());
    }
}
