//! Observes a Kubernetes cluster through its API server.

mod pods;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::fmt::Debug;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use fabric_api::ipam::{IP, Network};
use fabric_api::networking::{ACCEPTED, NODES_REACHABLE};
use fabric_api::{check, labels};
use fabric_index::owner::keeps_refused_prefix;
use fabric_kube_client::lease;
use fabric_store::{ApiError, Kind, ObjectRef, Snapshot, Store, StoreError};
use futures::future::join_all;
use http::header::DATE;
use jiff::Timestamp;
use jiff::fmt::rfc2822;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ManagedFieldsEntry, Time};
use kube::api::{ListParams, ObjectList, Request};
use kube::client::Body;
use kube::core::Status;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::observe::{self, Found, Observation};
use pods::{DEPLOYED, Pods};

/// Time limit for all of it. Requests have shorter ones of their own, but a kubeconfig may name a
/// program to log in with.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Time without a renewal of the controller's Lease, in seconds, after which nobody works: another replica takes it
/// over after 15 s. Clocks of API servers may differ by the rest.
const UNRENEWED: i64 = 60;
/// Time limit of a request for pods.
const REQUEST: Duration = Duration::from_secs(5);
/// Kinds read in addition, as far as access permits.
const MORE: [Kind; 5] = [Kind::PublicKey, Kind::Network, Kind::Ip, Kind::Node, Kind::ConfigMap];

/// Observes the cluster of a context of a kubeconfig, the current one of `KUBECONFIG` by default.
/// `None` if weft is not installed there.
pub async fn look(
    kubeconfig: Option<&Path>,
    context: Option<&str>,
) -> anyhow::Result<Option<Observation>> {
    let store = Store::kubernetes_context(kubeconfig, context)?;
    let url = store.api_server().map(|server| server.url).unwrap_or_default();
    let asked = timeout(ANSWER_TIMEOUT, ask(&store)).await;
    asked
        .with_context(|| format!("{url} did not answer within {} s", ANSWER_TIMEOUT.as_secs()))?
        .with_context(|| format!("cannot ask the API server at {url}"))
}

