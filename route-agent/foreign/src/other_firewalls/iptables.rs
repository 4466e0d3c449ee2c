//! The old packet filter, which only its own programs can read and change.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::process::{Command, Stdio};

use fabric_api::fabric::{OVERLAY_PROBE_PORT, PacketDrop};
use netlink::Netns;
use netlink::nft::{
    AddressMatch, ChainFamily, Condition, Hook, Interface, States, Tracked, Verdict,
    decides_nothing,
};

use super::drop_points::{Accept, DropPoint, Rule, Walk, Way, are_in_place};
use super::pod_packets::Start;
use super::{
    COMMENT, Drops, Found, Mode, Treatment, of_pods, of_some_devices, policy_drop, remedy,
    untracked,
};

/// Table that may have accepts of ours, and the others that may drop packets, each with its chains.
const TABLES: [(&str, Tracked, BaseChains); 3] = [
    (
        FILTER,
        Tracked::New,
        &[("FORWARD", Hook::Forward), ("INPUT", Hook::Input), ("OUTPUT", Hook::Output)],
    ),
    ("raw", Tracked::No, &[("PREROUTING", Hook::Prerouting), ("OUTPUT", Hook::Output)]),
    (
        "mangle",
        Tracked::New,
        &[
            ("PREROUTING", Hook::Prerouting),
            ("INPUT", Hook::Input),
            ("FORWARD", Hook::Forward),
            ("OUTPUT", Hook::Output),
            ("POSTROUTING", Hook::Postrouting),
        ],
    ),
];
type BaseChains = &'static [(&'static str, Hook)];
const FILTER: &str = "filter";
pub(super) const VERSIONS: [(&str, &str); 2] =
    [("iptables-legacy", "ip_tables_names"), ("ip6tables-legacy", "ip6_tables_names")];
/// Bound for the wait for the lock that programs hold while they change tables, in seconds.
const LOCK_WAIT_S: &str = "2";
/// Number of the protocol.
const UDP: u8 = 17;
/// Exit code of a program that did not get the lock.
const RESOURCE_PROBLEM: i32 = 4;

#[derive(Debug, thiserror::Error)]
pub(super) enum IptablesError {
    #[error(
        "{0}: the filter table is in use and this program is not installed, so nobody knows \
         whether it drops packets of the overlay"
    )]
    Missing(String),
    #[error(
        "{0}: another program has held the lock /run/xtables.lock for {LOCK_WAIT_S} s; trying again"
    )]
    Locked(String),
    #[error("cannot run {0}")]
    Run(String, #[source] io::Error),
    #[error("{0} refuses: {1}")]
    Refused(String, String),
}

/// Puts our accepts where packets would be dropped without a decision, and nowhere else.
pub(super) fn ensure(netns: &Netns, treatment: &Treatment, found: &mut Found) {
    for (program, names) in VERSIONS {
        let failure = match netns.run(|| ensure_version(program, names, treatment, found)) {
            Ok(Ok(())) => continue,
            // A program that is not installed has put nothing there.
            Ok(Err(IptablesError::Missing(_))) if treatment.mode == Mode::Remove => continue,
            Ok(Err(error)) => {
                found.locked |= matches!(error, IptablesError::Locked(_));
                fabric_runtime::chain(&error)
            }
            Err(error) => format!("{program}: {}", fabric_runtime::chain(&error)),
        };
        found.failures.insert(failure);
    }
}

/// Bits of marks that rules may set; `None` if that is not known.
pub(super) fn settable_marks(netns: &Netns) -> Option<u32> {
    let read = || {
        let mut settable = 0;
        for (program, names) in VERSIONS {
            let tables = fs::read_to_string(format!("/proc/thread-self/net/{names}"));
            for table in tables.unwrap_or_default().lines() {
                let rules = run(program, &["-t", table, "-S"], "").ok()?;
                settable |= rules.lines().map(bits_set).fold(0, std::ops::BitOr::bitor);
            }
        }
        Some(settable)
    };
    netns.run(read).ok()?
}

