use super::*;

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}

fn rule(priority: u32, action: ForeignAction) -> ForeignRule {
    let (from, to, iif) = (None, None, None);
    let (fields, mark, is_for_sockets, is_inverted) = (String::new(), None, false, false);
    ForeignRule {
        priority,
        from,
        to,
        iif,
        fields,
        mark,
        is_for_sockets,
        is_inverted,
        action,
        protocol: 3,
    }
}

fn route(to: &str) -> ForeignRoute {
    let (gateway, dev) = (None, Some("eth0".to_owned()));
    let (table, to) = (MAIN_TABLE, cidr(to));
    ForeignRoute { table, to, metric: 0, kind: "", gateway, dev, protocol: 3 }
}

#[test]
fn rules_behind_wefts_take_nothing() {
    let lookup = ForeignAction::Lookup(254, None);
    let ours = |priority| ForeignRule { protocol: PROTOCOL, ..rule(priority, lookup.clone()) };
    let rules = [
        rule(0, ForeignAction::Lookup(255, None)),
        ours(POD_ROUTES_PRIORITY),
        rule(PRIORITY, lookup.clone()),
        ours(PRIORITY),
        rule(PRIORITY, lookup.clone()),
        rule(32766, lookup.clone()),
    ];
    assert_eq!(preceding(&rules, PRIORITY).count(), 2);
    assert_eq!(preceding(&rules, POD_ROUTES_PRIORITY).count(), 1);
}

#[test]
fn rule_takes_what_its_table_has_a_route_for() {
    let peers = [cidr("10.201.0.0/16")];
    let tables = BTreeMap::from([
        (254, vec![route("0.0.0.0/0"), route("192.0.2.0/24")]),
        (255, vec![route("127.0.0.0/8")]),
        (7, vec![route("10.201.4.0/24")]),
    ]);
    let takes = |action| !taken(&rule(50, action), peers.to_vec(), &tables).is_empty();
    assert!(takes(ForeignAction::Lookup(254, None)));
    assert!(!takes(ForeignAction::Lookup(254, Some(0))), "its default route does not count");
    assert!(!takes(ForeignAction::Lookup(255, None)));
    assert!(takes(ForeignAction::Lookup(7, Some(0))));
    assert!(takes(ForeignAction::Refuse("blackhole")) && takes(ForeignAction::Goto(32766)));
    assert!(!takes(ForeignAction::Goto(100)) && !takes(ForeignAction::Nothing));
}

/// Firewall of a node with one pod CIDR, whose underlay is eth0.
fn firewall() -> Firewall {
    Firewall {
        peers: [cidr("10.201.0.0/16")].into(),
        local_pods: [cidr("10.200.1.0/24")].into(),
        exits: ["eth0".to_owned()].into(),
        ..Firewall::default()
    }
}

#[test]
fn selectors_that_leave_peers_out_take_nothing() {
    let firewall = firewall();
    let traffic = Traffic::of(&firewall, Family::Ipv4);
    let all = rule(50, ForeignAction::Refuse("blackhole"));
    let takes = |rule: ForeignRule| !traffic.destinations(&rule).is_empty();
    let takes_from = |rule: ForeignRule| !traffic.senders(&rule).is_empty();
    let (lo, weft4) = (Some("lo".to_owned()), Some("weft4".to_owned()));
    assert!(takes(all.clone()));
    assert!(takes(ForeignRule { to: Some(cidr("10.0.0.0/8")), ..all.clone() }));
    assert!(!takes(ForeignRule { to: Some(cidr("10.9.0.0/16")), ..all.clone() }));
    assert!(takes(ForeignRule { from: Some(cidr("10.200.1.7/32")), ..all.clone() }));
    assert!(!takes(ForeignRule { from: Some(cidr("192.0.2.5/32")), ..all.clone() }));
    assert!(!takes(ForeignRule { iif: lo, ..all.clone() }));
    assert!(!takes(ForeignRule { iif: weft4.clone(), ..all.clone() }));
    assert!(takes(ForeignRule { fields: "ipproto icmp".to_owned(), ..all.clone() }));
    assert!(!takes(ForeignRule { is_for_sockets: true, ..all.clone() }));
    assert!(takes_from(ForeignRule { iif: weft4, ..all.clone() }));
    let from = Some(cidr("10.200.1.0/24"));
    assert!(!takes_from(ForeignRule { from, ..all }));
}

#[test]
fn cni_table_that_leads_to_pods_takes_nothing() {
    let firewall = firewall();
    let traffic = Traffic::of(&firewall, Family::Ipv4);
    let by = |to: &str, dev: &str| ForeignRoute { dev: Some(dev.to_owned()), ..route(to) };
    let throw = ForeignRoute { kind: "throw", ..route("10.200.0.0/16") };
    let main = |pods: &[ForeignRoute]| [&[route("0.0.0.0/0")], pods].concat();
    let takes = |own: &[ForeignRoute], pods: &[ForeignRoute], table, suppressed| {
        let tables = BTreeMap::from([(7, own.to_vec()), (MAIN_TABLE, main(pods))]);
        traffic.takes_from_peers(&rule(50, ForeignAction::Lookup(table, suppressed)), &tables)
    };
    let (default, cni0) = (by("0.0.0.0/0", "wan"), by("10.200.1.0/24", "cni0"));
    let bridge = std::slice::from_ref(&cni0);
    let own = std::slice::from_ref(&default);
    assert!(takes(own, bridge, 7, None));
    assert!(!takes(own, bridge, 7, Some(0)));
    assert!(!takes(&[default.clone(), cni0.clone()], &[], 7, None), "a CNI's own table");
    assert!(!takes(&[default.clone(), throw], bridge, 7, None));
    assert!(takes(&[by("10.200.1.0/24", "eth0")], bridge, 7, None));
    assert!(takes(&[by("10.200.1.0/25", "dummy0")], bridge, 7, None), "main has another way");
    assert!(takes(&[default, by("10.200.1.2/32", "veth1")], &[], 7, None), "no pod's address");
    assert!(!takes(&[], bridge, MAIN_TABLE, None));
    let pod = by("10.200.1.2/32", "veth1");
    assert!(takes(&[], std::slice::from_ref(&pod), MAIN_TABLE, None), "no pod's address");
    let to_pod = ForeignRule {
        to: Some(cidr("10.200.1.2/32")),
        ..rule(20, ForeignAction::Lookup(MAIN_TABLE, None))
    };
    let tables = BTreeMap::from([(MAIN_TABLE, main(&[pod]))]);
    assert!(!traffic.takes_from_peers(&to_pod, &tables), "Cilium's rule of a pod");
}

