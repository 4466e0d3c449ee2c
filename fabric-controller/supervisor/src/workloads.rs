//! Processes that a host should run, and their arguments.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use fabric_api::fabric::GatewayConfig;
use fabric_index::ProbeArgs;

use super::process::{Role, Spec};
use super::rundir::{REFUSAL_FILE, Record, RunDir, short_hash};

/// Specs by process name, which also names the pid file, log and socket.
pub type Wanted = BTreeMap<String, Spec>;

/// Gateways, by namespace and name.
pub type Gateways = BTreeSet<(String, String)>;

/// What is passed on to the controller and to ipam.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ControlOptions {
    /// Prefixes that ipam grants from, separated by commas [default: ipam's own, the private
    /// ones].
    #[arg(long, value_name = "CIDRS")]
    pools: Option<String>,
    /// Give packets of pods, too, their node's external address.
    #[arg(long)]
    full_masquerade: bool,
    /// Once a peering is gone, refuse and reserve its prefixes until nothing was sent to them for so
    /// many seconds [default: 300].
    #[arg(long, value_name = "SECONDS")]
    refuse_for: Option<u32>,
    #[command(flatten)]
    probe: ProbeArgs,
}

/// What is passed on to the route-agent.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct AgentOptions {
    /// Leave other programs' FORWARD and INPUT chains alone, even if they drop by policy.
    #[arg(long)]
    no_accept_rules: bool,
}

/// Switches passed on to every gateway.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct GatewayOptions {
    /// Switch for every gateway, to turn an offload off that the host or the path does badly, or the
    /// vectors of its cipher: `--gateway-arg=--no-gso`. May be repeated.
    #[arg(
        long = "gateway-arg",
        value_name = "SWITCH",
        allow_hyphen_values = true,
        value_parser = [
            "--no-gso", "--no-gro", "--no-tun-offload", "--cipher=ring", "--cipher=avx2", "--cipher=avx512",
        ]
    )]
    switches: Vec<String>,
}

/// Log options of all processes.
#[derive(Clone, Debug, clap::Args)]
pub struct ChildLogs {
    /// How the processes write their logs.
    #[arg(long, value_name = "FORMAT", default_value = "plain", value_parser = ["plain", "json"])]
    log_format: String,
    /// How much they write: error, warn, info, debug or trace, also by module [default: RUST_LOG,
    /// else info].
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
}

/// Common settings of the processes of one host.
#[derive(Clone, Debug)]
pub struct Workloads {
    /// The folder of weft's own binary and its siblings.
    pub programs: PathBuf,
    pub dir: RunDir,
    pub record: Record,
    pub control: ControlOptions,
    pub agent: AgentOptions,
    pub gateway: GatewayOptions,
    pub logs: ChildLogs,
}

/// The folder that this binary and its siblings are in.
pub fn programs() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot tell where weft itself is")?;
    own.parent().map(Path::to_owned).with_context(|| format!("{} is in no folder", own.display()))
}

/// Fails unless each program is next to weft.
pub fn check_programs(folder: &Path, names: &[&str]) -> anyhow::Result<()> {
    let missing: Vec<_> =
        names.iter().filter(|name| !folder.join(name).is_file()).copied().collect();
    ensure!(
        missing.is_empty(),
        "{} not found in {}; expected next to weft itself: install all programs of one release \
         into one folder",
        missing.join(", "),
        folder.display()
    );
    Ok(())
}

pub fn agent_process(node: &str) -> String {
    format!("route-agent-{node}")
}

pub fn gateway_process(namespace: &str, name: &str) -> String {
    format!("gateway-{namespace}-{name}")
}

