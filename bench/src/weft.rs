//! weft as a contestant: two bare lanes, or two whole clusters.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fabric_api::PrivateKey;
use weft_tests::manifests::{Peering, join};
use weft_tests::{Cluster, ClusterSpec, Program, hex};

use crate::abba::Contestant;
use crate::flow::{End, Flow, Load};
use crate::lab::{Lab, MTU, UNDERLAY};

const PORT: u16 = 51820;
const DEVICE: &str = "weft0";
/// Between applying the manifests and both sides reporting that they are connected.
const UP: Duration = Duration::from_secs(20);

/// A lane at each of the two gateways of `lab`, with nothing else of weft around it.
pub(crate) fn start_lanes(
    lab: &Lab,
    number: u8,
    load: Load<'_>,
) -> Result<(Contestant, Vec<Program>)> {
    let program = lane_program()?;
    let keys = [PrivateKey::generate(), PrivateKey::generate()];
    let mut running = Vec::new();
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
        running.push(lab.start(side, &mut command)?);
    }
    lab.wait_for_device(DEVICE).with_context(|| logs(&running))?;
    let flows = lab.flows(number, DEVICE, load).with_context(|| logs(&running))?;
    let contestant = Contestant {
        label: "weft".to_owned(),
        pids: running.iter().map(Program::pid).collect(),
        sender: lab.sender(),
        flows,
    };
    Ok((contestant, running))
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

fn logs(running: &[Program]) -> String {
    let logs: Vec<String> = running.iter().map(Program::log).collect();
    format!("no path through the lanes; their logs:\n{}", logs.join("\n"))
}

/// Two clusters with the same pod CIDR and one node and one pod each, joined by weft.
pub(crate) struct Fabric {
    clusters: [Cluster; 2],
    _lab: weft_tests::Lab,
}

impl Fabric {
    pub(crate) fn start() -> Result<Self> {
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
        Ok(Self { clusters, _lab: lab })
    }

    /// Flows from the pod of the one cluster to the pod of the other, by its remapped address.
    pub(crate) fn contestant(&self, load: Load<'_>) -> Result<Contestant> {
        let congestion = load.congestion;
        let [rome, milan] = &self.clusters;
        let (from, from_address) = pod(rome)?;
        let (to, to_address) = pod(milan)?;
        let target = rome.view(&milan.spec)?.of(to_address)?;
        let bridge = rome.spec.pod_addresses(1, 0)[0];
        from.ip(&format!("route replace {target} via {bridge} congctl {congestion}"))?;
        let sender = End { net: from.clone(), address: SocketAddr::new(from_address, 0) };
        let sink = End { net: to, address: SocketAddr::new(to_address, 0) };
        let flows = (0..load.flows).map(|_| Flow::open_towards(&sender, &sink, target, load));
        let flows = flows.collect::<Result<_>>().context("no way from pod to pod")?;
        let pids: Vec<i32> =
            self.clusters.iter().flat_map(|cluster| cluster.processes(0, "gateway")).collect();
        ensure!(pids.len() == 2, "expected one gateway in each cluster, found {pids:?}");
        Ok(Contestant { label: "weft, pod to pod".to_owned(), pids, sender: from, flows })
    }
}

fn pod(cluster: &Cluster) -> Result<(weft_tests::Netns, IpAddr)> {
    let pod = cluster.pods().next().context("the cluster has no pod")?;
    let address = pod.addresses.first().context("the pod has no address")?;
    Ok((pod.ns.clone(), *address))
}
