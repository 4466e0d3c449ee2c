mod summary;

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use comfy_table::{Table, presets};
use fabric_api::fabric::{MtuBound, Remap};
use fabric_observation::{Observation, Peering, Refused, State, Transit, cluster, host};
use jiff::Timestamp;

use self::summary::{Filters, Shown};
use super::cluster::ClusterArgs;
use super::output::{self, Format};
use super::selection::Selection;

/// Between two looks. An API server has others to serve.
const INTERVAL: Duration = Duration::from_millis(500);
const CLUSTER_INTERVAL: Duration = Duration::from_secs(2);
/// Most addresses that the table has of one peer.
const MAX_TRANSIT: usize = 3;
/// At least one peering is not Connected.
const NOT_CONNECTED: u8 = 3;
/// There is no fabric to ask.
const NOT_RUNNING: u8 = 4;

const HELP: &str = "\
States: Connected (packets get through now), Degraded (connected, with a fault: packets may be lost,
some, one way, or all of them while the peer has not answered for 3 s and is not in Error yet, which
takes 10 to 12 s at Liqo's settings), Connecting (the peer has not answered yet), Error (it has, and
does no more; or the gateway does no more), Down (the gateway's process or pod does not run),
Waiting (something that the peering needs is not there yet). Except for Connected, the problems say
why, and what to do about it; so do the faults of a peering: reason, message, remedy, since.

On a further host (`weft agent`) a gateway that does not answer its agent, or has reported nothing
for 30 s, is Error: what else is shown of it is as old as its problem says. So is every peering on a
host whose Node is not in the manifests.

RX, TX: bytes from and to the peer, as the gateway last reported them: on a host every 20 s, in
Kubernetes every 60 s, unless something else changes; its metrics are up to date.

MTU: of the tunnel, and what keeps it from being larger (mtuBound): spec.mtu (Spec), the device or
route towards the peer (Device), the VXLAN to the nodes (Overlay), or what gets through to the peer
(Path). PATH: the largest IP packet known to get there (pathMtu); 1400+ means that nothing larger
was tried, because the tunnel has no use for it. - if the peer does not answer such probes.

Exit codes: 0 every peering is Connected, even if no `weft up` runs or other problems are shown,
1 the status cannot be read, 2 wrong usage, 3 a peering is in another state than Connected, be it
only Degraded, 4 no fabric runs here, or weft is not installed in that cluster. To fail on problems,
too, see the last example.

JSON (-o json; YAML is the same; absent means not known; in Kubernetes there is no outer node):
  {\"clusterId\": \"rome\", \"node\": \"n1\",
   \"peerings\": [{\"cluster\": \"milan\", \"namespace\": \"liqo-tenant-milan\", \"gateway\": \"client\",
     \"role\": \"Client\", \"state\": \"Connected\", \"latency\": \"3ms\",
     \"remaps\": [{\"kind\": \"Pod\", \"remote\": \"10.200.0.0/16\", \"local\": \"10.68.0.0/16\"}],
     \"receivedBytes\": 1, \"transmittedBytes\": 1, \"lastHandshake\": \"2026-01-31T12:00:00Z\",
     \"mtu\": 1340, \"mtuBound\": \"Spec\", \"pathMtu\": 1400,
     \"endpoint\": \"192.0.2.20:30742\", \"node\": \"n1\",
     \"faults\": [{\"reason\": \"NoAnswer\", \"message\": \"...\", \"remedy\": \"...\",
       \"since\": \"2026-01-31T12:00:00Z\"}],
     \"nodes\": {\"reachable\": 1, \"of\": 2, \"unreachable\": [{\"node\": \"n2\",
       \"fault\": \"NoAnswer\" (or NoAgent, OneWay, CutOff, GatewayCutOff, NotStarted, NotForwarding,
       PodCidrOverlap, PodCidrOutside, Diverted, Lossy, Cramped, Undone),
       \"since\": \"2026-01-31T12:00:00Z\", \"cause\": \"...\", \"remedy\": \"...\"}]},
     \"transit\": [{\"external\": \"10.70.0.3\", \"target\": \"10.68.1.2\"}]}],
   \"refused\": [{\"cluster\": \"turin\", \"prefix\": \"10.72.0.0/16\", \"senders\": [\"10.200.1.2\"],
     \"refuseSeconds\": 300}],
   \"problems\": [\"...\"]}

Diverted: a rule or route of another program takes packets between pods of the node and the peer. A
rule for marked packets only (`ip rule ... fwmark`) makes no node Diverted, and no peering Degraded:
who marks how many is not known. It is a problem, even if what it takes is every packet.

transit: addresses at which this cluster's other peers reach this one, through it. Each belongs to
an IP resource whose target (spec.ip) is this peer's, as every pod has that Liqo offloads to it. To
those other peers they are addresses of this cluster: only its own status shows what is behind them.

refused: prefixes that a peering had. Nodes refuse packets to them, and no other peer gets
them, until nothing was sent to them for refuseSeconds: five minutes, unless --refuse-for is set
(`weft up`, or the controller's arguments in Kubernetes).

With more than 20 peerings the table has only those that are not Connected, after a line with how
many are in which state; --peer and --all show more.

Of a Kubernetes cluster: with --kubernetes, --kubeconfig or --context, and without any of them where
KUBECONFIG is set and no fabric runs on this host.

Examples:
    weft status
    weft status --only-problems
    weft status --peer milan --peer paris
    weft status --watch
    weft status --kubeconfig rome.yaml --context admin@rome
    kubectl create clusterrolebinding status-for-ana --clusterrole=weft-status --user=ana
    weft status -o json | jq -e 'all(.peerings[]; .state == \"Connected\")'
    weft status -o json | jq -e '.problems == [] and all(.peerings[]; .state == \"Connected\")'";

/// Show the peerings: state, latency, remapped prefixes, bytes, last handshake; and what is wrong.
///
/// Shows this host, to root, or a Kubernetes cluster. There it asks the API server alone, as a user
/// who may list weft's and Liqo's resources, Deployments, pods and leases: the chart's ClusterRole
/// `weft-status` permits all that is read.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    filters: Filters,
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Show it again whenever it changes, until interrupted.
    #[arg(short, long)]
    watch: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Table,
    Json,
    Yaml,
}

pub(crate) fn run(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let of_cluster = args.cluster.is_meant(&args.selection)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut shown = None;
    let mut reported = None;
    loop {
        let observation = match runtime.block_on(look(args, of_cluster)) {
            Ok(Some(observation)) => args.filters.apply(observation)?,
            Ok(None) => {
                output::say(&nothing(args, of_cluster));
                return Ok(ExitCode::from(NOT_RUNNING));
            }
            // `--watch` on a cluster goes on through its API server's restarts, too.
            Err(error) if shown.is_some() && of_cluster => {
                let text = format!("{error:#}");
                if reported.as_ref() != Some(&text) {
                    output::say(&text);
                    reported = Some(text);
                }
                thread::sleep(CLUSTER_INTERVAL);
                continue;
            }
            Err(error) => return Err(error),
        };
        reported = None;
        let text = render(&observation, args)?;
        if shown.as_ref() != Some(&text) {
            let clear =
                args.watch && args.output == Output::Table && std::io::stdout().is_terminal();
            // Cursor home, clear to the end (ECMA-48).
            output::print(&format!("{}{text}", if clear { "\x1b[H\x1b[J" } else { "" }))?;
            shown = Some(text);
        }
        if !args.watch {
            let all = observation.peerings.iter().all(|peering| peering.state == State::Connected);
            return Ok(ExitCode::from(if all { 0 } else { NOT_CONNECTED }));
        }
        let interval = if of_cluster { CLUSTER_INTERVAL } else { INTERVAL };
        thread::sleep(interval);
    }
}

fn nothing(args: &StatusArgs, of_cluster: bool) -> String {
    if of_cluster {
        return "weft is not installed in this cluster".to_owned();
    }
    format!("no fabric runs here: none in {}", args.selection.searched())
}

/// `None` if there is no run directory, or no supervisor ever finished starting in it, or if weft is
/// not installed in the cluster that is meant.
async fn look(args: &StatusArgs, of_cluster: bool) -> anyhow::Result<Option<Observation>> {
    if of_cluster {
        let cluster = &args.cluster;
        return cluster::look(cluster.kubeconfig.as_deref(), cluster.context.as_deref()).await;
    }
    match args.selection.find()? {
        Some(dir) => host::look(&dir).await,
        None => Ok(None),
    }
}

fn render(observation: &Observation, args: &StatusArgs) -> anyhow::Result<String> {
    match args.output {
        Output::Json => output::encode(observation, Format::Json),
        Output::Yaml => output::encode(observation, Format::Yaml),
        Output::Table => Ok(table(&args.filters.shorten(observation), Timestamp::now())),
    }
}

fn table(Shown { observation, summary }: &Shown, now: Timestamp) -> String {
    let cluster = observation.cluster_id.iter().map(|id| format!("cluster {id}"));
    let node = observation.node.iter().map(|node| format!("node {node}"));
    let mut text = cluster.chain(node).collect::<Vec<_>>().join(", ") + "\n\n";
    if let Some(summary) = summary.as_ref().filter(|summary| !summary.is_empty()) {
        let _ = writeln!(text, "{summary}");
    }
    if observation.peerings.is_empty() {
        text.push_str(if summary.is_some() { "" } else { "no peerings\n" });
    } else {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).set_header([
            "CLUSTER",
            "ROLE",
            "STATE",
            "LATENCY",
            "REMAPS",
            "RX",
            "TX",
            "HANDSHAKE",
            "MTU",
            "PATH",
            "ENDPOINT",
        ]);
        for peering in &observation.peerings {
            table.add_row(row(peering, now));
        }
        let lines = table.lines();
        text.extend(
            lines.map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(&line).trim_end())),
        );
    }
    let mut transits = observation.peerings.iter().filter(|of| !of.transit.is_empty()).peekable();
    if transits.peek().is_some() {
        text.push_str("\nreached by other peers through this cluster:\n");
        text.extend(
            transits.map(|of| format!("  - {}: at {}\n", of.cluster, addresses(&of.transit))),
        );
    }
    if !observation.refused.is_empty() {
        text.push_str("\nrefused, as no peering has them any more:\n");
        text.extend(observation.refused.iter().map(refused));
    }
    if !observation.problems.is_empty() {
        let is_apart = text.ends_with("\n\n");
        text.push_str(if is_apart { "problems:\n" } else { "\nproblems:\n" });
        text.extend(observation.problems.iter().map(|problem| format!("  - {problem}\n")));
    }
    output::printable(&text)
}

