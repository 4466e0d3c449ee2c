//! Tables of the kernel after a config, read back with iproute2 and nft.

use fabric_api::fabric::{NodeConfigSpec, NodePeering};
use serde_json::json;

use crate::node::{PEER, PEER_V6, World, config, disconnected, eventually, json, peering, sh};

#[test]
fn config_is_applied_to_kernel() {
    let world = World::running(config());
    let link = &json(&world.node, "ip -j -d link show weft4")[0];
    assert_eq!(link["mtu"], 1450);
    assert_eq!(link["address"], "0e:77:0a:50:00:05");
    assert_eq!(link["inet6_addr_gen_mode"], "none");
    let data = &link["linkinfo"]["info_data"];
    assert_eq!((&data["id"], &data["port"]), (&json!(18952), &json!(4879)));
    assert_eq!(data["learning"], false);
    let addresses = &json(&world.node, "ip -j address show weft4")[0]["addr_info"];
    assert_eq!(*addresses, json!([]));

    let neighbours = sh(&world.node, "ip neigh show dev weft4 nud permanent | sort");
    assert_eq!(
        neighbours,
        "10.80.0.7 lladdr 0e:77:0a:50:00:07 PERMANENT \n\
         fd77:6566:7400::a50:7 lladdr 0e:77:0a:50:00:07 PERMANENT \n"
    );
    let fdb = sh(&world.node, "bridge fdb show dev weft4");
    assert_eq!(fdb.trim(), "0e:77:0a:50:00:07 dst 192.0.2.7 self permanent");
    let routes = sh(&world.node, "ip route show table 18952");
    assert_eq!(
        routes,
        "unreachable 10.70.0.9 proto 119 metric 1024 \n\
         10.80.0.7 dev weft4 proto 119 scope link src 192.0.2.5 metric 1024 \n\
         10.201.0.0/16 via 10.80.0.7 dev weft4 proto 119 src 192.0.2.5 metric 1024 onlink mtu 1340 \n\
         unreachable 10.201.0.0/16 proto 119 metric 4096 \n"
    );
    for family in ["", "-6"] {
        let rules = sh(&world.node, &format!("ip {family} rule show priority 105"));
        assert_eq!(rules.trim(), "105:\tfrom all lookup 18952 proto 119");
    }
    let setting = sh(&world.node, "cat /proc/sys/net/ipv4/conf/weft4/rp_filter");
    assert_eq!(setting.trim(), "2");
    let chains = json(&world.node, "nft -j list table inet weft");
    let hooks =
        chains["nftables"].as_array().unwrap().iter().filter_map(|o| o["chain"]["hook"].as_str());
    assert_eq!(hooks.count(), 10);
}

#[test]
fn second_peering_adds_one_route_and_no_rule() {
    let world = World::running(config());
    let routes = || sh(&world.node, "ip route show table 18952").lines().count();
    let nft_rules = || sh(&world.node, "nft -a list table inet weft").matches("# handle").count();
    let before = (routes(), nft_rules());
    let other = NodePeering {
        peer_cluster_id: "turin".to_owned(),
        prefixes: vec!["10.202.0.0/16".to_owned()],
        ..peering()
    };
    world.reconfigure(NodeConfigSpec { peerings: vec![peering(), other], ..config() });
    assert_eq!((routes(), nft_rules()), (before.0 + 2, before.1));
}

#[test]
fn a_changed_config_replaces_what_changed_only() {
    let world = World::running(config());
    let index = || json(&world.node, "ip -j link show weft4")[0]["ifindex"].clone();
    let before = index();
    let mut changed = config();
    changed.overlay = Some([10, 80, 0, 6].into());
    changed.peerings[0].mtu = 1300;
    world.reconfigure(changed);
    let link = &json(&world.node, "ip -j link show weft4")[0];
    assert_eq!((&link["ifindex"], &link["address"]), (&before, &json!("0e:77:0a:50:00:06")));
    // The kernel flushes a device's neighbours when its MAC changes.
    assert_eq!(sh(&world.node, "ip neigh show dev weft4 nud permanent").lines().count(), 2);
    assert!(sh(&world.node, "ip route show table 18952").contains("mtu 1300"));
}

