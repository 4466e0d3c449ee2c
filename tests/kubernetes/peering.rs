//! ```text
//!   a -- rome-1 --+--[ switch ]--+-- milan-1 -- a      pods 10.200.0.0/16, services 10.96.0.0/16, twice
//!   b -- rome-2 --+              +-- milan-2 -- b      rome's gateway finds milan's at port 30742 of milan-1
//! ```
//!
//! One pair of clusters for all of it, since it takes longer to make than to use.

use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_tests::kubernetes::{Image, LINGER, Machine, Object};
use weft_tests::traffic::connect;
use weft_tests::{Kubernetes, Lab, Netns, View, skip, wait_until};

use crate::in_clear::{Observer, Senders};
use crate::inventory::{Inventory, ensure_no_leftovers, users};
use crate::pair::{GATEWAYS, HTTP, Pair, SOON, TIMEOUT, pod_of, selector};
use crate::reach::{
    ips_of_services_lead_to_endpoints, pods_elsewhere_reach_and_are_reached,
    services_nodes_and_strangers_reach_pods,
};
use crate::stage::{note_time, play, step};
use crate::{bad_manifests, failover, manifest_order, requests, status, truth};

/// Time until packets pass again, with that in which a pod starts.
const BACK: Duration = Duration::from_secs(6);
/// Outage if a successor is there already.
const REPLACED: Duration = Duration::from_secs(3);
/// Kubernetes' own controllers may have to get over an API server that was away before they make pods, or
/// remove those of what is gone.
const REMADE: Duration = Duration::from_secs(90);
/// Longer than a controller goes on without having renewed its Lease.
const AWAY: Duration = Duration::from_secs(12);
/// Time for which senders go on after a peering was deleted, longer than idle prefixes are refused here.
const SHORT: Duration = Duration::from_secs(5);

#[test]
fn installed_clusters_connect_and_disconnect() -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-peering")?;
            let pair = Pair::install(&lab, &image)?;
            pair.explained(|| from_the_manifests_to_the_end(&pair, &lab))
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn deleted_peerings_and_weft_are_refused_a_minute() -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-deleted")?;
            let pair = Pair::install(&lab, &image)?;
            pair.explained(|| {
                step("both are connected", || pair.connect())?;
                let minute = Duration::from_secs(60);
                deleted_is_refused(&pair, &lab, minute)?;
                step("both are connected again", || pair.connect())?;
                pair.each(|cluster| {
                    cluster.set_weft("networking.fabric.pod.extraArgs={--linger=60}")?;
                    cluster.wait_for_weft(TIMEOUT)
                })?;
                step("weft is uninstalled", || uninstalled(&pair, &lab, minute))
            })
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn from_the_manifests_to_the_end(pair: &Pair, lab: &Lab) -> Result<()> {
    step("both are connected", || pair.connect())?;
    step("all pods reach all pods", || pair.all_reach_all())?;
    step("bad manifests disturb no other peering", || bad_manifests::ensure_others_run(pair))?;
    step("services, nodes and strangers reach pods", || {
        services_nodes_and_strangers_reach_pods(pair, lab)
    })?;
    step("IPs of Services lead to their endpoints", || ips_of_services_lead_to_endpoints(pair))?;
    step("pods outside of their node's prefix reach pods and are reached", || {
        pods_elsewhere_reach_and_are_reached(pair)
    })?;
    step("weft status shows the peering", || pair.each(status::is_true).map(drop))?;
    step("weft status names faults", || truth::cheap_rows(pair, lab))?;
    step("a gateway that cannot report is named", || pair.gateway_cut_off_is_named())?;
    let (mut held, _server) = pair.hold()?;
    step("pods of gateways are replaced", || gateways_come_back(pair))?;
    step("a server has a new pod before the old one leaves", || client_follows_server(pair))?;
    step("a gateway has a new pod if its account is made anew", || pod_follows_account(pair))?;
    step("both API servers are away", || absent_api_servers_cause_no_loss(pair))?;
    step("all other pods of weft are replaced", || other_pods_are_replaced_without_loss(pair))?;
    step("second replicas stand by", || failover::second_replicas(pair))?;
    step("second replicas take over", || failover::few_events(pair, &mut held))?;
    step("a connection has outlived all that", || held.echoes(SOON))?;
    step("a deleted peering is refused, and nothing is left of it", || {
        deleted_is_refused(pair, lab, SHORT)
    })?;
    step("both are connected in any order", || {
        manifest_order::connect(pair, || nothing_is_left(pair))
    })?;
    step("nothing is left of weft, for all that is peered", || uninstalled(pair, lab, LINGER))
}

