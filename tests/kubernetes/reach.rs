//! Ways to pods of the other cluster that do not begin in a pod, or lead through a Service.
//!
//! ```text
//!   pods of rome --- ClusterIP --\
//!   nodes of rome -- ClusterIP ---+--[ kube-proxy ]-- weft -- pods of milan
//!   a stranger ----- NodePort ---/
//!
//!   pods of milan -- IP of a ClusterIP -- weft --[ kube-proxy ]-- pods of rome, its API server
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::Object;
use weft_tests::traffic::{Service, TcpServer, connect, http_get};
use weft_tests::{Lab, Netns, Pod, View, on_segment, wait_until};

use crate::pair::{HTTP, Pair, SOON, reach};

const NODE_PORT: u16 = 30800;
const HTTPS: u16 = 443;
/// Part of the pod CIDRs that is no node's.
const ELSEWHERE: u8 = 77;
/// Addresses on the segment, and in no cluster.
const FOREIGN_POD: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 200)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 200)),
];

/// In each family that pods have.
pub(crate) fn services_nodes_and_strangers_reach_pods(pair: &Pair, lab: &Lab) -> Result<()> {
    let serve = |pod: &Pod| TcpServer::start(&pod.ns, HTTP, Service::Http);
    let _servers = pair.pods[1].iter().map(serve).collect::<Result<Vec<_>>>()?;
    let stranger = lab.machine("stranger", &FOREIGN_POD.map(on_segment))?;
    let mut families = pair.pods[1][0].addresses.iter().map(IpAddr::is_ipv4);
    families.try_for_each(|is_ipv4| family_reaches_pods(pair, stranger.net(), is_ipv4))
}

fn family_reaches_pods(pair: &Pair, stranger: &Netns, is_ipv4: bool) -> Result<()> {
    let [rome, milan] = &pair.clusters;
    let [of_milan, of_rome] = pair.views()?;
    let of_family = |addresses: &[IpAddr]| {
        addresses.iter().copied().find(|address| address.is_ipv4() == is_ipv4)
    };
    let own = |pod: &Pod| of_family(&pod.addresses).context("no address of the family");
    let there = pair.pods[1].iter().map(|pod| of_milan.of(own(pod)?));
    let there = there.collect::<Result<Vec<_>>>()?;
    rome.apply(&service(&there, if is_ipv4 { "IPv4" } else { "IPv6" }))?;
    let service = rome.get(Object::new("service", "default", "there"))?;
    let cluster_ip = service["spec"]["clusterIP"].as_str().context("no ClusterIP")?.parse()?;

    for pod in &pair.pods[0] {
        let seen = get(&pod.ns, cluster_ip, HTTP, &pod.name)?;
        ensure!(seen == of_rome.of(own(pod)?)?, "{} is seen as {seen}", pod.name);
    }
    for node in &rome.machines {
        for address in there.iter().copied().chain([cluster_ip]) {
            is_of(get(node.host.net(), address, HTTP, &node.name)?, &of_rome)?;
        }
        // Nodes may have one family while pods have both.
        let Some(of_node) = of_family(&node.addresses) else { continue };
        is_of(get(stranger, of_node, NODE_PORT, "a stranger")?, &of_rome)?;
        let beside = milan.head();
        is_of(get(beside.host.net(), of_node, NODE_PORT, &beside.name)?, &of_rome)?;
    }
    rome.kubectl(&["delete", "service,endpointslice", "--namespace=default", "there"]).map(drop)
}

/// Endpoints of a Service are on both nodes, those of the API server on the first one.
pub(crate) fn ips_of_services_lead_to_endpoints(pair: &Pair) -> Result<()> {
    let rome = &pair.clusters[0];
    let [of_milan, of_rome] = pair.views()?;
    let serve = |pod: &Pod| TcpServer::start(&pod.ns, HTTP, Service::Http);
    let _servers = pair.pods[0].iter().map(serve).collect::<Result<Vec<_>>>()?;
    let here: Vec<_> = pair.pods[0].iter().map(|pod| pod.addresses[0]).collect();
    rome.apply(&service(&here, "IPv4"))?;
    rome.apply(&ip("there", &rome.get(Object::new("service", "default", "there"))?, true))?;
    rome.apply(&ip("api", &rome.get(Object::new("service", "default", "kubernetes"))?, false))?;
    let [there, api] = ["there", "api"].map(|name| {
        let what = Object::new("ips.ipam.liqo.io", "default", name);
        rome.wait_for(what, "jsonpath={.status.ip}", SOON)?;
        let granted = rome.get(what)?["status"]["ip"].as_str().context("no address")?.parse()?;
        of_rome.of(granted)
    });
    let (there, api) = (there?, api?);
    for pod in &pair.pods[1] {
        // Each connection goes to one of the endpoints.
        for _ in 0..8 {
            let seen = get(&pod.ns, there, HTTP, &pod.name)?;
            let is_milans = of_milan.0.iter().any(|(_, local)| local.net().contains(&seen));
            ensure!(!is_milans, "{} is seen as {seen}, which is not masqueraded", pod.name);
        }
        connect(&pod.ns, SocketAddr::new(api, HTTPS), SOON)
            .with_context(|| format!("{} reaches rome's API server by {api}", pod.name))?;
    }
    let left = "service/there,endpointslice/there,ips.ipam.liqo.io/there,ips.ipam.liqo.io/api";
    let delete = ["delete", "--namespace=default"];
    rome.kubectl(&[&delete[..], &left.split(',').collect::<Vec<_>>()].concat()).map(drop)
}

