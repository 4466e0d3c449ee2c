//! ```text
//!   rome-1 (node, gateway) --- rome-2 (node) --------- milan-1
//! ```
//! Everything of ours on rome-1 is taken away or altered, one object at a time: on the node, in the
//! gateway's inner namespace and in the one that its VXLAN sockets are in.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use weft_tests::{Cluster, ClusterSpec, Netns, wait_until};

use crate::chance::{Chance, rounds};
use crate::kernel::Kernel;
use crate::scene::{PORT, TIMEOUT, play, traffic_passes};

const HEALED: Duration = Duration::from_millis(500);
/// Changes that are not noticed at once are found by the next look at everything.
const LOOK: Duration = Duration::from_secs(40);
/// Between two damages, so that they do not look like a churn_limiter with another program.
const PAUSE: Duration = Duration::from_millis(250);
/// So many of ten are in time.
const ENOUGH: usize = 9;
/// Damages to each kind of object, of which some come by the dozen. `WEFT_ROUNDS` overrides it.
const OF_EACH_KIND: usize = 2;

/// A command that takes one object away or alters it.
#[derive(Clone, Debug)]
struct Damage {
    kind: String,
    command: String,
}

/// A namespace with objects of ours.
struct Place {
    name: &'static str,
    ns: Netns,
    /// Prefixes of the names of our devices there.
    devices: &'static [&'static str],
    /// Name of a device whose hardware address the kernel makes up.
    veth: &'static str,
    /// Settings of ours, as paths below /proc/sys/net.
    settings: Vec<String>,
}

#[test]
fn nine_tenths_of_state_are_restored_in_500_ms() -> Result<()> {
    let specs = [("rome", 1, 2), ("milan", 2, 1)];
    let specs = specs.map(|(id, number, nodes)| ClusterSpec::new(id, number, nodes).dual_stack());
    play(&specs, |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        drop_forwarded(rome)?;
        let (mut chance, most) = (Chance::new(), rounds(OF_EACH_KIND));
        let (mut slow, mut all, mut kinds) = (Vec::new(), 0, BTreeSet::new());
        for place in places(rome)? {
            for damage in some_of_each(damages(&place)?, most, &mut chance) {
                all += 1;
                kinds.insert(damage.kind.clone());
                let name = format!("{}: {}", place.name, damage.command);
                let took = place.heal(&damage).with_context(|| name.clone())?;
                if took > HEALED {
                    slow.push(format!("{name}: {took:?}"));
                }
            }
        }
        eprintln!("{} of {all} healed within {HEALED:?}; too late: {slow:#?}", all - slow.len());
        for kind in ["nft table", "nft chain", "nft rule", "nft accept", "nft set", "nft element"] {
            ensure!(kinds.contains(kind), "no damage to {kind} among {kinds:?}");
        }
        ensure!(all > 50, "only {all} objects of ours were found");
        ensure!((all - slow.len()) * 10 >= all * ENOUGH, "healed too late: {slow:#?}");
        rome.wait_connected("milan", TIMEOUT)?;
        traffic_passes(rome, scene.cluster("milan"))
    })
}

#[test]
fn flushed_rules_and_renamed_link_are_healed() -> Result<()> {
    let specs = [("rome", 1, 2), ("milan", 2, 1)];
    let specs = specs.map(|(id, number, nodes)| ClusterSpec::new(id, number, nodes));
    play(&specs, |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let [node, _, pod] = places(rome)?.try_into().map_err(|_| anyhow!("three places"))?;
        let shell = |place: &Place, script: &str| {
            place.ns.command(Command::new("sh").args(["-ec", script]), "")
        };
        shell(&pod, "ip rule flush; ip -6 rule flush")?;
        wait_until("the main table is looked up", TIMEOUT, || {
            let rules = shell(&pod, "ip rule")?;
            ensure!(rules.contains("lookup main"), "{rules}");
            Ok::<_, anyhow::Error>(())
        })?;
        traffic_passes(rome, scene.cluster("milan"))?;
        let veth = shell(&node, "ip -br link | grep -o '^weft-[^@]*'")?.trim().to_owned();
        shell(&node, &format!("ip link set {veth} down; ip link set {veth} name stray0"))?;
        wait_until("the link is made again", TIMEOUT, || {
            let links = shell(&node, "ip -br link")?;
            ensure!(links.contains(&veth) && !links.contains("stray0"), "{links}");
            Ok::<_, anyhow::Error>(())
        })?;
        wait_until("pods reach the peer", TIMEOUT, || traffic_passes(rome, scene.cluster("milan")))
    })
}

