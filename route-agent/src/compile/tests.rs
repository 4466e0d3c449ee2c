use std::collections::BTreeMap;

use fabric_api::fabric::{NodeConfig, NodeConfigSpec, NodePeering, RefusedPrefix};
use netlink::ForeignRoute;
use netplan::{Address, plan};

use super::*;

/// Without refused prefixes.
fn compile(config: &NodeConfigSpec, host_state: &HostState) -> Compiled {
    let config = NodeConfig::new("rome-1", config.clone());
    super::compile(&ParsedConfig::parse(&config), host_state, &BTreeSet::new())
}

#[test]
fn peering_has_one_route_and_backstop_per_prefix() {
    let compiled = compile(&config(vec![peering()]), &host_state());
    assert_eq!(compiled.problems, BTreeSet::new());
    assert_eq!(
        commands(&compiled),
        "\
ip route replace unreachable 10.70.0.9/32 table 18952 metric 1024 proto 119
ip route replace unreachable 10.201.0.0/16 table 18952 metric 4096 proto 119
ip -6 route replace unreachable fd00:70::9/128 table 18952 metric 1024 proto 119
ip route replace unreachable 10.201.0.0/16 table 18953 metric 4096 proto 119
ip link add weft4 up mtu 1450 address 0e:77:0a:50:00:05 addrgenmode none type vxlan id 18952 dstport 4879 nolearning
sysctl -w net/ipv4/conf/weft4/drop_unicast_in_l2_multicast=1
sysctl -w net/ipv4/conf/weft4/forwarding=1
sysctl -w net/ipv4/conf/weft4/rp_filter=2
sysctl -w net/ipv6/conf/weft4/accept_ra=0
sysctl -w net/ipv6/conf/weft4/disable_ipv6=0
sysctl -w net/ipv6/conf/weft4/drop_unicast_in_l2_multicast=1
sysctl -w net/ipv6/conf/weft4/forwarding=1
bridge fdb replace 0e:77:0a:50:00:07 dev weft4 self permanent dst 192.0.2.7
ip neigh replace 10.80.0.7 lladdr 0e:77:0a:50:00:07 dev weft4 nud permanent
ip neigh replace fd77:6566:7400::a50:7 lladdr 0e:77:0a:50:00:07 dev weft4 nud permanent
ip route replace 10.80.0.7/32 dev weft4 table 18952 metric 1024 proto 119 src 192.0.2.5
ip route replace 10.201.0.0/16 via 10.80.0.7 dev weft4 onlink table 18952 metric 1024 proto 119 src 192.0.2.5 mtu 1340
ip -6 route replace fd77:6566:7400::a50:7/128 dev weft4 table 18952 metric 1024 proto 119 src 2001:db8::5
ip rule add from all to 10.200.1.0/24 iif weft4 lookup 254 suppress_prefixlength 0 priority 103 proto 119
ip rule add from all to 10.200.1.0/24 iif weft4 unreachable priority 104 proto 119
ip rule add from all lookup 18952 priority 105 proto 119
ip -6 rule add from all lookup 18952 priority 105 proto 119
ip rule add from all lookup 18953 priority 32765 proto 119
ip -6 rule add from all lookup 18953 priority 32765 proto 119
"
    );
}

#[test]
fn address_without_carrier_is_a_problem() {
    let mut host_state = host_state();
    host_state.carriers.extend([("eth0".to_owned(), false), ("eth1".to_owned(), false)]);
    let problems = compile(&config(vec![peering()]), &host_state).problems;
    let [problem] = &Vec::from_iter(problems)[..] else { panic!() };
    assert!(
        problem.starts_with("eth0, which has this node's address, is down or has no carrier"),
        "{problem}"
    );
}