/// `10.70.0.3 (10.72.1.2), 2 more`
fn addresses(transit: &[Transit]) -> String {
    let shown = transit.iter().take(MAX_TRANSIT);
    let shown = shown.map(|of| format!("{} ({})", of.external, of.target));
    let more = transit.len().saturating_sub(MAX_TRANSIT);
    let more = (more > 0).then(|| format!("{more} more"));
    shown.chain(more).collect::<Vec<_>>().join(", ")
}

fn refused(refused: &Refused) -> String {
    let senders: Vec<_> = refused.senders.iter().collect();
    let how = if senders.is_empty() {
        format!("free after {} without a packet", duration(refused.refuse_seconds))
    } else {
        output::sending(&senders)
    };
    format!("  - {} of {}: {how}\n", refused.prefix, refused.cluster)
}

/// `5 minutes` or `15 s`
fn duration(seconds: u64) -> String {
    match (seconds / 60, seconds % 60) {
        (1, 0) => "1 minute".to_owned(),
        (minutes @ 2.., 0) => format!("{minutes} minutes"),
        (0.., _) => format!("{seconds} s"),
    }
}

fn row(peering: &Peering, now: Timestamp) -> [String; 11] {
    let unknown = || "-".to_owned();
    let remaps: Vec<_> = peering.remaps.iter().map(remap).collect();
    let handshake = peering.last_handshake.as_deref().and_then(|text| text.parse().ok());
    [
        shortened(&peering.cluster),
        peering.role.map_or_else(unknown, |role| format!("{role:?}")),
        format!("{:?}", peering.state),
        peering.latency.clone().unwrap_or_else(unknown),
        if remaps.is_empty() { unknown() } else { remaps.join("\n") },
        bytes(peering.received_bytes),
        bytes(peering.transmitted_bytes),
        handshake.map_or_else(unknown, |at| age(at, now)),
        peering.mtu.map_or_else(unknown, |mtu| mtu_text(mtu, peering.mtu_bound)),
        peering.path_mtu.map_or_else(unknown, |path| path_text(path, peering.mtu_bound)),
        peering.endpoint.clone().unwrap_or_else(unknown),
    ]
}

