//! Two clusters, rome and milan, both with pods in 10.200.0.0/16 and external addresses in
//! 10.70.0.0/16 (fd01::/48 and fd02::/48 for IPv6). Rome sees milan's as 10.201 and 10.71, milan
//! sees rome's as 10.202 and 10.72.

use L4Checksum::{Complete, Partial};

use super::testing::*;
use super::*;
use crate::DropReason::*;

fn rome_config() -> RulesConfig {
    config(
        &["10.200.0.0/16", "10.70.0.0/16", "fd01::/48", "fd02::/48"],
        &[
            ["10.200.0.0/16", "10.201.0.0/16"],
            ["10.70.0.0/16", "10.71.0.0/16"],
            ["fd01::/48", "fd11::/48"],
            ["fd02::/48", "fd12::/48"],
        ],
    )
}

fn rome() -> Rules {
    Rules::new(&rome_config()).unwrap()
}

fn milan() -> Rules {
    let mut config = config(
        &["10.200.0.0/16", "10.70.0.0/16", "fd01::/48", "fd02::/48"],
        &[
            ["10.200.0.0/16", "10.202.0.0/16"],
            ["10.70.0.0/16", "10.72.0.0/16"],
            ["fd01::/48", "fd21::/48"],
            ["fd02::/48", "fd22::/48"],
        ],
    );
    std::mem::swap(&mut config.tunnel_address, &mut config.peer_tunnel_address);
    Rules::new(&config).unwrap()
}

fn outbound(rules: &Rules, mut packet: Vec<u8>) -> Result<Vec<u8>, DropReason> {
    rules.outbound(&mut packet, Complete).map(|()| packet)
}

fn inbound(rules: &Rules, mut packet: Vec<u8>) -> Result<Vec<u8>, DropReason> {
    rules.inbound(&mut packet, Complete).map(|()| packet)
}

fn ends(packet: &[u8]) -> (String, String) {
    (source(packet).to_string(), destination(packet).to_string())
}

fn pair(source: &str, destination: &str) -> (String, String) {
    (source.to_owned(), destination.to_owned())
}

#[test]
fn equal_pod_cidrs_reach_each_other_and_back() {
    let (rome, milan) = (rome(), milan());
    for (pod, seen, arrives_as) in [
        ("10.200.1.7", "10.201.2.9", ("10.202.1.7", "10.200.2.9")),
        ("10.70.0.3", "10.201.2.9", ("10.72.0.3", "10.200.2.9")),
        ("fd01::1:7", "fd11::2:9", ("fd21::1:7", "fd01::2:9")),
    ] {
        let request = tcp(ip(pod), ip(seen), b"hello");
        let arrived = inbound(&milan, outbound(&rome, request).unwrap()).unwrap();
        assert_eq!(ends(&arrived), pair(arrives_as.0, arrives_as.1));
        assert_valid(&arrived);

        let reply = tcp(destination(&arrived), source(&arrived), b"hello yourself");
        let arrived = inbound(&rome, outbound(&milan, reply).unwrap()).unwrap();
        assert_eq!(ends(&arrived), pair(seen, pod));
        assert_valid(&arrived);
    }
}

#[test]
fn far_icmp_error_quotes_original_packet() {
    let (rome, milan) = (rome(), milan());
    for (pod, seen, router) in
        [("10.200.1.7", "10.201.2.9", "10.70.0.9"), ("fd01::1:7", "fd11::2:9", "fd02::9")]
    {
        let sent = udp(ip(pod), ip(seen), &[5; 1300]);
        let arrived = inbound(&milan, outbound(&rome, sent.clone()).unwrap()).unwrap();
        let error = too_big(ip(router), source(&arrived), &arrived[..500]);
        let reply = inbound(&rome, outbound(&milan, error).unwrap()).unwrap();
        assert_valid(&reply);
        assert_eq!(destination(&reply), ip(pod));
        assert_eq!(embedded(&reply), &sent[..500]);
    }
}

