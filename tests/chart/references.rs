//! References between manifests.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::helm::{EVERYTHING, Helm, MIN_VALUES};

const WORKLOADS: [&str; 2] = ["Deployment", "DaemonSet"];
const TEMPLATES: [&str; 2] = ["WgGatewayServerTemplate", "WgGatewayClientTemplate"];

#[test]
fn workloads_find_their_pods_and_pods_their_accounts() {
    for objects in renderings() {
        let accounts = names(&objects, "ServiceAccount");
        for workload in of_kinds(&objects, &WORKLOADS) {
            let template = &workload["spec"]["template"];
            let selector = &workload["spec"]["selector"]["matchLabels"];
            assert!(holds(&template["metadata"]["labels"], selector), "{selector}");
            let account = template["spec"]["serviceAccountName"].as_str().unwrap();
            assert!(accounts.contains(account), "{account}");
        }
        for job in of_kinds(&objects, &["Job"]) {
            let account = job["spec"]["template"]["spec"]["serviceAccountName"].as_str().unwrap();
            assert!(accounts.contains(account), "{account}");
        }
    }
}

/// Or helm would take them away before what needs them has run, or leave them behind.
#[test]
fn uninstall_objects_exist_only_then() {
    for objects in renderings() {
        let is_hook = |o: &&Value| !o["metadata"]["annotations"]["helm.sh/hook"].is_null();
        let hooks: Vec<_> = objects.iter().filter(is_hook).collect();
        assert_eq!(hooks.len(), 6, "an account, two roles with their bindings, a Job");
        for hook in hooks {
            let annotations = &hook["metadata"]["annotations"];
            assert_eq!(annotations["helm.sh/hook"], "pre-delete");
            let policy = &annotations["helm.sh/hook-delete-policy"];
            assert_eq!(policy, "before-hook-creation,hook-succeeded");
            let weight = if hook["kind"] == "Job" { "0" } else { "-1" };
            assert_eq!(annotations["helm.sh/hook-weight"], weight);
        }
    }
}

/// All else of a host may be read-only, and its kubelet's folder anywhere.
#[test]
fn pods_use_two_paths_and_a_device_of_hosts() {
    for objects in renderings() {
        let workloads = of_kinds(&objects, &["Deployment", "DaemonSet", "Job"]);
        let templates = of_kinds(&objects, &TEMPLATES).map(|t| &t["spec"]["template"]["spec"]);
        let templates = templates.map(|spec| &spec["deployment"]);
        let mut paths = BTreeSet::new();
        for workload in workloads.chain(templates) {
            let pod = &workload["spec"]["template"]["spec"];
            let volumes = pod["volumes"].as_array().into_iter().flatten();
            paths.extend(volumes.filter_map(|volume| volume["hostPath"]["path"].as_str()));
        }
        assert!(paths.iter().eq(&["/dev/net/tun", "/proc/sys/net", "/run/xtables.lock"]));
    }
}

#[test]
fn workloads_have_distinct_selectors() {
    for objects in renderings() {
        let pods: Vec<_> = of_kinds(&objects, &WORKLOADS)
            .map(|workload| &workload["spec"]["template"]["metadata"]["labels"])
            .collect();
        let matching = |selector: &Value| pods.iter().filter(|pod| holds(pod, selector)).count();
        for workload in of_kinds(&objects, &WORKLOADS) {
            assert_eq!(matching(&workload["spec"]["selector"]["matchLabels"]), 1);
        }
        for service in of_kinds(&objects, &["Service"]) {
            assert_eq!(matching(&service["spec"]["selector"]), 1, "{service}");
        }
    }
}

#[test]
fn bindings_name_existing_roles_and_accounts() {
    for objects in renderings() {
        let accounts = names(&objects, "ServiceAccount");
        for binding in of_kinds(&objects, &["RoleBinding", "ClusterRoleBinding"]) {
            let role = &binding["roleRef"];
            let roles = names(&objects, role["kind"].as_str().unwrap());
            assert!(roles.contains(role["name"].as_str().unwrap()), "{binding}");
            // Programs write those of one of them.
            let subjects = binding["subjects"].as_array();
            assert_eq!(subjects.is_none(), binding["metadata"]["name"] == "liqo-gateway-records");
            for subject in subjects.into_iter().flatten() {
                assert!(accounts.contains(subject["name"].as_str().unwrap()), "{binding}");
            }
        }
    }
}

#[test]
fn ports_that_are_named_are_there() {
    for objects in renderings() {
        for service in of_kinds(&objects, &["Service"]) {
            let selector = &service["spec"]["selector"];
            let pod = |o: &&Value| holds(&o["spec"]["template"]["metadata"]["labels"], selector);
            let workload = of_kinds(&objects, &WORKLOADS).find(pod).unwrap();
            let ports = &workload["spec"]["template"]["spec"]["containers"][0]["ports"];
            for port in service["spec"]["ports"].as_array().unwrap() {
                let is_it = |p: &Value| p["name"] == port["targetPort"];
                assert!(ports.as_array().unwrap().iter().any(is_it), "{port}");
            }
        }
    }
}

