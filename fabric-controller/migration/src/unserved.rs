//! Events at objects of users that Liqo's networking would apply and weft does not.

use std::collections::BTreeSet;
use std::time::Duration;

use fabric_api::labels;
use fabric_kube_client::ApiServer;
use fabric_kube_client::reflector::Selection;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::ApiResource;
use tokio::time::sleep;

use crate::liqo_networking::{FIREWALL, ROUTE, is_liqos, is_of_release, resource};
use fabric_kube_client::Emitter;

/// Interval of lists. Their definitions need not be installed.
const PERIOD: Duration = Duration::from_secs(30);
/// Maximum number of Events of a list.
const BURST: usize = 20;
/// Kinds, and the text of the Event.
const UNSERVED: [([&str; 2], &str); 2] = [
    (
        FIREWALL,
        "weft applies no FirewallConfiguration: use NetworkPolicies or a firewall of the nodes instead, \
         and delete this object",
    ),
    (
        ROUTE,
        "weft applies no RouteConfiguration: its routes follow from Configurations and IPs; list more \
         prefixes in a Configuration, or map an address by an IP, and delete this object",
    ),
];

/// Reports without end. What Liqo itself made is left to `weft adopt`.
pub async fn report(server: ApiServer, identity: &str) {
    let emitter =
        Emitter::new(server.client.clone(), [labels::CONTROLLER_MANAGER, identity], "Ignore");
    let mut reported = BTreeSet::new();
    loop {
        let mut there = BTreeSet::new();
        for (kind, note) in UNSERVED {
            let kind = resource(kind);
            let listed = Selection::all(kind.clone()).list_metadata(&server.client, None).await;
            let of_users = listed.unwrap_or_default().into_iter().map(|object| object.metadata);
            let of_users = of_users
                .filter(|of| !is_liqos(of) && !is_of_release(of, &server.namespace))
                .filter_map(|of| Some((of.uid.clone()?, of)));
            let of_users: Vec<_> = of_users.collect();
            let new = of_users.iter().filter(|(uid, _)| !reported.contains(uid)).take(BURST);
            for (uid, metadata) in new {
                let regarding = reference(&kind, metadata);
                if emitter.warn(regarding, "NotApplied", note.to_owned(), 1).await {
                    there.insert(uid.clone());
                }
            }
            let known = of_users.into_iter().map(|(uid, _)| uid);
            there.extend(known.filter(|uid| reported.contains(uid)));
        }
        reported = there;
        sleep(PERIOD).await;
    }
}

fn reference(kind: &ApiResource, metadata: &ObjectMeta) -> ObjectReference {
    ObjectReference {
        api_version: Some(kind.api_version.clone()),
        kind: Some(kind.kind.clone()),
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
        uid: metadata.uid.clone(),
        ..ObjectReference::default()
    }
}