/// A client's successor connects at once. A server announces its end, and the client looks for its
/// successor once a second: missed answers would show it after 6 s.
fn gateways_come_back(pair: &Pair) -> Result<()> {
    for (cluster, gateway) in pair.clusters.iter().zip(GATEWAYS) {
        let traffic = pair.streaming(|| {
            let pods = selector(gateway);
            cluster.kubectl(&["delete", "pod", "--namespace", gateway.namespace, "-l", &pods])?;
            pair.wait_connected(SOON)?;
            pair.all_reach_all()
        })?;
        let outage = traffic.longest_outage();
        note_time(outage, &format!("without {gateway}"));
        ensure!(outage < BACK, "{traffic:?}");
        wait_until("its node is published", SOON, || is_reported(cluster, gateway))?;
    }
    Ok(())
}

/// The conntrack entry of the client's connection to the node port leads to the old pod for a
/// while.
fn client_follows_server(pair: &Pair) -> Result<()> {
    let (milan, server) = (&pair.clusters[1], GATEWAYS[1]);
    let rollout = |verb: &str| {
        let line = ["rollout", verb, "deployment/gw-server", "--namespace", server.namespace];
        milan.kubectl(&line)
    };
    let traffic = pair.streaming(|| {
        rollout("restart")?;
        rollout("status")?;
        wait_until("the old pod is gone", SOON, || is_alone(milan, server))?;
        pair.wait_connected(SOON)?;
        pair.all_reach_all()
    })?;
    let outage = traffic.longest_outage();
    note_time(outage, "without a server while its pod was replaced");
    ensure!(outage < REPLACED, "{traffic:?}");
    wait_until("its node is published", SOON, || is_reported(milan, server))
}

/// An API server answers no request with the token of an account that is gone.
fn pod_follows_account(pair: &Pair) -> Result<()> {
    let (rome, client) = (&pair.clusters[0], GATEWAYS[0]);
    let before = pod_of(rome, client)?;
    let traffic = pair.streaming(|| {
        rome.kubectl(&["delete", "serviceaccount", "gw-client", "--namespace", client.namespace])?;
        wait_until("another pod has taken its place", REMADE, || {
            let now = pod_of(rome, client)?;
            ensure!(now != before, "{now} is there");
            is_alone(rome, client)
        })?;
        pair.wait_connected(SOON)
    })?;
    let outage = traffic.longest_outage();
    note_time(outage, "without a client while its pod was replaced");
    ensure!(outage < REPLACED, "{traffic:?}");
    wait_until("its node is published", SOON, || is_reported(rome, client))
}

fn is_alone(cluster: &Kubernetes, gateway: Object<'_>) -> Result<()> {
    let pods = ["get", "pods", "--namespace", gateway.namespace, "-l", &selector(gateway)];
    let pods = cluster.kubectl(&[&pods[..], &["--output=name"]].concat())?;
    ensure!(pods.lines().count() == 1, "{pods}");
    Ok(())
}

