//! Against the real kernel, in namespaces that nothing but this process holds.

// Helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::net::{IpAddr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use fabric_primitives::{Cidr, Mac};
use netlink::{Handle, NetlinkError, Netns, Scope, conntrack, legacy_rules, nft};
use netplan::{
    Address, Device, Family, NextHop, Route, RouteKey, Rule, RuleAction, State, Sysctl, Via, Vxlan,
    plan,
};

#[tokio::test]
async fn applied_state_equals_observed_state() {
    let handle = Handle::open(&Netns::unnamed().unwrap()).unwrap();
    let want = node();
    let scope = scope(&want);
    let have = handle.observe(&scope).await.unwrap();
    assert_eq!(failures(handle.apply(&plan(&have, &want)).await), "");
    let have = handle.observe(&scope).await.unwrap();
    assert_eq!(have, want);

    assert_eq!(failures(handle.apply(&plan(&have, &State::default())).await), "");
    let left = handle.observe(&scope).await.unwrap();
    // Settings of the namespace and devices of others are not undone.
    let sysctls = [(Sysctl::of_namespace("net/ipv4/ip_forward"), 1)].into();
    assert_eq!(left, State { devices: want.devices, sysctls, ..State::default() });
}

#[tokio::test]
async fn route_changes_in_place_between_next_hops() {
    let handle = Handle::open(&Netns::unnamed().unwrap()).unwrap();
    let mut want = node();
    let scope = scope(&want);
    failures(handle.apply(&plan(&State::default(), &want)).await);
    for to in ["10.201.0.0/16", "fd00:201::/48"] {
        let key = RouteKey::new(7, cidr(to));
        let via = ip(if key.to.is_ipv4() { "10.80.0.8" } else { "fd77::8" });
        for route in [
            Route::unreachable(119),
            Route::onlink(via, "weft4", 119).with_mtu(1300),
            Route::dev("weft4", 119),
            Route::unreachable(119),
            Route::dev("weft4", 119),
            Route::onlink(via, "weft4", 119),
        ] {
            want.routes.insert(key, route);
            let have = handle.observe(&scope).await.unwrap();
            let steps = plan(&have, &want);
            assert_eq!(steps.len(), 1, "{steps:?}");
            assert_eq!(failures(handle.apply(&steps).await), "");
            assert_eq!(handle.observe(&scope).await.unwrap(), want);
        }
    }
}

#[tokio::test]
async fn address_without_local_route_is_added_anew() {
    let netns = Netns::unnamed().unwrap();
    let handle = Handle::open(&netns).unwrap();
    let want = node();
    let scope = scope(&want);
    failures(handle.apply(&plan(&State::default(), &want)).await);
    let mut events = handle.events(&scope).unwrap();
    for (family, address) in [("-4", "10.80.0.5"), ("-6", "fd77::5")] {
        sh(&netns, &format!("ip {family} route flush table local"));
        let notified = tokio::time::timeout(Duration::from_secs(2), events.changed()).await;
        notified.expect("a lost local route is notified").unwrap();
        // Routes and neighbours that the kernel flushes with an IPv4 address are restored by the
        // next plan.
        for _ in 0..2 {
            let have = handle.observe(&scope).await.unwrap();
            assert_eq!(failures(handle.apply(&plan(&have, &want)).await), "");
        }
        assert_eq!(handle.observe(&scope).await.unwrap(), want);
        let route = sh(&netns, &format!("ip {family} route show table local {address}"));
        assert!(route.contains("dev weft4"), "{route}");
        while tokio::time::timeout(Duration::from_millis(300), events.changed()).await.is_ok() {}
    }
}

#[tokio::test]
async fn device_moves_here_and_keeps_its_socket() {
    let [here, there] = [(); 2].map(|()| Netns::unnamed().unwrap());
    let handle = Handle::open(&here).unwrap().over(Handle::open(&there).unwrap());
    let mut want = node();
    want.links.get_mut("weft4").unwrap().elsewhere = true;
    let scope = scope(&want);
    for _ in 0..2 {
        let have = handle.observe(&scope).await.unwrap();
        assert_eq!(failures(handle.apply(&plan(&have, &want)).await), "");
        assert_eq!(handle.observe(&scope).await.unwrap(), want);
        assert_eq!(sh(&there, "ip -o link | wc -l").trim(), "1");
        assert!(sh(&there, "cat /proc/thread-self/net/udp").contains(":130F"));
        assert!(!sh(&here, "cat /proc/thread-self/net/udp").contains(":130F"));
        // Once more after it was lost.
        sh(&here, "ip link del weft4");
    }
}

