//! Other writers to the API server.

use std::path::Path;
use std::time::Duration;

use fabric_api::crds;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::config::Kubeconfig;
use kube::{Api, Client, Config, ResourceExt as _};
use serde_json::{Value, json};

/// A kind that a test installs.
const MISSING: &str = "PublicKey";

pub(crate) struct Admin {
    client: Client,
}

impl Admin {
    pub(crate) fn new(kubeconfig: &Path) -> Self {
        let mut config = Config::try_from(Kubeconfig::read_from(kubeconfig).unwrap()).unwrap();
        config.proxy_url = None;
        Self { client: Client::try_from(config).unwrap() }
    }

    /// Makes the namespace of the installation, and all kinds but [`MISSING`] known, and waits until
    /// they are. What a Configuration holds,
    /// the server does not check: older definitions are no stricter.
    pub(crate) async fn define_everything(&self) {
        let liqo = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "liqo"}});
        self.apply("namespaces", &liqo).await;
        for crd in crds::liqo().into_iter().chain(crds::weft()) {
            let kind = crd.spec.names.kind.clone();
            let mut crd = serde_json::to_value(crd).unwrap();
            if kind == "Configuration" {
                let anything =
                    json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
                crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = anything;
            }
            if kind != MISSING {
                self.define(&crd).await;
            }
        }
    }

    pub(crate) async fn define(&self, crd: &Value) {
        self.apply("customresourcedefinitions", crd).await;
        let name = crd["metadata"]["name"].as_str().unwrap();
        loop {
            let defined = self.get("customresourcedefinitions", crd).await.unwrap();
            let conditions = defined.data["status"]["conditions"].as_array().cloned();
            let is = |c: &Value| c["type"] == "Established" && c["status"] == "True";
            if conditions.is_some_and(|conditions| conditions.iter().any(is)) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let group_resource = name.split_once('.').unwrap();
        let spec = &crd["spec"]["versions"][0]["name"];
        let path =
            format!("/apis/{}/{}/{}", group_resource.1, spec.as_str().unwrap(), group_resource.0);
        while self.raw(&path).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Applies as `kubectl apply --server-side` does, by a user called `tester`.
    pub(crate) async fn apply(&self, plural: &str, object: &Value) -> DynamicObject {
        let (api, name) = self.api(plural, object);
        let parameters = PatchParams::apply("tester").force();
        api.patch(&name, &parameters, &Patch::Apply(object)).await.unwrap()
    }

    pub(crate) async fn merge(&self, plural: &str, object: &Value, patch: &Value) -> DynamicObject {
        let (api, name) = self.api(plural, object);
        api.patch(&name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap()
    }

    pub(crate) async fn get(&self, plural: &str, object: &Value) -> Option<DynamicObject> {
        let (api, name) = self.api(plural, object);
        api.get_opt(&name).await.unwrap()
    }

    pub(crate) async fn delete(&self, plural: &str, object: &Value) {
        let (api, name) = self.api(plural, object);
        api.delete(&name, &Default::default()).await.unwrap();
    }

    /// Requests that the server has had for a resource, watches aside.
    pub(crate) async fn requests(&self, resource: &str) -> u64 {
        let metrics = self.raw("/metrics").await.unwrap();
        let of = |line: &&str| {
            line.starts_with("apiserver_request_total{")
                && line.contains(&format!("resource=\"{resource}\""))
                && !line.contains("verb=\"WATCH\"")
        };
        let counts = metrics.lines().filter(of).filter_map(|line| line.rsplit(' ').next());
        counts.map(|count| count.parse::<f64>().unwrap() as u64).sum()
    }

    async fn raw(&self, path: &str) -> kube::Result<String> {
        let request = kube::core::Request::new(path).list(&Default::default()).unwrap();
        self.client.request_text(request).await
    }

    fn api(&self, plural: &str, object: &Value) -> (Api<DynamicObject>, String) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let api_version = text(&object["apiVersion"]);
        let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
        let resource = ApiResource {
            group: group.to_owned(),
            version: version.to_owned(),
            api_version: api_version.clone(),
            kind: text(&object["kind"]),
            plural: plural.to_owned(),
        };
        let client = self.client.clone();
        let api = match object["metadata"]["namespace"].as_str() {
            Some(namespace) => Api::namespaced_with(client, namespace, &resource),
            None => Api::all_with(client, &resource),
        };
        (api, text(&object["metadata"]["name"]))
    }
}

/// Without what is new with every write.
pub(crate) fn version(object: &DynamicObject) -> String {
    object.resource_version().unwrap()
}