fn is_reported(cluster: &Kubernetes, gateway: Object<'_>) -> Result<()> {
    let pods = ["get", "pods", "--namespace", gateway.namespace, "-l", &selector(gateway)];
    let list = cluster.kubectl(&[&pods[..], &["--output=json"]].concat())?;
    let list: Value = serde_json::from_str(&list).context("kubectl prints JSON")?;
    let pod = &list["items"][0];
    let status = &cluster.get(gateway)?["status"];
    let expected =
        serde_json::json!({"ip": pod["status"]["podIP"], "node": pod["spec"]["nodeName"]});
    ensure!(status["internalEndpoint"] == expected, "{status}; its pod: {expected}");
    if gateway.kind == "gatewayserver" {
        let host = &pod["status"]["hostIP"];
        ensure!(status["endpoint"]["addresses"][0] == *host, "{status}; its pod is on {host}");
    }
    Ok(())
}

/// Checks that nothing is lost meanwhile, and nothing is granted or published anew.
fn other_pods_are_replaced_without_loss(pair: &Pair) -> Result<()> {
    nothing_is_published(pair, &[PUBLISHED, RECORDS], || {
        pair.streaming(|| pair.each(replace_pods).map(drop))?.missed_nothing()
    })
}

/// Checks traffic, and gateways that start again in the same pod, on what they have kept; and that
/// nothing is new when the API servers are back.
fn absent_api_servers_cause_no_loss(pair: &Pair) -> Result<()> {
    let course = pair.course()?;
    let gateways = pair.clusters.iter().zip(GATEWAYS);
    let processes = gateways.map(|(cluster, gateway)| {
        cluster.process_in(gateway.namespace, &pod_of(cluster, gateway)?, "gateway")
    });
    let processes = processes.collect::<Result<Vec<_>>>()?;
    nothing_is_published(pair, &[PUBLISHED], || {
        let away = pair.streaming_by(&course, || {
            pair.each(Kubernetes::stop_api_server)?;
            std::thread::sleep(AWAY);
            Ok(())
        })?;
        away.missed_nothing()?;
        let killed = pair.streaming_by(&course, || {
            for process in processes {
                Command::new("kill").args(["-KILL", &process.to_string()]).status()?;
            }
            std::thread::sleep(BACK);
            Ok(())
        })?;
        let outage = killed.longest_outage();
        note_time(outage, "while both gateways started again");
        let went_on = killed.streams.iter().all(|stream| stream.sent > 1000);
        ensure!(outage < REPLACED && went_on, "{killed:?}");
        let back = pair.streaming_by(&course, || {
            let before = pair.each(|cluster| {
                cluster.start_api_server()?;
                lease(cluster)
            })?;
            for (cluster, before) in pair.clusters.iter().zip(&before) {
                wait_until("the controller is back", REMADE, || {
                    let now = lease(cluster)?;
                    ensure!(now["renewTime"] != before["renewTime"], "{now}");
                    Ok(())
                })?;
            }
            pair.wait_connected(SOON)
        })?;
        back.missed_nothing()
    })
}

/// Objects that programs read are the same before and after.
fn nothing_is_published(pair: &Pair, kinds: &[&str], f: impl FnOnce() -> Result<()>) -> Result<()> {
    let published = |cluster: &Kubernetes| published(cluster, &kinds.join(","));
    let before = pair.each(published)?;
    f()?;
    let after = pair.each(published)?;
    ensure!(after == before, "{before:#?} before, {after:#?} after");
    Ok(())
}

/// All of controller, ipam and route-agents, until others have taken their places.
fn replace_pods(cluster: &Kubernetes) -> Result<()> {
    let before = leader(cluster)?;
    cluster.kubectl(&["delete", "pod", "--all", "--namespace=liqo"])?;
    cluster.wait_for_weft(REMADE)?;
    wait_until("another controller works", REMADE, || {
        let now = leader(cluster)?;
        ensure!(!now.is_empty() && now != before, "it is {now:?}");
        Ok(())
    })
}

fn leader(cluster: &Kubernetes) -> Result<String> {
    Ok(lease(cluster)?["holderIdentity"].as_str().unwrap_or_default().to_owned())
}

