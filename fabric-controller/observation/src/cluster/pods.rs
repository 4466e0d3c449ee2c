//! State of the running programs, from their pods and the time.

use std::collections::BTreeMap;

use fabric_api::fabric::{GatewayConfig, NodeConfig};
use fabric_api::labels;
use fabric_index::pod_start::Delay;
use fabric_store::{Kind, Snapshot};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ContainerState, Node, Pod};

use crate::observe::{Found, Life, Liveness};

pub(super) const GATEWAYS: &str = "networking.liqo.io/component=gateway";

/// Selector of the chart's Deployments.
pub(super) const DEPLOYED: &str = "app.kubernetes.io/part-of=weft";

/// Time that a pod may take to start.
const START: SignedDuration = SignedDuration::from_secs(30);

#[derive(Default)]
pub(super) struct Pods {
    /// The chart's Deployments, from which it is known what should run.
    pub(super) deployments: Vec<Deployment>,
    pub(super) programs: Vec<Pod>,
    pub(super) gateways: Vec<Pod>,
    /// Nodes that Kubernetes does not call ready, and its reason.
    lost_nodes: BTreeMap<String, String>,
}

/// Fault of a gateway whose pod still counts as ready: it takes three failed probes of the kubelet until that
/// is not, and 40 s for a node without its kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    /// No node gets an answer, its own among them.
    Hangs,
    /// Only its own node may.
    CutOff,
}

impl Pods {
    pub(super) fn new(
        deployments: Vec<Deployment>,
        programs: Vec<Pod>,
        gateways: Vec<Pod>,
    ) -> Self {
        Self { deployments, programs, gateways, lost_nodes: BTreeMap::new() }
    }

    /// Nothing of weft's runs, or is to run.
    pub(super) fn is_empty(&self) -> bool {
        !self.has_programs() && self.gateways.is_empty()
    }

    /// Anything of the chart's runs, or is to run.
    pub(super) fn has_programs(&self) -> bool {
        !self.deployments.is_empty() || !self.programs.is_empty()
    }

    pub(super) fn found(mut self, snapshot: &Snapshot) -> Found {
        self.lost_nodes = lost_nodes(snapshot);
        let agents = snapshot.objects.values().filter_map(|object| object.try_into().ok());
        let agents: Vec<&NodeConfig> = agents.collect();
        let configs = snapshot.objects.iter().filter_map(|(reference, object)| {
            Some((reference, <&GatewayConfig>::try_from(object).ok()?))
        });
        let lives = configs.map(|(reference, config)| {
            let namespace = reference.namespace.clone().unwrap_or_default();
            let life =
                self.gateway((&namespace, &reference.name), |host| silence(config, &agents, host));
            ((namespace, reference.name.clone()), life)
        });
        let gateways: BTreeMap<_, _> = lives.collect();
        let mut problems = self.problems();
        let nodes = snapshot.objects.keys().filter(|object| object.kind == Kind::NodeConfig);
        problems.extend(nodes.filter_map(|node| self.agent(&node.name)));
        Found { gateways, problems, ..Found::default() }
    }

    /// State of one gateway, by its pods and by its silence on the node that it is on.
    fn gateway(
        &self,
        (namespace, name): (&str, &str),
        silence: impl Fn(Option<&str>) -> Option<Silence>,
    ) -> Life {
        let of = |pod: &&Pod| {
            pod.metadata.namespace.as_deref() == Some(namespace)
                && label(pod, labels::GATEWAY_NAME) == Some(name)
        };
        let pods = || self.gateways.iter().filter(of);
        let best = best(pods());
        let who = format!("gateway {namespace}/{name}");
        let silence = best.and_then(|pod| silence(node(pod)));
        let (liveness, problem) = match best {
            None => (Liveness::Gone, Some(format!("{who}: it has no pod"))),
            Some(pod)
                if is_ready(pod)
                    && let Some(silence) = silence =>
            {
                (Liveness::Silent, Some(format!("{who}: {}", unanswering(pod, silence))))
            }
            Some(pod) if is_ready(pod) => {
                let stuck = pods().find(|pod| is_stuck(pod, Timestamp::now()));
                let therefore = "the one that is ready has no successor, and the next wave of \
                                 replacements waits for it";
                let problem =
                    stuck.map(|stuck| format!("{who}: {}; {therefore}", self.unready(stuck)));
                (Liveness::Answers, problem)
            }
            Some(pod) => {
                let liveness = if runs(pod) { Liveness::Silent } else { Liveness::Gone };
                (liveness, Some(format!("{who}: {}", self.unready(pod))))
            }
        };
        let active = pods().filter(|pod| label(pod, labels::ACTIVE) == Some("true"));
        let active = active.max_by_key(|pod| is_ready(pod)).or(best);
        Life { liveness, problem, node: active.and_then(node).map(str::to_owned) }
    }

