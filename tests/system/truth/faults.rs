//! Faults between the two gateways.

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use fabric_api::PrivateKey;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::{Streams, Way};
use weft_tests::{Cluster, ClusterSpec, wait_until};

use super::{AT_MOST, Case, Seen, hold, named, named_as_one_of, solved, states};
use crate::scene::{PORT, Scene, first_pod, play, rome_and_milan};

pub(super) const CASES: [Case; 20] = [
    CUT,
    ONE_WAY,
    OWN_OUTPUT,
    LOST_RESPONSES,
    REMOVED,
    FORGOTTEN_KEY,
    TAKEN_DOWN,
    KILLED,
    HANGS,
    LOSS,
    HEAVY_LOSS,
    IDLE_LOSS,
    WRONG_CIDR,
    LEFT_OUT_FAMILY,
    WRONG_KEY_AT_FIRST,
    WRONG_KEY_LATER,
    OWN_ENDPOINT,
    WRONG_ENDPOINT,
    UNKNOWN_NAME,
    SHARED_KEY,
];

const CUT: Case = ("link cut", cut);
const ONE_WAY: Case = ("one-way cut", one_way);
const OWN_OUTPUT: Case = ("own output drops", own_output);
const LOST_RESPONSES: Case = ("responses dropped at first", lost_responses);
const REMOVED: Case = ("peer removed its side", removed);
const FORGOTTEN_KEY: Case = ("key removed at the peer", forgotten_key);
const TAKEN_DOWN: Case = ("peer taken down", taken_down);
const KILLED: Case = ("peer killed", killed);
const HANGS: Case = ("peer hangs, again and again", hangs);
const LOSS: Case = ("40 % loss", || loss(40, true, &[("milan", "input", "dport")]));
const HEAVY_LOSS: Case = ("90 % loss both ways", || {
    loss(90, true, &[("rome", "input", "sport"), ("milan", "input", "dport")])
});
const IDLE_LOSS: Case = ("90 % loss, idle", || loss(90, false, &[("milan", "input", "dport")]));
const WRONG_CIDR: Case = ("wrong CIDR", wrong_cidr);
const LEFT_OUT_FAMILY: Case = ("IPv6 left out", left_out_family);
const WRONG_KEY_AT_FIRST: Case = ("wrong key at first", wrong_key_at_first);
const WRONG_KEY_LATER: Case = ("wrong key later", wrong_key_later);
const OWN_ENDPOINT: Case = ("endpoint is oneself", own_endpoint);
const WRONG_ENDPOINT: Case = ("endpoint made wrong", wrong_endpoint);
const UNKNOWN_NAME: Case = ("name does not resolve", unknown_name);
const SHARED_KEY: Case = ("one key in two gateways", shared_key);

#[test]
fn cut_link_is_named_on_both_sides() -> Result<()> {
    hold(CUT)
}

#[test]
fn one_way_cut_names_the_direction() -> Result<()> {
    hold(ONE_WAY)
}

#[test]
fn drop_of_own_output_is_named_where_it_is() -> Result<()> {
    hold(OWN_OUTPUT)
}

#[test]
fn lost_responses_are_named_with_addresses() -> Result<()> {
    hold(LOST_RESPONSES)
}

#[test]
fn removed_peering_is_named_at_the_peer() -> Result<()> {
    hold(REMOVED)
}

#[test]
fn key_removed_at_the_peer_is_named() -> Result<()> {
    hold(FORGOTTEN_KEY)
}

#[test]
fn peer_taken_down_is_named() -> Result<()> {
    hold(TAKEN_DOWN)
}

#[test]
fn killed_peer_is_named() -> Result<()> {
    hold(KILLED)
}

#[test]
fn hung_peer_is_named_each_time() -> Result<()> {
    hold(HANGS)
}

#[test]
fn loss_of_forty_percent_is_named() -> Result<()> {
    hold(LOSS)
}

/// Hardly a probe is answered, and many packets arrive all the same.
#[test]
fn loss_of_ninety_percent_is_named() -> Result<()> {
    hold(HEAVY_LOSS)
}

/// Probes alone show it.
#[test]
fn loss_of_ninety_percent_is_named_without_traffic() -> Result<()> {
    hold(IDLE_LOSS)
}

#[test]
fn wrong_cidr_is_named_with_object_and_field() -> Result<()> {
    hold(WRONG_CIDR)
}

#[test]
fn family_that_one_side_leaves_out_is_named() -> Result<()> {
    hold(LEFT_OUT_FAMILY)
}

#[test]
fn wrong_key_is_named_before_a_connection() -> Result<()> {
    hold(WRONG_KEY_AT_FIRST)
}