#[test]
fn a_device_made_by_another_gives_way() {
    let mut world = World::new();
    sh(&world.node, "ip link add weft4 type vxlan id 7 dstport 4789 local 192.0.2.5");
    world.configure(config());
    world.start(&[]);
    world.settle();
    let data = json(&world.node, "ip -j -d link show weft4")[0]["linkinfo"]["info_data"].clone();
    assert_eq!(data["id"], 18952);
    assert!(sh(&world.node, "ip route show table 18952").contains("via 10.80.0.7 dev weft4"));
}

#[test]
fn covering_prefix_is_refused_and_reported() {
    let world = World::running(config());
    let mut covering = config();
    covering.peerings[0].prefixes.push("192.0.0.0/16".to_owned());
    world.configure(covering);
    let problems = world.settle();
    let problem = "peer milan: nothing passes between this node's pods and 192.0.0.0/16: the peer's prefix \
                   192.0.0.0/16 would cover the node's own network 192.0.2.0/24 on eth0; unpeer, reserve \
                   192.0.0.0/16 once it is not refused any more (a Network with the labels \
                   ipam.liqo.io/network-type: reserved and ipam.liqo.io/network-not-remapped: \"true\"), and peer \
                   again; or give the node other addresses";
    assert_eq!(problems, [problem]);
    assert!(!sh(&world.node, "ip route show table 18952").contains("192.0.0.0"));
    assert!(sh(&world.node, "ip route show table 18952").contains("10.201.0.0/16 via"));
    let (_, status) = world.status().unwrap();
    assert_eq!(status.diversions[0].prefixes, ["192.0.0.0/16"]);
    lets_no_pod_out(&world, &["192.0.2.77", "192.0.9.9"]);
}

/// As on a LAN of one large network, of which ipam has granted a part.
#[test]
fn prefix_in_the_underlays_network_lets_nothing_out() {
    let world = World::running(config());
    sh(&world.node, "ip address add 192.0.2.5/8 dev eth0; ip address del 192.0.2.5/24 dev eth0");
    let mut within = config();
    within.peerings[0].prefixes.push("192.71.0.0/16".to_owned());
    world.configure(within);
    let problems = world.settle();
    assert!(
        problems[0]
            .contains("192.71.0.0/16 would cover the node's own network 192.0.0.0/8 on eth0"),
        "{problems:?}"
    );
    lets_no_pod_out(&world, &["192.71.0.9"]);
}

/// Packets of pods; the node's own leave, but for ARP.
fn lets_no_pod_out(world: &World, addresses: &[&str]) {
    sh(&world.node, "ip route replace default via 192.0.2.7");
    for address in addresses {
        sh(&world.node, &format!("ip neigh replace {address} lladdr 02:00:00:00:00:09 dev eth0"));
    }
    let count = |source: &str, at: i32| {
        format!(
            "chain {source} {{ type filter hook postrouting priority {at}; oifname eth0 ip daddr {{ {} }} ip saddr {} counter; }};",
            addresses.join(", "),
            if source == "node" { "192.0.2.5" } else { "!= 192.0.2.5" }
        )
    };
    let table =
        format!("nft 'table ip count {{ {} {} }}'", count("node", 200), count("others", 201));
    sh(&world.node, &table);
    for sender in [&world.node, &world.pod] {
        for address in addresses {
            sh(sender, &format!("ping -c 2 -i 0.2 -W 1 {address} || true"));
        }
    }
    let counted = sh(&world.node, "nft list table ip count | grep -o 'packets [0-9]*'");
    let expected = format!("packets {}\npackets 0\n", 2 * addresses.len());
    assert_eq!(counted, expected, "of the node, by its own address; of pods");
}

