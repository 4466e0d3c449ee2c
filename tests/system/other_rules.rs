//! ```text
//!   rome-1 (gateway) ---[ switch: every frame is looked at ]--- rome-2, pod       milan-1, pod
//! ```
//! Policy rules of another program on rome-2 lead packets for its pods to a table with a default route,
//! while milan's pod sends a text to rome-2's pod and to an address that no pod has.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use weft_tests::traffic::{UdpEcho, udp_echo};
use weft_tests::{SWITCH_V4, wait_until};

use crate::clear_text::contains;
use crate::node_paths::{all_probe, clusters, is_healthy, is_named, shell};
use crate::scene::{ECHO, Scene, TIMEOUT, first_pod, play};

const CANARY: &[u8] = b"only VXLAN may carry this";
/// Senders' interval.
const PACE: Duration = Duration::from_millis(5);
const SENDING: Duration = Duration::from_secs(2);

/// Rules, and whether they come before weft's.
const RULES: [(&str, bool); 4] = [
    ("priority 1000 to 10.200.0.0/16 lookup 77", false),
    ("priority 1000 iif weft4 lookup 77", false),
    ("priority 50 to 10.200.0.0/16 lookup 77", true),
    ("priority 50 iif weft4 lookup 77", true),
];

#[test]
fn rules_of_others_let_nothing_out_in_clear() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let [in_clear, wrapped] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let (clear, vxlan) = (Arc::clone(&in_clear), Arc::clone(&wrapped));
        let machines = scene.lab.machines();
        let capture = scene.lab.capture(move |frame| {
            let count = if machines.carrier(frame).is_some() { &vxlan } else { &clear };
            count.fetch_add(u64::from(contains(frame, CANARY)), Ordering::Relaxed);
        })?;
        let pod = &scene.cluster("rome").nodes[1].pods[0];
        let _echo = UdpEcho::start(&pod.ns, ECHO)?;
        let view = wait_until("milan sees rome", TIMEOUT, || {
            scene.cluster("milan").view(&scene.cluster("rome").spec)
        })?;
        let real = pod.addresses[0];
        let IpAddr::V4(octets) = real else { anyhow::bail!("{real} is not IPv4") };
        let [a, b, c, _] = octets.octets();
        let targets = [view.of(real)?, view.of([a, b, c, 250].into())?];
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for to in targets {
                let (sender, stop) = (&first_pod(scene.cluster("milan")).ns, &stop);
                let socket = sender.run(|| UdpSocket::bind("0.0.0.0:0"))?;
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        // Refused ones are part of the test.
                        let _ = socket.send_to(CANARY, (to, ECHO));
                        std::thread::sleep(PACE);
                    }
                });
            }
            let lived = live(scene, targets[0]);
            stop.store(true, Ordering::Relaxed);
            lived
        })?;
        capture.finish()?;
        let [in_clear, wrapped] = [in_clear, wrapped].map(|count| count.load(Ordering::Relaxed));
        eprintln!("seen in VXLAN {wrapped} times, in clear {in_clear}");
        ensure!(in_clear == 0, "{in_clear} frames in clear");
        ensure!(wrapped > 100, "no overlay was on the wire, so nothing was tested");
        Ok(())
    })
}

fn live(scene: &Scene, target: IpAddr) -> Result<()> {
    let rome = scene.cluster("rome");
    let sender = &first_pod(scene.cluster("milan")).ns;
    let passes = || udp_echo(sender, SocketAddr::new(target, ECHO), CANARY);
    shell(scene, &format!("ip route add default via {SWITCH_V4} table 77"))?;
    wait_until("the text arrives", TIMEOUT, passes)?;
    for (rule, precedes) in RULES {
        shell(scene, &format!("ip rule add {rule}"))?;
        if precedes {
            wait_until(rule, TIMEOUT, || is_named(rome, "Diverted"))?;
            let problems = rome.status()?["problems"].to_string();
            ensure!(problems.contains("ip rule del priority 50"), "{problems}");
        }
        std::thread::sleep(SENDING);
        if !precedes {
            passes().context(rule)?;
            is_healthy(rome).context(rule)?;
        }
        shell(scene, &format!("ip rule del {rule}"))?;
        wait_until("it is solved", TIMEOUT, || is_healthy(rome))?;
        wait_until("the text arrives", TIMEOUT, passes).context(rule)?;
    }
    Ok(())
}

/// Type, hook and priority of a chain of rome-2, and a rule that no packet of pods gets past as it is.
const FILTERS: [(&str, &str); 2] = [
    ("filter hook forward priority 0", "ip saddr 10.200.0.0/16 oifname weft4 drop"),
    ("nat hook postrouting priority 90", "ip saddr 10.200.0.0/16 oifname != cni0 masquerade"),
];

#[test]
fn rule_against_pods_packets_is_named() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let rome = scene.cluster("rome");
        let pod = &rome.nodes[1].pods[0];
        let _echo = UdpEcho::start(&first_pod(scene.cluster("milan")).ns, ECHO)?;
        let (_, target) = scene.way("rome", "milan")?;
        let passes = || udp_echo(&pod.ns, SocketAddr::new(target, ECHO), CANARY);
        for (chain, rule) in FILTERS {
            let node = rome.nodes[1].host.net();
            node.nft(&format!("table inet test {{ chain c {{ type {chain}; {rule}; }}; }}"))?;
            ensure!(passes().is_err(), "a datagram passes `{rule}`");
            wait_until(rule, TIMEOUT, || is_named(rome, "Diverted"))?;
            let problems = rome.status()?["problems"].to_string();
            let remedy = "run `nft delete rule inet test c handle 2` on rome-2";
            ensure!(problems.contains(remedy), "{problems}");
            shell(scene, "nft delete rule inet test c handle 2")?;
            wait_until("it is solved", TIMEOUT, || is_healthy(rome))?;
            wait_until("the text arrives", TIMEOUT, passes)?;
            node.nft("delete table inet test")?;
        }
        Ok(())
    })
}

/// Hook and rule of a chain of rome-2.
const DROPS: [(&str, &str); 4] = [
    ("output", "udp dport 4879 drop"),
    ("output", "udp dport 12346 drop"),
    ("input", "udp dport 4879 drop"),
    ("input", "udp sport 12346 drop"),
];

#[test]
fn chain_that_drops_the_overlay_is_named() -> Result<()> {
    play(&clusters(), |scene| {
        all_probe(scene)?;
        let rome = scene.cluster("rome");
        for (hook, rule) in DROPS {
            let chain = format!("chain c {{ type filter hook {hook} priority 0; {rule}; }}");
            let node = rome.nodes[1].host.net();
            node.nft(&format!("table inet test {{ {chain}; }}"))?;
            let cause = format!("chain inet test c (hook {hook}): the rule with handle 2 drops");
            let named = || {
                let node = &rome.peering("milan")?["nodes"]["unreachable"][0];
                let is = |field: &str, text: &str| node[field].to_string().contains(text);
                ensure!(is("cause", &cause), "{node}");
                ensure!(is("remedy", "`nft delete rule inet test c handle 2`"), "{node}");
                Ok::<_, anyhow::Error>(())
            };
            wait_until("the chain is named", TIMEOUT, named).with_context(|| rule.to_owned())?;
            shell(scene, "nft delete rule inet test c handle 2")?;
            wait_until("it is solved", TIMEOUT, || is_healthy(rome))?;
            node.nft("delete table inet test")?;
        }
        Ok(())
    })
}