/// The process of each gateway that this node runs. Two pairs of namespace and name that would make
/// the same name (`a-b`/`c` and `a`/`b-c`) are distinguished by a hash.
pub fn gateways_of<'a>(
    node: &str,
    configs: impl IntoIterator<Item = &'a GatewayConfig>,
) -> BTreeMap<String, &'a GatewayConfig> {
    let mut named = BTreeMap::new();
    for config in configs {
        if config.spec.overlay.node.as_deref().is_some_and(|runs_on| runs_on != node) {
            continue;
        }
        let (namespace, name) = names(config);
        let mut process = gateway_process(namespace, name);
        if named.contains_key(&process) {
            process = format!("{process}-{}", short_hash(&format!("{namespace}/{name}")));
        }
        named.insert(process, config);
    }
    named
}

pub fn names(config: &GatewayConfig) -> (&str, &str) {
    let meta = &config.metadata;
    (meta.namespace.as_deref().unwrap_or_default(), meta.name.as_deref().unwrap_or_default())
}

impl Workloads {
    /// Processes of `weft up`: controller, ipam, agent, and a gateway for each published config
    /// that is this node's.
    pub fn of_up<'a>(&self, configs: impl IntoIterator<Item = &'a GatewayConfig>) -> Wanted {
        let ipam_address = socket(&self.dir.ipam_socket());
        let node = &self.record.node;
        let mut ipam = self.store_args();
        ipam.extend([arg("--listen"), ipam_address.clone()]);
        ipam.extend(self.control.pools.iter().flat_map(|pools| [arg("--pools"), arg(pools)]));
        let mut controller = self.store_args();
        controller.extend([arg("--ipam"), ipam_address, arg("--node"), arg(node)]);
        controller.extend(self.control.full_masquerade.then(|| arg("--full-masquerade")));
        if let Some(seconds) = self.control.refuse_for {
            controller.extend([arg("--refuse-for"), arg(&seconds.to_string())]);
        }
        controller.extend(self.control.probe.to_args().map(OsString::from));
        let mut wanted = Wanted::new();
        for (program, mut args) in [("ipam", ipam), ("fabric-controller", controller)] {
            args.extend(self.http_args(program));
            wanted.insert(program.to_owned(), self.spec(program, Role::Control, args));
        }
        wanted.extend(self.of_agent());
        for (process, config) in gateways_of(node, configs) {
            let spec = self.gateway(&process, config);
            wanted.insert(process, spec);
        }
        wanted
    }

    /// Processes of `weft agent`.
    pub fn of_agent(&self) -> Wanted {
        let mut args = vec![arg("run")];
        args.extend(match &self.record.published {
            Some(published) => vec![arg("--published"), published.into()],
            None => self.store_args(),
        });
        let node = &self.record.node;
        args.extend([arg("--node"), arg(node)]);
        args.extend(self.http_args(&agent_process(node)));
        args.extend(self.agent.no_accept_rules.then(|| arg("--no-accept-rules")));
        if let Some(state) = &self.record.state_dir {
            args.extend([arg("--refusal-file"), state.join(REFUSAL_FILE).into()]);
        }
        let spec = self.spec("route-agent", Role::Agent, args);
        Wanted::from([(agent_process(node), spec)])
    }

    fn gateway(&self, process: &str, config: &GatewayConfig) -> Spec {
        let (namespace, name) = names(config);
        let role = Role::Gateway { namespace: namespace.to_owned(), name: name.to_owned() };
        let mut args = self.store_args();
        args.extend([
            arg("--namespace"),
            arg(namespace),
            arg("--name"),
            arg(name),
            arg("--standalone"),
        ]);
        args.extend(self.gateway.switches.iter().map(OsString::from));
        args.extend(self.http_args(process));
        self.spec("gateway", role, args)
    }

    fn spec(&self, program: &str, role: Role, args: Vec<OsString>) -> Spec {
        let mut log_args = vec![arg("--log-format"), arg(&self.logs.log_format)];
        if let Some(level) = &self.logs.log_level {
            log_args.extend([arg("--log-level"), arg(level)]);
        }
        Spec { program: self.programs.join(program), args, log_args, role }
    }

    /// Arguments by which a process serves metrics and probes.
    fn http_args(&self, process: &str) -> [OsString; 2] {
        [arg("--http"), socket(&self.dir.http_socket(process))]
    }

    fn store_args(&self) -> Vec<OsString> {
        let mut args = Vec::new();
        if let Some(manifests) = &self.record.manifests {
            args.extend([arg("--manifests"), manifests.into()]);
        }
        args.extend([arg("--run-dir"), self.dir.path().into()]);
        if let Some(state) = &self.record.state_dir {
            args.extend([arg("--state-dir"), state.into()]);
        }
        args
    }
}