#[test]
fn lost_tunnel_keeps_route_and_refuses_new() {
    let lost = NodePeering { connected: false, ..peering() };
    let compiled = compile(&config(vec![lost]), &host_state());
    let connected = compile(&config(vec![peering()]), &host_state());
    assert_eq!(compiled.state, connected.state);
    assert_eq!(compiled.firewall.unconnected, [cidr("10.201.0.0/16")].into());
    assert_eq!(connected.firewall.unconnected, BTreeSet::new());
}

#[test]
fn a_lost_gateway_refuses_its_own_peer_only() {
    let turin = NodePeering {
        peer_cluster_id: "turin".to_owned(),
        prefixes: vec!["10.202.0.0/16".to_owned()],
        ..peering()
    };
    let config = config(vec![peering(), turin]);
    let whole = compile(&config, &host_state());
    let mut compiled = whole.clone();
    let config = NodeConfig::new("rome-1", config);
    compiled.refuse(&ParsedConfig::parse(&config), &["milan".to_owned()].into());
    assert_eq!(compiled.firewall.unconnected, [cidr("10.201.0.0/16")].into());
    assert_eq!(compiled.state, whole.state, "routes stay");
}

#[test]
fn without_a_gateway_only_the_backstop_is_there() {
    let waiting = NodePeering { gateway: None, ..peering() };
    let compiled = compile(&config(vec![waiting]), &host_state());
    let to_peer = |key: &&RouteKey| key.to == cidr("10.201.0.0/16");
    let routes: Vec<_> = compiled.state.routes.keys().filter(to_peer).collect();
    let backstop = |table| RouteKey::backstop(table, cidr("10.201.0.0/16"));
    assert_eq!(routes, [&backstop(TABLE), &backstop(BACKSTOP_TABLE)]);
    assert_eq!(compiled.firewall.unconnected, [cidr("10.201.0.0/16")].into());
}

/// A VXLAN packet to a gateway that leaves by another way is answered by an error that quotes it.
#[test]
fn overlay_addresses_are_kept_in_by_both_tables() {
    let internal_cidr = Some("10.80.0.0/16".to_owned());
    let config = NodeConfigSpec { internal_cidr, ..config(vec![peering()]) };
    let compiled = compile(&config, &host_state());
    for table in [TABLE, BACKSTOP_TABLE] {
        let key = RouteKey::overlay_backstop(table, cidr("10.80.0.0/16"));
        assert_eq!(compiled.state.routes.get(&key), Some(&Route::unreachable(PROTOCOL)));
    }
}

#[test]
fn prefix_over_node_network_alone_is_refused() {
    for (prefix, why) in [
        ("192.0.0.0/16", "the node's own network 192.0.2.0/24 on eth0"),
        ("192.0.2.128/25", "the node's own network 192.0.2.0/24 on eth0"),
        ("0.0.0.0/0", "the cluster's own pods 10.200.0.0/16"),
        ("10.80.0.0/16", "the address 10.80.0.7, which the overlay runs on"),
        ("10.200.0.0/15", "the cluster's own pods 10.200.0.0/16"),
    ] {
        let both = vec![prefix.to_owned(), "10.203.0.0/16".to_owned()];
        let peering = NodePeering { prefixes: both, ..peering() };
        let compiled = compile(&config(vec![peering]), &host_state());
        let conflicts = compiled.conflicts.iter().map(|of| &of.problem);
        let problems: Vec<_> = compiled.problems.iter().chain(conflicts).collect();
        let [problem] = &*problems else { panic!("{problems:?}") };
        assert!(problem.contains(&format!("would cover {why}")), "{problem}");
        assert_eq!(compiled.firewall.peers, [cidr("10.203.0.0/16")].into());
        assert!(compiled.state.routes.keys().all(|key| key.to.to_string() != prefix));
        let is_of_node = !why.contains("own pods");
        let kept: BTreeSet<Cidr> = is_of_node.then(|| cidr(prefix)).into_iter().collect();
        assert_eq!(compiled.firewall.conflicts, kept);
    }
}

