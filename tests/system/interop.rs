//! ```text
//!                       +--- turin-0 (wireguard-go, boringtun or gotatun): its device is all its pods
//!   pod-1-1 --- rome-1 -+--- turin-1
//!                       +--- ...
//! ```
//!
//! Rome is a cluster under weft with a gateway for each peering; every turin is one machine with
//! another make of WireGuard. All turins have the same pod CIDR, so rome sees each elsewhere.

mod constants;
mod matrix;
mod rig;
mod tie;
mod wire;
mod world;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_tests::traffic::{StreamReport, Streams};
use weft_tests::{Families, wait_until};

use crate::scene::TIMEOUT;
use rig::Rig;
use tie::{Case, Tie, own_address};
pub(crate) use world::World;

/// 100 packets a second.
const INTERVAL: Duration = Duration::from_millis(10);
/// Behind each number: packets of odd length, which WireGuard pads.
const PADDING: usize = 53;
const MOVED_PORT: u16 = 40_000;
/// From the first packet that comes from elsewhere.
const ROAMED: Duration = Duration::from_secs(1);
/// Outage of a killed gateway of weft, whatever its role.
const WEFT_IS_BACK: Duration = Duration::from_secs(1);
/// A stock peer that is configured with weft's endpoint begins a handshake with its first packet.
/// One that is not waits for weft, which receives nothing for KEEPALIVE_TIMEOUT + REKEY_TIMEOUT and
/// then initiates (whitepaper section 6.5); and a second for its process to start.
const CALLER_IS_BACK: Duration = Duration::from_secs(2);
const CALLED_IS_BACK: Duration = Duration::from_millis(15_000 + 333 + 1000);

/// First port of the streams' sinks.
const SINKS: u16 = 5000;

#[test]
fn stock_peers_lose_nothing_in_any_combination() -> Result<()> {
    play(&Case::all(&[Families::V4, Families::V6]), |rig| {
        let streams = both_ways(rig)?;
        std::thread::sleep(Duration::from_secs(5));
        for (tie, reports) in rig.ties.iter().zip(streams.stop().chunks(2)) {
            let lost = reports.iter().any(|report| report.lost + report.duplicated > 0);
            ensure!(!lost, "{:?}: out and back: {reports:?}", tie.case);
        }
        Ok(())
    })
}

#[test]
fn gateway_follows_moving_stock_peer() -> Result<()> {
    play(&Case::all(&[Families::V4, Families::V6]), |rig| {
        let streams = both_ways(rig)?;
        std::thread::sleep(Duration::from_secs(1));
        for (index, tie) in rig.ties.iter().enumerate() {
            let old = rig.number(index);
            tie.move_behind_nat((old, old + 64), MOVED_PORT)?;
        }
        std::thread::sleep(Duration::from_secs(2));
        each_outage(rig, streams, "moved", |_| ROAMED)?;
        rig.ties.iter().enumerate().try_for_each(|(index, tie)| {
            let new = SocketAddr::new(own_address(tie.case, rig.number(index) + 64), MOVED_PORT);
            let endpoint = rig.rome().peering(&tie.spec.id)?["endpoint"].clone();
            ensure!(endpoint == new.to_string(), "{:?} is at {new}, not {endpoint}", tie.case);
            Ok(())
        })
    })
}

#[test]
fn killed_stock_peer_and_gateway_recover() -> Result<()> {
    play(&Case::all(&[Families::V4]), |rig| {
        let streams = both_ways(rig)?;
        rig.ties.iter_mut().try_for_each(Tie::restart)?;
        std::thread::sleep(CALLED_IS_BACK + Duration::from_secs(2));
        each_outage(rig, streams, "killed", |tie| match tie.case.is_weft_initiator() {
            true => CALLED_IS_BACK,
            false => CALLER_IS_BACK,
        })?;

        let streams = both_ways(rig)?;
        for tie in &rig.ties {
            replace_gateway(rig, tie)?;
            tie.wait_until_up(rig.rome())?;
        }
        std::thread::sleep(WEFT_IS_BACK);
        each_outage(rig, streams, "gateway killed", |_| WEFT_IS_BACK)
    })
}

/// Kills weft's gateway of one peering and waits for another process.
fn replace_gateway(rig: &Rig, tie: &Tie) -> Result<()> {
    let ours = format!("liqo-tenant-{} ", tie.spec.id);
    let find = || {
        let all = rig.rome().head().processes();
        let found = all
            .into_iter()
            .find(|(_, line)| line.contains("/gateway ") && format!("{line} ").contains(&ours));
        found.map(|(pid, _)| pid).with_context(|| format!("no gateway for {}", tie.spec.id))
    };
    let old = find()?;
    kill(Pid::from_raw(old), Signal::SIGKILL)?;
    wait_until("there is another gateway", TIMEOUT, || {
        let new = find()?;
        ensure!(new != old, "it still runs");
        Ok::<_, anyhow::Error>(())
    })
}

/// Streams out and back on each tie, in their order.
fn both_ways(rig: &Rig) -> Result<Streams> {
    let mut ways = Vec::new();
    for tie in &rig.ties {
        let port = SINKS + ways.len() as u16;
        ways.push(tie.out(rig.rome(), port)?);
        ways.push(tie.back(rig.rome(), port + 1));
    }
    Streams::start(&ways, INTERVAL, PADDING)
}

/// Fails if on any tie nothing passed for longer than it may.
fn each_outage(
    rig: &Rig,
    streams: Streams,
    what: &str,
    most: impl Fn(&Tie) -> Duration,
) -> Result<()> {
    let mut late = Vec::new();
    for (tie, reports) in rig.ties.iter().zip(streams.stop().chunks(2)) {
        let outage = reports.iter().map(|report: &StreamReport| report.longest_outage).max();
        let (outage, most) = (outage.unwrap_or_default(), most(tie));
        let line = format!("{what}: {:?}: nothing passed for {outage:?} of {most:?}", tie.case);
        eprintln!("{line}");
        late.extend((outage > most).then_some(line));
    }
    ensure!(late.is_empty(), "{}", late.join("\n"));
    Ok(())
}

/// Sets everything up and runs a test. If that fails, everything that may help is printed first.
fn play(cases: &[Case], test: impl FnOnce(&mut Rig) -> Result<()>) -> Result<()> {
    let mut rig = Rig::start(cases)?;
    let result = test(&mut rig);
    if result.is_err() {
        rig.explain();
    }
    result
}
