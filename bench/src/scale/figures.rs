//! The figures, one function each.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use scale::{Endpoint, Lab, Peer, Pids, RequestCount, Size, User};
use tokio::time::sleep;
use weft_tests::resident_bytes;

use super::cpu::{CpuMeter, CpuShares, until_quiet};
use super::results::{Bar, Row, seconds};

/// Longest wait for all peerings.
const APPLY: Duration = Duration::from_secs(900);
/// Longest wait for anything else.
const AT_MOST: Duration = Duration::from_secs(300);
/// Time for the samples of one figure.
const SAMPLING: Duration = Duration::from_secs(180);
const HEARTBEATS: Duration = Duration::from_secs(40);
const IDLE: Duration = Duration::from_secs(60);
const PODS: Duration = Duration::from_secs(60);
const PODS_PER_MINUTE: u32 = 1_000;
const ENDPOINTS: usize = 100;
pub(crate) const MORE_PEERINGS: usize = 20;

/// A cluster under measurement.
pub(crate) struct Bench {
    pub(crate) lab: Lab,
    pub(crate) pids: Pids,
    pub(crate) deadline: Instant,
    pub(crate) rows: Vec<Row>,
    /// Within a minute without changes.
    pub(crate) requests: Vec<RequestCount>,
    /// Writes from the peerings' application until the controller is quiet.
    pub(crate) writes: Vec<RequestCount>,
    /// The largest seen.
    pub(crate) controller_rss: u64,
}

/// Positions in the audit log around the writes that publish all peerings, and the time they took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Applied {
    pub(crate) writes: (u64, u64),
    pub(crate) took: Duration,
}

impl Bench {
    pub(crate) fn new(lab: Lab, deadline: Instant) -> Self {
        let (pids, rows) = (lab.pids(), Vec::new());
        let (requests, writes) = (Vec::new(), Vec::new());
        Self { lab, pids, deadline, rows, requests, writes, controller_rss: 0 }
    }

    /// All peerings at once. `None` if that took too long.
    pub(crate) async fn apply(&mut self) -> Result<Option<Applied>> {
        let Size { nodes, peerings } = self.lab.size;
        let peers: Vec<Peer> = (0..peerings).map(Peer).collect();
        // Addresses of the nodes that were just made are none of the peerings'.
        let start = Instant::now();
        self.quiet_row(&format!("until {nodes} new nodes are served"), start).await?;
        eprintln!("apply: {peerings} peerings at once");
        let (meter, audit) = (CpuMeter::start(&self.pids)?, self.lab.audit());
        let (start, from) = (Instant::now(), audit.position()?);
        self.lab.apply_peerings(&peers).await?;
        self.row("applied by the user", seconds(start.elapsed()), None);
        let at_most = APPLY.min(self.until_deadline());
        let last = self.lab.board.all_acknowledged(&peers, nodes, at_most).await;
        let (to, shares) = (audit.position()?, meter.shares()?);
        let applied = last.map(|last| Applied { writes: (from, to), took: last - start });
        let what = format!("{peerings} peerings applied at once, until acknowledged by all");
        match &applied {
            Ok(applied) => self.row(&what, seconds(applied.took), Some(Bar::Apply(applied.took))),
            Err(error) => self.row(&what, format!("{error:#}"), None),
        }
        self.cpu_row("until then", shares);
        let connected = self.lab.board.all_connected(&peers, nodes, self.left()).await;
        let text = connected.map_or_else(|error| format!("{error:#}"), |at| seconds(at - start));
        self.row("until acknowledged as connected by all nodes", text, None);
        self.quiet_row("until the controller is quiet", start).await?;
        let window = audit.between(from, audit.position()?)?;
        let (all, busiest) = window.published_writes();
        let text = format!("{all}, {busiest} of one object");
        self.row("writes of published objects until then", text, None);
        let by_controller = window.writes_of(User::Controller).len();
        self.row("writes of the controller until then", by_controller.to_string(), None);
        self.writes = window.write_counts();
        self.sample_rss()?;
        Ok(applied.ok())
    }

