//! The old packet filter, which only its own program speaks to.

use std::fs;
use std::process::{Command, Stdio};

use netlink::Netns;
use netlink::nft::Hook;

use crate::foreign::{COMMENT, problem};

const CHAINS: [(&str, Hook); 2] = [("FORWARD", Hook::Forward), ("INPUT", Hook::Input)];
const VERSIONS: [(&str, &str); 2] =
    [("iptables-legacy", "ip_tables_names"), ("ip6tables-legacy", "ip6_tables_names")];

/// Sees to it that our accepts stand in each chain that drops what it has no rule for (if
/// `accept`), and in no other. Returns what is to be told.
pub(crate) fn ensure(netns: &Netns, accept: bool) -> Vec<String> {
    let mut problems = Vec::new();
    for (program, names) in VERSIONS {
        let done = netns.run(|| ensure_version(program, names, accept));
        match done {
            Ok(found) => problems.extend(found),
            Err(error) => problems.push(format!("{program}: {error}")),
        }
    }
    problems
}

fn ensure_version(program: &str, names: &str, accept: bool) -> Vec<String> {
    // Asking the program would make the table where there is none.
    let tables = fs::read_to_string(format!("/proc/thread-self/net/{names}")).unwrap_or_default();
    if !tables.lines().any(|table| table == "filter") {
        return Vec::new();
    }
    CHAINS.iter().filter_map(|(chain, hook)| ensure_chain(program, chain, *hook, accept)).collect()
}

fn ensure_chain(program: &str, chain: &str, hook: Hook, accept: bool) -> Option<String> {
    let Some(rules) = call(program, &["-S", chain]) else {
        return Some(format!(
            "the filter table of {program} is in use and that program is not here, so whether its \
             chain {chain} drops what it has no rule for is not known"
        ));
    };
    let dropping = [
        format!("-P {chain} DROP"),
        format!("-A {chain} -j DROP"),
        format!("-A {chain} -j REJECT"),
    ];
    let drops = rules.lines().any(|line| {
        let target = line.split(" --reject-with").next().unwrap_or_default();
        dropping.iter().any(|dropping| dropping == target)
    });
    for rule in accepts(hook) {
        let target = ["-m", "comment", "--comment", COMMENT, "-j", "ACCEPT"];
        let rule = [rule, &target[..]].concat();
        let is_there = call(program, &[&["-C", chain], &rule[..]].concat()).is_some();
        let verb = match (drops && accept, is_there) {
            (true, false) => "-I",
            (false, true) => "-D",
            (true, true) | (false, false) => continue,
        };
        if call(program, &[&[verb, chain], &rule[..]].concat()).is_none() {
            return Some(format!("{program} refuses to change chain {chain}"));
        }
    }
    drops.then(|| problem(&format!("{program}'s chain {chain}"), hook, accept))
}

fn accepts(hook: Hook) -> &'static [&'static [&'static str]] {
    match hook {
        Hook::Forward => &[&["-i", "weft+"], &["-o", "weft+"]],
        Hook::Input => &[&["-p", "udp", "-m", "udp", "--dport", "4879"]],
    }
}

/// Seconds to wait for whoever else changes tables.
const PATIENCE: &str = "2";

/// What the program prints; `None` if it fails or is not there.
fn call(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program)
        .args(["-w", PATIENCE])
        .args(arguments)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
