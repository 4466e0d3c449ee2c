//! Takes over a cluster whose network was Liqo's: `weft adopt`.
//!
//! Networks, IPs, Configurations, PublicKeys and Secrets stay as they are, without Liqo's finalizers,
//! which nobody serves any more. The Service and the Deployment of a gateway become the gateway's own, so
//! that node ports and addresses of load balancers stay, and Liqo's pods run until weft replaces them.
//! Only then Liqo's own objects go ([`plan`](plan::plan)). Every step is planned from what is
//! there, so that a run goes on where one before was interrupted, and a second one has nothing to do.

mod liqo_off;
mod plan;
mod rights;

use fabric_api::ipam::{IP, Network};
use fabric_api::labels;
use fabric_api::networking::{
    GatewayClient, GatewayServer, WgGatewayClientTemplate, WgGatewayServerTemplate,
};
use fabric_kube_client::requests::{Part, Requests, Target};
use fabric_kube_client::{ApiError, ApiServer};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::ResourceExt;
use kube::api::{ApiResource, DeleteParams, DynamicObject};
use serde_json::json;

use crate::liqo_networking::{FIREWALL, ROUTE, resource};
use crate::withdrawal::WithdrawError;
use crate::withdrawal::cluster::{Cluster, kind};
use plan::{Action, Found, Item, Step, held, plan};

/// Kinds of Liqo's fabric between nodes and gateways, dependents first.
const FABRIC: [[&str; 2]; 3] = [
    ["GeneveTunnel", "genevetunnels"],
    ["InternalFabric", "internalfabrics"],
    ["InternalNode", "internalnodes"],
];
const WG_GATEWAYS: [[&str; 2]; 2] =
    [["WgGatewayServer", "wggatewayservers"], ["WgGatewayClient", "wggatewayclients"]];
/// Value of the label of what Liqo's controllers make.
const LIQO: &str = "liqo";

#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    #[error(
        "{0} runs Liqo's networking; expected it to be off: run `helm upgrade liqo liqo/liqo --namespace {1} \
         --version 1.2.0 --reuse-values --set networking.enabled=false --wait` (connections stay), then \
         this again"
    )]
    NetworkingIsOn(String, String),
    #[error(
        "found Liqo in namespace {found}; expected it in {expected}, that of weft: run this again with \
         `--namespace {found}`"
    )]
    Elsewhere { found: String, expected: String },
    #[error(
        "this user lacks rights: {0}; expected them in all namespaces, as cluster-admin has them"
    )]
    Denied(String),
    #[error(
        "these are still there: {0}; expected nothing of Liqo's network: remove those finalizers, or have the \
         program remove them whose they are, then run this again"
    )]
    Held(String),
    #[error(transparent)]
    Read(#[from] WithdrawError),
    #[error("cannot change {object}; this may be run again at any time")]
    Write { object: String, source: ApiError },
}

/// Takes over, or reports only what that would change. `report` gets one line for each step that is
/// done. Returns the number of steps.
///
/// # Errors
///
/// The first change that failed, or the first error of `report`. The steps before it are done.
pub async fn adopt<E: From<AdoptError>>(
    server: &ApiServer,
    is_dry_run: bool,
    report: impl Fn(&str) -> Result<(), E>,
) -> Result<usize, E> {
    rights::ensure(server, is_dry_run).await?;
    let cluster = Cluster::new(server);
    liqo_off::ensure(&cluster).await?;
    is_liqos_namespace(&cluster, &server.namespace).await?;
    let found = find(&cluster).await.map_err(AdoptError::from)?;
    let steps = plan(&found, &server.namespace);
    let count = steps.len();
    let requests = server.requests();
    for step in steps {
        if !is_dry_run {
            run(&requests, &step).await?;
        }
        report(&step.to_string())?;
    }
    let left = if is_dry_run { found } else { find(&cluster).await.map_err(AdoptError::from)? };
    let held = held(&left);
    if held.is_empty() { Ok(count) } else { Err(AdoptError::Held(held.join("; ")).into()) }
}

