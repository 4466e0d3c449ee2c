//! Liqo's other modules on the network that weft is: peering, pods of a namespace that run in the other
//! cluster, their Services, and the end of the peering.
//!
//! ```text
//!   rome (consumer)                                  milan (provider)
//!   near, far's shadow, liqoctl -- rome-1 --+--[ switch ]--+-- milan-1 -- far
//! ```

mod direct;
mod disturbed;
mod network_test;
mod no_networking;
mod repairs;
mod uninstall;
mod writes;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{BUSYBOX, Image, Object, require_liqo};
use weft_tests::traffic::{Service, TcpServer, connect, http_get};
use weft_tests::{ClusterSpec, Kubernetes, Lab, Pod, skip, wait_until};

use crate::calls::list;
use crate::inventory::Inventory;
use crate::liqoctl::{liqoctl, on_both};
use crate::pair::{HTTP, SOON, TIMEOUT};
use crate::reach::is_of;
use crate::stage::{all_of, each, note, play, step};
pub(crate) use repairs::addresses;
use repairs::shadow_is_at;

pub(crate) const DEMO: &str = "demo";
/// The namespace of the peering in rome.
const TENANT: &str = "liqo-tenant-milan";
/// Time that the end of a peering may take: Liqo's controllers, then Kubernetes, which collects what they
/// owned, and until nothing is sent to the peer any more.
const GONE: Duration = Duration::from_secs(120);
const HTTPS: u16 = 443;
const VIRTUAL_KUBELET: &str = "--selector=offloading.liqo.io/component=virtual-kubelet";
/// Those of a peering whose namespaces are deleted. Pods are replaced while their Deployments are there.
const LEFT_BY_ALL: [&str; 3] = ["Pod ", "ForeignCluster ", "CertificateSigningRequest "];
/// Kinds and names: Liqo never removes a ForeignCluster, nor Leases, nonces and certificates from a
/// namespace that stays; requests for certificates go after an hour. Its replicator keeps a Renew and its
/// credentials if `liqoctl unpeer` deletes the other cluster's Tenant, or a network in-band, before it has
/// deleted the other cluster's Renew.
const LEFT_BY_OTHERS: [&str; 7] = [
    LEFT_BY_ALL[0],
    LEFT_BY_ALL[1],
    LEFT_BY_ALL[2],
    "Lease ",
    "Secret liqo-",
    "Renew ",
    "Secret kubeconfig-controlplane-",
];