/// The spec of the Lease of the controller that works.
pub(crate) fn lease(cluster: &Kubernetes) -> Result<Value> {
    let lease = cluster.get(Object::new("lease", "liqo", "weft-fabric-controller"))?;
    Ok(lease["spec"].clone())
}

const PUBLISHED: &str = "gatewayconfigs,nodeconfigs,networks,ips";
/// With the state of each connection, which a gateway that is killed loses for a moment.
const RECORDS: &str = "fabricrecords,gatewayrecords";

/// Objects that the programs read, one line each.
fn published(cluster: &Kubernetes, kinds: &str) -> Result<Vec<String>> {
    let format = "jsonpath={range .items[*]}{.kind} {.metadata.name} {.metadata.uid} {.metadata.generation}{'\\n'}{end}";
    let text = cluster.kubectl(&["get", kinds, "--all-namespaces", "--output", format])?;
    Ok(text.lines().map(str::to_owned).collect())
}

/// Pods of both clusters never stop sending while both sides are deleted.
fn deleted_is_refused(pair: &Pair, lab: &Lab, time: Duration) -> Result<()> {
    let views = pair.views()?;
    let ways = [ways(pair, 0, &views[0])?, ways(pair, 1, &views[1])?];
    let observer = Observer::start(lab)?;
    let senders = Senders::start(&ways.concat())?;
    wait_until("the overlay carries it", SOON, || {
        ensure!(observer.so_far().wrapped > 0, "no frame");
        Ok::<_, anyhow::Error>(())
    })?;
    pair.part()?;
    std::thread::sleep(time);
    for ((cluster, pods), ways) in pair.clusters.iter().zip(&pair.pods).zip(&ways) {
        let sender = pods[0].addresses[0].to_string();
        wait_until("weft status shows the senders", SOON, || {
            let refused = cluster.status()?["refused"].to_string();
            ensure!(refused.contains(&sender), "{sender} is not in {refused}");
            Ok::<_, anyhow::Error>(())
        })?;
        let (from, to) = ways[0];
        let ended = connect(from, SocketAddr::new(to, HTTP), Duration::from_secs(1));
        let kind = ended.err().map(|error| error.kind());
        let is_reset = kind == Some(std::io::ErrorKind::ConnectionRefused);
        ensure!(is_reset, "a connection of {} to {to} ended in {kind:?}", cluster.spec.id);
    }
    drop(senders);
    let seen = observer.finish()?;
    ensure!(seen.frames == 0, "in clear: {seen:?}");
    note_time(time, &format!("{} frames in VXLAN and none in clear", seen.wrapped));
    is_gone(pair, &views)
}

fn nothing_is_left(pair: &Pair) -> Result<()> {
    let views = pair.views()?;
    pair.part()?;
    is_gone(pair, &views)
}

/// Checks that the API and the nodes have nothing of the peering any more.
fn is_gone(pair: &Pair, views: &[View; 2]) -> Result<()> {
    for ((cluster, gateway), view) in pair.clusters.iter().zip(GATEWAYS).zip(views) {
        let namespace = gateway.namespace;
        wait_until("the namespace is empty", REMADE, || is_empty(cluster, namespace))?;
        for machine in &cluster.machines {
            wait_until("nodes have nothing of the peer", SOON, || {
                has_nothing_of_peer(machine, view)
            })?;
        }
    }
    Ok(())
}

/// Exit code of `weft status` where there is no weft.
const NOT_INSTALLED: u8 = 4;

