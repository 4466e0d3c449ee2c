//! Every stock peer in either role over either underlay, with traffic out, back and both, side by
//! side until each has rekeyed; and between two of a kind, as the control.

use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fabric_api::PrivateKey;
use fabric_api::networking::ConnectionType as Role;
use weft_tests::traffic::{StreamReport, Streams, Way};
use weft_tests::{Families, Host, Lab, Netns, Program, StockPeer, Tunnel, on_segment, wait_until};

use super::rig::Rig;
use super::tie::{Case, addresses, is_available, own_address};
use super::wire::{INITIATION, Wire, all_within, gaps};
use super::{INTERVAL, PADDING, SINKS};
use crate::scene::answers_in_time;

/// Number of rekeys that each tunnel is to see, unless `WEFT_REKEYS` overrides it.
const REKEYS: usize = 3;
/// REKEY_AFTER_TIME: an initiator that sends.
const REKEY: f64 = 120.0;
/// REJECT_AFTER_TIME - KEEPALIVE_TIMEOUT - REKEY_TIMEOUT: an initiator that only receives.
const REKEY_ON_RECEIVE: f64 = 165.0;
/// KEEPALIVE_TIMEOUT, for an end that only receives.
const KEEPALIVE: f64 = 10.0;
/// By how much what is seen on a busy machine may be late, in seconds.
const LATE: f64 = 3.0;
const UNDERLAYS: [Families; 2] = [Families::V4, Families::V6];
const CONTROL_PORT: u16 = 31_000;
/// Last byte of the first control's underlay address.
const FIRST_CONTROL: u8 = 128;

/// Direction of the traffic, as weft sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Both,
    Out,
    Back,
}

impl Flow {
    const ALL: [Self; 3] = [Self::Both, Self::Out, Self::Back];

    fn is_one_way(self) -> bool {
        self != Self::Both
    }

    /// Those of the two ways that carry packets.
    fn pick(self, out: Way, back: Way) -> Vec<Way> {
        match self {
            Self::Both => vec![out, back],
            Self::Out => vec![out],
            Self::Back => vec![back],
        }
    }
}

#[test]
#[ignore = "minutes long: make soak"]
fn no_packet_is_lost_through_rekeys_with_wireguard_go() -> Result<()> {
    through_rekeys(StockPeer::WireguardGo)
}

#[test]
#[ignore = "minutes long: make soak"]
fn no_packet_is_lost_through_rekeys_with_boringtun() -> Result<()> {
    through_rekeys(StockPeer::Boringtun)
}

#[test]
#[ignore = "minutes long: make soak"]
fn no_packet_is_lost_through_rekeys_with_gotatun() -> Result<()> {
    through_rekeys(StockPeer::Gotatun)
}

fn through_rekeys(peer: StockPeer) -> Result<()> {
    if !is_available(peer) {
        return Ok(());
    }
    let all = Case::of(peer, &UNDERLAYS).into_iter();
    let all = all.flat_map(|case| Flow::ALL.map(|flow| (case, flow)));
    let is_brief = rekeys() < REKEYS;
    let chosen = all.filter(|(case, flow)| !is_brief || is_among_few(case, *flow));
    let (cases, flows): (Vec<_>, Vec<_>) = chosen.unzip();
    super::play(&cases, |rig| {
        let controls = Control::start_all(&rig.scene.lab, peer, |underlay, is_one_way| {
            let pairs = cases.iter().zip(&flows);
            pairs.into_iter().any(|(c, f)| c.underlay == underlay && f.is_one_way() == is_one_way)
        })?;
        let wire = Wire::tap(rig.scene.lab.switch().net(), rig.rome().spec.node_addresses(1))?;
        let (ways, counts) = all_ways(rig, &flows, &controls)?;
        let start = Instant::now();
        let streams = Streams::start(&ways, INTERVAL, PADDING)?;
        let all = wait_for_rekeys(rig, &wire);
        // Losses of the last rekeys show by now.
        std::thread::sleep(Duration::from_secs(5));
        let took = start.elapsed();
        let reports = split(&streams.stop(), &counts);
        let (tied, control) = reports.split_at(flows.len());
        let rows = rows(rig, &wire, &flows, tied, &controls, control);
        let rows: Vec<_> = rows.into_iter().chain(control_rows(&controls, control)).collect();
        let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
        eprintln!("{peer}: {} tunnels for {took:.0?} at 100 packets/s:\n{text}", counts.len());
        all?;
        let lossy = rows.iter().filter(|row| row.is_cause()).count();
        ensure!(lossy == 0, "{lossy} combinations lost or doubled packets");
        for (index, flow) in flows.iter().enumerate() {
            keeps_the_constants(rig, &wire, index, *flow)
                .with_context(|| format!("{:?} {flow:?}", rig.ties[index].case))?;
        }
        Ok(())
    })
}