#[test]
fn wrong_key_is_named_after_a_connection() -> Result<()> {
    hold(WRONG_KEY_LATER)
}

#[test]
fn endpoint_of_oneself_is_named() -> Result<()> {
    hold(OWN_ENDPOINT)
}

#[test]
fn wrong_endpoint_of_a_live_peering_is_named() -> Result<()> {
    hold(WRONG_ENDPOINT)
}

#[test]
fn name_that_does_not_resolve_is_named() -> Result<()> {
    hold(UNKNOWN_NAME)
}

#[test]
fn key_in_two_gateways_is_named_on_both_sides() -> Result<()> {
    hold(SHARED_KEY)
}

/// Peers rome with milan and runs `fault` once nothing of the start is left.
fn connected(
    fault: impl FnOnce(&Scene, &Peering, &mut Vec<Seen>) -> Result<()>,
) -> Result<Vec<Seen>> {
    let mut seen = Vec::new();
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        for cluster in ["rome", "milan"] {
            solved(scene, cluster, Instant::now())?;
        }
        // Not in step with the probes of either side.
        sleep(Duration::from_millis(1300));
        fault(scene, &peering, &mut seen)
    })?;
    Ok(seen)
}

/// All sides at once, since each waits for its own.
fn both<const N: usize>(
    scene: &Scene,
    sides: [((&'static str, &'static str), &str); N],
    start: Instant,
) -> Result<Vec<Seen>> {
    std::thread::scope(|scope| {
        let threads =
            sides.map(|(what, words)| scope.spawn(move || named(scene, what, words, start)));
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn both_solved(scene: &Scene, start: Instant) -> Result<Vec<Seen>> {
    ["rome", "milan"].into_iter().map(|cluster| solved(scene, cluster, start)).collect()
}

fn cut() -> Result<Vec<Seen>> {
    connected(|scene, _, seen| {
        scene.lab.cut("milan-1")?;
        let sides = [
            (("rome", "NoAnswer"), "no answer from milan for "),
            (("milan", "NoAnswer"), "no answer from rome for "),
        ];
        seen.extend(both(scene, sides, Instant::now())?);
        scene.lab.restore("milan-1")?;
        seen.extend(both_solved(scene, Instant::now())?);
        Ok(())
    })
}

fn one_way() -> Result<Vec<Seen>> {
    dropped(
        ["milan", "input"],
        [
            (("rome", "NotReceived"), "milan is received, and receives nothing from here for "),
            (("milan", "NoAnswer"), "no answer from rome for "),
        ],
    )
}

fn own_output() -> Result<Vec<Seen>> {
    dropped(
        ["rome", "output"],
        [
            (("rome", "SendRefused"), "this host itself refuses UDP to "),
            (("milan", "NoAnswer"), "no answer from rome for "),
        ],
    )
}

fn lost_responses() -> Result<Vec<Seen>> {
    let mut seen = Vec::new();
    play(&rome_and_milan(1), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        rome.head().net().nft(&format!(
            "table inet fault {{\nchain drops {{ type filter hook input priority -400;\n\
             udp sport {PORT} drop;\n}}\n}}\n"
        ))?;
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        milan.apply("rome", &join(&peering.server_documents()))?;
        runs(milan, "rome")?;
        rome.apply("milan", &join(&peering.client_documents()))?;
        runs(rome, "milan")?;
        let words = "rome initiates again and again: the responses, UDP from 192.0.2.33 to \
                     192.0.2.17:";
        seen.push(named(scene, ("milan", "NotReceived"), words, Instant::now())?);
        rome.head().net().nft("delete table inet fault\n")?;
        seen.extend(both_solved(scene, Instant::now())?);
        Ok(())
    })?;
    Ok(seen)
}

/// Drops WireGuard's packets in a hook of a cluster's host.
fn dropped(
    [cluster, hook]: [&str; 2],
    sides: [((&'static str, &'static str), &str); 2],
) -> Result<Vec<Seen>> {
    connected(|scene, _, seen| {
        let host = scene.cluster(cluster).head().net();
        host.nft(&format!(
            "table inet fault {{\nchain drops {{ type filter hook {hook} priority -400;\n\
             udp dport {PORT} drop;\n}}\n}}\n"
        ))?;
        seen.extend(both(scene, sides, Instant::now())?);
        host.nft("delete table inet fault\n")?;
        seen.extend(both_solved(scene, Instant::now())?);
        Ok(())
    })
}

fn removed() -> Result<Vec<Seen>> {
    connected(|scene, peering, seen| {
        let what = ("rome", "PeeringRemoved");
        scene.cluster("milan").remove("rome")?;
        let words = "milan has removed its side of this peering";
        seen.push(named(scene, what, words, Instant::now())?);
        scene.cluster("milan").apply("rome", &join(&peering.server_documents()))?;
        // The gateway has to start first, which is no part of the status.
        scene.cluster("milan").wait_connected("rome", AT_MOST)?;
        seen.push(solved(scene, "rome", Instant::now())?);
        scene.cluster("rome").remove("milan")?;
        let words = "rome has removed its side of this peering";
        seen.push(named(scene, ("milan", "PeeringRemoved"), words, Instant::now())?);
        Ok(())
    })
}

fn forgotten_key() -> Result<Vec<Seen>> {
    connected(|scene, peering, seen| {
        let (milan, mut documents) = (scene.cluster("milan"), peering.server_documents());
        documents.retain(|document| !document.contains("kind: PublicKey"));
        milan.apply("rome", &join(&documents))?;
        let words = "milan has removed its side of this peering, or its PublicKey of rome";
        seen.push(named(scene, ("rome", "PeeringRemoved"), words, Instant::now())?);
        milan.apply("rome", &join(&peering.server_documents()))?;
        // The client initiates after three unanswered probes, which is no part of the status.
        milan.wait_connected("rome", AT_MOST)?;
        seen.push(solved(scene, "rome", Instant::now())?);
        Ok(())
    })
}

fn taken_down() -> Result<Vec<Seen>> {
    connected(|scene, _, seen| {
        let start = Instant::now();
        let (down, named) = std::thread::scope(|scope| {
            let down = scope.spawn(|| scene.cluster("milan").weft(&["down"]));
            let named = named(scene, ("rome", "PeerTakenDown"), "has been taken down", start);
            (down.join().expect("no panic"), named)
        });
        down?;
        seen.push(named?);
        Ok(())
    })
}

fn killed() -> Result<Vec<Seen>> {
    connected(|scene, _, seen| {
        kill_all(scene.cluster("milan"))?;
        let words = "no answer from milan for ";
        seen.push(named(scene, ("rome", "NoAnswer"), words, Instant::now())?);
        Ok(())
    })
}

/// Once it goes on, its answers arrive together, as data does. That is over after a second, and later probes are
/// not given more time for it.
fn hangs() -> Result<Vec<Seen>> {
    connected(|scene, _, seen| {
        for _ in 0..4 {
            sleep(Duration::from_millis(1400));
            signal_gateway(scene.cluster("rome"), Signal::SIGSTOP)?;
            let words = "no answer from rome for ";
            let named = named(scene, ("milan", "NoAnswer"), words, Instant::now());
            signal_gateway(scene.cluster("rome"), Signal::SIGCONT)?;
            seen.extend([named?, solved(scene, "milan", Instant::now())?]);
        }
        Ok(())
    })
}

fn signal_gateway(cluster: &Cluster, signal: Signal) -> Result<()> {
    let processes = cluster.processes(0, "gateway");
    ensure!(!processes.is_empty(), "no gateway runs");
    processes.into_iter().try_for_each(|pid| Ok(kill(Pid::from_raw(pid), signal)?))
}

/// `weft up` would start its gateways again.
fn kill_all(cluster: &Cluster) -> Result<()> {
    for program in ["weft", "gateway"] {
        let kill_one = |pid| kill(Pid::from_raw(pid), Signal::SIGKILL);
        cluster.processes(0, program).into_iter().try_for_each(kill_one)?;
    }
    Ok(())
}

/// Beside what pods send one another all day. Drops are in a hook of a cluster's host, by the port of the server.
fn loss(percent: u8, has_traffic: bool, drops: &[(&str, &str, &str)]) -> Result<Vec<Seen>> {
    connected(|scene, _, seen| {
        let mut ways = Vec::new();
        for (from, to) in [("rome", "milan"), ("milan", "rome")] {
            let (pod, address) = scene.way(from, to)?;
            let at = first_pod(scene.cluster(to)).ns.clone();
            ways.push(Way { from: pod.ns, to: SocketAddr::new(address, 9999), at });
        }
        let streams = has_traffic.then(|| Streams::start(&ways, Duration::from_millis(2), 100));
        let streams = streams.transpose()?;
        for (cluster, hook, port) in drops {
            scene.cluster(cluster).head().net().nft(&format!(
                "table inet fault {{\nchain drops {{ type filter hook {hook} priority -400;\n\
                 udp {port} {PORT} numgen random mod 100 < {percent} drop;\n}}\n}}\n"
            ))?;
        }
        let milan = [("ProbeLoss", " % of probes to or from rome")];
        let received = ("NotReceived", "milan is received, and receives nothing from here for ");
        let rome = [("ProbeLoss", " % of probes to or from milan"), received];
        // So many probes may be lost one after the other that none has arrived yet.
        let rome = if percent > 50 { &rome[..] } else { &rome[..1] };
        let start = Instant::now();
        seen.extend(std::thread::scope(|scope| {
            let other = scope.spawn(|| named_as_one_of(scene, "milan", &milan, start));
            let rome = named_as_one_of(scene, "rome", rome, start);
            [rome, other.join().expect("no panic")].into_iter().collect::<Result<Vec<_>>>()
        })?);
        stays(scene, if percent > 50 { Duration::from_secs(20) } else { Duration::ZERO })?;
        for (cluster, ..) in drops {
            scene.cluster(cluster).head().net().nft("delete table inet fault\n")?;
        }
        seen.extend(both_solved(scene, Instant::now())?);
        let reports = streams.map(|streams| streams.stop());
        let lost = reports.iter().flatten().map(|report| report.lost).sum::<u64>();
        ensure!(lost > 0 || !has_traffic, "nothing was lost");
        Ok(())
    })
}

/// No side shows a connection meanwhile, or a gateway that does not report.
fn stays(scene: &Scene, time: Duration) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < time {
        for cluster in ["rome", "milan"] {
            let (status, _) = scene.cluster(cluster).status_and_code()?;
            let is_silent = status.to_string().contains("has reported nothing");
            let is_wrong = is_silent || states(&status).iter().any(|state| state == "Connected");
            ensure!(!is_wrong, "{cluster} after {:?}: {status}", start.elapsed());
        }
    }
    Ok(())
}

fn wrong_cidr() -> Result<Vec<Seen>> {
    connected(|scene, peering, seen| {
        let mut wrong = peering.clone();
        wrong.server.pod_cidrs = vec!["10.99.0.0/16".parse()?];
        scene.cluster("rome").apply("milan", &join(&wrong.client_documents()))?;
        let sides = [
            (
                ("rome", "CidrMismatch"),
                "Configuration liqo-tenant-milan/milan: spec.remote.cidr.pod of milan's \
                 Configuration: found 10.99.0.0/16; expected 10.200.0.0/16",
            ),
            (("milan", "PeerCidrMismatch"), "rome has other CIDRs configured for milan"),
        ];
        seen.extend(both(scene, sides, Instant::now())?);
        scene.cluster("rome").apply("milan", &join(&peering.client_documents()))?;
        seen.extend(both_solved(scene, Instant::now())?);
        Ok(())
    })
}

fn left_out_family() -> Result<Vec<Seen>> {
    let mut seen = Vec::new();
    play(&rome_and_milan(1).map(ClusterSpec::dual_stack), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        for cluster in ["rome", "milan"] {
            solved(scene, cluster, Instant::now())?;
        }
        let mut wrong = peering.clone();
        wrong.client.pod_cidrs.retain(|cidr| cidr.addr().is_ipv4());
        wrong.client.external_cidrs.retain(|cidr| cidr.addr().is_ipv4());
        scene.cluster("milan").apply("rome", &join(&wrong.server_documents()))?;
        let ipv6 = &peering.client.pod_cidrs[1];
        let expected = format!("{ipv6}, which rome's gateway reports as its own");
        let sides = [
            (("milan", "CidrMismatch"), expected.as_str()),
            (("rome", "PeerCidrMismatch"), "milan has other CIDRs configured for rome"),
        ];
        seen.extend(both(scene, sides, Instant::now())?);
        scene.cluster("milan").apply("rome", &join(&peering.server_documents()))?;
        seen.extend(both_solved(scene, Instant::now())?);
        // Both leave it out: it is not meant to be joined.
        scene.cluster("milan").apply("rome", &join(&wrong.server_documents()))?;
        let mut both_without = wrong.clone();
        both_without.server.pod_cidrs.retain(|cidr| cidr.addr().is_ipv4());
        both_without.server.external_cidrs.retain(|cidr| cidr.addr().is_ipv4());
        scene.cluster("rome").apply("milan", &join(&both_without.client_documents()))?;
        both_solved(scene, Instant::now())?;
        Ok(())
    })?;
    Ok(seen)
}

