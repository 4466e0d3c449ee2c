//! A peering whose networking is not weft's, or that has none.

use std::time::Duration;

use anyhow::{Error, Result, ensure};
use weft_tests::kubernetes::Object;
use weft_tests::{Kubernetes, stays_so};

use super::{inventory, networking_is_off, offload, part, peer, writes};
use crate::stage::{each, step};

/// Time in which a pod's IP would be made.
const UNMAPPED: Duration = Duration::from_secs(3);

/// From the first peering of clusters to its end.
pub(super) fn peer_stays_off(clusters: &[Kubernetes; 2]) -> Result<()> {
    let [rome, milan] = clusters;
    let before = each(clusters, inventory)?;
    step("liqoctl peers them without networking", || {
        peer(rome, milan, &["--networking-disabled"])
    })?;
    let [_, far] = step("a namespace is offloaded", || offload(rome, milan))?;
    step("the pod's address is not mapped", || {
        let shadow = rome.get(Object::new("pod", super::DEMO, "far"))?;
        let address = far.addresses[0].to_string();
        ensure!(shadow["status"]["podIP"] == address.as_str(), "{}", shadow["status"]);
        stays_so("there is no IP of it", UNMAPPED, || {
            let ips = rome.kubectl(&["get", "ips", "--all-namespaces", "--output=name"])?;
            ensure!(!ips.contains("/far"), "{ips}");
            Ok::<_, Error>(())
        })
    })?;
    step("networking is off, and weft has written nothing of it", || {
        each(clusters, is_off).map(drop)
    })?;
    part(clusters, &before)
}

fn is_off(cluster: &Kubernetes) -> Result<()> {
    networking_is_off(cluster)?;
    let writers = writes::writers(&cluster.requests()?);
    ensure!(!writers.is_empty() && !writers.contains_key(writes::WEFT), "{writers:?}");
    Ok(())
}
