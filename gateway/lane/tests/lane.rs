//! Lanes in real network namespaces, with a real TUN and a real UDP socket each:
//!
//!     10.9.0.1 weft0 [client] v0 192.0.2.1 ------- 192.0.2.2 v0 [server] weft0 10.9.0.2
//!                             v0 fc00::1   -------   fc00::2 v0
//!
//! The server also has 192.0.2.3 and fc00::3.
//!
//! Needs root, as any gateway does.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::io::{BufRead as _, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use fabric_api::PrivateKey;
use lane::{Config, LaneHandle, Offloads, open_relay, open_socket, open_tun};
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::{RcvBufForce, SndBuf, UdpGsoSegment};
use socket2::{Domain, Protocol, Socket, Type};
use tunnel::{DropReason, Rules, RulesConfig, Tai64n};

const CLIENT: &str = "10.9.0.1";
const SERVER: &str = "10.9.0.2";
const PORT: u16 = 51820;

/// Bytes of a datagram, and datagrams of a train, that `transfer_datagrams` sends.
const UDP_PAYLOAD: usize = 1200;
const UDP_TRAIN: usize = 50;

/// Pings one by one.
const PINGS: u64 = 50;

type Call = Box<dyn FnOnce() + Send>;

/// A namespace, held by a thread that runs what it is given.
struct Host {
    calls: mpsc::Sender<Call>,
    thread_id: i32,
}

impl Host {
    fn new() -> Self {
        let (calls, queue) = mpsc::channel::<Call>();
        let (ready, is_ready) = mpsc::channel();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("root");
            ready.send(nix::unistd::gettid().as_raw()).unwrap();
            queue.into_iter().for_each(|call| call());
        });
        let host = Self { calls, thread_id: is_ready.recv().unwrap() };
        host.ip("link set lo up");
        host
    }

    fn run<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> T {
        let (result, answer) = mpsc::channel();
        self.calls.send(Box::new(move || drop(result.send(f())))).unwrap();
        answer.recv().expect("no panic in the namespace")
    }

    fn command(&self, line: &str) -> bool {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        self.run(move || Command::new(&words[0]).args(&words[1..]).output().unwrap())
            .status
            .success()
    }

    fn ip(&self, line: &str) {
        assert!(self.command(&format!("ip {line}")), "ip {line}");
    }
}

/// The longest packet of the tunnel seen so far, in bytes.
#[derive(Default)]
struct Wire {
    longest: Arc<AtomicUsize>,
    is_over: Arc<AtomicBool>,
}

