use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use ipnet::IpNet;
use serde_json::{Value, json};

use super::image::PREVIOUS;
use super::machine::TIMEOUT;
use super::{ADMIN, DIR, Kubernetes, Object};
use crate::{ClusterSpec, View, bin_dir, previous_dir};

/// Namespace in which tools made for Liqo look for it.
pub(super) const NAMESPACE: &str = "liqo";
const RELEASE: &str = "weft";
/// Time for which nodes refuse packets to peers when weft is uninstalled.
pub const LINGER: Duration = Duration::from_secs(8);
const CONTROLLER: &str = "liqo-fabric-controller";
const WORKLOADS: [&str; 3] =
    ["deployment/liqo-ipam", "deployment/liqo-fabric-controller", "daemonset/liqo-route-agent"];

/// weft in a cluster, from the image [`super::WEFT`].
impl Kubernetes {
    /// Installs the chart and waits until all that it starts is ready.
    pub fn install_weft(&self, at_most: Duration) -> Result<()> {
        self.install_weft_with(&[], at_most)
    }

    /// The same with more arguments of helm.
    pub fn install_weft_with(&self, more: &[&str], at_most: Duration) -> Result<()> {
        self.release("install", &deploy()?.join("chart"), more)?;
        self.name_ipam()?;
        self.wait_for_weft(at_most)
    }

    /// Installs an earlier version by its own chart.
    pub fn install_previous_weft(&self, at_most: Duration) -> Result<()> {
        let tag = format!("tag={PREVIOUS}");
        self.release("install", &previous_dir()?.join("deploy/chart"), &["--set", &tag])?;
        self.name_ipam()?;
        self.wait_for_weft(at_most)
    }

    /// Upgrades that to today's, as the operations guide has it.
    pub fn upgrade_weft(&self, at_most: Duration) -> Result<()> {
        let chart = deploy()?.join("chart");
        self.release("upgrade", &chart, &[])?;
        let crds = chart.join("crds").display().to_string();
        let apply = ["apply", "--server-side", "--force-conflicts", "--filename", &crds];
        self.kubectl(&apply)?;
        self.wait_for_weft(at_most)
    }

    fn release(&self, verb: &str, chart: &Path, more: &[&str]) -> Result<()> {
        let mut helm = self.tool("helm");
        helm.args([verb, RELEASE]).arg(chart).args(more);
        helm.args(["--namespace", &self.namespace, "--values", "-"]);
        helm.args((verb == "install").then_some("--create-namespace"));
        self.head().host.command(&mut helm, &values(&self.spec).to_string()).map(drop)
    }

    /// Changes one value of the release, such as `withdrawal.keepPrefixes=true`.
    pub fn set_weft(&self, value: &str) -> Result<()> {
        let chart = deploy()?.join("chart").display().to_string();
        let line = ["upgrade", RELEASE, &chart, "--namespace", &self.namespace];
        self.helm(&[&line[..], &["--reuse-values", "--set", value]].concat()).map(drop)
    }

    /// Uninstalls the chart, and waits until what it consists of is gone.
    pub fn uninstall_weft(&self, at_most: Duration) -> Result<()> {
        let timeout = format!("--timeout={}s", at_most.as_secs());
        let line = ["uninstall", RELEASE, "--namespace", &self.namespace, "--wait", &timeout];
        self.helm(&line).map(drop).with_context(|| {
            let job = "logs job/liqo-withdrawal --all-pods --prefix --namespace=";
            let logs = self.output(&format!("{job}{}", self.namespace));
            format!("uninstalling weft of {}: {logs}", self.spec.id)
        })
    }

    /// Waits until all that the chart starts is ready.
    pub fn wait_for_weft(&self, at_most: Duration) -> Result<()> {
        let timeout = format!("--timeout={}s", at_most.as_secs());
        WORKLOADS.iter().try_for_each(|workload| {
            let status = ["rollout", "status", workload, "--namespace", &self.namespace, &timeout];
            let what = || format!("waited {at_most:?} for {workload} of {}", self.spec.id);
            self.kubectl(&status).map(drop).with_context(what)
        })
    }

    /// Waits until the Connection of a GatewayServer or GatewayClient is Connected.
    pub fn wait_connected(&self, peer: &str, gateway: &str, at_most: Duration) -> Result<()> {
        let (namespace, name) = (format!("liqo-tenant-{peer}"), format!("gw-{gateway}"));
        let connection = Object::new("connection", &namespace, &name);
        self.wait_for(connection, "jsonpath={.status.value}=Connected", at_most)
    }

    /// Output of `weft status`, whether all is well or not.
    pub fn status(&self) -> Result<Value> {
        self.status_and_code().map(|(status, _)| status)
    }

    /// Output of `weft status` with its exit code: 0, or 3 if some peering is not connected.
    pub fn status_and_code(&self) -> Result<(Value, u8)> {
        let weft = bin_dir()?.join("weft");
        let mut shell = Command::new("sh");
        shell.env("KUBECONFIG", format!("{DIR}/{ADMIN}"));
        let script = "timeout 20 \"$0\" status --kubernetes -o json; code=$?; echo; echo $code; \
                      [ $code = 0 ] || [ $code = 3 ]";
        shell.args(["-c", script]).arg(weft);
        let text = self.head().host.command(&mut shell, "")?;
        let (status, code) = text.trim_end().rsplit_once('\n').context("no exit code")?;
        Ok((serde_json::from_str(status).context("weft status prints JSON")?, code.parse()?))
    }

