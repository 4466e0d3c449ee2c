//! Liqo's other modules on the network that weft is: peering, pods of a namespace that run in the other
//! cluster, their Services.
//!
//! ```text
//!   rome (consumer)                                  milan (provider)
//!   near, far's shadow, liqoctl -- rome-1 --+--[ switch ]--+-- milan-1 -- far
//! ```

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use weft_tests::kubernetes::{BUSYBOX, Image, Object, require_liqo};
use weft_tests::traffic::{Service, TcpServer, connect, http_get};
use weft_tests::{Kubernetes, Lab, Pod, skip, wait_until};

use crate::liqoctl::{liqoctl, on_both};
use crate::pair::{HTTP, SOON, TIMEOUT};
use crate::stage::{each, note, play, rome_and_milan_of, step};

const DEMO: &str = "demo";
/// The namespace of the peering in rome.
const TENANT: &str = "liqo-tenant-milan";
/// Time for which writes are counted.
const WHILE: Duration = Duration::from_secs(30);
/// Writes to ForeignClusters of one cluster, a minute, in the first one after peering.
const MAX_WRITES: usize = 20;
const HTTPS: u16 = 443;

#[test]
#[ignore = "two minutes: part of `make soak`"]
fn namespace_is_offloaded_after_peering_in_band() -> Result<()> {
    peer(&["--in-band"])
}

#[test]
#[ignore = "as long as the other one: part of `make soak`"]
fn namespace_is_offloaded_after_peering_out_of_band() -> Result<()> {
    peer(&[])
}

