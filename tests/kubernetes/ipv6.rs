//! ```text
//!   a -- rome-1 (2001:db8:2::11) --+--[ switch ]--+-- milan-1 (2001:db8:2::21) -- a
//!                      pods fd00:200::/48, services fd00:96::/112, twice; weft in another namespace than Liqo's
//! ```

use anyhow::{Result, ensure};
use serde_json::json;
use weft_tests::kubernetes::Image;
use weft_tests::manifests::{Peering, join};
use weft_tests::{ClusterSpec, Kubernetes, Lab, skip, wait_until};

use crate::pair::{SOON, TIMEOUT, reach};
use crate::stage::{both_of, each, play, step};

const NAMESPACE: &str = "weft-system";

#[test]
fn ipv6_only_clusters_reach_each_other() -> Result<()> {
    play(|| match Image::weft() {
        Ok(image) => {
            let lab = Lab::new("weft-kubernetes-ipv6")?;
            let clusters = step("two clusters come up", || start(&lab))?;
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

fn start(lab: &Lab) -> Result<[Kubernetes; 2]> {
    let specs = [("rome", 1), ("milan", 2)].map(|(id, n)| ClusterSpec::new(id, n, 1).only_ipv6());
    let mut clusters = both_of(lab, specs)?;
    clusters.iter_mut().for_each(|cluster| NAMESPACE.clone_into(&mut cluster.namespace));
    Ok(clusters)
}

fn install_and_reach(clusters: &[Kubernetes; 2], image: &Image) -> Result<()> {
    let [rome, milan] = clusters;
    let pods = step("a pod runs on each node", || {
        each(clusters, |cluster| {
            cluster.load(image)?;
            cluster.run_pods(&[("a", 1)])
        })
    })?;
    let only_v6 = |pods: &Vec<weft_tests::Pod>| {
        pods.iter().flat_map(|pod| &pod.addresses).all(std::net::IpAddr::is_ipv6)
    };
    ensure!(pods.iter().all(only_v6), "{pods:?}");
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