fn arg(text: &str) -> OsString {
    text.into()
}

/// `unix:PATH`
fn socket(path: &Path) -> OsString {
    let mut address = OsString::from("unix:");
    address.push(path);
    address
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A config as a controller would publish it, in namespace `namespace`, for node `node`.
    fn config(namespace: &str, name: &str, node: &str) -> GatewayConfig {
        let spec = serde_json::from_value(serde_json::json!({
            "clusterId": "rome", "peerClusterId": "milan", "role": "Client", "gatewayUid": "u",
            "secretName": "gw-keys", "mtu": 1340,
            "tunnelAddress": "169.254.18.2", "peerTunnelAddress": "169.254.18.1",
            "remaps": [{"kind": "Pod", "remote": "10.200.0.0/16", "local": "10.201.0.0/16"}],
            "podCidrs": ["10.200.0.0/16"], "externalCidrs": ["10.70.0.0/16"],
            "overlay": {"address": "10.80.0.2", "node": node},
            "nodes": [],
            "probe": {"enabled": true, "intervalMs": 2000, "lossThreshold": 5},
        }));
        let mut config = GatewayConfig::new(name, spec.unwrap());
        config.metadata.namespace = Some(namespace.to_owned());
        config
    }

    #[test]
    fn a_gateway_runs_on_its_own_node_only() {
        let configs = [config("t", "here", "n1"), config("t", "there", "n2")];
        let processes: Vec<_> = gateways_of("n1", &configs).into_keys().collect();
        assert_eq!(processes, ["gateway-t-here"]);
    }

    #[test]
    fn gateway_switches_are_passed_on_and_others_refused() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            options: GatewayOptions,
        }
        let parse = |line: &[&str]| <Line as clap::Parser>::try_parse_from(line);
        let line = ["up", "--gateway-arg=--no-gso", "--gateway-arg", "--no-tun-offload"];
        let options = parse(&line).unwrap().options;
        assert!(parse(&["up", "--gateway-arg=--no-gs"]).is_err());
        let record = Record {
            cluster_id: None,
            node: "n1".to_owned(),
            manifests: None,
            state_dir: None,
            published: None,
            netns: 0,
        };
        let workloads = Workloads {
            programs: "/p".into(),
            dir: RunDir::at(Path::new("/r")).unwrap(),
            record,
            control: ControlOptions::default(),
            agent: AgentOptions::default(),
            gateway: options,
            logs: ChildLogs { log_format: "plain".to_owned(), log_level: None },
        };
        let wanted = workloads.of_up(&[config("t", "gw", "n1")]);
        let args = &wanted["gateway-t-gw"].args;
        let switches: Vec<_> =
            args.iter().filter(|arg| arg.to_string_lossy().starts_with("--no-")).collect();
        assert_eq!(switches, ["--no-gso", "--no-tun-offload"]);
        assert!(!wanted["fabric-controller"].args.contains(&OsString::from("--no-gso")));
    }

    #[test]
    fn colliding_names_get_a_hash() {
        let configs = [config("a-b", "c", "n1"), config("a", "b-c", "n1")];
        let named = gateways_of("n1", &configs);
        assert_eq!(named.len(), 2);
        assert_eq!(names(named["gateway-a-b-c"]), ("a-b", "c"));
    }
}
