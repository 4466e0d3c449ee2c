//! All of a namespace's network state that weft could change, in words that are the same from one
//! time to the next.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use weft_tests::{Netns, wait_until};

use crate::scene::TIMEOUT;

/// One object a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel(Vec<String>);

/// Commands, each by its name in [`Kernel`]'s lines. One shell runs all of them.
const QUESTIONS: [(&str, &str); 9] = [
    ("link", "ip -d -j link"),
    ("address", "ip -j address"),
    ("route", "ip -4 -j route show table all"),
    ("route6", "ip -6 -j route show table all"),
    ("rule", "ip -j rule"),
    ("rule6", "ip -6 -j rule"),
    ("neighbour", "ip -j neigh show nud permanent"),
    ("fdb", "bridge -j fdb show"),
    ("nft", "nft -j -s list ruleset"),
];
/// Programs that print text, and settings: one file of /proc/sys/net a line.
const LEGACY: &str = "for p in iptables ip6tables; do $p-legacy-save 2>/dev/null; done";
// Some may only be written, which makes grep fail.
const SETTINGS: &str = "cd /proc/sys/net; grep -rs . .; true";
const BETWEEN: &str = "; echo; echo =====; ";

/// Fields that depend on the time or order of creation, and plain counters.
const VOLATILE: [&str; 12] = [
    "ifindex",
    "link_index",
    "link_netnsid",
    "handle",
    "json_schema_version",
    "hello_timer",
    "tcn_timer",
    "topology_change_timer",
    "gc_timer",
    "expires",
    "broadcast",
    "operstate",
];
/// Settings that the kernel changes by itself.
const LIVELY: [&str; 3] = ["nf_conntrack_count", "netdev_rss_key", "stable_secret"];

impl Kernel {
    pub(crate) fn of(ns: &Netns) -> Result<Self> {
        let mut script: String =
            QUESTIONS.iter().map(|(_, ask)| format!("{ask} 2>&1{BETWEEN}")).collect();
        let _ = write!(script, "{LEGACY}{BETWEEN}{SETTINGS}");
        // An address that is still being checked has yet to get its routes.
        let text = wait_until("all addresses are in force", TIMEOUT, || {
            let text = ns.command(Command::new("sh").args(["-c", &script]), "")?;
            ensure!(!text.contains("tentative"), "some are tentative");
            Ok::<_, anyhow::Error>(text)
        })?;
        let parts: Vec<_> = text.split("=====\n").collect();
        ensure!(parts.len() == QUESTIONS.len() + 2, "{} parts", parts.len());
        let mut lines = Vec::new();
        for ((name, _), answer) in QUESTIONS.iter().zip(&parts) {
            lines.extend(objects(name, answer)?);
        }
        let legacy = parts[QUESTIONS.len()].lines().filter(|line| !line.starts_with('#'));
        // Without the counters of chains.
        let legacy = legacy.map(|line| line.split(" [").next().unwrap_or_default());
        lines.extend(legacy.filter(|l| !l.is_empty()).map(|line| format!("legacy {line}")));
        let mut settings: Vec<_> = parts[QUESTIONS.len() + 1]
            .lines()
            .filter(|line| !LIVELY.iter().any(|lively| line.contains(lively)))
            .map(|line| format!("sysctl {line}"))
            .collect();
        settings.sort();
        lines.extend(settings);
        Ok(Self(lines))
    }

    /// The lines of one kind: `link`, `address`, `route`, `sysctl`, ...
    pub(crate) fn of_kind(&self, kind: &str) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(move |line| line.strip_prefix(kind)?.strip_prefix(' '))
    }

    /// Fails with what is gone (`-`) and what is new (`+`) in `now`.
    pub(crate) fn ensure_same(&self, now: &Self) -> Result<()> {
        ensure!(self == now, "{}", self.difference(now));
        Ok(())
    }

    fn difference(&self, now: &Self) -> String {
        let mut count: BTreeMap<&str, i32> = BTreeMap::new();
        self.0.iter().for_each(|line| *count.entry(line).or_default() -= 1);
        now.0.iter().for_each(|line| *count.entry(line).or_default() += 1);
        let mut text = String::new();
        for (line, count) in count {
            let sign = if count < 0 { "-" } else { "+" };
            (0..count.abs()).for_each(|_| _ = writeln!(text, "{sign} {line}"));
        }
        if text.is_empty() { "the rules are in another order".to_owned() } else { text }
    }

    /// Without the hardware addresses of devices whose names begin so, which the kernel makes up
    /// anew when one is made anew.
    pub(crate) fn without_macs_of(self, dev: &str) -> Self {
        let of_dev = format!(":\"{dev}");
        let mask = |line: String| if line.contains(&of_dev) { mask_macs(&line) } else { line };
        let (rules, mut rest): (Vec<_>, Vec<_>) =
            self.0.into_iter().map(mask).partition(|line| line.starts_with("nft "));
        rest.sort();
        Self([rules, rest].concat())
    }
}

fn mask_macs(line: &str) -> String {
    let is_mac = |word: &&str| word.len() == 17 && word.split(':').count() == 6;
    let words: Vec<_> =
        line.split('"').map(|word| if is_mac(&word) { "MAC" } else { word }).collect();
    words.join("\"")
}

fn objects(name: &str, answer: &str) -> Result<Vec<String>> {
    let answer = answer.trim();
    if answer.is_empty() || answer.contains("FIB table does not exist") {
        return Ok(Vec::new());
    }
    let value: Value =
        serde_json::from_str(answer).with_context(|| format!("{name} answered {answer:?}"))?;
    let list = value.get("nftables").unwrap_or(&value).as_array().cloned().unwrap_or_default();
    let mut objects: Vec<_> = list
        .into_iter()
        .map(scrub)
        .filter(|object| match name {
            "fdb" => is_permanent(object),
            _ => object.get("metainfo").is_none(),
        })
        .collect();
    objects.sort_by_cached_key(order);
    Ok(objects.into_iter().map(|object| format!("{name} {object}")).collect())
}

/// The order of a chain's rules counts, that of everything else is arbitrary.
fn order(object: &Value) -> String {
    match object.get("rule") {
        Some(rule) => format!("rule {} {} {}", rule["family"], rule["table"], rule["chain"]),
        None => object.to_string(),
    }
}

/// Without entries that a bridge has learned, and without those for multicast, which come and go
/// with whatever listens.
fn is_permanent(entry: &Value) -> bool {
    let mac = entry["mac"].as_str().unwrap_or_default();
    entry["state"] == "permanent" && !mac.starts_with("33:33") && !mac.starts_with("01:00:5e")
}

fn scrub(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(key, _)| !VOLATILE.contains(&&**key));
            Value::Object(kept.map(|(key, value)| (key, scrub(value))).collect())
        }
        Value::Array(values) => Value::Array(values.into_iter().map(scrub).collect()),
        plain @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) => plain,
    }
}
