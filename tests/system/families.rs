//! ```text
//!   rome: pods 10.200.0.0/16 and fd00:200::/48 --- IPv4 or IPv6 --- milan: the same
//! ```

use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use weft_tests::{Cluster, ClusterSpec, Families, manifests};

use crate::scene::{PORT, Scene, play, rome_and_milan, traffic_passes};

#[test]
fn both_families_inside_an_ipv4_underlay() -> Result<()> {
    both_ways(rome_and_milan(2).map(ClusterSpec::dual_stack))
}

#[test]
fn both_families_inside_an_ipv6_underlay() -> Result<()> {
    both_ways(rome_and_milan(2).map(ClusterSpec::dual_stack).map(ClusterSpec::on_ipv6))
}

#[test]
fn node_behind_a_router_reaches_the_peer() -> Result<()> {
    for specs in [rome_and_milan(2), rome_and_milan(2).map(ClusterSpec::on_ipv6)] {
        let [rome, milan] = specs.map(ClusterSpec::dual_stack);
        both_ways([ClusterSpec { behind_router: Some(2), ..rome }, milan])?;
    }
    Ok(())
}

/// Time after which a gateway misses probes of nodes that it has expected since its start, and some more.
const FIRST_PROBES: Duration = Duration::from_secs(18);

#[test]
fn ipv4_pods_on_ipv6_hosts_stay_connected() -> Result<()> {
    play(&rome_and_milan(2).map(ClusterSpec::on_ipv6), |scene| {
        scene.peer("rome", "milan", PORT)?;
        std::thread::sleep(FIRST_PROBES);
        scene.clusters.iter().try_for_each(|cluster| {
            let problems = &cluster.status()?["problems"];
            ensure!(*problems == json!([]), "{problems}");
            Ok(())
        })
    })
}

/// Order of the addresses of rome's nodes and of milan's, the gateway's host first.
const ORDERS: [[[Order; 2]; 2]; 3] = [
    [[Order::V4First, Order::V6First], [Order::V6First, Order::V4First]],
    [[Order::V6Only, Order::V6First], [Order::V6First, Order::V6First]],
    [[Order::V4Only, Order::V6First], [Order::V6First, Order::V6Only]],
];

#[derive(Clone, Copy, Debug)]
enum Order {
    V4First,
    V6First,
    V4Only,
    V6Only,
}

impl Order {
    fn of(self, mut addresses: Vec<IpAddr>) -> Vec<IpAddr> {
        match self {
            Self::V4First => addresses.sort(),
            Self::V6First => addresses.sort_by(|a, b| b.cmp(a)),
            Self::V4Only => addresses.retain(IpAddr::is_ipv4),
            Self::V6Only => addresses.retain(IpAddr::is_ipv6),
        }
        addresses
    }
}

#[test]
fn traffic_passes_in_every_order_of_addresses() -> Result<()> {
    ORDERS.into_iter().try_for_each(|orders| {
        pass_with(orders).with_context(|| format!("rome's and milan's: {orders:?}"))
    })
}

fn pass_with(orders: [[Order; 2]; 2]) -> Result<()> {
    let specs = rome_and_milan(2).map(|spec| {
        let underlay = Families::Both;
        ClusterSpec { underlay, ..spec.dual_stack() }
    });
    let mut scene = Scene::build(&specs)?;
    for (cluster, orders) in scene.clusters.iter().zip(orders) {
        let mut text = manifests::own(&cluster.spec);
        for (node, order) in cluster.nodes.iter().zip(orders) {
            let write = |addresses: &[IpAddr]| -> String {
                let line = |a: &IpAddr| format!("  - {{type: InternalIP, address: \"{a}\"}}\n");
                addresses.iter().map(line).collect()
            };
            let listed = write(&node.addresses);
            ensure!(text.contains(&listed), "{listed} is not in {text}");
            text = text.replace(&listed, &write(&order.of(node.addresses.clone())));
        }
        cluster.apply("cluster", &text)?;
    }
    scene.clusters.iter_mut().try_for_each(Cluster::start)?;
    scene.peer("rome", "milan", PORT)?;
    let passed = traffic_passes(scene.cluster("rome"), scene.cluster("milan"))
        .and_then(|()| traffic_passes(scene.cluster("milan"), scene.cluster("rome")));
    if passed.is_err() {
        scene.clusters.iter().for_each(|cluster| eprintln!("{}", cluster.report()));
    }
    passed
}

fn both_ways(specs: [ClusterSpec; 2]) -> Result<()> {
    play(&specs, |scene| {
        scene.peer("rome", "milan", PORT)?;
        traffic_passes(scene.cluster("rome"), scene.cluster("milan"))?;
        traffic_passes(scene.cluster("milan"), scene.cluster("rome"))
    })
}