async fn ask(store: &Store) -> anyhow::Result<Option<Observation>> {
    let (needed, more, pods, leases) = tokio::join!(
        join_all(observe::KINDS.map(|kind| async move { (kind, store.read(&[kind]).await) })),
        join_all(MORE.map(|kind| async move { (kind, store.read(&[kind]).await) })),
        pods(store),
        leases(store),
    );
    let (leases, unread) = match leases {
        Ok(leases) => (leases, None),
        Err(error) => (Leases::default(), Some(error)),
    };
    let Leases { all: leases, listed_at } = leases;
    let is_undefined =
        |read: &Result<Snapshot, StoreError>| read.as_ref().is_err_and(|e| is_refused(e, 404));
    if needed.iter().all(|(_, read)| is_undefined(read)) {
        return Ok(None);
    }
    // Without these, pods of gateways are Liqo's own.
    let is_defined = needed.iter().any(|(kind, read)| {
        let is_ours = matches!(kind, Kind::NodeConfig | Kind::GatewayConfig | Kind::FabricRecord);
        is_ours && !is_undefined(read)
    });
    let mut snapshot = Snapshot::default();
    let mut refused = BTreeSet::new();
    let mut problems = Vec::new();
    for (kind, read) in needed {
        match read {
            Ok(part) => merge(&mut snapshot, part),
            Err(error) if is_refused(&error, 404) => problems.extend(error.refusal()),
            Err(error) if is_refused(&error, 403) => drop(refused.insert(kind.plural())),
            Err(error) => return Err(error.into()),
        }
    }
    if !refused.is_empty() {
        let all: Vec<_> = refused.into_iter().collect();
        bail!(
            "it does not let this user list {}; expected the verb list on them in all namespaces, \
             and on pods, networks, ips, publickeies and nodes to see more: the chart's ClusterRole \
             weft-status has all of these",
            all.join(", ")
        );
    }
    // Definitions, and what users made, outlive weft.
    let is_ours = |of: &ObjectRef| matches!(of.kind, Kind::NodeConfig | Kind::GatewayConfig);
    let is_empty = !snapshot.objects.keys().any(is_ours);
    let is_idle = |pods: &Pods| pods.is_empty() || !is_defined && !pods.has_programs();
    if is_empty && leases.is_empty() && pods.as_ref().is_ok_and(is_idle) {
        return Ok(None);
    }
    for (kind, read) in more {
        match read {
            Ok(part) => merge(&mut snapshot, part),
            Err(error) if is_refused(&error, 404) => problems.extend(error.refusal()),
            Err(error) => problems.extend(unseen(kind, &error)),
        }
    }
    let found = match pods {
        Ok(pods) => pods.found(&snapshot),
        Err(error) => {
            problems.push(format!(
                "pods cannot be listed ({error:#}): what they have reported last is shown as it \
                 is, whether they still run or not"
            ));
            Found::default()
        }
    };
    problems.extend(found.problems);
    problems.extend(unread.map(|error| {
        format!(
            "leases cannot be listed ({error:#}), so that what gateways wait for is not shown, nor \
             what the fabric-controller cannot read; expected the verb list on leases.coordination.k8s.io"
        )
    }));
    problems.extend(listed_at.and_then(|now| unrenewed(&leases, now)));
    problems.extend(obstacles(&leases));
    problems.extend(held(&leases).flat_map(lease::repairs));
    let faults = held(&leases).flat_map(lease::faults).collect();
    fill_in(&mut snapshot, &faults);
    problems.extend(faults_of_id(&faults));
    let cluster_id = cluster_id(&snapshot);
    let found = Found { problems, cluster_id, ..found };
    snapshot.problems.sort();
    let mut observation = observe::observe(&snapshot, &found);
    observation.problems.extend(ungranted(&snapshot));
    observation.problems.extend(without_pod_cidr(&snapshot));
    Ok(Some(observation))
}

fn merge(into: &mut Snapshot, part: Snapshot) {
    into.objects.extend(part.objects);
    into.problems.extend(part.problems);
}

fn is_refused(error: &StoreError, as_code: u16) -> bool {
    let StoreError::List { source: ApiError::Refused { code, .. }, .. } = error else {
        return false;
    };
    *code == as_code
}

/// Adds faults from the Lease to gateways that report nothing yet: what they wait for, and conditions that the
/// API server has dropped, since Liqo's definitions have none.
fn fill_in(snapshot: &mut Snapshot, faults: &BTreeMap<String, String>) {
    for (reference, object) in &mut snapshot.objects {
        let Some(message) = faults.get(&reference.to_string()) else { continue };
        let Some(conditions) = object.conditions_mut(true) else { continue };
        let is_shown = |of: &Condition| [ACCEPTED, NODES_REACHABLE].contains(&of.type_.as_str());
        if !conditions.iter().any(is_shown) {
            conditions.push(Condition {
                type_: ACCEPTED.to_owned(),
                status: "False".to_owned(),
                reason: "Invalid".to_owned(),
                message: message.clone(),
                observed_generation: None,
                last_transition_time: Time(Timestamp::now()),
            });
        }
    }
}

/// Faults of the ConfigMap with the cluster's ID, which has no conditions, and may not be there.
fn faults_of_id(faults: &BTreeMap<String, String>) -> impl Iterator<Item = String> {
    let of_id = faults.iter().filter(|(object, _)| object.starts_with("ConfigMap "));
    of_id.map(|(object, fault)| format!("{object}: {fault}"))
}

/// `None` for Nodes and the ConfigMap, whose content is available elsewhere, too.
fn unseen(kind: Kind, error: &StoreError) -> Option<String> {
    let is_reported = !matches!(kind, Kind::Node | Kind::ConfigMap);
    is_reported.then(|| {
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        format!(
            "{error}{cause}, so that nothing is shown of them; expected the verb list on {} in all namespaces",
            kind.plural()
        )
    })
}

