//! Content of `/metrics`, in the OpenMetrics text format.
//!
//! The `liqo_peer_*` metrics have Liqo's names, labels and buckets, so that its dashboards work.

use std::fmt;
use std::time::Duration;

use fabric_api::ClusterId;
use gateway_health::Reason;
use lane::{Counters, Stats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tunnel::DropReason;

use crate::state::ProbeCounts;

/// Liqo's buckets of the latency, in microseconds.
const LATENCY_BUCKETS_US: [f64; 15] = [
    10000., 15000., 20000., 36250., 52500., 68750., 85000., 101_250., 117_500., 133_750., 150_000.,
    178_380., 212_129., 252_264., 299_992.,
];

/// Values of a peering in one scrape.
#[derive(Clone, Debug)]
pub struct Scrape {
    pub peer: ClusterId,
    pub connected: bool,
    /// Only while connected.
    pub latency: Option<Duration>,
    /// Absent until the dataplane runs.
    pub stats: Option<Stats>,
    /// The tunnel's MTU in force, in bytes.
    pub mtu: u32,
    /// The largest IP packet known to reach the peer, in bytes; absent while that is not known.
    pub path_mtu: Option<u32>,
    /// Packets that the kernel dropped because the TUN's queue was full.
    pub tun_overflows: Option<u64>,
    /// Processor time of the lane's thread.
    pub processor_time: Option<Duration>,
    pub probes: ProbeCounts,
    /// Faults between the two gateways.
    pub faults: Vec<Reason>,
    /// Absent until nodes' probes are answered.
    pub paths: Option<NodeCounts>,
}

/// Nodes that have sent probes, and those of them whose path to the gateway fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    pub probing: u32,
    pub unreachable: usize,
}

/// State that outlives a scrape.
#[derive(Clone, Debug)]
pub struct Metrics {
    latency_us: Histogram,
}

impl Metrics {
    #[expect(clippy::new_without_default, reason = "a histogram without buckets is no default")]
    pub fn new() -> Self {
        Self { latency_us: Histogram::new(LATENCY_BUCKETS_US) }
    }

    /// The answer to a scrape. Nothing but the end mark while there is no peer.
    pub fn render(&self, scrape: Option<Scrape>) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        if let Some(scrape) = scrape {
            // Once a scrape, as in Liqo.
            if let Some(latency) = scrape.latency {
                self.latency_us.observe(latency.as_micros() as f64);
            }
            let latency_us = self.latency_us.clone();
            registry.register_collector(Box::new(Peering { scrape, latency_us }));
        }
        let mut text = String::with_capacity(8 << 10);
        text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

#[derive(Debug)]
struct Peering {
    scrape: Scrape,
    latency_us: Histogram,
}

type Labels<'a> = [(&'a str, &'a str); 2];

impl Collector for Peering {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let labels = [("driver", "wireguard"), ("cluster_id", self.scrape.peer.as_str())];
        self.encode_liqo(&mut encoder, &labels)?;
        self.encode_faults(&mut encoder)?;
        self.encode_own(&mut encoder)
    }
}

impl Peering {
    fn encode_liqo(&self, encoder: &mut DescriptorEncoder<'_>, labels: &Labels<'_>) -> fmt::Result {
        let scrape = &self.scrape;
        let none = Counters::default();
        let counters = scrape.stats.as_ref().map_or(&none, |stats| &stats.counters);
        counter(encoder, "liqo_peer_receive_bytes", "Bytes received from the peer", |e| {
            sample(e, labels, counters.rx_bytes)
        })?;
        counter(encoder, "liqo_peer_transmit_bytes", "Bytes sent to the peer", |e| {
            sample(e, labels, counters.tx_bytes)
        })?;
        if let Some(latency) = scrape.latency {
            let micros = i64::try_from(latency.as_micros()).unwrap_or(i64::MAX);
            let help = "Round trip of the last probe, in microseconds";
            gauge(encoder, "liqo_peer_latency_us", help, labels, micros)?;
        }
        let mut histogram = encoder.encode_descriptor(
            "liqo_peer_latency_histogram_us",
            "Round trip of the last probe at each scrape, in microseconds",
            None,
            self.latency_us.metric_type(),
        )?;
        self.latency_us.encode(histogram.encode_family(labels)?)?;
        let help = "Whether packets get through: 1 or 0";
        gauge(encoder, "liqo_peer_is_connected", help, labels, scrape.connected.into())?;
        let implementation = [("driver", "wireguard"), ("implementation", "userspace")];
        let help = "The WireGuard implementation in use";
        gauge(encoder, "liqo_wireguard_implementation", help, &implementation, 1)
    }