#[test]
fn every_icmp_error_has_its_packet_translated() {
    let v4 = ("10.70.0.9", "10.201.2.9", "10.200.1.7");
    let v6 = ("fd02::9", "fd11::2:9", "fd01::1:7");
    for (router, peer, pod) in [v4, v6] {
        let about = udp(ip(peer), ip(pod), &[5; 100]);
        for kind in 0..=255 {
            let is_error = match ip(router) {
                IpAddr::V4(_) => [3, 4, 5, 11, 12].contains(&kind),
                IpAddr::V6(_) => kind < 128,
            };
            let sent = outbound(&rome(), icmp([kind, 0], ip(router), ip(peer), &about)).unwrap();
            assert_eq!(embedded(&sent) != about, is_error, "type {kind} of {router}");
            assert_valid(&sent);
        }
    }
}

#[test]
fn the_tunnels_own_addresses_pass_untouched() {
    let probe = udp(ip("169.254.18.1"), ip("169.254.18.2"), b"ping");
    let sent = outbound(&rome(), probe.clone()).unwrap();
    assert_eq!(sent, probe);
    assert_eq!(inbound(&milan(), sent), Ok(probe));
}

/// Whatever answers such a packet would send that in clear.
#[test]
fn peers_tunnel_address_reaches_only_ours() {
    for own in ["10.200.0.1", "10.70.0.1"] {
        let packet = udp(ip("169.254.18.2"), ip(own), b"ping");
        assert_eq!(inbound(&rome(), packet), Err(SourceNotAllowed), "{own}");
    }
    // An error of a stock gateway's kernel, which nobody answers.
    let sent = udp(ip("10.200.0.1"), ip("10.201.0.1"), &[5; 1300]);
    let arrived = outbound(&rome(), sent.clone()).unwrap();
    let error = too_big(ip("169.254.18.2"), source(&arrived), &arrived[..500]);
    let received = inbound(&rome(), error).unwrap();
    assert_valid(&received);
    assert_eq!(ends(&received), pair("169.254.18.2", "10.200.0.1"));
    assert_eq!(embedded(&received), &sent[..500]);
}

#[test]
fn a_source_outside_our_cidrs_does_not_leave() {
    for foreign in ["10.199.255.255", "192.168.1.1", "10.71.0.1", "169.254.18.2", "0.0.0.0"] {
        let packet = udp(ip(foreign), ip("10.201.0.1"), b"");
        assert_eq!(outbound(&rome(), packet), Err(SourceNotAllowed), "{foreign}");
    }
    let packet = tcp(ip("fd03::1"), ip("fd11::1"), b"");
    assert_eq!(outbound(&rome(), packet), Err(SourceNotAllowed));
}

#[test]
fn a_peer_may_send_only_from_its_own_and_only_to_ours() {
    for foreign in ["10.201.0.1", "10.71.0.1", "8.8.8.8", "169.254.18.1", "127.0.0.1"] {
        let packet = udp(ip(foreign), ip("10.200.0.1"), b"");
        assert_eq!(inbound(&rome(), packet), Err(SourceNotAllowed), "{foreign}");
    }
    for elsewhere in ["10.201.0.1", "169.254.18.2", "192.168.0.1", "224.0.0.1", "255.255.255.255"] {
        let packet = udp(ip("10.200.0.1"), ip(elsewhere), b"");
        assert_eq!(inbound(&rome(), packet), Err(NoDestination), "{elsewhere}");
    }
}

#[test]
fn a_destination_that_is_not_the_peers_is_refused() {
    for elsewhere in ["10.200.0.1", "10.72.0.1", "169.254.18.1", "1.1.1.1"] {
        let packet = udp(ip("10.200.0.1"), ip(elsewhere), b"");
        assert_eq!(outbound(&rome(), packet), Err(NoDestination), "{elsewhere}");
    }
}

#[test]
fn a_refused_packet_is_left_as_it_was() {
    let packet = tcp(ip("10.200.0.1"), ip("1.1.1.1"), b"");
    let mut copy = packet.clone();
    rome().outbound(&mut copy, Complete).unwrap_err();
    assert_eq!(copy, packet);
}