fn cluster_id(snapshot: &Snapshot) -> Option<String> {
    let maps = snapshot.objects.values().filter_map(|object| <&ConfigMap>::try_from(object).ok());
    maps.filter_map(|map| check::cluster_id(map).ok()).map(|id| id.to_string()).next()
}

/// Networks and addresses that wait for ipam, and addresses of prefixes that are gone. The prefix of a
/// peering that is gone is only to be kept from others, and while it cannot be granted it is not free.
fn ungranted(snapshot: &Snapshot) -> Vec<String> {
    let granted = snapshot.objects.values().filter_map(|object| {
        let network = <&Network>::try_from(object).ok()?;
        network.status.as_ref()?.cidr.as_ref()
    });
    let granted: BTreeSet<_> = granted.collect();
    let waits = snapshot.objects.iter().filter_map(|(reference, object)| {
        let network = <&Network>::try_from(object).ok().filter(|_| !keeps_refused_prefix(object));
        if network.is_some_and(|x| x.status.as_ref().is_none_or(|s| s.cidr.is_none())) {
            return Some(format!("{reference}: no prefix is granted yet"));
        }
        let ip = <&IP>::try_from(object).ok()?;
        let Some((address, cidr)) = ip.status.as_ref().and_then(|s| s.ip.as_ref().zip(s.cidr.as_ref()))
        else {
            return Some(format!("{reference}: no address is granted yet"));
        };
        let is_lost = !granted.is_empty() && !granted.contains(cidr);
        is_lost.then(|| {
            format!(
                "{reference}: status.ip: found {address} of {cidr}, which no Network has; delete this IP, and \
                 create it again"
            )
        })
    });
    waits.collect()
}

/// A cluster whose Network of its pods was deleted: only the chart makes it.
fn without_pod_cidr(snapshot: &Snapshot) -> Option<String> {
    let kinds = snapshot.objects.values().filter_map(|object| {
        <&Network>::try_from(object).ok()?;
        object.label(labels::NETWORK_TYPE)
    });
    let kinds: Vec<_> = kinds.collect();
    let is_missing = !kinds.is_empty() && !kinds.contains(&"pod-cidr");
    is_missing.then(|| {
        "found no Network with label ipam.liqo.io/network-type=pod-cidr; expected one for each prefix of this \
         cluster's pods (`helm upgrade` of weft makes them)"
            .to_owned()
    })
}

/// Obstacles that the working controller has written into its Lease.
fn obstacles(leases: &[Lease]) -> Option<String> {
    let obstacles = held(leases).find_map(lease::obstacles)?;
    Some(format!("fabric-controller: changes have no effect: {obstacles}"))
}

/// Names a controller whose processes run and do not reach the API server, or whose credentials it refuses. Both times
/// are by clocks of API servers. A withdrawal locks the Lease for longer.
fn unrenewed(leases: &[Lease], now: Timestamp) -> Option<String> {
    let of = held(leases).next()?;
    let writers = of.metadata.managed_fields.iter().flatten();
    let renews = |of: &&ManagedFieldsEntry| {
        of.fields_v1.as_ref().is_some_and(|fields| fields.0["f:spec"]["f:renewTime"].is_object())
    };
    let limit = of.spec.as_ref()?.lease_duration_seconds.unwrap_or_default();
    let renewed = writers.filter(renews).filter_map(|of| of.time.as_ref()).map(|at| at.0).max()?;
    let seconds = now.duration_since(renewed).as_secs();
    let namespace = of.metadata.namespace.as_deref().unwrap_or_default();
    let program = format!("-n {namespace} -l {}=fabric-controller", labels::PROGRAM);
    (seconds > UNRENEWED.max(limit.into())).then(|| {
        format!(
            "fabric-controller: changes have no effect: its Lease has not been renewed for {seconds} s; see \
             `kubectl logs {program}`; if its ServiceAccount was made anew, its pods have credentials that are \
             refused: `kubectl rollout restart deployment,daemonset -n {namespace} -l {DEPLOYED}`"
        )
    })
}

