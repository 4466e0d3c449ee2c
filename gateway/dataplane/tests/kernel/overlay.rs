//! Kernel state that the overlay makes, read back with other people's tools.
//!
//! ```text
//!   host: under0 192.0.2.1/24 -- weft-test0000 | eth0 (pod) ... VXLAN sockets
//!                                                       overlay4, tunnel (inner namespace)
//! ```

use std::time::Duration;

use gateway_config::desired::Desired;
use gateway_dataplane::overlay::{Applied, Filter, Overlay, Peer};
use lane::Offloads;

use crate::world::{config, in_new_namespace, run, run_in};

const HOST_END: &str = "weft-test0000";

#[test]
fn first_pass_reaches_goal_second_does_nothing() {
    in_new_namespace(|| async {
        host_with_underlay();
        let overlay = Overlay::new(Some(HOST_END.to_owned())).await.unwrap();
        let first = apply(&overlay).await;
        assert_eq!(first.problems, [FORWARD_OFF]);
        assert_eq!(first.mtu.bytes, 1340);
        let _tun = first.new_tun.expect("a TUN");

        let inner = |line: &str| run_in(overlay.inner(), line);
        let link = inner("ip -d link show overlay4");
        for part in [
            "vxlan id 18952",
            "dstport 4879",
            "nolearning",
            // The checksum of a packet that the host translates could not be corrected.
            "noudpcsum",
            "mtu 1450",
            "0e:77:0a:50:00:09",
            "addrgenmode none",
            "link-netnsid",
        ] {
            assert!(link.contains(part), "{part} is not in {link}");
        }
        assert!(inner("ip link show tunnel").contains("mtu 1340"));
        assert_eq!(
            lines(&inner("ip route show table 18952")),
            [
                "unreachable default proto 120 metric 4096",
                "10.71.0.0/16 dev tunnel proto 120 scope link metric 1024",
                "10.201.0.0/16 dev tunnel proto 120 scope link metric 1024",
                "169.254.18.1 dev tunnel proto 120 scope link metric 1024",
            ]
        );
        assert_eq!(
            lines(&inner("ip route show table 18953")),
            [
                "unreachable default proto 120 metric 4096",
                "10.200.1.0/24 via 10.80.0.1 dev overlay4 proto 120 metric 1024 onlink",
                "10.200.2.0/24 via 10.80.0.2 dev overlay4 proto 120 metric 1024 onlink",
                "192.168.7.7 via 10.80.0.2 dev overlay4 proto 120 metric 1024 onlink",
            ]
        );
        let v6 = inner("ip -6 route show table 18953");
        assert!(v6.contains("fd20:2::/64 via fd77:6566:7400::a50:2 dev overlay4"), "{v6}");
        assert_eq!(lines(&inner("ip route show table main")), [] as [&str; 0], "no way out");
        assert!(!inner("ip -6 route show table main").contains("default"));
        for rule in [
            "from all iif overlay4 lookup 18952",
            "from all iif tunnel lookup 18953",
            "from all iif lo lookup 18954",
        ] {
            assert!(
                inner("ip rule").contains(rule) && inner("ip -6 rule").contains(rule),
                "{rule}"
            );
        }
        let fdb = inner("bridge fdb show dev overlay4");
        assert!(
            fdb.contains("0e:77:0a:50:00:02 dst 192.0.2.2 link-netnsid 0 self permanent"),
            "{fdb}"
        );
        assert_eq!(inner("sysctl -n net.ipv4.ip_forward").trim(), "1");

        let second = apply(&overlay).await;
        assert!(second.steps.is_empty(), "{:?}", second.steps);
        assert!(second.new_tun.is_none());
    });
}

#[test]
fn host_route_to_pod_lives_with_its_gateway() {
    in_new_namespace(|| async {
        host_with_underlay();
        run("sysctl -qw net.ipv6.conf.default.disable_ipv6=1");
        // Left by one that was killed.
        run("ip link add weft-test0000 type veth peer name weft-test0001");
        let overlay = Overlay::new(Some(HOST_END.to_owned())).await.unwrap();
        let applied = apply(&overlay).await;
        assert_eq!(
            lines(&run("ip route show table 18952")),
            ["10.80.0.10 dev weft-test0000 proto 120 scope link src 192.0.2.1 metric 1024"]
        );
        assert_eq!(applied.problems, [FORWARD_OFF], "although IPv6 is off on new devices");
        assert!(run("ip neigh show dev weft-test0000").contains("10.80.0.10 lladdr"));
        assert_eq!(run("ip -o address show dev weft-test0000"), "");
        run("ip rule add from all lookup 18952 priority 105");
        run("ping -c 1 -W 2 10.80.0.10");
        drop(applied);
        overlay.remove().await.unwrap();
        assert_eq!(run("ip route show table 18952").trim(), "");
        assert!(!run("ip link").contains("weft-"));
    });
}