#[tokio::test]
async fn failed_step_does_not_stop_the_others() {
    let handle = Handle::open(&Netns::unnamed().unwrap()).unwrap();
    let mut want = node();
    // Without an underlay to make it in.
    want.links.get_mut("weft4").unwrap().elsewhere = true;
    let failures = handle.apply(&plan(&State::default(), &want)).await;
    assert!(failures.iter().any(|f| matches!(f.source, NetlinkError::NoUnderlay(_))));
    let have = handle.observe(&scope(&want)).await.unwrap();
    assert_eq!(have.rules, want.rules);
}

#[tokio::test]
async fn veth_pair_joins_namespaces() {
    let [here, there] = [(); 2].map(|()| Netns::unnamed().unwrap());
    let handle = Handle::open(&here).unwrap();
    handle.add_veth("host0", "eth0", &there).await.unwrap();
    sh(&there, "ip address add 192.0.2.2/24 dev eth0; ip link set eth0 up");
    sh(
        &here,
        "ip address add 192.0.2.1/24 dev host0; ip link set host0 up mtu 1400
        ip route add 198.51.100.0/24 via 192.0.2.2 mtu 1300
        ip route add unreachable 203.0.113.0/24",
    );
    let near = handle.route_to(ip("192.0.2.2")).await.unwrap().unwrap();
    assert_eq!((&*near.dev, near.mtu, near.gateway), ("host0", 1400, None));
    assert_eq!(near.source, Some(ip("192.0.2.1")));
    let far = handle.route_to(ip("198.51.100.1")).await.unwrap().unwrap();
    assert_eq!((far.mtu, far.gateway), (1300, Some(ip("192.0.2.2"))));
    assert!(handle.route_to(ip("192.0.2.1")).await.unwrap().unwrap().local);
    assert_eq!(handle.route_to(ip("203.0.113.1")).await.unwrap(), None);
    assert_eq!(handle.route_to(ip("8.8.8.8")).await.unwrap(), None);

    let link = handle.link("host0").await.unwrap().unwrap();
    assert_eq!((link.mtu, link.up), (1400, true));
    let own = Address { dev: "host0".to_owned(), address: ip("192.0.2.1"), len: 24 };
    assert!(handle.addresses().await.unwrap().contains(&own));
    handle.delete_link("host0").await.unwrap();
    handle.delete_link("host0").await.unwrap();
    assert_eq!(handle.link("host0").await.unwrap(), None);
}

#[tokio::test]
async fn events_report_own_objects_only() {
    let netns = Netns::unnamed().unwrap();
    let handle = Handle::open(&netns).unwrap();
    let want = node();
    failures(handle.apply(&plan(&State::default(), &want)).await);
    sh(
        &netns,
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.weft4.rp_filter=1
        ip link set lo up; ip link add other type veth peer name far; ip link set other up",
    );
    let mut events = handle.events(&scope(&want)).unwrap();
    let mut has_event =
        async || tokio::time::timeout(Duration::from_millis(300), events.changed()).await.is_ok();
    for foreign in [
        "ip route add 10.9.0.0/16 dev lo table 9",
        "ip route add 10.9.0.0/16 dev weft4 table 7 proto 44",
        "ip rule add priority 9 lookup 9",
        "ip neigh add 192.0.2.1 lladdr 0e:77:0a:50:00:09 dev other",
        "ip neigh add 10.80.0.9 lladdr 0e:77:0a:50:00:09 dev weft4 nud reachable",
        "ip link add new type veth peer name newer; ip link set new up",
        "sysctl -qw net.ipv4.conf.other.forwarding=0 net.ipv6.conf.other.forwarding=1",
    ] {
        sh(&netns, foreign);
        assert!(!has_event().await, "{foreign}");
    }
    for ours in [
        "ip route del 10.201.0.0/16 table 7",
        "ip rule del priority 105",
        "ip neigh replace 10.80.0.7 lladdr 0e:77:0a:50:00:09 dev weft4",
        "ip neigh del 10.80.0.7 dev weft4",
        "bridge fdb replace 0e:77:0a:50:00:07 dev weft4 dst 192.0.2.99 self",
        "bridge fdb del 0e:77:0a:50:00:07 dev weft4 dst 192.0.2.99 self",
        "ip link set new mtu 1400",
        "sysctl -qw net.ipv4.ip_forward=0",
        "sysctl -qw net.ipv6.conf.all.forwarding=1",
        "sysctl -qw net.ipv4.conf.weft4.rp_filter=2",
        "sysctl -qw net.ipv4.conf.weft4.forwarding=1",
        "ip link set weft4 mtu 1300",
        "ip link del weft4",
    ] {
        sh(&netns, ours);
        assert!(has_event().await, "{ours}");
    }
    assert!(!has_event().await);
}