/// With a route of that network's, pods' packets are dropped, and without one they go to the peer.
#[test]
fn prefix_in_a_network_of_the_node_is_reported() {
    let mut host_state = host_state();
    let address = Address { address: "10.201.0.1".parse().unwrap(), len: 8, dev: "br9".to_owned() };
    host_state.addresses.push(address);
    let compiled = compile(&config(vec![peering()]), &host_state);
    assert!(compiled.conflicts.is_empty(), "no route leads there");
    host_state.routes.push(ForeignRoute {
        table: MAIN_TABLE,
        to: cidr("10.0.0.0/8"),
        metric: 0,
        kind: "",
        gateway: None,
        dev: Some("br9".to_owned()),
        protocol: 2,
    });
    let compiled = compile(&config(vec![peering()]), &host_state);
    let [conflict] = &*compiled.conflicts else { panic!("{:?}", compiled.conflicts) };
    assert_eq!(conflict.prefixes, [cidr("10.201.0.0/16")]);
    assert!(conflict.problem.contains("lies in the node's own network 10.0.0.0/8 on br9"));
    assert!(compiled.firewall.peers.contains(&cidr("10.201.0.0/16")));
    assert_eq!(compiled.firewall.own_networks, [cidr("10.201.0.0/16")].into());
    let way = RouteKey::new(TABLE, cidr("10.201.0.0/16"));
    assert!(compiled.state.routes.contains_key(&way), "{:?}", compiled.state.routes);
}

#[test]
fn prefix_of_two_peers_is_a_problem() {
    let other = NodePeering { peer_cluster_id: "turin".to_owned(), ..peering() };
    let compiled = compile(&config(vec![peering(), other]), &host_state());
    let problem = "peer turin: prefix 10.201.0.0/16 is refused: \
                   it would cover another peer's prefix 10.201.0.0/16";
    assert_eq!(compiled.problems, [problem.to_owned()].into());
}

#[test]
fn a_malformed_prefix_is_a_problem_of_its_peering() {
    let peering = NodePeering { prefixes: vec!["10.201.0.7/16".to_owned()], ..peering() };
    let compiled = compile(&config(vec![peering]), &host_state());
    let problem = compiled.problems.first().unwrap();
    assert!(problem.contains("did you mean 10.201.0.0/16?"), "{problem}");
}

#[test]
fn each_malformed_prefix_of_a_node_is_a_problem() {
    let malformed = || vec!["10.200.0.7/16".to_owned()];
    let gone = ("paris", "10.99.0.7/16");
    let refused = RefusedPrefix { peer_cluster_id: gone.0.to_owned(), prefix: gone.1.to_owned() };
    let compiled = compile(
        &NodeConfigSpec {
            pod_cidrs: malformed(),
            local_pods: malformed(),
            outside_pods: malformed(),
            internal_cidr: Some("10.80.0.7/16".to_owned()),
            refused: vec![refused],
            ..config(vec![peering()])
        },
        &host_state(),
    );
    let named = |what: &str| compiled.problems.iter().any(|problem| problem.starts_with(what));
    for what in [
        "the cluster's pods 10.200.0.7/16: ",
        "the node's pods, which are masqueraded, 10.200.0.7/16: ",
        "the node's pods outside the cluster's 10.200.0.7/16: ",
        "internal CIDR 10.80.0.7/16: ",
        "prefix of a peering that is gone 10.99.0.7/16: ",
    ] {
        assert!(named(what), "{what}: {:#?}", compiled.problems);
    }
    assert_eq!(compiled.firewall.peers, [cidr("10.201.0.0/16")].into(), "peers have theirs");
}