/// Bits of marks that a rule sets.
fn bits_set(rule: &str) -> u32 {
    let mut words = rule.split(' ').skip_while(|word| *word != "-j").skip(1);
    match words.next() {
        Some("MARK" | "CONNMARK") => match (words.next(), words.next()) {
            (Some("--set-xmark"), Some(mark)) => {
                let value = mark.split('/').next().unwrap_or_default();
                let value = u32::from_str_radix(value.trim_start_matches("0x"), 16);
                value.unwrap_or(u32::MAX)
            }
            (Some("--save-mark" | "--restore-mark"), _) => 0,
            _ => u32::MAX,
        },
        Some("TPROXY" | "SET") => u32::MAX,
        _ => 0,
    }
}

fn ensure_version(
    program: &str,
    names: &str,
    treatment: &Treatment,
    found: &mut Found,
) -> Result<(), IptablesError> {
    // Asking the program would make the table where there is none.
    let tables = fs::read_to_string(format!("/proc/thread-self/net/{names}")).unwrap_or_default();
    let is_present = |name: &str| tables.lines().any(|table| table == name);
    for (name, tracked, chains) in TABLES {
        let is_concerned = name == FILTER || treatment.mode != Mode::Remove;
        if !is_concerned || !is_present(name) {
            continue;
        }
        let text = run(program, &["-t", name, "-S"], "")?;
        // The rules as they are for each kind of packets, those that come first in front.
        let parse = |tracked: &Tracked| Table::parse((program, name), *tracked, &text);
        let tables: Vec<_> = tracked.all().iter().map(parse).collect();
        let Some(table) = tables.first() else { continue };
        if name == "raw" {
            for (chain, _) in chains {
                let rules = table.chains.get(*chain).map(Vec::as_slice).unwrap_or_default();
                untracked::find_among((program, chain), rules, treatment, found);
            }
        }
        let wanted = table.look(chains, treatment, found);
        for table in &tables {
            chains.iter().for_each(|chain| table.find_faults(*chain, treatment, found));
        }
        let script = table.script(&wanted);
        if !script.is_empty() {
            let input = format!("*{name}\n{script}COMMIT\n");
            run(&format!("{program}-restore"), &["--noflush"], &input)?;
            found.changed = true;
        }
    }
    Ok(())
}

/// Accepts wanted in a table.
type Wanted = BTreeMap<DropPoint, BTreeSet<Accept>>;

/// A table, as `iptables -S` prints it.
pub(super) struct Table<'a> {
    program: &'a str,
    name: &'a str,
    pub(super) chains: BTreeMap<String, Vec<Rule>>,
    dropping: BTreeSet<String>,
}

impl<'a> Table<'a> {
    pub(super) fn parse((program, name): (&'a str, &'a str), tracked: Tracked, text: &str) -> Self {
        let (chains, dropping) = Default::default();
        let mut table = Self { program, name, chains, dropping };
        let lines: Vec<Vec<String>> = text.lines().map(words).collect();
        for line in &lines {
            if let [verb, chain, ..] = &line[..]
                && verb != "-A"
            {
                table.chains.entry(chain.clone()).or_default();
                if verb == "-P" && line.get(2).is_some_and(|policy| policy == "DROP") {
                    table.dropping.insert(chain.clone());
                }
            }
        }
        for (line, text) in lines.iter().zip(text.lines()) {
            if let [verb, chain, rest @ ..] = &line[..]
                && verb == "-A"
            {
                let mut rule = rule(text, rest, &table.chains, tracked);
                rule.is_ipv4 = table.family().is_ipv4();
                table.chains.entry(chain.clone()).or_default().push(rule);
            }
        }
        table
    }

