//! One end of the tunnel, and the hosts behind it.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use fabric_primitives::PrivateKey;
use tunnel::{Config, Engine, Remap, Rules, RulesConfig, Stamper, Tai64n};

use crate::network::Made;
use crate::plan::{SECOND, Traffic};
use crate::random::Random;

/// The wall clock at time 0, since 1970.
const START: Duration = Duration::from_secs(1_800_000_000);

/// Lengths of a virtio header, and of IPv4 and UDP.
const VIRTIO: usize = 10;
const HEADERS: usize = 28;

pub(crate) struct End {
    pub(crate) engine: Engine,
    pub(crate) config: Config,
    pub(crate) made: Made,
    /// Its present address.
    pub(crate) address: SocketAddr,
    /// Time of its last restart.
    pub(crate) begun: u64,
    /// Packets that its hosts sent, and whether each arrived.
    pub(crate) arrived: Vec<bool>,
    /// Time at which the next packet is due, if any is.
    pub(crate) due: Option<u64>,
    /// Handshake attempts of engines before this one.
    pub(crate) attempts: u64,
}

impl End {
    pub(crate) fn new(config: Config, address: SocketAddr, seed: u64, now: Instant) -> Self {
        let stamper = Stamper::new(START, now, Tai64n::default());
        Self {
            engine: Engine::new(config.clone(), seed, stamper, now),
            config,
            made: Made::default(),
            address,
            begun: 0,
            arrived: Vec::new(),
            due: None,
            attempts: 0,
        }
    }

    /// The process is killed and started again: it has its config, and where the peer was last.
    pub(crate) fn restart(&mut self, seed: u64, at: u64, now: Instant) {
        self.attempts += self.engine.counters().handshake_attempts;
        let last = self.engine.peer_state().endpoint;
        self.config.endpoint = last.or(self.config.endpoint);
        self.config.initiate = true;
        let stamper = Stamper::new(START + Duration::from_micros(at), now, Tai64n::default());
        self.engine = Engine::new(self.config.clone(), seed, stamper, now);
        self.begun = at;
    }

    pub(crate) fn configure(&mut self, now: Instant) {
        self.engine.configure(self.config.clone(), now);
    }

    pub(crate) fn attempts(&self) -> u64 {
        self.attempts + self.engine.counters().handshake_attempts
    }

    /// Plans the next packet or burst after `at`.
    pub(crate) fn schedule(&mut self, traffic: Traffic, at: u64, random: &mut Random) {
        let interval = match traffic {
            Traffic::Idle => None,
            Traffic::Steady(interval) | Traffic::Bursts(_, interval) => Some(interval),
        };
        self.due = interval.map(|i| at + random.between(i / 2, i + i / 2));
    }

    /// Reads the next packet from the tunnel device and returns its number.
    pub(crate) fn feed(&mut self, end: usize, now: Instant) -> usize {
        let number = self.arrived.len();
        self.arrived.push(false);
        let mut frame = [&[0; VIRTIO][..], &packet(end, number)].concat();
        self.engine.handle_frame(&mut frame, now, &mut self.made);
        number
    }
}

/// The packet that a host behind `end` sends as its `number`th.
pub(crate) fn packet(end: usize, number: usize) -> Vec<u8> {
    let mut random = Random::new((number as u64) << 1 | end as u64);
    let length = 8 + random.pick(&[0, 1, 50, 200, 1240, 1384]);
    let mut packet = vec![0x45, 0];
    packet.extend(((HEADERS + length) as u16).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 10, end as u8, 0, 1, 10, 1 - end as u8, 0, 1]);
    packet.extend([4, 0, 8, 0]);
    packet.extend(((8 + length) as u16).to_be_bytes());
    packet.extend([0, 0]);
    packet.extend((number as u64).to_be_bytes());
    packet.resize(HEADERS + length, random.next() as u8);
    packet
}

/// The number in a packet that was written to a tunnel device.
pub(crate) fn number(frame: &[u8]) -> Option<usize> {
    let bytes = frame.get(VIRTIO + HEADERS..)?.first_chunk().copied()?;
    usize::try_from(u64::from_be_bytes(bytes)).ok()
}

/// Returns the written packet, without the virtio header.
pub(crate) fn written(frame: &[u8]) -> &[u8] {
    &frame[VIRTIO..]
}

/// The config of end `i`: end 0 knows where end 1 is, and initiates.
pub(crate) fn config(
    i: usize,
    keys: &[PrivateKey; 2],
    peer: Option<SocketAddr>,
    keepalive: Option<u64>,
) -> Config {
    let everything = ipnet::Ipv4Net::default().into();
    let rules = RulesConfig {
        own: vec![everything],
        remaps: vec![Remap { remote: everything, local: everything }],
        tunnel_address: Ipv4Addr::new(169, 254, 18, 1 + i as u8),
        peer_tunnel_address: Ipv4Addr::new(169, 254, 18, 2 - i as u8),
        addresses: Vec::new(),
        icmp_sources: Vec::new(),
        mtu: 1420,
    };
    Config {
        private_key: keys[i].clone(),
        peer_key: Some(keys[1 - i].public()),
        endpoint: peer,
        initiate: peer.is_some(),
        unproven: None,
        calls_back: false,
        relay: None,
        keepalive: keepalive.map(Duration::from_secs),
        mtu: rules.mtu,
        #[expect(clippy::unwrap_used, reason = "the same rules for every seed")]
        rules: Rules::new(&rules).unwrap(),
    }
}

/// A key that follows from `random`.
pub(crate) fn key(random: &mut Random) -> PrivateKey {
    let bytes: Vec<u8> = (0..4).flat_map(|_| random.next().to_le_bytes()).collect();
    #[expect(clippy::unwrap_used, reason = "any 32 bytes are a key")]
    PrivateKey::from_bytes(&bytes).unwrap()
}

/// Lifetime of an unused key at both ends, less what clocks and delays may differ by.
pub(crate) const SURELY_VALID: u64 = 178 * SECOND;
