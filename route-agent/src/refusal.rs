//! Prefixes that no tunnel leads to any more stay refused until nobody sends to them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fabric_api::Cidr;
use fabric_api::fabric::{NodeConfig, NodeConfigSpec, RefusedTraffic};
use netlink::nft::{self, NftError};
use netlink::{Handle, NetlinkError, Netns};
use netplan::{Family, Firewall, NextHop, Refusal, RouteKey, RuleAction, State, names};

use crate::apply::Applied;
use crate::compile::{Means, means_of_refusal};
use crate::host_state::HostState;
use crate::parsed_config::ParsedConfig;

/// Folder of the state directories whose files of this name weft-refuse.service loads.
const STATE_ROOT: &str = "/var/lib/weft";
const FILE: &str = "refusal.nft";
/// Bound for the sources in a status.
const MAX_REPORTED: usize = 8;

#[derive(Debug, thiserror::Error)]
pub(crate) enum RefusalError {
    #[error("cannot read the table of refused prefixes")]
    Read(#[source] NftError),
    #[error("cannot change the table of refused prefixes")]
    Change(#[source] NftError),
    #[error("cannot read the kernel's routes")]
    Routes(#[source] NetlinkError),
    #[error("cannot save {path}, which refuses peers' prefixes while the host starts")]
    Save { path: PathBuf, source: io::Error },
    #[error("cannot remove {path}, which refuses peers' prefixes while the host starts")]
    Remove { path: PathBuf, source: io::Error },
}

/// Keeps the table of refused prefixes, and its copy for the next start of the host.
#[derive(Debug, Default)]
pub(crate) struct Refuser {
    /// The table as last read or written.
    table: Refusal,
    quiet: Duration,
    /// Prefixes of the config that the overlay runs on, and when they were first seen: the firewall drops pods' packets
    /// there, and nothing counts those.
    conflicts: BTreeMap<Cidr, Instant>,
    /// Uid and content of the config whose missing prefixes are refused. Its generation alone does
    /// not show a change of records.
    settled: Option<(Option<String>, NodeConfigSpec)>,
    file: Option<PathBuf>,
    saved: Option<String>,
}

impl Refuser {
    pub(crate) fn new(file: Option<PathBuf>) -> Self {
        Self { file, ..Self::default() }
    }

    /// Time between two looks at who sends; `None` while nothing is refused.
    pub(crate) fn period(&self) -> Option<Duration> {
        let most = Duration::from_secs(30);
        let has_any = !self.table.prefixes.is_empty() || !self.conflicts.is_empty();
        has_any.then(|| most.min(self.quiet / 4))
    }

    /// Refuses what the config wants refused, and what the kernel has and the config no longer
    /// has, before anything else changes. Returns what is to stay refused.
    pub(crate) async fn begin(
        &mut self,
        handle: &Handle,
        config: &ParsedConfig<'_>,
        host_state: &HostState,
    ) -> Result<BTreeSet<Cidr>, RefusalError> {
        let netns = handle.netns();
        self.quiet = config.spec.quiet_after();
        let before = std::mem::replace(&mut self.table, observe(netns)?);
        let means = |prefix: &Cidr| means_of_refusal(config, host_state, prefix);
        let conflict = |prefix: &Cidr| means(prefix) == Some(Means::Firewall);
        let first_seen = |prefix| (prefix, self.conflicts.get(&prefix).copied());
        let conflicts = config.refused.iter().copied().filter(conflict).map(first_seen);
        self.conflicts =
            conflicts.map(|(p, since)| (p, since.unwrap_or_else(Instant::now))).collect();
        let refusable = |prefix: &Cidr| means(prefix) == Some(Means::Table);
        let wanted: BTreeSet<Cidr> =
            config.refused.iter().filter(|p| refusable(p)).copied().collect();
        let mut fresh = wanted.clone();
        // Another may have deleted the table.
        fresh.extend(before.prefixes.into_iter().filter(&refusable));
        if self.settled.as_ref() != Some(&version(config.object)) {
            fresh.extend(backstops(handle).await?.into_iter().filter(&refusable));
        }
        fresh.retain(|prefix| !self.table.prefixes.contains(prefix));
        for prefix in &fresh {
            tracing::info!(%prefix, "no tunnel leads there any more; refusing it");
            self.table.hold(*prefix, self.quiet);
        }
        let networks = host_state.networks().map(|(network, _)| network);
        let pods = config.local_pods.iter().copied().collect();
        if self.table.leave(networks, &pods) || !fresh.is_empty() {
            self.write(netns)?;
        }
        let stays = |p: &&Cidr| refusable(p) && (wanted.contains(p) || self.table.is_held(p));
        Ok(self.table.prefixes.iter().filter(stays).copied().collect())
    }

    /// Ends the refusal of all prefixes but `kept`, as far as the rest of the config is in force, and
    /// saves those of peers.
    pub(crate) async fn conclude(
        &mut self,
        handle: &Handle,
        config: &ParsedConfig<'_>,
        mut kept: BTreeSet<Cidr>,
        firewall: &Firewall,
        applied: &Applied,
    ) -> Vec<RefusalError> {
        if !applied.is_whole() {
            // Prefixes without an `unreachable` route in force remain in this refusal.
            let covered = covered(handle).await.unwrap_or_default();
            let covered = if applied.is_guarded { covered } else { BTreeSet::new() };
            kept.extend(self.table.prefixes.difference(&covered));
        }
        let finished = self.finish(handle.netns(), kept);
        if finished.is_ok() && applied.is_whole() {
            self.settled = Some(version(config.object));
        }
        let mut refused = Refusal::of(firewall.peers.clone());
        refused.leave(firewall.own_networks.iter().copied(), &firewall.local_pods);
        [finished, self.save(refused)].into_iter().filter_map(Result::err).collect()
    }

    /// Ends the refusal of all other prefixes, once the rest of the config is in force.
    fn finish(&mut self, netns: &Netns, kept: BTreeSet<Cidr>) -> Result<(), RefusalError> {
        if self.table.prefixes != kept {
            for prefix in self.table.prefixes.difference(&kept) {
                tracing::info!(%prefix, "no longer refused apart from peerings");
            }
            self.table = observe(netns)?;
            self.table.retain(kept);
            self.write(netns)?;
        }
        Ok(())
    }

    /// Ends the refusal that was left by a withdrawal, except for `kept`, once nobody sends or
    /// `at_once`.
    pub(crate) fn look(
        &mut self,
        netns: &Netns,
        at_once: bool,
        kept: &BTreeSet<Cidr>,
    ) -> Result<(), RefusalError> {
        self.settled = None;
        let before = std::mem::replace(&mut self.table, observe(netns)?);
        // Another may have deleted the table.
        let known = &before.prefixes | &self.table.prefixes;
        let kept = &known & kept;
        if self.table.prefixes != kept && (at_once || self.table.senders.is_empty()) {
            for prefix in self.table.prefixes.difference(&kept) {
                tracing::info!(%prefix, "no longer refused");
            }
            self.table.retain(kept);
            self.table.senders.clear();
            self.write(netns)?;
        }
        Ok(())
    }

    /// Traffic to refused prefixes, among them `named`, those of the config.
    pub(crate) fn report(&self, named: &BTreeSet<Cidr>) -> Vec<RefusedTraffic> {
        let all = named | &self.table.prefixes;
        let is_new = |prefix: &Cidr| {
            self.conflicts.get(prefix).is_some_and(|since| since.elapsed() < self.quiet)
        };
        let traffic = |prefix: Cidr| RefusedTraffic {
            prefix: prefix.to_string(),
            quiet: !self.table.is_held(&prefix) && !is_new(&prefix),
            senders: self.table.senders_to(&prefix).into_iter().take(MAX_REPORTED).collect(),
        };
        all.into_iter().map(traffic).collect()
    }

    /// Sources that send to refused prefixes, at most a few.
    pub(crate) fn senders(&self) -> Vec<IpAddr> {
        senders(&self.table)
    }

    /// Keeps for the next start of the host what must not leave it before an agent runs.
    fn save(&mut self, mut refusal: Refusal) -> Result<(), RefusalError> {
        let Some(path) = &self.file else { return Ok(()) };
        refusal.senders.clear();
        // A peering may be gone by the time that a controller is back.
        for prefix in refusal.prefixes.clone() {
            refusal.hold(prefix, self.quiet);
        }
        let text = refusal.addition(self.quiet);
        let text = if refusal.prefixes.is_empty() { String::new() } else { text };
        if self.saved.as_ref() == Some(&text) {
            return Ok(());
        }
        let saved = if text.is_empty() { remove(path) } else { replace(path, &text) };
        saved.map_err(|source| RefusalError::Save { path: path.clone(), source })?;
        self.saved = Some(text);
        Ok(())
    }

    /// The same after a withdrawal, when nothing else is left.
    pub(crate) fn save_refused(&mut self) -> Result<(), RefusalError> {
        self.save(self.table.clone())
    }

    pub(crate) fn refused(&self) -> &BTreeSet<Cidr> {
        &self.table.prefixes
    }

    fn write(&self, netns: &Netns) -> Result<(), RefusalError> {
        write(netns, &self.table, self.quiet)
    }
}

/// Removes what the next start of this host would load, unless something is refused at present. Other
/// network namespaces of the host than its first one leave that alone.
pub(crate) fn remove_saved(netns: &Netns) -> Result<(), RefusalError> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/net")).ok();
    let is_first = namespace("1").is_some_and(|first| namespace("self") == Some(first));
    if !is_first || !observe(netns)?.prefixes.is_empty() {
        return Ok(());
    }
    remove_files(Path::new(STATE_ROOT))
}

fn remove_files(root: &Path) -> Result<(), RefusalError> {
    for folder in fs::read_dir(root).into_iter().flatten().flatten() {
        let path = folder.path().join(FILE);
        if path.exists() {
            remove(&path).map_err(|source| RefusalError::Remove { path, source })?;
        }
    }
    Ok(())
}

pub(crate) fn observe(netns: &Netns) -> Result<Refusal, RefusalError> {
    nft::refusal(netns).map(Option::unwrap_or_default).map_err(RefusalError::Read)
}

/// Without prefixes there is no table.
pub(crate) fn write(netns: &Netns, table: &Refusal, quiet: Duration) -> Result<(), RefusalError> {
    let empty = table.prefixes.is_empty();
    let script = if empty { Refusal::removal() } else { table.script(quiet) };
    nft::run(netns, &script).map_err(RefusalError::Change)
}

/// Prefixes of peers with an `unreachable` route of ours, which is left when a tunnel's is lost.
pub(crate) async fn backstops(handle: &Handle) -> Result<BTreeSet<Cidr>, RefusalError> {
    observe_state(handle).await.map(|have| backstops_in(&have).map(|key| key.to).collect())
}

/// Prefixes with such a route in weft's table, which a rule of ours looks into.
async fn covered(handle: &Handle) -> Result<BTreeSet<Cidr>, RefusalError> {
    let have = observe_state(handle).await?;
    let lookup = RuleAction::Lookup(names::TABLE);
    let rules = have.rules.iter().filter(|rule| rule.action == lookup);
    let families: Vec<Family> = rules.map(|rule| rule.family).collect();
    let backstops = backstops_in(&have).filter(|key| key.table == names::TABLE);
    Ok(backstops.map(|key| key.to).filter(|to| families.contains(&Family::of_prefix(to))).collect())
}

async fn observe_state(handle: &Handle) -> Result<State, RefusalError> {
    let have = handle.observe(&crate::apply::scope(std::iter::empty())).await;
    have.map_err(RefusalError::Routes)
}

fn backstops_in(have: &State) -> impl Iterator<Item = RouteKey> {
    let backstops = have.routes.iter().filter(|(key, route)| {
        key.metric == RouteKey::BACKSTOP && route.hop == NextHop::Unreachable
    });
    backstops.map(|(key, _)| *key)
}

/// The first few sources of refused packets.
pub(crate) fn senders(table: &Refusal) -> Vec<IpAddr> {
    let from = table.senders.keys().map(|(from, _)| *from);
    let all: BTreeSet<IpAddr> = from.filter(|from| !from.is_unspecified()).collect();
    all.into_iter().take(MAX_REPORTED).collect()
}

fn version(config: &NodeConfig) -> (Option<String>, NodeConfigSpec) {
    (config.metadata.uid.clone(), config.spec.clone())
}

/// Root alone may read it. It is whole or not there, even after a power cut.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    fs::create_dir_all(folder)?;
    let draft = path.with_extension("tmp");
    remove(&draft)?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&draft, path)?;
    File::open(folder)?.sync_all()
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_refusals_of_all_state_directories_go() {
        let root = tempfile::tempdir().unwrap();
        let state = |name: &str| root.path().join(name);
        for name in ["rome", "agent-n2"] {
            fs::create_dir(state(name)).unwrap();
            fs::write(state(name).join("refusal.nft"), "table inet weft_refused {}").unwrap();
        }
        fs::write(state("rome").join("node"), "n1\n").unwrap();
        fs::write(state("file"), "").unwrap();
        remove_files(root.path()).unwrap();
        assert!(!["rome", "agent-n2"].iter().any(|name| state(name).join("refusal.nft").exists()));
        assert!(state("rome").join("node").exists() && state("agent-n2").exists());
        remove_files(&state("nothing")).unwrap();
    }
}
