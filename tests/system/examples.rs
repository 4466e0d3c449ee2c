//! The manifests in `deploy/examples`.

use std::fs;

use anyhow::{Context as _, Result};
use weft_tests::manifests::Peering;

use crate::scene::{PATIENCE, PORT, play, rome_and_milan};

#[test]
fn examples_of_a_peering_connect_two_clusters() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let (rome, milan) = (scene.cluster("rome"), scene.cluster("milan"));
        let peering = Peering::new(&rome.spec, &milan.spec, PORT);
        let (client, server) = (peering.client_key().public(), peering.server_key().public());
        let of_rome = example("rome", &server.to_string(), &peering.client_documents())?;
        rome.apply("milan", &of_rome.replace("198.51.100.20", &peering.endpoint[0]))?;
        let of_milan = example("milan", &client.to_string(), &peering.server_documents())?;
        milan.apply("rome", &of_milan)?;
        rome.wait_connected("milan", PATIENCE)?;
        milan.wait_connected("rome", PATIENCE)
    })
}

/// An example with the peer's key, and the Secret of these documents.
fn example(cluster: &str, key: &str, documents: &[String]) -> Result<String> {
    let example = fs::read_to_string(format!("../deploy/examples/{cluster}.yaml"))?;
    let (before, after) = example.split_once("publicKey: ").context("a PublicKey")?;
    let (_, after) = after.split_once('}').context("a spec in one line")?;
    let secret = documents.iter().find(|document| document.contains("kind: Secret"));
    Ok(format!("{before}publicKey: {key}}}{after}---\n{}", secret.context("a Secret")?))
}
