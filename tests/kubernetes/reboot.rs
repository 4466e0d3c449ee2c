//! ```text
//!   sender -- rome-2 -- x --[ switch ]--+-- milan-1 -- a
//!             rome-1 -------------------+-- milan-2 -- b      a node loses power and starts anew
//! ```

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::json;
use weft_tests::kubernetes::{BUSYBOX, Image, Object};
use weft_tests::{Lab, skip, wait_until};

use crate::in_clear::Observer;
use crate::pair::{Pair, SOON, TIMEOUT};
use crate::stage::{note, note_time, play, step};

const NODE: u8 = 2;
const POD: Object<'static> = Object { kind: "pod", namespace: "default", name: "sender" };
const ROUNDS: u32 = 5;
/// Time in which nothing is in clear any more.
const AFTERWARDS: Duration = Duration::from_secs(5);

#[test]
#[ignore = "minutes long: make soak-rounds"]
fn restarted_node_refuses_once_its_agent_runs() -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-reboot")?;
            let pair = Pair::install(&lab, &image)?;
            pair.explained(|| sends_while_it_starts(&pair, &lab))
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn sends_while_it_starts(pair: &Pair, lab: &Lab) -> Result<()> {
    let rome = &pair.clusters[0];
    let name = rome.spec.node_name(NODE);
    // Its gateway is elsewhere, so that there is VXLAN to be seen.
    rome.kubectl(&["cordon", &name])?;
    step("both are connected", || pair.connect())?;
    let [of_milan, _] = pair.views()?;
    let to = of_milan.of(pair.pods[1][0].addresses[0])?;
    rome.apply(&sender(&name, to).to_string())?;
    rome.wait_for(POD, "condition=Ready", SOON)?;
    for round in 1..=ROUNDS {
        let observer = Observer::start(lab)?;
        rome.reboot(NODE)?;
        let (began, before) = (Instant::now(), observer.so_far().wrapped);
        wait_until("the sender's packets are in VXLAN", TIMEOUT, || {
            ensure!(observer.so_far().wrapped > before, "none");
            Ok::<_, anyhow::Error>(())
        })?;
        note_time(began.elapsed(), "until packets were in VXLAN again");
        std::thread::sleep(AFTERWARDS);
        let seen = observer.finish()?;
        let (first, last) = seen.first.zip(seen.last).unwrap_or((began, began));
        let lasted = (last - first).as_secs_f64();
        note(&format!(
            "start {round}: {} packets, {} bytes in clear, in {lasted:.2} s",
            seen.frames, seen.bytes
        ));
        ensure!(last.elapsed() > AFTERWARDS / 2, "it goes on: {seen:?}");
    }
    pair.wait_connected(SOON)
}

/// Sends as soon as it runs, without end.
fn sender(node: &str, to: IpAddr) -> serde_json::Value {
    let script = format!("while :; do ping -q -p 5a -i 0.01 {to}; done");
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": POD.name, "namespace": POD.namespace},
        "spec": {
            "nodeName": node, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": BUSYBOX, "imagePullPolicy": "Never",
                "command": ["/bin/sh", "-c", script]}],
        },
    })
}
