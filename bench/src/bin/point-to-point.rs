//! One lane between a TUN device and a peer, without anything else of weft around it: what the
//! dataplane alone can do. Addresses pass unchanged.
//!
//!     point-to-point TUN PRIVATE_KEY PEER_KEY PORT [ENDPOINT] [--no-gso] [--no-gro] [--no-tun-offload]
//!         [--cipher=ring|avx2|avx512]
//!
//! Keys are 64 hex digits, PORT is where to listen, ENDPOINT is ADDRESS:PORT of the peer; without
//! it the peer is waited for. Each line on standard input prints the counters to standard error, its
//! end ends the program.

use std::io::Read;
use std::net::SocketAddr;

use aead::Implementation;
use anyhow::{Context, bail};
use fabric_api::{PrivateKey, PublicKey};
use lane::{Config, LaneHandle, Offloads, open_socket, open_tun};
use tunnel::{Rules, RulesConfig, Tai64n};

const MTU: usize = 1420;

fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let (switches, arguments): (Vec<_>, Vec<_>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let [tun, private_key, peer_key, port, endpoint @ ..] = arguments.as_slice() else {
        bail!("expected TUN PRIVATE_KEY PEER_KEY PORT [ENDPOINT]");
    };
    let is_off = |name: &str| switches.iter().any(|switch| switch == name);
    let offloads = Offloads {
        gso: !is_off("--no-gso"),
        gro: !is_off("--no-gro"),
        tun: !is_off("--no-tun-offload"),
    };
    if let Some(cipher) = switches.iter().find_map(|switch| switch.strip_prefix("--cipher=")) {
        let cipher: Implementation = cipher.parse().map_err(anyhow::Error::msg)?;
        cipher.force().context("--cipher")?;
    }
    let endpoint: Option<SocketAddr> =
        endpoint.first().map(|text| text.parse()).transpose().context("ENDPOINT")?;
    let config = Config {
        private_key: PrivateKey::from_bytes(&key(private_key)?)?,
        peer_key: Some(PublicKey::from_bytes(&key(peer_key)?)?),
        initiate: endpoint.is_some(),
        endpoint,
        unproven: None,
        calls_back: false,
        relay: None,
        keepalive: None,
        mtu: MTU,
        rules: Rules::new(&RulesConfig::transparent(MTU))?,
    };
    let socket = open_socket(Some(port.parse().context("PORT")?), offloads).context("socket")?;
    let lane =
        LaneHandle::spawn((open_tun(tun, offloads)?, socket), offloads, config, Tai64n::default())?;
    let mut input = std::io::stdin();
    // Each line requests the counters; the end of the input ends the program.
    let mut buffer = [0; 64];
    while input.read(&mut buffer)? > 0 {
        eprintln!("{:?}", lane.snapshot());
    }
    eprintln!("{:?}", lane.snapshot());
    lane.stop();
    Ok(())
}

fn key(hex: &str) -> anyhow::Result<Vec<u8>> {
    (0..hex.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(hex.get(i..i + 2)?, 16).ok())
        .collect::<Option<_>>()
        .context("a key is 64 hex digits")
}
