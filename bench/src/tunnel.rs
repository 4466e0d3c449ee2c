//! Tunnels that are compared: bare lanes of weft, stock WireGuards, and two whole clusters.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_api::PrivateKey;
use weft_tests::manifests::{Peering, join};
use weft_tests::{Cluster, ClusterSpec, Netns, Program, STOCK_DEVICE, StockPeer, hex};

use crate::flow::{CONGESTION, End};
use crate::lab::{Lab, MTU, UNDERLAY};

const PORT: u16 = 51820;
const DEVICE: &str = "weft0";
/// Between applying the manifests and both sides reporting that they are connected.
const UP: Duration = Duration::from_secs(20);

/// A tunnel that is up, between two ends.
pub(crate) struct Tunnel {
    pub(crate) label: String,
    pub(crate) ends: [End; 2],
    /// Its gateways' processes.
    pub(crate) pids: Vec<i32>,
    machines: Machines,
}

/// Machines and programs that end with a tunnel.
enum Machines {
    Gateways { lab: Lab, _programs: Vec<Program> },
    Fabric { _clusters: Box<[Cluster; 2]>, _lab: weft_tests::Lab },
}

impl Tunnel {
    /// A lane at each of two gateways, with nothing else of weft around it.
    pub(crate) fn lanes() -> Result<Self> {
        let lab = Lab::new().context("cannot set the namespaces up")?;
        let program = lane_program()?;
        let keys = [PrivateKey::generate(), PrivateKey::generate()];
        let mut programs = Vec::new();
        for (side, own) in keys.iter().enumerate() {
            let mut command = Command::new("sh");
            // The program ends with its standard input: a pipe that is open at both ends never does.
            command.args(["-c", "mkfifo \"$0\" && exec \"$@\" 0<>\"$0\"", "/run/lane.in"]);
            command.arg(&program).args([
                DEVICE,
                &hex(own.expose()),
                &hex(keys[1 - side].public().as_bytes()),
                &PORT.to_string(),
                &format!("{}:{PORT}", UNDERLAY[1 - side]),
            ]);
            programs.push(lab.start(side, &mut command)?);
        }
        let logs = || programs.iter().map(Program::log).collect::<Vec<_>>().join("\n");
        lab.wait_for_device(DEVICE).with_context(logs)?;
        Self::between_gateways("weft".to_owned(), lab, DEVICE, programs)
    }

    /// A stock WireGuard at each of two gateways.
    pub(crate) fn stock(peer: StockPeer) -> Result<Self> {
        let lab = Lab::new().context("cannot set the namespaces up")?;
        let keys = [PrivateKey::generate(), PrivateKey::generate()];
        let mut programs = Vec::new();
        for (side, gateway) in lab.gateways().iter().enumerate() {
            let tunnel = weft_tests::Tunnel {
                own: keys[side].clone(),
                peer: keys[1 - side].public(),
                listen_port: PORT,
                endpoint: Some((UNDERLAY[1 - side], PORT).into()),
                keepalive: Some(5),
                allowed: vec!["10.0.0.0/8".parse()?],
                addresses: Vec::new(),
                source: None,
                mtu: MTU,
            };
            programs.push(peer.start(gateway, &tunnel)?);
        }
        Self::between_gateways(peer.to_string(), lab, STOCK_DEVICE, programs)
    }

    fn between_gateways(
        label: String,
        lab: Lab,
        device: &str,
        programs: Vec<Program>,
    ) -> Result<Self> {
        let ends = lab.ends(device)?;
        let pids = programs.iter().map(Program::pid).collect();
        Ok(Self { label, ends, pids, machines: Machines::Gateways { lab, _programs: programs } })
    }

    /// All of weft between two pods, of two clusters with the same pod CIDR and one node each.
    pub(crate) fn fabric() -> Result<Self> {
        let lab = weft_tests::Lab::new("weft-bench-fabric")?;
        let specs = [("rome", 1), ("milan", 2)].map(|(id, number)| ClusterSpec::new(id, number, 1));
        let mut peering = Peering::new(&specs[0], &specs[1], 31820);
        peering.mtu = MTU;
        let documents = [peering.client_documents(), peering.server_documents()];
        let [rome, milan] = specs;
        let mut clusters = [Cluster::new(&lab, rome)?, Cluster::new(&lab, milan)?];
        for (cluster, documents) in clusters.iter_mut().zip(&documents) {
            cluster.apply("peering", &join(documents))?;
            cluster.start()?;
        }
        let [rome, milan] = &clusters;
        for (cluster, peer) in [(rome, milan), (milan, rome)] {
            let connected = cluster.wait_connected(&peer.spec.id, UP);
            connected
                .with_context(|| format!("the log of weft up:\n{}", cluster.log("weft-up")))?;
        }
        let ends = [pod_seen_by(rome, milan)?, pod_seen_by(milan, rome)?];
        for (end, peer, cluster) in [(&ends[0], &ends[1], rome), (&ends[1], &ends[0], milan)] {
            let bridge = cluster.spec.pod_addresses(1, 0)[0];
            let target = peer.seen;
            end.net.ip(&format!("route replace {target} via {bridge} congctl {CONGESTION}"))?;
        }
        let pids: Vec<i32> =
            clusters.iter().flat_map(|cluster| cluster.processes(0, "gateway")).collect();
        ensure!(pids.len() == 2, "expected one gateway in each cluster, found {pids:?}");
        let machines = Machines::Fabric { _clusters: Box::new(clusters), _lab: lab };
        Ok(Self { label: "weft, pod to pod".to_owned(), ends, pids, machines })
    }

    /// Switches UDP segmentation of the underlay between two gateways on or off.
    pub(crate) fn set_udp_segmentation(&self, on: bool) -> Result<()> {
        match &self.machines {
            Machines::Gateways { lab, .. } => lab.set_udp_segmentation(on),
            Machines::Fabric { .. } => Ok(()),
        }
    }
}

fn pod_seen_by(cluster: &Cluster, peer: &Cluster) -> Result<End> {
    let (net, address) = pod(cluster)?;
    Ok(End { net, address, seen: peer.view(&cluster.spec)?.of(address)? })
}

fn pod(cluster: &Cluster) -> Result<(Netns, IpAddr)> {
    let pod = cluster.pods().next().context("the cluster has no pod")?;
    let address = pod.addresses.first().context("the pod has no address")?;
    Ok((pod.ns.clone(), *address))
}

/// Path of `point-to-point`, which cargo puts beside this program.
fn lane_program() -> Result<PathBuf> {
    let this = std::env::current_exe().context("finding this program")?;
    let program = this.with_file_name("point-to-point");
    ensure!(
        program.exists(),
        "{} is missing; build it with `cargo build --release --workspace --bins`",
        program.display()
    );
    Ok(program)
}
