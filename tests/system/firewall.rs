//! ```text
//!   rome-1: FORWARD policy DROP (Docker's, for one) --------- milan-1
//! ```

use std::process::Command;

use anyhow::Result;

use weft_tests::Cluster;

use crate::scene::{PORT, Scene, play, rome_and_milan, traffic_passes};

#[test]
fn server_with_dropping_input_policy_is_reached() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let milan = scene.cluster("milan").head().net();
        let chain = "chain input { type filter hook input priority 0; policy drop; }";
        milan.nft(&format!("table inet test {{ {chain}; }}"))?;
        scene.peer("rome", "milan", PORT).map(drop)
    })
}

#[test]
fn a_dropping_forward_policy_does_not_stop_the_fabric() -> Result<()> {
    let mut scene = Scene::build(&rome_and_milan(1))?;
    let head = scene.clusters[0].head();
    head.command(Command::new("iptables").args(["-P", "FORWARD", "DROP"]), "")?;
    let own = "iptables -A FORWARD -i cni0 -o eth0 -j ACCEPT";
    head.command(Command::new("sh").args(["-c", own]), "")?;
    let result = scene.clusters.iter_mut().try_for_each(Cluster::start);
    let result = result.and_then(|()| scene.peer("rome", "milan", PORT).map(drop)).and_then(|()| {
        traffic_passes(scene.cluster("rome"), scene.cluster("milan"))?;
        traffic_passes(scene.cluster("milan"), scene.cluster("rome"))
    });
    if result.is_err() {
        eprintln!("{}", scene.cluster("rome").report());
    }
    result
}