    pub(crate) async fn heartbeats(&mut self) -> Result<()> {
        eprintln!("heartbeats: nothing else changes for {HEARTBEATS:?}");
        self.lab.set_heartbeats(true);
        // Until each has written once.
        sleep(Duration::from_secs(10)).await;
        let (meter, audit) = (CpuMeter::start(&self.pids)?, self.lab.audit());
        let from = audit.position()?;
        sleep(HEARTBEATS).await;
        let (shares, window) = (meter.shares()?, audit.between(from, audit.position()?)?);
        let writes = |user: User| window.writes_of(user).len() as f64 / HEARTBEATS.as_secs_f64();
        let of_gateways = writes(User::Gateway(Peer(0)));
        let what = format!(
            "heartbeats only ({of_gateways:.1} Connections/s, {:.1} Nodes/s): CPU of the controller",
            writes(User::Kubelet)
        );
        self.row(&what, percent(shares.controller), Some(Bar::Heartbeats(shares.controller)));
        self.cpu_row("meanwhile", shares);
        let by_controller = window.writes_of(User::Controller).len();
        self.row("writes of the controller meanwhile", by_controller.to_string(), None);
        self.lab.set_heartbeats(false);
        self.sample_rss()
    }

    pub(crate) async fn idle(&mut self) -> Result<()> {
        eprintln!("idle: nothing changes for {IDLE:?}");
        self.lab.set_heartbeats(false);
        sleep(Duration::from_secs(2)).await;
        let (meter, audit) = (CpuMeter::start(&self.pids)?, self.lab.audit());
        let from = audit.position()?;
        sleep(IDLE).await;
        let shares = meter.shares()?;
        self.requests = audit.between(from, audit.position()?)?.counts();
        self.row("CPU of the controller while nothing changes", percent(shares.controller), None);
        self.cpu_row("meanwhile", shares);
        Ok(())
    }

    pub(crate) async fn pods(&mut self) -> Result<()> {
        eprintln!("pods: {PODS_PER_MINUTE} a minute for {PODS:?}");
        let (meter, audit) = (CpuMeter::start(&self.pids)?, self.lab.audit());
        let from = audit.position()?;
        let pace = Duration::from_secs(60) / PODS_PER_MINUTE;
        let pods = self.lab.run_outside_pods(pace, Instant::now() + PODS).await?;
        let (shares, window) = (meter.shares()?, audit.between(from, audit.position()?)?);
        let what = format!(
            "{:.0} pods a minute outside their nodes' pod CIDRs: CPU of the controller",
            pods.started as f64 * 60.0 / PODS.as_secs_f64()
        );
        self.row(&what, percent(shares.controller), Some(Bar::Pods(shares.controller)));
        let (all, busiest) = window.published_writes();
        let rate = |count: usize| count as f64 / PODS.as_secs_f64();
        let text = format!("{:.2}", rate(busiest));
        let bar = Some(Bar::PodWrites(rate(busiest)));
        self.row("published writes a second of the object written most often", text, bar);
        self.row("published writes a second of all objects", format!("{:.1}", rate(all)), None);
        self.cpu_row("meanwhile", shares);
        pods.gone().await;
        self.quiet_row("until the controller is quiet after they are gone", Instant::now()).await?;
        self.sample_rss()
    }

    pub(crate) async fn endpoint(&mut self) -> Result<()> {
        eprintln!("endpoint: {ENDPOINTS} changes, one at a time");
        self.lab.set_heartbeats(true);
        let clients: Vec<Peer> =
            (0..self.lab.size.peerings).map(Peer).filter(|peer| peer.is_client()).collect();
        let (mut samples, start) = (Samples::default(), Instant::now());
        let meter = CpuMeter::start(&self.pids)?;
        for i in 0..ENDPOINTS {
            if start.elapsed() > SAMPLING || self.left().is_zero() {
                break;
            }
            let peer = clients[i % clients.len()];
            let [high, low] = u16::try_from(i)?.to_be_bytes();
            let endpoint = Endpoint { address: format!("198.19.{high}.{low}"), port: 4500 };
            let changed = Instant::now();
            self.lab.set_endpoint(peer, &endpoint).await?;
            let arrived = self.lab.board.has_endpoint(peer, &endpoint, self.left()).await;
            samples.take(arrived, changed);
            // Not in step with anything periodic.
            sleep(Duration::from_millis(50 + (i as u64 * 37) % 200)).await;
        }
        let what = "one endpoint changed, until its gateway's object is written";
        self.samples_row(what, &samples, Bar::Endpoint);
        self.cpu_row("meanwhile", meter.shares()?);
        self.sample_rss()
    }