#[test]
fn remedies_are_commands() {
    let to = Some(cidr("10.201.0.0/16"));
    let found = ForeignRule { to, ..rule(50, ForeignAction::Lookup(254, None)) };
    let taken = || Taken { to: vec![cidr("10.201.0.0/16")], from: Vec::new() };
    let problem = foreign_rule(&found, Family::Ipv4, taken()).problem;
    assert!(problem.contains("`ip rule del priority 50 to 10.201.0.0/16 table 254`"), "{problem}");
    let (fields, mark) = ("ipproto icmp".to_owned(), Some(Mark { value: 1, mask: 0xff }));
    let found = ForeignRule { fields, mark, ..found };
    let problem = foreign_rule(&found, Family::Ipv4, taken()).problem;
    assert!(problem.contains("takes a part of the packets to 10.201.0.0/16"), "{problem}");
    let command =
        "`ip rule del priority 50 to 10.201.0.0/16 fwmark 0x1/0xff ipproto icmp table 254`";
    assert!(problem.contains(command), "{problem}");
    let found = ForeignRoute { metric: 1024, ..route("fd00:201::/64") };
    let problem = foreign_route(&found, Family::Ipv6, &[]).problem;
    let command = "`ip -6 route del fd00:201::/64 dev eth0 metric 1024 table 18952`";
    assert!(problem.contains(command), "{problem}");
}

#[test]
fn route_in_the_local_table_is_the_one_to_remove() {
    let routes = [route("127.0.0.0/8"), route("10.201.4.0/24")];
    let found = local_route(&routes, Family::Ipv4, vec![cidr("10.201.0.0/16")]);
    assert_eq!(found.removal, "ip route del 10.201.4.0/24 table local");
    assert!(found.problem.contains("takes packets to 10.201.0.0/16"), "{}", found.problem);
}

#[test]
fn route_takes_prefixes_that_hold_it() {
    let peers = [cidr("10.201.0.0/16"), cidr("10.202.0.0/16")];
    let takes = |to: &str| foreign_route(&route(to), Family::Ipv4, &peers).prefixes;
    assert_eq!(takes("10.201.4.0/24"), [peers[0]]);
    assert_eq!(takes("10.202.0.0/16"), [peers[1]]);
    assert_eq!(takes("0.0.0.0/0"), [], "weft's own is longer");
}

#[test]
fn inverted_rule_takes_what_its_selectors_leave_out() {
    let firewall = firewall();
    let traffic = Traffic::of(&firewall, Family::Ipv4);
    let not = |rule: ForeignRule| ForeignRule { is_inverted: true, ..rule };
    let all = not(rule(50, ForeignAction::Refuse("blackhole")));
    let takes = |rule: ForeignRule| !traffic.destinations(&rule).is_empty();
    let to = |to: &str| ForeignRule { to: Some(cidr(to)), ..all.clone() };
    assert!(takes(to("10.9.0.0/16")) && takes(to("10.201.4.0/24")));
    assert!(!takes(to("10.0.0.0/8")) && !takes(all.clone()));
    let mark = Some(Mark { value: 0x20_0000, mask: 0x20_0000 });
    assert!(takes(ForeignRule { mark, ..all.clone() }), "Calico's, of WireGuard");
    assert!(takes(ForeignRule { is_for_sockets: true, ..all.clone() }));
    let from = Some(cidr("10.200.0.0/16"));
    assert!(!takes(ForeignRule { from, ..all.clone() }));
    assert!(takes(ForeignRule { from, fields: "tos 0x10".to_owned(), ..all }));
}

#[test]
fn only_marks_of_others_are_known() {
    let marked = |value, mask| ForeignRule {
        mark: Some(Mark { value, mask }),
        ..rule(50, ForeignAction::Lookup(MAIN_TABLE, None))
    };
    let known = [
        (0x4000, 0x4000),
        (0x8000, u32::MAX),
        (0x200, 0xf00),
        (0x80000, 0xff0000),
        (1 << 28, 1 << 28),
    ];
    assert!(known.into_iter().all(|(value, mask)| is_known_mark(&marked(value, mask))));
    assert!(!is_known_mark(&marked(7, 0xff)) && is_about_marks(&marked(7, 0xff)));
    let to = ForeignRule { to: Some(cidr("10.201.0.0/16")), ..marked(0x4000, 0x4000) };
    assert!(!is_known_mark(&to) && !is_about_marks(&to));
    let not = ForeignRule { is_inverted: true, ..marked(0x200, 0xf00) };
    assert!(!is_about_marks(&not), "unmarked packets are taken");
}
