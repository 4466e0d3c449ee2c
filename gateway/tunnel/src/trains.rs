//! Splitting and joining as each other's reverse, against packets that etherparse makes and checks.

mod udp;

use etherparse::{NetHeaders, PacketBuilder, PacketHeaders, TransportHeader};
use proptest::prelude::*;

use crate::checksum;
use crate::join::{Joiner, Sink};
use crate::packet::{Gso, Headers, Offload, Version};
use crate::split::split;

/// Output of a joiner: each frame's header and packet, and how many packets it stands for.
#[derive(Default)]
struct Frames(Vec<(Offload, Vec<u8>, usize)>);

impl Sink for Frames {
    fn deliver(&mut self, frame: &mut [u8], offload: &Offload, packets: usize) {
        self.0.push((*offload, frame[Offload::LEN..].to_vec(), packets));
    }
}

impl Frames {
    /// Returns the packets that a kernel would make of them, one by one.
    fn packets(&self) -> Vec<Vec<u8>> {
        self.0.iter().flat_map(|(offload, packet, _)| cut(packet, offload)).collect()
    }
}

fn cut(packet: &[u8], offload: &Offload) -> Vec<Vec<u8>> {
    if offload.gso == Gso::None {
        return vec![packet.to_vec()];
    }
    let mut train = packet.to_vec();
    let headers = Headers::parse_train(&train).unwrap();
    offload.check(&train, &headers).unwrap();
    let mut segments = Vec::new();
    split(&mut train, &headers, offload, |segment| segments.push(segment.to_vec())).unwrap();
    segments
}

fn join(packets: &[Vec<u8>]) -> Frames {
    let (mut joiner, mut frames) = (Joiner::new(), Frames::default());
    joiner.set_joins_udp(true);
    for packet in packets {
        joiner.push(packet, &mut frames);
    }
    joiner.flush(&mut frames);
    frames
}

/// One TCP segment of a test flow.
#[derive(Clone, Debug)]
struct Tcp {
    is_v6: bool,
    flow: u8,
    sequence: u32,
    id: u16,
    flags: u8,
    window: u16,
    has_timestamp: bool,
    ecn: u8,
    payload: Vec<u8>,
}

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;
const CWR: u8 = 0x80;

impl Tcp {
    fn new(payload: usize) -> Self {
        Self {
            is_v6: false,
            flow: 0,
            sequence: 1000,
            id: 7,
            flags: ACK,
            window: 500,
            has_timestamp: true,
            ecn: 0,
            payload: (0..payload).map(|i| (i * 31 + 7) as u8).collect(),
        }
    }

    fn packet(&self) -> Vec<u8> {
        let port = 40_000 + u16::from(self.flow);
        let mut tcp = etherparse::TcpHeader::new(port, 80, self.sequence, self.window);
        tcp.acknowledgment_number = 99;
        if self.has_timestamp {
            tcp.set_options(&[etherparse::TcpOptionElement::Timestamp(1, 2)]).unwrap();
        }
        let mut packet = Vec::new();
        if self.is_v6 {
            let builder = PacketBuilder::ipv6([0xfd; 16], [0xfe; 16], 64);
            builder.tcp_header(tcp).write(&mut packet, &self.payload).unwrap();
            packet[1] |= self.ecn << 4;
        } else {
            let mut ip = etherparse::Ipv4Header::new(
                0,
                64,
                etherparse::IpNumber::TCP,
                [10, 0, 0, 1],
                [10, 1, 0, 2],
            )
            .unwrap();
            ip.identification = self.id;
            ip.dont_fragment = false;
            ip.ecn = etherparse::IpEcn::try_new(self.ecn).unwrap();
            let builder = PacketBuilder::ip(etherparse::IpHeaders::Ipv4(ip, Default::default()));
            builder.tcp_header(tcp).write(&mut packet, &self.payload).unwrap();
        }
        set_flags(&mut packet, self.flags);
        packet
    }

    /// The one that carries on after this one.
    fn next(&self) -> Self {
        Self {
            sequence: self.sequence.wrapping_add(self.payload.len() as u32),
            id: self.id.wrapping_add(1),
            ..self.clone()
        }
    }
}

/// Sets TCP's flags, and the checksum that goes with them.
fn set_flags(packet: &mut [u8], flags: u8) {
    let headers = Headers::parse(packet).unwrap();
    packet[headers.l4_offset + 13] = flags;
    let field = headers.checksum_offset().unwrap();
    packet[field..field + 2].fill(0);
    let l4_len = packet.len() - headers.l4_offset;
    let sum = checksum::pseudo_header(&packet[headers.addresses()], headers.protocol, l4_len)
        + checksum::sum(&packet[headers.l4_offset..]);
    packet[field..field + 2].copy_from_slice(&(!checksum::fold(sum)).to_be_bytes());
}