#[test]
fn the_refusal_of_packets_comes_goes_and_heals() {
    in_new_namespace(|| async {
        host_with_underlay();
        let overlay = Overlay::new(Some(HOST_END.to_owned())).await.unwrap();
        let mut refusal = Filter::refusal(overlay.inner().clone()).unwrap();
        let rules = || run_in(overlay.inner(), "nft list ruleset");
        refusal.ensure(true).await.unwrap();
        let refusing = rules();
        assert!(refusing.contains("reject with tcp reset"), "{refusing}");
        for damage in ["nft delete table inet weft", "nft flush chain inet weft refuse"] {
            while tokio::time::timeout(Duration::from_millis(300), refusal.changed()).await.is_ok()
            {
            }
            run_in(overlay.inner(), damage);
            let noticed = tokio::time::timeout(Duration::from_secs(2), refusal.changed()).await;
            assert!(noticed.is_ok(), "{damage} was not noticed");
            refusal.ensure(true).await.unwrap();
            assert_eq!(rules(), refusing, "{damage}");
        }
        refusal.ensure(false).await.unwrap();
        assert_eq!(rules(), "");
    });
}

#[test]
fn deleted_device_is_recreated_on_event() {
    in_new_namespace(|| async {
        host_with_underlay();
        let mut overlay = Overlay::new(Some(HOST_END.to_owned())).await.unwrap();
        let mut tun = apply(&overlay).await.new_tun;
        settle(&mut overlay).await;
        for damage in [
            "ip link del overlay4",
            "ip route del 10.201.0.0/16 table 18952",
            "ip rule del priority 105 iif tunnel",
            "ip neigh del 10.80.0.2 dev overlay4",
            "ip link del tunnel",
        ] {
            run_in(overlay.inner(), damage);
            notice(&mut overlay, damage).await;
            let applied = apply(&overlay).await;
            assert!(!applied.steps.is_empty(), "{damage}");
            tun = applied.new_tun.or(tun);
            assert_eq!(apply(&overlay).await.steps, [], "{damage}");
            settle(&mut overlay).await;
        }
        run("ip link del weft-test0000");
        notice(&mut overlay, "the link to the host").await;
        apply(&overlay).await;
        assert!(run("ip link").contains(HOST_END));
        assert_eq!(apply(&overlay).await.steps, []);
        drop(tun);
    });
}

#[test]
fn mtu_follows_underlay_and_path() {
    in_new_namespace(|| async {
        host_with_underlay();
        let overlay = Overlay::new(Some(HOST_END.to_owned())).await.unwrap();
        let mut config = config();
        config.spec.mtu = 9000;
        let desired = Desired::parse(&config).unwrap();
        let mtu = async |path_mtu| {
            let peer = Peer { address: "192.0.2.20:7".parse().unwrap(), path_mtu };
            let applied = overlay.apply(&desired, Some(peer), Offloads::ALL).await.unwrap();
            (applied.mtu.bytes, applied.new_tun)
        };
        let (first, _tun) = mtu(None).await;
        assert_eq!(first, 1440);
        assert_eq!(mtu(Some(1450)).await.0, 1390);
        assert!(run_in(overlay.inner(), "ip link show tunnel").contains("mtu 1390"));
        run("ip link set under0 mtu 1400");
        assert_eq!(mtu(None).await.0, 1340);
        assert!(run_in(overlay.inner(), "ip link show overlay4").contains("mtu 1350"));
    });
}

const FORWARD_OFF: &str =
    "net.ipv4.ip_forward is 0 on this host, so other nodes cannot reach the gateway; set it to 1";

fn host_with_underlay() {
    run("ip link set lo up");
    run("ip link add under0 type veth peer name under1");
    run("ip link set under1 up");
    run("ip address add 192.0.2.1/24 dev under0");
    run("ip link set under0 up");
}

async fn apply(overlay: &Overlay) -> Applied {
    let desired = Desired::parse(&config()).unwrap();
    overlay.apply(&desired, None, Offloads::ALL).await.unwrap()
}

/// Until no notification of our own changes is outstanding.
async fn settle(overlay: &mut Overlay) {
    while tokio::time::timeout(Duration::from_millis(300), overlay.changed()).await.is_ok() {}
}

async fn notice(overlay: &mut Overlay, what: &str) {
    let noticed = tokio::time::timeout(Duration::from_secs(2), overlay.changed()).await;
    noticed.unwrap_or_else(|_| panic!("{what} was not noticed"));
}

/// The printed lines, without the blanks at their ends.
fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect()
}