#[tokio::test]
async fn routes_over_other_devices_are_not_ours() {
    let netns = Netns::unnamed().unwrap();
    let handle = Handle::open(&netns).unwrap();
    sh(
        &netns,
        "ip link add one type veth peer name two; ip link set one up; ip link set two up
        ip route add 10.1.0.0/16 dev one table 7 proto 119
        ip route add 10.2.0.0/16 dev two table 7 proto 119",
    );
    let scope = Scope { routes_of: Some("one".to_owned()), ..scope(&State::default()) };
    let scope = Scope { devices: ["one".to_owned()].into(), ..scope };
    let routes = handle.observe(&scope).await.unwrap().routes;
    assert_eq!(routes.keys().map(|key| key.to).collect::<Vec<_>>(), [cidr("10.1.0.0/16")]);
    let mut events = handle.events(&scope).unwrap();
    let mut has_event =
        async || tokio::time::timeout(Duration::from_millis(300), events.changed()).await.is_ok();
    sh(&netns, "ip route del 10.2.0.0/16 table 7");
    assert!(!has_event().await, "a route over another device");
    sh(&netns, "ip route del 10.1.0.0/16 table 7");
    assert!(has_event().await);
}

#[test]
fn altered_table_differs_from_installed_one() {
    let netns = Netns::unnamed().unwrap();
    assert_eq!(nft::table(&netns, "t").unwrap(), None);
    let script = "table inet t\ndelete table inet t\ntable inet t { comment \"mark\"
        set s { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }
        chain c { type filter hook input priority 0; ip saddr @s drop comment \"hi\"; }
        }";
    nft::run(&netns, script).unwrap();
    let before = nft::table(&netns, "t").unwrap().unwrap();
    assert_eq!(before.mark.as_deref(), Some("mark"));
    assert_eq!(nft::table(&netns, "t").unwrap().as_ref(), Some(&before));
    let chains = nft::base_chains(&netns).unwrap();
    let rules = nft::chain_rules(&netns, &chains[0].chain, nft::Tracked::New).unwrap();
    assert_eq!(rules[0].comment.as_deref(), Some("hi"));
    for alteration in [
        "add element inet t s { 192.0.2.1 }",
        "delete element inet t s { 192.0.2.1 }; add rule inet t c accept",
        "add chain inet t d",
    ] {
        sh(&netns, &format!("nft '{alteration}'"));
        assert_ne!(nft::table(&netns, "t").unwrap().as_ref(), Some(&before), "{alteration}");
    }
    let error = nft::run(&netns, "add rule inet t nowhere accept").unwrap_err();
    assert!(error.to_string().starts_with("nft refuses: "), "{error}");
}

#[test]
fn legacy_rules_differ_by_more_than_counters() {
    let netns = Netns::unnamed().unwrap();
    let digest = || legacy_rules::digest(&netns).unwrap().0;
    let mut before = digest();
    for command in [
        "iptables-legacy -A FORWARD -d 10.201.0.0/16 -j DROP",
        "iptables-legacy -R FORWARD 1 -d 10.202.0.0/16 -j DROP",
        "iptables-legacy -t mangle -A PREROUTING -i lo -m mark --mark 7 -j ACCEPT",
        "ip6tables-legacy -P INPUT DROP",
        "ip6tables-legacy -t raw -A PREROUTING -p udp --dport 7 -m comment --comment a -j CT --notrack",
        "iptables-legacy -F FORWARD",
    ] {
        sh(&netns, command);
        let now = digest();
        assert_ne!(now, before, "{command}");
        before = now;
    }
    sh(&netns, "ip link set lo up");
    sh(&netns, "iptables-legacy -t mangle -A PREROUTING -i lo");
    before = digest();
    sh(&netns, "ping -q -c 2 -i 0.01 127.0.0.1");
    assert!(sh(&netns, "iptables-legacy-save -t mangle -c").contains("[4:"));
    assert_eq!(digest(), before, "packets were counted");
}

#[test]
fn conntrack_entries_are_deleted_by_filter() {
    let netns = Netns::unnamed().unwrap();
    sh(
        &netns,
        "ip link set lo up
        nft 'add table inet t; add chain inet t c { type filter hook output priority 0; }
             add rule inet t c ct state new accept'",
    );
    for to in ["127.0.0.1", "127.0.0.2", "::1"] {
        let any = if to.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
        let socket = netns.run(|| UdpSocket::bind(any)).unwrap().unwrap();
        socket.send_to(b"hi", (to, 9)).unwrap();
    }
    let delete = |to: &str| {
        let to = ip(to);
        conntrack::delete_stale(&netns, |flow| flow.original.destination == to).unwrap()
    };
    assert_eq!((delete("127.0.0.2"), delete("127.0.0.2")), (1, 0));
    assert_eq!((delete("::1"), delete("127.0.0.1")), (1, 1));
}