/// A cluster ID has at most 63 characters; a manifest may have anything.
fn shortened(cluster: &str) -> String {
    const LONGEST: usize = 63;
    match cluster.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &cluster[..end]),
        None => cluster.to_owned(),
    }
}

fn remap(remap: &Remap) -> String {
    if remap.remote == remap.local {
        return remap.local.clone();
    }
    format!("{} -> {}", remap.remote, remap.local)
}

fn mtu_text(mtu: u32, bound: Option<MtuBound>) -> String {
    let bound = match bound {
        None => return mtu.to_string(),
        Some(MtuBound::Spec) => "spec.mtu",
        Some(MtuBound::Device) => "device",
        Some(MtuBound::Overlay) => "overlay",
        Some(MtuBound::Path) => "path",
    };
    format!("{mtu} ({bound})")
}

fn path_text(path: u32, bound: Option<MtuBound>) -> String {
    let more = if bound == Some(MtuBound::Path) { "" } else { "+" };
    format!("{path}{more}")
}

fn bytes(count: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    #[allow(clippy::cast_precision_loss)] // three digits are shown
    let mut value = count as f64;
    let mut unit = "B";
    for next in units {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

fn age(at: Timestamp, now: Timestamp) -> String {
    let seconds = (now.as_second() - at.as_second()).max(0);
    match seconds {
        0..120 => format!("{seconds}s ago"),
        120..7200 => format!("{}m ago", seconds / 60),
        7200..172_800 => format!("{}h ago", seconds / 3600),
        _ => format!("{}d ago", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_shows_bound_of_mtu() {
        assert_eq!(mtu_text(1340, Some(MtuBound::Spec)), "1340 (spec.mtu)");
        assert_eq!(path_text(1400, Some(MtuBound::Spec)), "1400+");
        assert_eq!(mtu_text(1440, Some(MtuBound::Path)), "1440 (path)");
        assert_eq!(path_text(1500, Some(MtuBound::Path)), "1500");
    }

    #[test]
    fn table_escapes_control_characters() {
        let problem = "found \u{1b}]0;x\u{7}".to_owned();
        let observation = Observation {
            cluster_id: None,
            node: None,
            peerings: Vec::new(),
            refused: Vec::new(),
            problems: vec![problem],
        };
        let text = table(&Shown { observation, summary: None }, Timestamp::UNIX_EPOCH);
        assert!(text.ends_with("problems:\n  - found \\u{1b}]0;x\\u{7}\n"), "{text:?}");
    }

    #[test]
    fn refused_prefix_shows_its_configured_time() {
        let shown = |refuse_seconds| {
            let (cluster, prefix) = ("paris".to_owned(), "10.72.0.0/16".to_owned());
            let senders = std::collections::BTreeSet::new();
            refused(&Refused { cluster, prefix, senders, refuse_seconds })
        };
        let free = "  - 10.72.0.0/16 of paris: free after";
        assert_eq!(shown(15), format!("{free} 15 s without a packet\n"));
        assert_eq!(shown(300), format!("{free} 5 minutes without a packet\n"));
        for (seconds, text) in [(0, "0 s"), (60, "1 minute"), (90, "90 s")] {
            assert_eq!(duration(seconds), text);
        }
    }

    #[test]
    fn few_transit_addresses_of_many_are_shown() {
        let transit = |number: u8| Transit {
            external: [10, 70, 0, number].into(),
            target: [10, 202, 1, number].into(),
        };
        let shown = |count: u8| addresses(&(1..=count).map(transit).collect::<Vec<_>>());
        assert_eq!(shown(1), "10.70.0.1 (10.202.1.1)");
        let all = shown(5);
        assert!(all.ends_with("10.70.0.3 (10.202.1.3), 2 more"), "{all}");
    }

    #[test]
    fn overlong_name_of_a_cluster_is_shortened() {
        assert_eq!(shortened(&"m".repeat(63)), "m".repeat(63));
        assert_eq!(shortened(&"ä".repeat(300)), "ä".repeat(63) + "…");
    }

    #[test]
    fn help_of_degraded_claims_no_packets() {
        let (_, degraded) = HELP.split_once("Degraded (").unwrap();
        let (meaning, _) = degraded.split_once(')').unwrap();
        assert!(meaning.contains("packets may be lost"), "{meaning}");
        assert!(meaning.contains("has not answered for 3 s"), "{meaning}");
    }

    #[test]
    fn help_of_diverted_excludes_rules_on_marks() {
        let (_, diverted) = HELP.split_once("\nDiverted: ").unwrap();
        let (meaning, _) = diverted.split_once("\n\n").unwrap();
        assert!(meaning.contains("fwmark") && meaning.contains("no peering Degraded"), "{meaning}");
    }

    #[test]
    fn amounts_and_ages_read_well() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16384.0 PiB");
        let now: Timestamp = "2026-01-31T12:00:00Z".parse().unwrap();
        assert_eq!(age("2026-01-31T11:58:30Z".parse().unwrap(), now), "90s ago");
        assert_eq!(age("2026-01-31T13:00:00Z".parse().unwrap(), now), "0s ago");
        assert_eq!(age("2026-01-28T12:00:00Z".parse().unwrap(), now), "3d ago");
    }
}
