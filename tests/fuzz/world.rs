//! An engine and a peer that seals arbitrary content.

use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use boringtun::noise::{Tunn, TunnResult};
use boringtun::x25519;
use fabric_api::{PrivateKey, PublicKey};
use ipnet::IpNet;
use tunnel::{
    AddressMap, Config, Datagrams, DropReason, Engine, Received, Remap, Rules, RulesConfig,
    Stamper, Tai64n, Wire,
};

/// Lifetime of a world by its own clock: so short that no key is due for renewal.
const LIFE: Duration = Duration::from_secs(96);

/// Lifetime of a world by the real clock, the only one that the peer's boringtun reads: with a
/// handshake that has had no answer for 90 s it gives up the session, too.
const REAL_LIFE: Duration = Duration::from_secs(45);

/// Output of an engine.
#[derive(Default)]
pub(crate) struct Made {
    pub(crate) sent: Vec<(SocketAddr, Vec<u8>)>,
    pub(crate) frames: Vec<Vec<u8>>,
}

impl Wire for Made {
    fn send(&mut self, train: Datagrams<'_>) -> Result<(), DropReason> {
        assert!(train.bytes.len() <= 65_507 && train.bytes.len() <= 64 * train.segment_size);
        let datagrams = train.bytes.chunks(train.segment_size);
        self.sent.extend(datagrams.map(|datagram| (train.path.remote, datagram.to_vec())));
        Ok(())
    }

    fn write(&mut self, frame: &[u8]) -> Result<(), DropReason> {
        self.frames.push(frame.to_vec());
        Ok(())
    }
}

/// An engine with a session.
pub(crate) struct World {
    pub(crate) engine: Engine,
    pub(crate) peer: Peer,
    pub(crate) made: Made,
    pub(crate) now: Instant,
    born: Instant,
}

/// The other end, which has no rules. It learns the engine's address from received datagrams.
pub(crate) struct Peer {
    tunn: Tunn,
    buffer: Vec<u8>,
}

pub(crate) fn engine_key() -> PrivateKey {
    PrivateKey::from_bytes(&[0x41; 32]).unwrap()
}

pub(crate) fn peer_key() -> PrivateKey {
    PrivateKey::from_bytes(&[0x42; 32]).unwrap()
}

pub(crate) fn peer_address() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 2], 51820))
}

/// Address that is not the peer's.
pub(crate) fn elsewhere() -> SocketAddr {
    SocketAddr::from(([203, 0, 113, 9], 4444))
}

/// A cluster that sees its peer, which has the same prefixes, elsewhere.
pub(crate) fn rules_config() -> RulesConfig {
    RulesConfig {
        own: nets(&["10.0.0.0/16", "10.70.0.0/16", "fd00:a::/48"]),
        remaps: vec![
            remap("10.0.0.0/16", "10.1.0.0/16"),
            remap("10.80.0.0/20", "10.2.16.0/20"),
            remap("fd00:a::/48", "fd00:b::/48"),
        ],
        tunnel_address: [169, 254, 18, 1].into(),
        peer_tunnel_address: [169, 254, 18, 2].into(),
        addresses: vec![AddressMap { external: ip("10.70.0.9"), target: ip("192.168.7.7") }],
        icmp_sources: vec![ip("10.70.0.1")],
        mtu: 1420,
    }
}

/// Prefixes that the engine may send from and to, and those that it may write from and to.
pub(crate) static SENT_FROM: Prefixes =
    LazyLock::new(|| nets(&["10.0.0.0/16", "10.70.0.0/16", "fd00:a::/48", "169.254.18.1/32"]));
pub(crate) static SENT_TO: Prefixes =
    LazyLock::new(|| nets(&["10.0.0.0/16", "10.80.0.0/20", "fd00:a::/48", "169.254.18.2/32"]));
pub(crate) static WRITTEN_FROM: Prefixes =
    LazyLock::new(|| nets(&["10.1.0.0/16", "10.2.16.0/20", "fd00:b::/48", "169.254.18.2/32"]));
pub(crate) static WRITTEN_TO: Prefixes = LazyLock::new(|| {
    let own = ["10.0.0.0/16", "10.70.0.0/16", "fd00:a::/48"];
    nets(&[&own[..], &["169.254.18.1/32", "192.168.7.7/32"]].concat())
});

type Prefixes = LazyLock<Vec<IpNet>>;

pub(crate) fn is_in(address: IpAddr, prefixes: &[IpNet]) -> bool {
    prefixes.iter().any(|net| net.contains(&address))
}

pub(crate) fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