fn is_valid(packet: &[u8]) -> bool {
    let parsed = PacketHeaders::from_ip_slice(packet).unwrap();
    let payload = parsed.payload.slice();
    let (Some(net), Some(transport)) = (parsed.net, parsed.transport) else { return false };
    let (given, computed) = match (&net, transport) {
        (NetHeaders::Ipv4(ip, _), TransportHeader::Tcp(tcp)) => {
            (tcp.checksum, tcp.calc_checksum_ipv4(ip, payload).unwrap())
        }
        (NetHeaders::Ipv6(ip, _), TransportHeader::Tcp(tcp)) => {
            (tcp.checksum, tcp.calc_checksum_ipv6(ip, payload).unwrap())
        }
        (NetHeaders::Ipv4(ip, _), TransportHeader::Udp(udp)) => {
            (udp.checksum, udp.calc_checksum_ipv4(ip, payload).unwrap())
        }
        (NetHeaders::Ipv6(ip, _), TransportHeader::Udp(udp)) => {
            (udp.checksum, udp.calc_checksum_ipv6(ip, payload).unwrap())
        }
        _ => return false,
    };
    let is_ip_valid = match net {
        NetHeaders::Ipv4(ip, _) => ip.header_checksum == ip.calc_header_checksum(),
        NetHeaders::Ipv6(..) | NetHeaders::Arp(..) => true,
    };
    given == computed && is_ip_valid
}

/// A train as the kernel hands it over: one big packet with a partial checksum.
fn train(packet: &[u8], gso_size: u16) -> (Vec<u8>, Offload) {
    let mut packet = packet.to_vec();
    let headers = Headers::parse(&packet).unwrap();
    let is_udp = headers.protocol == 17;
    let l4_len = packet.len() - headers.l4_offset;
    let partial = checksum::pseudo_header(&packet[headers.addresses()], headers.protocol, l4_len);
    let field = headers.checksum_offset().unwrap();
    packet[field..field + 2].copy_from_slice(&checksum::fold(partial).to_be_bytes());
    let offload = Offload {
        needs_checksum: true,
        gso: match (is_udp, headers.version) {
            (true, _) => Gso::UdpL4,
            (false, Version::V4) => Gso::TcpV4,
            (false, Version::V6) => Gso::TcpV6,
        },
        gso_size,
        checksum_start: headers.l4_offset as u16,
        checksum_offset: (field - headers.l4_offset) as u16,
        ..Offload::NONE
    };
    (packet, offload)
}