/// Nothing leads there, or other packets than those of pods only. A network without a route is no fault.
#[test]
fn network_over_a_prefix_lets_nothing_out() {
    let world = World::running(config());
    sh(&world.node, "ip route replace default via 192.0.2.7; ip link add br9 type bridge");
    let count = "nft 'table ip count { chain c { type filter hook postrouting priority 200; \
                 oifname { eth0, br9 } ip daddr 10.201.0.0/16 counter; }; }'";
    sh(&world.node, count);
    for (option, up) in [("noprefixroute", "up"), ("", "up"), ("", "down")] {
        sh(
            &world.node,
            &format!("ip link set br9 {up}; ip address add 10.201.0.1/16 dev br9 {option}"),
        );
        let has_route = (option, up) == ("", "up");
        let is_fault = || {
            let diversions =
                world.status().map(|(_, status)| status.diversions).unwrap_or_default();
            let cause = "the peer's prefix 10.201.0.0/16 lies in the node's own network 10.201.0.0/16 on br9";
            diversions.iter().any(|of| of.cause.as_deref() == Some(cause))
        };
        match has_route {
            true => eventually("it is a fault", std::time::Duration::from_secs(3), is_fault),
            false => {
                std::thread::sleep(std::time::Duration::from_secs(1));
                assert!(!is_fault(), "without a route all goes to the peer");
            }
        }
        sh(&world.pod, "ping -c 3 -i 0.2 -W 1 10.201.7.9 || true");
        sh(&world.node, "ip address del 10.201.0.1/16 dev br9");
        sh(&world.pod, "ping -c 3 -i 0.05 -W 1 10.201.7.9 || true");
        eventually("it is solved", std::time::Duration::from_secs(3), || {
            world.problems().is_empty()
        });
    }
    let counted = sh(&world.node, "nft list table ip count | grep -o 'packets [0-9]*'");
    assert_eq!(counted, "packets 0\n");
    assert!(!sh(&world.node, "ip rule").contains("102:"), "{}", sh(&world.node, "ip rule"));
}

/// One that comes later, too: without the prefix, what pods send to the peer would leave in clear.
#[test]
fn own_network_in_a_prefix_takes_its_addresses_only() {
    let world = World::running(config());
    sh(&world.node, "ip link add br9 type bridge; ip link set br9 up");
    sh(&world.node, "ip link add ve9 type veth peer name ve9p; ip link set ve9 master br9 up");
    sh(&world.node, "ip link set ve9p up; ip address add 10.201.5.1/24 dev br9");
    sh(&world.node, "ip neigh add 10.201.5.9 lladdr 02:00:00:00:00:09 dev br9");
    let count = "nft 'table ip count { chain c { type filter hook postrouting priority 200; \
                 oifname br9 ip daddr 10.201.5.9 ip saddr 10.201.5.1 counter; \
                 oifname br9 ip daddr 10.201.5.9 ip saddr != 10.201.5.1 counter; }; }'";
    sh(&world.node, count);
    let problem = "peer milan: nothing passes between this node's pods and 10.201.5.0/24: the peer's prefix \
                   10.201.0.0/16 has the node's own network 10.201.5.0/24 on br9 in it; unpeer, or give that \
                   network another address, or the peer another prefix";
    eventually("it is a fault", std::time::Duration::from_secs(3), || {
        let diversions = world.status().map(|(_, status)| status.diversions).unwrap_or_default();
        world.problems() == [problem]
            && diversions.iter().any(|of| of.prefixes == ["10.201.0.0/16"])
    });
    let way = |of: &str| sh(&world.node, &format!("ip route get {of}"));
    assert!(way("10.201.0.9").contains("via 10.80.0.7 dev weft4"), "{}", way("10.201.0.9"));
    assert!(way("10.201.5.9").contains("dev br9"), "{}", way("10.201.5.9"));
    for sender in [&world.node, &world.pod] {
        sh(sender, "ping -c 2 -i 0.2 -W 1 10.201.5.9 || true");
    }
    let counted = sh(&world.node, "nft list table ip count | grep -o 'packets [0-9]*'");
    assert_eq!(counted, "packets 2\npackets 0\n", "of the node, by its own address; of pods");
    sh(&world.node, "ip address del 10.201.5.1/24 dev br9");
    eventually("the problem is solved", std::time::Duration::from_secs(3), || {
        world.problems().is_empty() && way("10.201.5.9").contains("dev weft4")
    });
    assert!(!sh(&world.node, "ip rule").contains("102:"), "{}", sh(&world.node, "ip rule"));
}

#[test]
fn the_overlay_follows_the_mtu_of_the_underlay() {
    let world = World::running(config());
    sh(&world.node, "ip link set eth0 mtu 1400");
    eventually("weft4 has 1350", std::time::Duration::from_secs(2), || {
        json(&world.node, "ip -j link show weft4")[0]["mtu"] == 1350
    });
}