/// An IP of a Service's ClusterIP.
fn ip(name: &str, service: &Value, masquerade: bool) -> String {
    json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "IP",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"ip": service["spec"]["clusterIP"], "masquerade": masquerade}})
    .to_string()
}

/// One of rome's nodes gives a pod an address that is in no prefix of that node's.
pub(crate) fn pods_elsewhere_reach_and_are_reached(pair: &Pair) -> Result<()> {
    let rome = &pair.clusters[0];
    rome.move_pods(2, ELSEWHERE)?;
    let pods = rome.run_pods(&[("elsewhere", 2)])?;
    let address = pods[0].addresses[0];
    let inside = rome.spec.node_pod_cidrs(ELSEWHERE).iter().any(|cidr| cidr.contains(&address));
    ensure!(inside, "{} has {address}", pods[0].name);
    let node = Object::new("nodeconfig", "", &rome.machines[1].name);
    wait_until("its node's config has the pod", SOON, || is_local(&rome.get(node)?, address))?;
    let [of_milan, of_rome] = pair.views()?;
    reach(&pods, &pair.pods[1], (&of_milan, &of_rome))?;
    reach(&pair.pods[1], &pods, (&of_rome, &of_milan))?;
    rome.kubectl(&["delete", "pod", "--namespace=default", "elsewhere"])?;
    rome.move_pods_back(2)
}

fn is_local(config: &Value, pod: IpAddr) -> Result<()> {
    let local = config["spec"]["localPods"].as_array().into_iter().flatten();
    let is_reported = local.filter_map(Value::as_str).any(|cidr| cidr == format!("{pod}/32"));
    let applied = config["status"]["appliedGeneration"] == config["metadata"]["generation"];
    ensure!(is_reported && applied, "{config}");
    Ok(())
}

/// The client's address as a pod of milan sees it.
fn get(from: &Netns, address: IpAddr, port: u16, who: &str) -> Result<IpAddr> {
    let mut seen = None;
    let to = SocketAddr::new(address, port);
    wait_until(&format!("{who} reaches {to}"), SOON, || {
        seen = Some(http_get(from, to)?);
        Ok::<_, anyhow::Error>(())
    })?;
    seen.context("nothing was seen")
}

/// Fails unless a pod sees an address of the peer, which it can answer.
pub(crate) fn is_of(seen: IpAddr, peer: &View) -> Result<()> {
    let is_in_one = peer.0.iter().any(|(_, local)| local.net().contains(&seen));
    ensure!(is_in_one, "{seen} is seen, which is in no prefix of the peer: {peer:?}");
    Ok(())
}

/// A Service whose endpoints are these, as a reflector of a peer's Services makes it.
fn service(endpoints: &[IpAddr], family: &str) -> String {
    let endpoints = endpoints.iter().map(|address| format!("- addresses: ['{address}']\n"));
    format!(
        "apiVersion: v1\n\
         kind: Service\n\
         metadata: {{name: there, namespace: default}}\n\
         spec: {{type: NodePort, ipFamilies: [{family}], ports: [{{name: http, port: {HTTP}, nodePort: {NODE_PORT}}}]}}\n\
         ---\n\
         apiVersion: discovery.k8s.io/v1\n\
         kind: EndpointSlice\n\
         metadata: {{name: there, namespace: default, labels: {{kubernetes.io/service-name: there}}}}\n\
         addressType: {family}\n\
         ports: [{{name: http, port: {HTTP}}}]\n\
         endpoints:\n{}",
        endpoints.collect::<String>()
    )
}
