//! ```text
//!   pod --- rome --------- milan --- pod        new keys on both sides, in every order
//! ```

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::{ping, udp_flow};
use weft_tests::{Cluster, wait_until};

use crate::chance::rounds;
use crate::scene::{
    ECHO, PORT, SOON, Scene, TIMEOUT, answers, answers_in_time, first_pod, play, rome_and_milan,
    serve,
};

/// Positions among the documents of either side.
const SECRET: usize = 2;
const PUBLIC_KEY: usize = 3;

/// Number of changes of both keys, unless `WEFT_ROUNDS` overrides it.
const ROUNDS: usize = 6;

/// Probes between two gateways while they are asked what they counted.
const UNDER_WAY: i64 = 2;

/// Steps of a user: `weft keys` on either side, then each of the four files goes where it belongs.
#[test]
fn key_rotation_in_any_order_loses_nothing_after() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        apart(scene, &peering)?;
        let mut slowest = Duration::ZERO;
        let rounds = rounds(ROUNDS);
        for round in 0..rounds {
            let next = Peering::new(&peering.client, &peering.server, PORT);
            slowest = slowest.max(rotate(scene, &next, round)?);
        }
        eprintln!("{rounds} rotations; both had both after {slowest:?} at most");
        for cluster in &scene.clusters {
            let status = cluster.status()?;
            ensure!(status["problems"].as_array().is_some_and(Vec::is_empty), "{status}");
        }
        Ok(())
    })
}

/// Rome goes on with a key that milan holds as superseded: a stolen one would be used like that.
#[test]
fn ended_superseded_keys_are_refused_at_once() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        apart(scene, &peering)?;
        let next = Peering::new(&peering.client, &peering.server, PORT);
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        milan.apply("publickey", &next.server_documents()[PUBLIC_KEY])?;
        let wanted = next.client_key().public().to_string();
        wait_until("rome's new key is in force", TIMEOUT, || runs_with(milan, &wanted))?;
        let (pod, target) = scene.way("rome", "milan")?;
        answers(&pod.ns, target)?;

        milan.weft(&["keys", "--peer", "rome", "--end-superseded"])?;
        // Long enough for handshakes with the old key.
        for _ in 0..3 {
            let stats = ping(&pod.ns, target, 5)?;
            ensure!(stats.lost == stats.sent, "the old key still works: {stats:?}");
            std::thread::sleep(SOON);
        }
        rome.apply("secret", &next.client_documents()[SECRET])?;
        answers_in_time(&pod.ns, target)
    })
}

/// Keys into files of their own.
fn apart(scene: &Scene, peering: &Peering) -> Result<()> {
    for (id, documents) in sides(peering) {
        let cluster = scene.cluster(id);
        cluster.apply("secret", &documents[SECRET])?;
        cluster.apply("publickey", &documents[PUBLIC_KEY])?;
        let rest = documents.iter().enumerate();
        let rest: Vec<_> = rest
            .filter(|(i, _)| ![SECRET, PUBLIC_KEY].contains(i))
            .map(|(_, document)| document.clone())
            .collect();
        cluster.apply(if id == "rome" { "milan" } else { "rome" }, &join(&rest))?;
    }
    std::thread::sleep(SOON);
    Ok(())
}

fn sides(peering: &Peering) -> [(&'static str, Vec<String>); 2] {
    [("rome", peering.client_documents()), ("milan", peering.server_documents())]
}

/// One change of all keys under 1,000 packets a second; how long it took from the last file until
/// both gateways had both.
fn rotate(scene: &Scene, next: &Peering, round: usize) -> Result<Duration> {
    let _servers = serve(first_pod(scene.cluster("milan")))?;
    let before = missing(scene);
    let (pod, target) = scene.way("rome", "milan")?;
    let interval = Duration::from_millis(1);
    let pace = (interval, Duration::from_secs(3));
    let start = Instant::now();
    let (report, result) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, || {
        std::thread::sleep(SOON / 5);
        let mut files: Vec<_> = sides(next)
            .into_iter()
            .flat_map(|(id, documents)| {
                let [secret, public] = [SECRET, PUBLIC_KEY].map(|i| documents[i].clone());
                [(id, "secret", secret), (id, "publickey", public)]
            })
            .collect();
        // Every order once in 24 rounds; all at once in every third.
        for (left, digit) in
            (1..=files.len()).rev().zip([round % 4, round / 4 % 3, round / 12 % 2, 0])
        {
            let (id, file, text) = files.remove(digit.min(left - 1));
            scene.cluster(id).apply(file, &text)?;
            std::thread::sleep(SOON / 10 * u32::from(!round.is_multiple_of(3)));
        }
        let last = Instant::now();
        let keys = [("rome", next.server_key()), ("milan", next.client_key())];
        for (id, key) in keys {
            let wanted = key.public().to_string();
            wait_until("the new key is in force", TIMEOUT, || {
                runs_with(scene.cluster(id), &wanted)
            })?;
        }
        Ok::<_, anyhow::Error>((last.elapsed(), start.elapsed()))
    })?;
    let (took, both) = result?;
    ensure!(
        both + SOON / 2 < pace.1,
        "round {round}: {both:?} leave no packets to be counted after"
    );
    let after = |number: &&u64| interval.as_secs_f64() * **number as f64 > both.as_secs_f64();
    let late: Vec<_> = report.lost.iter().filter(after).collect();
    eprintln!(
        "round {round}: both had both after {took:?}; lost {} of {} in all",
        report.lost.len(),
        report.sent
    );
    if !late.is_empty() {
        // On a busy machine pods lose packets of their own; the gateways' counters exclude those.
        let tunnel = missing(scene) - before;
        eprintln!("round {round}: {} lost after {both:?}, {tunnel} in the tunnel", late.len());
        ensure!(
            tunnel <= UNDER_WAY,
            "round {round}: lost {late:?} after {both:?}, {tunnel} in the tunnel"
        );
    }
    ensure!(report.duplicated == 0, "round {round}: {report:?}");
    Ok(took)
}

/// Number of packets that went into the tunnel and have not come out of it.
fn missing(scene: &Scene) -> i64 {
    let all = ["rome", "milan"].map(|id| scene.cluster(id).tunnelled());
    all.iter().map(|(sent, received)| *sent as i64 - *received as i64).sum()
}

fn runs_with(cluster: &Cluster, key: &str) -> Result<()> {
    let text = cluster.weft(&["get", "gatewayconfig", "-o", "json"])?;
    let config: serde_json::Value = serde_json::from_str(&text)?;
    ensure!(config["spec"]["peerPublicKey"] == key, "{config}");
    ensure!(config["status"]["appliedGeneration"] == config["metadata"]["generation"], "{config}");
    Ok(())
}