    /// Exit code of `weft status`: 4 where weft is not installed.
    pub fn status_code(&self) -> Result<u8> {
        let mut shell = Command::new("sh");
        shell.env("KUBECONFIG", format!("{DIR}/{ADMIN}"));
        shell.args(["-c", "\"$0\" status --kubernetes >/dev/null; echo $?"]);
        let code = self.head().host.command(shell.arg(bin_dir()?.join("weft")), "")?;
        Ok(code.trim().parse()?)
    }

    /// Runs `weft adopt`; returns what it prints.
    pub fn adopt(&self, more: &[&str]) -> Result<String> {
        let mut weft = Command::new(bin_dir()?.join("weft"));
        weft.arg("adopt").args(more).arg(format!("--kubeconfig={DIR}/{ADMIN}"));
        self.head().host.command(&mut weft, "")
    }

    /// This cluster's view of the peer, from the status of its Configuration.
    pub fn view(&self, peer: &ClusterSpec) -> Result<View> {
        let namespace = format!("liqo-tenant-{}", peer.id);
        let configuration = Object::new("configuration", &namespace, &peer.id);
        View::read(&self.get(configuration)?, peer)
            .with_context(|| format!("how {} sees {}", self.spec.id, peer.id))
    }

    /// Everything that may explain the failure of a test.
    pub fn report(&self) -> String {
        let commands = [
            "get pods --all-namespaces --output=wide",
            "get events --all-namespaces --field-selector=type=Warning,reason!=MissingClusterDNS",
            "get gatewayconfigs,nodeconfigs --all-namespaces --output=yaml",
        ];
        let logs = "logs --selector=app.kubernetes.io/part-of=weft --prefix --tail=30 --namespace=";
        let logs =
            self.namespaces_of_weft().into_iter().map(|namespace| format!("{logs}{namespace}"));
        let commands = commands.map(str::to_owned).into_iter().chain(logs);
        let outputs: Vec<_> = commands.map(|command| self.output(&command)).collect();
        format!("{}\n{}", self.spec.id, outputs.join("\n"))
    }

    fn namespaces_of_weft(&self) -> Vec<String> {
        let tenants = "get namespaces --selector=liqo.io/tenant-namespace --output=jsonpath={.items[*].metadata.name}";
        let tenants = self.output(tenants);
        let tenants = tenants.split_whitespace();
        [self.namespace.as_str()].into_iter().chain(tenants).map(str::to_owned).collect()
    }

    fn output(&self, command: &str) -> String {
        let words: Vec<_> = command.split(' ').collect();
        self.kubectl(&words).unwrap_or_else(|error| format!("{error:#}"))
    }

    /// Logs of all programs in a namespace.
    pub fn logs(&self, namespace: &str, selector: &str) -> String {
        let logs = format!("logs --selector={selector} --prefix --tail=40 --namespace={namespace}");
        self.output(&logs)
    }

    /// Sets ipam's address for the controller, once that is installed: names of Services are in no
    /// DNS here.
    pub fn name_ipam(&self) -> Result<()> {
        let ipam = self.ipam_service()?;
        self.name_ipam_to(CONTROLLER, &ipam["spec"]["clusterIP"])
    }

    /// The Service of ipam, once it is there.
    pub(super) fn ipam_service(&self) -> Result<Value> {
        let service = Object::new("service", &self.namespace, "liqo-ipam");
        self.wait_for(service, "create", TIMEOUT)?;
        self.get(service)
    }

    /// Names ipam to the pods of a Deployment.
    pub(super) fn name_ipam_to(&self, deployment: &str, address: &Value) -> Result<()> {
        let namespace = self.namespace.as_str();
        self.wait_for(Object::new("deployment", namespace, deployment), "create", TIMEOUT)?;
        let names = ["", ".svc"].map(|end| format!("liqo-ipam.{namespace}{end}"));
        let aliases = json!([{"ip": address, "hostnames": names}]);
        let patch = json!({"spec": {"template": {"spec": {"hostAliases": aliases}}}}).to_string();
        let patch =
            ["patch", "deployment", deployment, "--namespace", namespace, "--patch", &patch];
        self.kubectl(&patch).map(drop)
    }
}

/// Folder `deploy` of this project. Cargo starts tests in the folder of their package.
pub fn deploy() -> Result<PathBuf> {
    std::fs::canonicalize("../deploy").context("not started in the folder `tests`")
}

fn values(spec: &ClusterSpec) -> Value {
    let texts = |cidrs: &[IpNet]| cidrs.iter().map(IpNet::to_string).collect::<Vec<_>>();
    let image = json!({"name": "localhost/weft"});
    let linger = format!("--linger={}", LINGER.as_secs());
    let is_v6 = |cidr: &&IpNet| cidr.addr().is_ipv6();
    json!({
        "tag": "test",
        "pullPolicy": "Never",
        "discovery": {"config": {"clusterID": spec.id}},
        "ipam": {
            "podCIDRs": texts(&spec.pod_cidrs),
            "serviceCIDR": texts(&spec.service_cidrs).first(),
            "externalCIDRv6":
                spec.external_cidrs.iter().find(is_v6).map_or(String::new(), IpNet::to_string),
            "internal": {"image": image},
        },
        // Five minutes by default.
        "controllerManager": {"image": image, "pod": {"extraArgs": ["--refuse-for=3"]}},
        "networking": {
            "gatewayTemplates": {"container": {"gateway": {"image": image}}},
            // A minute by default.
            "fabric": {"image": image, "pod": {"extraArgs": [linger]}},
        },
    })
}