/// These manifests with another key in their PublicKey, which is the last to have one.
fn with_wrong_key(text: &str) -> String {
    let (before, rest) = text.rsplit_once("publicKey: ").expect("a PublicKey");
    let (_, rest) = rest.split_once('\n').expect("a line");
    format!("{before}publicKey: {}\n{rest}", PrivateKey::generate().public())
}

/// Waits until the gateway of a peering that cannot connect runs.
fn runs(cluster: &Cluster, peer: &str) -> Result<()> {
    wait_until("the gateway runs", AT_MOST, || {
        let state = cluster.peering(peer)?["state"].clone();
        ensure!(state == "Connecting", "{state}");
        Ok::<_, anyhow::Error>(())
    })
}

fn wrong_key_at_first() -> Result<Vec<Seen>> {
    let mut seen = Vec::new();
    play(&rome_and_milan(1), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        let right = join(&peering.server_documents());
        milan.apply("rome", &with_wrong_key(&right))?;
        runs(milan, "rome")?;
        rome.apply("milan", &join(&peering.client_documents()))?;
        runs(rome, "milan")?;
        let start = Instant::now();
        let key = format!("with the key {}, which is not in rome", peering.client_key().public());
        let sides = [
            (
                ("rome", "NoHandshake"),
                "no answer from milan to handshakes at 192.0.2.33:30742 for ",
            ),
            (("milan", "UnknownKey"), key.as_str()),
        ];
        seen.extend(both(scene, sides, start)?);
        milan.apply("rome", &right)?;
        seen.extend(both_solved(scene, Instant::now())?);
        Ok(())
    })?;
    Ok(seen)
}

