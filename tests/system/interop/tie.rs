use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use fabric_api::PublicKey;
use fabric_api::networking::ConnectionType as Role;
use ipnet::IpNet;
use nix::sys::signal::Signal;
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::Way;
use weft_tests::{
    Cluster, ClusterSpec, Families, Host, Lab, Netns, Program, StockPeer, Tunnel, on_segment, skip,
};

use crate::scene::{TIMEOUT, answers_in_time, first_pod};

/// Stock peers that initiate keep their way through a NAT open, as guides recommend.
const KEEPALIVE: u16 = 25;

/// A stock peer, weft's role, and the family of the underlay between them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) peer: StockPeer,
    pub(crate) role: Role,
    pub(crate) underlay: Families,
}

impl Case {
    /// With every peer that there is a program for, over these underlays.
    pub(crate) fn all(underlays: &[Families]) -> Vec<Self> {
        available().into_iter().flat_map(|peer| Self::of(peer, underlays)).collect()
    }

    /// In both roles.
    pub(crate) fn of(peer: StockPeer, underlays: &[Families]) -> Vec<Self> {
        let in_role = |role| underlays.iter().map(move |&underlay| Self { peer, role, underlay });
        [Role::Client, Role::Server].into_iter().flat_map(in_role).collect()
    }

    pub(crate) fn is_weft_initiator(self) -> bool {
        self.role == Role::Client
    }
}

/// The stock peers that `make peers` could build; the others are reported as skipped.
pub(crate) fn available() -> Vec<StockPeer> {
    StockPeer::ALL.into_iter().filter(|peer| is_available(*peer)).collect()
}

pub(crate) fn is_available(peer: StockPeer) -> bool {
    peer.program().inspect_err(|why| skip(&format!("{why:#}"))).is_ok()
}

/// A peering of weft with one machine that runs a stock peer and is a pod of its cluster as well.
pub(crate) struct Tie {
    pub(crate) case: Case,
    pub(crate) spec: ClusterSpec,
    pub(crate) host: Host,
    tunnel: Tunnel,
    process: Option<Program>,
}

impl Tie {
    /// Applies the peering to weft, then starts the stock peer. The last bytes of the machine's
    /// addresses are `number`, and weft listens on `port` if it is the server.
    pub(crate) fn new(
        lab: &Lab,
        rome: &Cluster,
        (case, spec): (Case, ClusterSpec),
        (number, port): (u8, u16),
    ) -> Result<Self> {
        let addresses = addresses(number).map(on_segment);
        let host = lab.machine(&spec.id, &addresses)?;
        let peering = match case.role {
            Role::Client => {
                let mut peering = Peering::new(&rome.spec, &spec, port);
                peering.endpoint = vec![own_address(case, number).to_string()];
                peering
            }
            Role::Server => Peering::new(&spec, &rome.spec, port),
        };
        let documents = match case.role {
            Role::Client => peering.client_documents(),
            Role::Server => peering.server_documents(),
        };
        rome.apply(&spec.id, &join(&documents))?;
        let tunnel = tunnel(case, &peering, &rome.spec, &spec);
        let process = Some(case.peer.start(&host, &tunnel)?);
        Ok(Self { case, spec, host, tunnel, process })
    }

    pub(crate) fn net(&self) -> &Netns {
        self.host.net()
    }

    /// The public key of weft's end.
    pub(crate) fn weft_key(&self) -> &PublicKey {
        &self.tunnel.peer
    }

    /// Output of the stock peer.
    pub(crate) fn log(&self) -> String {
        self.process.as_ref().map(Program::log).unwrap_or_default()
    }

    /// Waits until packets pass. The stock peer begins, if that is its part.
    pub(crate) fn wait_until_up(&self, rome: &Cluster) -> Result<()> {
        answers_in_time(self.net(), first_pod(rome).addresses[0])
            .and_then(|()| rome.wait_connected(&self.spec.id, TIMEOUT))
            .with_context(|| format!("{} with {}: {}", self.spec.id, self.case.peer, self.log()))
    }

