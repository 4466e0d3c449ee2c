//! Chains of nftables, those of `iptables-nft` among them.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use fabric_api::fabric::{OVERLAY_PROBE_PORT, PacketDrop};
use netlink::Netns;
use netlink::nft::{self, BaseChain, Chain, Hook, NftError, Tracked};
use netplan::{FIREWALL_TABLE, REFUSAL_TABLE};

use super::drop_points::{Accept, DropPoint, Rule, Walk, are_in_place};
use super::pod_packets::{Packets, Start};
use super::{
    COMMENT, Drops, Found, Mode, Treatment, iptables, of_chain, of_pods, of_some_devices,
    policy_drop, remedy,
};

/// Accepts of ours in others' chains.
#[derive(Debug, Default)]
pub(crate) struct Accepts {
    /// Chains that may have some; `None` while that is unknown, and all chains are read.
    chains: Option<BTreeSet<Chain>>,
}

/// Accepts wanted in one chain, by the rule that they are to precede.
type Wanted = BTreeMap<DropPoint, BTreeSet<Accept>>;

impl Accepts {
    /// Puts our accepts where packets would be dropped without a decision, and nowhere else.
    pub(crate) fn ensure(
        &mut self,
        netns: &Netns,
        treatment: &Treatment,
        found: &mut Found,
    ) -> Result<(), NftError> {
        let mut tables: BTreeMap<_, Vec<BaseChain>> = BTreeMap::new();
        for base in nft::base_chains(netns)? {
            let is_ours = [FIREWALL_TABLE, REFUSAL_TABLE].contains(&&*base.chain.table);
            if !is_ours && (treatment.mode != Mode::Remove || has_accepts(base.hook)) {
                let table = (base.chain.family, base.chain.table.clone());
                tables.entry(table).or_default().push(base);
            }
        }
        let marks = Marks::new(netns, treatment);
        let known = self.chains.take();
        let mut placed = BTreeSet::new();
        for base_chains in tables.values() {
            let mut table = Table::new((netns, &marks), base_chains);
            table.add_chains_of_ours(known.as_ref().filter(|_| treatment.mode != Mode::Remove))?;
            let chains = table.ensure(treatment, found)?;
            placed.extend(chains);
        }
        self.chains = Some(placed);
        Ok(())
    }
}

/// Bits of marks that pods' packets may have, which are looked for once a look, if any rule compares them.
struct Marks<'a> {
    netns: &'a Netns,
    /// Programs that no table shows mark packets of these devices.
    unknown: bool,
    settable: OnceCell<u32>,
}

impl<'a> Marks<'a> {
    fn new(netns: &'a Netns, treatment: &Treatment) -> Self {
        let is_marked =
            |dev: &String| ["cali", "cilium", "lxc"].iter().any(|name| dev.starts_with(name));
        let unknown = treatment.pod_devices.iter().any(is_marked);
        Self { netns, unknown, settable: OnceCell::new() }
    }

    fn resolve(&self, rule: &mut nft::Rule) -> Result<(), NftError> {
        if rule.marks.is_empty() {
            return Ok(());
        }
        let settable = match self.settable.get() {
            Some(settable) => *settable,
            None if self.unknown => u32::MAX,
            None => {
                let ours = [FIREWALL_TABLE, REFUSAL_TABLE];
                let found = nft::settable_marks(self.netns, &ours)?;
                found | iptables::settable_marks(self.netns).unwrap_or(u32::MAX)
            }
        };
        rule.resolve_marks(*self.settable.get_or_init(|| settable));
        Ok(())
    }
}

/// Table of another program.
struct Table<'a> {
    netns: &'a Netns,
    marks: &'a Marks<'a>,
    base_chains: &'a [BaseChain],
    chains: BTreeMap<String, Vec<Rule>>,
    /// Rules of chains as they were read, which is once for each look.
    read: RefCell<BTreeMap<(String, Tracked), Vec<Rule>>>,
}