fn wrong_key_later() -> Result<Vec<Seen>> {
    connected(|scene, peering, seen| {
        let (rome, right) = (scene.cluster("rome"), join(&peering.client_documents()));
        rome.apply("milan", &with_wrong_key(&right))?;
        let own = format!("are not for this gateway's key {}", peering.server_key().public());
        let sides = [
            (("rome", "SupersededKeys"), "milan does not answer handshakes with the new keys"),
            (("milan", "WrongResponder"), own.as_str()),
        ];
        seen.extend(both(scene, sides, Instant::now())?);
        rome.apply("milan", &right)?;
        seen.extend(both_solved(scene, Instant::now())?);
        Ok(())
    })
}

/// Changes where rome looks for milan, and back.
fn endpoint(address: &str, reason: &'static str, words: &str) -> Result<Vec<Seen>> {
    connected(|scene, peering, seen| {
        let mut wrong = peering.clone();
        wrong.endpoint = vec![address.to_owned()];
        let rome = scene.cluster("rome");
        rome.apply("milan", &join(&wrong.client_documents()))?;
        seen.push(named(scene, ("rome", reason), words, Instant::now())?);
        rome.apply("milan", &join(&peering.client_documents()))?;
        seen.push(solved(scene, "rome", Instant::now())?);
        Ok(())
    })
}