#[test]
fn longest_prefix_selects_source_rule() {
    let nested = config(
        &["10.200.0.0/16"],
        &[
            ["10.0.0.0/8", "172.0.0.0/8"],
            ["10.70.0.0/16", "10.71.0.0/16"],
            ["10.70.3.0/24", "10.90.3.0/24"],
            ["10.70.3.9/32", "10.99.9.9/32"],
        ],
    );
    for remaps in [nested.remaps.clone(), nested.remaps.iter().rev().copied().collect()] {
        let rules = Rules::new(&RulesConfig { remaps, ..nested.clone() }).unwrap();
        for (remote, local) in [
            ("10.1.2.3", "172.1.2.3"),
            ("10.70.2.9", "10.71.2.9"),
            ("10.70.3.8", "10.90.3.8"),
            ("10.70.3.9", "10.99.9.9"),
        ] {
            let packet = tcp(ip(remote), ip("10.200.0.1"), b"");
            assert_eq!(source(&inbound(&rules, packet).unwrap()), ip(local));
        }
    }
}

#[test]
fn an_ip_resource_is_rewritten_both_ways() {
    let mut config = rome_config();
    config.addresses = (1..=200)
        .map(|i| AddressMap {
            external: ip(&format!("10.70.9.{i}")),
            target: ip(&format!("192.168.{i}.1")),
        })
        .collect();
    let rules = Rules::new(&config).unwrap();
    let request = tcp(ip("10.200.5.5"), ip("10.70.9.77"), b"GET");
    let request = inbound(&rules, request).unwrap();
    assert_eq!(ends(&request), pair("10.201.5.5", "192.168.77.1"));
    assert_valid(&request);

    let reply = tcp(ip("192.168.77.1"), ip("10.201.5.5"), b"200");
    let reply = outbound(&rules, reply).unwrap();
    assert_eq!(ends(&reply), pair("10.70.9.77", "10.200.5.5"));

    let too_big = too_big(ip("192.168.77.1"), ip("10.201.5.5"), &request);
    let reply = outbound(&rules, too_big).unwrap();
    assert_eq!(ends(embedded(&reply)), pair("10.200.5.5", "10.70.9.77"));
    assert_valid(&reply);

    let other = tcp(ip("192.168.77.2"), ip("10.201.5.5"), b"");
    assert_eq!(outbound(&rules, other), Err(SourceNotAllowed));
}

#[test]
fn foreign_icmp_error_gets_own_address() {
    let config =
        RulesConfig { icmp_sources: vec![ip("10.70.0.2"), ip("fd02::2")], ..rome_config() };
    let rules = Rules::new(&config).unwrap();
    for (router, peer, pod, stand_in) in [
        ("192.168.0.1", "10.201.5.5", "10.200.0.1", "10.70.0.2"),
        ("169.254.18.1", "10.201.5.5", "10.200.0.1", "10.70.0.2"),
        ("2001:db8::1", "fd11::5:5", "fd01::1", "fd02::2"),
    ] {
        let about = tcp(ip(peer), ip(pod), &[0; 100]);
        let reply = outbound(&rules, too_big(ip(router), ip(peer), &about)).unwrap();
        assert_eq!(source(&reply), ip(stand_in));
        assert_valid(&reply);
        let not_an_error = echo(ip("192.168.0.1"), ip("10.201.5.5"), b"");
        assert_eq!(outbound(&rules, not_an_error), Err(SourceNotAllowed));
    }
    let about = tcp(ip("10.201.5.5"), ip("10.200.0.1"), b"");
    let without = outbound(&rome(), too_big(ip("192.168.0.1"), ip("10.201.5.5"), &about));
    assert_eq!(without, Err(SourceNotAllowed));
}

#[test]
fn an_error_inside_the_tunnel_keeps_its_source() {
    let config = RulesConfig { icmp_sources: vec![ip("10.70.0.2")], ..rome_config() };
    let rules = Rules::new(&config).unwrap();
    let about = udp(ip("169.254.18.2"), ip("169.254.18.1"), b"ping");
    let error = too_big(ip("169.254.18.1"), ip("169.254.18.2"), &about);
    assert_eq!(outbound(&rules, error.clone()), Ok(error));
}

