//! Clusters with the networks and families that others have.
//!
//! ```text
//!   a -- rome-1 --+--[ switch ]--+-- milan-1 -- a      both clusters have the same network and the same
//!   b -- rome-2 --+              +-- milan-2 -- b      prefixes: pods 10.200.0.0/16, services 10.96.0.0/16
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{
    CALICO, CANAL, FLANNEL, FLANNEL_HOST_GW, Image, KUBE_ROUTER, Network, Project,
};
use weft_tests::traffic::{PingError, Pinger, Service, TcpServer, connect, http_get};
use weft_tests::{ClusterSpec, Lab, Netns, Pod, skip, wait_until};

use crate::in_clear::{Observer, Senders};
use crate::pair::{HTTP, Pair, SOON};
use crate::reach::services_nodes_and_strangers_reach_pods;
use crate::stage::{note, play, rome_and_milan_specs, step};
use crate::status::is_well;
use crate::truth;

/// Time for an answer from the other cluster.
const WAIT: Duration = Duration::from_secs(1);
/// TCP ports of ipam.
const IPAM: u16 = 6000;
const METRICS: u16 = 8084;
/// Parts of the pod CIDRs that are no node's.
const NOBODYS: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 200, 99, 9)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x200, 0, 99, 0, 0, 0, 9)),
];

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn clusters_with_flannel_reach_each_other() -> Result<()> {
    reach_each_other(&FLANNEL)
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn clusters_with_flannels_host_gw_reach_each_other() -> Result<()> {
    reach_each_other(&FLANNEL_HOST_GW)
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn clusters_with_kube_router_reach_each_other() -> Result<()> {
    reach_each_other(&KUBE_ROUTER)
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn clusters_with_canal_reach_each_other() -> Result<()> {
    reach_each_other(&CANAL)
}

/// Addresses of pods lie outside of their node's CIDRs.
#[test]
#[ignore = "minutes long: make soak-rounds"]
fn clusters_with_calico_reach_each_other() -> Result<()> {
    reach_each_other(&CALICO)
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn ipv6_only_clusters_have_all_ways_open() -> Result<()> {
    all_ways_are_open(0, || Ok(()), ClusterSpec::only_ipv6)
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn dual_stack_clusters_have_all_ways_open() -> Result<()> {
    all_ways_are_open(0, || Ok(()), |spec| spec.both_families(true))
}

/// The underlay is itself a VPN, as of hosts that Nebula or Tailscale join, and nodes are like Talos'.
#[test]
#[ignore = "minutes long: make soak-rounds"]
fn read_only_nodes_on_a_vpn_reach_each_other() -> Result<()> {
    all_ways_are_open(0, || Ok(()), |spec| spec.on_vpn().read_only())
}

fn reach_each_other(network: &'static Project) -> Result<()> {
    all_ways_are_open(
        network.policies,
        || network.require(),
        |spec| {
            let spec = if network.has_ipv6 { spec.both_families(false) } else { spec };
            spec.on_network(Network::Of(network))
        },
    )
}

fn all_ways_are_open(
    policies: usize,
    require: impl FnOnce() -> Result<()>,
    of: impl Fn(ClusterSpec) -> ClusterSpec,
) -> Result<()> {
    play(|| match require().and_then(|()| Image::weft()) {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-networks")?;
            let specs = rome_and_milan_specs(2).map(of);
            let pair = Pair::install_on(&lab, &image, specs, &[("a", 1), ("b", 2)])?;
            pair.explained(|| all_ways(&pair, &lab, policies))
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn all_ways(pair: &Pair, lab: &Lab, policies: usize) -> Result<()> {
    for (cluster, pod) in pair
        .clusters
        .iter()
        .zip(&pair.pods)
        .flat_map(|(c, pods)| pods.iter().map(move |pod| (c, pod)))
    {
        ensure!(pod.addresses.len() == cluster.spec.pod_cidrs.len(), "{pod:?}");
    }
    step("both are connected", || pair.connect())?;
    let observer = Observer::start(lab)?;
    let senders = Senders::start(&ways(pair)?)?;
    step("all pods reach all pods", || pair.all_reach_all())?;
    step("services, nodes and strangers reach pods", || {
        services_nodes_and_strangers_reach_pods(pair, lab)
    })?;
    step("addresses of nobody are refused", || nobody_answers(pair))?;
    step("a packet too big for the tunnel is answered", || too_big_is_answered(pair))?;
    if policies > 0 {
        step("network policies hold for remote pods", || policies_hold(pair, policies))?;
        step("ipam answers no pod of another namespace", || ipam_is_closed(pair, policies))?;
    }
    step("weft status finds no fault", || {
        pair.each(|cluster| wait_until("all is well", SOON, || is_well(cluster))).map(drop)
    })?;
    drop(senders);
    let seen = observer.finish()?;
    note(&format!("{} frames in VXLAN, {} in clear", seen.wrapped, seen.frames));
    ensure!(seen.frames == 0 && seen.wrapped > 0, "in clear: {seen:?}");
    if pair.clusters[0].head().addresses[0].is_ipv6() {
        step("packets follow nodes to other addresses", || truth::addresses_change(pair, lab))?;
    }
    Ok(())
}

/// Addresses that no pod has, in the families that pods have.
fn nobodys(pod: &Pod) -> impl Iterator<Item = IpAddr> {
    let families = pod.addresses.iter().map(IpAddr::is_ipv4);
    families.flat_map(|is_ipv4| NOBODYS.into_iter().filter(move |one| one.is_ipv4() == is_ipv4))
}

/// Ways from each cluster's first pod to all pods of its peer and to addresses that none has.
fn ways(pair: &Pair) -> Result<Vec<(&Netns, IpAddr)>> {
    let views = pair.views()?;
    let ways = [(0, &views[0]), (1, &views[1])].into_iter().map(|(from, view)| {
        let there = pair.pods[1 - from].iter().flat_map(|pod| pod.addresses.iter().copied());
        let there = there.chain(nobodys(&pair.pods[from][0])).map(|real| view.of(real));
        Ok((&pair.pods[from][0].ns, there.collect::<Result<Vec<_>>>()?))
    });
    let ways = ways.collect::<Result<Vec<_>>>()?;
    Ok(ways.into_iter().flat_map(|(ns, all)| all.into_iter().map(move |to| (ns, to))).collect())
}

fn nobody_answers(pair: &Pair) -> Result<()> {
    let [of_milan, of_rome] = pair.views()?;
    for (pods, view) in pair.pods.iter().zip([of_milan, of_rome]) {
        for nobody in nobodys(&pods[0]) {
            let pinger = Pinger::new(&pods[0].ns, view.of(nobody)?)?;
            let answer = pinger.echo(1, 56, WAIT)?;
            ensure!(answer.is_err(), "{} got an answer from {nobody}", pods[0].name);
        }
    }
    Ok(())
}

fn too_big_is_answered(pair: &Pair) -> Result<()> {
    let [of_milan, of_rome] = pair.views()?;
    for (from, (to, view)) in [(0, (1, of_milan)), (1, (0, of_rome))] {
        for source in &pair.pods[from] {
            for target in &pair.pods[to] {
                for real in &target.addresses {
                    let pinger = Pinger::new(&source.ns, view.of(*real)?)?;
                    let headers = if real.is_ipv4() { 28 } else { 48 };
                    wait_until(&format!("{} learns the limit", source.name), SOON, || {
                        learns_limit(&pinger, headers)
                    })?;
                }
            }
        }
    }
    Ok(())
}

fn learns_limit(pinger: &Pinger, headers: usize) -> Result<()> {
    let over = pinger.echo(1, 1400, WAIT)?;
    let Err(PingError::TooBig { mtu }) = over else {
        anyhow::bail!("1400 bytes: {over:?}");
    };
    let size = usize::try_from(mtu)?.saturating_sub(headers);
    let fits = pinger.echo(2, size, WAIT)?;
    ensure!(mtu > 1200 && fits.is_ok(), "{mtu} bytes, the limit by that answer: {fits:?}");
    Ok(())
}

/// Rome's pod a calls milan's pods, in each family.
fn policies_hold(pair: &Pair, families: usize) -> Result<()> {
    let mut families = 0..families.min(pair.pods[0][0].addresses.len());
    families.try_for_each(|family| policies_hold_in(pair, family))
}

fn policies_hold_in(pair: &Pair, family: usize) -> Result<()> {
    let [of_milan, of_rome] = pair.views()?;
    let [rome, milan] = &pair.clusters;
    let (source, target) = (&pair.pods[0][0], &pair.pods[1][1]);
    let _server = TcpServer::start(&target.ns, HTTP, Service::Http)?;
    let (there, back) =
        (of_milan.of(target.addresses[family])?, of_rome.of(source.addresses[family])?);
    for (cluster, pod, direction, remote) in
        [(milan, "b", "Ingress", back), (rome, "a", "Egress", there)]
    {
        let to = SocketAddr::new(there, HTTP);
        for (peers, passes) in [(vec![], false), (vec![remote], true)] {
            cluster.apply(&policy(pod, direction, &peers).to_string())?;
            if direction == "Ingress" && peers.is_empty() {
                let own = SocketAddr::new(target.addresses[family], HTTP);
                wait_until("the network holds it for its own pods", SOON, || {
                    let answer = http_get(&pair.pods[1][0].ns, own);
                    ensure!(answer.is_err(), "{answer:?}");
                    Ok(())
                })?;
            }
            let what = format!("{direction} of {peers:?} holds for {pod} of {}", cluster.spec.id);
            wait_until(&what, SOON, || {
                let answer = http_get(&source.ns, to);
                ensure!(answer.is_ok() == passes, "{answer:?}");
                Ok(())
            })?;
        }
        cluster.kubectl(&["delete", "networkpolicy", "--namespace=default", "remote"])?;
        wait_until("all is allowed again", SOON, || http_get(&source.ns, to).map(drop))?;
    }
    Ok(())
}

/// By the chart's NetworkPolicy, which leaves metrics of the same pods open.
fn ipam_is_closed(pair: &Pair, families: usize) -> Result<()> {
    for (cluster, pods) in pair.clusters.iter().zip(&pair.pods) {
        let addresses = "jsonpath={.items[*].status.podIPs[*].ip}";
        let list = ["get", "pods", "--all-namespaces", "--output", addresses];
        let of_ipam = ["--selector", "fabric.weft.dev/program=ipam"];
        let addresses = cluster.kubectl(&[&list[..], &of_ipam].concat())?;
        let mut addresses: Vec<IpAddr> =
            addresses.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        addresses.retain(|address| address.is_ipv4() || families > 1);
        ensure!(!addresses.is_empty(), "{} has no ipam", cluster.spec.id);
        for pod in pods {
            for address in &addresses {
                let at = |port| connect(&pod.ns, SocketAddr::new(*address, port), WAIT);
                // A network may write all of its rules anew for a policy that has just gone.
                wait_until("the policy holds", SOON, || {
                    at(METRICS).with_context(|| format!("metrics at {address} of {}", pod.name))?;
                    ensure!(at(IPAM).is_err(), "ipam at {address} answers pod {}", pod.name);
                    Ok::<_, anyhow::Error>(())
                })?;
            }
        }
    }
    Ok(())
}

/// Policy for one pod that allows these addresses only.
fn policy(pod: &str, direction: &str, peers: &[IpAddr]) -> Value {
    let (list, key) = if direction == "Ingress" { ("ingress", "from") } else { ("egress", "to") };
    let host = |address: &IpAddr| if address.is_ipv4() { 32 } else { 128 };
    let cidrs = peers.iter().map(|address| format!("{address}/{}", host(address)));
    let blocks = cidrs.map(|cidr| json!({"ipBlock": {"cidr": cidr}}));
    let rules: Vec<_> = blocks.map(|block| json!({key: [block]})).collect();
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "remote", "namespace": "default"},
        "spec": {
            "podSelector": {"matchLabels": {"app": pod}}, "policyTypes": [direction], list: rules,
        },
    })
}