#[test]
fn namespaces_are_offloaded_off_network_and_in_band() -> Result<()> {
    play_on(["rome", "milan"], |_, clusters| {
        no_networking::peer_stays_off(clusters)?;
        live(clusters, &["--in-band"])
    })
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn namespace_is_offloaded_after_peering_out_of_band() -> Result<()> {
    play_on(["rome", "milan"], |_, clusters| {
        live(clusters, &[])?;
        let before = each(clusters, inventory)?;
        note("the same again");
        join(clusters, &[])?;
        part(clusters, &before)
    })
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn namespaces_end_with_peering_in_band() -> Result<()> {
    play_on(["rome", "milan"], |_, clusters| {
        let [rome, milan] = clusters;
        let before = each(clusters, |cluster| inventory_without(cluster, &LEFT_BY_ALL))?;
        for _ in 0..2 {
            step("liqoctl peers them", || peer(rome, milan, &["--in-band"]))?;
            step("authentication ends, through the network", || unauthenticate(rome))?;
            step("liqoctl unpeers them", || {
                on_both(rome, milan, &["unpeer", "--delete-namespaces", "--skip-confirm"])
            })?;
            step("nothing of the peering is left", || {
                nothing_left(clusters, &before, &LEFT_BY_ALL)
            })?;
            for cluster in clusters {
                let names = cluster.kubectl(&["get", "namespaces", "--output=name"])?;
                ensure!(!names.contains("liqo-tenant"), "{}: {names}", cluster.spec.id);
            }
        }
        Ok(())
    })
}

/// Runs a test on clusters of one node each with Liqo and weft, unless something is missing here.
fn play_on<const N: usize>(
    ids: [&str; N],
    test: impl FnOnce(&Lab, &[Kubernetes; N]) -> Result<()>,
) -> Result<()> {
    let mut numbers = 1..;
    let specs = ids.map(|id| ClusterSpec::new(id, numbers.next().unwrap_or_default(), 1));
    play_specs(specs, test)
}

fn play_specs<const N: usize>(
    specs: [ClusterSpec; N],
    test: impl FnOnce(&Lab, &[Kubernetes; N]) -> Result<()>,
) -> Result<()> {
    play(|| match require_liqo().and_then(|()| Image::weft()) {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-beside-liqo")?;
            let clusters = step("clusters come up", || all_of(&lab, specs))?;
            let installed = step("Liqo and weft are installed", || {
                each(&clusters, |cluster| install(cluster, &image))
            });
            let result = installed.and_then(|_| test(&lab, &clusters));
            if result.is_err() {
                clusters.iter().for_each(explain);
            }
            result
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn install(cluster: &Kubernetes, weft: &Image) -> Result<()> {
    label_head(cluster)?;
    cluster.load(weft)?;
    cluster.install_liqo(TIMEOUT)?;
    cluster.install_weft(TIMEOUT)
}

/// liqoctl finds the API server's address by this label.
pub(crate) fn label_head(cluster: &Kubernetes) -> Result<()> {
    let head = cluster.spec.node_name(1);
    cluster.kubectl(&["label", "node", &head, "node-role.kubernetes.io/control-plane="]).map(drop)
}

fn live(clusters: &[Kubernetes; 2], way: &[&str]) -> Result<()> {
    let before = each(clusters, inventory)?;
    join(clusters, way)?;
    step("networking stays on, with few writes", || writes::stays_on(clusters))?;
    part(clusters, &before)
}

/// Peers them and offloads a namespace, whose pods then reach each other.
fn join(clusters: &[Kubernetes; 2], way: &[&str]) -> Result<()> {
    let [rome, milan] = clusters;
    step("liqoctl peers them", || peer(rome, milan, way))?;
    step("liqoctl shows it", || {
        let info = liqoctl(rome, &["info", "--get", "clusterid"])?;
        let peer = liqoctl(rome, &["info", "peer", &milan.spec.id])?;
        ensure!(info.trim() == "rome" && peer.contains("Remapped to"), "{info}{peer}");
        clusters.iter().try_for_each(is_healthy)
    })?;
    let [near, far] = step("a namespace is offloaded", || offload(rome, milan))?;
    step("Liqo's virtual kubelet leads", || leads(rome))?;
    step("pods reach each other, by address and by Service", || reach(clusters, [&near, &far]))?;
    step("the home API server is that of the offloaded pod", || reaches_home(clusters, &far))
}

/// All pods in Liqo's namespace are ready. Those that were replaced may still end.
fn is_healthy(cluster: &Kubernetes) -> Result<()> {
    wait_until(&format!("{} is healthy", cluster.spec.id), SOON, || {
        let info: Value = serde_json::from_str(&liqoctl(cluster, &["info", "--output=json"])?)?;
        ensure!(info["health"]["healthy"] == true, "{}", info["health"]);
        Ok(())
    })
}

/// `rome` is the consumer, its gateway the client.
pub(crate) fn peer(rome: &Kubernetes, provider: &Kubernetes, way: &[&str]) -> Result<()> {
    let line = ["peer", "--gw-server-service-type=NodePort", "--timeout=180s", "--skip-confirm"];
    on_both(rome, provider, &[&line[..], way].concat())
}

/// Ends offloading and peering, after which everything is as it was before.
fn part(clusters: &[Kubernetes; 2], before: &[Inventory]) -> Result<()> {
    let [rome, milan] = clusters;
    step("liqoctl unpeers them", || {
        liqoctl(rome, &["unoffload", "namespace", DEMO, "--skip-confirm"])?;
        rome.kubectl(&["delete", "namespace", DEMO])?;
        on_both(rome, milan, &["unpeer", "--skip-confirm"])
    })?;
    step("nothing of the peering is left", || nothing_left(clusters, before, &LEFT_BY_OTHERS))
}

/// Ends the authentication of a peering while there is its Tenant, and in-band its network: without
/// either Liqo's replicator cannot delete the other cluster's Renew, and keeps its own.
fn unauthenticate(rome: &Kubernetes) -> Result<()> {
    for kinds in ["virtualnodes,resourceslices.authentication.liqo.io", "identities"] {
        rome.kubectl(&["delete", kinds, "--all", "--namespace", TENANT])?;
    }
    let gone = ["wait", "--for=delete", "renews", "--all", "--timeout=60s"];
    rome.kubectl(&[&gone[..], &["--namespace", TENANT]].concat()).map(drop)
}

fn nothing_left(clusters: &[Kubernetes; 2], before: &[Inventory], but: &[&str]) -> Result<()> {
    clusters.iter().zip(before).try_for_each(|(cluster, before)| {
        wait_until(&format!("all of it is gone in {}", cluster.spec.id), GONE, || {
            networking_is_off(cluster)?;
            inventory_without(cluster, but)?.ensure_no_more(before, &[])
        })
    })
}

/// Without what Liqo and Kubernetes leave of a peering.
fn inventory(cluster: &Kubernetes) -> Result<Inventory> {
    inventory_without(cluster, &LEFT_BY_OTHERS)
}

fn inventory_without(cluster: &Kubernetes, kinds: &[&str]) -> Result<Inventory> {
    Ok(kinds.iter().fold(Inventory::of(cluster)?, |all, kind| all.without(kind)))
}

/// In ForeignClusters that are there.
fn networking_is_off(cluster: &Kubernetes) -> Result<()> {
    for foreign_cluster in list(cluster, "foreignclusters", None, "")? {
        let networking = &foreign_cluster["status"]["modules"]["networking"];
        let conditions = networking["conditions"].as_array().map_or(0, Vec::len);
        ensure!(networking["enabled"] == false && conditions == 0, "{foreign_cluster}");
    }
    Ok(())
}

/// Pods near and far, the latter in milan.
pub(crate) fn offload(rome: &Kubernetes, milan: &Kubernetes) -> Result<[Pod; 2]> {
    rome.kubectl(&["create", "namespace", DEMO])?;
    let strategy = "--namespace-mapping-strategy=EnforceSameName";
    liqoctl(rome, &["offload", "namespace", DEMO, strategy])?;
    let place = json!({"nodeName": rome.spec.node_name(1)});
    let virtual_node = json!({"nodeSelector": {"liqo.io/type": "virtual-node"}});
    let items: Vec<Value> = [("near", place), ("far", virtual_node)]
        .into_iter()
        .flat_map(|(name, place)| [pod(name, place), service(name)])
        .collect();
    rome.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string())?;
    for name in ["near", "far"] {
        rome.wait_for(Object::new("pod", DEMO, name), "condition=Ready", TIMEOUT)?;
    }
    Ok([rome.pod(DEMO, "near")?, milan.pod(DEMO, "far")?])
}

fn pod(name: &str, place: Value) -> Value {
    let mut spec = json!({
        "automountServiceAccountToken": false,
        "terminationGracePeriodSeconds": 0,
        "containers": [{"name": "main", "image": BUSYBOX, "imagePullPolicy": "Never"}],
    });
    if let (Some(spec), Value::Object(place)) = (spec.as_object_mut(), place) {
        spec.extend(place);
    }
    let metadata = json!({"name": name, "namespace": DEMO, "labels": {"app": name}});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
}

fn service(pod: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": service_of(pod), "namespace": DEMO},
        "spec": {"type": "NodePort", "selector": {"app": pod}, "ports": [{"port": HTTP}]}})
}

/// Name of a pod's Service. Liqo's network deletes one that is called like an offloaded pod, and so like its IP.
pub(crate) fn service_of(pod: &str) -> String {
    format!("{pod}-service")
}

/// A virtual kubelet reflects Services while it holds this Lease. The one of a peering before has not
/// released it, nor the one of its node, so the next one waits for both of them to expire, one after the
/// other: 15 s and up to 6 s between two tries each.
pub(crate) fn leads(rome: &Kubernetes) -> Result<()> {
    wait_until("the virtual kubelet holds the Lease", GONE, || {
        let pods = ["get", "pods", "--namespace", TENANT, VIRTUAL_KUBELET, "--output=name"];
        let pods = rome.kubectl(&pods)?;
        let lease = rome.get(Object::new("lease", TENANT, "virtual-kubelet-leader-election"))?;
        let holder = lease["spec"]["holderIdentity"].as_str().context("the Lease has no holder")?;
        ensure!(pods.trim() == format!("pod/{holder}"), "{holder} has it, of {pods}");
        Ok(())
    })
}

/// Pods and nodes.
fn reach(clusters: &[Kubernetes; 2], pods: [&Pod; 2]) -> Result<()> {
    pods_reach(clusters, pods, SOON)?;
    nodes_reach(clusters, pods)
}

/// Each by the other's address as its own cluster sees it, and by its Service there.
pub(crate) fn pods_reach(
    clusters: &[Kubernetes; 2],
    [near, far]: [&Pod; 2],
    within: Duration,
) -> Result<()> {
    let (began, [rome, milan]) = (Instant::now(), clusters);
    let [seen_near, seen_far] = as_seen(clusters, [near, far])?;
    ensure!(seen_far != far.addresses[0], "both clusters have the same pod CIDR");
    let serve = |pod: &Pod| TcpServer::start(&pod.ns, HTTP, Service::Http);
    let _servers = [serve(near)?, serve(far)?];
    wait_until("far has its address as rome sees it", within, || shadow_is_at(rome, seen_far))?;
    for (from, cluster, name, address, source) in
        [(near, rome, "far", seen_far, seen_near), (far, milan, "near", seen_near, seen_far)]
    {
        let left = within.saturating_sub(began.elapsed());
        wait_until(&format!("{name} answers"), left, || {
            let seen = http_get(&from.ns, SocketAddr::new(address, HTTP))?;
            ensure!(seen == source, "{name} at {address} saw {seen}, not {source}");
            let service = service_address(cluster, name)?;
            let seen = http_get(&from.ns, SocketAddr::new(service, HTTP))?;
            ensure!(seen == source, "{name} behind {service} saw {seen}, not {source}");
            Ok(())
        })?;
    }
    Ok(())
}

/// The node of each cluster reaches the other's pod, by its address and by its Service; the other's node does so by
/// a port of this one's.
fn nodes_reach(clusters: &[Kubernetes; 2], [near, far]: [&Pod; 2]) -> Result<()> {
    let [rome, milan] = clusters;
    let (of_milan, of_rome) = (rome.view(&milan.spec)?, milan.view(&rome.spec)?);
    let [seen_near, seen_far] = as_seen(clusters, [near, far])?;
    let serve = |pod: &Pod| TcpServer::start(&pod.ns, HTTP, Service::Http);
    let _servers = [serve(near)?, serve(far)?];
    for (cluster, other, name, address, view) in
        [(rome, milan, "far", seen_far, &of_rome), (milan, rome, "near", seen_near, &of_milan)]
    {
        let service = cluster.get(Object::new("service", DEMO, &service_of(name)))?;
        let port =
            service["spec"]["ports"][0]["nodePort"].as_u64().context("it has a node port")?;
        let at_node = SocketAddr::new(cluster.head().addresses[0], u16::try_from(port)?);
        let [pod, service] = [address, service_address(cluster, name)?];
        for (from, to) in [
            (cluster, SocketAddr::new(pod, HTTP)),
            (cluster, SocketAddr::new(service, HTTP)),
            (other, at_node),
        ] {
            let node = from.head();
            wait_until(&format!("{name} answers {} at {to}", node.name), SOON, || {
                is_of(http_get(node.host.net(), to)?, view)
            })?;
        }
    }
    Ok(())
}

/// Addresses of near and far as the other cluster sees them.
pub(crate) fn as_seen(clusters: &[Kubernetes; 2], [near, far]: [&Pod; 2]) -> Result<[IpAddr; 2]> {
    let [rome, milan] = clusters;
    let (of_milan, of_rome) = (rome.view(&milan.spec)?, milan.view(&rome.spec)?);
    Ok([of_rome.of(near.addresses[0])?, of_milan.of(far.addresses[0])?])
}

fn service_address(cluster: &Kubernetes, pod: &str) -> Result<IpAddr> {
    let service = cluster.get(Object::new("service", DEMO, &service_of(pod)))?;
    let address = service["spec"]["clusterIP"].as_str().context("it has an address")?;
    Ok(address.parse()?)
}

pub(crate) fn reaches_home([rome, milan]: &[Kubernetes; 2], far: &Pod) -> Result<()> {
    let mapped = rome.get(Object::new("ips.ipam.liqo.io", "liqo", "api-server"))?;
    let mapped = mapped["status"]["ip"].as_str().context("it has an address")?.parse()?;
    let expected = milan.view(&rome.spec)?.of(mapped)?;
    let pod = milan.get(Object::new("pod", DEMO, "far"))?;
    let aliases = pod["spec"]["hostAliases"].as_array().into_iter().flatten();
    let is_api_server = |alias: &&Value| {
        let names = alias["hostnames"].as_array();
        names.is_some_and(|names| names.contains(&json!("kubernetes.default")))
    };
    let alias = aliases.clone().find(is_api_server);
    let address =
        alias.with_context(|| format!("no alias of it in {}", pod["spec"]))?["ip"].clone();
    let address: IpAddr = address.as_str().context("an alias has an address")?.parse()?;
    ensure!(address == expected, "{address} is not {expected}, which stands for rome's");
    connect(&far.ns, SocketAddr::new(address, HTTPS), SOON)?;
    Ok(())
}

fn explain(cluster: &Kubernetes) {
    eprintln!("{}", cluster.report());
    for namespace in ["liqo", TENANT] {
        eprintln!("{}", cluster.logs(namespace, "app.kubernetes.io/part-of=liqo"));
        eprintln!("{}", cluster.logs(namespace, "offloading.liqo.io/component=virtual-kubelet"));
    }
    let questions = "namespaces,ips,configurations,foreignclusters,virtualnodes,resourceslices,shadowendpointslices";
    let all = cluster.kubectl(&["get", questions, "--all-namespaces", "--output=yaml"]);
    eprintln!("{}", all.unwrap_or_else(|error| format!("{error:#}")));
}
