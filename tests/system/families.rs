//! ```text
//!   rome: pods 10.200.0.0/16 and fd00:200::/48 --- IPv4 or IPv6 --- milan: the same
//! ```

use anyhow::Result;
use weft_tests::ClusterSpec;

use crate::scene::{PORT, play, rome_and_milan, traffic_passes};

#[test]
fn both_families_inside_an_ipv4_underlay() -> Result<()> {
    both_ways(rome_and_milan(2).map(ClusterSpec::dual_stack))
}

#[test]
fn both_families_inside_an_ipv6_underlay() -> Result<()> {
    both_ways(rome_and_milan(2).map(ClusterSpec::dual_stack).map(ClusterSpec::on_ipv6))
}

fn both_ways(specs: [ClusterSpec; 2]) -> Result<()> {
    play(&specs, |scene| {
        scene.peer("rome", "milan", PORT)?;
        traffic_passes(scene.cluster("rome"), scene.cluster("milan"))?;
        traffic_passes(scene.cluster("milan"), scene.cluster("rome"))
    })
}
