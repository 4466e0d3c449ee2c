//! ```text
//!   a -- rome-1 (2001:db8:2::11, 192.0.2.17) --+--[ switch ]--+-- milan-1 (192.0.2.33, 2001:db8:2::21) -- a
//!   b -- rome-2 (2001:db8:2::12, 192.0.2.18) --+              +-- milan-2 (192.0.2.34, 2001:db8:2::22) -- b
//!          pods fd00:200::/48 and 10.200.0.0/16, services fd00:96::/112 and 10.96.0.0/16, twice; weft in
//!          another namespace than Liqo's
//! ```

use std::net::IpAddr;

use anyhow::{Result, ensure};
use serde_json::json;
use weft_tests::kubernetes::Image;
use weft_tests::manifests::{Peering, join};
use weft_tests::{ClusterSpec, Kubernetes, Lab, Pod, skip, wait_until};

use crate::pair::{SOON, TIMEOUT, reach};
use crate::stage::{all_of, each, play, step};

const NAMESPACE: &str = "weft-system";

/// Clusters with the families in another order on each side, and a node without a gateway in each.
#[test]
#[ignore = "minutes long: make soak-rounds"]
fn dual_stack_clusters_of_any_order_reach_each_other() -> Result<()> {
    let rome = ClusterSpec::new("rome", 1, 2).both_families(true);
    connect([rome, ClusterSpec::new("milan", 2, 2).both_families(false)])
}

fn connect(specs: [ClusterSpec; 2]) -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-ipv6")?;
            let clusters = step("two clusters come up", || start(&lab, specs))?;
            let passed = install_and_reach(&clusters, &image);
            if passed.is_err() {
                clusters.iter().for_each(|cluster| eprintln!("{}", cluster.report()));
            }
            passed
        }
        Err(why) => {
            skip(&format!("{why:#}"));
            Ok(())
        }
    })
}

fn start(lab: &Lab, specs: [ClusterSpec; 2]) -> Result<[Kubernetes; 2]> {
    let mut clusters = all_of(lab, specs)?;
    clusters.iter_mut().for_each(|cluster| NAMESPACE.clone_into(&mut cluster.namespace));
    Ok(clusters)
}

fn install_and_reach(clusters: &[Kubernetes; 2], image: &Image) -> Result<()> {
    let [rome, milan] = clusters;
    let pods = step("a pod runs on each node", || {
        each(clusters, |cluster| {
            cluster.load(image)?;
            cluster.run_pods(&[("a", 1), ("b", 2)])
        })
    })?;
    for (cluster, pods) in clusters.iter().zip(&pods) {
        let families = cluster.spec.pod_cidrs.iter().map(|cidr| cidr.addr().is_ipv6());
        let families: Vec<_> = families.collect();
        let is_as_expected =
            |pod: &Pod| pod.addresses.iter().map(IpAddr::is_ipv6).eq(families.iter().copied());
        ensure!(pods.iter().all(is_as_expected), "{pods:?}");
    }
    step("the chart is installed", || each(clusters, |one| one.install_weft(TIMEOUT)))?;
    let peering = Peering::new(&rome.spec, &milan.spec, 30742);
    let documents = [peering.client_documents(), peering.server_documents()];
    for (cluster, documents) in clusters.iter().zip(documents) {
        // The chart's templates are used.
        let documents =
            join(&documents).replace("namespace: liqo}", &format!("namespace: {NAMESPACE}}}"));
        wait_until("it is taken", SOON, || cluster.apply(&documents))?;
    }
    step("both are connected", || {
        rome.wait_connected("milan", "client", SOON)?;
        milan.wait_connected("rome", "server", SOON)
    })?;
    let (of_milan, of_rome) = (rome.view(&milan.spec)?, milan.view(&rome.spec)?);
    step("pods reach pods", || {
        reach(&pods[0], &pods[1], (&of_milan, &of_rome))?;
        reach(&pods[1], &pods[0], (&of_rome, &of_milan))
    })?;
    step("weft status finds weft in its namespace", || {
        clusters.iter().try_for_each(|cluster| wait_until("all is well", SOON, || is_well(cluster)))
    })
}

fn is_well(cluster: &Kubernetes) -> Result<()> {
    let status = cluster.status()?;
    ensure!(status["clusterId"] == json!(cluster.spec.id), "{status}");
    ensure!(status["problems"] == json!([]), "{}", status["problems"]);
    ensure!(status["peerings"][0]["state"] == "Connected", "{status}");
    Ok(())
}
