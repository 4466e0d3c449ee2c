//! Lines of the comparison: traffic, figures that are measured of it, and their bars.

use std::time::Duration;

use crate::flow::Traffic;
use crate::load::{Direction, Load};
use crate::machine::Class;
use crate::slice::Slice;
use crate::statistics::Ratio;

const TRAINS: Traffic = Traffic::Udp { datagram: 1372, segmented: true };
const SINGLES: Traffic = Traffic::Udp { datagram: 1372, segmented: false };
const SMALL: Traffic = Traffic::Udp { datagram: 64, segmented: false };

/// One kind of traffic, measured for weft and for the best of its peers.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) title: String,
    /// Path of weft's packets from pod to pod, through nodes and overlays; those of peers have none.
    pub(crate) between_pods: bool,
    /// UDP segmentation of the underlay.
    pub(crate) udp_segmentation: bool,
    pub(crate) load: Load,
    pub(crate) method: Method,
    /// The first one decides which peer is the best.
    pub(crate) figures: Vec<(Figure, Bar)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    /// Full speed.
    Overload,
    /// The highest rate at which at most 1 % is lost.
    HighestRate,
    /// weft sends no more than the best peer can.
    RateOfPeer,
}

/// Figure of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figure {
    Throughput,
    LatencyP50,
    LatencyP99,
    RetransmitsPerGbit,
    /// CPU time of both gateways and of all softirqs. Kernels without CONFIG_IRQ_TIME_ACCOUNTING count a softirq
    /// that interrupts a gateway twice.
    CpuPerGbit,
    Rss,
}

/// Bar for a figure of weft.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bar {
    /// Ratio to the best peer, on processors of class A and of class S.
    AtLeast([f64; 2]),
    AtMost(f64),
    NotAbovePeer,
    /// In the figure's unit, whatever the peer needs.
    Absolute(f64),
}

impl Figure {
    pub(crate) fn of(self, slice: &Slice) -> f64 {
        match self {
            Self::Throughput => slice.gbit / slice.seconds,
            Self::LatencyP50 => slice.latency_ms(0.5),
            Self::LatencyP99 => slice.latency_ms(0.99),
            Self::RetransmitsPerGbit => slice.retransmits as f64 / slice.gbit,
            Self::CpuPerGbit => (slice.cpu_seconds + slice.softirq_seconds) / slice.gbit,
            Self::Rss => slice.rss_bytes as f64 / 1e6,
        }
    }

    pub(crate) fn is_better(self, one: f64, other: f64) -> bool {
        match self {
            Self::Throughput => one > other,
            Self::LatencyP50
            | Self::LatencyP99
            | Self::RetransmitsPerGbit
            | Self::CpuPerGbit
            | Self::Rss => one < other,
        }
    }

    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Throughput => "Gbit/s",
            Self::LatencyP50 => "ms p50",
            Self::LatencyP99 => "ms p99",
            Self::RetransmitsPerGbit => "retransmits/Gbit",
            Self::CpuPerGbit => "CPU s/Gbit",
            Self::Rss => "MB RSS",
        }
    }
}

impl Bar {
    pub(crate) fn text(self, class: Class) -> String {
        match self {
            Self::AtLeast(bars) => format!("≥ {} x", bars[class as usize]),
            Self::AtMost(bar) => format!("≤ {bar} x"),
            Self::NotAbovePeer => "≤ the peer's".to_owned(),
            Self::Absolute(bar) => format!("≤ {bar}"),
        }
    }

    /// True if the medians of weft and its best peer, or their ratio, meet the bar.
    pub(crate) fn is_met(self, class: Class, [weft, peer]: [f64; 2], ratio: Option<Ratio>) -> bool {
        let ratio = ratio.map_or(f64::NAN, |ratio| ratio.median);
        match self {
            Self::AtLeast(bars) => ratio >= bars[class as usize],
            Self::AtMost(bar) => ratio <= bar,
            Self::NotAbovePeer => weft <= peer,
            Self::Absolute(bar) => weft <= bar,
        }
    }
}

impl Line {
    /// Throughput of `traffic` between two gateways.
    fn throughput(name: &str, title: &str, load: Load, bar: [f64; 2]) -> Self {
        Self {
            name: name.to_owned(),
            title: title.to_owned(),
            between_pods: false,
            udp_segmentation: true,
            load,
            method: Method::Overload,
            figures: vec![(Figure::Throughput, Bar::AtLeast(bar))],
        }
    }

    fn highest_rate(mut self) -> Self {
        self.name += "-rate";
        self.title += ", highest rate with at most 1 % loss";
        self.method = Method::HighestRate;
        self
    }

    fn overload(mut self) -> Self {
        self.name += "-overload";
        self.title += ", goodput at overload";
        self
    }

    fn between_pods(mut self) -> Self {
        self.name = format!("pods-{}", self.name);
        self.title = format!("pod to pod: {}", self.title);
        self.between_pods = true;
        self
    }

    fn without_udp_segmentation(&self) -> Self {
        let mut line = self.clone();
        line.name += "-unsegmented";
        line.title += ", no UDP segmentation";
        line.udp_segmentation = false;
        line.figures = vec![(Figure::Throughput, Bar::AtLeast([2.3; 2]))];
        line
    }

    fn latency(name: &str, title: &str, load: Load, bar: f64) -> Self {
        let bar = Bar::AtMost(bar);
        Self {
            figures: vec![(Figure::LatencyP50, bar), (Figure::LatencyP99, bar)],
            ..Self::throughput(name, title, load, [0.0; 2])
        }
    }
}

