//! UDP datagrams that are joined, and those that may not be.

use super::*;

const ADDRESSES: ([u8; 4], [u8; 4]) = ([10, 0, 0, 1], [10, 1, 0, 2]);

/// One datagram of a test flow.
#[derive(Clone, Debug)]
struct Udp {
    is_v6: bool,
    port: u16,
    id: u16,
    dont_fragment: bool,
    ttl: u8,
    ecn: u8,
    payload: Vec<u8>,
}

impl Udp {
    fn new(payload: usize) -> Self {
        Self {
            is_v6: false,
            port: 443,
            id: 7,
            dont_fragment: false,
            ttl: 64,
            ecn: 0,
            payload: (0..payload).map(|i| (i * 13 + 5) as u8).collect(),
        }
    }

    fn packet(&self) -> Vec<u8> {
        let mut packet = Vec::new();
        if self.is_v6 {
            let builder =
                PacketBuilder::ipv6([0xfd; 16], [0xfe; 16], self.ttl).udp(40_000, self.port);
            builder.write(&mut packet, &self.payload).unwrap();
            packet[1] |= self.ecn << 4;
            return packet;
        }
        let protocol = etherparse::IpNumber::UDP;
        let (source, destination) = ADDRESSES;
        let mut ip =
            etherparse::Ipv4Header::new(0, self.ttl, protocol, source, destination).unwrap();
        ip.identification = self.id;
        ip.dont_fragment = self.dont_fragment;
        ip.ecn = etherparse::IpEcn::try_new(self.ecn).unwrap();
        let builder = PacketBuilder::ip(etherparse::IpHeaders::Ipv4(ip, Default::default()));
        builder.udp(40_000, self.port).write(&mut packet, &self.payload).unwrap();
        packet
    }

    fn next(&self) -> Self {
        Self { id: self.id.wrapping_add(1), ..self.clone() }
    }
}

/// Returns how many packets each frame stands for.
fn counts(packets: &[Vec<u8>]) -> Vec<usize> {
    let joined = join(packets);
    assert_eq!(joined.packets(), packets);
    joined.0.iter().map(|frame| frame.2).collect()
}

fn counts_of(datagrams: &[Udp]) -> Vec<usize> {
    counts(&datagrams.iter().map(Udp::packet).collect::<Vec<_>>())
}

fn train_of(first: &Udp, datagrams: usize) -> Vec<Udp> {
    std::iter::successors(Some(first.clone()), |last| Some(last.next())).take(datagrams).collect()
}

#[test]
fn equal_datagrams_become_one_train() {
    for is_v6 in [false, true] {
        let first = Udp { is_v6, ..Udp::new(1200) };
        let packets: Vec<_> = train_of(&first, 40).iter().map(Udp::packet).collect();
        let joined = join(&packets);
        let [(offload, _, 40)] = &joined.0[..] else { panic!("{} frames", joined.0.len()) };
        assert_eq!((offload.gso, offload.gso_size), (Gso::UdpL4, 1200));
        assert_eq!(joined.packets(), packets);
        assert!(joined.packets().iter().all(|packet| is_valid(packet)));
    }
}

#[test]
fn shorter_datagram_ends_the_train() {
    let first = Udp::new(1200);
    let short = Udp { payload: vec![1; 10], ..first.next() };
    assert_eq!(counts_of(&[first.clone(), short.clone(), short.next()]), [2, 1]);
    let long = Udp { payload: vec![1; 1201], ..first.next() };
    assert_eq!(counts_of(&[first, long]), [1, 1]);
}

#[test]
fn train_has_at_most_64_datagrams() {
    assert_eq!(counts_of(&train_of(&Udp::new(100), 130)), [64, 64, 2]);
}

#[test]
fn unlike_datagrams_are_not_joined() {
    let first = Udp::new(500);
    let next = first.next();
    let unlike = [
        ("identification", Udp { id: next.id + 1, ..next.clone() }),
        ("fragmenting allowed", Udp { dont_fragment: true, ..next.clone() }),
        ("hop limit", Udp { ttl: 63, ..next.clone() }),
        ("congestion marks", Udp { ecn: 1, ..next.clone() }),
        ("flow", Udp { port: 444, ..next.clone() }),
        ("family", Udp { is_v6: true, ..next }),
    ];
    for (difference, second) in unlike {
        assert_eq!(counts_of(&[first.clone(), second]), [1, 1], "{difference}");
    }
}

#[test]
fn identification_is_ignored_where_it_means_nothing() {
    let first = Udp { dont_fragment: true, ..Udp::new(500) };
    let packets = [first.packet(), Udp { id: 0, ..first }.packet()];
    assert_eq!(join(&packets).0.len(), 1);
}

