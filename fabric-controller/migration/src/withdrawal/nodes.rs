//! Route-agents take away what is theirs, each on its node.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_api::fabric::NodeConfig;
use fabric_api::labels;
use fabric_kube_client::requests::Part;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod};
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::WithdrawError;
use super::cluster::{Cluster, kind};

/// Agents refuse what is still sent to peers for a minute, and take away the refusal then.
const LINGERING: Duration = Duration::from_secs(80);
/// Interval of checks.
const PERIOD: Duration = Duration::from_millis(250);
const REMEDY: &str = "what weft has made there stays until the node starts anew, or `route-agent cleanup` is run on it";

/// Reason why each node is waited for.
type Waits = BTreeMap<String, String>;

/// Returns once nothing is left on any node that answers.
pub(super) async fn clear(cluster: &Cluster, timeout: Duration) -> Result<(), WithdrawError> {
    let start = Instant::now();
    let mut logged = Waits::new();
    loop {
        let (waits, lingers) = look(cluster).await?;
        for (node, why) in waits.iter().filter(|(node, why)| logged.get(*node) != Some(why)) {
            tracing::info!(node, why, "waiting");
        }
        for node in logged.keys().filter(|node| !waits.contains_key(*node)) {
            tracing::info!(node, "nothing of weft is left there");
        }
        if waits.is_empty() {
            return Ok(());
        }
        let timeout = if lingers { timeout.max(LINGERING) } else { timeout };
        if start.elapsed() >= timeout {
            give_up(cluster, &waits).await;
            return Ok(());
        }
        logged = waits;
        sleep(PERIOD).await;
    }
}

/// Has every agent remove everything. Returns which nodes have not, and whether one of them refuses
/// for a while what is still sent to peers.
async fn look(cluster: &Cluster) -> Result<(Waits, bool), WithdrawError> {
    let configs = kind::<NodeConfig>();
    let nodes = cluster.list_metadata(&kind::<Node>(), "").await?;
    let nodes: BTreeSet<String> = nodes.iter().map(|node| node.name_any()).collect();
    let agents = agents(cluster).await?;
    let (mut waits, mut lingers) = (Waits::new(), false);
    for config in cluster.list(&configs, "").await? {
        if config.data["spec"]["removed"] != true {
            let removed = json!({"spec": {"removed": true}});
            cluster.merge(&configs, &config, Part::AllButStatus, &removed).await?;
        }
        let name = config.name_any();
        lingers |= nodes.contains(&name) && refuses(&config);
        let why = why_waited_for(&config, agents.contains(&name));
        waits.extend(why.filter(|_| nodes.contains(&name)).map(|why| (name, why)));
    }
    Ok((waits, lingers))
}

/// True if a sender on the node still sends to peers.
fn refuses(config: &DynamicObject) -> bool {
    let refused = config.data["status"]["refused"].as_array().into_iter().flatten();
    let mut senders = refused.filter_map(|traffic| traffic["senders"].as_array());
    senders.any(|senders| !senders.is_empty())
}

/// Nodes on which a route-agent runs.
async fn agents(cluster: &Cluster) -> Result<BTreeSet<String>, WithdrawError> {
    let agents = format!("{}=route-agent", labels::PROGRAM);
    let pods = cluster.list(&kind::<Pod>(), &agents).await?;
    let running = pods.iter().filter(|pod| pod.data["status"]["phase"] == "Running");
    let nodes = running.filter_map(|pod| pod.data["spec"]["nodeName"].as_str());
    Ok(nodes.map(str::to_owned).collect())
}

/// Reason to wait for a node; none if it never had an agent, which makes all that is to be cleared.
fn why_waited_for(config: &DynamicObject, has_agent: bool) -> Option<String> {
    let status = &config.data["status"];
    let applied = status["appliedGeneration"].as_i64().unwrap_or_default();
    let is_new = config.data["spec"]["removed"] == true
        && applied >= config.metadata.generation.unwrap_or_default();
    let problems = status["problems"].as_array().into_iter().flatten();
    let problems: Vec<_> = problems.filter_map(|problem| problem.as_str()).collect();
    match (is_new, has_agent) {
        (true, _) if problems.is_empty() => None,
        (true, _) => Some(problems.join("; ")),
        (false, true) => Some("its route-agent has not answered yet".to_owned()),
        (false, false) if applied > 0 => Some("its route-agent does not run".to_owned()),
        (false, false) => None,
    }
}

/// Logs and emits an Event per node: logs go with the pod, an Event stays for a while.
async fn give_up(cluster: &Cluster, waits: &Waits) {
    for (node, why) in waits {
        tracing::warn!(node, why, "{REMEDY}");
        let regarding = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node.clone()),
            // As the kubelet has it, and queries for Events of a node.
            uid: Some(node.clone()),
            ..ObjectReference::default()
        };
        cluster.emitter.warn(regarding, "WeftLeftBehind", format!("{why}; {REMEDY}"), 1).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn config(removed: bool, status: Value) -> DynamicObject {
        let spec = json!({"removed": removed});
        let metadata = json!({"name": "n1", "generation": 7});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status}))
            .unwrap()
    }

    #[test]
    fn withdrawal_waits_for_agents_cleanup() {
        let applied = |generation: i64| json!({"appliedGeneration": generation});
        assert!(why_waited_for(&config(false, applied(7)), true).is_some(), "it is not marked yet");
        assert!(why_waited_for(&config(true, applied(6)), true).is_some());
        assert!(why_waited_for(&config(true, applied(6)), false).is_some(), "it may come back");
        assert_eq!(why_waited_for(&config(true, applied(7)), true), None);
        let failed = json!({"appliedGeneration": 7, "problems": ["no nft"]});
        assert_eq!(why_waited_for(&config(true, failed), true).as_deref(), Some("no nft"));
    }

    #[test]
    fn senders_prolong_the_withdrawal() {
        let traffic = |senders: Value| {
            json!({"appliedGeneration": 7, "refused": [
                {"prefix": "10.201.0.0/16", "quiet": false, "senders": senders}
            ]})
        };
        assert!(refuses(&config(true, traffic(json!(["10.200.1.2"])))));
        assert!(!refuses(&config(true, traffic(json!([])))));
        assert!(!refuses(&config(true, json!({"appliedGeneration": 7}))));
    }

    #[test]
    fn node_without_agent_is_not_waited_for() {
        assert_eq!(why_waited_for(&config(true, Value::Null), false), None);
        assert!(why_waited_for(&config(true, Value::Null), true).is_some());
    }
}
