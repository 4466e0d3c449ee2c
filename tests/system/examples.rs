//! The manifests in `deploy/examples`.

use std::fs;

use anyhow::{Result, ensure};
use weft_tests::manifests::Peering;

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

/// An example, and of these documents what `weft keys` makes.
fn example(cluster: &str, documents: &[String]) -> Result<String> {
    let example = fs::read_to_string(format!("../deploy/examples/{cluster}.yaml"))?;
    let is_key = |text: &&String| text.contains("kind: Secret") || text.contains("kind: PublicKey");
    let keys: Vec<_> = documents.iter().filter(is_key).map(String::as_str).collect();
    ensure!(keys.len() == 2, "a Secret and a PublicKey, not {keys:?}");
    Ok(format!("{example}---\n{}", keys.join("---\n")))
}
