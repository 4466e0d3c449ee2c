//! ```text
//!   rome-1 (gateway of weft) --------- turin-1: wireguard-go, and Liqo's connection check
//! ```

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fabric_api::fabric::PROBE_PORT;
use fabric_api::networking::ConnectionType as Role;
use serde::{Deserialize, Serialize};
use weft_tests::traffic::ping;
use weft_tests::{Cluster, Netns, stays_so, wait_until};

use crate::interop::World;
use crate::scene::TIMEOUT;

/// Rome's own probing: lost after five seconds.
const SWITCHES: [&str; 2] = ["--ping-interval=500ms", "--ping-loss-threshold=10"];
/// A stock Liqo's interval.
const INTERVAL: Duration = Duration::from_secs(2);
const BUFFER: usize = 1024;

#[test]
fn a_stock_liqo_is_connected_answered_and_missed() -> Result<()> {
    check(Role::Server, Behaviour { answers: true, pings: true }, |rome, liqo, _| {
        rome.wait_connected("turin", TIMEOUT)?;
        let latency = rome.peering("turin")?["latency"].clone();
        ensure!(latency.as_str().is_some_and(|text| text.ends_with('s')), "latency {latency}");
        let before = liqo.answered();
        wait_until("its pings are answered", TIMEOUT, || {
            let answered = liqo.answered() - before;
            ensure!(answered >= 2, "{answered} since it is connected");
            Ok::<_, anyhow::Error>(())
        })?;
        liqo.behave(Behaviour { answers: false, pings: false });
        is_lost(rome)?;
        liqo.behave(Behaviour { answers: true, pings: true });
        rome.wait_connected("turin", TIMEOUT)
    })
}

#[test]
fn liqo_without_pings_is_connected_by_answers() -> Result<()> {
    check(Role::Client, Behaviour { answers: true, pings: false }, |rome, liqo, turin| {
        rome.wait_connected("turin", TIMEOUT)?;
        stays_so("the connection", Duration::from_secs(7), || rome.is_connected("turin"))?;
        let pod = rome.pods().next().context("rome has a pod")?;
        let stats = ping(turin, pod.addresses[0], 3)?;
        ensure!(stats.lost == 0, "{stats:?}");
        liqo.behave(Behaviour { answers: false, pings: false });
        is_lost(rome)
    })
}

#[test]
fn peer_that_never_answers_is_not_connected() -> Result<()> {
    check(Role::Server, Behaviour { answers: false, pings: true }, |rome, liqo, _| {
        wait_until("its pings are answered", TIMEOUT, || {
            ensure!(liqo.answered() >= 2, "only {} were", liqo.answered());
            Ok::<_, anyhow::Error>(())
        })?;
        let state = rome.peering("turin")?["state"].clone();
        ensure!(state == "Connecting", "it is {state}");
        Ok(())
    })
}

fn is_lost(rome: &Cluster) -> Result<()> {
    wait_until("the connection is lost", TIMEOUT, || {
        let state = rome.peering("turin")?["state"].clone();
        ensure!(state == "Error", "it is {state}");
        Ok::<_, anyhow::Error>(())
    })
}

fn check(
    role: Role,
    behaviour: Behaviour,
    test: impl FnOnce(&Cluster, &Liqo, &Netns) -> Result<()>,
) -> Result<()> {
    let Some(world) = World::with_any(role, &SWITCHES)? else { return Ok(()) };
    let rome = world.scene.cluster("rome");
    let number = if role == Role::Server { 1 } else { 2 };
    let liqo = Liqo::start(world.turin.net(), [169, 254, 18, number].into(), behaviour)?;
    let result = test(rome, &liqo, world.turin.net());
    if result.is_err() {
        eprintln!("{}\n{}", rome.report(), world.turin.log());
    }
    result
}

/// Liqo's message, in the order and case of its Go structure; decoding drops what it does not know.
#[derive(Debug, Serialize, Deserialize)]
struct Msg {
    #[serde(rename = "clusterID")]
    cluster_id: String,
    #[serde(rename = "msgType")]
    msg_type: String,
    #[serde(rename = "timeStamp")]
    time_stamp: String,
}

