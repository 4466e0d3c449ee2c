use fabric_api::PrivateKey;
use fabric_api::fabric::{GatewayConfig, Role};
use reachability::probe::Families;
use tunnel::{RejectedInitiation, UdpPath};

use super::*;
use crate::test_config::config;

const ENDPOINT: &str = "198.51.100.20:30742";

struct Scene {
    desired: Desired,
    now: Instant,
}

impl Scene {
    fn new() -> Self {
        Self::with(|_| ())
    }

    fn with(edit: impl FnOnce(&mut GatewayConfig)) -> Self {
        let mut config = config();
        edit(&mut config);
        Self { desired: Desired::parse(&config).unwrap(), now: Instant::now() + 60 * SECOND }
    }

    fn ago(&self, millis: u64) -> Instant {
        self.now - Duration::from_millis(millis)
    }

    /// A tunnel of which all is well.
    fn evidence(&self) -> Evidence<'_> {
        let endpoint = Some(ENDPOINT.parse().unwrap());
        let last_handshake = Some(self.ago(50_000));
        Evidence {
            desired: &self.desired,
            own_key: None,
            value: ConnectionValue::Connected,
            started: self.ago(55_000),
            peer: PeerState { endpoint, has_session: true, last_handshake, ..Default::default() },
            last_received: Some(self.ago(100)),
            last_answer: Some(self.ago(100)),
            unanswered: None,
            refused_send: None,
            unreceived: None,
            superseded_since: None,
            loss_percent: None,
            departure: None,
            is_key_shared: false,
            peer_cidrs: None,
            peer_differs: false,
            own_id_at_peer: None,
            peer_id_differs: false,
            peer_nodes: None,
            peer_refuses_ipv6: false,
            mtu: 1340,
            mtu_bound: MtuBound::Spec,
        }
    }

    fn unanswered(&self) -> Option<Unanswered> {
        Some(Unanswered { turns: 5, first: self.ago(500), last: self.ago(100) })
    }

    fn reasons(&self, evidence: &Evidence<'_>) -> Vec<Reason> {
        let faults = diagnose(evidence, self.now);
        assert!(faults.iter().all(|f| !f.message.is_empty() && !f.remedy.is_empty()), "{faults:?}");
        faults.iter().map(|fault| fault.reason).collect()
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn healthy_tunnel_has_no_fault() {
    let scene = Scene::new();
    assert_eq!(scene.reasons(&scene.evidence()), []);
    // One turn of probes was lost, as when a gateway is restarted.
    let short = Unanswered { turns: 2, first: scene.ago(60), last: scene.ago(10) };
    let (last, unanswered) = (Some(scene.ago(2300)), Some(short));
    let evidence =
        Evidence { last_received: last, last_answer: last, unanswered, ..scene.evidence() };
    assert_eq!(scene.reasons(&evidence), []);
}

#[test]
fn unanswered_probes_are_fault_no_answer() {
    let scene = Scene::new();
    let silent = |millis| {
        let last = Some(scene.ago(millis));
        let unanswered = scene.unanswered();
        Evidence { last_received: last, last_answer: last, unanswered, ..scene.evidence() }
    };
    assert_eq!(scene.reasons(&silent(1999)), [], "a peer may have to wait for a processor");
    assert_eq!(scene.reasons(&silent(2000)), [Reason::NoAnswer]);
    let fault = &diagnose(&silent(2000), scene.now)[0];
    assert!(fault.remedy.contains(ENDPOINT), "{fault:?}");
    let lost = Evidence { value: ConnectionValue::Error, unanswered: None, ..silent(9000) };
    assert_eq!(scene.reasons(&lost), [Reason::NoAnswer]);
}

#[test]
fn sends_that_this_host_refuses_are_named() {
    let scene = Scene::new();
    let refused = |refused_send, unanswered| {
        let last = Some(scene.ago(2500));
        let (last_received, last_answer) = (last, last);
        Evidence { last_received, last_answer, unanswered, refused_send, ..scene.evidence() }
    };
    let not_permitted = Some(RefusedSend::NotPermitted);
    assert_eq!(scene.reasons(&refused(not_permitted, None)), [], "a single datagram");
    let evidence = refused(not_permitted, scene.unanswered());
    assert_eq!(scene.reasons(&evidence), [Reason::SendRefused]);
    assert!(diagnose(&evidence, scene.now)[0].message.contains(ENDPOINT));
    let server = Desired { role: Role::Server, listen_port: Some(30_742), ..scene.desired.clone() };
    let evidence = Evidence { desired: &server, ..evidence };
    let remedy = &diagnose(&evidence, scene.now)[0].remedy;
    assert!(remedy.starts_with("accept UDP from port 30742 in"), "{remedy}");
    let evidence = refused(Some(RefusedSend::Unreachable), scene.unanswered());
    assert_eq!(scene.reasons(&evidence), [Reason::NoAnswer]);
    assert!(diagnose(&evidence, scene.now)[0].remedy.contains("no route to"));
}

#[test]
fn peer_that_answers_no_probes_is_named() {
    let scene = Scene::new();
    let first = Unanswered { turns: 5, first: scene.ago(2500), last: scene.ago(100) };
    let connecting = |unanswered| Evidence {
        value: ConnectionValue::Connecting,
        last_received: Some(scene.ago(50_000)),
        last_answer: None,
        unanswered: Some(unanswered),
        ..scene.evidence()
    };
    assert_eq!(scene.reasons(&connecting(first)), [Reason::NoProbeAnswer]);
    let fault = &diagnose(&connecting(first), scene.now)[0];
    assert!(fault.remedy.contains("--ping-enabled=false"), "{fault:?}");
    let early = Unanswered { first: scene.ago(1900), ..first };
    assert_eq!(scene.reasons(&connecting(early)), [], "and a handshake is not missing");
    let received = Some(scene.ago(100));
    let lost =
        Evidence { value: ConnectionValue::Error, last_received: received, ..connecting(first) };
    assert_eq!(scene.reasons(&lost), [Reason::NoProbeAnswer]);
    let back = PeerState { last_handshake: Some(scene.ago(100)), ..lost.peer };
    assert_eq!(scene.reasons(&Evidence { peer: back, ..lost }), [], "it is back just now");
}

#[test]
fn lost_peer_without_probes_is_no_answer() {
    let scene = Scene::with(|config| config.spec.probe.enabled = false);
    let last = Some(scene.ago(170_000));
    let idle = Evidence { last_received: last, last_answer: None, ..scene.evidence() };
    assert_eq!(scene.reasons(&idle), []);
    let lost = Evidence { value: ConnectionValue::Error, ..idle };
    assert_eq!(scene.reasons(&lost), [Reason::NoAnswer]);
    let fault = &diagnose(&lost, scene.now)[0];
    assert_eq!(fault.message, "no packet from milan, which is not probed");
}

#[test]
fn peer_that_reports_no_packets_is_not_received() {
    let scene = Scene::new();
    let reports = |first, last| Evidence {
        last_answer: Some(scene.ago(2600)),
        unanswered: scene.unanswered(),
        unreceived: Some((scene.ago(first), scene.ago(last))),
        ..scene.evidence()
    };
    assert_eq!(scene.reasons(&reports(900, 50)), [Reason::NotReceived]);
    assert_eq!(scene.reasons(&reports(200, 50)), [], "both directions may have come back just now");
}

#[test]
fn announced_end_explains_missing_answers() {
    let scene = Scene::new();
    for (departure, reason) in [
        (Departure::Removed, Reason::PeeringRemoved),
        (Departure::TakenDown, Reason::PeerTakenDown),
        (Departure::Restarting, Reason::NoAnswer),
    ] {
        let last = Some(scene.ago(4000));
        let evidence = Evidence {
            departure: Some(departure),
            last_received: last,
            last_answer: last,
            unanswered: scene.unanswered(),
            ..scene.evidence()
        };
        assert_eq!(scene.reasons(&evidence), [reason]);
        let fault = diagnose(&evidence, scene.now).remove(0);
        let is_key_named = fault.message.contains("or its PublicKey of rome");
        assert_eq!(is_key_named, departure == Departure::Removed, "{fault:?}");
    }
    let restart = Evidence { departure: Some(Departure::Restarting), ..scene.evidence() };
    assert_eq!(scene.reasons(&restart), [], "a restart alone is no fault");
}

#[test]
fn unanswered_first_handshake_names_the_address() {
    let scene = Scene::new();
    let connecting = |started| Evidence {
        value: ConnectionValue::Connecting,
        started: scene.ago(started),
        last_received: None,
        last_answer: None,
        ..scene.evidence()
    };
    assert_eq!(scene.reasons(&connecting(1499)), []);
    assert_eq!(scene.reasons(&connecting(1500)), [Reason::NoHandshake]);
    assert!(diagnose(&connecting(1500), scene.now)[0].message.contains(ENDPOINT));
}

#[test]
fn rejected_initiations_name_the_keys_until_solved() {
    let scene = Scene::new();
    let key = PrivateKey::generate().public();
    let rejected = |at: Instant, key| {
        let from = "[::ffff:192.0.2.9]:5".parse().unwrap();
        let previous = Some(at - Duration::from_millis(1200));
        RejectedInitiation { from, at, previous, key }
    };
    let connecting = Evidence {
        value: ConnectionValue::Connecting,
        last_received: None,
        last_answer: None,
        ..scene.evidence()
    };
    let mut unknown = connecting.clone();
    unknown.peer.rejections.unknown_key = Some(rejected(scene.ago(100), Some(key)));
    assert_eq!(scene.reasons(&unknown), [Reason::UnknownKey]);
    let fault = &diagnose(&unknown, scene.now)[0];
    assert!(fault.message.contains(&format!("192.0.2.9:5 with the key {key}")), "{fault:?}");
    unknown.peer.last_handshake = Some(scene.ago(50));
    assert!(!scene.reasons(&unknown).contains(&Reason::UnknownKey), "the peer has another key now");
    unknown.peer.last_handshake = None;
    unknown.peer.rejections.unknown_key = Some(rejected(scene.ago(2800), Some(key)));
    assert!(!scene.reasons(&unknown).contains(&Reason::UnknownKey), "it has stopped");

    let own_key = PrivateKey::generate().public();
    let mut other = Evidence { own_key: Some(own_key), ..connecting };
    other.peer.rejections.wrong_responder = Some(rejected(scene.ago(100), None));
    assert_eq!(scene.reasons(&other), [Reason::WrongResponder]);
    assert!(diagnose(&other, scene.now)[0].remedy.contains(&own_key.to_string()));
    // Once connected, only what comes from the peer matters.
    (other.value, other.last_received) = (ConnectionValue::Connected, Some(scene.ago(50)));
    other.peer.rejections.unknown_key = Some(rejected(scene.ago(100), Some(key)));
    assert_eq!(scene.reasons(&other), []);
}

#[test]
fn strangers_initiations_leave_no_answer_first() {
    let scene = Scene::new();
    let last = Some(scene.ago(9000));
    let mut silent = Evidence {
        value: ConnectionValue::Error,
        last_received: last,
        last_answer: last,
        ..scene.evidence()
    };
    let rejected = |from: &str, key| {
        let from = from.parse().unwrap();
        Some(RejectedInitiation { from, at: scene.ago(100), previous: None, key })
    };
    silent.peer.rejections.wrong_responder = rejected("203.0.113.66:5", None);
    assert_eq!(scene.reasons(&silent), [Reason::NoAnswer], "anybody can send it");
    let key = Some(PrivateKey::generate().public());
    silent.peer.rejections.unknown_key = rejected("203.0.113.66:5", key);
    assert_eq!(scene.reasons(&silent), [Reason::NoAnswer, Reason::UnknownKey], "it may have moved");
    silent.peer.rejections.unknown_key = rejected("198.51.100.20:5", key);
    assert_eq!(scene.reasons(&silent), [Reason::UnknownKey]);
}

#[test]
fn no_answer_names_keys_and_moved_server() {
    let last = |scene: &Scene| Some(scene.ago(9000));
    let remedy = |scene: &Scene| {
        let (value, last) = (ConnectionValue::Error, last(scene));
        let lost = Evidence { value, last_received: last, last_answer: last, ..scene.evidence() };
        diagnose(&lost, scene.now).remove(0).remedy
    };
    let client = remedy(&Scene::new());
    for says in
        ["has this cluster's PublicKey (`weft status` there)", "spec.endpoint of the Gateway"]
    {
        assert!(client.contains(says), "{client}");
    }
    let server = remedy(&Scene::with(|config| {
        config.spec.role = Role::Server;
        config.spec.endpoint = None;
        config.spec.listen_port = Some(51840);
    }));
    assert!(!server.contains("spec.endpoint"), "{server}");
}

#[test]
fn client_for_another_cluster_is_not_the_peer() {
    let scene = Scene::new();
    let mut evidence = scene.evidence();
    let endpoint: SocketAddr = ENDPOINT.parse().unwrap();
    let rejected = |port, interval: u64| {
        let from = SocketAddr::new(endpoint.ip(), port);
        let (at, previous) = (scene.ago(100), Some(scene.ago(100 + interval)));
        Some(RejectedInitiation { from, at, previous, key: None })
    };
    evidence.peer.rejections.wrong_responder = rejected(endpoint.port() + 1, 300);
    assert_eq!(scene.reasons(&evidence), [], "a flood");
    let mut remedy = |port| {
        evidence.peer.rejections.wrong_responder = rejected(port, 1000);
        assert_eq!(scene.reasons(&evidence), [Reason::WrongResponder]);
        diagnose(&evidence, scene.now)[0].remedy.clone()
    };
    assert!(remedy(endpoint.port()).contains("set spec.publicKey"));
    let other = remedy(endpoint.port() + 1);
    assert!(other.contains("correct spec.endpoint of the GatewayClient for another"), "{other}");
    evidence.departure = Some(Departure::Removed);
    assert_eq!(scene.reasons(&evidence), [Reason::PeeringRemoved, Reason::WrongResponder]);
    let remedy = diagnose(&evidence, scene.now)[1].remedy.clone();
    assert!(remedy.contains("set spec.publicKey"), "the peer is back with a wrong key: {remedy}");
}

#[test]
fn wrong_key_behind_own_node_port_is_named() {
    let server = |config: &mut GatewayConfig| {
        config.spec.role = Role::Server;
        config.spec.endpoint = None;
        config.spec.listen_port = Some(51840);
    };
    for (scene, reasons) in [
        (Scene::new(), [].as_slice()),
        // kube-proxy masquerades what comes to the port of a node that has not the gateway's pod.
        (Scene::with(server), &[Reason::WrongResponder]),
    ] {
        let from = SocketAddr::new(scene.desired.nodes[0].underlay, 6308);
        let mut evidence = scene.evidence();
        evidence.peer.endpoint = Some(SocketAddr::new(from.ip(), 1024));
        let at = scene.ago(100);
        evidence.peer.rejections.wrong_responder =
            Some(RejectedInitiation { from, at, previous: None, key: None });
        assert_eq!(scene.reasons(&evidence), reasons);
    }
}

#[test]
fn overdue_rotation_reports_superseded_keys() {
    let scene = Scene::new();
    let since = |millis| Evidence { superseded_since: Some(scene.ago(millis)), ..scene.evidence() };
    assert_eq!(scene.reasons(&since(1400)), []);
    assert_eq!(scene.reasons(&since(1500)), [Reason::SupersededKeys]);
}

#[test]
fn endpoint_of_own_node_is_named_unless_it_works() {
    let own = |config: &mut GatewayConfig| {
        let underlay = config.spec.nodes[0].underlay.to_string();
        config.spec.endpoint.as_mut().unwrap().addresses = vec![underlay];
    };
    let scene = Scene::with(own);
    let mut evidence = scene.evidence();
    assert_eq!(scene.reasons(&evidence), [Reason::EndpointIsOwn], "the peer's packets roam it");
    let underlay = scene.desired.nodes[0].underlay;
    evidence.peer.endpoint = Some(SocketAddr::new(underlay, 30742));
    assert_eq!(scene.reasons(&evidence), [], "two clusters on one host");
    evidence.value = ConnectionValue::Connecting;
    assert_eq!(scene.reasons(&evidence), [Reason::EndpointIsOwn]);
}

#[test]
fn loss_and_cidrs_are_reported_while_connected() {
    let scene = Scene::new();
    let of = |kind| {
        let remaps = scene.desired.remaps.iter().filter(move |remap| remap.kind == kind);
        remaps.map(|remap| remap.remote).collect::<Vec<_>>()
    };
    let (pod, external) = (of(RemapKind::Pod), of(RemapKind::External));
    let mut cidrs = PeerCidrs { pod, external, ..PeerCidrs::default() };
    cidrs.pod.push("fd00:1::/48".parse().unwrap());
    let evidence = Evidence { peer_cidrs: Some(&cidrs), ..scene.evidence() };
    assert_eq!(scene.reasons(&evidence), [], "a family that is not joined");
    assert!(!evidence.cidrs_differ());

    let other = PeerCidrs { pod: vec!["10.99.0.0/16".parse().unwrap()], ..cidrs.clone() };
    let evidence = Evidence { peer_cidrs: Some(&other), loss_percent: Some(40), ..evidence };
    assert_eq!(scene.reasons(&evidence), [Reason::ProbeLoss, Reason::CidrMismatch]);
    assert!(evidence.cidrs_differ());
    let faults = diagnose(&evidence, scene.now);
    assert_eq!(faults[0].message, "40 % of probes to or from milan are lost");
    assert!(faults[0].remedy.contains(" or back: "), "no direction is known: {faults:?}");
    assert!(faults[1].message.contains("spec.remote.cidr.pod"), "{faults:?}");
    assert!(faults[1].message.contains("expected 10.99.0.0/16"), "{faults:?}");
    let theirs = Evidence { peer_differs: true, ..scene.evidence() };
    assert_eq!(scene.reasons(&theirs), [Reason::PeerCidrMismatch]);
}

#[test]
fn id_that_one_side_has_wrong_is_named_on_both() {
    let scene = Scene::new();
    let theirs = Evidence { own_id_at_peer: Some("roma"), ..scene.evidence() };
    assert_eq!(scene.reasons(&theirs), [Reason::PeerIdMismatch]);
    let [fault] = &diagnose(&theirs, scene.now)[..] else { panic!() };
    assert!(fault.message.contains("roma"), "{fault:?}");
    let ours = Evidence { peer_id_differs: true, ..scene.evidence() };
    assert_eq!(scene.reasons(&ours), [Reason::IdMismatch]);
}

#[test]
fn family_that_only_the_peer_joins_is_named() {
    let scene = |own_ipv6: bool| {
        Scene::with(|config| {
            config.spec.pod_cidrs.extend(own_ipv6.then(|| "fd00:200::/48".into()));
        })
    };
    let reasons = |scene: &Scene, joined| {
        let of = |kind| {
            let remaps = scene.desired.remaps.iter().filter(move |remap| remap.kind == kind);
            remaps.map(|remap| remap.remote).collect::<Vec<_>>()
        };
        let (mut pod, external) = (of(RemapKind::Pod), of(RemapKind::External));
        pod.push("fd00:1::/48".parse().unwrap());
        let cidrs = PeerCidrs { pod, external, joined };
        let evidence = Evidence { peer_cidrs: Some(&cidrs), ..scene.evidence() };
        assert_eq!(evidence.cidrs_differ(), !scene.reasons(&evidence).is_empty());
        scene.reasons(&evidence)
    };
    let (ipv4, both) = (Families { v4: true, v6: false }, Families { v4: true, v6: true });
    assert_eq!(reasons(&scene(true), ipv4), [], "neither joins IPv6");
    assert_eq!(reasons(&scene(true), both), [Reason::CidrMismatch]);
    assert_eq!(reasons(&scene(false), both), [], "the peer's configuration is wrong, not ours");
}

#[test]
fn changed_endpoint_that_never_answers_is_named() {
    let scene = Scene::new();
    let mut evidence = scene.evidence();
    evidence.peer.unproven_endpoint = Some("203.0.113.9:30742".parse().unwrap());
    assert_eq!(scene.reasons(&evidence), [Reason::EndpointUnanswered]);
    let fault = &diagnose(&evidence, scene.now)[0];
    assert!(fault.message.contains("leads to 203.0.113.9:30742"), "{fault:?}");
    assert!(fault.message.contains(&format!("with {ENDPOINT}")), "{fault:?}");
    evidence.peer.endpoint = evidence.peer.unproven_endpoint;
    assert_eq!(scene.reasons(&evidence), [], "the peer's packets have not moved it yet");
}

#[test]
fn lost_responses_are_named_with_both_addresses() {
    let scene = Scene::with(|config| {
        (config.spec.role, config.spec.endpoint) = (Role::Server, None);
        config.spec.listen_port = Some(30742);
    });
    let path = UdpPath {
        remote: "[::ffff:203.0.113.9]:1024".parse().unwrap(),
        source: Some("198.51.100.21".parse().unwrap()),
    };
    let unconfirmed = |ago| Some(Unconfirmed { path, responses: 2, last: scene.ago(ago) });
    let silent = Evidence {
        last_received: Some(scene.ago(9000)),
        last_answer: Some(scene.ago(9000)),
        unanswered: scene.unanswered(),
        ..scene.evidence()
    };
    for value in [ConnectionValue::Connecting, ConnectionValue::Connected, ConnectionValue::Error] {
        let mut evidence = Evidence { value, ..silent.clone() };
        (evidence.peer.has_session, evidence.peer.unconfirmed) = (false, unconfirmed(5300));
        assert_eq!(scene.reasons(&evidence), [Reason::NotReceived], "{value:?}");
        let fault = &diagnose(&evidence, scene.now)[0];
        let way = "UDP from 198.51.100.21 to 203.0.113.9:1024";
        assert!(fault.message.contains(way) && fault.remedy.contains(way), "{fault:?}");
        assert!(
            fault.remedy.contains("ip route get from 198.51.100.21 to 203.0.113.9"),
            "{fault:?}"
        );
        evidence.peer.unconfirmed = unconfirmed(8000);
        assert!(!scene.reasons(&evidence).contains(&Reason::NotReceived), "it has stopped");
    }
    let evidence = Evidence {
        peer: PeerState { unconfirmed: unconfirmed(100), ..scene.evidence().peer },
        ..scene.evidence()
    };
    assert_eq!(scene.reasons(&evidence), [], "all is well: a response was lost");
}

#[test]
fn shared_key_outranks_other_faults() {
    let scene = Scene::new();
    let last = Some(scene.ago(4000));
    let silent = Evidence {
        is_key_shared: true,
        last_received: last,
        last_answer: last,
        unanswered: scene.unanswered(),
        ..scene.evidence()
    };
    assert_eq!(scene.reasons(&silent), [Reason::KeyShared], "it explains the missing answers");
    let mut evidence = Evidence { loss_percent: Some(40), ..scene.evidence() };
    let mut message = |a: &str, b: &str| {
        evidence.peer.duplicate = Some([a.parse().unwrap(), b.parse().unwrap()]);
        assert_eq!(scene.reasons(&evidence), [Reason::PeerKeyShared]);
        diagnose(&evidence, scene.now).remove(0).message
    };
    let apart = message("[::ffff:192.0.2.1]:1", "[2001:db8::1]:2");
    assert!(apart.contains("192.0.2.1 and 2001:db8::1, in turn"), "{apart}");
    let same = message("192.0.2.1:1", "192.0.2.1:2");
    assert!(same.contains("192.0.2.1:1 and 192.0.2.1:2, in turn"), "{same}");
}

#[test]
fn mtu_below_1280_is_a_fault_where_ipv6_is_remapped() {
    let scene = Scene::new();
    let small = |scene: &Scene| scene.reasons(&Evidence { mtu: 1240, ..scene.evidence() });
    assert_eq!(small(&scene), [], "IPv4 needs less");
    let with_ipv6_at_peer = |config: &mut GatewayConfig| {
        let mut remap = config.spec.remaps[0].clone();
        (remap.remote, remap.local) = ("fd00:200::/48".into(), "fd00:201::/48".into());
        config.spec.remaps.push(remap);
    };
    assert_eq!(small(&Scene::with(with_ipv6_at_peer)), [], "nobody here sends any");
    let scene = Scene::with(|config| {
        with_ipv6_at_peer(config);
        config.spec.pod_cidrs.push("fd00:200::/48".into());
    });
    assert_eq!(small(&scene), [Reason::TooSmallForIpv6]);
    assert_eq!(scene.reasons(&scene.evidence()), []);
    let remedy = |mtu_bound| {
        let small = Evidence { mtu: 1240, mtu_bound, ..scene.evidence() };
        diagnose(&small, scene.now).remove(0).remedy
    };
    assert_eq!(remedy(MtuBound::Spec), "set spec.mtu of the gateway to 1280 or more");
    let path = format!("let the way to {ENDPOINT} pass packets of 1340 bytes");
    assert_eq!(remedy(MtuBound::Path), path);
    assert!(remedy(MtuBound::Device).ends_with(&format!("to {ENDPOINT} to 1340 bytes or more")));
    assert!(remedy(MtuBound::Overlay).ends_with("its nodes by 40 bytes or more"));
}

#[test]
fn ipv6_that_the_peer_refuses_is_a_fault_here_too() {
    let scene = Scene::new();
    let evidence = Evidence { peer_refuses_ipv6: true, ..scene.evidence() };
    assert_eq!(scene.reasons(&evidence), [Reason::PeerTooSmallForIpv6]);
    let text = &diagnose(&evidence, scene.now)[0].message;
    assert!(text.ends_with("milan refuses IPv6 to this cluster"), "{text}");
    let lost = Evidence { value: ConnectionValue::Connecting, ..evidence };
    let reasons = scene.reasons(&lost);
    assert!(!reasons.contains(&Reason::PeerTooSmallForIpv6), "an old report: {reasons:?}");
}

#[test]
fn expired_session_is_no_answer() {
    let scene = Scene::new();
    let of_before = scene.evidence();
    let (peer, unanswered) = (PeerState { has_session: false, ..of_before.peer }, None);
    let last = scene.now.checked_sub(Duration::from_secs(3));
    let lost = Evidence { peer, unanswered, last_answer: last, last_received: last, ..of_before };
    assert_eq!(scene.reasons(&lost), [Reason::NoAnswer], "handshakes alone show it");
    let recent = Evidence { last_received: Some(scene.now), ..lost };
    assert_eq!(scene.reasons(&recent), [], "a rotation may be on its way");
    let unprobed = Scene::with(|config| config.spec.probe.enabled = false);
    let idle = Evidence { desired: &unprobed.desired, ..lost };
    assert_eq!(unprobed.reasons(&idle), [], "nothing is sent that needs one");
}

#[test]
fn nodes_cut_off_at_the_peer_are_counted() {
    let scene = Scene::new();
    let peer_nodes = Some(NodeCount { reachable: 0, of: 1 });
    let evidence = Evidence { peer_nodes, ..scene.evidence() };
    let faults = diagnose(&evidence, scene.now);
    assert_eq!(scene.reasons(&evidence), [Reason::PeerNodesUnreachable]);
    assert_eq!(
        faults[0].message,
        "peer milan: 0 of 1 of its nodes reach its gateway without a fault"
    );
    let lost = Evidence { value: ConnectionValue::Connecting, ..evidence };
    let reasons = scene.reasons(&lost);
    assert!(!reasons.contains(&Reason::PeerNodesUnreachable), "an old report: {reasons:?}");
    let peer_nodes = Some(NodeCount { reachable: 0, of: 0 });
    let faults = diagnose(&Evidence { peer_nodes, ..scene.evidence() }, scene.now);
    assert!(faults[0].message.contains("its cluster has no node"), "{}", faults[0].message);
}
