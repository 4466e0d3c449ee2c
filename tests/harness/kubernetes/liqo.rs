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
/// The only name by which liqoctl finds it.
const RELEASE: &str = "liqo";
const IMAGE: &str = "localhost/liqo:test";
/// Programs: as they are built here, as images and programs are called there.
const PROGRAMS: [(&str, &str); 6] = [
    ("liqo-controller-manager", "liqo-controller-manager"),
    ("liqo-crd-replicator", "crd-replicator"),
    ("liqo-webhook", "webhook"),
    ("liqo-virtual-kubelet", "virtual-kubelet"),
    ("liqo-proxy", "proxy"),
    ("liqo-uninstaller", "uninstaller"),
];
const MANAGER: &str = "liqo-controller-manager";
const DEPLOYMENTS: [&str; 4] = [MANAGER, "liqo-crd-replicator", "liqo-webhook", "liqo-proxy"];

/// Programs of Liqo's own network: on its nodes and beside its controller, and, as images of their own,
/// in its gateways. VXLAN is between these in place of Geneve.
const OF_NETWORK: [(&str, &str); 2] = [("liqo-fabric-vxlan", "fabric"), ("liqo-ipam", "ipam")];
const OF_GATEWAYS: [(&str, &str); 3] = [
    ("liqo-gateway", "gateway"),
    ("liqo-gateway-wireguard", "gateway/wireguard"),
    ("liqo-gateway-geneve-vxlan", "gateway/geneve"),
];

/// Fails with what is missing here of Liqo, if anything is.
pub fn require_liqo() -> Result<()> {
    super::require_liqoctl()?;
    require_programs(&PROGRAMS)
}

/// The same of its own network.
pub fn require_liqo_network() -> Result<()> {
    require_liqo()?;
    require_programs(&OF_NETWORK)?;
    require_programs(&OF_GATEWAYS)
}

fn require_programs(programs: &[(&str, &str)]) -> Result<()> {
    let programs = programs.iter().map(|(name, _)| built(name)).chain([chart()]);
    let missing: Vec<_> = programs.filter(|path| !path.exists()).collect();
    ensure!(missing.is_empty(), "`make kubernetes` has not built {missing:?}");
    Ok(())
}

pub(super) fn chart() -> PathBuf {
    built(&format!("liqo-chart-{VERSION}"))
}

impl Kubernetes {
    /// Installs Liqo's chart and waits until all that it starts is ready.
    pub fn install_liqo(&self, at_most: Duration) -> Result<()> {
        self.install_liqo_with(&PROGRAMS, &self.liqo_values(), at_most)
    }

    /// The same with Liqo's own network, its WireGuard in userspace: this kernel may have none.
    pub fn install_liqo_network(&self, at_most: Duration) -> Result<()> {
        for (program, name) in OF_GATEWAYS {
            let own = format!("localhost/{program}:test");
            let image = Image::new(&own, &[]).entrypoint("/usr/bin/program");
            self.load(&image.file("/usr/bin/program", built(program)))?;
            self.name_image(&own, &[format!("ghcr.io/liqotech/{name}:v{VERSION}")])?;
        }
        let mut values = self.liqo_values();
        values["networking"] = json!({
            "enabled": true, "gatewayTemplates": {"wireguard": {"implementation": "userspace"}},
        });
        self.install_liqo_with(&[&PROGRAMS[..], &OF_NETWORK].concat(), &values, at_most)
    }

    /// Uninstalls Liqo's chart by helm, with more arguments of it.
    pub fn uninstall_liqo(&self, more: &[&str]) -> Result<()> {
        let line = ["uninstall", RELEASE, "--namespace", &self.namespace];
        self.helm(&[&line[..], more].concat()).map(drop)
    }

    fn install_liqo_with(
        &self,
        programs: &[(&str, &str)],
        values: &Value,
        at_most: Duration,
    ) -> Result<()> {
        let image = programs.iter().fold(Image::new(IMAGE, &[]), |image, (here, there)| {
            image.file(format!("/usr/bin/{there}"), built(here))
        });
        let image = image.file("/etc/nsswitch.conf", "/etc/nsswitch.conf");
        self.load(&image)?;
        let names = programs.iter().map(|(_, name)| format!("ghcr.io/liqotech/{name}:v{VERSION}"));
        let names: Vec<_> = names.collect();
        self.name_image(IMAGE, &names)?;
        let mut helm = self.tool("helm");
        helm.args(["install", RELEASE]).arg(chart());
        helm.args(["--namespace", &self.namespace, "--create-namespace", "--values", "-"]);
        self.head().host.command(&mut helm, &values.to_string())?;
        self.name_api_server()?;
        if values["networking"]["enabled"] == true {
            self.name_ipam_to_liqo()?;
        }
        let timeout = format!("--timeout={}s", at_most.as_secs());
        DEPLOYMENTS.iter().try_for_each(|name| {
            let deployment = format!("deployment/{name}");
            let status = ["rollout", "status", &deployment, "--namespace", &self.namespace];
            let what = || format!("waited {at_most:?} for {name} of {}", self.spec.id);
            self.kubectl(&[&status[..], &[&timeout]].concat()).map(drop).with_context(what)
        })
    }

    /// Gives Liqo's controller-manager the address of another Service of ipam's pods, which stays while Liqo's
    /// network is off: names of Services are in no DNS here, and with DNS it need not start again either when that
    /// is switched on.
    fn name_ipam_to_liqo(&self) -> Result<()> {
        let service = self.ipam_service()?;
        let ports = json!([{"port": service["spec"]["ports"][0]["port"]}]);
        let name = "ipam-by-name";
        let other = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"selector": service["spec"]["selector"], "ports": ports},
        });
        self.apply(&other.to_string())?;
        let other = self.get(Object::new("service", &self.namespace, name))?;
        self.name_ipam_to(MANAGER, &other["spec"]["clusterIP"])
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