fn load(traffic: Traffic, flows: usize, direction: Direction) -> Load {
    Load { traffic: Some(traffic), flows, direction, requests: None }
}

/// All lines, in the order of the report.
pub(crate) fn all() -> Vec<Line> {
    let mut lines = tcp();
    let unsegmented: Vec<_> = lines.iter().map(Line::without_udp_segmentation).collect();
    lines[2].figures.push((Figure::RetransmitsPerGbit, Bar::NotAbovePeer));
    lines.extend(unsegmented);
    lines.extend(udp());
    lines.extend(pods());
    lines.extend(latency());
    let mut cpu = Line::throughput(
        "cpu",
        "TCP, 4 flows: CPU",
        load(Traffic::Tcp, 4, Direction::There),
        [0.0; 2],
    );
    cpu.figures = vec![(Figure::CpuPerGbit, Bar::AtMost(0.38))];
    lines.push(cpu);
    lines
}

fn tcp() -> Vec<Line> {
    use Direction::{Back, Both, There};
    let tcp = |name, title, flows, direction, bar| {
        Line::throughput(name, title, load(Traffic::Tcp, flows, direction), bar)
    };
    vec![
        tcp("tcp-1", "TCP, 1 flow", 1, There, [2.3, 2.9]),
        tcp("tcp-1-back", "TCP, 1 flow back", 1, Back, [2.3, 2.9]),
        tcp("tcp-4", "TCP, 4 flows", 4, There, [2.4; 2]),
        tcp("tcp-16", "TCP, 16 flows", 16, There, [2.4; 2]),
        tcp("tcp-both", "TCP, both ways at once", 1, Both, [2.4; 2]),
    ]
}

fn udp() -> Vec<Line> {
    let udp = |name, title, traffic, bar| {
        Line::throughput(name, title, load(traffic, 1, Direction::There), [bar; 2])
    };
    let trains = || udp("udp-trains", "UDP, 1,372 B with UDP_SEGMENT", TRAINS, 1.5);
    vec![
        trains().highest_rate(),
        trains().overload(),
        udp("udp-1372", "UDP, 1,372 B one by one, goodput at overload", SINGLES, 2.0),
        udp("udp-64", "UDP, 64 B, goodput at overload", SMALL, 2.2),
    ]
}

fn pods() -> Vec<Line> {
    let there = |traffic| load(traffic, 1, Direction::There);
    let trains = || {
        let title = "UDP, 1,372 B with UDP_SEGMENT";
        Line::throughput("udp-trains", title, there(TRAINS), [1.2; 2]).between_pods()
    };
    let tcp = Line::throughput("tcp-1", "TCP, 1 flow", there(Traffic::Tcp), [1.85, 2.2]);
    let mut tcp = tcp.between_pods();
    // Here the whole gateway program runs, not a lane alone.
    tcp.figures.push((Figure::Rss, Bar::Absolute(15.0)));
    vec![tcp, trains().highest_rate(), trains().overload()]
}

/// Requests have no pause, so that a gateway's thread seldom sleeps; before each ping it does.
fn latency() -> Vec<Line> {
    let idle = Load {
        traffic: None,
        flows: 0,
        direction: Direction::There,
        requests: Some(Duration::ZERO),
    };
    let ping = Some(Duration::from_millis(2));
    let beside = Load { requests: ping, ..load(Traffic::Tcp, 1, Direction::There) };
    let mut lines = vec![
        Line::latency("requests-idle", "request/response, idle", idle, 0.65),
        Line::latency("ping-idle", "ping, idle", Load { requests: ping, ..idle }, 0.65),
        Line::latency("ping-beside-bulk", "ping beside TCP at its own maximum", beside, 0.8),
        Line::latency("ping-at-peer-rate", "ping beside TCP at the best peer's rate", beside, 0.4),
    ];
    lines[3].method = Method::RateOfPeer;
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_bars_are_those_of_the_class() {
        let lines = all();
        let mut names: Vec<_> = lines.iter().map(|line| &line.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), lines.len());
        let (_, bar) = lines[0].figures[0];
        assert_eq!((bar.text(Class::A), bar.text(Class::S)), ("≥ 2.3 x".into(), "≥ 2.9 x".into()));
    }

    #[test]
    fn bars_compare_ratio_medians_or_figures() {
        let ratio = |median| Some(Ratio { median, low: 0.0, high: 9.0 });
        let met = |bar: Bar, class, values, at| bar.is_met(class, values, ratio(at));
        let faster = Bar::AtLeast([2.3, 2.9]);
        assert!(met(faster, Class::A, [1.0; 2], 2.3) && !met(faster, Class::S, [1.0; 2], 2.8));
        assert!(met(Bar::AtMost(0.4), Class::S, [1.0; 2], 0.4));
        assert!(!met(Bar::AtMost(0.4), Class::S, [1.0; 2], 0.41));
        assert!(met(Bar::NotAbovePeer, Class::A, [0.0, 0.0], 9.0));
        assert!(!met(Bar::NotAbovePeer, Class::A, [0.1, 0.0], 0.1));
        assert!(met(Bar::Absolute(15.0), Class::A, [14.9, 1.0], 14.9));
        assert!(!met(Bar::Absolute(15.0), Class::A, [15.1, 90.0], 0.2));
        assert!(!faster.is_met(Class::A, [1.0; 2], None));
    }

    #[test]
    fn best_is_most_for_throughput_and_least_for_the_rest() {
        assert!(Figure::Throughput.is_better(2.0, 1.0));
        assert!(Figure::LatencyP99.is_better(1.0, 2.0) && Figure::CpuPerGbit.is_better(1.0, 2.0));
    }
}