#[test]
fn datagrams_of_tunnels_are_not_joined() {
    for port in [4789, 8472, 4879, 6081] {
        for is_v6 in [false, true] {
            let first = Udp { port, is_v6, ..Udp::new(500) };
            assert_eq!(counts_of(&[first.clone(), first.next()]), [1, 1], "{port}");
        }
    }
}

#[test]
fn datagram_without_checksum_is_passed_in_order() {
    let first = Udp::new(500);
    let mut datagrams: Vec<_> = train_of(&first, 4).iter().map(Udp::packet).collect();
    datagrams[2][26..28].fill(0);
    assert_eq!(counts(&datagrams), [2, 1, 1]);
}

#[test]
fn datagram_with_wrong_checksum_is_passed_as_it_is() {
    let first = Udp::new(500);
    for corrupt in [0, 1] {
        let mut datagrams = [first.packet(), first.next().packet()];
        datagrams[corrupt][60] ^= 1;
        assert_eq!(counts(&datagrams), [1, 1]);
    }
}

#[test]
fn fragment_does_not_overtake_its_flow() {
    let first = Udp::new(500);
    let mut datagrams: Vec<_> = train_of(&first, 3).iter().map(Udp::packet).collect();
    // The last fragment of some datagram, without ports.
    datagrams[2][6..8].copy_from_slice(&[0, 100]);
    assert_eq!(counts(&datagrams), [2, 1]);
}

#[test]
fn tcp_and_udp_of_equal_ports_are_two_trains() {
    let tcp = Tcp::new(700);
    let udp = Udp { port: 80, ..Udp::new(700) };
    let packets =
        [tcp.packet(), udp.packet(), tcp.next().packet(), udp.next().packet()].map(Vec::from);
    let joined = join(&packets);
    assert_eq!(joined.0.iter().map(|frame| frame.2).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn datagrams_stay_single_without_trains_of_the_tun() {
    let (mut joiner, mut frames) = (Joiner::new(), Frames::default());
    for datagram in train_of(&Udp::new(500), 5) {
        joiner.push(&datagram.packet(), &mut frames);
    }
    joiner.flush(&mut frames);
    assert_eq!(frames.0.len(), 5);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn udp_train_is_cut_and_joined_again(
        is_v6: bool, payload in prop::collection::vec(any::<u8>(), 1..30_000), gso_size in 500u16..1400,
    ) {
        let udp = Udp { is_v6, payload, ..Udp::new(0) };
        let (packet, offload) = train(&udp.packet(), gso_size);
        let joined = join(&cut(&packet, &offload));
        prop_assert_eq!(joined.0.len(), 1);
        if udp.payload.len() > gso_size.into() {
            prop_assert_eq!(&joined.0[0].1, &packet);
        }
    }

    #[test]
    fn joining_keeps_each_udp_flow_in_order(
        steps in prop::collection::vec((0u16..4, 0u8..6, prop::sample::select(vec![1, 30, 600, 1372])), 1..300),
    ) {
        let mut flows = [443, 4789, 53, 40_001].map(|port| Udp { port, is_v6: port == 53, ..Udp::new(0) });
        let mut packets = Vec::new();
        for (flow, event, payload) in steps {
            let udp = &mut flows[usize::from(flow)];
            *udp = Udp { payload: Udp::new(payload).payload, ..udp.next() };
            let mut packet = udp.packet();
            match event {
                0 if !udp.is_v6 => packet[26..28].fill(0),
                1 => *packet.last_mut().unwrap() ^= 1,
                2 if !udp.is_v6 => packet[7] = 9,
                _ => {}
            }
            packets.push(packet);
        }
        let left = join(&packets).packets();
        prop_assert_eq!(left.len(), packets.len());
        for is_v6 in [false, true] {
            let of_family = |all: &[Vec<u8>]| -> Vec<Vec<u8>> {
                all.iter().filter(|packet| (packet[0] >> 4 == 6) == is_v6).cloned().collect()
            };
            let port = |packet: &Vec<u8>| [packet[22], packet[23]];
            for udp in flows.iter().filter(|udp| udp.is_v6 == is_v6) {
                let of_flow = |all: Vec<Vec<u8>>| -> Vec<Vec<u8>> {
                    all.into_iter().filter(|packet| is_v6 || port(packet) == udp.port.to_be_bytes()).collect()
                };
                prop_assert_eq!(of_flow(of_family(&left)), of_flow(of_family(&packets)));
            }
        }
    }
}