    fn encode_own(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(stats) = &self.scrape.stats else { return Ok(()) };
        let counters = &stats.counters;
        let directions = [
            ("inbound", &counters.dropped_inbound, counters.rx_packets),
            ("outbound", &counters.dropped_outbound, counters.tx_packets),
        ];
        counter(encoder, "weft_gateway_dropped_packets", "Packets not passed on", |e| {
            for (direction, dropped, _) in directions {
                for reason in DropReason::ALL {
                    let labels = [("reason", reason.as_str()), ("direction", direction)];
                    sample(e, &labels, dropped[reason.index()])?;
                }
            }
            Ok(())
        })?;
        counter(encoder, "weft_gateway_packets", "Inner packets passed on", |e| {
            directions
                .iter()
                .try_for_each(|(direction, _, n)| sample(e, &[("direction", *direction)], *n))
        })?;
        counter(encoder, "weft_gateway_handshakes", "WireGuard handshakes by outcome", |e| {
            sample(e, &[("outcome", "attempted")], counters.handshake_attempts)?;
            sample(e, &[("outcome", "completed")], counters.handshakes)
        })?;
        let help = "Moves of the peer's endpoint that its packets made";
        total(encoder, "weft_gateway_endpoint_changes", help, counters.endpoint_changes)?;
        self.encode_load(encoder, stats)?;
        let help = "Datagrams lost because the UDP socket's receive buffer was full";
        total(encoder, "weft_gateway_socket_overflows", help, stats.socket_overflows)?;
        let help = "Packets of nodes lost because the TUN's queue was full";
        let overflows = self.scrape.tun_overflows.unwrap_or_default();
        total(encoder, "weft_gateway_tun_overflows", help, overflows)?;
        let help = "Whether trains leave as one segmented send: 1 or 0";
        gauge(encoder, "weft_gateway_gso_active", help, &[], stats.gso_active.into())?;
        let help = "MTU of the tunnel in force, in bytes";
        gauge(encoder, "weft_gateway_tunnel_mtu_bytes", help, &[], self.scrape.mtu.into())?;
        let Some(path_mtu) = self.scrape.path_mtu else { return Ok(()) };
        let help = "The largest IP packet known to reach the peer over the underlay, in bytes";
        gauge(encoder, "weft_gateway_path_mtu_bytes", help, &[], path_mtu.into())
    }
}

impl Peering {
    fn encode_faults(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Whether this is wrong between this gateway and the peer's: 1 or 0";
        let name = "weft_gateway_fault";
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for reason in Reason::ALL {
            let gauge = ConstGauge::new(i64::from(self.scrape.faults.contains(&reason)));
            gauge.encode(metric.encode_family(&[("reason", reason.as_str())])?)?;
        }
        let Some(paths) = self.scrape.paths else { return Ok(()) };
        let help = "Nodes that have probed this gateway through the overlay, or are expected to";
        gauge(encoder, "weft_gateway_probing_nodes", help, &[], paths.probing.into())?;
        let help = "Nodes of them whose path to this gateway fails";
        let unreachable = i64::try_from(paths.unreachable).unwrap_or(i64::MAX);
        gauge(encoder, "weft_gateway_unreachable_nodes", help, &[], unreachable)
    }

    fn encode_load(&self, encoder: &mut DescriptorEncoder<'_>, stats: &Stats) -> fmt::Result {
        let help = "Turns of the lane: each reads from the peer and from the nodes once";
        total(encoder, "weft_gateway_lane_turns", help, stats.turns)?;
        let help = "Reads of a turn, one each way, that took as much as a turn may: \
                    half of their ratio to turns is the share of time at full load";
        total(encoder, "weft_gateway_lane_full_reads", help, stats.full_reads)?;
        if let Some(time) = self.scrape.processor_time {
            let help = "Processor time of the lane's thread";
            let name = "weft_gateway_lane_processor_seconds";
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(time.as_secs_f64()).encode(metric)?;
        }
        if let Some(at) = stats.peer.last_handshake {
            let help = "Time since the last WireGuard handshake, in seconds: above 180 there is no session";
            let age = i64::try_from(at.elapsed().as_secs()).unwrap_or(i64::MAX);
            gauge(encoder, "weft_gateway_last_handshake_age_seconds", help, &[], age)?;
        }
        let help = "Probes of the connection by outcome: what was sent and not answered was lost";
        counter(encoder, "weft_gateway_probes", help, |e| {
            sample(e, &[("outcome", "sent")], self.scrape.probes.sent)?;
            sample(e, &[("outcome", "answered")], self.scrape.probes.answered)
        })
    }
}

/// `name` without `_total`, which the encoder adds.
fn counter(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    samples: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    samples(&mut encoder.encode_descriptor(name, help, None, MetricType::Counter)?)
}

/// A counter without labels.
fn total(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    ConstCounter::new(value).encode(metric)
}

