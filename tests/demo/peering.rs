//! The peering comes up.

use std::time::Instant;

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use weft_tests::manifests::{Peering, Spelling, join};
use weft_tests::{Cluster, wait_until};

use crate::TIMEOUT;
use crate::board::Board;

/// Waits until `weft up` answers.
pub(crate) fn wait_for_nodes(cluster: &Cluster) -> Result<()> {
    let what = format!("weft runs on {}", cluster.spec.node_name(1));
    wait_until(&what, TIMEOUT, || {
        let problems = &cluster.status()?["problems"];
        let problems = problems.as_array().map(Vec::len).unwrap_or_default();
        ensure!(problems == 0, "its problems are {}", cluster.status()?["problems"]);
        Ok::<_, anyhow::Error>(())
    })
}

/// Applies the manifests on both sides and shows what becomes of them until both are connected.
pub(crate) fn connect(rome: &Cluster, milan: &Cluster, port: u16) -> Result<()> {
    let mut peering = Peering::new(&rome.spec, &milan.spec, port);
    peering.client_spelling = Spelling::Text;
    println!(
        "manifests  a key pair each; rome connects to milan at {}:{port}/udp\n",
        peering.endpoint[0]
    );
    let sides = [(rome, "milan"), (milan, "rome")];
    let mut board = Board::new();
    board.show(lines(&sides));
    rome.apply("milan", &join(&peering.client_documents()))?;
    until(&mut board, &sides, || state(rome, "milan") != "-")?;
    milan.apply("rome", &join(&peering.server_documents()))?;
    until(&mut board, &sides, || {
        sides.iter().all(|(cluster, peer)| {
            state(cluster, peer) == "Connected" && open(cluster, peer) == cluster.nodes.len()
        })
    })
}

fn until(
    board: &mut Board,
    sides: &[(&Cluster, &str)],
    mut reached: impl FnMut() -> bool,
) -> Result<()> {
    let start = Instant::now();
    loop {
        let now = reached();
        board.show(lines(sides));
        if now {
            return Ok(());
        }
        if start.elapsed() > TIMEOUT {
            bail!("nothing more happened for {TIMEOUT:?}");
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn lines(sides: &[(&Cluster, &str)]) -> Vec<String> {
    let head = format!(
        "  {:<9}{:<7}{:<8}{:<12}{:<7}{:<10}{}",
        "CLUSTER", "PEER", "ROLE", "STATE", "NODES", "LATENCY", "SEES ITS PODS AS"
    );
    let rows = sides.iter().map(|(cluster, peer)| {
        let row = cluster.peering(peer).unwrap_or_default();
        format!(
            "  {:<9}{peer:<7}{:<8}{:<12}{:<7}{:<10}{}",
            cluster.spec.id,
            text(&row["role"]),
            text(&row["state"]),
            format!("{}/{}", open(cluster, peer), cluster.nodes.len()),
            text(&row["latency"]),
            pods(&row)
        )
    });
    std::iter::once(head).chain(rows).collect()
}

fn state(cluster: &Cluster, peer: &str) -> String {
    cluster.peering(peer).map_or_else(|_| "-".to_owned(), |row| text(&row["state"]).to_owned())
}

/// Number of nodes that send packets through the tunnel.
fn open(cluster: &Cluster, peer: &str) -> usize {
    cluster.nodes_open_to(peer).unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("-")
}

fn pods(row: &Value) -> String {
    let remaps = row["remaps"].as_array().into_iter().flatten();
    let pods: Vec<_> = remaps.filter(|r| r["kind"] == "Pod").map(|r| text(&r["local"])).collect();
    if pods.is_empty() { "-".to_owned() } else { pods.join(", ") }
}