    fn problems(&self) -> Vec<String> {
        // An ipam may be somebody else's, and elsewhere.
        let ipam = self.is_deployed("ipam");
        let all = [
            ("fabric-controller", true, "changes have no effect"),
            ("ipam", ipam, "nothing new gets a prefix or an address"),
        ];
        let problems = all.into_iter().filter_map(|(program, needed, therefore)| {
            let why = match best(self.of_program(program)) {
                None if needed => "it has no pod".to_owned(),
                Some(pod) if !is_ready(pod) => self.unready(pod),
                None | Some(_) => return None,
            };
            Some(format!("{program}: {why}; {therefore}"))
        });
        problems.collect()
    }

    fn agent(&self, name: &str) -> Option<String> {
        let here = self.of_program("route-agent").filter(|pod| node(pod) == Some(name));
        let why = match best(here) {
            Some(pod) if is_ready(pod) => return None,
            Some(pod) => self.unready(pod),
            None => "there is none".to_owned(),
        };
        Some(format!("node {name}: route-agent: {why}; the node stays as it was set up last"))
    }

    /// Reason for which a pod is not ready, and where to look.
    fn unready(&self, pod: &Pod) -> String {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let lost = node(pod).and_then(|node| Some((node, self.lost_nodes.get(node)?)));
        if let Some((node, why)) = lost {
            return format!(
                "pod {name} is not ready, as node {node} is not ({why}); see whether {node} is up and its \
                 network is connected, and `kubectl describe node {node}`"
            );
        }
        let status = pod.status.as_ref();
        let container = status.and_then(|s| s.container_statuses.as_ref()?.first()?.state.as_ref());
        let because = |type_| {
            let (status, why) = condition(pod, type_)?;
            why.filter(|_| status == "False").map(str::to_owned)
        };
        let why = container
            .and_then(stopped)
            .or_else(|| because("PodScheduled"))
            .or_else(|| status?.message.clone())
            .or_else(|| because("Ready"));
        let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
        format!("pod {name} is not ready{why}; see `kubectl describe pod -n {namespace} {name}`")
    }

    fn is_deployed(&self, program: &str) -> bool {
        self.deployments.iter().any(|deployment| {
            let selects = deployment.spec.selector.match_labels.as_ref();
            selects.and_then(|labels| labels.get(labels::PROGRAM)).is_some_and(|of| of == program)
        })
    }

    fn of_program<'a>(&'a self, program: &'a str) -> impl Iterator<Item = &'a Pod> {
        self.programs.iter().filter(move |pod| label(pod, labels::PROGRAM) == Some(program))
    }
}

/// Returns how a gateway on `host` is silent, if no node's route-agent but perhaps that of its own gets answers
/// while it reports none of them: of a path that fails, the gateway reports the node, too. One node alone may
/// have a fault of its own.
fn silence(gateway: &GatewayConfig, agents: &[&NodeConfig], host: Option<&str>) -> Option<Silence> {
    let is_unanswered = |agent: &&NodeConfig| {
        let mut reports = agent.status.iter().flat_map(|status| &status.unreachable_gateways);
        reports.any(|report| report.peer_cluster_id == gateway.spec.peer_cluster_id)
    };
    let reports_some = gateway.status.as_ref().is_some_and(|s| !s.unreachable_nodes.is_empty());
    let (own, others): (Vec<&NodeConfig>, Vec<&NodeConfig>) =
        agents.iter().partition(|agent| agent.metadata.name.as_deref() == host);
    if reports_some || others.is_empty() || !others.iter().all(is_unanswered) {
        return None;
    }
    match own.first() {
        Some(own) if !is_unanswered(own) => Some(Silence::CutOff),
        Some(_) => Some(Silence::Hangs),
        None => (others.len() > 1).then_some(Silence::Hangs),
    }
}