impl Wire {
    fn longest(&self) -> usize {
        self.longest.load(Ordering::Relaxed)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

struct Two {
    hosts: [Host; 2],
    lanes: [LaneHandle; 2],
    configs: [Config; 2],
}

impl Two {
    fn connected(offloads: Offloads, server: &str) -> Self {
        Self::connected_with([offloads; 2], server)
    }

    /// The client's offloads and the server's.
    fn connected_with(offloads: [Offloads; 2], server: &str) -> Self {
        let hosts = [Host::new(), Host::new()];
        let other = hosts[1].thread_id;
        hosts[0].ip(&format!("link add v0 type veth peer name v0 netns {other}"));
        for (host, number) in hosts.iter().zip(1..) {
            host.ip(&format!("addr add 192.0.2.{number}/24 dev v0"));
            host.ip(&format!("addr add fc00::{number}/64 dev v0 nodad"));
            host.ip("link set v0 up");
        }
        hosts[1].ip("addr add 192.0.2.3/24 dev v0");
        hosts[1].ip("addr add fc00::3/64 dev v0 nodad");
        let endpoint = SocketAddr::new(server.parse().unwrap(), PORT);
        let keys = [PrivateKey::generate(), PrivateKey::generate()];
        let configs = [0, 1].map(|i| Config {
            private_key: keys[i].clone(),
            peer_key: Some(keys[1 - i].public()),
            endpoint: (i == 0).then_some(endpoint),
            initiate: i == 0,
            unproven: None,
            calls_back: false,
            relay: None,
            keepalive: None,
            mtu: 1420,
            rules: Rules::new(&RulesConfig::transparent(1420)).unwrap(),
        });
        let lanes = [0, 1].map(|i| {
            let (config, port) = (configs[i].clone(), (i == 1).then_some(PORT));
            let offloads = offloads[i];
            let lane = hosts[i].run(move || {
                let tun = open_tun("weft0", offloads).unwrap();
                let socket = open_socket(port, offloads).unwrap();
                LaneHandle::spawn((tun, socket), offloads, config, Tai64n::default())
            });
            let (own, peer) = if i == 0 { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
            hosts[i].ip(&format!("addr add {own} peer {peer} dev weft0"));
            hosts[i].ip("link set weft0 mtu 1420 up");
            lane.unwrap()
        });
        let two = Self { hosts, lanes, configs };
        two.wait_until("a session on both sides", |two| {
            two.lanes.iter().all(|lane| lane.snapshot().peer.has_session)
        });
        two
    }

    fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is_so(self) {
            assert!(start.elapsed() < Duration::from_secs(10), "{what} does not come");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Looks at what arrives on the server's wire from now on.
    fn watch_wire(&self) -> Wire {
        const ALL: i32 = (libc::ETH_P_ALL as u16).to_be() as i32;
        let open = || Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(ALL))).unwrap();
        let socket = self.hosts[1].run(open);
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let wire = Wire::default();
        let (longest, is_over) = (Arc::clone(&wire.longest), Arc::clone(&wire.is_over));
        thread::spawn(move || {
            let mut socket = std::io::BufReader::with_capacity(1 << 17, socket);
            while !is_over.load(Ordering::Relaxed) {
                // One packet a read; those of the tunnel have the server's port.
                let Ok(packet) = socket.fill_buf() else { continue };
                let len = packet.len();
                if packet[9] == 17 && packet[22..24] == PORT.to_be_bytes() {
                    longest.fetch_max(len, Ordering::Relaxed);
                }
                socket.consume(len);
            }
        });
        wire
    }

    fn pings(&self) -> bool {
        self.hosts[0].command(&format!("ping -c 3 -i 0.05 -W 2 -q {SERVER}"))
    }

    /// Reads so far of the lane's thread of a side, also those that found nothing: from its TUN.
    fn reads(&self, side: usize) -> u64 {
        let of = |thread: &str, file| format!("/proc/self/task/{thread}/{file}");
        let net = |thread: &str| std::fs::read_link(of(thread, "ns/net")).ok();
        let own = net(&self.hosts[side].thread_id.to_string());
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let mut threads = threads.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let is_lane = |thread: &String| {
            let name = std::fs::read_to_string(of(thread, "comm"));
            name.is_ok_and(|name| name == "lane\n") && net(thread) == own
        };
        let io = std::fs::read_to_string(of(&threads.find(is_lane).unwrap(), "io")).unwrap();
        let count = io.lines().find_map(|line| line.strip_prefix("syscr: ")).unwrap();
        count.parse().unwrap()
    }

    /// Sends `len` bytes over TCP from the client to the server, which checks them.
    fn transfer(&self, len: usize) {
        let address = SocketAddr::new(SERVER.parse().unwrap(), 7000);
        let listener = self.hosts[1].run(move || TcpListener::bind(address).unwrap());
        let receiver = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = Vec::new();
            stream.read_to_end(&mut bytes).unwrap();
            bytes
        });
        let mut stream = self.hosts[0]
            .run(move || TcpStream::connect_timeout(&address, Duration::from_secs(5)).unwrap());
        let bytes: Vec<u8> = (0..len).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect();
        stream.write_all(&bytes).unwrap();
        drop(stream);
        assert!(receiver.join().unwrap() == bytes, "other bytes arrived");
    }

    /// Sends `trains` of `UDP_TRAIN` datagrams each from the client to `port` of the server, which checks
    /// that each arrives once and in order.
    fn transfer_datagrams(&self, trains: usize, port: u16) {
        let receiver = self.hosts[1].run(move || UdpSocket::bind((SERVER, port)).unwrap());
        receiver.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        setsockopt(&receiver, RcvBufForce, &(16 << 20)).unwrap();
        let datagram = |number: usize| [number as u8; UDP_PAYLOAD];
        self.hosts[0].run(move || {
            let sender = UdpSocket::bind((CLIENT, 0)).unwrap();
            setsockopt(&sender, UdpGsoSegment, &(UDP_PAYLOAD as i32)).unwrap();
            for train in 0..trains {
                let numbers = train * UDP_TRAIN..(train + 1) * UDP_TRAIN;
                let bytes: Vec<u8> = numbers.flat_map(datagram).collect();
                sender.send_to(&bytes, (SERVER, port)).unwrap();
                thread::sleep(Duration::from_millis(1));
            }
        });
        let mut buffer = [0; 1500];
        for number in 0..trains * UDP_TRAIN {
            let len = receiver.recv(&mut buffer).unwrap();
            assert_eq!(buffer[..len], datagram(number), "datagram {number}");
        }
    }
}