#[test]
fn work_in_a_namespace_leaves_the_caller_where_it_was() {
    let [own, other] = [Netns::current().unwrap(), Netns::unnamed().unwrap()];
    assert!(!other.is_current());
    assert!(other.run(|| other.is_current()).unwrap());
    assert!(own.is_current());
    assert_eq!(sh(&other, "ip -o link | wc -l").trim(), "1");
}

/// All kinds of things at once.
fn node() -> State {
    let [weft4, weft6] = ["weft4", "weft6"].map(str::to_owned);
    let mac = Mac::of_overlay([10, 80, 0, 7].into());
    let vxlan = |family| Vxlan {
        vni: 18952,
        port: 4879,
        family,
        elsewhere: false,
        checksum: family == Family::Ipv6,
        mtu: 1430,
        mac: Mac::of_overlay([10, 80, 0, 5].into()),
        up: true,
    };
    let rule = |family, iif: Option<&str>| {
        let iif = iif.map(str::to_owned);
        let action = RuleAction::Lookup(7);
        Rule { priority: 105, family, iif, to: None, action, protocol: 119 }
    };
    let of_pods = |priority, pods: &str, action| {
        let (iif, to) = (Some("weft4".to_owned()), cidr(pods));
        let family = Family::of_prefix(&to);
        Rule { priority, family, iif, to: Some(to), action, protocol: 119 }
    };
    let address = |ip: IpAddr| {
        let len = if ip.is_ipv4() { 32 } else { 128 };
        Address { dev: weft4.clone(), address: ip, len }
    };
    State {
        links: [(weft4.clone(), vxlan(Family::Ipv4)), (weft6.clone(), vxlan(Family::Ipv6))].into(),
        devices: [("lo".to_owned(), Device { mtu: 65536, up: false })].into(),
        addresses: ["10.80.0.5", "fd77::5"].map(|a| address(ip(a))).into(),
        neighbours: ["10.80.0.7", "fd77::7"].map(|a| ((weft4.clone(), ip(a)), mac)).into(),
        fdb: [((weft4.clone(), mac), ip("192.0.2.7")), ((weft6, mac), ip("2001:db8::7"))].into(),
        routes: routes(&weft4),
        rules: [
            rule(Family::Ipv4, None),
            rule(Family::Ipv6, None),
            rule(Family::Ipv4, Some("tunnel")),
            of_pods(32764, "10.200.1.0/24", RuleAction::LookupSpecific(254)),
            of_pods(32765, "10.200.1.0/24", RuleAction::Unreachable),
            of_pods(32764, "fd00:200::/64", RuleAction::LookupSpecific(254)),
            of_pods(32765, "fd00:200::/64", RuleAction::Unreachable),
        ]
        .into(),
        sysctls: [
            (Sysctl::of_namespace("net/ipv4/ip_forward"), 1),
            (Sysctl::of_device(Family::Ipv4, "weft4", "rp_filter"), 2),
        ]
        .into(),
    }
}

fn routes(dev: &str) -> std::collections::BTreeMap<RouteKey, Route> {
    let (v4, v6) = (cidr("10.201.0.0/16"), cidr("fd00:201::/48"));
    let via = Via { gateway: ip("10.80.0.7"), dev: dev.to_owned(), onlink: true };
    let via = Route { hop: NextHop::Via(via), ..Route::unreachable(119) };
    [
        (RouteKey::new(7, v4), via.with_mtu(1340).with_source(ip("10.80.0.5"))),
        (RouteKey::backstop(7, v4), Route::unreachable(119)),
        (RouteKey::new(7, cidr("0.0.0.0/0")), Route::unreachable(119)),
        (RouteKey::new(7, v6), Route::onlink(ip("fd77::7"), dev, 119).with_mtu(1340)),
        (RouteKey::backstop(7, v6), Route::unreachable(119)),
        (RouteKey::new(7, cidr("::/0")), Route::unreachable(119)),
        (RouteKey::new(7, cidr("10.80.0.7/32")), Route::dev(dev, 119)),
    ]
    .into()
}

fn scope(want: &State) -> Scope {
    Scope {
        links: want.links.keys().cloned().collect(),
        devices: want.devices.keys().cloned().collect(),
        tables: [7].into(),
        protocol: 119,
        routes_of: None,
        last_rule: None,
        sysctls: want.sysctls.keys().cloned().collect(),
    }
}

/// Failures as text.
fn failures(failures: Vec<netlink::Failure>) -> String {
    failures.iter().map(|f| format!("{f}: {}\n", f.source)).collect()
}

fn sh(netns: &Netns, script: &str) -> String {
    let run = || Command::new("sh").args(["-ec", script]).output().unwrap();
    let output = netns.run(run).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn cidr(text: &str) -> Cidr {
    text.parse().unwrap()
}