#[test]
fn an_error_about_a_packet_of_others_is_refused() {
    for (from, to) in [("10.201.5.5", "8.8.8.8"), ("8.8.8.8", "10.200.0.1")] {
        let about = tcp(ip(from), ip(to), b"");
        let error = too_big(ip("10.200.0.1"), ip("10.201.5.5"), &about);
        assert_eq!(outbound(&rome(), error), Err(IcmpPayloadNotAllowed));
    }
}

#[test]
fn icmp_error_with_partial_header_is_malformed() {
    let about = tcp(ip("10.201.5.5"), ip("10.200.0.1"), b"");
    for kept in [0, 7, 19] {
        let error = too_big(ip("10.200.0.1"), ip("10.201.5.5"), &about[..kept]);
        assert_eq!(outbound(&rome(), error), Err(Malformed), "{kept} bytes");
    }
    let other_family = tcp(ip("fd11::1"), ip("fd01::1"), b"");
    let error = too_big(ip("10.200.0.1"), ip("10.201.5.5"), &other_family);
    assert_eq!(outbound(&rome(), error), Err(Malformed));
}

#[test]
fn zero_udp_checksum_is_written_as_ones() {
    let (from, to) = (ip("10.200.0.1"), ip("10.201.0.1"));
    // A payload whose sum leaves the translated packet with a checksum of zero.
    let mut packet = udp(from, to, &[0, 0]);
    let translated = outbound(&rome(), packet.clone()).unwrap();
    let rest = [translated[26], translated[27]];
    packet = udp(from, to, &rest);
    let translated = outbound(&rome(), packet).unwrap();
    assert_eq!(translated[26..28], [0xff, 0xff]);
    assert_valid(&translated);
}

#[test]
fn udp_without_checksum_stays_without() {
    for (from, to) in [("10.200.0.1", "10.201.0.1"), ("fd01::1", "fd11::1")] {
        let packet = udp_without_checksum(ip(from), ip(to), b"vxlan");
        let translated = outbound(&rome(), packet).unwrap();
        let at = transport(&translated) + 6;
        assert_eq!(translated[at..at + 2], [0, 0]);
    }
}

#[test]
fn later_fragment_has_no_transport_header() {
    // A payload that looks like a SYN with too large an MSS where its second fragment starts.
    for (from, to) in [("10.200.0.1", "10.201.0.1"), ("fd01::1", "fd11::1")] {
        let (from, to) = (ip(from), ip(to));
        let like = syn(from, to, false, 9000);
        let packet = tcp(from, to, &[&[0xff; 20], &like[transport(&like)..]].concat());
        let [_, later] = cut(&packet, 40);
        let translated = outbound(&rome(), later.clone()).unwrap();
        let payload = transport(&later);
        assert_eq!(translated[payload..], later[payload..]);
        assert_ne!(destination(&translated), to);
        assert_valid(&translated);
    }
}

#[test]
fn small_first_fragment_is_malformed() {
    let [tiny, _] = cut(&tcp(ip("10.200.0.1"), ip("10.201.0.1"), b""), 8);
    assert_eq!(outbound(&rome(), tiny), Err(Malformed));
}

#[test]
fn source_routes_are_refused() {
    let packet = tcp(ip("10.200.0.1"), ip("10.201.0.1"), b"");
    for kind in [131, 137] {
        let routed = with_options(&packet, [kind, 3, 4, 0]);
        assert_eq!(outbound(&rome(), routed), Err(SourceRouted));
    }
    let packet = tcp(ip("fd01::1"), ip("fd11::1"), b"");
    let mut routed = packet[..40].to_vec();
    routed[6] = 43;
    routed.extend([6, 0, 4, 1, 0, 0, 0, 0]);
    routed.extend(&packet[40..]);
    assert_eq!(outbound(&rome(), routed.clone()), Err(SourceRouted));
    routed[43] = 0;
    assert!(outbound(&rome(), routed).is_ok());
}

#[test]
fn mss_is_clamped_on_syn_both_ways() {
    for (from, to, most) in [("10.200.0.1", "10.201.0.1", 1380), ("fd01::1", "fd11::1", 1360)] {
        for is_ack in [false, true] {
            for (offered, left) in [(1460, most), (most, most), (1200, 1200)] {
                let sent = outbound(&rome(), syn(ip(from), ip(to), is_ack, offered)).unwrap();
                assert_eq!(mss(&sent), left);
                assert_valid(&sent);
                let unclamped = syn(source(&sent), destination(&sent), is_ack, offered);
                let arrived = inbound(&milan(), unclamped).unwrap();
                assert_eq!(mss(&arrived), left);
                assert_valid(&arrived);
            }
        }
    }
}