#[test]
fn mac_addresses_are_those_of_the_config() {
    let (own, its) = ("0a:00:00:00:00:01", "0a:00:00:00:00:02");
    let mut peering = peering();
    peering.gateway.as_mut().unwrap().mac = Some(its.to_owned());
    let mut config = NodeConfigSpec { mac: Some(own.to_owned()), ..config(vec![peering]) };
    let compiled = compile(&config, &host_state());
    assert_eq!(compiled.state.links["weft4"].mac.to_string(), own);
    let fdb: Vec<_> = compiled.state.fdb.keys().map(|(_, mac)| mac.to_string()).collect();
    assert_eq!(fdb, [its]);
    assert!(compiled.state.neighbours.values().all(|mac| mac.to_string() == its));
    config.mac = Some("0a".to_owned());
    let problems = compile(&config, &host_state()).problems;
    assert!(problems.first().unwrap().starts_with("MAC address 0a of 10.80.0.5:"), "{problems:?}");
}

#[test]
fn gateway_of_this_host_is_backed_and_translated() {
    let [v4, v6] = ["10.80.0.8", "fd77:6566:7400::1:a50:8"].map(|ip| ip.parse::<IpAddr>().unwrap());
    let gateway = NodeGateway {
        overlay: [10, 80, 0, 7].into(),
        mac: None,
        underlay: v4,
        links: vec![v4, v6],
        listen_port: None,
        probe: None,
        replicas: Vec::new(),
        epoch: None,
    };
    let near = NodePeering { gateway: Some(gateway), ..peering() };
    let compiled = compile(&config(vec![near]), &host_state());
    for link in [v4, v6] {
        let keys: Vec<_> =
            compiled.state.routes.keys().filter(|key| key.to == link.into()).collect();
        assert_eq!(keys, [&RouteKey::overlay_backstop(TABLE, link.into())]);
    }
    let rules = compiled.firewall.to_string();
    for rule in [
        "udp dport 4879 ip daddr 192.0.2.5 ip daddr set @th,128,48 map { 0x0e770a500007 : 10.80.0.8 } notrack",
        "udp dport 4879 ip6 saddr { fd77:6566:7400::1:a50:8 } ip6 saddr set 2001:db8::5",
    ] {
        assert!(rules.contains(rule), "{rules}");
    }
    assert_eq!(compiled.problems, BTreeSet::new());
}

#[test]
fn gateway_elsewhere_leaves_no_rule_for_links() {
    let rules = compile(&config(vec![peering()]), &host_state()).firewall.to_string();
    assert!(!rules.contains("chain to_gateways"), "{rules}");
}

#[test]
fn route_mtu_is_no_larger_than_the_devices() {
    let mut host_state = host_state();
    host_state.mtus.insert("eth0".to_owned(), 1400);
    let wide = NodePeering { mtu: 9000, ..peering() };
    let compiled = compile(&config(vec![wide]), &host_state);
    assert_eq!(compiled.state.links["weft4"].mtu, 1350);
    let route = &compiled.state.routes[&RouteKey::new(TABLE, cidr("10.201.0.0/16"))];
    assert_eq!(route.mtu, Some(1350));
}

#[test]
fn ipv6_route_uses_ipv6_form_of_overlay() {
    let peering = NodePeering { prefixes: vec!["fd00:201::/48".to_owned()], ..peering() };
    let commands = commands(&compile(&config(vec![peering]), &host_state()));
    let route = "ip -6 route replace fd00:201::/48 via fd77:6566:7400::a50:7 dev weft4 onlink \
                 table 18952 metric 1024 proto 119 src 2001:db8::5 mtu lock 1340";
    assert!(commands.contains(route), "{commands}");
}

#[test]
fn narrow_path_carries_ipv4_and_is_reported() {
    let prefixes = vec!["10.201.0.0/16".to_owned(), "fd00:201::/48".to_owned()];
    let peering = NodePeering { prefixes, mtu: 1200, ..peering() };
    let compiled = compile(&config(vec![peering]), &host_state());
    assert!(compiled.problems.iter().any(|p| p.contains("IPv6 needs 1280 bytes")));
    let key = |to: &str| RouteKey::new(TABLE, cidr(to));
    assert!(compiled.state.routes.contains_key(&key("10.201.0.0/16")));
    assert!(!compiled.state.routes.contains_key(&key("fd00:201::/48")));
    assert!(compiled.firewall.unconnected.contains(&cidr("fd00:201::/48")));
}

