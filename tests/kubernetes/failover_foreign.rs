//! ```text
//!   a -- rome-1 --+--[ switch ]--+-- turin      wireguard-go, server of rome
//!        rome-2 --+              +-- genoa      wireguard-go, client of rome
//!        rome-3 --+              +-- router with NAT -- naples, the same
//! ```
//!
//! Two replicas of each gateway, on rome-2 and rome-3. The clients' endpoint is the node port of rome-1,
//! the API server's node, which is never cut off: a client of one fixed address has no other way.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;
use weft_tests::kubernetes::{Image, Object};
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::{StreamReport, Streams, Way, ping};
use weft_tests::{
    ClusterSpec, Host, Kubernetes, Lab, Netns, Pod, Program, StockPeer, Tunnel, on_segment, skip,
    wait_until,
};

use crate::failover::{
    self, AFTERWARDS, Active, TAKEN_OVER, active, are_ready, leave_first_node, rounds,
};
use crate::pair::{SOON, TIMEOUT};
use crate::stage::{all_of, note, play, step};

/// Such peers answer no probes.
const VALUES: &str = "--set=controllerManager.pod.extraArgs={--refuse-for=3,--ping-enabled=false}";
const STREAM: u16 = 7001;
const OFTEN: Duration = Duration::from_millis(2);
/// Time for which a node is cut off: longer than wireguard-go sends without an answer before it initiates.
const CUT_OFF: Duration = Duration::from_secs(25);
/// Time without traffic before and after a take-over: wireguard-go sends a keepalive within 10 s of what it has
/// received, the next one not before the streams.
const IDLE: Duration = Duration::from_secs(14);
/// In seconds, as guides recommend for clients behind a NAT.
const KEEPALIVE: u16 = 25;
const SERVER_PORT: u16 = 51_820;
const MASQUERADE: &str = "table ip nat_box {
    chain out { type nat hook postrouting priority srcnat; oifname eth0 masquerade; }
}";

/// Something that takes the tunnel from a replica.
struct Event {
    what: &'static str,
    run: fn(&Kubernetes, &Active) -> Result<()>,
    undo: fn(&Kubernetes, &Active) -> Result<()>,
    lasts: Duration,
    /// The outage depends on nothing but weft and kube-proxy.
    is_limited: bool,
    /// Nothing is sent before and after it; then the streams begin.
    is_idle: bool,
}

impl Event {
    const fn of_pod(what: &'static str, run: fn(&Kubernetes, &Active) -> Result<()>) -> Self {
        Self { what, run, undo: |_, _| Ok(()), lasts: AFTERWARDS, is_limited: true, is_idle: false }
    }
}