/// Fails if Liqo is installed, or was, but in another namespace.
async fn is_liqos_namespace(cluster: &Cluster, namespace: &str) -> Result<(), AdoptError> {
    let (app, of_liqo) = (labels::APP_NAME, format!("{}={LIQO}", labels::PART_OF));
    for (kind, name) in
        [(kind::<Deployment>(), "controller-manager"), (kind::<ConfigMap>(), "clusterid-configmap")]
    {
        let found = cluster.list(&kind, &format!("{app}={name},{of_liqo}")).await?;
        let namespaces: Vec<_> = found.iter().filter_map(ResourceExt::namespace).collect();
        if namespaces.iter().any(|found| found == namespace) {
            return Ok(());
        }
        if let Some(found) = namespaces.into_iter().next() {
            return Err(AdoptError::Elsewhere { found, expected: namespace.to_owned() });
        }
    }
    Ok(())
}

async fn find(cluster: &Cluster) -> Result<Found, WithdrawError> {
    let mut found = Found {
        gateways: all(cluster, [kind::<GatewayServer>(), kind::<GatewayClient>()], "").await?,
        templates: {
            let kinds = [kind::<WgGatewayServerTemplate>(), kind::<WgGatewayClientTemplate>()];
            all(cluster, kinds, "").await?
        },
        wg_gateways: all(cluster, WG_GATEWAYS.map(resource), "").await?,
        rules: all(cluster, [FIREWALL, ROUTE].map(resource), "").await?,
        fabric: all(cluster, FABRIC.map(resource), "").await?,
        bindings: {
            let liqos = format!("{}={LIQO},{}", labels::MANAGED_BY, labels::GATEWAY_NAME);
            all(cluster, [kind::<ClusterRoleBinding>()], &liqos).await?
        },
        held: all(cluster, [kind::<Network>(), kind::<IP>()], "").await?,
        parts: Vec::new(),
        accounts: Vec::new(),
    };
    for (_, gateway) in &found.wg_gateways {
        let name = format!("gw-{}", gateway.name_any());
        let namespace = gateway.namespace().unwrap_or_default();
        for kind in [kind::<Service>(), kind::<Deployment>()] {
            let part = cluster.get(&kind, (&namespace, &name)).await?;
            found.parts.extend(part.map(|part| (kind, part)));
        }
        let kind = kind::<ServiceAccount>();
        let account = cluster.get(&kind, (&namespace, account(gateway))).await?;
        found.accounts.extend(account.map(|account| (kind, account)));
    }
    Ok(found)
}

/// Name of the account that Liqo has made for the pods of a gateway, or taken for its own.
fn account(wg_gateway: &DynamicObject) -> &str {
    let pod = &wg_gateway.data["spec"]["deployment"]["spec"]["template"]["spec"];
    pod["serviceAccountName"].as_str().filter(|name| !name.is_empty()).unwrap_or("default")
}

async fn all<const N: usize>(
    cluster: &Cluster,
    kinds: [ApiResource; N],
    labels: &str,
) -> Result<Vec<Item>, WithdrawError> {
    let mut all = Vec::new();
    for kind in kinds {
        let listed = cluster.list(&kind, labels).await?;
        all.extend(listed.into_iter().map(|object| (kind.clone(), object)));
    }
    Ok(all)
}

/// A change is refused if the object has changed since it was read.
async fn run(requests: &Requests, step: &Step<'_>) -> Result<(), AdoptError> {
    let (kind, object) = step.item;
    let target = Target::of(kind, &object.metadata);
    let done = match &step.action {
        Action::Merge(change) => {
            let mut change = change.clone();
            change["metadata"]["resourceVersion"] = json!(object.metadata.resource_version);
            requests.merge(&target, Part::AllButStatus, &change).await.map(drop)
        }
        Action::Delete => {
            let uid = object.metadata.uid.clone();
            requests.delete(&target, uid, DeleteParams::background()).await.map(drop)
        }
    };
    match done {
        Err(error) if target.is_absent(&error) => Ok(()),
        done => done.map_err(|source| AdoptError::Write { object: target.to_string(), source }),
    }
}