fn peer(way: &[&str]) -> Result<()> {
    play(|| match require_liqo().and_then(|()| Image::weft()) {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-beside-liqo")?;
            let clusters = step("two clusters come up", || rome_and_milan_of(&lab, 1))?;
            let result = live(&clusters, &image, way);
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

fn live(clusters: &[Kubernetes; 2], weft: &Image, way: &[&str]) -> Result<()> {
    let [rome, milan] = clusters;
    step("Liqo and weft are installed", || {
        each(clusters, |cluster| {
            // liqoctl finds the API server's address by this label.
            let head = cluster.spec.node_name(1);
            cluster.kubectl(&["label", "node", &head, "node-role.kubernetes.io/control-plane="])?;
            cluster.load(weft)?;
            cluster.install_liqo(TIMEOUT)?;
            cluster.install_weft(TIMEOUT)
        })
    })?;
    step("liqoctl peers them", || {
        let line = ["peer", "--gw-server-service-type=NodePort", "--timeout=90s", "--skip-confirm"];
        on_both(rome, milan, &[&line[..], way].concat())
    })?;
    let [near, far] = step("a namespace is offloaded", || offload(rome, milan))?;
    step("pods reach each other, by address and by Service", || reach(clusters, [&near, &far]))?;
    step("the home API server is that of the offloaded pod", || reaches_home(clusters, &far))?;
    step("networking stays on, with few writes", || stays_on(clusters))?;
    step("liqoctl unpeers them", || {
        liqoctl(rome, &["unoffload", "namespace", DEMO, "--skip-confirm"])?;
        on_both(rome, milan, &["unpeer", "--skip-confirm"])
    })?;
    step("nothing of the peering is left", || each(clusters, nothing_is_left).map(drop))
}

/// Pods near and far, the latter in milan.
fn offload(rome: &Kubernetes, milan: &Kubernetes) -> Result<[Pod; 2]> {
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

fn service(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": DEMO},
        "spec": {"selector": {"app": name}, "ports": [{"port": HTTP}]}})
}

/// Checks that each reaches the other by its address in its own cluster, and by its Service there.
fn reach([rome, milan]: &[Kubernetes; 2], [near, far]: [&Pod; 2]) -> Result<()> {
    let (of_milan, of_rome) = (rome.view(&milan.spec)?, milan.view(&rome.spec)?);
    let [seen_far, seen_near] = [of_milan.of(far.addresses[0])?, of_rome.of(near.addresses[0])?];
    let shadow = rome.get(Object::new("pod", DEMO, "far"))?;
    let expected = seen_far.to_string();
    ensure!(shadow["status"]["podIP"] == expected.as_str(), "{}", shadow["status"]);
    ensure!(seen_far != far.addresses[0], "both clusters have the same pod CIDR");
    let serve = |pod: &Pod| TcpServer::start(&pod.ns, HTTP, Service::Http);
    let _servers = [serve(near)?, serve(far)?];
    for (from, cluster, name, address, source) in
        [(near, rome, "far", seen_far, seen_near), (far, milan, "near", seen_near, seen_far)]
    {
        wait_until(&format!("{name} answers"), SOON, || {
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

fn service_address(cluster: &Kubernetes, name: &str) -> Result<IpAddr> {
    let service = cluster.get(Object::new("service", DEMO, name))?;
    let address = service["spec"]["clusterIP"].as_str().context("it has an address")?;
    Ok(address.parse()?)
}

fn reaches_home([rome, milan]: &[Kubernetes; 2], far: &Pod) -> Result<()> {
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

/// Checks that networking stays on while a replica of weft's controller is killed.
fn stays_on(clusters: &[Kubernetes; 2]) -> Result<()> {
    let rates = each(clusters, |cluster| {
        let (began, before) = (Instant::now(), cluster.requests()?.len());
        let seconds = WHILE.as_secs();
        let watch = "kubectl get foreignclusters --watch --output=jsonpath=";
        let field = r#"'{.status.modules.networking.enabled}{"\n"}'"#;
        let id = &cluster.spec.id;
        let line = format!(
            "export KUBECONFIG=$PWD/{id}.yaml; timeout {seconds} {watch}{field} || [ $? = 124 ]"
        );
        let seen = std::thread::scope(|scope| {
            let watched = scope.spawn(|| cluster.shell(clusters, &line));
            kill_controller(cluster)?;
            watched.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        ensure!(!seen.is_empty() && seen.lines().all(|line| line == "true"), "{id}: {seen:?}");
        let requests = cluster.requests()?.split_off(before);
        let is_write = |what: &str| {
            what.contains(" foreignclusters")
                && ["patch", "update"].iter().any(|v| what.starts_with(v))
        };
        let writes = requests.iter().filter(|request| is_write(&request.what)).count();
        Ok((writes as f64 * 60.0 / began.elapsed().as_secs_f64()).round() as usize)
    })?;
    note(&format!("writes to ForeignClusters a minute: {rates:?}"));
    ensure!(rates.iter().all(|rate| *rate < MAX_WRITES), "{rates:?} writes a minute");
    Ok(())
}

/// The one that works.
fn kill_controller(cluster: &Kubernetes) -> Result<()> {
    let lease = cluster.get(Object::new("lease", "liqo", "weft-fabric-controller"))?;
    let pod = lease["spec"]["holderIdentity"].as_str().context("it has a holder")?;
    let pod = pod.split(['/', '_']).next().unwrap_or(pod);
    cluster.kubectl(&["delete", "pod", pod, "--namespace=liqo", "--grace-period=0", "--force"])?;
    Ok(())
}

fn nothing_is_left(cluster: &Kubernetes) -> Result<()> {
    let kinds = "gatewayclients,gatewayservers,connections,configurations,foreignclusters";
    wait_until("all of it is gone", SOON, || {
        let left = cluster.kubectl(&["get", kinds, "--all-namespaces", "--output=name"])?;
        ensure!(left.is_empty(), "{} still has {left}", cluster.spec.id);
        let ips = cluster.kubectl(&["get", "ips", "--all-namespaces", "--output=name"])?;
        ensure!(!ips.contains("unknown-source") && !ips.contains("/far"), "{ips}");
        Ok(())
    })
}

fn explain(cluster: &Kubernetes) {
    eprintln!("{}", cluster.report());
    for namespace in ["liqo", TENANT] {
        eprintln!("{}", cluster.logs(namespace, "app.kubernetes.io/part-of=liqo"));
        eprintln!("{}", cluster.logs(namespace, "offloading.liqo.io/component=virtual-kubelet"));
    }
    let questions =
        "ips,configurations,foreignclusters,virtualnodes,resourceslices,shadowendpointslices";
    let all = cluster.kubectl(&["get", questions, "--all-namespaces", "--output=yaml"]);
    eprintln!("{}", all.unwrap_or_else(|error| format!("{error:#}")));
}