#[derive(Clone, Copy, Debug)]
struct Behaviour {
    answers: bool,
    pings: bool,
}

/// Stock Liqo gateway's behaviour on UDP 12345, until this value is dropped.
struct Liqo {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    answers: AtomicBool,
    pings: AtomicBool,
    stop: AtomicBool,
    answered: AtomicU32,
}

impl Liqo {
    fn start(ns: &Netns, peer: IpAddr, behaviour: Behaviour) -> Result<Self> {
        let socket = ns.run(|| UdpSocket::bind(("0.0.0.0", PROBE_PORT)))?;
        socket.set_read_timeout(Some(Duration::from_millis(20)))?;
        let shared = Arc::new(Shared::default());
        let worker =
            Worker { socket, peer: SocketAddr::new(peer, PROBE_PORT), shared: Arc::clone(&shared) };
        let liqo = Self { shared, worker: Some(std::thread::spawn(move || worker.run())) };
        liqo.behave(behaviour);
        Ok(liqo)
    }

    fn behave(&self, behaviour: Behaviour) {
        self.shared.answers.store(behaviour.answers, Ordering::Relaxed);
        self.shared.pings.store(behaviour.pings, Ordering::Relaxed);
    }

    /// Number of its pings that came back.
    fn answered(&self) -> u32 {
        self.shared.answered.load(Ordering::Relaxed)
    }
}

impl Drop for Liqo {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}

struct Worker {
    socket: UdpSocket,
    peer: SocketAddr,
    shared: Arc<Shared>,
}

impl Worker {
    fn run(&self) {
        let mut sent = 0;
        // The first one after an interval, as in Liqo.
        let mut ping_at = Instant::now() + INTERVAL;
        let mut buffer = [0; BUFFER];
        while !self.shared.stop.load(Ordering::Relaxed) {
            if Instant::now() >= ping_at {
                ping_at += INTERVAL;
                if self.shared.pings.load(Ordering::Relaxed) {
                    sent += 1;
                    self.send(&ping_message(sent), self.peer);
                }
            }
            if let Ok((len, from)) = self.socket.recv_from(&mut buffer) {
                self.handle(&buffer[..len], from, sent);
            }
        }
    }

    fn handle(&self, datagram: &[u8], from: SocketAddr, sent: u32) {
        let Ok(mut message) = serde_json::from_slice::<Msg>(datagram) else { return };
        match message.msg_type.as_str() {
            "PING" if self.shared.answers.load(Ordering::Relaxed) => {
                "PONG".clone_into(&mut message.msg_type);
                message.time_stamp = as_go_writes(&message.time_stamp);
                self.send(&message, from);
            }
            // The cluster's ID is the sender's key to whom it asked.
            "PONG" if message.cluster_id == "rome" && message.time_stamp == time_stamp(sent) => {
                self.shared.answered.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    fn send(&self, message: &Msg, to: SocketAddr) {
        let text = serde_json::to_vec(message).expect("three strings are JSON");
        let _ = self.socket.send_to(&text, to);
    }
}

fn ping_message(number: u32) -> Msg {
    Msg {
        cluster_id: "rome".to_owned(),
        msg_type: "PING".to_owned(),
        time_stamp: time_stamp(number),
    }
}

/// In a local time zone and with as many digits as it takes: what comes back has to be this text.
fn time_stamp(number: u32) -> String {
    format!(
        "2026-11-21T09:{:02}:{:02}.5{:04}1+02:00",
        number / 60 % 60,
        number % 60,
        number % 10_000
    )
}

/// RFC 3339 with nanoseconds, without the zeros at their end.
fn as_go_writes(time: &str) -> String {
    let Some((seconds, rest)) = time.split_once('.') else { return time.to_owned() };
    let zone_at = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    let (fraction, zone) = rest.split_at(zone_at);
    match fraction.trim_end_matches('0') {
        "" => format!("{seconds}{zone}"),
        fraction => format!("{seconds}.{fraction}{zone}"),
    }
}
