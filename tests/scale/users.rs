//! Users of the API server, by which its audit log distinguishes requests, and what they write.

use anyhow::{Context as _, Result};
use api_server::ApiServer;
use fabric_store::Store;
use kube::api::{ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::Value;

use crate::manifests::Peer;

/// A user of the API server: service accounts, but for kubelets and the user that applies the peerings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    Admin,
    Controller,
    Ipam,
    RouteAgent,
    Gateway(Peer),
    Kubelet,
    /// Controller of the pods that are no gateways.
    Workloads,
}

impl User {
    /// The name in the audit log; `None` for the one that impersonates no other.
    pub(crate) fn name(self) -> Option<String> {
        let account = |name: &str| Some(format!("system:serviceaccount:liqo:{name}"));
        match self {
            Self::Admin => None,
            Self::Controller => account("liqo-fabric-controller"),
            Self::Ipam => account("liqo-ipam"),
            Self::RouteAgent => account("liqo-route-agent"),
            Self::Gateway(peer) => {
                let (namespace, gateway) = (peer.namespace(), peer.gateway());
                Some(format!("system:serviceaccount:{namespace}:gw-{gateway}"))
            }
            Self::Kubelet => Some("system:node:simulated".to_owned()),
            Self::Workloads => {
                Some("system:serviceaccount:kube-system:replicaset-controller".into())
            }
        }
    }

    /// The name in [`crate::RequestCount`].
    pub fn program(self) -> String {
        let name = self.name().unwrap_or_else(|| "admin".to_owned());
        match self {
            Self::Gateway(_) => "gateways".to_owned(),
            Self::Kubelet | Self::Admin => name,
            Self::Controller | Self::Ipam | Self::RouteAgent | Self::Workloads => {
                name.rsplit(':').next().unwrap_or_default().to_owned()
            }
        }
    }

    pub(crate) fn kubeconfig(self, server: &ApiServer) -> std::path::PathBuf {
        self.name().map_or_else(|| server.admin(), |name| server.user(&name))
    }

    /// A store of its own connections. Must be called within a tokio runtime.
    pub(crate) fn store(self, server: &ApiServer) -> Result<Store> {
        let kubeconfig = self.kubeconfig(server);
        Store::kubernetes(Some(&kubeconfig)).context("cannot use the API server")
    }

    pub(crate) fn client(self, server: &ApiServer) -> Result<Client> {
        let api_server = self.store(server)?.api_server();
        Ok(api_server.context("the store is no API server")?.client)
    }
}

/// Writes objects as their manifests have them.
#[derive(Clone)]
pub(crate) struct Writer(pub(crate) Client);

impl Writer {
    /// Server-side apply, as kubectl does.
    pub(crate) async fn apply(&self, object: &Value) -> Result<()> {
        let (api, name) = self.api(object)?;
        let parameters = PatchParams::apply("kubectl").force();
        let written = api.patch(&name, &parameters, &Patch::Apply(object)).await;
        written.map(drop).with_context(|| format!("cannot apply {} {name}", object["kind"]))
    }

    /// Merges a patch into the object of that manifest.
    pub(crate) async fn merge(&self, object: &Value, patch: &Value) -> Result<()> {
        let (api, name) = self.api(object)?;
        let written = api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await;
        written.map(drop).with_context(|| format!("cannot patch {} {name}", object["kind"]))
    }

    pub(crate) async fn merge_status(&self, object: &Value, status: &Value) -> Result<()> {
        let (api, name) = self.api(object)?;
        let patch = Patch::Merge(serde_json::json!({"status": status}));
        let written = api.patch_status(&name, &PatchParams::default(), &patch).await;
        written
            .map(drop)
            .with_context(|| format!("cannot patch status of {} {name}", object["kind"]))
    }

    pub(crate) async fn delete(&self, object: &Value) -> Result<()> {
        let (api, name) = self.api(object)?;
        let deleted = api.delete(&name, &DeleteParams::default()).await;
        deleted.map(drop).with_context(|| format!("cannot delete {} {name}", object["kind"]))
    }

    fn api(&self, object: &Value) -> Result<(Api<DynamicObject>, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
        let (group, version) = version.split_once('/').unwrap_or(("", &version));
        let gvk = GroupVersionKind::gvk(group, version, &kind);
        let resource = match kind.as_str() {
            // Liqo's own plural.
            "PublicKey" => ApiResource::from_gvk_with_plural(&gvk, "publickeies"),
            _ => ApiResource::from_gvk(&gvk),
        };
        let metadata = &object["metadata"];
        let api = match metadata["namespace"].as_str() {
            Some(namespace) => Api::namespaced_with(self.0.clone(), namespace, &resource),
            None => Api::all_with(self.0.clone(), &resource),
        };
        Ok((api, metadata["name"].as_str().context("an object without name")?.to_owned()))
    }
}
