//! Packets that WireGuard's timers make weft send, as the underlay sees them. Peerings side by
//! side, one for each behaviour; padding, rekeys and their intervals are looked at where packets
//! flow, in the matrix.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fabric_api::networking::ConnectionType as Role;
use weft_tests::Families;
use weft_tests::traffic::Streams;

use super::rig::Rig;
use super::tie::{Case, available, own_address};
use super::wire::{INITIATION, Seen, Wire, all_within, gaps};
use super::{INTERVAL, PADDING, SINKS, replace_gateway};
use crate::scene::TIMEOUT;

/// Numbers of the peerings, by purpose.
const SILENT: usize = 0;
const ASKED: usize = 1;
const DEAF: usize = 2;
const DEAD: usize = 3;

/// Weft's attempts come every second, unlike REKEY_TIMEOUT's 5 s, with the protocol's jitter.
const ATTEMPTS: f64 = 1.0;
const JITTER: f64 = 0.333;
const KEEPALIVE_TIMEOUT: f64 = 10.0;
const PERSISTENT_KEEPALIVE: f64 = 25.0;
const REJECT_AFTER_TIME: f64 = 180.0;
/// Weft no longer sends with a key that the peer may be about to discard.
const LAST_SECONDS: f64 = 5.0;
/// Delay that a busy machine may add, in seconds.
const LATE: f64 = 0.7;

#[test]
#[ignore = "minutes long: make soak"]
fn keepalives_retries_and_expiry_match_protocol() -> Result<()> {
    let Some(peer) = available().into_iter().next() else { return Ok(()) };
    let case = Case { peer, role: Role::Client, underlay: Families::V4 };
    super::play(&[case; 4], |rig| {
        let (rome, ties) = (rig.rome(), &rig.ties);
        let wire = Wire::tap(rig.scene.lab.switch().net(), rome.spec.node_addresses(1))?;
        let start = Instant::now();
        // New sessions, whose beginning is seen.
        ties[DEAD].net().nft(&drop_udp(""))?;
        replace_gateway(rig, &ties[DEAD])?;
        replace_gateway(rig, &ties[DEAF])?;
        ties[DEAF].wait_until_up(rome)?;
        let begun = wire.sessions_with(address(rig, DEAF));
        let begun = *begun.last().context("no handshake was seen")?;
        ties[DEAF].net().nft(&drop_udp("udp length { 100, 156 } "))?;
        let ways = [ties[DEAF].out(rome, SINKS)?, ties[DEAF].back(rome, SINKS + 1)];
        let streams = Streams::start(&ways, INTERVAL, PADDING)?;
        let asked_at = is_sent_one(rig)?;

        let end = begun + Duration::from_secs_f64(REJECT_AFTER_TIME + 8.0);
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
        streams.stop();
        let seen = |index: usize| wire.sent_to(address(rig, index));
        is_kept_alive(&seen(SILENT))?;
        answers_after_a_while(&seen(ASKED), asked_at)?;
        ends_with_its_session(&seen(DEAF), begun)?;
        retries_with_jitter(&seen(DEAD), start)
    })
}

fn address(rig: &Rig, index: usize) -> IpAddr {
    own_address(rig.ties[index].case, rig.number(index))
}

/// Nothing that matches passes the machine's own hooks.
fn drop_udp(what: &str) -> String {
    let (hook, port) = ("type filter hook", format!("{what}udp"));
    format!(
        "table inet deaf {{\n\
         chain in {{ {hook} prerouting priority -400;\niifname eth0 {port} dport 1-65535 drop;\n}}\n\
         chain out {{ {hook} postrouting priority 300;\noifname eth0 {port} dport 1-65535 drop;\n}}\n}}\n"
    )
}

/// Makes weft send to the peer, then receive a packet that nobody answers; returns the time of
/// that.
fn is_sent_one(rig: &Rig) -> Result<Instant> {
    let (tie, port) = (&rig.ties[ASKED], SINKS + 2);
    let way = tie.back(rig.rome(), port);
    let sink = way.at.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)))?;
    sink.set_read_timeout(Some(TIMEOUT))?;
    tie.wait_until_up(rig.rome())?;
    let sender = way.from.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    let now = Instant::now();
    sender.send_to(b"to be received only", way.to)?;
    sink.recv(&mut [0; 64]).context("it did not arrive")?;
    Ok(now)
}

/// Those before the first rekey, which brings one of its own.
fn is_kept_alive(seen: &Seen) -> Result<()> {
    ensure!(seen.keepalives.len() >= 4, "too few keepalives: {seen:?}");
    let (low, high) = (PERSISTENT_KEEPALIVE - LATE, PERSISTENT_KEEPALIVE + LATE);
    all_within("persistent keepalives", &gaps(&seen.keepalives[..4]), low, high)
}

/// A keepalive comes soon enough after the packet received, and not before weft has sent nothing
/// for as long.
fn answers_after_a_while(seen: &Seen, asked_at: Instant) -> Result<()> {
    let after = seen.keepalives.iter().find(|at| **at > asked_at).context("no keepalive came")?;
    let since_heard = (*after - asked_at).as_secs_f64();
    all_within("passive keepalive", &[since_heard], 0.0, KEEPALIVE_TIMEOUT + LATE)?;
    let last = seen.last_packet.context("weft sent nothing")?;
    let silent = after.saturating_duration_since(last).as_secs_f64();
    all_within("silence", &[silent], KEEPALIVE_TIMEOUT - LATE, f64::MAX)
}

/// Weft sends until the session may not be used any more, while it asks for another in vain.
fn ends_with_its_session(seen: &Seen, begun: Instant) -> Result<()> {
    let last = seen.last_packet.context("weft sent nothing")?;
    let age = (last - begun).as_secs_f64();
    let end = REJECT_AFTER_TIME - LAST_SECONDS;
    all_within("age of the session", &[age], end - LATE, end + LATE)?;
    let asked = seen.times_of(INITIATION).into_iter().filter(|at| *at > begun).count();
    ensure!(asked > 5, "weft asked for another session only {asked} times");
    Ok(())
}

fn retries_with_jitter(seen: &Seen, start: Instant) -> Result<()> {
    let mut times = seen.times_of(INITIATION);
    times.retain(|at| *at > start);
    let gaps = gaps(&times);
    ensure!(gaps.len() > 20, "only {} attempts", times.len());
    all_within("attempts", &gaps, 0.0, ATTEMPTS + JITTER + LATE)?;
    // Another way is tried at once, now and then.
    let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
    all_within("attempts on average", &[mean], ATTEMPTS, ATTEMPTS + JITTER)?;
    let (least, most) = gaps.iter().fold((f64::MAX, 0.0f64), |(a, b), s| (a.min(*s), b.max(*s)));
    ensure!(most - least > JITTER / 5.0, "no jitter: {gaps:.3?}");
    Ok(())
}