prop_compose! {
    fn tcp()(
        is_v6: bool, flow in 0u8..3, sequence: u32, id: u16, window in 0u16..3, has_timestamp: bool,
        ecn in 0u8..4, payload in prop::collection::vec(any::<u8>(), 1..9000),
    ) -> Tcp {
        Tcp { is_v6, flow, sequence, id, flags: ACK, window, has_timestamp, ecn, payload }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn tcp_train_is_split_and_joined_again(
        tcp in tcp(), gso_size in 100u16..2000, ends in prop::sample::select(vec![0, PSH, FIN, PSH | FIN]),
    ) {
        let tcp = Tcp { flags: ACK | ends, ..tcp };
        let (packet, offload) = train(&tcp.packet(), gso_size);
        let segments = cut(&packet, &offload);
        prop_assert_eq!(segments.len(), tcp.payload.len().div_ceil(gso_size.into()));
        let mut expected = Tcp { payload: Vec::new(), ..tcp };
        for (i, segment) in segments.iter().enumerate() {
            prop_assert!(is_valid(segment));
            let start = i * usize::from(gso_size);
            let end = tcp.payload.len().min(start + usize::from(gso_size));
            expected.payload = tcp.payload[start..end].to_vec();
            expected.flags = if i + 1 == segments.len() { ACK | ends } else { ACK };
            prop_assert_eq!(segment, &expected.packet());
            expected = expected.next();
        }
        let joined = join(&segments);
        prop_assert_eq!(joined.0.len(), 1);
        if segments.len() > 1 {
            prop_assert_eq!(&joined.0[0].1, &packet);
            prop_assert_eq!(joined.0[0].0.gso_size, gso_size);
        }
    }

    #[test]
    fn a_udp_train_is_cut_to_valid_datagrams(
        is_v6: bool, payload in prop::collection::vec(any::<u8>(), 1..20_000), gso_size in 1u16..1400,
    ) {
        prop_assume!(payload.len() / usize::from(gso_size) < 128);
        let mut packet = Vec::new();
        match is_v6 {
            true => PacketBuilder::ipv6([1; 16], [2; 16], 9).udp(5, 6).write(&mut packet, &payload),
            false => PacketBuilder::ipv4([1; 4], [2; 4], 9).udp(5, 6).write(&mut packet, &payload),
        }.unwrap();
        let (packet, offload) = train(&packet, gso_size);
        let datagrams = cut(&packet, &offload);
        prop_assert!(datagrams.iter().all(|datagram| is_valid(datagram)));
        let header = if is_v6 { 48 } else { 28 };
        let together: Vec<u8> = datagrams.iter().flat_map(|d| d[header..].to_vec()).collect();
        prop_assert_eq!(together, payload);
    }

    /// Order of input does not matter: what leaves is the same packets, and those of one flow in
    /// the order they came.
    #[test]
    fn joining_loses_nothing_and_reorders_no_flow(steps in prop::collection::vec(step(), 1..120)) {
        let packets = play(&steps);
        let joined = join(&packets);
        prop_assert!(joined.0.iter().all(|(_, packet, _)| packet.len() <= 65_535));
        let count: usize = joined.0.iter().map(|frame| frame.2).sum();
        prop_assert_eq!(count, packets.len());
        let left = joined.packets();
        for flow in 0..FLOWS {
            let of_flow = |all: &[Vec<u8>]| -> Vec<Vec<u8>> {
                all.iter().filter(|packet| flow_of(packet) == flow).cloned().collect()
            };
            prop_assert_eq!(of_flow(&left), of_flow(&packets));
        }
    }
}

const FLOWS: u8 = 7;

/// Next step of a flow.
#[derive(Clone, Debug)]
struct Step {
    flow: u8,
    repeats: usize,
    payload: usize,
    event: Event,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Data,
    Pushed,
    Gap,
    Again,
    OtherWindow,
    OnlyAck,
    Fin,
    Syn,
    Cwr,
    Corrupt,
    Fragment,
    Short,
}

fn step() -> impl Strategy<Value = Step> {
    use Event::*;
    let events = vec![
        Data,
        Data,
        Data,
        Data,
        Pushed,
        Gap,
        Again,
        OtherWindow,
        OnlyAck,
        Fin,
        Syn,
        Cwr,
        Corrupt,
        Fragment,
        Short,
    ];
    let payloads = prop::sample::select(vec![1, 10, 60, 536, 1388, 9000]);
    (0..FLOWS, 1usize..60, payloads, prop::sample::select(events))
        .prop_map(|(flow, repeats, payload, event)| Step { flow, repeats, payload, event })
}

fn play(steps: &[Step]) -> Vec<Vec<u8>> {
    let mut flows: Vec<Tcp> = (0..FLOWS)
        .map(|flow| Tcp { flow, is_v6: flow % 2 == 1, has_timestamp: flow % 3 > 0, ..Tcp::new(0) })
        .collect();
    let mut packets = Vec::new();
    for step in steps {
        let flow = &mut flows[usize::from(step.flow)];
        let repeats = if matches!(step.event, Event::Data) { step.repeats } else { 1 };
        for _ in 0..repeats {
            flow.payload = Tcp::new(step.payload).payload;
            packets.push(flow.play(step.event));
            *flow = flow.next();
        }
    }
    packets
}

impl Tcp {
    fn play(&mut self, event: Event) -> Vec<u8> {
        let mut one = self.clone();
        match event {
            Event::Data => {}
            Event::Pushed => one.flags |= PSH,
            Event::Gap => self.sequence = self.sequence.wrapping_add(5000),
            Event::Again => one.sequence = one.sequence.wrapping_sub(10),
            Event::OtherWindow => {
                self.window = self.window.wrapping_add(1);
                one.window = self.window;
            }
            Event::OnlyAck => one.payload.clear(),
            Event::Fin => one.flags |= FIN,
            Event::Syn => one.flags |= SYN,
            Event::Cwr => one.flags |= CWR,
            Event::Corrupt | Event::Fragment => {}
            Event::Short => one.payload.truncate(step_down(one.payload.len())),
        }
        let mut packet = one.packet();
        if matches!(event, Event::Corrupt) {
            *packet.last_mut().unwrap() ^= 1;
        }
        if matches!(event, Event::Fragment) && !self.is_v6 {
            packet[7] = 100;
        }
        packet
    }
}

fn step_down(len: usize) -> usize {
    len / 2 + 1
}

fn flow_of(packet: &[u8]) -> u8 {
    let l4 = if packet[0] >> 4 == 4 { 20 } else { 40 };
    (u16::from_be_bytes([packet[l4], packet[l4 + 1]]) - 40_000) as u8
}

/// Returns how many frames two packets become.
fn frames_of(first: &Tcp, second: &Tcp) -> usize {
    join(&[first.packet(), second.packet()]).0.len()
}

#[test]
fn segments_that_carry_on_are_joined_in_both_families() {
    for is_v6 in [false, true] {
        let first = Tcp { is_v6, ..Tcp::new(1000) };
        assert_eq!(frames_of(&first, &first.next()), 1);
        let shorter = Tcp { payload: vec![1; 10], ..first.next() };
        assert_eq!(frames_of(&first, &shorter), 1);
        let longer = Tcp { payload: vec![1; 1001], ..first.next() };
        assert_eq!(frames_of(&first, &longer), 2);
    }
}

#[test]
fn segments_that_gro_keeps_apart_are_not_joined() {
    let first = Tcp::new(1000);
    let next = first.next();
    let unlike = [
        ("sequence", Tcp { sequence: next.sequence + 1, ..next.clone() }),
        ("identification", Tcp { id: next.id + 1, ..next.clone() }),
        ("window", Tcp { window: 1, ..next.clone() }),
        ("options", Tcp { has_timestamp: false, ..next.clone() }),
        ("congestion marks", Tcp { ecn: 3, ..next.clone() }),
        ("congestion window reduced", Tcp { flags: ACK | CWR, ..next.clone() }),
        ("reset", Tcp { flags: ACK | 4, ..next.clone() }),
        ("urgent", Tcp { flags: ACK | 0x20, ..next.clone() }),
        ("empty", Tcp { payload: Vec::new(), ..next.clone() }),
        ("flow", Tcp { flow: 1, ..next }),
    ];
    for (what, second) in unlike {
        assert_eq!(frames_of(&first, &second), 2, "{what}");
    }
}

#[test]
fn a_pushed_or_short_segment_ends_its_train() {
    let first = Tcp::new(1000);
    let pushed = Tcp { flags: ACK | PSH, ..first.next() };
    let joined = join(&[first.packet(), pushed.packet(), pushed.next().packet()]);
    assert_eq!(joined.0.iter().map(|frame| frame.2).collect::<Vec<_>>(), [2, 1]);
    let short = Tcp { payload: vec![3; 7], ..first.next() };
    let joined = join(&[first.packet(), short.packet(), short.next().packet()]);
    assert_eq!(joined.0.iter().map(|frame| frame.2).collect::<Vec<_>>(), [2, 1]);
}

#[test]
fn wrong_checksum_is_passed_on() {
    let first = Tcp::new(1000);
    for corrupt in [0, 1] {
        let mut packets = [first.packet(), first.next().packet()];
        packets[corrupt][60] ^= 1;
        let joined = join(&packets);
        assert_eq!(joined.packets(), packets);
        assert_eq!(joined.0.len(), 2);
    }
}

#[test]
fn interleaved_flows_are_each_put_together() {
    let mut flows: Vec<Tcp> = (0..4).map(|flow| Tcp { flow, ..Tcp::new(1200) }).collect();
    let mut packets = Vec::new();
    for _ in 0..20 {
        for flow in &mut flows {
            packets.push(flow.packet());
            *flow = flow.next();
        }
    }
    assert_eq!(join(&packets).0.len(), 4);
}

#[test]
fn a_train_ends_where_an_ip_packet_must() {
    let mut tcp = Tcp::new(1400);
    let mut packets = Vec::new();
    for _ in 0..100 {
        packets.push(tcp.packet());
        tcp = tcp.next();
    }
    let joined = join(&packets);
    assert_eq!(joined.0.len(), 3);
    assert_eq!(joined.packets(), packets);
}

#[test]
fn udp_segment_with_checksum_zero_is_written_as_ones() {
    let udp = |payload: &[u8]| {
        let mut packet = Vec::new();
        let builder = PacketBuilder::ipv4([10, 0, 0, 1], [10, 0, 0, 2], 9).udp(5, 6);
        builder.write(&mut packet, payload).unwrap();
        packet
    };
    // The checksum over a payload of zeros is what a payload has to be for it to come out as zero.
    let checksum = udp(&[0; 100])[26..28].to_vec();
    let mut first = vec![0; 100];
    first[..2].copy_from_slice(&checksum);
    let (packet, offload) = train(&udp(&[first, vec![7; 50]].concat()), 100);
    let datagrams = cut(&packet, &offload);
    assert_eq!(datagrams[0][26..28], [0xff, 0xff]);
    assert_eq!(datagrams.len(), 2);
}