/// The lane still opens data under its own keys.
#[test]
fn retired_lane_passes_handshakes_on() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    let (relay, successor) = two.hosts[1].run(|| {
        let successor = UdpSocket::bind("192.0.2.2:0").unwrap();
        successor.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        (open_relay().unwrap(), successor)
    });
    let way = ("192.0.2.2", relay.local_addr().unwrap().port());
    two.lanes[1].retire(Some(relay), vec!["192.0.2.2".parse().unwrap()]);
    // The lane learns the successor's address; the client drops this as malformed.
    successor.send_to(b"initiation", way).unwrap();
    two.wait_until("it is passed on", |two| two.lanes[1].snapshot().relayed == 1);
    two.lanes[0].initiate();
    let mut message = [0; 256];
    let (length, from) = successor.recv_from(&mut message).unwrap();
    assert_eq!((length, from.port(), &message[..4]), (148, way.1, &[1, 0, 0, 0][..]));
    assert!(two.pings());
    assert_eq!(two.lanes[1].snapshot().relayed, 2, "no data");
}

/// The handle is held on.
#[test]
fn stopped_lane_frees_its_port() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    let port = two.lanes[0].snapshot().peer.endpoint.unwrap().port();
    let bind = || two.hosts[1].run(move || UdpSocket::bind(("0.0.0.0", port)));
    bind().unwrap_err();
    two.lanes[1].stop();
    // A process that another test starts has all sockets until it runs its program.
    two.wait_until("the port is free", |_| bind().is_ok());
    assert!(!two.lanes[1].is_running());
}

#[test]
fn two_lanes_pass_ping_and_tcp_in_trains() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    assert!(two.pings());
    two.transfer(8 << 20);
    // A lane publishes its numbers after each round.
    two.wait_until("the count of all bytes", |two| {
        two.lanes[1].snapshot().counters.rx_bytes >= 8 << 20
    });
    let [client, server] = [0, 1].map(|i| two.lanes[i].snapshot());
    assert!(client.gso_active);
    assert!(client.counters.tun_trains_read > 0 && client.counters.trains_sent > 0);
    assert!(server.counters.trains_received > 0 && server.counters.tun_trains_written > 0);
    assert_eq!(client.peer.endpoint.unwrap().ip(), "192.0.2.2".parse::<IpAddr>().unwrap());
    assert!(server.last_handshake_unix().unwrap() > 1_700_000_000);
}

#[test]
fn an_ipv6_underlay_works_as_well() {
    let two = Two::connected(Offloads::ALL, "fc00::2");
    assert!(two.pings());
    two.transfer(2 << 20);
    assert!(two.lanes[0].snapshot().counters.trains_sent > 0);
}

#[test]
fn server_sends_from_the_address_asked() {
    for asked in ["192.0.2.2", "192.0.2.3", "fc00::2", "fc00::3"] {
        let two = Two::connected(Offloads::ALL, asked);
        let endpoint = |two: &Two| two.lanes[0].snapshot().peer.endpoint.unwrap().ip().to_string();
        assert!(two.pings());
        two.transfer(2 << 20);
        assert_eq!(endpoint(&two), asked, "data");
        two.lanes[1].initiate();
        two.wait_until("a handshake", |two| two.lanes[0].snapshot().counters.handshakes > 1);
        assert_eq!(endpoint(&two), asked, "initiation");
    }
}

/// A single packet shows the client where the server is now.
#[test]
fn removed_source_loses_no_packet() {
    for (asked, prefix) in [("192.0.2.3", 24), ("fc00::3", 64)] {
        let two = Two::connected(Offloads::ALL, asked);
        two.hosts[1].ip(&format!("addr del {asked}/{prefix} dev v0"));
        assert!(two.hosts[1].command(&format!("ping -c 1 -W 2 -q {CLIENT}")), "{asked}");
        two.transfer(1 << 20);
        assert_eq!(two.lanes[0].snapshot().counters.handshakes, 1);
    }
}

/// Trains of UDP datagrams, as QUIC servers send them, are one write to the TUN each, except those of
/// tunnels, and where the kernel's TUN takes none.
#[test]
fn udp_trains_are_joined_towards_the_tun() {
    const VXLAN: u16 = 4789;
    let no_tun = Offloads { tun: false, ..Offloads::ALL };
    for (server, port, is_joined) in
        [(Offloads::ALL, 7002, true), (Offloads::ALL, VXLAN, false), (no_tun, 7002, false)]
    {
        let two = Two::connected_with([Offloads::ALL, server], "192.0.2.2");
        two.transfer_datagrams(40, port);
        let counters = two.lanes[1].snapshot().counters;
        assert_eq!(counters.tun_trains_written > 0, is_joined, "{server:?}, port {port}");
    }
}