    /// Adds what drops packets of weft. Returns the accepts that are wanted against it.
    fn look(&self, chains: BaseChains, treatment: &Treatment, found: &mut Found) -> Wanted {
        let mut wanted = Wanted::new();
        for (chain, hook) in chains.iter().copied() {
            let drops = self.drop_points(chain, hook, &treatment.ways);
            for (chain, rule) in &drops.rules {
                if let Some(taken) = treatment.taken_by((hook, &BTreeSet::new()), rule) {
                    let drop = self.drop_of((chain, hook), rule, &taken);
                    found.add_rule((hook, rule), treatment.is_remainder(rule), drop);
                }
            }
            let missing = treatment.missing(hook, &drops.admitted);
            let missing = missing.filter(|_| treatment.mode != Mode::Remove);
            if let Some(ports) = &missing {
                let chains = drops.by_interface.iter().map(|point| self.title(&point.chain));
                let chains = chains.map(|chain| of_some_devices(&chain));
                chains.for_each(|of| found.add_chain(hook, remedy(&of, (hook, ports), false)));
            }
            if treatment.accepts_at(hook) && self.name == FILTER {
                for point in drops.points {
                    wanted.entry(point).or_default().extend(accepts(hook, treatment));
                }
            } else if let Some(ports) = missing.filter(|_| !drops.points.is_empty()) {
                found.add_chain(hook, remedy(&self.title(chain), (hook, &ports), false));
            }
        }
        wanted
    }

    fn drop_points(&self, chain: &str, hook: Hook, ways: &[Way]) -> Drops {
        let mut load = |name: &str| {
            Ok::<_, std::convert::Infallible>(self.chains.get(name).cloned().unwrap_or_default())
        };
        let mut walk = Walk::new(hook, (false, ways), &mut load);
        let Ok(()) = walk.base_chain(chain, self.dropping.contains(chain));
        let Walk { points, by_interface, admitted, drops: rules, .. } = walk;
        Drops { points, by_interface, admitted, rules }
    }

    /// Adds the drops of all packets between pods and peers of one direction.
    fn find_faults(&self, (base, hook): (&str, Hook), treatment: &Treatment, found: &mut Found) {
        let mut load = |name: &str| {
            Ok::<_, std::convert::Infallible>(self.chains.get(name).cloned().unwrap_or_default())
        };
        if matches!(hook, Hook::Input | Hook::Output) {
            return;
        }
        let family = self.family();
        let devices = &BTreeSet::new();
        let (drops, has_accepts_inside) = (self.dropping.contains(base), false);
        let start = Start { family, hook, devices, chain: base, drops, has_accepts_inside };
        let Ok(_) = treatment.find_faults(start, &mut load, &mut |packets, chain, rule| {
            let taken = of_pods(packets.pods);
            let (drop, removal) = match rule {
                Some(rule) => (self.drop_of((chain, hook), rule, &taken), self.removal_of(rule)),
                None => {
                    let removal = self.command(&format!("-P {chain} ACCEPT"));
                    (policy_drop((&self.title(chain), hook), &taken, &removal), removal)
                }
            };
            treatment.add_fault(found, (rule, packets), (&drop, removal));
        });
    }

    pub(super) fn family(&self) -> ChainFamily {
        if self.program.starts_with("ip6") { ChainFamily::Ip6 } else { ChainFamily::Ip }
    }

    pub(super) fn title(&self, chain: &str) -> String {
        let Self { program, name, .. } = self;
        match *name {
            FILTER => format!("{program}'s chain {chain}"),
            name => format!("{program}'s chain {chain} of table {name}"),
        }
    }

    /// Command that removes a rule.
    pub(super) fn removal_of(&self, rule: &Rule) -> String {
        self.command(&rule.id.replacen("-A", "-D", 1))
    }

    fn command(&self, options: &str) -> String {
        let Self { program, name, .. } = self;
        match *name {
            FILTER => format!("{program} {options}"),
            name => format!("{program} -t {name} {options}"),
        }
    }

