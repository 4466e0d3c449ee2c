//! Liqo's other modules, from Liqo's own chart, with its networking switched off.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;
use serde_json::{Value, json};

use super::machine::TIMEOUT;
use super::programs::built;
use super::{Image, Kubernetes, Object, control_plane};

/// The version that `make kubernetes` builds.
const VERSION: &str = "1.2.0";
/// The release beside that of weft, which is called like the namespace here.
const RELEASE: &str = "modules";
const IMAGE: &str = "localhost/liqo:test";
/// Programs: as they are built here, as images and programs are called there.
const PROGRAMS: [(&str, &str); 5] = [
    ("liqo-controller-manager", "liqo-controller-manager"),
    ("liqo-crd-replicator", "crd-replicator"),
    ("liqo-webhook", "webhook"),
    ("liqo-virtual-kubelet", "virtual-kubelet"),
    ("liqo-proxy", "proxy"),
];
const DEPLOYMENTS: [&str; 4] =
    ["liqo-controller-manager", "liqo-crd-replicator", "liqo-webhook", "liqo-proxy"];

/// Fails with what is missing here of Liqo, if anything is.
pub fn require_liqo() -> Result<()> {
    super::require_liqoctl()?;
    let programs = PROGRAMS.iter().map(|(name, _)| built(name)).chain([chart()]);
    let missing: Vec<_> = programs.filter(|path| !path.exists()).collect();
    ensure!(missing.is_empty(), "`make kubernetes` has not built {missing:?}");
    Ok(())
}

fn chart() -> PathBuf {
    built(&format!("liqo-chart-{VERSION}"))
}

impl Kubernetes {
    /// Installs Liqo's chart and waits until all that it starts is ready.
    pub fn install_liqo(&self, at_most: Duration) -> Result<()> {
        let programs = PROGRAMS.iter();
        let image = programs.fold(Image::new(IMAGE, &[]), |image, (here, there)| {
            image.file(format!("/usr/bin/{there}"), built(here))
        });
        self.load(&image)?;
        let names = PROGRAMS.map(|(_, name)| format!("ghcr.io/liqotech/{name}:v{VERSION}"));
        self.name_image(IMAGE, &names)?;
        let mut helm = self.tool("helm");
        helm.args(["install", RELEASE]).arg(chart());
        helm.args(["--namespace", &self.namespace, "--create-namespace", "--values", "-"]);
        self.head().host.command(&mut helm, &self.liqo_values().to_string())?;
        self.name_api_server()?;
        let timeout = format!("--timeout={}s", at_most.as_secs());
        DEPLOYMENTS.iter().try_for_each(|name| {
            let deployment = format!("deployment/{name}");
            let status = ["rollout", "status", &deployment, "--namespace", &self.namespace];
            let what = || format!("waited {at_most:?} for {name} of {}", self.spec.id);
            self.kubectl(&[&status[..], &[&timeout]].concat()).map(drop).with_context(what)
        })
    }

    fn liqo_values(&self) -> Value {
        let first = |cidrs: &[IpNet]| cidrs.first().map(IpNet::to_string);
        json!({
            "tag": format!("v{VERSION}"),
            "networking": {"enabled": false},
            "metricAgent": {"enabled": false},
            "telemetry": {"enabled": false},
            "storage": {"enabled": false},
            "apiServer": {"address": control_plane::url(&self.spec)},
            "discovery": {"config": {"clusterID": self.spec.id}},
            "ipam": {
                "podCIDR": first(&self.spec.pod_cidrs),
                "serviceCIDR": first(&self.spec.service_cidrs),
            },
        })
    }

    /// Names of Services are in no DNS here, and Liqo's proxy calls the API server by one.
    fn name_api_server(&self) -> Result<()> {
        let service = self.get(Object::new("service", "default", "kubernetes"))?;
        let proxy = Object::new("deployment", &self.namespace, "liqo-proxy");
        self.wait_for(proxy, "create", TIMEOUT)?;
        let name = "kubernetes.default.svc";
        let aliases = json!([{"ip": service["spec"]["clusterIP"], "hostnames": [name]}]);
        let patch = json!({"spec": {"template": {"spec": {"hostAliases": aliases}}}}).to_string();
        let namespace = self.namespace.as_str();
        let patch =
            ["patch", "deployment", proxy.name, "--namespace", namespace, "--patch", &patch];
        self.kubectl(&patch).map(drop)
    }
}