#[test]
fn narrow_device_gets_no_ipv6_and_names_it_once() {
    let mut host_state = host_state();
    host_state.mtus.insert("eth0".to_owned(), 1320);
    let narrow = compile(&config(vec![peering()]), &host_state);
    assert!(!commands(&narrow).contains("net/ipv6/conf/weft4"), "{}", commands(&narrow));
    assert!(!commands(&narrow).contains("fd77:"), "{}", commands(&narrow));
    assert_eq!(narrow.problems, BTreeSet::new(), "IPv4 needs less");
    let prefixes = vec!["10.201.0.0/16".to_owned(), "fd00:201::/48".to_owned()];
    let milan = NodePeering { prefixes, ..peering() };
    let prefixes = vec!["fd00:202::/48".to_owned()];
    let oslo = NodePeering { peer_cluster_id: "oslo".to_owned(), prefixes, ..peering() };
    let config = config(vec![milan, oslo]);
    let mut without_ipv6 = config.clone();
    for cidrs in [&mut without_ipv6.pod_cidrs, &mut without_ipv6.local_pods] {
        cidrs.retain(|cidr| !cidr.contains(':'));
    }
    without_ipv6.external.retain(IpAddr::is_ipv4);
    let silent = compile(&without_ipv6, &host_state);
    assert_eq!(silent.problems, BTreeSet::new(), "nobody here sends any");
    let narrow = compile(&config, &host_state);
    let problem = "the MTU of eth0 is 1320 bytes, and pods' IPv6 over VXLAN needs 1330: IPv6 to \
                   peers is refused; raise it (`ip link set eth0 mtu 1330`, or more)";
    assert_eq!(narrow.problems, [problem.to_owned()].into());
    assert!(narrow.firewall.unconnected.contains(&cidr("fd00:202::/48")));
    assert!(!narrow.firewall.unconnected.contains(&cidr("10.201.0.0/16")));
}

#[test]
fn an_ipv6_underlay_has_a_device_of_its_own() {
    let gateway = NodeGateway {
        overlay: [10, 80, 0, 7].into(),
        mac: None,
        underlay: "2001:db8::7".parse().unwrap(),
        links: Vec::new(),
        listen_port: None,
        probe: None,
        replicas: Vec::new(),
        epoch: None,
    };
    let peering = NodePeering { gateway: Some(gateway), ..peering() };
    let compiled = compile(&config(vec![peering]), &host_state());
    let links: Vec<_> = compiled.state.links.iter().map(|(n, v)| (&**n, v.mtu)).collect();
    assert_eq!(links, [("weft6", 1430)]);
}

#[test]
fn full_masquerade_keeps_no_source() {
    let config = NodeConfigSpec { full_masquerade: true, ..config(vec![peering()]) };
    let text = compile(&config, &host_state()).firewall.to_string();
    assert!(!text.contains("jump keep"), "{text}");
    let kept = compile(&NodeConfigSpec { full_masquerade: false, ..config }, &host_state())
        .firewall
        .to_string();
    assert!(kept.contains("jump keep"), "{kept}");
}