/// A policy of ports that no container names would let nothing in.
#[test]
fn pods_of_this_namespace_alone_reach_ipam() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&[MIN_VALUES]);
    let policy = of_kinds(&objects, &["NetworkPolicy"]).next().unwrap();
    let selector = &policy["spec"]["podSelector"]["matchLabels"];
    let pod = |o: &&Value| holds(&o["spec"]["template"]["metadata"]["labels"], selector);
    let ipam = of_kinds(&objects, &WORKLOADS).find(pod).unwrap();
    let ports = ipam["spec"]["template"]["spec"]["containers"][0]["ports"].as_array().unwrap();
    let rules = policy["spec"]["ingress"].as_array().unwrap();
    for port in ports {
        let opens = |rule: &&Value| rule["ports"][0]["port"] == port["name"];
        let rule = rules.iter().find(opens).unwrap();
        let from =
            if port["name"] == "metrics" { Value::Null } else { json!([{"podSelector": {}}]) };
        assert_eq!(rule["from"], from, "{port}");
    }
}

#[test]
fn webhook_service_exists_and_blocks_no_write() {
    for objects in renderings() {
        let services = names(&objects, "Service");
        for webhooks in of_kinds(&objects, &["MutatingWebhookConfiguration"]) {
            for webhook in webhooks["webhooks"].as_array().unwrap() {
                let service = &webhook["clientConfig"]["service"];
                assert!(services.contains(service["name"].as_str().unwrap()), "{service}");
                assert_eq!(webhook["failurePolicy"], "Ignore");
            }
        }
    }
}

#[test]
fn containers_are_unprivileged_and_read_only() {
    for objects in renderings() {
        for container in containers(&objects) {
            let context = &container["securityContext"];
            assert!(context["privileged"].is_null(), "{container}");
            assert_eq!(context["allowPrivilegeEscalation"], false, "{container}");
            assert_eq!(context["readOnlyRootFilesystem"], true, "{container}");
            assert_eq!(context["capabilities"]["drop"][0], "ALL", "{container}");
        }
    }
}

#[test]
fn objects_have_labels_that_liqoctl_expects() {
    for objects in renderings() {
        let labelled = |kind: &str, value: &str| {
            let has = |o: &&&Value| o["metadata"]["labels"]["app.kubernetes.io/name"] == value;
            of_kinds(&objects, &[kind]).collect::<Vec<_>>().iter().filter(has).count()
        };
        assert_eq!(labelled("ConfigMap", "clusterid-configmap"), 1);
        assert_eq!(labelled("Deployment", "controller-manager"), 1);
        let manager = of_kinds(&objects, &["Deployment"]).find(|o| {
            o["metadata"]["labels"]["app.kubernetes.io/component"] == "controller-manager"
        });
        let containers = &manager.unwrap()["spec"]["template"]["spec"]["containers"];
        assert_eq!(containers[0]["name"], "controller-manager");
        // Its version is what follows the only colon.
        assert_eq!(containers[0]["image"].as_str().unwrap().split(':').count(), 2);
        for kind in ["Role", "ClusterRole"] {
            let has = |o: &&Value| {
                o["metadata"]["labels"]["app.kubernetes.io/component"] == "peering-user"
            };
            assert_eq!(of_kinds(&objects, &[kind]).filter(has).count(), 1, "{kind}");
        }
        for network in ["external-cidr", "internal-cidr", "service-cidr"] {
            let has = |o: &&Value| o["metadata"]["labels"]["ipam.liqo.io/network-type"] == network;
            assert_eq!(of_kinds(&objects, &["Network"]).filter(has).count(), 1, "{network}");
        }
    }
}

#[test]
fn liqoctl_arguments_are_accepted() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&[EVERYTHING]);
    let manager = of_kinds(&objects, &["Deployment"])
        .find(|o| o["metadata"]["labels"]["app.kubernetes.io/component"] == "controller-manager");
    let args = manager.unwrap()["spec"]["template"]["spec"]["containers"][0]["args"].to_string();
    for argument in [
        "--api-server-address-override=https://rome.example.org:6443",
        "--cluster-labels=example.org/region=eu,example.org/tier=1",
    ] {
        assert!(args.contains(argument), "{args}");
    }
}

/// Containers of all pods, those of gateways too.
pub(crate) fn containers(objects: &[Value]) -> impl Iterator<Item = &Value> {
    let of_gateways = of_kinds(objects, &TEMPLATES)
        .map(|template| &template["spec"]["template"]["spec"]["deployment"]);
    let workloads = of_kinds(objects, &WORKLOADS).chain(of_kinds(objects, &["Job"]));
    let workloads = workloads.chain(of_gateways);
    workloads.flat_map(|w| w["spec"]["template"]["spec"]["containers"].as_array().unwrap())
}

fn renderings() -> Vec<Vec<Value>> {
    let Some(helm) = Helm::find() else { return Vec::new() };
    [MIN_VALUES, EVERYTHING].iter().map(|values| helm.objects(&[values])).collect()
}

fn of_kinds<'a>(objects: &'a [Value], kinds: &[&str]) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |o| kinds.contains(&o["kind"].as_str().unwrap_or_default()))
}

fn names(objects: &[Value], kind: &str) -> BTreeSet<String> {
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    of_kinds(objects, &[kind]).map(name).collect()
}

/// True if `selector` matches `labels`.
fn holds(labels: &Value, selector: &Value) -> bool {
    selector.as_object().unwrap().iter().all(|(key, value)| &labels[key] == value)
}