    fn drop_of(&self, (chain, hook): (&str, Hook), rule: &Rule, taken: &str) -> PacketDrop {
        let cause =
            format!("{} (hook {hook}): the rule `{}` drops {taken}", self.title(chain), rule.id);
        let removal = self.removal_of(rule);
        PacketDrop {
            cause,
            remedy: format!("have its owner except them, or remove it (`{removal}`)"),
        }
    }

    /// Lines for `iptables-restore`; empty if all accepts are in their places.
    fn script(&self, wanted: &Wanted) -> String {
        let mut script = String::new();
        for (name, rules) in &self.chains {
            let has_ours = rules.iter().any(|rule| rule.ours);
            // A chain has one end, so one point.
            let point = wanted.iter().find(|(point, _)| point.chain == *name);
            let in_place = point
                .map_or(!has_ours, |(point, accepts)| are_in_place(rules, point.index, accepts));
            if in_place {
                continue;
            }
            for rule in rules.iter().filter(|rule| rule.ours) {
                _ = writeln!(script, "{}", rule.id.replacen("-A", "-D", 1));
            }
            let Some((point, accepts)) = point else { continue };
            let before = &rules[..point.index];
            let number = before.iter().filter(|rule| !rule.ours).count() + 1;
            for Accept { matches, .. } in accepts {
                let place = match rules.get(point.index) {
                    Some(_) => format!("-I {name} {number}"),
                    None => format!("-A {name}"),
                };
                let target = format!("-m comment --comment {COMMENT} -j ACCEPT");
                _ = writeln!(script, "{place} {matches} {target}");
            }
        }
        script
    }
}

fn accepts(hook: Hook, treatment: &Treatment) -> BTreeSet<Accept> {
    let device = |matches: &str| Accept { matches: matches.to_owned(), port: None };
    match hook {
        Hook::Forward => ["-i weft+", "-o weft+"].map(device).into(),
        Hook::Ingress | Hook::Egress | Hook::Prerouting | Hook::Output | Hook::Postrouting => {
            BTreeSet::new()
        }
        Hook::Input => treatment.input_accepts(
            format!("-i weft+ -p udp -m udp --sport {OVERLAY_PROBE_PORT}"),
            |port| format!("-p udp -m udp --dport {port}"),
        ),
    }
}

/// Parses the words of a rule behind its chain's name.
fn rule(
    line: &str,
    words: &[String],
    chains: &BTreeMap<String, Vec<Rule>>,
    tracked: Tracked,
) -> Rule {
    let mut rule = Rule::of_all(line.to_owned(), Verdict::Continue);
    let mut negated = false;
    let mut rest = words;
    while let [word, tail @ ..] = rest {
        let value = tail.first().map(String::as_str).unwrap_or_default();
        rest = tail.get(1..).unwrap_or_default();
        match (&**word, value) {
            ("-m", "comment") => {}
            ("--comment", text) => rule.ours = text == COMMENT,
            ("!", "-i" | "-o" | "-s" | "-d" | "--ctstate" | "--state") => {
                negated = true;
                rest = tail;
            }
            ("-i" | "-o", device) => {
                rule.condition = rule.condition.max(Condition::Interface);
                rule.names_overlay |= device.starts_with("weft");
                let (incoming, is_prefix) = (word == "-i", device.ends_with('+'));
                let name = device.strip_suffix('+').unwrap_or(device).to_owned();
                let negated = std::mem::take(&mut negated);
                rule.interfaces.push(Interface { incoming, name, is_prefix, negated });
            }
            ("-s" | "-d", prefix) => {
                rule.condition = Condition::Other;
                let (source, negated) = (word == "-s", std::mem::take(&mut negated));
                let prefix = prefix.parse().ok();
                let found = prefix.map(|prefix| AddressMatch { source, prefix, negated });
                rule.is_narrow |= found.is_none();
                rule.addresses.extend(found);
            }
            ("-p", "udp") => {
                rule.condition = Condition::Other;
                rule.protocol = Some(UDP);
            }
            ("-m", "udp" | "multiport" | "addrtype" | "conntrack" | "state") => {}
            ("--ctstate" | "--state", states) => {
                (rule.condition, rule.is_by_state) = (Condition::Other, true);
                let listed = states.split(',').map(state).fold(0, std::ops::BitOr::bitor);
                let states = States { listed, inverted: std::mem::take(&mut negated) };
                let is_met = states.are_met_by(tracked);
                rule.is_narrow |= is_met != Some(true);
                rule.spares_all |= is_met == Some(false);
            }
            ("--dst-type", "LOCAL") => (rule.is_to_host, rule.is_narrow) = (true, true),
            ("--sport" | "--dport" | "--sports" | "--dports", list) => {
                rule.condition = Condition::Other;
                let is_source = word.starts_with("--s");
                let ports = if is_source { &mut rule.sports } else { &mut rule.dports };
                for part in list.split(',') {
                    let (first, last) = part.split_once(':').unwrap_or((part, part));
                    match (first.parse(), last.parse()) {
                        (Ok(first), Ok(last)) => ports.add(first..=last),
                        _ => rule.is_narrow = true,
                    }
                    rule.ports.extend(part.parse::<u16>());
                }
            }
            // Options of the target follow.
            ("-j", target) => {
                rule.verdict = verdict(target, rest, chains.contains_key(target));
                break;
            }
            ("-g", chain) => {
                rule.verdict = Verdict::Goto(chain.to_owned());
                break;
            }
            _ => {
                (rule.condition, rule.is_narrow) = (Condition::Other, true);
                // The next argument may be an option again.
                rest = tail;
            }
        }
    }
    rule.ours &= rule.verdict == Verdict::Accept;
    rule
}