/// Users' objects stay, without a problem. Packets that pods go on sending are refused for a while.
fn uninstalled(pair: &Pair, lab: &Lab, linger: Duration) -> Result<()> {
    let views = pair.views()?;
    for (i, ((cluster, gateway), before)) in
        pair.clusters.iter().zip(GATEWAYS).zip(&pair.before).enumerate()
    {
        let users = users(cluster, gateway.namespace)?;
        let during = Inventory::of(cluster)?.ensure_no_more(before, &users);
        let seen = during.err().map(|error| format!("{error:#}")).unwrap_or_default();
        let what =
            ["NodeConfig", "Lease", "Secret weft-webhook", "weft4", "inet weft", "lookup 18952"];
        ensure!(what.iter().all(|one| seen.contains(one)), "the check sees only {seen}");
        let began = Instant::now();
        let mut senders = ways(pair, i, &views[i])?;
        // The first peer still sends to the cluster when that loses weft, the second one cannot.
        if i == 0 {
            senders.extend(ways(pair, 1, &views[1])?);
        }
        refused_meanwhile(lab, &senders, linger, || cluster.uninstall_weft(TIMEOUT))?;
        requests::are_allowed(cluster, "liqo:liqo-withdrawal")?;
        note_time(began.elapsed(), &format!("to uninstall weft in {}", cluster.spec.id));
        // Pods end, and Kubernetes removes what others own.
        wait_until("there is no more than before", SOON, || {
            Inventory::of(cluster)?.ensure_no_more(before, &users)
        })?;
        ensure_no_leftovers(cluster, gateway.namespace)?;
        let code = cluster.status_code()?;
        ensure!(code == NOT_INSTALLED, "weft status ends with {code}");
    }
    Ok(())
}

/// Ways from every pod of a cluster to every pod of its peer.
fn ways<'a>(pair: &'a Pair, cluster: usize, view: &View) -> Result<Vec<(&'a Netns, IpAddr)>> {
    let there = pair.pods[1 - cluster].iter().map(|pod| view.of(pod.addresses[0]));
    let there = there.collect::<Result<Vec<_>>>()?;
    let here = pair.pods[cluster].iter().map(|pod| &pod.ns);
    Ok(here.flat_map(|ns| there.iter().map(move |to| (ns, *to))).collect())
}

/// Senders that never stop send nothing in clear before the time is over for which nodes refuse it, and
/// no node quotes what a gateway goes on to send it.
fn refused_meanwhile(
    lab: &Lab,
    ways: &[(&Netns, IpAddr)],
    linger: Duration,
    uninstall: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let observer = Observer::start(lab)?;
    let senders = Senders::start(ways)?;
    let began = Instant::now();
    uninstall()?;
    // Nothing of weft's is there any more. Otherwise nothing would be seen at all.
    wait_until("it is seen in clear", SOON, || {
        ensure!(observer.so_far().frames > 0, "no frame");
        Ok::<_, anyhow::Error>(())
    })?;
    drop(senders);
    let seen = observer.finish()?;
    ensure!(seen.quoted == 0, "nodes quoted {} packets in errors about VXLAN", seen.quoted);
    let first = seen.first.context("no frame")? - began;
    note_time(first, "until something was sent in clear");
    ensure!(first > linger, "{first:?} after the beginning");
    Ok(())
}

const KINDS: &str = "deployments,poddisruptionbudgets,pods,services,serviceaccounts,roles,rolebindings,secrets,networks,ips,\
    configurations,gatewayservers,gatewayclients,publickeies,connections,gatewayconfigs";

fn is_empty(cluster: &Kubernetes, namespace: &str) -> Result<()> {
    let all = cluster.kubectl(&["get", KINDS, "--namespace", namespace, "--output=name"])?;
    let left: Vec<_> = all.lines().filter(|name| *name != "serviceaccount/default").collect();
    ensure!(left.is_empty(), "{namespace} still has {left:?}");
    Ok(())
}

fn has_nothing_of_peer(machine: &Machine, view: &View) -> Result<()> {
    let look = "ip -o link show type vxlan; ip route show table all; nft list table inet weft";
    let mut sh = Command::new("sh");
    let text = machine.host.command(sh.args(["-c", look]), "")?;
    let peers = view.0.iter().map(|(_, local)| local.address().to_string());
    // As `ip` begins to list devices, each under a number.
    let left: Vec<_> = peers.chain([": weft".to_owned()]).filter(|p| text.contains(p)).collect();
    ensure!(left.is_empty(), "{} still has {left:?}: {text}", machine.name);
    Ok(())
}