#[test]
fn narrow_underlay_has_one_problem_until_widened() {
    let world = World::running(config());
    let weft4 = |mtu| {
        eventually("weft4 follows", std::time::Duration::from_secs(2), || {
            json(&world.node, "ip -j link show weft4")[0]["mtu"] == mtu
        });
        // With every step that follows from it.
        std::thread::sleep(std::time::Duration::from_secs(1));
    };
    sh(&world.node, "ip link set eth0 mtu 1320");
    weft4(1270);
    let problem = "the MTU of eth0 is 1320 bytes, and pods' IPv6 over VXLAN needs 1330: IPv6 to \
                   peers is refused; raise it (`ip link set eth0 mtu 1330`, or more)";
    assert_eq!(world.problems(), [problem]);
    let mut ipv4 = config();
    ipv4.peerings[0].prefixes.truncate(1);
    assert_eq!((world.reconfigure(ipv4), world.problems()), ((), Vec::new()));
    world.reconfigure(config());
    sh(&world.node, "ip link set eth0 mtu 1500");
    weft4(1450);
    assert_eq!(world.problems(), Vec::<String>::new());
    sh(&world.pod, &format!("ping -6 -c 1 -W 2 {PEER_V6}"));
}

/// Linux forgets a device's IPv6 settings while its MTU is below 1280.
#[test]
fn widened_overlay_has_its_settings_again() {
    let world = World::running(config());
    let shown = || {
        let link = &json(&world.node, "ip -j -d link show weft4")[0];
        // They are gone while it is narrow.
        let settings = "cd /proc/sys/net/ipv6/conf/weft4 2>&1 && grep . accept_ra forwarding \
                        disable_ipv6 drop_unicast_in_l2_multicast || true";
        let addresses = json(&world.node, "ip -j address show weft4")[0]["addr_info"].clone();
        let routes = "ip -6 route show table 18952; ip -6 neigh show dev weft4 nud permanent";
        let mode = link["inet6_addr_gen_mode"].clone();
        let mtu = link["mtu"].clone();
        (mode, mtu, addresses, sh(&world.node, settings), sh(&world.node, routes))
    };
    let before = shown();
    for narrow in [1329, 1300, 700] {
        sh(&world.node, &format!("ip link set eth0 mtu {narrow}"));
        eventually("weft4 follows", std::time::Duration::from_secs(5), || {
            json(&world.node, "ip -j link show weft4")[0]["mtu"] == narrow - 50
        });
        sh(&world.node, "ip link set eth0 mtu 1500");
        // The host's owner gives the device its address again.
        sh(&world.node, "ip -6 address replace 2001:db8::5/64 dev eth0 nodad");
        eventually("weft4 is as it was", std::time::Duration::from_secs(5), || shown() == before);
    }
    assert_eq!(world.problems(), Vec::<String>::new());
}

#[test]
fn first_packet_too_big_names_the_routes_mtu() {
    let world = World::running(config());
    for (peer, headers) in [(PEER, 28), (PEER_V6, 48)] {
        // Larger than the device's MTU, and smaller.
        for size in [1500, 1341] {
            let ping = format!("ping -c 1 -W 1 -M do -s {} {peer} 2>&1 || true", size - headers);
            let answer = sh(&world.pod, &ping);
            let names = ["mtu=1340", "mtu = 1340"].iter().any(|mtu| answer.contains(mtu));
            assert!(names, "{size} bytes: {answer}");
            sh(&world.pod, "ip route flush cache; ip -6 route flush cache");
        }
        sh(&world.pod, &format!("ping -c 1 -W 2 -M do -s {} {peer}", 1340 - headers));
    }
}

#[test]
fn a_dry_run_prints_commands_and_does_nothing() {
    let world = World::new();
    world.configure(config());
    let before = world.dump();
    let text = world.dry_run();
    assert!(text.contains("table inet weft {"), "{text}");
    let route = "ip route replace 10.201.0.0/16 via 10.80.0.7 dev weft4 onlink table 18952 \
                 metric 1024 proto 119 src 192.0.2.5 mtu 1340";
    assert!(text.contains(route), "{text}");
    assert_eq!(world.dump(), before);
}

#[test]
fn a_dry_run_on_a_settled_node_prints_nothing() {
    let world = World::running(disconnected());
    assert_eq!(world.dry_run(), "");
}

#[test]
fn missing_nft_names_package_to_install() {
    let mut world = World::new();
    world.configure(config());
    world.start_bare();
    let problem = "cannot install the firewall table: the program nft is missing; install the \
                   package nftables";
    assert_eq!(world.settle(), [problem]);
    assert!(sh(&world.node, "ip route show table 18952").contains("10.201.0.0/16 via"));
}