const EVENTS: [Event; 6] = [
    Event::of_pod("its process is killed", failover::kill),
    Event::of_pod("its pod is deleted at once", failover::delete_at_once),
    Event::of_pod("its pod is deleted", failover::delete),
    Event::of_pod("its Deployment is restarted", failover::restart),
    Event {
        is_idle: true,
        ..Event::of_pod("its process is killed while nothing is sent", failover::kill)
    },
    Event {
        what: "its node is cut off",
        run: failover::cut_off,
        undo: failover::give_back,
        lasts: CUT_OFF,
        is_limited: false,
        is_idle: false,
    },
];

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn take_over_towards_wireguard_go() -> Result<()> {
    play(|| match StockPeer::WireguardGo.program().and_then(|_| Image::weft()) {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-failover-foreign")?;
            let specs = [ClusterSpec::new("rome", 1, 3)];
            let [rome] = step("a cluster comes up", || all_of(&lab, specs))?;
            let result = live(&lab, &rome, &image);
            result.inspect_err(|_| eprintln!("{}", rome.report()))
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn live(lab: &Lab, rome: &Kubernetes, image: &Image) -> Result<()> {
    let pods = rome.run_pods(&[("a", 1)])?;
    let pod = pods.first().context("a pod runs")?;
    rome.load(image)?;
    step("the chart is installed", || {
        let replicas = format!("--set={}", failover::REPLICAS);
        rome.install_weft_with(&[VALUES, &replicas], TIMEOUT)?;
        leave_first_node(rome)
    })?;
    let router = lab.router()?;
    router.net().nft(MASQUERADE)?;
    let on_switch = |name, last| lab.machine(name, &[on_segment([192, 0, 2, last].into())]);
    let naples = [on_segment([198, 51, 100, 52].into())];
    let naples = lab.machine_behind(&router, &router, ("naples", &naples))?;
    let remotes = step("wireguard-go is connected in each role", || {
        let server = Remote::server(rome, on_switch("turin", 50)?, [192, 0, 2, 50].into())?;
        let genoa = Remote::client(rome, on_switch("genoa", 51)?, 30_743)?;
        let remotes = [server, genoa, Remote::client(rome, naples, 30_744)?];
        remotes.iter().try_for_each(|remote| remote.wait_connected(rome, pod))?;
        Ok(remotes)
    })?;
    let mut missed = Vec::new();
    for remote in &remotes {
        for event in &EVENTS {
            for _ in 0..rounds() {
                let streams = remote.take_tunnel(rome, pod, event)?;
                let outages = streams.each_ref().map(|stream| stream.longest_outage);
                let text = format!("{}: {}: outages {outages:?}", remote.name(), event.what);
                note(&text);
                let is_over = outages.iter().any(|outage| *outage > TAKEN_OVER);
                missed.extend((event.is_limited && is_over).then_some(text));
            }
        }
    }
    ensure!(missed.is_empty(), "longer than {TAKEN_OVER:?}: {missed:#?}");
    Ok(())
}

/// A machine with wireguard-go, which is gateway and pod of its cluster.
struct Remote {
    spec: ClusterSpec,
    gateway: Object<'static>,
    host: Host,
    process: Program,
}

impl Remote {
    /// Rome's gateway is the client.
    fn server(rome: &Kubernetes, host: Host, address: IpAddr) -> Result<Self> {
        let spec = spec(host.name())?;
        let mut peering = Peering::new(&rome.spec, &spec, SERVER_PORT);
        peering.endpoint = vec![address.to_string()];
        let tunnel = Tunnel {
            own: peering.server_key().clone(),
            peer: peering.client_key().public(),
            ..tunnel(&rome.spec, &spec, &peering)
        };
        Self::start(rome, (host, spec), &peering.client_documents(), &tunnel)
    }

    /// Rome's gateway is the server.
    fn client(rome: &Kubernetes, host: Host, node_port: u16) -> Result<Self> {
        let spec = spec(host.name())?;
        let peering = Peering::new(&spec, &rome.spec, node_port);
        let tunnel = Tunnel {
            endpoint: Some(SocketAddr::new(rome.spec.node_address(1), node_port)),
            keepalive: Some(KEEPALIVE),
            ..tunnel(&rome.spec, &spec, &peering)
        };
        Self::start(rome, (host, spec), &peering.server_documents(), &tunnel)
    }

    fn start(
        rome: &Kubernetes,
        (host, spec): (Host, ClusterSpec),
        documents: &[String],
        tunnel: &Tunnel,
    ) -> Result<Self> {
        wait_until("the manifests are taken", SOON, || rome.apply(&join(documents)))?;
        let process = StockPeer::WireguardGo.start(&host, tunnel)?;
        let gateway = match spec.id.as_str() {
            "turin" => Object::new("gatewayclient", "liqo-tenant-turin", "client"),
            "genoa" => Object::new("gatewayserver", "liqo-tenant-genoa", "server"),
            _ => Object::new("gatewayserver", "liqo-tenant-naples", "server"),
        };
        Ok(Self { spec, gateway, host, process })
    }

    fn name(&self) -> &str {
        &self.spec.id
    }

    fn net(&self) -> &Netns {
        self.host.net()
    }

    fn wait_connected(&self, rome: &Kubernetes, pod: &Pod) -> Result<()> {
        wait_until("rome's pod answers pings", TIMEOUT, || {
            let stats = ping(self.net(), pod.addresses[0], 3)?;
            ensure!(stats.lost == 0, "{stats:?}; {}", self.process.log());
            Ok(())
        })?;
        wait_until("both replicas are ready", TIMEOUT, || are_ready(rome, self.gateway))
    }

    /// Reports on a stream each way: from rome, and to rome.
    fn take_tunnel(
        &self,
        rome: &Kubernetes,
        pod: &Pod,
        event: &Event,
    ) -> Result<[StreamReport; 2]> {
        // Events of other peers have taken its tunnel, too.
        self.wait_connected(rome, pod)?;
        let (own, real) = (self.spec.pod_addresses(1, 1)[0], pod.addresses[0]);
        let address = |address| SocketAddr::new(address, STREAM);
        let to_peer = address(rome.view(&self.spec)?.of(own)?);
        let ways = [
            Way { from: pod.ns.clone(), to: to_peer, at: self.net().clone() },
            Way { from: self.net().clone(), to: address(real), at: pod.ns.clone() },
        ];
        let before = active(rome, self.gateway)?;
        ensure!(before.node != rome.head().name, "a gateway runs on the endpoint's node");
        let happen = || take_tunnel(rome, self.gateway, event, &before);
        if event.is_idle {
            std::thread::sleep(IDLE);
            happen()?;
            std::thread::sleep(IDLE);
        }
        let streams = Streams::start(&ways, OFTEN, 0)?;
        let result = if event.is_idle { Ok(()) } else { happen() };
        // An outage ends before the streams do.
        let result = result.and_then(|()| self.wait_connected(rome, pod));
        let reports = streams.stop();
        result.with_context(|| format!("{}: {}: {reports:?}", self.name(), event.what))?;
        reports.try_into().ok().context("two streams")
    }
}

fn take_tunnel(
    rome: &Kubernetes,
    gateway: Object<'static>,
    event: &Event,
    before: &Active,
) -> Result<()> {
    (event.run)(rome, before)?;
    std::thread::sleep(event.lasts);
    (event.undo)(rome, before)?;
    wait_until("another replica is active", TIMEOUT, || {
        let after = active(rome, gateway)?.address;
        ensure!(after != before.address, "{after} is still active");
        are_ready(rome, gateway)
    })
}

fn spec(name: &str) -> Result<ClusterSpec> {
    let mut spec = ClusterSpec::new(name, 3, 1);
    spec.pod_cidrs = vec!["10.201.0.0/16".parse()?];
    Ok(spec)
}

/// The end of a client without an endpoint. It translates nothing, so rome's prefixes are its own.
fn tunnel(rome: &ClusterSpec, spec: &ClusterSpec, peering: &Peering) -> Tunnel {
    let pod = spec.pod_addresses(1, 1)[0];
    Tunnel {
        own: peering.client_key().clone(),
        peer: peering.server_key().public(),
        listen_port: SERVER_PORT,
        endpoint: None,
        keepalive: None,
        allowed: [&rome.pod_cidrs[..], &rome.external_cidrs].concat(),
        addresses: vec![IpNet::from(pod)],
        source: Some(pod),
        mtu: peering.mtu,
    }
}