fn rekeys() -> usize {
    std::env::var("WEFT_REKEYS").ok().and_then(|n| n.parse().ok()).unwrap_or(REKEYS)
}

/// With fewer rekeys than there are to be, fewer tunnels: each role with each underlay, and each flow.
/// Other tests want the processors, too.
fn is_among_few(case: &Case, flow: Flow) -> bool {
    let of_v6 = if case.is_weft_initiator() { Flow::Out } else { Flow::Back };
    flow == if case.underlay == Families::V6 { of_v6 } else { Flow::Both }
}

/// Handshakes are seen from now on, so each is a rekey.
fn wait_for_rekeys(rig: &Rig, wire: &Wire) -> Result<()> {
    let rekeys = rekeys();
    let most = (REKEY_ON_RECEIVE + 2.0 * LATE) * rekeys as f64 + KEEPALIVE;
    wait_until("all have rekeyed", Duration::from_secs_f64(most), || {
        std::thread::sleep(Duration::from_secs(1));
        let has = |index: &usize| wire.sessions_with(address(rig, *index)).len() >= rekeys;
        let missing = (0..rig.ties.len()).find(|index| !has(index));
        missing.map_or(Ok(()), |index| Err(format!("{:?} has not", rig.ties[index].case)))
    })
}

fn address(rig: &Rig, index: usize) -> IpAddr {
    own_address(rig.ties[index].case, rig.number(index))
}

/// The ways of all ties and of all controls, and how many each has.
fn all_ways(rig: &Rig, flows: &[Flow], controls: &[Control]) -> Result<(Vec<Way>, Vec<usize>)> {
    let (mut ways, mut counts) = (Vec::new(), Vec::new());
    for (tie, flow) in rig.ties.iter().zip(flows) {
        let port = SINKS + ways.len() as u16;
        let picked = flow.pick(tie.out(rig.rome(), port)?, tie.back(rig.rome(), port + 1));
        counts.push(picked.len());
        // A port for each, used or not.
        ways.extend(picked);
    }
    for control in controls {
        let picked = control.flow.pick(control.way(0), control.way(1));
        counts.push(picked.len());
        ways.extend(picked);
    }
    Ok((ways, counts))
}

/// Reports by tunnel, the ways of one tunnel added up.
fn split(reports: &[StreamReport], counts: &[usize]) -> Vec<StreamReport> {
    let mut rest = reports;
    let mut sums = Vec::new();
    for count in counts {
        let (own, more) = rest.split_at(*count);
        rest = more;
        sums.push(own.iter().fold(StreamReport::default(), |sum, report| StreamReport {
            sent: sum.sent + report.sent,
            lost: sum.lost + report.lost,
            duplicated: sum.duplicated + report.duplicated,
            longest_outage: sum.longest_outage.max(report.longest_outage),
            first_lost: [sum.first_lost, report.first_lost].into_iter().flatten().min(),
        }));
    }
    sums
}

/// One line of what is printed.
struct Row {
    name: String,
    report: StreamReport,
    /// Seconds between handshakes, as far as they could be seen.
    rekeys: Vec<f64>,
    /// Packets that the same peer lost against itself.
    control_lost: Option<u64>,
}

impl Row {
    /// A peer that loses packets against itself excuses itself.
    fn is_cause(&self) -> bool {
        let spoilt = self.report.lost + self.report.duplicated > 0;
        spoilt && self.control_lost == Some(0)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StreamReport { sent, lost, duplicated, longest_outage, first_lost } = &self.report;
        write!(f, "  {:<28} sent {sent:>6} lost {lost:>3}", self.name)?;
        if lost + duplicated > 0 {
            let first = first_lost.unwrap_or_default();
            write!(f, " doubled {duplicated}: after {first:.1?}, {longest_outage:?} in a row")?;
            let control = self.control_lost.filter(|lost| *lost > 0);
            control.map_or(Ok(()), |own| write!(f, ", {own} against itself"))?;
        }
        if !self.rekeys.is_empty() {
            write!(f, ", between rekeys {:.1?} s", self.rekeys)?;
        }
        Ok(())
    }
}

fn rows(
    rig: &Rig,
    wire: &Wire,
    flows: &[Flow],
    tied: &[StreamReport],
    controls: &[Control],
    control_reports: &[StreamReport],
) -> Vec<Row> {
    let lost_by_itself = |case: &Case, flow: Flow| {
        let same = |control: &Control| {
            control.underlay == case.underlay && control.flow.is_one_way() == flow.is_one_way()
        };
        controls.iter().position(same).map(|index| control_reports[index].lost)
    };
    let ties = rig.ties.iter().zip(flows.iter().zip(tied)).enumerate();
    ties.map(|(index, (tie, (flow, report)))| {
        let role = if tie.case.is_weft_initiator() { "initiates" } else { "answers" };
        Row {
            name: format!("weft {role:<9} {:?} {flow:?}", tie.case.underlay),
            report: report.clone(),
            rekeys: gaps(&wire.sessions_with(address(rig, index))),
            control_lost: lost_by_itself(&tie.case, *flow),
        }
    })
    .collect()
}

