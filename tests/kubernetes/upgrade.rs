//! ```text
//!   a -- rome-1 --+--[ switch ]--+-- milan-1 -- a      both clusters get the chart of an earlier version,
//!   b -- rome-2 --+              +-- milan-2 -- b      and are upgraded one after the other while packets flow
//! ```

use anyhow::{Result, ensure};
use weft_tests::kubernetes::{Image, Object, WEFT};
use weft_tests::{Kubernetes, Lab, skip, wait_until};

use crate::pair::{GATEWAYS, Pair, SOON, TIMEOUT, selector};
use crate::stage::{play, rome_and_milan_specs, step};

/// Packets that the hand-overs of both gateways may lose.
const LOST: u64 = 5;

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn upgrade_from_earlier_chart_loses_no_packet() -> Result<()> {
    play(|| match Image::previous().and_then(|previous| Ok((previous, Image::weft()?))) {
        Ok((previous, weft)) => {
            let lab = Lab::new("weft-kubernetes-upgrade")?;
            let pods = [("a", 1), ("b", 2)];
            let pair = Pair::prepare(&lab, &previous, rome_and_milan_specs(2), &pods)?;
            pair.explained(|| upgrade(&pair, &weft))
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn upgrade(pair: &Pair, weft: &Image) -> Result<()> {
    step("an earlier version is installed", || {
        pair.each(|cluster| cluster.install_previous_weft(TIMEOUT))
    })?;
    step("both are connected", || pair.connect())?;
    step("all pods reach all pods", || pair.all_reach_all())?;
    step("every node has the image", || pair.each(|cluster| cluster.load(weft)))?;
    let (mut held, _server) = pair.hold()?;
    let traffic = step("both are upgraded", || {
        pair.streaming(|| {
            for (cluster, gateway) in pair.clusters.iter().zip(GATEWAYS) {
                cluster.upgrade_weft(TIMEOUT)?;
                wait_until("its new pod alone is there", TIMEOUT, || {
                    is_replaced(cluster, gateway)
                })?;
                held.send()?;
            }
            pair.wait_connected(SOON)?;
            pair.all_reach_all()
        })
    })?;
    held.echoes(SOON)?;
    traffic.missed_at_most(LOST)
}

fn is_replaced(cluster: &Kubernetes, gateway: Object<'_>) -> Result<()> {
    let images = "--output=jsonpath={.items[*].spec.containers[*].image}";
    let pods = ["get", "pods", "--namespace", gateway.namespace, "-l", &selector(gateway), images];
    let images = cluster.kubectl(&pods)?;
    ensure!(images.split_whitespace().eq([WEFT]), "{images}");
    Ok(())
}