/// Nodes that Kubernetes does not call ready, and its reason.
fn lost_nodes(snapshot: &Snapshot) -> BTreeMap<String, String> {
    let nodes = snapshot.objects.iter().filter_map(|(reference, object)| {
        let conditions = <&Node>::try_from(object).ok()?.status.as_ref()?.conditions.as_ref()?;
        let ready = conditions.iter().find(|condition| condition.type_ == "Ready")?;
        let why = ready.message.as_deref().or(ready.reason.as_deref()).unwrap_or_default();
        (ready.status != "True").then(|| (reference.name.clone(), why.to_owned()))
    });
    nodes.collect()
}

/// Returns true of a pod that should be ready and does not start, or has not been ready for longer than one
/// takes to start.
fn is_stuck(pod: &Pod, now: Timestamp) -> bool {
    let is_due = !is_ready(pod) && pod.metadata.deletion_timestamp.is_none();
    if is_due && delay(pod).is_some_and(|delay| delay.is_fault(now)) {
        return true;
    }
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().find(|condition| condition.type_ == "Ready");
    let changed = ready.and_then(|ready| ready.last_transition_time.as_ref());
    let since = changed.or(pod.metadata.creation_timestamp.as_ref());
    let is_old = since.is_some_and(|since| now.duration_since(since.0) > START);
    is_due && is_old
}

/// Reason for which a pod has not started, as Kubernetes reports it.
fn delay(pod: &Pod) -> Option<Delay> {
    let status = pod.status.as_ref()?;
    let all = [&status.init_container_statuses, &status.container_statuses];
    let containers = all.into_iter().flatten().flatten();
    let waiting = containers.filter_map(|container| container.state.as_ref()?.waiting.as_ref());
    let waiting = waiting.map(|of| (of.reason.clone(), of.message.clone()));
    let conditions = status.conditions.iter().flatten();
    let unplaced = conditions.filter(|of| of.type_ == "PodScheduled" && of.status == "False");
    let all = waiting.chain(unplaced.map(|of| (of.reason.clone(), of.message.clone())));
    let since = pod.metadata.creation_timestamp.as_ref().map(|created| created.0);
    let delays = all.map(|(reason, message)| Delay {
        reason: reason.unwrap_or_default(),
        message: message.unwrap_or_default(),
        since,
    });
    Delay::first(delays)
}

/// Most informative pod: among those not being deleted, the one furthest in its start.
fn best<'a>(pods: impl Iterator<Item = &'a Pod>) -> Option<&'a Pod> {
    pods.max_by_key(|pod| (is_ready(pod), pod.metadata.deletion_timestamp.is_none(), runs(pod)))
}

fn label<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

fn runs(pod: &Pod) -> bool {
    let status = pod.status.as_ref();
    let containers = status.and_then(|status| status.container_statuses.as_ref());
    let state = containers.and_then(|all| all.first()?.state.as_ref());
    state.is_some_and(|state| state.running.is_some())
}

fn is_ready(pod: &Pod) -> bool {
    condition(pod, "Ready").is_some_and(|(status, _)| status == "True")
}

/// Its status, and why.
fn condition<'a>(pod: &'a Pod, type_: &str) -> Option<(&'a str, Option<&'a str>)> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == type_)?;
    let why = found.message.as_deref().or(found.reason.as_deref());
    Some((found.status.as_str(), why))
}

/// Symptom of a pod that is ready and silent, and where to look.
fn unanswering(pod: &Pod, silence: Silence) -> String {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let node = node(pod).unwrap_or_default();
    match silence {
        Silence::Hangs => format!(
            "pod {name} is ready, but answers no node over VXLAN; see `kubectl logs -n {namespace} {name}`; \
             if it hangs, `kubectl delete pod -n {namespace} {name}` replaces it"
        ),
        Silence::CutOff => format!(
            "pod {name} on {node} is ready, but no other node reaches it over VXLAN; see whether {node} is up \
             and its network is connected, and that UDP 4879 passes between it and the others"
        ),
    }
}

/// Reason for which a container does not run, if it does not.
fn stopped(state: &ContainerState) -> Option<String> {
    if let Some(waiting) = &state.waiting {
        let parts = [&waiting.reason, &waiting.message];
        let parts: Vec<_> = parts.into_iter().flatten().map(String::as_str).collect();
        return Some(parts.join(": "));
    }
    let ended = state.terminated.as_ref()?;
    let reason = ended.reason.as_deref().unwrap_or("ended");
    Some(format!("{reason}, exit code {}", ended.exit_code))
}