/// Between these hosts a train stays whole from the sender's call to the receiver's.
#[test]
fn offload_switches_decide_what_is_on_the_wire() {
    let no_gso = Offloads { gso: false, ..Offloads::ALL };
    let no_gro = Offloads { gro: false, ..Offloads::ALL };
    let no_tun = Offloads { tun: false, ..Offloads::ALL };
    for (client, server, is_train_sent, is_train_received) in [
        (Offloads::ALL, Offloads::ALL, true, true),
        (no_gso, Offloads::ALL, false, false),
        (Offloads::ALL, no_gro, true, false),
        (no_tun, no_tun, true, true),
        (Offloads { gso: false, gro: false, tun: false }, no_gro, false, false),
    ] {
        let case = format!("{client:?} to {server:?}");
        let two = Two::connected_with([client, server], "192.0.2.2");
        let wire = two.watch_wire();
        assert!(two.pings(), "{case}");
        two.transfer(1 << 20);
        let [sender, receiver] = [0, 1].map(|i| two.lanes[i].snapshot());
        assert_eq!(wire.longest() > 1500, is_train_sent, "{case}: {} bytes", wire.longest());
        assert_eq!(sender.gso_active, client.gso, "{case}");
        assert_eq!(receiver.counters.trains_received > 0, is_train_received, "{case}");
        assert_eq!(sender.counters.tun_trains_read > 0, client.tun, "{case}");
    }
}

#[test]
fn a_path_that_refuses_segments_gets_single_datagrams() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    // Linux refuses segments that do not fit the device (EINVAL), but cuts single datagrams to
    // fragments.
    two.hosts[0].ip("link set v0 mtu 1400");
    two.transfer(1 << 20);
    let stats = two.lanes[0].snapshot();
    assert!(!stats.gso_active && stats.counters.trains_sent > 0);
    assert!(two.pings());
}

#[test]
fn datagrams_of_any_size_do_not_end_reception() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    two.hosts[0].run(|| {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        for size in [65_507, 0, 1, 65_000, 3, 148, 32] {
            socket.send_to(&vec![4; size], ("192.0.2.2", PORT)).unwrap();
        }
    });
    assert!(two.pings());
    two.transfer(1 << 20);
}

#[test]
fn full_send_buffer_delays_without_loss() {
    const COUNT: u32 = 300;
    for gso in [true, false] {
        let two = Two::connected(Offloads { gso, ..Offloads::ALL }, "192.0.2.2");
        let small = two.hosts[0].run(|| open_socket(None, Offloads::ALL).unwrap());
        setsockopt(&small, SndBuf, &4096).unwrap();
        two.lanes[0].set_socket(small);
        assert!(two.pings());
        let receiver = two.hosts[1].run(|| UdpSocket::bind((SERVER, 7001)).unwrap());
        receiver.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        setsockopt(&receiver, RcvBufForce, &(4 << 20)).unwrap();
        two.hosts[0].run(|| {
            let sender = UdpSocket::bind((CLIENT, 0)).unwrap();
            for number in 0..COUNT {
                let mut payload = [0; 1200];
                payload[..4].copy_from_slice(&number.to_be_bytes());
                sender.send_to(&payload, (SERVER, 7001)).unwrap();
            }
        });
        let mut buffer = [0; 1300];
        for number in 0..COUNT {
            assert_eq!(receiver.recv(&mut buffer).unwrap(), 1200);
            assert_eq!(buffer[..4], number.to_be_bytes(), "gso {gso}");
        }
    }
}

#[test]
fn new_socket_keeps_session_and_peer_follows() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    let before = two.lanes[1].snapshot().peer.endpoint.unwrap();
    let mut changes = two.lanes[1].changes();
    changes.mark_unchanged();
    let socket = two.hosts[0].run(|| open_socket(None, Offloads::ALL).unwrap());
    let port = socket.local_addr().unwrap().port();
    two.lanes[0].set_socket(socket);
    two.wait_until("the new endpoint", |two| {
        two.lanes[1].snapshot().peer.endpoint == Some(SocketAddr::new(before.ip(), port))
    });
    assert_ne!(before.port(), port);
    assert!(changes.has_changed().unwrap());
    assert!(two.pings());
    two.transfer(1 << 20);
}