/// So that there are accepts of ours in a chain of others.
fn drop_forwarded(cluster: &Cluster) -> Result<()> {
    let script = "iptables-nft -A FORWARD -i cni0 -o eth0 -j ACCEPT; iptables-nft -P FORWARD DROP";
    cluster.head().command(Command::new("sh").args(["-ec", script]), "")?;
    wait_until("our accepts are there", TIMEOUT, || {
        let rules = cluster.head().command(Command::new("iptables-nft").arg("-S"), "")?;
        ensure!(rules.contains("--comment weft"), "{rules}");
        Ok::<_, anyhow::Error>(())
    })
}

/// The gateway holds its namespaces open.
fn places(cluster: &Cluster) -> Result<Vec<Place>> {
    let gateway = *cluster.processes(0, "gateway").first().context("no gateway runs")?;
    let node = cluster.head().net().clone();
    let links = |ns: &Netns| ns.command(Command::new("ip").args(["-br", "link"]), "");
    let veth = links(&node)?
        .lines()
        .find_map(|l| l.split('@').next()?.strip_prefix("weft-").map(str::to_owned));
    let veth = format!("weft-{}", veth.context("no veth of the gateway")?);
    let (mut inner, mut pod) = (None, None);
    for entry in fs::read_dir(format!("/proc/{gateway}/fd"))?.flatten() {
        let is_net = |to: std::path::PathBuf| to.to_string_lossy().starts_with("net:");
        if !fs::read_link(entry.path()).is_ok_and(is_net) {
            continue;
        }
        let ns = Netns::open(&entry.path())?;
        match links(&ns)? {
            links if links.contains("tunnel") => inner = Some(ns),
            links if links.contains("eth0") && !links.contains("cni0") => pod = Some(ns),
            _ => {}
        }
    }
    let (Some(inner), Some(pod)) = (inner, pod) else { bail!("the gateway lacks a namespace") };
    let of = |dev: &str, settings: &[&str]| -> Vec<String> {
        settings.iter().map(|s| s.replace("DEV", dev)).collect()
    };
    let mut on_node = of("weft4", &NODE_SETTINGS);
    on_node.extend(of(&veth, &VETH_SETTINGS));
    let eth0 = &["eth0"][..];
    Ok(vec![
        Place { name: "node", ns: node, devices: &["weft"], veth: "weft-", settings: on_node },
        Place {
            name: "inner",
            ns: inner,
            devices: &["overlay", "tunnel"],
            veth: "none",
            settings: of("", &INNER_SETTINGS),
        },
        Place {
            name: "pod",
            ns: pod,
            devices: eth0,
            veth: "eth0",
            settings: of("", &POD_SETTINGS),
        },
    ])
}

const NODE_SETTINGS: [&str; 5] = [
    "ipv4/conf/DEV/forwarding",
    "ipv4/conf/DEV/rp_filter",
    "ipv6/conf/DEV/forwarding",
    "ipv6/conf/DEV/accept_ra",
    "ipv6/conf/DEV/disable_ipv6",
];
const VETH_SETTINGS: [&str; 3] =
    ["ipv4/conf/DEV/forwarding", "ipv4/conf/DEV/rp_filter", "ipv6/conf/DEV/forwarding"];
const INNER_SETTINGS: [&str; 6] = [
    "ipv4/ip_forward",
    "ipv6/conf/all/forwarding",
    "ipv4/conf/all/rp_filter",
    "ipv4/conf/all/accept_redirects",
    "ipv4/icmp_ratelimit",
    "ipv6/icmp/ratelimit",
];
const POD_SETTINGS: [&str; 1] = ["ipv4/conf/eth0/rp_filter"];