pub(crate) fn remap(remote: &str, local: &str) -> Remap {
    Remap { remote: remote.parse().unwrap(), local: local.parse().unwrap() }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(crate) fn config(rules: &RulesConfig, own: &PrivateKey, peer: PublicKey) -> Config {
    Config {
        private_key: own.clone(),
        peer_key: Some(peer),
        endpoint: Some(peer_address()),
        initiate: true,
        unproven: None,
        calls_back: false,
        relay: None,
        keepalive: None,
        mtu: rules.mtu,
        rules: Rules::new(rules).unwrap(),
    }
}

/// An engine whose initiations are later than those of all before.
pub(crate) fn engine(config: Config, seed: u64, now: Instant) -> Engine {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Engine::new(config, seed, Stamper::new(unix, now, Tai64n::default()), now)
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        let config = config(&rules_config(), &engine_key(), peer_key().public());
        let mut world = Self {
            engine: engine(config, 1, now),
            peer: Peer::new(&peer_key(), engine_key().public()),
            made: Made::default(),
            now,
            born: now,
        };
        world.connect();
        world
    }

    /// Calls `test` with a world that has a session and has lain still for `pause`.
    pub(crate) fn after(pause: Duration, test: impl FnOnce(&mut Self)) {
        thread_local! {
            static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
        }
        WORLD.with_borrow_mut(|world| {
            // A test that panics leaves nothing behind.
            let used = world.take().filter(|world| {
                world.now + pause < world.born + LIFE && world.born.elapsed() < REAL_LIFE
            });
            let mut used = used.unwrap_or_else(Self::new);
            used.now += pause;
            used.engine.handle_timeout(used.now, &mut Made::default());
            test(&mut used);
            used.made = Made::default();
            *world = Some(used);
        });
    }

    fn connect(&mut self) {
        self.engine.handle_timeout(self.now, &mut self.made);
        let (_, initiation) = self.made.sent.pop().unwrap();
        let response = self.peer.answer(&initiation).unwrap();
        self.receive(peer_address(), &response, response.len(), 0);
        let (_, keepalive) = self.made.sent.pop().unwrap();
        assert_eq!(self.peer.open(&keepalive), Some(Vec::new()));
    }

    /// The peer opens what was sent, which confirms a handshake, and shows its endpoint by a keepalive.
    pub(crate) fn settle(&mut self) {
        for (_, message) in self.made.sent.drain(..) {
            self.peer.open(&message);
        }
        let keepalive = self.peer.seal(&[]);
        self.receive(peer_address(), &keepalive, keepalive.len(), 0);
        assert_eq!(self.engine.peer_state().endpoint, Some(peer_address()));
    }

    /// The engine reads `bytes` from its socket.
    pub(crate) fn receive(&mut self, from: SocketAddr, bytes: &[u8], segment: usize, tos: u8) {
        let bytes = &mut bytes.to_vec();
        let train = Received { path: from.into(), bytes, segment_size: segment.max(1), tos };
        self.engine.handle_datagrams(train, self.now, &mut self.made);
        self.engine.flush(self.now, &mut self.made);
    }

    /// The engine reads `frame` from its tunnel device.
    pub(crate) fn read(&mut self, frame: &[u8]) {
        self.engine.handle_frame(&mut frame.to_vec(), self.now, &mut self.made);
        self.engine.flush(self.now, &mut self.made);
    }

    pub(crate) fn dropped(&self) -> u64 {
        let counters = self.engine.counters();
        counters.dropped_inbound.iter().chain(&counters.dropped_outbound).sum()
    }
}

impl Peer {
    pub(crate) fn new(own: &PrivateKey, engine: PublicKey) -> Self {
        let private = x25519::StaticSecret::from(*own.expose());
        let public = x25519::PublicKey::from(*engine.as_bytes());
        Self { tunn: Tunn::new(private, public, None, None, 7, None), buffer: vec![0; 66_000] }
    }

    /// A datagram that holds `packet`, which need not be one.
    pub(crate) fn seal(&mut self, packet: &[u8]) -> Vec<u8> {
        let sealed = self.tunn.encapsulate(packet, &mut self.buffer);
        let TunnResult::WriteToNetwork(datagram) = sealed else { panic!("no session: {sealed:?}") };
        datagram.to_vec()
    }

    pub(crate) fn initiate(&mut self) -> Vec<u8> {
        let made = self.tunn.format_handshake_initiation(&mut self.buffer, true);
        let TunnResult::WriteToNetwork(initiation) = made else { panic!("none: {made:?}") };
        initiation.to_vec()
    }

    /// Returns the peer's answer to a handshake message.
    pub(crate) fn answer(&mut self, message: &[u8]) -> Option<Vec<u8>> {
        match self.tunn.decapsulate(None, message, &mut self.buffer) {
            TunnResult::WriteToNetwork(answer) => Some(answer.to_vec()),
            TunnResult::Done
            | TunnResult::Err(_)
            | TunnResult::WriteToTunnelV4(..)
            | TunnResult::WriteToTunnelV6(..) => None,
        }
    }

    /// The packet in a data message of the engine, empty in a keepalive.
    pub(crate) fn open(&mut self, datagram: &[u8]) -> Option<Vec<u8>> {
        match self.tunn.decapsulate(None, datagram, &mut self.buffer) {
            TunnResult::WriteToTunnelV4(packet, _) => Some(packet.to_vec()),
            TunnResult::WriteToTunnelV6(packet, _) => Some(packet.to_vec()),
            TunnResult::Done => Some(Vec::new()),
            TunnResult::WriteToNetwork(_) | TunnResult::Err(_) => None,
        }
    }
}