#[test]
fn new_keys_take_effect_without_gap() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    two.lanes[0].configure(two.configs[0].clone());
    assert!(two.pings());
    assert_eq!(two.lanes[0].snapshot().counters.handshakes, 1);
    let other = PrivateKey::generate();
    two.lanes[1].configure(Config { peer_key: Some(other.public()), ..two.configs[1].clone() });
    assert!(two.pings(), "before the client has its new key");
    two.lanes[0].configure(Config { private_key: other, ..two.configs[0].clone() });
    assert!(two.pings(), "from one session to the next");
    two.wait_until("a session with the new keys", |two| {
        two.lanes.iter().all(|lane| lane.snapshot().counters.handshakes >= 2)
    });
    assert!(two.pings());
    two.lanes[1].configure(Config { peer_key: None, ..two.configs[1].clone() });
    two.wait_until("the end", |two| !two.lanes[1].snapshot().peer.has_session);
    assert!(!two.pings());
}

#[test]
fn successor_with_its_clock_behind_stamps_later() {
    let mut two = Two::connected(Offloads::ALL, "192.0.2.2");
    let first = two.lanes[0].snapshot().last_stamp.to_unix();
    assert!(first.as_secs() > 1_700_000_000, "{first:?}");
    let floor = Tai64n::from_unix(first + Duration::from_secs(3600));
    two.hosts[0].ip("link del weft0");
    let config = two.configs[0].clone();
    let lane = two.hosts[0].run(move || {
        let tun = open_tun("weft0", Offloads::ALL).unwrap();
        let socket = open_socket(None, Offloads::ALL).unwrap();
        LaneHandle::spawn((tun, socket), Offloads::ALL, config, floor)
    });
    two.lanes[0] = lane.unwrap();
    two.wait_until("a session of the successor", |two| two.lanes[0].snapshot().peer.has_session);
    assert!(two.lanes[0].snapshot().last_stamp > floor);
}

#[test]
fn lost_device_ends_lane_with_error() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    two.hosts[0].ip("link del weft0");
    two.wait_until("the end of the lane", |two| !two.lanes[0].is_running());
    assert!(two.lanes[1].is_running());
}

/// Drops of the client on the way out and of the server on the way in, by what is provoked.
#[test]
fn failures_are_counted_by_cause() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    let out =
        |reason: DropReason| two.lanes[0].snapshot().counters.dropped_outbound[reason.index()];
    assert!(two.pings());
    two.hosts[0].command("nft add table ip block");
    for rule in [
        "add chain ip block out { type filter hook output priority 0 ; }",
        "add rule ip block out udp dport 51820 drop",
    ] {
        assert!(two.hosts[0].command(&format!("nft {rule}")), "{rule}");
    }
    assert!(!two.pings());
    assert!(out(DropReason::SendNotPermitted) > 0);
    assert!(two.hosts[0].command("nft delete table ip block") && two.pings());

    two.hosts[0].ip("route del 192.0.2.0/24 dev v0");
    assert!(!two.pings());
    assert!(out(DropReason::SendUnreachable) > 0);
    two.hosts[0].ip("route add 192.0.2.0/24 dev v0");
    assert!(two.pings());

    two.hosts[1].ip("link set weft0 down");
    assert!(!two.pings());
    let server = two.lanes[1].snapshot().counters;
    assert!(server.dropped_inbound[DropReason::TunError.index()] > 0);
    for full in [DropReason::SocketFull, DropReason::SendError] {
        assert_eq!(out(full), 0, "{full:?}");
    }
    assert_eq!(server.dropped_inbound[DropReason::TunFull.index()], 0);
}

/// The first takes it, the second finds the queue empty.
#[test]
fn lone_packet_takes_two_reads() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    let before = two.reads(1);
    assert!(two.hosts[0].command(&format!("ping -c {PINGS} -i 0.02 -W 2 -q {SERVER}")));
    // And a few for the session.
    let reads = two.reads(1) - before;
    assert!(reads < PINGS * 5 / 2, "{reads} reads for {PINGS} answers");
}

#[test]
fn load_of_a_lane_shows_in_its_numbers() {
    let two = Two::connected(Offloads::ALL, "192.0.2.2");
    let before = two.lanes[1].processor_time().unwrap();
    two.transfer(16 << 20);
    let busy = two.lanes[1].snapshot();
    assert!(busy.turns > 0 && busy.full_reads > 0, "{busy:?}");
    let spent = two.lanes[1].processor_time().unwrap() - before;
    assert!(spent > Duration::from_millis(5), "{spent:?} for 16 MB");
    // A lane without work hardly turns.
    thread::sleep(Duration::from_secs(2));
    let idle = two.lanes[1].snapshot();
    assert!(idle.turns - busy.turns < 100, "{} turns in 2 s", idle.turns - busy.turns);
    assert_eq!(idle.full_reads, two.lanes[1].snapshot().full_reads);
}