fn own_endpoint() -> Result<Vec<Seen>> {
    let words = "leads to 192.0.2.17:30742, which is node rome-1 of this cluster itself";
    endpoint("192.0.2.17", "EndpointIsOwn", words)
}

/// Nobody has that address.
fn wrong_endpoint() -> Result<Vec<Seen>> {
    let words = "leads to 192.0.2.250:30742, from where milan has never answered: the session goes on \
                 with 192.0.2.33:30742";
    endpoint("192.0.2.250", "EndpointUnanswered", words)
}

fn unknown_name() -> Result<Vec<Seen>> {
    let words = "the name gateway.milan.test does not resolve";
    endpoint("gateway.milan.test", "NameNotResolved", words)
}

/// A twin of rome, which takes the session over, until rome takes it back.
fn shared_key() -> Result<Vec<Seen>> {
    let mut seen = Vec::new();
    let [rome, milan] = rome_and_milan(1);
    play(&[rome, milan, ClusterSpec::new("twin", 3, 1)], |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        for cluster in ["rome", "milan"] {
            solved(scene, cluster, Instant::now())?;
        }
        sleep(Duration::from_millis(1300));
        let twin = scene.cluster("twin");
        twin.apply("milan", &join(&peering.client_documents()))?;
        wait_until("the twin's gateway runs", AT_MOST, || {
            ensure!(!twin.processes(0, "gateway").is_empty(), "{}", twin.log("weft-up"));
            Ok::<_, anyhow::Error>(())
        })?;
        let at = "rome's key is used from two endpoints, 192.0.2.17 and 192.0.2.49, in turn";
        let own = "milan receives packets with this gateway's key from another endpoint, too";
        let sides = [
            (("milan", "PeerKeyShared"), at),
            (("twin", "KeyShared"), own),
            (("rome", "KeyShared"), own),
        ];
        seen.extend(both(scene, sides, Instant::now())?);
        kill_all(twin)?;
        seen.extend(both_solved(scene, Instant::now())?);
        Ok(())
    })?;
    Ok(seen)
}