#[cfg(test)]
mod tests {
    use fabric_store::Object;
    use serde_json::{Value, json};

    use super::*;
    use crate::observe::tests::config;

    fn pod(labels: &Value, status: &Value) -> Pod {
        let created = status.get("created");
        let pod = json!({"metadata": {"name": "p", "namespace": "t", "labels": labels,
                "creationTimestamp": created},
            "spec": {"nodeName": "n1", "containers": []}, "status": status});
        serde_json::from_value(pod).unwrap()
    }

    fn containers(state: &Value) -> Value {
        json!([{"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "state": state}])
    }

    fn ready() -> Value {
        json!({"conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": containers(&json!({"running": {}}))})
    }

    fn failing() -> Value {
        let state = json!({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}});
        json!({"conditions": [{"type": "Ready", "status": "False", "reason": "x"}],
            "containerStatuses": containers(&state)})
    }

    fn silent() -> Value {
        json!({"conditions": [{"type": "Ready", "status": "False", "message": "unready: [c]"}],
            "containerStatuses": containers(&json!({"running": {}}))})
    }

    /// Pod whose container is being created, that many seconds old.
    fn created(seconds: i64) -> Value {
        let mut creating = failing();
        creating["containerStatuses"] =
            containers(&json!({"waiting": {"reason": "ContainerCreating"}}));
        let created = Timestamp::now() - SignedDuration::from_secs(seconds);
        creating["created"] = json!(created.to_string());
        creating
    }

    fn unplaced() -> Value {
        json!({"conditions": [{"type": "PodScheduled", "status": "False",
            "reason": "Unschedulable", "message": "no node fits"}]})
    }

    fn stuck() -> Value {
        let mut stuck = silent();
        stuck["conditions"][0]["lastTransitionTime"] = json!("2026-01-31T12:00:00Z");
        stuck
    }

    fn life(statuses: &[Value]) -> Life {
        let labels = json!({"networking.liqo.io/gateway-name": "server"});
        let gateways = statuses.iter().map(|status| pod(&labels, status)).collect();
        Pods { gateways, ..Pods::default() }.gateway(("t", "server"), |_| None)
    }

    fn agent_without_answers(name: &str, peer: &str) -> NodeConfig {
        let report = json!({"peerClusterId": peer, "since": "2026-01-31T12:00:00Z"});
        let config = json!({"metadata": {"name": name}, "spec": {"clusterId": "rome", "underlay": [],
            "localPods": [], "podCidrs": [], "external": [], "peerings": [], "vxlanSources": []},
            "status": {"unreachableGateways": [report]}});
        serde_json::from_value(config).unwrap()
    }

    #[test]
    fn ready_gateway_that_no_node_reaches_hangs() {
        let agents = [("n1", "paris"), ("n1", "oslo"), ("n2", "paris"), ("n2", "oslo")];
        let [n1, host, n2, other] = agents.map(|(name, peer)| agent_without_answers(name, peer));
        let mut gateway = config("t", "server", "n1");
        gateway.spec.peer_cluster_id = "paris".to_owned();
        let of =
            |gateway: &GatewayConfig, agents: &[&NodeConfig]| silence(gateway, agents, Some("n1"));
        assert_eq!(of(&gateway, &[&n1, &n2]), Some(Silence::Hangs));
        assert_eq!(of(&gateway, &[&n1, &other]), None, "a node reaches it");
        assert_eq!(of(&gateway, &[&n1]), None, "the node itself may have a fault");
        assert_eq!(of(&gateway, &[&host, &n2]), Some(Silence::CutOff), "its own may reach it");
        let fault = json!({"node": "n1", "fault": "NoAnswer", "since": "2026-01-31T12:00:00Z"});
        gateway.status = serde_json::from_value(json!({"unreachableNodes": [fault]})).unwrap();
        assert_eq!(of(&gateway, &[&n1, &n2]), None, "it reports that path itself");

        let labels = json!({"networking.liqo.io/gateway-name": "server"});
        let pods = Pods { gateways: vec![pod(&labels, &ready())], ..Pods::default() };
        let life = pods.gateway(("t", "server"), |_| Some(Silence::Hangs));
        assert_eq!(life.liveness, Liveness::Silent);
        let problem = life.problem.unwrap();
        assert!(
            problem.starts_with("gateway t/server: pod p is ready, but answers no"),
            "{problem}"
        );
        assert!(problem.contains("; see `kubectl logs -n t p`; if it hangs"), "{problem}");
        let life = pods.gateway(("t", "server"), |_| Some(Silence::CutOff));
        let problem = life.problem.unwrap();
        assert!(
            problem.contains("pod p on n1 is ready, but no other node reaches it"),
            "{problem}"
        );
    }

    #[test]
    fn pod_of_a_lost_node_is_explained_by_that() {
        let ready = json!({"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status."});
        let node = json!({"metadata": {"name": "n1"}, "status": {"conditions": [ready]}});
        let node = Object::from(serde_json::from_value::<Node>(node).unwrap());
        let objects = BTreeMap::from([(node.reference(), node)]);
        let lost_nodes = lost_nodes(&Snapshot { objects, ..Snapshot::default() });
        let labels = json!({labels::PROGRAM: "route-agent"});
        let pods = Pods { programs: vec![pod(&labels, &silent())], lost_nodes, ..Pods::default() };
        let problem = pods.agent("n1").unwrap();
        assert!(
            problem
                .contains("as node n1 is not (Kubelet stopped posting node status.); see whether"),
            "{problem}"
        );
    }

    #[test]
    fn a_gateway_is_as_the_best_of_its_pods() {
        for (pods, liveness, said) in [
            (vec![], Liveness::Gone, "it has no pod"),
            (vec![failing()], Liveness::Gone, "(ImagePullBackOff: no such image)"),
            (vec![failing(), silent()], Liveness::Silent, "(unready: [c])"),
            (vec![silent(), ready(), created(0)], Liveness::Answers, ""),
            (vec![ready(), created(11)], Liveness::Answers, "(ContainerCreating); see "),
            (
                vec![ready(), failing()],
                Liveness::Answers,
                "(ImagePullBackOff: no such image); see ",
            ),
            (vec![ready(), unplaced()], Liveness::Answers, "(no node fits); see "),
            (vec![ready(), stuck()], Liveness::Answers, "; the one that is ready has no successor"),
        ] {
            let life = life(&pods);
            assert_eq!(life.liveness, liveness);
            let problem = life.problem.unwrap_or_default();
            assert!(problem.contains(said) && problem.is_empty() == said.is_empty(), "{problem}");
        }
        let elsewhere = Pods::default().gateway(("u", "server"), |_| None);
        assert_eq!((elsewhere.liveness, elsewhere.node), (Liveness::Gone, None));
        assert_eq!(life(&[ready()]).node.as_deref(), Some("n1"));
    }

    #[test]
    fn program_without_ready_pod_has_its_consequence() {
        let of = |program: &str, status: &Value| pod(&json!({labels::PROGRAM: program}), status);
        let pods = |programs: Vec<Pod>| Pods { programs, ..Pods::default() };
        let all = pods(vec![of("fabric-controller", &ready()), of("route-agent", &ready())]);
        assert_eq!((all.problems(), all.agent("n1")), (vec![], None));
        assert!(all.agent("n2").unwrap().starts_with("node n2: route-agent: there is none;"));
        let evicted = json!({"phase": "Failed", "message": "The node was low on memory."});
        let none = pods(vec![of("ipam", &evicted), of("route-agent", &silent())]);
        let [controller, ipam] = none.problems().try_into().unwrap();
        assert_eq!(controller, "fabric-controller: it has no pod; changes have no effect");
        assert!(ipam.contains("(The node was low on memory.)"), "{ipam}");
        assert!(none.agent("n1").unwrap().contains("pod p is not ready (unready: [c])"));
        let selector = json!({"matchLabels": {labels::PROGRAM: "ipam"}});
        let ipam = json!({"spec": {"selector": selector, "template": {}}});
        let deployments = vec![serde_json::from_value(ipam).unwrap()];
        let [_, ipam] = Pods { deployments, ..Pods::default() }.problems().try_into().unwrap();
        assert_eq!(ipam, "ipam: it has no pod; nothing new gets a prefix or an address");
    }
}