fn sample<const N: usize>(
    encoder: &mut MetricEncoder<'_>,
    labels: &[(&str, &str); N],
    value: u64,
) -> fmt::Result {
    ConstCounter::new(value).encode(encoder.encode_family(labels)?)
}

fn gauge(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    labels: &[(&str, &str)],
    value: i64,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    let gauge = ConstGauge::new(value);
    if labels.is_empty() {
        gauge.encode(metric)
    } else {
        gauge.encode(metric.encode_family(&labels)?)
    }
}

#[cfg(test)]
mod tests {
    use tunnel::Tai64n;

    use super::*;

    #[test]
    fn liqos_metrics_have_liqos_names_labels_and_buckets() {
        let metrics = Metrics::new();
        let text = metrics.render(Some(scrape(Some(Duration::from_micros(12_000))))).unwrap();
        for line in [
            "# TYPE liqo_peer_receive_bytes counter",
            r#"liqo_peer_receive_bytes_total{driver="wireguard",cluster_id="milan"} 700"#,
            r#"liqo_peer_transmit_bytes_total{driver="wireguard",cluster_id="milan"} 300"#,
            r#"liqo_peer_latency_us{driver="wireguard",cluster_id="milan"} 12000"#,
            r#"liqo_peer_is_connected{driver="wireguard",cluster_id="milan"} 1"#,
            r#"liqo_peer_latency_histogram_us_count{driver="wireguard",cluster_id="milan"} 1"#,
            r#"liqo_peer_latency_histogram_us_bucket{le="10000.0",driver="wireguard",cluster_id="milan"} 0"#,
            r#"liqo_peer_latency_histogram_us_bucket{le="15000.0",driver="wireguard",cluster_id="milan"} 1"#,
            r#"liqo_peer_latency_histogram_us_bucket{le="299992.0",driver="wireguard",cluster_id="milan"} 1"#,
            r#"weft_gateway_dropped_packets_total{reason="replay",direction="inbound"} 5"#,
            r#"weft_gateway_dropped_packets_total{reason="tun_full",direction="outbound"} 0"#,
            "weft_gateway_tun_overflows_total 352",
            r#"weft_gateway_dropped_packets_total{reason="send_unreachable",direction="outbound"} 3"#,
            "weft_gateway_endpoint_changes_total 6",
            "weft_gateway_lane_turns_total 40",
            "weft_gateway_lane_full_reads_total 4",
            "weft_gateway_lane_processor_seconds_total 1.5",
            "weft_gateway_last_handshake_age_seconds 0",
            r#"weft_gateway_probes_total{outcome="sent"} 10"#,
            r#"weft_gateway_probes_total{outcome="answered"} 9"#,
            r#"weft_gateway_fault{reason="NoAnswer"} 1"#,
            r#"weft_gateway_fault{reason="ProbeLoss"} 0"#,
            "weft_gateway_probing_nodes 3",
            "weft_gateway_unreachable_nodes 1",
            "weft_gateway_tunnel_mtu_bytes 1340",
            "weft_gateway_path_mtu_bytes 1400",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
        let names = text.lines().filter(|l| l.starts_with("# TYPE liqo_peer_")).count();
        assert_eq!(names, 5);
        let again = metrics.render(Some(scrape(Some(Duration::from_micros(12_000))))).unwrap();
        assert!(again.contains(r#"histogram_us_count{driver="wireguard",cluster_id="milan"} 2"#));
    }

    #[test]
    fn latency_is_exported_only_while_connected() {
        let text = Metrics::new().render(Some(scrape(None))).unwrap();
        assert!(!text.contains("liqo_peer_latency_us{"));
        assert_eq!(Metrics::new().render(None).unwrap(), "# EOF\n");
    }

    fn scrape(latency: Option<Duration>) -> Scrape {
        let mut counters = Counters { rx_bytes: 700, tx_bytes: 300, ..Counters::default() };
        counters.dropped_inbound[DropReason::Replay.index()] = 5;
        counters.dropped_outbound[DropReason::SendUnreachable.index()] = 3;
        counters.endpoint_changes = 6;
        let stats = Stats {
            counters,
            peer: lane::PeerState {
                last_handshake: Some(std::time::Instant::now()),
                ..Default::default()
            },
            last_stamp: Tai64n::default(),
            gso_active: true,
            socket_overflows: 0,
            turns: 40,
            relayed: 0,
            full_reads: 4,
        };
        let peer = "milan".parse().unwrap();
        Scrape {
            peer,
            connected: latency.is_some(),
            latency,
            stats: Some(stats),
            mtu: 1340,
            path_mtu: Some(1400),
            tun_overflows: Some(352),
            processor_time: Some(Duration::from_millis(1500)),
            probes: ProbeCounts { sent: 10, answered: 9 },
            faults: vec![Reason::NoAnswer],
            paths: Some(NodeCounts { probing: 3, unreachable: 1 }),
        }
    }
}