fn control_rows(controls: &[Control], reports: &[StreamReport]) -> Vec<Row> {
    let row = |(control, report): (&Control, &StreamReport)| Row {
        name: format!("with itself    {:?} {:?}", control.underlay, control.flow),
        report: report.clone(),
        rekeys: Vec::new(),
        control_lost: None,
    };
    controls.iter().zip(reports).map(row).collect()
}

/// Limits of the whitepaper's sections 5.4.6, 6.2 and 6.5, checked on weft's own messages.
fn keeps_the_constants(rig: &Rig, wire: &Wire, index: usize, flow: Flow) -> Result<()> {
    let sent = wire.sent_to(address(rig, index));
    ensure!(sent.unpadded == 0, "{} of {} packets were not padded", sent.unpadded, sent.packets);
    if flow == Flow::Back {
        ensure!(sent.packets == 0, "weft sent {} packets of its own", sent.packets);
        // One of them may also be persistent, and early. Handshake messages are signs of life, too.
        all_within(
            "time between signs of life",
            &gaps(&sent.signs_of_life()),
            0.0,
            KEEPALIVE + LATE,
        )?;
    }
    let initiated = sent.times_of(INITIATION);
    let answered = wire.received_from(address(rig, index)).times_of(INITIATION);
    // Who initiated last before anybody looked goes on: not always who began. boringtun leaves a
    // last packet unanswered, so that weft asks after KEEPALIVE + REKEY_TIMEOUT.
    let leads = initiated.first().is_some_and(|own| answered.first().is_none_or(|it| own < it));
    if !rig.ties[index].case.is_weft_initiator() && !leads {
        // An answerer leaves rekeying to the initiator.
        let own = initiated.len();
        ensure!(own == 0, "weft, which answers, initiated {own} times");
        return Ok(());
    }
    // An initiator that only receives sends keepalives, whose age need not make it rekey.
    let latest = if flow == Flow::Back { REKEY_ON_RECEIVE } else { REKEY } + LATE;
    let gaps = gaps(&initiated);
    all_within("time between weft's initiations", &gaps, REKEY - LATE, latest)
}

/// Two machines with stock peers of one kind, of which the first initiates.
struct Control {
    underlay: Families,
    flow: Flow,
    number: u8,
    hosts: [Host; 2],
    _processes: [Program; 2],
}

impl Control {
    /// As many as are needed: of an underlay, with a flow that goes one way or both.
    fn start_all(
        lab: &Lab,
        peer: StockPeer,
        is_needed: impl Fn(Families, bool) -> bool,
    ) -> Result<Vec<Self>> {
        let mut controls: Vec<Self> = Vec::new();
        for underlay in UNDERLAYS {
            for flow in [Flow::Both, Flow::Out] {
                if !is_needed(underlay, flow.is_one_way()) {
                    continue;
                }
                let number = FIRST_CONTROL + 2 * controls.len() as u8;
                controls.push(Self::start(lab, peer, (underlay, flow), number)?);
            }
        }
        controls.iter().try_for_each(|c| answers_in_time(c.hosts[0].net(), inner(1)))?;
        Ok(controls)
    }

    fn start(
        lab: &Lab,
        peer: StockPeer,
        (underlay, flow): (Families, Flow),
        number: u8,
    ) -> Result<Self> {
        let case = Case { peer, role: Role::Client, underlay };
        let keys = [PrivateKey::generate(), PrivateKey::generate()];
        let numbers = [number, number + 1];
        let start = |side: usize| -> Result<(Host, Program)> {
            let name = format!("control-{}", numbers[side]);
            let host = lab.machine(&name, &addresses(numbers[side]).map(on_segment))?;
            let there = own_address(case, numbers[1 - side]);
            let tunnel = Tunnel {
                own: keys[side].clone(),
                peer: keys[1 - side].public(),
                listen_port: CONTROL_PORT,
                endpoint: (side == 0).then(|| (there, CONTROL_PORT).into()),
                keepalive: (side == 0).then_some(25),
                allowed: vec![inner(1 - side).into()],
                addresses: vec![inner(side).into()],
                source: None,
                mtu: 1340,
            };
            let process = peer.start(&host, &tunnel)?;
            Ok((host, process))
        };
        let ((a, one), (b, two)) = (start(0)?, start(1)?);
        Ok(Self { underlay, flow, number, hosts: [a, b], _processes: [one, two] })
    }

    /// From one side to the other.
    fn way(&self, side: usize) -> Way {
        let net = |side: usize| -> Netns { self.hosts[side].net().clone() };
        let to = (inner(1 - side), SINKS + u16::from(self.number)).into();
        Way { from: net(side), to, at: net(1 - side) }
    }
}

fn inner(side: usize) -> IpAddr {
    [10, 202, 0, 1 + side as u8].into()
}
