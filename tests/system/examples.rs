//! The manifests in `deploy/examples`.

use std::fs;

use anyhow::{Result, ensure};
use weft_tests::manifests::Peering;
use weft_tests::wait_until;

use crate::scene::{PORT, TIMEOUT, play, rome_and_milan};

#[test]
fn examples_of_a_peering_connect_two_clusters() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        let of_rome = example("rome", &peering.client_documents())?;
        rome.apply("milan", &of_rome.replace("198.51.100.20", &peering.endpoint[0]))?;
        milan.apply("rome", &example("milan", &peering.server_documents())?)?;
        rome.wait_connected("milan", TIMEOUT)?;
        milan.wait_connected("rome", TIMEOUT)
    })
}

/// Milan's, in place of the examples'.
#[test]
fn manifests_of_the_readme_connect_two_clusters() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        let readme = fs::read_to_string("../README.md")?;
        let manifests: Vec<_> =
            readme.lines().filter_map(|line| line.strip_prefix("    {apiVersion: ")).collect();
        let manifests = manifests.join("\n---\n{apiVersion: ");
        for kind in ["PublicKey", "GatewayServer", "IP"] {
            ensure!(manifests.contains(&format!("kind: {kind},")), "no {kind} in {manifests}");
        }
        let key = peering.client_key().public().to_string();
        let manifests = format!("{{apiVersion: {}\n", manifests.replace("KEY", &key));
        let mut documents = peering.server_documents();
        documents.retain(|document| {
            !["PublicKey", "GatewayServer"]
                .iter()
                .any(|of| document.contains(&format!("kind: {of}\n")))
        });
        milan.apply("rome", &format!("{}---\n{manifests}", documents.join("---\n")))?;
        rome.apply("milan", &peering.client_documents().join("---\n"))?;
        rome.wait_connected("milan", TIMEOUT)?;
        milan.wait_connected("rome", TIMEOUT)?;
        wait_until("the IP has an address", TIMEOUT, || {
            let ip = milan.published("ip")?;
            ensure!(ip.iter().any(|ip| ip["status"]["ip"].is_string()), "{ip:?}");
            Ok::<_, anyhow::Error>(())
        })
    })
}

/// An example, and of these documents what `weft keys` makes.
fn example(cluster: &str, documents: &[String]) -> Result<String> {
    let example = fs::read_to_string(format!("../deploy/examples/{cluster}.yaml"))?;
    let is_key = |text: &&String| text.contains("kind: Secret") || text.contains("kind: PublicKey");
    let keys: Vec<_> = documents.iter().filter(is_key).map(String::as_str).collect();
    ensure!(keys.len() == 2, "a Secret and a PublicKey, not {keys:?}");
    Ok(format!("{example}---\n{}", keys.join("---\n")))
}