#[test]
fn disabled_forwarding_is_a_problem() {
    let mut host_state = host_state();
    host_state.addresses.push(Address {
        dev: "cni0".to_owned(),
        address: [10, 200, 1, 1].into(),
        len: 24,
    });
    let of_device = |dev| Sysctl::of_device(Family::Ipv4, dev, "forwarding");
    // Nothing but VXLAN for the node itself comes in on eth0, and no peer has IPv6.
    let ipv6 = names::forwarding(Family::Ipv6);
    for setting in [of_device("eth0"), ipv6] {
        host_state.forwarding.insert(setting, false);
    }
    let config = config(vec![peering()]);
    assert_eq!(compile(&config, &host_state).problems, BTreeSet::new());
    for setting in [names::forwarding(Family::Ipv4), of_device("cni0")] {
        let mut host_state = host_state.clone();
        host_state.forwarding.insert(setting.clone(), false);
        let compiled = compile(&config, &host_state);
        assert_eq!(compiled.forwarding.get(&setting), Some(&false));
        let problem = format!("{} is 0: this node forwards no packets of pods", setting.name());
        assert_eq!(compiled.problems, [problem].into());
    }
    let problems = |cni0: bool| {
        let mut host_state = host_state.clone();
        host_state.forwarding.insert(names::forwarding(Family::Ipv4), false);
        for (dev, is_on) in [("cni0", cni0), ("eth0", true)] {
            host_state.forwarding.insert(of_device(dev), is_on);
        }
        compile(&config, &host_state).problems.into_iter().collect::<Vec<_>>()
    };
    let namespace = "net.ipv4.ip_forward is 0: this node forwards no packets of pods";
    assert_eq!(problems(false), [namespace], "one remedy for all devices");
    assert_eq!(problems(true), [""; 0], "devices on their own forward");
}

fn commands(compiled: &Compiled) -> String {
    plan(&State::default(), &compiled.state).iter().map(|op| format!("{op}\n")).collect()
}

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn peering() -> NodePeering {
    NodePeering {
        peer_cluster_id: "milan".to_owned(),
        prefixes: vec!["10.201.0.0/16".to_owned()],
        connected: true,
        mtu: 1340,
        gateway: Some(NodeGateway {
            overlay: [10, 80, 0, 7].into(),
            mac: None,
            underlay: [192, 0, 2, 7].into(),
            links: Vec::new(),
            listen_port: None,
            probe: None,
            replicas: Vec::new(),
            epoch: None,
        }),
    }
}

fn config(peerings: Vec<NodePeering>) -> NodeConfigSpec {
    NodeConfigSpec {
        cluster_id: "rome".to_owned(),
        overlay: Some([10, 80, 0, 5].into()),
        mac: None,
        underlay: vec![[192, 0, 2, 5].into(), "2001:db8::5".parse().unwrap()],
        declared: Vec::new(),
        local_pods: vec!["10.200.1.0/24".to_owned()],
        overlapping_pods: Vec::new(),
        outside_pods: Vec::new(),
        pod_cidrs: vec!["10.200.0.0/16".to_owned()],
        external: vec![[10, 70, 0, 9].into(), "fd00:70::9".parse().unwrap()],
        peerings,
        ips: vec![],
        internal_cidr: None,
        vxlan_sources: vec![[192, 0, 2, 7].into()],
        full_masquerade: false,
        from_records: false,
        removed: false,
        refused: Vec::new(),
        refuse_seconds: None,
    }
}

fn host_state() -> HostState {
    let address = |dev: &str, address: &str, len| Address {
        dev: dev.to_owned(),
        address: address.parse().unwrap(),
        len,
    };
    HostState {
        routes: Vec::new(),
        addresses: vec![
            address("lo", "127.0.0.1", 8),
            address("lo", "::1", 128),
            address("eth0", "192.0.2.5", 24),
            address("eth0", "2001:db8::5", 64),
            address("eth0", "fe80::5", 64),
        ],
        mtus: BTreeMap::from([("lo".to_owned(), 65536), ("eth0".to_owned(), 1500)]),
        carriers: ["lo", "eth0"].map(|dev| (dev.to_owned(), true)).into(),
        ipv6: true,
        forwarding: [Family::Ipv4, Family::Ipv6].map(|f| (names::forwarding(f), true)).into(),
    }
}