    /// From rome's first pod to the machine.
    pub(crate) fn out(&self, rome: &Cluster, port: u16) -> Result<Way> {
        let seen = rome.view(&self.spec)?.of(self.spec.pod_addresses(1, 1)[0])?;
        let from = first_pod(rome).ns.clone();
        Ok(Way { from, to: SocketAddr::new(seen, port), at: self.net().clone() })
    }

    /// From the machine to rome's first pod.
    pub(crate) fn back(&self, rome: &Cluster, port: u16) -> Way {
        let pod = first_pod(rome);
        let to = SocketAddr::new(pod.addresses[0], port);
        Way { from: self.net().clone(), to, at: pod.ns.clone() }
    }

    /// Kills the stock peer and starts it anew.
    pub(crate) fn restart(&mut self) -> Result<()> {
        let old = self.process.take().context("it runs")?;
        old.signal(Signal::SIGKILL)?;
        old.wait(Duration::from_secs(5))?;
        self.process = Some(self.case.peer.start(&self.host, &self.tunnel)?);
        Ok(())
    }

    /// From now on the peer is seen at another address and port, as behind a NAT that lost its
    /// memory. The machine's own address ends in `old`, the new one in `new`.
    pub(crate) fn move_behind_nat(&self, (old, new): (u8, u8), new_port: u16) -> Result<()> {
        let family = if self.case.underlay == Families::V6 { "ip6" } else { "ip" };
        let (here, there) = (own_address(self.case, old), own_address(self.case, new));
        let port = self.tunnel.listen_port;
        // Deprecated, or the machine would begin to send from it by itself.
        let how = if here.is_ipv6() { " nodad preferred_lft 0" } else { "" };
        self.host.ip(&format!("addr add {} dev eth0{how}\n", on_segment(there)))?;
        self.net().nft(&format!(
            "table inet nat_box {{\n\
             chain out {{ type filter hook postrouting priority 300;\n\
             {family} saddr {here} udp sport {port} {family} saddr set {there} udp sport set {new_port};\n}}\n\
             chain in {{ type filter hook prerouting priority -400;\n\
             {family} daddr {there} udp dport {new_port} {family} daddr set {here} udp dport set {port} accept\n\
             {family} daddr {here} udp dport {port} drop;\n}}\n}}\n"
        ))
    }
}

/// On the segment, of both families.
pub(crate) fn addresses(number: u8) -> [IpAddr; 2] {
    [[192, 0, 2, number].into(), [0x2001, 0xdb8, 2, 0, 0, 0, 0, number.into()].into()]
}

pub(crate) fn own_address(case: Case, number: u8) -> IpAddr {
    addresses(number)[usize::from(case.underlay == Families::V6)]
}

/// The stock peer's end. It translates nothing, so it sees rome as it is.
fn tunnel(case: Case, peering: &Peering, rome: &ClusterSpec, spec: &ClusterSpec) -> Tunnel {
    let (own, peer, number) = match case.role {
        Role::Client => (peering.server_key(), peering.client_key().public(), 1),
        Role::Server => (peering.client_key(), peering.server_key().public(), 2),
    };
    let is_v6 = case.underlay == Families::V6;
    let server = rome.node_addresses(1).into_iter().find(|address| address.is_ipv6() == is_v6);
    let server = server.map(|address| SocketAddr::new(address, peering.port));
    let endpoint = server.filter(|_| !case.is_weft_initiator());
    let host = |address: IpAddr| IpNet::from(address);
    let pod = spec.pod_addresses(1, 1)[0];
    let mut allowed = [&rome.pod_cidrs[..], &rome.external_cidrs].concat();
    allowed.push(host([169, 254, 18, 3 - number].into()));
    Tunnel {
        own: own.clone(),
        peer,
        listen_port: peering.port,
        endpoint,
        keepalive: endpoint.map(|_| KEEPALIVE),
        allowed,
        addresses: vec![host([169, 254, 18, number].into()), host(pod)],
        // To pods as a pod, to the gateway (and its probes) as a gateway.
        source: Some(pod),
        mtu: peering.mtu,
    }
}