    pub(crate) async fn peering(&mut self) -> Result<()> {
        let Size { nodes, peerings } = self.lab.size;
        eprintln!("peering: {MORE_PEERINGS} more, one at a time");
        self.lab.set_heartbeats(true);
        let (mut whole, mut from_pod) = (Samples::default(), Samples::default());
        let (start, meter) = (Instant::now(), CpuMeter::start(&self.pids)?);
        for peer in (peerings..peerings + MORE_PEERINGS).map(Peer) {
            if start.elapsed() > SAMPLING || self.left().is_zero() {
                break;
            }
            let applied = Instant::now();
            self.lab.apply_peerings(&[peer]).await?;
            let last = self.lab.board.all_acknowledged(&[peer], nodes, self.left()).await;
            let ready = self.lab.board.pod_ready_at(peer);
            if let (Ok(last), Some(ready)) = (&last, ready) {
                from_pod.take(Ok(*last), ready);
            }
            whole.take(last, applied);
            sleep(Duration::from_secs(1)).await;
        }
        let what = "one more peering, until the last node has acknowledged it";
        self.samples_row(what, &whole, Bar::Peering);
        self.row("since its gateway's pod is Ready", from_pod.text(), None);
        self.cpu_row("meanwhile", meter.shares()?);
        self.sample_rss()
    }

    /// Time that may pass until the next event.
    fn left(&self) -> Duration {
        AT_MOST.min(self.until_deadline())
    }

    fn until_deadline(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn sample_rss(&mut self) -> Result<()> {
        let now = resident_bytes(self.pids.controller).context("the controller has ended")?;
        self.controller_rss = self.controller_rss.max(now);
        Ok(())
    }

    pub(crate) fn row(&mut self, figure: &str, measured: String, bar: Option<Bar>) {
        eprintln!("  {figure}: {measured}");
        self.rows.push(Row { figure: figure.to_owned(), measured, bar });
    }

    fn cpu_row(&mut self, when: &str, shares: CpuShares) {
        let text = format!(
            "controller {}, ipam {}, API server and etcd {}, simulated programs {}, others {}",
            percent(shares.controller),
            percent(shares.ipam),
            percent(shares.api_server),
            percent(shares.simulated),
            percent(shares.others)
        );
        self.row(&format!("CPU {when}, of a core"), text, None);
    }

    async fn quiet_row(&mut self, what: &str, start: Instant) -> Result<()> {
        let at_most = self.left();
        let quiet = until_quiet(&self.pids, at_most).await?;
        let text = quiet.map_or_else(
            || format!("not within {at_most:.0?}"),
            |at| seconds(at.saturating_duration_since(start)),
        );
        self.row(what, text, None);
        Ok(())
    }

    fn samples_row(&mut self, what: &str, samples: &Samples, bar: fn(Duration) -> Bar) {
        let measured = samples.quantile(0.99).filter(|_| samples.error.is_none()).map(bar);
        self.row(&format!("{what}, p99"), samples.text(), measured);
    }
}

/// Times of one figure.
#[derive(Debug, Default)]
struct Samples {
    times: Vec<Duration>,
    error: Option<String>,
}

impl Samples {
    fn take(&mut self, arrived: Result<Instant>, since: Instant) {
        match arrived {
            Ok(at) => {
                self.times.push(at.saturating_duration_since(since));
                self.times.sort();
            }
            Err(error) => self.error = Some(format!("{error:#}")),
        }
    }

    /// Nearest rank.
    fn quantile(&self, share: f64) -> Option<Duration> {
        let rank = (share * self.times.len() as f64).ceil() as usize;
        self.times.get(rank.max(1) - 1).copied()
    }

    fn text(&self) -> String {
        let at = |share: f64| self.quantile(share).map(seconds).unwrap_or_default();
        let count = self.times.len();
        let error = self.error.as_ref().map(|error| format!("; then {error}"));
        let text = format!("{} (median {}, of {count})", at(0.99), at(0.5));
        text + &error.unwrap_or_default()
    }
}

pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent < 10.0 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p99_of_a_hundred_is_the_second_largest() {
        let mut samples = Samples::default();
        let start = Instant::now();
        for n in (1..=100).rev() {
            samples.take(Ok(start + Duration::from_millis(n)), start);
        }
        assert_eq!(samples.text(), "99 ms (median 50 ms, of 100)");
        samples.take(Err(anyhow::anyhow!("late")), start);
        assert!(samples.text().ends_with("of 100); then late"));
        assert_eq!(Samples::default().quantile(0.99), None);
    }
}
