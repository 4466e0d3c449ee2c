//! Points of other programs' chains at which packets that no rule decides about are dropped.
//!
//! An accept right before such a point lets the overlay pass and outranks no rule of anybody.

use std::collections::{BTreeMap, BTreeSet};

use netlink::nft::{Condition, Hook, Verdict};

/// Rule of a chain, of either packet filter.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    /// Where in its chain: a handle of nft, a line of iptables.
    pub(crate) id: String,
    pub(crate) ours: bool,
    pub(crate) condition: Condition,
    pub(crate) verdict: Verdict,
    /// Names the overlay's devices or port as packets at these hooks have them.
    pub(crate) names_overlay_at: Option<Hook>,
}

/// Place of an accept: in `chain`, before its rule number `index` or behind the last one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DropPoint {
    pub(crate) chain: String,
    pub(crate) index: usize,
}

/// Chains that every packet of a hook goes through, from a base chain on.
pub(crate) struct Walk<'a, E> {
    hook: Hook,
    /// Follow jumps by interface, too: zones are such chains.
    zones: bool,
    load: &'a mut dyn FnMut(&str) -> Result<Vec<Rule>, E>,
    pub(crate) chains: BTreeMap<String, Vec<Rule>>,
    pub(crate) points: BTreeSet<DropPoint>,
    /// A rule of the owner's own lets the overlay pass.
    pub(crate) admitted: bool,
    ends: BTreeMap<String, End>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Packets that no rule decided about go back to the caller.
    Returns,
    /// No packet comes back.
    Final,
}

impl<'a, E> Walk<'a, E> {
    pub(crate) fn new(
        hook: Hook,
        zones: bool,
        load: &'a mut dyn FnMut(&str) -> Result<Vec<Rule>, E>,
    ) -> Self {
        let (chains, points, ends) = Default::default();
        Self { hook, zones, load, chains, points, admitted: false, ends }
    }

    pub(crate) fn base_chain(&mut self, chain: &str, policy_drops: bool) -> Result<(), E> {
        if self.visit(chain)? == End::Returns && policy_drops {
            let index = self.chains.get(chain).map_or(0, Vec::len);
            self.points.insert(DropPoint { chain: chain.to_owned(), index });
        }
        Ok(())
    }

    fn visit(&mut self, chain: &str) -> Result<End, E> {
        if let Some(end) = self.ends.get(chain) {
            return Ok(*end);
        }
        let rules = (self.load)(chain)?;
        // The kernel takes no loops; what is read while it changes may look like one.
        self.ends.insert(chain.to_owned(), End::Returns);
        self.chains.insert(chain.to_owned(), rules.clone());
        let end = self.visit_rules(chain, &rules)?;
        self.ends.insert(chain.to_owned(), end);
        Ok(end)
    }

    fn visit_rules(&mut self, chain: &str, rules: &[Rule]) -> Result<End, E> {
        for (index, rule) in rules.iter().enumerate() {
            let at = DropPoint { chain: chain.to_owned(), index };
            let drops = rule.verdict == Verdict::Drop;
            self.admitted |= !rule.ours && !drops && rule.names_overlay_at == Some(self.hook);
            match (rule.condition, &rule.verdict) {
                (Condition::Always, Verdict::Drop) => {
                    self.points.insert(at);
                    return Ok(End::Final);
                }
                (Condition::Always, Verdict::Accept) => return Ok(End::Final),
                (Condition::Always, Verdict::Return) => return Ok(End::Returns),
                (Condition::Always, Verdict::Goto(to)) => return self.follow(at, to),
                (Condition::Always, Verdict::Jump(to)) => {
                    if self.follow(at, to)? == End::Final {
                        return Ok(End::Final);
                    }
                }
                (Condition::Interface, Verdict::Jump(to) | Verdict::Goto(to))
                    if self.zones && !to.contains("_policy_") =>
                {
                    self.visit(to)?;
                }
                (
                    Condition::Always | Condition::Interface | Condition::Other,
                    Verdict::Continue
                    | Verdict::Other
                    | Verdict::Accept
                    | Verdict::Drop
                    | Verdict::Return
                    | Verdict::Jump(_)
                    | Verdict::Goto(_),
                ) => {}
            }
        }
        Ok(End::Returns)
    }

    /// Goes into a chain. If that does nothing but drop, or nothing but accept before it drops,
    /// the rule that leads there is the point: others may lead to the chain, too.
    fn follow(&mut self, from: DropPoint, to: &str) -> Result<End, E> {
        let end = self.visit(to)?;
        let point = self.points.iter().find(|point| point.chain == to).cloned();
        if let (End::Final, Some(point)) = (end, point) {
            let rules = self.chains.get(to).and_then(|rules| rules.get(..point.index));
            if is_plain(rules.unwrap_or_default()) {
                self.points.remove(&point);
                self.points.insert(from);
            }
        }
        Ok(end)
    }
}

fn is_plain(rules: &[Rule]) -> bool {
    let others = || rules.iter().filter(|rule| !rule.ours).map(|rule| &rule.verdict);
    others().all(|verdict| matches!(verdict, Verdict::Continue | Verdict::Drop))
        || others().all(|verdict| matches!(verdict, Verdict::Continue | Verdict::Accept))
}

impl Rule {
    /// True if behind this rule there are fewer packets than before it, not all of them accepted.
    fn may_drop(&self) -> bool {
        !self.ours && !matches!(self.verdict, Verdict::Continue | Verdict::Accept)
    }
}

/// True if all accepts that `rules` has of ours are the `wanted` ones, right before rule `index`
/// but for rules that drop nothing.
pub(crate) fn are_in_place(rules: &[Rule], index: usize, wanted: usize) -> bool {
    let ours = |rules: &[Rule]| rules.iter().filter(|rule| rule.ours).count();
    let before = rules.get(..index).unwrap_or(rules);
    let last = before.iter().rposition(Rule::may_drop).map_or(0, |last| last + 1);
    ours(&before[last..]) == wanted && ours(rules) == wanted
}
