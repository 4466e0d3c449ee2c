//! Processes that run on a host.

use std::collections::BTreeMap;
use std::path::PathBuf;

use fabric_api::fabric::GatewayConfig;
use fabric_store::Snapshot;

use super::{Found, Life, Liveness};
use crate::workloads::{gateways_of, names};

/// Findings on the host, apart from the store.
#[derive(Clone, Debug, Default)]
pub(crate) struct Host {
    pub(crate) node: String,
    pub(crate) cluster_id: Option<String>,
    /// The processes that run, by name.
    pub(crate) running: BTreeMap<String, Liveness>,
    /// The processes that should.
    pub(crate) expected: Vec<String>,
    /// True if a supervisor runs.
    pub(crate) supervised: bool,
    /// Directories whose file system has no room left.
    pub(crate) full: Vec<PathBuf>,
}

impl Host {
    /// Gateways of other hosts are not seen.
    pub(crate) fn found(&self, snapshot: &Snapshot) -> Found {
        let configs = snapshot.objects.values().filter_map(|object| object.try_into().ok());
        Found {
            node: Some(self.node.clone()),
            cluster_id: self.cluster_id.clone(),
            gateways: self.gateways(configs),
            problems: self.problems(),
        }
    }

    fn gateways<'a>(
        &self,
        configs: impl Iterator<Item = &'a GatewayConfig>,
    ) -> BTreeMap<(String, String), Life> {
        let own = gateways_of(&self.node, configs).into_iter();
        let lives = own.map(|(process, config)| {
            let (namespace, name) = names(config);
            let liveness = self.running.get(&process).copied().unwrap_or(Liveness::Gone);
            let problem = match liveness {
                Liveness::Answers => None,
                Liveness::Silent => Some(format!("{process} does not answer; {}", hangs(&process))),
                Liveness::Gone => {
                    Some(format!("{process} does not run; see `weft logs {process}`"))
                }
            };
            ((namespace.to_owned(), name.to_owned()), Life { liveness, problem, node: None })
        });
        lives.collect()
    }

    fn problems(&self) -> Vec<String> {
        let mut found = Vec::new();
        if !self.supervised {
            found.push(
                "no `weft up` or `weft agent` runs here: changes have no effect, and what dies \
                 stays dead"
                    .to_owned(),
            );
        }
        found.extend(self.full.iter().map(|dir| {
            let dir = dir.display();
            format!(
                "the file system of {dir} is full: weft cannot write there, and what this shows may be \
                 old; make room (`df -h {dir}`, `df -i {dir}`)"
            )
        }));
        let dead = self.expected.iter().filter(|process| !self.running.contains_key(*process));
        found.extend(dead.map(|process| format!("{process} does not run")));
        let silent = |process: &&String| self.running.get(*process) == Some(&Liveness::Silent);
        let silent = self.expected.iter().filter(silent);
        found
            .extend(silent.map(|process| format!("{process} does not answer; {}", hangs(process))));
        found
    }
}

fn hangs(process: &str) -> String {
    format!(
        "see `weft logs {process}`; if it hangs, end its process (`kill -9`), and it is started anew"
    )
}

#[cfg(test)]
mod tests {
    use fabric_store::Object;

    use super::*;
    use crate::workloads::tests::config;

    fn life(node: &str, running: &[(&str, Liveness)]) -> Option<Liveness> {
        let running = running.iter().map(|(name, how)| ((*name).to_owned(), *how)).collect();
        let host = Host { node: node.to_owned(), running, ..Host::default() };
        let config = Object::from(config("t", "client", "n1"));
        let objects = [(config.reference(), config)].into();
        let found = host.found(&Snapshot { objects, problems: Vec::new() });
        let life = found.gateways.get(&("t".to_owned(), "client".to_owned()))?;
        assert_eq!(life.problem.is_some(), life.liveness != Liveness::Answers);
        Some(life.liveness)
    }

    #[test]
    fn silent_program_is_named_with_a_remedy() {
        let running = [("fabric-controller".to_owned(), Liveness::Silent)].into();
        let expected = vec!["fabric-controller".to_owned()];
        let host = Host { running, expected, supervised: true, ..Host::default() };
        let problem = "fabric-controller does not answer; see `weft logs fabric-controller`; if it \
                       hangs, end its process (`kill -9`), and it is started anew";
        assert_eq!(host.problems(), [problem]);
    }

    #[test]
    fn a_gateway_of_this_host_is_as_its_process_is() {
        for liveness in [Liveness::Answers, Liveness::Silent] {
            assert_eq!(life("n1", &[("gateway-t-client", liveness)]), Some(liveness));
        }
        assert_eq!(life("n1", &[]), Some(Liveness::Gone));
        assert_eq!(life("n2", &[]), None, "it is another host's");
    }
}