/// Leases of working controllers.
fn held(leases: &[Lease]) -> impl Iterator<Item = &Lease> {
    leases.iter().filter(|lease| lease.spec.as_ref().is_some_and(|s| s.holder_identity.is_some()))
}

/// Leases of controllers.
#[derive(Default)]
struct Leases {
    all: Vec<Lease>,
    /// Time by the clock of the API server.
    listed_at: Option<Timestamp>,
}

async fn leases(store: &Store) -> anyhow::Result<Leases> {
    let client = store.api_server().context("no API server")?.client;
    let named = ListParams::default().fields(&format!("metadata.name={}", lease::NAME));
    let request = Request::new(Lease::url_path(&(), None)).list(&named)?.map(Body::from);
    timeout(REQUEST, async {
        let response = client.send(request).await?;
        let status = response.status();
        let date = response.headers().get(DATE).and_then(|date| date.to_str().ok());
        let listed_at = date.and_then(|date| rfc2822::parse(date).ok()).map(|at| at.timestamp());
        let answer = response.into_body().collect_bytes().await?;
        if !status.is_success() {
            let refusal: Result<Status, _> = serde_json::from_slice(&answer);
            bail!(refusal.map_or_else(|_| status.to_string(), |refusal| refusal.message));
        }
        let list: ObjectList<Lease> = serde_json::from_slice(&answer)?;
        Ok(Leases { all: list.items, listed_at })
    })
    .await
    .context("no answer")?
}

/// Reads the pods of weft, and the Deployments that make them.
async fn pods(store: &Store) -> anyhow::Result<Pods> {
    let client = store.api_server().context("no API server")?.client;
    let labelled = |labels: &str| ListParams::default().labels(labels);
    let selections = [labels::PROGRAM, pods::GATEWAYS, DEPLOYED].map(labelled);
    let (programs, gateways, deployments) = tokio::join!(
        listed::<Pod>(&client, &selections[0]),
        listed::<Pod>(&client, &selections[1]),
        listed::<Deployment>(&client, &selections[2]),
    );
    // Access to pods alone shows nearly as much.
    let deployments = deployments.unwrap_or_default();
    Ok(Pods::new(deployments, programs?, gateways?))
}

async fn listed<T>(client: &Client, selection: &ListParams) -> anyhow::Result<Vec<T>>
where
    T: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let all = Api::<T>::all(client.clone());
    match timeout(REQUEST, all.list(selection)).await.context("no answer")? {
        Ok(list) => Ok(list.items),
        // All but its message is for programs.
        Err(kube::Error::Api(refusal)) => bail!(refusal.message),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lease_that_is_not_renewed_is_named() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        let lease = |holder: Option<&str>| -> Lease {
            // The clock of the controller's node is an hour behind.
            let spec = json!({"holderIdentity": holder, "renewTime": format!("{:.6}", at(-3600))});
            let by = |field: &str, second: i64| {
                let fields = json!({"f:spec": {field: {}}});
                json!({"manager": field, "fieldsV1": fields, "time": at(second).to_string()})
            };
            let written =
                [by("f:renewTime", -900), by("f:renewTime", 0), by("f:leaseTransitions", 50)];
            let metadata =
                json!({"name": lease::NAME, "namespace": "liqo", "managedFields": written});
            serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
        };
        let held = [lease(Some("h"))];
        assert_eq!(unrenewed(&held, at(60)), None);
        let found = unrenewed(&held, at(61)).unwrap();
        assert!(found.contains("has not been renewed for 61 s"), "{found}");
        assert_eq!(unrenewed(&[lease(None)], at(90)), None, "its successor is not there yet");
    }
}