impl<'a> Table<'a> {
    fn new((netns, marks): (&'a Netns, &'a Marks<'a>), base_chains: &'a [BaseChain]) -> Self {
        Self { netns, marks, base_chains, chains: BTreeMap::new(), read: RefCell::default() }
    }

    fn rules(&self, name: &str, tracked: Tracked) -> Result<Vec<Rule>, NftError> {
        let key = (name.to_owned(), tracked);
        if let Some(rules) = self.read.borrow().get(&key) {
            return Ok(rules.clone());
        }
        let mut rules = nft::chain_rules(self.netns, &self.chain(name), tracked)?;
        rules.iter_mut().try_for_each(|rule| self.marks.resolve(rule))?;
        let rules: Vec<Rule> = rules.into_iter().map(Rule::from).collect();
        self.read.borrow_mut().insert(key, rules.clone());
        Ok(rules)
    }

    fn chain(&self, name: &str) -> Chain {
        Chain { name: name.to_owned(), ..self.base_chains[0].chain.clone() }
    }

    /// Reads the chains that may have accepts of ours although packets no longer need any.
    fn add_chains_of_ours(&mut self, known: Option<&BTreeSet<Chain>>) -> Result<(), NftError> {
        let Chain { family, table, .. } = &self.base_chains[0].chain;
        let Some(known) = known else {
            for (name, rules) in nft::table_rules(self.netns, *family, table)? {
                let rules: Vec<Rule> = rules.into_iter().map(Rule::from).collect();
                if rules.iter().any(|rule| rule.ours) {
                    self.chains.insert(name, rules);
                }
            }
            return Ok(());
        };
        for chain in known.iter().filter(|c| c.family == *family && c.table == *table) {
            match self.rules(&chain.name, Tracked::New) {
                Ok(rules) => _ = self.chains.insert(chain.name.clone(), rules),
                Err(NftError::Read(error)) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the chains that have accepts of ours then.
    fn ensure(
        &mut self,
        treatment: &Treatment,
        found: &mut Found,
    ) -> Result<BTreeSet<Chain>, NftError> {
        let mut wanted = Wanted::new();
        for base in self.base_chains {
            let Drops { points, by_interface, admitted, rules } =
                self.drop_points(base, treatment, found)?;
            for (chain, rule) in &rules {
                if let Some(taken) = treatment.taken_by((base.hook, &base.devices), rule) {
                    let drop = self.rule_drop((chain, base.hook), rule, &taken);
                    found.add_rule((base.hook, rule), treatment.is_remainder(rule), drop);
                }
            }
            match base.hook {
                Hook::Ingress
                | Hook::Egress
                | Hook::Prerouting
                | Hook::Forward
                | Hook::Postrouting => {
                    self.find_faults(base, treatment, found)?;
                }
                Hook::Input | Hook::Output => {}
            }
            let missing = treatment.missing(base.hook, &admitted);
            let missing = missing.filter(|_| treatment.mode != Mode::Remove);
            if let Some(ports) = &missing {
                let chains = by_interface.iter().map(|point| of_chain(&self.chain(&point.chain)));
                let chains = chains.map(|chain| of_some_devices(&chain));
                chains.for_each(|chain| found.add_chain(base.hook, unsolved(&chain, base, ports)));
            }
            if treatment.accepts_at(base.hook) && !base.owned {
                for point in points {
                    wanted.entry(point).or_default().extend(accepts(base.hook, treatment));
                }
            } else if let Some(ports) = missing.filter(|_| !points.is_empty()) {
                found.add_chain(base.hook, unsolved(&of_chain(&base.chain), base, &ports));
            }
        }
        let script = self.script(&wanted);
        if !script.is_empty() {
            match nft::run(self.netns, &script) {
                Ok(()) => found.changed = true,
                Err(error) => _ = found.failures.insert(self.failure(&error)),
            }
        }
        Ok(wanted.keys().map(|point| self.chain(&point.chain)).collect())
    }

    fn drop_points(
        &mut self,
        base: &BaseChain,
        treatment: &Treatment,
        found: &mut Found,
    ) -> Result<Drops, NftError> {
        let mut load = |name: &str| self.rules(name, base.tracked());
        let zones = base.chain.table == FIREWALLD;
        let mut walk = Walk::new(base.hook, (zones, &treatment.ways), &mut load);
        walk.base_chain(&base.chain.name, base.drops)?;
        let Walk { chains, points, by_interface, admitted, drops: rules, .. } = walk;
        found.chains.extend(chains.keys().map(|name| self.chain(name)));
        self.chains.extend(chains);
        Ok(Drops { points, by_interface, admitted, rules })
    }

    /// Adds the drops of all packets between pods and peers of one direction.
    fn find_faults(
        &self,
        base: &BaseChain,
        treatment: &Treatment,
        found: &mut Found,
    ) -> Result<(), NftError> {
        let (family, hook, chain) = (base.chain.family, base.hook, &*base.chain.name);
        let has_accepts_inside = base.chain.table == FIREWALLD;
        let (devices, drops) = (&base.devices, base.drops);
        let start = Start { family, hook, devices, chain, drops, has_accepts_inside };
        let mut add = |packets: Packets<'_>, chain: &str, rule: Option<&Rule>| {
            let (taken, place) = (of_pods(packets.pods), self.place(chain));
            let (drop, removal) = match rule {
                Some(rule) => {
                    let removal = format!("nft delete rule {place} handle {}", rule.id);
                    (self.rule_drop((chain, hook), rule, &taken), removal)
                }
                None => {
                    let removal = format!("nft chain {place} '{{ policy accept; }}'");
                    (policy_drop((&of_chain(&self.chain(chain)), hook), &taken, &removal), removal)
                }
            };
            treatment.add_fault(found, (rule, packets), (&drop, removal));
        };
        let mut visited = BTreeSet::new();
        for tracked in base.tracked().all() {
            let load = &mut |name: &str| self.rules(name, *tracked);
            visited.append(&mut treatment.find_faults(start, load, &mut add)?);
        }
        found.chains.extend(visited.iter().map(|name| self.chain(name)));
        Ok(())
    }

    fn rule_drop(&self, (chain, hook): (&str, Hook), rule: &Rule, taken: &str) -> PacketDrop {
        let place = self.place(chain);
        let (chain, handle) = (of_chain(&self.chain(chain)), &rule.id);
        PacketDrop {
            cause: format!("{chain} (hook {hook}): the rule with handle {handle} drops {taken}"),
            remedy: format!(
                "see `nft -a list chain {place}`, and have its owner except them, or remove it \
                 (`nft delete rule {place} handle {handle}`)"
            ),
        }
    }

    /// Input for `nft -f`; empty if all accepts are in their places.
    fn script(&self, wanted: &Wanted) -> String {
        let mut script = String::new();
        for (name, rules) in &self.chains {
            let points: Vec<_> = wanted.iter().filter(|(point, _)| point.chain == *name).collect();
            let in_place = |(point, accepts): &(&DropPoint, &BTreeSet<_>)| {
                are_in_place(rules, point.index, accepts)
            };
            let has_ours = rules.iter().any(|rule| rule.ours);
            if points.iter().all(in_place) && (!points.is_empty() || !has_ours) {
                continue;
            }
            let place = self.place(name);
            for (point, accepts) in points {
                let before = rules.get(point.index);
                for Accept { matches, .. } in accepts {
                    let verb = match before {
                        Some(rule) => format!("insert rule {place} handle {}", rule.id),
                        None => format!("add rule {place}"),
                    };
                    _ = writeln!(script, "{verb} {matches} accept comment \"{COMMENT}\"");
                }
            }
            for rule in rules.iter().filter(|rule| rule.ours) {
                _ = writeln!(script, "delete rule {place} handle {}", rule.id);
            }
        }
        script
    }

    /// A chain as commands of nft name it.
    fn place(&self, chain: &str) -> String {
        let Chain { family, table, .. } = &self.base_chains[0].chain;
        format!("{} {table} {chain}", family.name())
    }

    fn failure(&self, error: &NftError) -> String {
        let Chain { family, table, .. } = &self.base_chains[0].chain;
        format!("table {} {table} cannot be changed: {error}", family.name())
    }
}

/// Table of firewalld, whose zones are chains that it jumps to by interface.
const FIREWALLD: &str = "firewalld";

/// Returns whether chains of a hook may have accepts of ours.
fn has_accepts(hook: Hook) -> bool {
    match hook {
        Hook::Input | Hook::Forward | Hook::Output => true,
        Hook::Ingress | Hook::Egress | Hook::Prerouting | Hook::Postrouting => false,
    }
}

/// Plain matches only: `iptables-nft` can read these, and refuses a table with others in it.
fn accepts(hook: Hook, treatment: &Treatment) -> BTreeSet<Accept> {
    let device = |matches: &str| Accept { matches: matches.to_owned(), port: None };
    match hook {
        Hook::Forward => ["iifname \"weft*\"", "oifname \"weft*\""].map(device).into(),
        Hook::Ingress | Hook::Egress | Hook::Prerouting | Hook::Output | Hook::Postrouting => {
            BTreeSet::new()
        }
        Hook::Input => treatment
            .input_accepts(format!("iifname \"weft*\" udp sport {OVERLAY_PROBE_PORT}"), |port| {
                format!("udp dport {port}")
            }),
    }
}

fn unsolved(chain: &str, base: &BaseChain, ports: &BTreeSet<u16>) -> PacketDrop {
    let (firewalld, packets) = (base.chain.table == FIREWALLD, (base.hook, ports));
    if !base.owned {
        return remedy(chain, packets, firewalld);
    }
    let owner = if firewalld { "firewalld" } else { "the program that made its table" };
    remedy(&format!("{chain}, which only {owner} can change,"), packets, firewalld)
}