fn mss(packet: &[u8]) -> u16 {
    let at = transport(packet) + 22;
    u16::from_be_bytes([packet[at], packet[at + 1]])
}

#[test]
fn mss_behind_odd_options_is_clamped() {
    let mut packet = syn(ip("10.200.0.1"), ip("10.201.0.1"), false, 1460);
    // MSS, window scale, padding becomes no-operation, MSS, window scale: one byte on.
    packet[40..48].copy_from_slice(&[1, 2, 4, 5, 180, 3, 3, 7]);
    packet[36..38].fill(0);
    make_partial(&mut packet);
    assert!(crate::checksum::complete(&mut packet, 20, 16));
    let sent = outbound(&rome(), packet).unwrap();
    assert_eq!(sent[40..48], [1, 2, 4, 5, 100, 3, 3, 7]);
    assert_valid(&sent);
}

#[test]
fn mss_keeps_partial_checksum_partial() {
    let mut packet = syn(ip("10.200.0.1"), ip("10.201.0.1"), true, 1460);
    make_partial(&mut packet);
    rome().outbound(&mut packet, Partial).unwrap();
    assert!(crate::checksum::complete(&mut packet, 20, 16));
    assert_eq!(mss(&packet), 1380);
    assert_valid(&packet);
}

#[test]
fn options_that_lie_about_their_length_are_left_alone() {
    for options in
        [[2, 4, 5, 180, 4, 0, 0, 0], [9, 0, 2, 4, 5, 180, 0, 0], [1, 1, 1, 1, 1, 1, 2, 4]]
    {
        let mut packet = syn(ip("10.200.0.1"), ip("10.201.0.1"), false, 1460);
        packet[40..48].copy_from_slice(&options);
        let translated = outbound(&rome(), packet).unwrap();
        if options[0] != 2 {
            assert_eq!(translated[40..48], options);
        }
    }
}

#[test]
fn configs_with_two_readings_are_refused() {
    let net = |s: &str| s.parse::<IpNet>().unwrap();
    let refused = |change: fn(&mut RulesConfig)| {
        let mut config = rome_config();
        change(&mut config);
        Rules::new(&config).unwrap_err()
    };
    assert_eq!(
        refused(|c| c.remaps[0].local = "10.201.0.0/17".parse().unwrap()),
        RulesError::Unlike(net("10.201.0.0/17"), net("10.200.0.0/16"))
    );
    assert_eq!(
        refused(|c| c.remaps[1].local = c.remaps[0].local),
        RulesError::Overlap(net("10.201.0.0/16"), net("10.201.0.0/16"))
    );
    assert_eq!(
        refused(|c| c.remaps[1].remote = c.remaps[0].remote),
        RulesError::Ambiguous(net("10.200.0.0/16"))
    );
    assert_eq!(
        refused(|c| c.addresses = [("10.70.0.5", "1.2.3.4"), ("10.70.0.6", "1.2.3.4")]
            .map(|(external, target)| AddressMap { external: ip(external), target: ip(target) })
            .into()),
        RulesError::Ambiguous(net("1.2.3.4/32"))
    );
    assert_eq!(
        refused(|c| c.addresses = vec![AddressMap { external: ip("10.70.0.5"), target: ip("::1") }]),
        RulesError::Unlike(net("10.70.0.5/32"), net("::1/128"))
    );
    assert_eq!(
        refused(|c| c.icmp_sources = vec![ip("fd02::1"), ip("10.70.0.1"), ip("10.70.0.2")]),
        RulesError::TwoIcmpSources(ip("10.70.0.1"), ip("10.70.0.2"))
    );
}

#[test]
fn duplicate_config_entries_are_accepted() {
    let mut config = rome_config();
    config.own.extend(config.own.clone());
    config.remaps.extend(config.remaps.clone());
    assert!(Rules::new(&config).is_ok());
}
