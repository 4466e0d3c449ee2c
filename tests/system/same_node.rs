//! Two hosts that were given one name.

use std::time::Duration;

use anyhow::{Result, ensure};
use weft_tests::{Cluster, ClusterSpec, stays_so, wait_until};

use crate::scene::{PORT, Scene, TIMEOUT};

/// A published directory of another host is read every half a minute.
const NAMED: Duration = Duration::from_secs(65);
const GONE: Duration = Duration::from_secs(90);

#[test]
fn two_agents_for_one_node_are_named_until_one_ends() -> Result<()> {
    let specs = [ClusterSpec::new("rome", 1, 3), ClusterSpec::new("milan", 2, 1)];
    let mut scene = Scene::build(&specs)?;
    scene.cluster_mut("rome").start()?;
    scene.cluster_mut("milan").start()?;
    scene.peer("rome", "milan", PORT)?;
    stays_so("the one agent is the only one", Duration::from_secs(8), || {
        ensure!(named(scene.cluster("rome"))?.is_none(), "it is not");
        Ok(())
    })?;
    let rome = scene.cluster_mut("rome");
    ensure!(rome.take_program("weft-agent-3")?.stop(TIMEOUT)?.success(), "weft agent failed");
    rome.start_agent_as(3, "rome-2")?;
    let rome = scene.cluster("rome");
    wait_until("weft status names both", NAMED, || {
        let named = named(rome)?.unwrap_or_default();
        ensure!(named.contains("on host") && named.contains("--node"), "{named}");
        Ok(())
    })?;
    let other = scene.cluster_mut("rome").take_program("weft-agent-3")?;
    ensure!(other.stop(TIMEOUT)?.success(), "weft agent failed");
    wait_until("weft status names it no longer", GONE, || {
        let named = named(scene.cluster("rome"))?;
        ensure!(named.is_none(), "{named:?}");
        Ok(())
    })
}

/// Problem with another agent for rome-2.
fn named(rome: &Cluster) -> Result<Option<String>> {
    let status = rome.status()?;
    let mut problems = status["problems"].as_array().into_iter().flatten();
    let is_it = |text: &&str| text.contains("another route-agent reports as rome-2, too");
    Ok(problems.find_map(|problem| problem.as_str().filter(is_it)).map(str::to_owned))
}