impl Place {
    fn kernel(&self) -> Result<Kernel> {
        Ok(Kernel::of(&self.ns)?.without_macs_of(self.veth))
    }

    /// Does the damage; how long until all is as before.
    fn heal(&self, damage: &Damage) -> Result<Duration> {
        let before = self.kernel()?;
        self.ns.command(Command::new("sh").args(["-ec", &damage.command]), "")?;
        let start = Instant::now();
        let healed = wait_until("it is healed", LOOK, || {
            // The state read is that of the moment when reading began, or later.
            let at = start.elapsed();
            before.ensure_same(&self.kernel()?).map(|()| at)
        })?;
        std::thread::sleep(PAUSE);
        before.ensure_same(&self.kernel()?).context("it did not stay so")?;
        Ok(healed)
    }

    fn is_ours(&self, dev: &str) -> bool {
        self.devices.iter().any(|ours| dev.starts_with(ours))
    }
}

/// So many of each kind of damage.
fn some_of_each(damages: Vec<Damage>, most: usize, chance: &mut Chance) -> Vec<Damage> {
    let mut kinds: BTreeMap<String, Vec<Damage>> = BTreeMap::new();
    damages.into_iter().for_each(|d| kinds.entry(d.kind.clone()).or_default().push(d));
    let mut take = |mut all: Vec<Damage>| {
        let count = all.len().min(most);
        (0..count).map(|_| all.swap_remove(chance.below(all.len()))).collect::<Vec<_>>()
    };
    kinds.into_values().flat_map(&mut take).collect()
}

const TABLES: [&str; 8] =
    ["link", "address", "route", "route6", "rule", "rule6", "neighbour", "fdb"];

/// One for each object of ours, and for some objects several.
fn damages(place: &Place) -> Result<Vec<Damage>> {
    let kernel = place.kernel()?;
    let mut all = Vec::new();
    for table in TABLES {
        for line in kernel.of_kind(table) {
            let commands = commands(place, table, &serde_json::from_str(line)?);
            let named =
                |(what, command): (&str, _)| Damage { kind: format!("{table} {what}"), command };
            all.extend(commands.into_iter().map(named));
        }
    }
    all.extend(firewall_damages(&place.ns)?);
    for setting in &place.settings {
        let line = kernel
            .of_kind("sysctl")
            .find_map(|line| line.strip_prefix("./")?.strip_prefix(&**setting));
        let value = line.with_context(|| format!("there is no setting {setting}"))?;
        let other = if value == ":0" { 1 } else { 0 };
        let command = format!("echo {other} > /proc/sys/net/{setting}");
        all.push(Damage { kind: format!("sysctl {setting}"), command });
    }
    Ok(all)
}

fn commands(place: &Place, table: &str, object: &Value) -> Vec<(&'static str, String)> {
    let text = |key: &str| object[key].as_str().unwrap_or_default();
    let dev = if text("ifname").is_empty() { text("dev") } else { text("ifname") };
    let marked = ["119", "120"].contains(&text("protocol"));
    match table {
        "link" if place.is_ours(dev) => link_commands(dev),
        "address" if place.is_ours(dev) => object["addr_info"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|address| address["scope"] == "global")
            .filter_map(|a| Some(format!("{}/{}", a["local"].as_str()?, a["prefixlen"])))
            .map(|address| ("del", format!("ip address del {address} dev {dev}")))
            .collect(),
        "route" | "route6" if marked => {
            let family = if table == "route" { "-4" } else { "-6" };
            let (kind, to, metric) = (text("type"), text("dst"), &object["metric"]);
            let table = object["table"].as_str().unwrap_or("main");
            let route = format!("{kind} {to} table {table} metric {metric}");
            vec![("del", format!("ip {family} route del {route}"))]
        }
        "rule" | "rule6" if marked => {
            let family = if table == "rule" { "-4" } else { "-6" };
            let iif = object["iif"].as_str().map(|iif| format!("iif {iif}")).unwrap_or_default();
            vec![("del", format!("ip {family} rule del priority {} {iif}", object["priority"]))]
        }
        "neighbour" if place.is_ours(dev) => {
            vec![("del", format!("ip neigh del {} dev {dev}", text("dst")))]
        }
        "fdb" if place.is_ours(dev) && !text("dst").is_empty() => {
            let (mac, to) = (text("mac"), text("dst"));
            vec![
                ("del", format!("bridge fdb del {mac} dev {dev} dst {to} self")),
                ("add", format!("bridge fdb add 0e:77:0a:50:00:99 dev {dev} dst {to} self")),
            ]
        }
        _ => Vec::new(),
    }
}

