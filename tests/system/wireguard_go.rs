//! ```text
//!   pod-1-1 --- rome-1 (gateway of weft) --------- turin-1 (wireguard-go): wg0 is all its pods
//!   pod-2-1 --- rome-2 ---+
//! ```
//!
//! Turin's pod CIDR is rome's internal one, so rome sees it elsewhere; wireguard-go translates
//! nothing, so turin sees rome as it is.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use fabric_api::networking::ConnectionType as Role;
use ipnet::IpNet;
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::{Service, TcpServer, bulk, http_get, ping};
use weft_tests::{
    ClusterSpec, Host, Program, Tunnel, on_segment, skip, start_wireguard_go, wireguard_go,
};

use crate::scene::{HTTP, PATIENCE, PORT, SINK, Scene, serve};

const BYTES: u64 = 5_000_000;

#[test]
fn as_a_server_weft_carries_traffic_with_wireguard_go() -> Result<()> {
    carries_traffic(Role::Server)
}

#[test]
fn as_a_client_weft_carries_traffic_with_wireguard_go() -> Result<()> {
    carries_traffic(Role::Client)
}

fn carries_traffic(role: Role) -> Result<()> {
    // It has no probe and answers none.
    let Some(world) = World::start(role, &["--ping-enabled=false"])? else { return Ok(()) };
    let result = world.traffic_passes();
    if result.is_err() {
        eprintln!("{}\n{}", world.scene.cluster("rome").report(), world.tunnel.log());
    }
    result
}

/// Rome under weft, and turin, which is one machine with wireguard-go.
pub(crate) struct World {
    pub(crate) tunnel: Program,
    pub(crate) turin: Host,
    pub(crate) spec: ClusterSpec,
    pub(crate) scene: Scene,
}

impl World {
    /// `None` if there is no wireguard-go. `role` is rome's, `switches` are for its `weft up`.
    pub(crate) fn start(role: Role, switches: &[&str]) -> Result<Option<Self>> {
        let program = wireguard_go();
        if !program.exists() {
            skip(&format!("wireguard-go is not there: {}", program.display()));
            return Ok(None);
        }
        let mut scene = Scene::build(&[ClusterSpec::new("rome", 1, 2)])?;
        let mut spec = ClusterSpec::new("turin", 3, 1);
        spec.pod_cidrs = scene.clusters[0].spec.internal_cidrs.clone();
        let turin = scene.lab.machine("turin-1", &[on_segment(spec.node_address(1))])?;

        let rome = &mut scene.clusters[0];
        rome.start_up(switches)?;
        rome.start_agent(2)?;
        let peering = match role {
            Role::Client => Peering::new(&rome.spec, &spec, PORT),
            Role::Server => Peering::new(&spec, &rome.spec, PORT),
        };
        let documents = match role {
            Role::Client => peering.client_documents(),
            Role::Server => peering.server_documents(),
        };
        rome.apply("turin", &join(&documents))?;
        let tunnel = start_wireguard_go(&program, &turin, &tunnel(role, &peering, &spec))?;
        // To pods as a pod, to the gateway (and its probes) as a gateway.
        let (pods, pod) = (scene.clusters[0].spec.pod_cidrs[0], spec.pod_addresses(1, 1)[0]);
        turin.ip(&format!("route replace {pods} dev wg0 src {pod}\n"))?;
        Ok(Some(Self { tunnel, turin, spec, scene }))
    }

    fn traffic_passes(&self) -> Result<()> {
        let rome = self.scene.cluster("rome");
        rome.wait_connected("turin", PATIENCE)?;
        let real = self.spec.pod_addresses(1, 1)[0];
        let seen = rome.view(&self.spec)?.of(real)?;
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
fn reaches((ns, to, seen_as): (&weft_tests::Netns, IpAddr, IpAddr)) -> Result<()> {
    let stats = ping(ns, to, 5)?;
    ensure!(stats.lost == 0, "ping: {stats:?}");
    let client = http_get(ns, SocketAddr::new(to, HTTP))?;
    ensure!(client == seen_as, "the server saw {client}, expected {seen_as}");
    bulk(ns, SocketAddr::new(to, SINK), BYTES).map(drop)
}

/// Turin's end of the peering.
fn tunnel(role: Role, peering: &Peering, spec: &ClusterSpec) -> Tunnel {
    let rome = if role == Role::Client { &peering.client } else { &peering.server };
    let (own, peer, number) = match role {
        Role::Client => (peering.server_key(), peering.client_key().public(), 1),
        Role::Server => (peering.client_key(), peering.server_key().public(), 2),
    };
    let server = SocketAddr::new(rome.node_address(1), PORT);
    let host = |address: IpAddr| IpNet::from(address);
    let mut allowed = [&rome.pod_cidrs[..], &rome.external_cidrs].concat();
    allowed.push(host([169, 254, 18, 3 - number].into()));
    Tunnel {
        own: own.clone(),
        peer,
        listen_port: PORT,
        endpoint: (role == Role::Server).then_some(server),
        allowed,
        addresses: vec![host([169, 254, 18, number].into()), host(spec.pod_addresses(1, 1)[0])],
        mtu: peering.mtu,
    }
}
