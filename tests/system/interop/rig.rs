use anyhow::{Context, Result};
use weft_tests::{Cluster, ClusterSpec, Families};

use super::tie::{Case, Tie};
use crate::scene::Scene;

/// The last bytes of the machines' addresses.
const FIRST_NUMBER: u8 = 64;
/// Ports on which weft listens, one for each peering in which it is the server.
const FIRST_PORT: u16 = 31_000;

/// Rome under weft, and one peering for each case. Every peer has the same pod CIDR.
pub(crate) struct Rig {
    pub(crate) ties: Vec<Tie>,
    pub(crate) scene: Scene,
}

impl Rig {
    /// Comes up, or returns the reason why not.
    pub(crate) fn start(cases: &[Case]) -> Result<Self> {
        let mut spec = ClusterSpec::new("rome", 1, 1);
        spec.underlay = Families::Both;
        let mut rig = Self { ties: Vec::new(), scene: Scene::build(&[spec])? };
        let result = rig.join_all(cases);
        if result.is_err() {
            rig.explain();
        }
        result.map(|()| rig)
    }

    pub(crate) fn rome(&self) -> &Cluster {
        &self.scene.clusters[0]
    }

    pub(crate) fn number(&self, tie: usize) -> u8 {
        number(tie)
    }

    /// Prints all that may help.
    pub(crate) fn explain(&self) {
        eprintln!("{}", self.rome().report());
        for tie in &self.ties {
            eprintln!("---- {} of {}\n{}", tie.case.peer, tie.spec.id, tie.log());
        }
    }

    fn join_all(&mut self, cases: &[Case]) -> Result<()> {
        // Stock peers have no probe and answer none.
        self.scene.clusters[0].start_up(&["--ping-enabled=false"])?;
        for (index, case) in cases.iter().enumerate() {
            let mut spec = ClusterSpec::new(&format!("turin-{index}"), 3, 1);
            spec.pod_cidrs = vec!["10.201.0.0/16".parse()?];
            let ends = (number(index), FIRST_PORT + index as u16);
            let tie = Tie::new(&self.scene.lab, self.rome(), (*case, spec), ends);
            self.ties.push(tie.with_context(|| format!("peering {index}: {case:?}"))?);
        }
        self.ties.iter().try_for_each(|tie| tie.wait_until_up(self.rome()))
    }
}

fn number(tie: usize) -> u8 {
    FIRST_NUMBER + tie as u8
}
