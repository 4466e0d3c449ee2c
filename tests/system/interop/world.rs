//! ```text
//!   pod-1-1 --- rome-1 (gateway of weft) --------- turin-1 (a stock peer): wg0 is all its pods
//!   pod-2-1 --- rome-2 ---+
//! ```
//!
//! Turin's pod CIDR is rome's internal one, so rome sees it elsewhere; a stock peer translates
//! nothing, so turin sees rome as it is.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_api::networking::ConnectionType as Role;
use weft_tests::traffic::{Service, TcpServer, bulk, http_get, ping};
use weft_tests::{ClusterSpec, Families, Netns, StockPeer, wait_until};

use super::tie::{Case, Tie, available};
use crate::scene::{HTTP, PORT, SINK, Scene, TIMEOUT, serve};

/// Longer than a peer that is probed may be silent.
const SILENCE: Duration = Duration::from_secs(8);
const BYTES: u64 = 5_000_000;
/// Last byte of turin's addresses.
const NUMBER: u8 = 49;

#[test]
fn server_carries_all_traffic_with_stock_peers() -> Result<()> {
    available().into_iter().try_for_each(|peer| carries_traffic(peer, Role::Server))
}

#[test]
fn client_carries_all_traffic_with_stock_peers() -> Result<()> {
    available().into_iter().try_for_each(|peer| carries_traffic(peer, Role::Client))
}

/// A stock peer answers no probes, and sends nothing on its own.
#[test]
fn unanswered_probes_are_named_until_off() -> Result<()> {
    let Some(mut world) = World::with_any(Role::Client, &[])? else { return Ok(()) };
    let result = world.is_named_until_not_probed();
    if result.is_err() {
        eprintln!("{}", world.scene.cluster("rome").report());
    }
    result
}

fn carries_traffic(peer: StockPeer, role: Role) -> Result<()> {
    // It has no probe and answers none.
    let world = World::start(peer, role, &["--ping-enabled=false"])?;
    let result = world.traffic_passes();
    if result.is_err() {
        eprintln!("{}\n{}", world.scene.cluster("rome").report(), world.turin.log());
    }
    result.with_context(|| peer.to_string())
}

/// Rome under weft, and turin, which is one machine with a stock peer.
pub(crate) struct World {
    pub(crate) turin: Tie,
    pub(crate) scene: Scene,
}

impl World {
    /// With any stock peer, if there is one. `role` is rome's, `switches` are for its `weft up`.
    pub(crate) fn with_any(role: Role, switches: &[&str]) -> Result<Option<Self>> {
        available().first().map(|peer| Self::start(*peer, role, switches)).transpose()
    }

    fn start(peer: StockPeer, role: Role, switches: &[&str]) -> Result<Self> {
        let mut scene = Scene::build(&[ClusterSpec::new("rome", 1, 2)])?;
        let mut spec = ClusterSpec::new("turin", 3, 1);
        spec.pod_cidrs = scene.clusters[0].spec.internal_cidrs.clone();
        let rome = &mut scene.clusters[0];
        rome.start_up(switches)?;
        rome.start_agent(2)?;
        let case = Case { peer, role, underlay: Families::V4 };
        let turin = Tie::new(&scene.lab, &scene.clusters[0], (case, spec), (NUMBER, PORT))?;
        Ok(Self { turin, scene })
    }

    fn is_named_until_not_probed(&mut self) -> Result<()> {
        let is = |scene: &Scene, state: &str, reason: Option<&str>| {
            let peering = scene.cluster("rome").peering("turin")?;
            let found = peering["faults"][0]["reason"].as_str();
            ensure!(peering["state"] == state && found == reason, "{peering}");
            Ok::<_, anyhow::Error>(())
        };
        let unanswered = Some("NoProbeAnswer");
        wait_until("it is named", TIMEOUT, || is(&self.scene, "Connecting", unanswered))?;
        let rome = self.scene.cluster_mut("rome");
        drop(rome.take_program("weft-up")?);
        rome.start_up(&["--ping-enabled=false"])?;
        wait_until("it is connected", TIMEOUT, || is(&self.scene, "Connected", None))?;
        // Silence is no fault of one that nobody asks.
        (0..20).try_for_each(|_| {
            std::thread::sleep(SILENCE / 20);
            is(&self.scene, "Connected", None)
        })
    }

    fn traffic_passes(&self) -> Result<()> {
        let rome = self.scene.cluster("rome");
        self.turin.wait_until_up(rome)?;
        rome.wait_connected("turin", TIMEOUT)?;
        let real = self.turin.spec.pod_addresses(1, 1)[0];
        let seen = rome.view(&self.turin.spec)?.of(real)?;
        ensure!(seen != real, "turin's {real} lies in rome's internal CIDR, and was not remapped");
        let _http = TcpServer::start(self.turin.net(), HTTP, Service::Http)?;
        let _sink = TcpServer::start(self.turin.net(), SINK, Service::Sink)?;
        for pod in rome.pods() {
            let _servers = serve(pod)?;
            let there = (&pod.ns, seen, pod.addresses[0]);
            reaches(there).with_context(|| format!("{} to turin", pod.name))?;
            let back = (self.turin.net(), pod.addresses[0], seen);
            reaches(back).with_context(|| format!("turin to {}", pod.name))?;
        }
        Ok(())
    }
}

/// From a namespace to an address, which is to see us under another.
fn reaches((ns, to, seen_as): (&Netns, IpAddr, IpAddr)) -> Result<()> {
    let stats = ping(ns, to, 5)?;
    ensure!(stats.lost == 0, "ping: {stats:?}");
    let client = http_get(ns, SocketAddr::new(to, HTTP))?;
    ensure!(client == seen_as, "the server saw {client}, expected {seen_as}");
    bulk(ns, SocketAddr::new(to, SINK), BYTES).map(drop)
}