/// Bit of a state.
fn state(name: &str) -> u32 {
    const OTHER: u32 = 1 << 8;
    match name {
        "INVALID" => States::INVALID,
        "ESTABLISHED" => States::ESTABLISHED,
        "RELATED" => States::RELATED,
        "NEW" => States::NEW,
        _ => OTHER,
    }
}

/// Verdict of a target with these options.
fn verdict(target: &str, options: &[String], is_chain: bool) -> Verdict {
    match target {
        "NOTRACK" => Verdict::Untrack,
        "DNAT" | "REDIRECT" | "NETMAP" | "SNAT" | "MASQUERADE" => Verdict::Translate,
        "CT" if options.first().is_some_and(|option| option == "--notrack") => Verdict::Untrack,
        "ACCEPT" => Verdict::Accept,
        "DROP" | "REJECT" => Verdict::Drop,
        "RETURN" => Verdict::Return,
        name if decides_nothing(name) => Verdict::Continue,
        chain if is_chain => Verdict::Jump(chain.to_owned()),
        _ => Verdict::Other,
    }
}

/// Splits at spaces, but for those within quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quoted, mut escaped) = (String::new(), false, false);
    for character in line.chars() {
        match character {
            _ if escaped => {
                word.push(character);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(std::mem::take(&mut word)),
            _ => word.push(character),
        }
    }
    words.push(word);
    words
}

/// Runs one of iptables' programs; returns what it prints.
pub(super) fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, IptablesError> {
    let child = Command::new(program)
        .args(["-w", LOCK_WAIT_S])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.map_err(|error| {
        let missing = error.kind() == io::ErrorKind::NotFound;
        let program = program.to_owned();
        if missing { IptablesError::Missing(program) } else { IptablesError::Run(program, error) }
    })?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that exits early reports the reason itself.
        _ = stdin.write_all(input.as_bytes());
    }
    let failed = |error| IptablesError::Run(program.to_owned(), error);
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    if output.status.code() == Some(RESOURCE_PROBLEM) {
        return Err(IptablesError::Locked(program.to_owned()));
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let reason = errors.lines().take(3).collect::<Vec<_>>().join("; ");
    Err(IptablesError::Refused(program.to_owned(), reason))
}

#[cfg(test)]
mod tests;
