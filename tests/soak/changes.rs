//! Manifests that change all the time, none of which concerns the peering that is measured.

use anyhow::Result;
use weft_tests::manifests::{self, Peering, join};
use weft_tests::{Cluster, ClusterSpec};

/// Changes of a cluster before it is as it was.
const ROUND: usize = 6;
/// Address of a peer that is not there.
const NOWHERE: &str = "192.0.2.200";
const PORT: u16 = 30_800;

/// Goes through both clusters in turn.
pub(crate) struct Changes<'a> {
    clusters: &'a [Cluster; 2],
    count: usize,
}

impl<'a> Changes<'a> {
    pub(crate) fn new(clusters: &'a [Cluster; 2]) -> Self {
        Self { clusters, count: 0 }
    }

    /// Number of changes so far.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    pub(crate) fn next(&mut self) -> Result<()> {
        let (turn, side) = (self.count / 2, self.count % 2);
        self.count += 1;
        let cluster = &self.clusters[side];
        match turn % ROUND {
            0 => {
                cluster.apply("database", &manifests::ip("database", [172, 30, 0, 9].into(), true))
            }
            1 => cluster.apply("naples", &naples(cluster, side)),
            2 => cluster.apply("cluster", &labelled(&cluster.spec, turn)),
            3 => cluster.remove("database"),
            4 => cluster.remove("naples"),
            _ => cluster.apply("cluster", &manifests::own(&cluster.spec)),
        }
    }
}

/// Another peering, in either role: its gateway starts and calls in vain, or waits in vain.
fn naples(cluster: &Cluster, side: usize) -> String {
    let naples = ClusterSpec::new("naples", 3, 1);
    if side == 0 {
        let mut peering = Peering::new(&cluster.spec, &naples, PORT);
        peering.endpoint = vec![NOWHERE.to_owned()];
        join(&peering.client_documents())
    } else {
        join(&Peering::new(&naples, &cluster.spec, PORT).server_documents())
    }
}

/// The cluster's own manifests, with a label on each Node that is another one each time.
fn labelled(spec: &ClusterSpec, turn: usize) -> String {
    let own = manifests::own(spec);
    let name = format!("  name: {}\n", spec.node_name(1));
    own.replace(&name, &format!("{name}  labels: {{turn: \"{turn}\"}}\n"))
}