fn link_commands(dev: &str) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("down", format!("ip link set {dev} down")),
        ("mtu", format!("ip link set {dev} mtu 1290")),
    ];
    // That of the pod's end is that of the host's.
    if dev != "eth0" {
        all.push(("del", format!("ip link del {dev}")));
    }
    if ["weft4", "overlay4"].contains(&dev) {
        all.push(("mac", format!("ip link set {dev} address 0e:77:0a:50:00:55")));
        all.push(("stray address", format!("ip address add 10.99.0.1/32 dev {dev}")));
    }
    all
}

/// Key of an element of a set or map, as `nft` reads it. Ours have no intervals.
fn key_of(element: &Value) -> Option<String> {
    if let Some(pair) = element.as_array() {
        return key_of(pair.first()?);
    }
    if let Some(parts) = element["concat"].as_array() {
        return Some(parts.iter().map(key_of).collect::<Option<Vec<_>>>()?.join(" . "));
    }
    element.as_str().map(str::to_owned)
}

/// Our tables, each chain, rule, set and element of theirs, and our rules in tables of others.
fn firewall_damages(ns: &Netns) -> Result<Vec<Damage>> {
    let text = ns.command(Command::new("nft").args(["-j", "-a", "list", "ruleset"]), "")?;
    let listed: Value = serde_json::from_str(&text)?;
    let objects = listed["nftables"].as_array().into_iter().flatten();
    let objects = objects.filter_map(|object| object.as_object()?.iter().next());
    Ok(objects.flat_map(|(kind, object)| nft_damages(kind, object)).collect())
}

fn nft_damages(kind: &str, object: &Value) -> Vec<Damage> {
    let field = |key: &str| object[key].as_str().unwrap_or_default();
    let (family, table, name) = (field("family"), field("table"), field("name"));
    let ours = table == "weft" || (kind == "table" && name == "weft");
    let damage = |what: &str, command: String| Damage { kind: format!("nft {what}"), command };
    match kind {
        "table" if ours => vec![damage("table", format!("nft delete table {family} weft"))],
        "chain" if ours => vec![damage("chain", format!("nft flush chain {family} weft {name}"))],
        "rule" if ours || field("comment") == "weft" => {
            let what = if ours { "rule" } else { "accept" };
            let place = format!("{family} {table} {}", field("chain"));
            // Healing a table gives its rules other handles: by then this is that of another rule.
            let alive =
                format!("nft -a list chain {place} | grep -q '# handle {}$'", object["handle"]);
            let handle = object["handle"].to_string();
            let mark = if ours { "handle" } else { "comment \"weft\"" };
            let any = format!(
                "nft -a list chain {place} | grep -v '[{{]' | grep '{mark}' \
                 | grep -o 'handle [0-9]*$' | head -1"
            );
            let chosen = format!("$({alive} && echo handle {handle} || {any})");
            vec![damage(what, format!("nft delete rule {place} {chosen}"))]
        }
        "set" | "map" if ours && object.get("elem").is_some() => {
            let mut all = vec![damage("set", format!("nft flush {kind} {family} weft {name}"))];
            if let Some(element) = key_of(&object["elem"][0]) {
                let command = format!("nft 'delete element {family} weft {name} {{ {element} }}'");
                all.push(damage("element", command));
            }
            all
        }
        _ => Vec::new(),
    }
}
