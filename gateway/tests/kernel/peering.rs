//! Two gateways, each a process on its own host, both clusters with pod CIDR 10.200.0.0/16.
//!
//! ```text
//!  host rome                                              host milan
//!  lo 10.200.1.5 (a pod)                                  lo 10.200.1.5 (a pod)
//!  node4 ==VXLAN== weft-xxxxxxxx | gateway                gateway | weft-xxxxxxxx ==VXLAN== node4
//!  wire 192.0.2.1 ------------------WireGuard------------------ wire 192.0.2.2
//! ```
//!
//! The node's side, which is the route-agent's business, is made by hand in `side`.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fabric_api::Mac;
use fabric_api::networking::ConnectionValue;

use crate::side::{ATTEMPTS, POD, POD6, SEEN_AS, SEEN_AS6, at_once, in_two_hosts, ping, reaches};
use crate::world::run_in;

#[test]
fn same_pod_cidrs_reach_each_other_over_restarts() {
    in_two_hosts(|rome, milan| {
        let (mut client, server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        for side in [rome, milan] {
            let metrics = side.metrics();
            assert!(reaches(side), "{metrics}");
            let connected = side.metric("liqo_peer_is_connected{driver=\"wireguard\"");
            assert!(connected.ends_with("} 1"), "{connected}");
        }
        assert_eq!(rome.status().applied_generation, 1);
        assert_eq!(rome.status().problems, [] as [&str; 0]);
        assert_eq!(milan.status().mtu, 1340);
        assert!(milan.status().peer_endpoint.unwrap().starts_with("192.0.2.1:"));
        let latency = rome.connection().unwrap().latency.unwrap();
        assert!(latency.value.ends_with('s') && latency.timestamp.is_some(), "{latency:?}");

        // The server, killed, remembers its client and begins by itself. How soon is measured elsewhere.
        drop(server);
        let _server = milan.start();
        let since = Instant::now();
        while !reaches(rome) {
            assert!(since.elapsed() < Duration::from_secs(10), "no way back after a restart");
        }

        // An edit is applied without disturbing the session.
        let handshakes = rome.metric("weft_gateway_handshakes_total{outcome=\"completed\"}");
        let mut edited = rome.config.clone();
        edited.spec.mtu = 1300;
        at_once(rome.store.put(&edited.into())).unwrap();
        rome.until("the new MTU", || rome.status().mtu == 1300);
        assert_eq!(rome.status().applied_generation, 2);
        assert!(reaches(rome));
        assert_eq!(rome.metric("weft_gateway_handshakes_total{outcome=\"completed\"}"), handshakes);

        // A clean stop reports that the connection is gone, and leaves nothing on the host.
        client.stop();
        assert_eq!(rome.connection().unwrap().value, ConnectionValue::Connecting);
        assert!(!run_in(&rome.netns, "ip link").contains("weft-"));
        milan.wait_for(ConnectionValue::Error);
    });
}

#[test]
fn restarted_client_first_tries_where_server_moved() {
    in_two_hosts(|rome, milan| {
        let (client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        let readdress = |[from, to]: [u8; 2]| {
            run_in(&milan.netns, &format!("ip address del 192.0.2.{from}/24 dev wire"));
            run_in(&milan.netns, &format!("ip address add 192.0.2.{to}/24 dev wire"));
        };
        readdress([2, 3]);
        let is_found_at = |address: &str| {
            let status = rome.status();
            status.configured_endpoint == rome.config.spec.endpoint
                && status.peer_endpoint.is_some_and(|at| at.starts_with(address))
        };
        rome.until("the server elsewhere", || is_found_at("192.0.2.3:"));
        drop(client);
        let client = rome.start();
        rome.until("the server where it moved", || {
            let is_up = UnixStream::connect(rome.socket()).is_ok();
            is_up && rome.metric("liqo_peer_is_connected").ends_with("} 1")
        });

        // It may have moved back meanwhile: the first way is given up after two initiations.
        drop(client);
        readdress([3, 2]);
        let _client = rome.start();
        rome.until("the server at spec.endpoint", || is_found_at("192.0.2.2:"));
        assert!(rome.status().last_initiation.is_some());

        let mut edited = rome.config.clone();
        edited.spec.endpoint.as_mut().unwrap().addresses = vec!["192.0.2.9".to_owned()];
        at_once(rome.store.put(&edited.into())).unwrap();
        rome.until("a server that this did not find", || {
            let status = rome.status();
            status.applied_generation == 2 && status.configured_endpoint.is_none()
        });
    });
}

#[test]
fn peer_without_the_key_any_more_announces_it() {
    in_two_hosts(|rome, milan| {
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        let mut edited = milan.config.clone();
        edited.spec.peer_public_key = None;
        at_once(milan.store.put(&edited.into())).unwrap();
        rome.until("the reason", || {
            rome.status().faults.iter().any(|fault| fault.reason == "PeeringRemoved")
        });
    });
}

#[test]
fn cut_refuses_at_once_and_recovers() {
    in_two_hosts(|rome, milan| {
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        run_in(&milan.netns, "ip link set wire down");
        rome.wait_for(ConnectionValue::Error);
        milan.wait_for(ConnectionValue::Error);
        assert_eq!(rome.connection().unwrap().latency.unwrap().value, "N/A");
        rome.until("a refusal", || ping(rome, POD, SEEN_AS).contains("filtered"));
        run_in(&milan.netns, "ip link set wire up");
        run_in(&milan.netns, "ip -6 address replace 2001:db8::2/64 dev wire nodad");
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        assert!(reaches(rome) && reaches(milan));
    });
}

#[test]
fn client_searches_successor_of_ended_server() {
    in_two_hosts(|rome, milan| {
        let (mut client, mut server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        let (before, port) = (rome.metric(ATTEMPTS), rome.status().listen_port);
        server.stop();
        let since = Instant::now();
        while rome.metric(ATTEMPTS) == before {
            // Without a report of departure, after three probes.
            assert!(since.elapsed() < Duration::from_secs(2), "nobody is asked");
            std::thread::sleep(Duration::from_millis(20));
        }
        // Where nobody is, the next question comes from elsewhere.
        rome.until("another way", || rome.status().listen_port != port);

        let _server = milan.start();
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        let before = milan.metric(ATTEMPTS);
        client.stop();
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(milan.metric(ATTEMPTS), before);
    });
}

#[test]
fn ipv6_works_inside_and_outside() {
    in_two_hosts(|rome, milan| {
        for (side, i) in [(rome, 1), (milan, 2)] {
            let mut config = side.config.clone();
            config.spec.nodes[0].underlay = format!("2001:db8::{i}").parse().unwrap();
            if let Some(endpoint) = &mut config.spec.endpoint {
                endpoint.addresses = vec!["2001:db8::2".to_owned()];
            }
            at_once(side.store.put(&config.into())).unwrap();
            let gateway = Mac::of_overlay(Ipv4Addr::new(10, 80, 0, 9));
            let (pod, next_hop) = (POD6, "fd77:6566:7400::a50:9");
            run_in(&side.netns, "ip link del node4");
            for line in [
                format!("ip -6 address add {pod}/128 dev lo"),
                format!(
                    "ip link add node6 type vxlan id 18952 dstport 4879 nolearning local 2001:db8::{i}"
                ),
                format!(
                    "ip link set node6 address {} up",
                    Mac::of_overlay(Ipv4Addr::new(10, 80, 0, i))
                ),
                format!("bridge fdb add {gateway} dev node6 self dst fd77:6566:7400::a50:a"),
                format!("ip -6 neigh add {next_hop} lladdr {gateway} dev node6 nud permanent"),
                "ip -6 rule add from all lookup 18952 priority 105".to_owned(),
                format!("ip -6 route add fd21::/16 via {next_hop} dev node6 onlink table 18952"),
            ] {
                run_in(&side.netns, &line);
            }
        }
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        assert!(milan.status().peer_endpoint.unwrap().starts_with("[2001:db8::1]:"));
        for side in [rome, milan] {
            let answer = ping(side, POD6, SEEN_AS6);
            assert!(answer.contains("1 received"), "{answer} {}", side.metrics());
        }
    });
}

#[test]
fn only_right_mac_reaches_peer_or_gateway() {
    in_two_hosts(|rome, milan| {
        let mut config = rome.config.clone();
        let own = Mac::of_uid("nobody knows");
        config.spec.overlay.mac = Some(own.to_string());
        at_once(rome.store.put(&config.into())).unwrap();
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        for line in [
            "ip route add 10.80.0.9 dev node4 table 18952",
            // Whatever the MAC address.
            "bridge fdb append 00:00:00:00:00:00 dev node4 self dst 10.80.0.10",
        ] {
            run_in(&rome.netns, line);
        }
        let guessed = Mac::of_overlay(Ipv4Addr::new(10, 80, 0, 9));
        for (mac, is_its) in [(guessed, false), (Mac([0xff; 6]), false), (own, true)] {
            let line = format!("ip neigh replace 10.80.0.9 lladdr {mac} dev node4 nud permanent");
            run_in(&rome.netns, &line);
            assert_eq!(reaches(rome), is_its, "to {mac}");
            let answer = ping(rome, POD, "10.80.0.9");
            assert_eq!(answer.contains("1 received"), is_its, "to {mac}: {answer}");
        }
    });
}

#[test]
fn handshake_decides_without_probing() {
    in_two_hosts(|rome, milan| {
        for side in [rome, milan] {
            let mut config = side.config.clone();
            config.spec.probe.enabled = false;
            at_once(side.store.put(&config.into())).unwrap();
        }
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        assert_eq!(rome.connection().unwrap().latency.unwrap().value, "N/A");
        assert!(reaches(rome) && reaches(milan));
    });
}

#[test]
fn wrong_config_is_reported_and_old_one_stays() {
    in_two_hosts(|rome, milan| {
        let (_client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        let mut wrong = rome.config.clone();
        wrong.spec.pod_cidrs = vec!["10.200.0.1/16".to_owned()];
        at_once(rome.store.put(&wrong.into())).unwrap();
        rome.until("the problem", || {
            rome.status().problems == ["spec.podCidrs[0]: 10.200.0.1/16 has host bits set; did you mean 10.200.0.0/16?"]
        });
        assert_eq!(rome.status().applied_generation, 1);
        assert!(reaches(rome));
    });
}

#[test]
fn gateway_without_keys_is_idle_and_names_missing() {
    in_two_hosts(|rome, _| {
        let mut config = rome.config.clone();
        config.spec.secret_name = "nowhere".to_owned();
        config.spec.peer_public_key = None;
        at_once(rome.store.put(&config.into())).unwrap();
        let _gateway = rome.start();
        let missing = "Secret nowhere does not exist";
        let says_so = |problems: &[String]| matches!(problems, [one] if one.starts_with(missing));
        rome.until("the problem", || says_so(&rome.status().problems));
        rome.until("readiness", || rome.is_ready());
        assert!(rome.http("/metrics").contains("openmetrics-text"));
        assert_eq!(rome.connection(), None);
    });
}
