//! Requests that RBAC allows and policies refuse, with real tokens of the accounts.

mod gateways;
mod pods;
mod secrets;

use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::helm::{Helm, MIN_VALUES};
use crate::life::{Release, liqos_chart};

const CONTROLLER: &str = "liqo-fabric-controller";
const WITHDRAWAL: &str = "liqo-withdrawal";
const TENANT: &str = "liqo-tenant-milan";
/// Namespace of a peering by its label alone.
const LABELLED: &str = "peering";
/// Namespace of no peering, as its label says.
const OTHER: &str = "shop";
const GATEWAY: &str = "example.org/gateway:v1";
const SIDECAR: &str = "example.org/sidecar:v1";
/// Priority class of the system that the user gives gateways.
const PRIORITY: &str = "system-cluster-critical";
const TEMPLATES: &str = "networking: {gatewayTemplates: {images: ['example.org/sidecar:v1'], \
    pod: {priorityClassName: system-cluster-critical, \
    annotations: {io.kubernetes.cri-o.Devices: /dev/net/tun}}, \
    container: {gateway: {image: {name: example.org/gateway, version: v1}}}}}";
const KEEP_PREFIXES: &str = "withdrawal: {keepPrefixes: true}";
const CRDS: &str = "crds: {liqo: auto, weft: auto}";

/// Requests of one account.
struct Account<'a> {
    release: &'a Release,
    token: String,
}

impl Account<'_> {
    fn run(&self, arguments: &[&str], object: &Value) -> Result<String, String> {
        let token = format!("--token={}", self.token);
        self.release.server.kubectl(&[&[token.as_str()], arguments].concat(), &object.to_string())
    }

    fn apply(&self, object: &Value) -> Result<String, String> {
        self.run(&["apply", "--server-side", "--force-conflicts", "--filename=-"], object)
    }

    fn create(&self, object: &Value) -> Result<String, String> {
        self.run(&["create", "--filename=-"], object)
    }

    fn delete(&self, kind: &str, (namespace, name): (&str, &str)) -> Result<String, String> {
        let path = match kind {
            "deployments" => "/apis/apps/v1",
            "endpointslices" => "/apis/discovery.k8s.io/v1",
            "poddisruptionbudgets" => "/apis/policy/v1",
            "roles" | "rolebindings" => "/apis/rbac.authorization.k8s.io/v1",
            _ => "/api/v1",
        };
        let path = format!("{path}/namespaces/{namespace}/{kind}/{name}");
        self.run(&["delete", "--raw", &path], &Value::Null)
    }
}

impl Release {
    /// The chart with its policies and the rights of the withdrawal, which tests share that write objects of
    /// different kinds or names. `None` if there can't be one, which is printed.
    fn shared() -> Option<&'static Self> {
        static SHARED: OnceLock<Option<Release>> = OnceLock::new();
        let start = || {
            let release = Self::prepare()?;
            release.install_with_policies();
            release.apply(&rights_of_withdrawal(&release));
            Some(release)
        };
        SHARED.get_or_init(start).as_ref()
    }

    fn account(&self, name: &str) -> Account<'_> {
        self.account_in("liqo", name)
    }

    fn account_in(&self, namespace: &str, name: &str) -> Account<'_> {
        let token = ["create", "token", name, "--namespace", namespace];
        let token = self.server.kubectl(&token, "").unwrap().trim().to_owned();
        Account { release: self, token }
    }

    fn install_with_policies(&self) {
        self.helm("install", &[MIN_VALUES, CRDS, TEMPLATES]).unwrap();
        let namespace = |name: &str, labels: Value| {
            json!({"apiVersion": "v1", "kind": "Namespace",
                "metadata": {"name": name, "labels": labels}})
        };
        let label = |value: &str| json!({"liqo.io/tenant-namespace": value});
        self.apply(&[
            namespace(TENANT, json!({})),
            namespace(OTHER, label("false")),
            namespace(LABELLED, label("true")),
        ]);
        let controller = self.account(CONTROLLER);
        self.server.wait_until("policies are in force", || {
            let probes = [
                account(OTHER, "gw-probe"),
                binding(TENANT, "gw-probe", "Role", "other"),
                deployment(TENANT, "gw-probe", "default"),
                secret(OTHER, "probe", json!({"type": "Opaque"})),
                config_map("probe"),
                lease("probe"),
                role_of(OTHER, "gw-probe", json!([rule("", "services", &["list"], &[])])),
            ];
            let taken: Vec<_> = probes.iter().filter(|of| controller.apply(of).is_ok()).collect();
            if taken.is_empty() { Ok(()) } else { Err(json!(taken).to_string()) }
        });
    }
}

fn object(api_version: &str, kind: &str, namespace: &str, name: &str) -> Value {
    let labels = json!({"app.kubernetes.io/managed-by": "weft"});
    json!({"apiVersion": api_version, "kind": kind,
        "metadata": {"name": name, "namespace": namespace, "labels": labels}})
}

fn with(mut object: Value, fields: Value) -> Value {
    for (key, value) in fields.as_object().unwrap() {
        object[key] = value.clone();
    }
    object
}

fn account(namespace: &str, name: &str) -> Value {
    object("v1", "ServiceAccount", namespace, name)
}

fn service(namespace: &str, name: &str) -> Value {
    let spec = json!({"ports": [{"port": 1}], "clusterIP": "None"});
    with(object("v1", "Service", namespace, name), json!({ "spec": spec }))
}

fn secret(namespace: &str, name: &str, fields: Value) -> Value {
    with(object("v1", "Secret", namespace, name), fields)
}

fn deployment(namespace: &str, name: &str, account: &str) -> Value {
    let spec = json!({"serviceAccountName": account,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "gateway", "image": GATEWAY, "command": ["gateway"],
            "securityContext": {"allowPrivilegeEscalation": false,
                "capabilities": {"add": ["NET_ADMIN", "SYS_ADMIN"]}}}]});
    let labels = json!({"app": name});
    let template = json!({"metadata": {"labels": labels}, "spec": spec});
    let spec = json!({"selector": {"matchLabels": labels}, "template": template});
    with(object("apps/v1", "Deployment", namespace, name), json!({ "spec": spec }))
}

fn binding(namespace: &str, name: &str, kind: &str, role: &str) -> Value {
    let group = "rbac.authorization.k8s.io";
    let subject = json!({"kind": "ServiceAccount", "name": name, "namespace": namespace});
    let binding = object(&format!("{group}/v1"), "RoleBinding", namespace, name);
    let role = json!({"apiGroup": group, "kind": kind, "name": role});
    with(binding, json!({"roleRef": role, "subjects": [subject]}))
}

/// Right to read keys.
fn keys(namespace: &str, account: &str) -> Value {
    let mut keys = binding(namespace, "weft-gateway-keys", "ClusterRole", "liqo-gateway-keys");
    keys["subjects"][0] = json!({"kind": "ServiceAccount", "name": account, "namespace": "liqo"});
    keys
}

fn role(namespace: &str, name: &str) -> Value {
    role_of(namespace, name, json!([]))
}

fn role_of(namespace: &str, name: &str, rules: Value) -> Value {
    let role = object("rbac.authorization.k8s.io/v1", "Role", namespace, name);
    with(role, json!({ "rules": rules }))
}

fn rule(group: &str, resource: &str, verbs: &[&str], names: &[&str]) -> Value {
    let mut rule = json!({"apiGroups": [group], "resources": [resource], "verbs": verbs});
    if !names.is_empty() {
        rule["resourceNames"] = json!(names);
    }
    rule
}

fn config_map(name: &str) -> Value {
    object("v1", "ConfigMap", "liqo", name)
}

fn lease(name: &str) -> Value {
    object("coordination.k8s.io/v1", "Lease", "liqo", name)
}

fn refused(answer: Result<String, String>, why: &str) {
    let error = answer.unwrap_err();
    assert!(error.contains(why), "expected {why:?}: {error}");
}

/// RBAC lets it patch all pods.
#[test]
fn controller_changes_labels_of_gateways_pods_only() {
    let Some(release) = Release::shared() else { return };
    let pod = |name: &str, component: &str| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": TENANT,
            "labels": {"networking.liqo.io/component": component}},
            "spec": {"containers": [{"name": "c", "image": "example.org/c"}]}})
    };
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": TENANT}});
    release.apply(&[account, pod("gw-milan-1", "gateway"), pod("other", "other")]);
    let controller = release.account(CONTROLLER);
    let change = |name: &str, fields: Value| {
        let mut pod = with(json!({"apiVersion": "v1", "kind": "Pod"}), fields);
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["namespace"] = json!(TENANT);
        controller.apply(&pod)
    };
    let label = || {
        let both = json!({"networking.liqo.io/active": "true", "fabric.weft.dev/replica": "u"});
        json!({"metadata": {"labels": both}})
    };
    let image = json!({"spec": {"containers": [{"name": "c", "image": "example.org/other"}]}});
    let why = "nothing of pods but the labels networking.liqo.io/active and fabric.weft.dev/replica, of pods of gateways only";
    release.server.wait_until("the policy is in force", || {
        change("other", label()).err().ok_or("not yet").map(drop)
    });
    change("gw-milan-1", label()).unwrap();
    refused(change("other", label()), why);
    // By that label it would be one that is deleted.
    let kubelet = json!({"offloading.liqo.io/component": "virtual-kubelet"});
    refused(change("gw-milan-1", json!({"metadata": {"labels": kubelet}})), why);
    // Applied without it, a label goes.
    let line = ["apply", "--server-side", "--field-manager=labels", "--filename=-"];
    let labelled = |labels: Value| {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "gw-milan-1", "namespace": TENANT, "labels": labels}})
    };
    release.server.kubectl(&line, &labelled(json!({"app": "a"})).to_string()).unwrap();
    refused(controller.run(&line, &labelled(json!({}))), why);
    refused(change("gw-milan-1", image), why);
    refused(change("gw-milan-1", json!({"metadata": {"annotations": {"a": "b"}}})), why);
    let owners = json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"}]);
    refused(change("gw-milan-1", json!({"metadata": {"ownerReferences": owners}})), why);
    let finalizers = json!(["example.org/a"]);
    refused(change("gw-milan-1", json!({"metadata": {"finalizers": finalizers}})), why);
}

/// RBAC lets it delete all pods, and write all of a ShadowEndpointSlice.
#[test]
fn controller_repairs_of_liqo_are_bounded() {
    let Some(chart) = liqos_chart() else { return };
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let file = "charts/liqo-crds/crds/offloading.liqo.io_shadowendpointslices.yaml";
    let file = chart.join(file).display().to_string();
    release.server.kubectl(&["apply", "--server-side", "--filename", &file], "").unwrap();
    let pod = |name: &str, component: &str| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": TENANT,
            "labels": {"offloading.liqo.io/component": component}},
            "spec": {"containers": [{"name": "c", "image": "example.org/c"}]}})
    };
    release.apply(&[
        account(TENANT, "default"),
        pod("vk", "virtual-kubelet"),
        pod("other", "other"),
    ]);
    let controller = release.account(CONTROLLER);
    let delete = |name: &str| controller.delete("pods", (TENANT, name));
    refused(delete("other"), "deletes pods of Liqo's virtual kubelets only");
    delete("vk").unwrap();

    let slice = |name: &str, metadata: Value, address: &str| {
        json!({"apiVersion": "offloading.liqo.io/v1beta1", "kind": "ShadowEndpointSlice",
            "metadata": with(json!({"name": name, "namespace": OTHER}), metadata),
            "spec": {"template": {"addressType": "IPv4", "endpoints": [{"addresses": [address]}]}}})
    };
    let annotated = |key: &str, value: &str| json!({"annotations": {key: value}});
    let why = "nothing of a ShadowEndpointSlice but the annotation";
    let address = "10.200.1.7";
    for name in ["probe", "web"] {
        release.server.wait_until("it is defined", || {
            let object = slice(name, annotated("a", "b"), address).to_string();
            release.server.kubectl(&["apply", "--server-side", "--filename=-"], &object)
        });
    }
    // The fields of others stay.
    let apply =
        ["apply", "--server-side", "--force-conflicts", "--field-manager=weft", "--filename=-"];
    let change = |name: &str, metadata: Value, address: &str| {
        controller.run(&apply, &slice(name, metadata, address))
    };
    release.server.wait_until("the policy is in force for it", || {
        change("probe", json!({"labels": {"a": "b"}}), address).err().ok_or("not yet")
    });
    change("web", annotated("fabric.weft.dev/repaired-at", "now"), address).unwrap();
    refused(change("web", annotated("a", "c"), address), why);
    refused(change("web", annotated("c", "d"), address), why);
    refused(change("web", json!({"labels": {"a": "b"}}), address), why);
    refused(change("web", json!({"finalizers": ["example.org/a"]}), address), why);
    let owners = json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"}]);
    refused(change("web", json!({ "ownerReferences": owners }), address), why);
    // As the manager of the annotation, so that it goes.
    let apply = ["apply", "--server-side", "--field-manager=kubectl", "--filename=-"];
    refused(controller.run(&apply, &slice("web", json!({}), address)), why);
    refused(change("web", json!({}), "10.200.1.8"), why);
    change("new", json!({}), address).unwrap_err();
}

/// With it, it could have all writes of the cluster sent to itself.
#[test]
fn controller_changes_authority_of_webhooks_only() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let controller = release.account(CONTROLLER);
    let there = release.get("mutatingwebhookconfiguration", "weft-cidr-lists");
    let patch = |fields: Value| {
        let line =
            ["patch", "mutatingwebhookconfiguration/weft-cidr-lists", "--type=merge", "--patch"];
        controller.run(&[&line[..], &[&fields.to_string()]].concat(), &Value::Null)
    };
    let change = |change: &dyn Fn(&mut Value)| {
        let mut webhooks = there["webhooks"].clone();
        change(&mut webhooks);
        patch(json!({ "webhooks": webhooks }))
    };
    change(&|webhooks| webhooks[0]["clientConfig"]["caBundle"] = json!("Y2VydA==")).unwrap();
    let why = "changes nothing but caBundle";
    refused(change(&|webhooks| webhooks[0]["rules"][0]["resources"] = json!(["*/*"])), why);
    let url = json!({"url": "https://example.org"});
    refused(change(&|webhooks| webhooks[0]["clientConfig"] = url.clone()), why);
    refused(
        change(&|webhooks| webhooks[0]["clientConfig"]["service"]["namespace"] = json!("x")),
        why,
    );
    for (field, value) in [
        ("failurePolicy", json!("Fail")),
        ("timeoutSeconds", json!(29)),
        ("matchPolicy", json!("Exact")),
        ("reinvocationPolicy", json!("IfNeeded")),
        ("sideEffects", json!("NoneOnDryRun")),
        ("matchConditions", json!([{"name": "all", "expression": "true"}])),
        ("namespaceSelector", json!({"matchLabels": {"a": "b"}})),
        ("objectSelector", json!({"matchLabels": {"a": "b"}})),
    ] {
        refused(change(&|webhooks| webhooks[0][field] = value.clone()), why);
    }
    let owners = json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"}]);
    for metadata in [
        json!({"labels": {"a": "b"}}),
        json!({"annotations": {"a": "b"}}),
        json!({"finalizers": ["example.org/a"]}),
        json!({ "ownerReferences": owners }),
    ] {
        refused(patch(json!({ "metadata": metadata })), why);
    }
    let more = |webhooks: &mut Value| {
        let mut more = webhooks[0].clone();
        more["name"] = json!("more.weft.dev");
        webhooks.as_array_mut().unwrap().push(more);
    };
    refused(change(&more), why);
    let by_url = json!([{"op": "replace", "path": "/webhooks/0/clientConfig",
        "value": {"url": "https://weft.example.org"}}]);
    let patch = format!("--patch={by_url}");
    let line = ["patch", "mutatingwebhookconfiguration/weft-cidr-lists", "--type=json", &patch];
    release.server.kubectl(&line, "").unwrap();
    refused(change(&|webhooks| webhooks[0]["clientConfig"] = url.clone()), why);
}

/// RBAC lets it patch all of them.
#[test]
fn configurations_get_spec_local_and_nothing_else() {
    let Some(release) = Release::shared() else { return };
    let cidr = |pod: &str| json!({"cidr": {"pod": [pod], "external": ["10.70.0.0/16"]}});
    let configuration = |metadata: Value, spec: Value| {
        let of = json!({"name": "milan", "namespace": TENANT});
        json!({"apiVersion": "networking.liqo.io/v1beta1", "kind": "Configuration",
            "metadata": with(of, metadata), "spec": spec})
    };
    let labels = json!({"labels": {"liqo.io/remote-cluster-id": "milan"}});
    let users = configuration(labels, json!({"remote": cidr("10.200.0.0/16")}));
    release.apply(&[users]);
    for account in [CONTROLLER, WITHDRAWAL] {
        let account = release.account(account);
        let apply = |metadata: Value, spec: Value| account.apply(&configuration(metadata, spec));
        let local = |pod: &str| apply(json!({}), json!({"local": cidr(pod)}));
        release.server.wait_until("it may write", || local("10.201.0.0/16"));
        let why = "Configuration milan: weft's accounts change nothing but spec.local";
        refused(apply(json!({}), json!({"remote": cidr("10.99.0.0/16")})), why);
        let owners = json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"}]);
        for metadata in [
            json!({ "ownerReferences": owners }),
            json!({"finalizers": ["example.org/a"]}),
            json!({"labels": {"liqo.io/remote-cluster-id": "paris"}}),
            json!({"annotations": {"a": "b"}}),
        ] {
            refused(apply(metadata, json!({"local": cidr("10.201.0.0/16")})), why);
        }
        local("10.202.0.0/16").unwrap();
    }
}

/// Rights of the withdrawal, which it has while a release is uninstalled.
pub(crate) fn rights_of_withdrawal(release: &Release) -> Vec<Value> {
    let hooks = crate::helm::parse(&release.plain(&["get", "hooks", "weft"]));
    hooks.into_iter().filter(|hook| hook["kind"] != "Job").collect()
}

/// With `withdrawal.keepPrefixes`, RBAC lets it patch all of any Network.
#[test]
fn withdrawal_takes_marks_off_networks_only() {
    let Some(release) = Release::prepare() else { return };
    release.helm("install", &[MIN_VALUES, CRDS, KEEP_PREFIXES]).unwrap();
    release.apply(&rights_of_withdrawal(&release));
    let network = |name: &str, by: &str| {
        json!({"apiVersion": "ipam.liqo.io/v1alpha1", "kind": "Network",
            "metadata": {"name": name, "namespace": "liqo",
                "labels": {"app.kubernetes.io/managed-by": by, "a": "b"},
                "annotations": {"fabric.weft.dev/owner": "Node n", "a": "b"}},
            "spec": {"cidr": "10.9.0.0/16"}})
    };
    // As the manager of the fields, so that those that are left out go.
    let apply = ["apply", "--server-side", "--field-manager=weft", "--filename=-"];
    for network in [network("probe", "weft"), network("kept", "weft"), network("other", "liqo")] {
        release.server.kubectl(&apply, &network.to_string()).unwrap();
    }
    let withdrawal = release.account(WITHDRAWAL);
    let unmarked = |name: &str, by: &str| {
        let mut network = network(name, by);
        network["metadata"]["labels"] = json!({"a": "b"});
        network["metadata"]["annotations"] = json!({"a": "b"});
        withdrawal.run(&apply, &network)
    };
    let change = |name: &str, part: &str, fields: Value| {
        let mut network = network(name, "weft");
        network[part] = with(network[part].clone(), fields);
        withdrawal.run(&apply, &network)
    };
    release.server.wait_until("it may patch, but not all", || {
        change("kept", "metadata", json!({}))?;
        let labelled = change("probe", "metadata", json!({"labels": {}}));
        labelled.err().ok_or_else(|| "labels are removed".to_owned())
    });
    let why = "and changes nothing else";
    refused(unmarked("other", "liqo"), why);
    let (mark, owner) = ("app.kubernetes.io/managed-by", "fabric.weft.dev/owner");
    let owners = json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"}]);
    for fields in [
        json!({"labels": {mark: "weft"}}),
        json!({"labels": {mark: "weft", "a": "c"}}),
        json!({"labels": {mark: "weft", "a": "b", "c": "d"}}),
        json!({"labels": {mark: "liqo", "a": "b"}}),
        json!({"annotations": {owner: "Node n"}}),
        json!({"annotations": {owner: "Node m", "a": "b"}}),
        json!({"annotations": {owner: "Node n", "a": "b", "c": "d"}}),
        json!({"finalizers": ["example.org/a"]}),
        json!({ "ownerReferences": owners }),
    ] {
        refused(change("kept", "metadata", fields), why);
    }
    // Its definition lets nobody change the CIDR.
    refused(change("kept", "spec", json!({"preAllocated": 4})), why);
    unmarked("kept", "weft").unwrap();
}

/// RBAC lets it delete those of users, and with them what Liqo has there.
#[test]
fn foreign_clusters_of_others_stay() {
    let Some(release) = Release::shared() else { return };
    let cluster = |name: &str, by: &str| {
        json!({"apiVersion": "core.liqo.io/v1beta1", "kind": "ForeignCluster",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": by}},
            "spec": {"clusterID": name}})
    };
    release.apply(&[cluster("milan", "liqo"), cluster("probe", "liqo")]);
    let why = "weft's accounts make and remove those with the label";
    for name in [CONTROLLER, WITHDRAWAL] {
        let account = release.account(name);
        let delete = |name: &str| {
            let path = format!("/apis/core.liqo.io/v1beta1/foreignclusters/{name}");
            account.run(&["delete", "--raw", &path], &Value::Null)
        };
        release.apply(&[cluster("paris", "weft")]);
        release.server.wait_until("it may delete its own", || delete("paris"));
        refused(delete("milan"), why);
    }
    let controller = release.account(CONTROLLER);
    refused(controller.create(&cluster("oslo", "liqo")), why);
    controller.create(&cluster("oslo", "weft")).unwrap();
}

#[test]
fn agent_writes_status_of_its_own_node_only() {
    let Some(release) = Release::shared() else { return };
    let config = |node: &str, fields: Value| {
        let config = json!({"apiVersion": "fabric.weft.dev/v1alpha1", "kind": "NodeConfig",
            "metadata": {"name": node}});
        with(config, fields)
    };
    let agent = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "agent", "namespace": "liqo"},
        "spec": {"serviceAccountName": "liqo-route-agent", "nodeName": "a",
            "containers": [{"name": "c", "image": "example.org/c"}]}});
    release.apply(&[agent]);
    for node in ["a", "b"] {
        let spec = json!({"clusterId": "rome", "external": [], "localPods": [],
            "peerings": [], "underlay": [], "vxlanSources": []});
        release.apply(&[config(node, json!({ "spec": spec }))]);
    }
    let uid = release.get("pod", "agent")["metadata"]["uid"].as_str().unwrap().to_owned();
    let bound = ["--bound-object-kind=Pod", "--bound-object-name=agent"];
    let uid = format!("--bound-object-uid={uid}");
    let token =
        ["create", "token", "liqo-route-agent", "--namespace=liqo", bound[0], bound[1], &uid];
    let token = release.server.kubectl(&token, "").unwrap().trim().to_owned();
    let agent = Account { release, token };
    let write = |who: &Account<'_>, node: &str| {
        let status = config(node, json!({"status": {"appliedGeneration": 1}}));
        let arguments = ["apply", "--server-side", "--subresource=status", "--filename=-"];
        who.run(&arguments, &status)
    };
    let why = "the status of its own node";
    release.server.wait_until("the policy is in force", || {
        write(&agent, "b").err().ok_or("not yet").map(drop)
    });
    refused(write(&agent, "b"), why);
    write(&agent, "a").unwrap();
    refused(write(&release.account("liqo-route-agent"), "a"), why);
}

/// RBAC cannot bind the creation of an object to its name.
#[test]
fn each_account_creates_its_own_config_map_only() {
    let Some(release) = Release::shared() else { return };
    let (id, note) = ("liqo-clusterid-configmap", "weft-ipam-open-grants");
    release.server.kubectl(&["delete", "configmap", id, note, "--namespace=liqo"], "").unwrap();
    for (account, own, other) in [(CONTROLLER, id, note), ("liqo-ipam", note, id)] {
        let account = release.account(account);
        let create = |name: &str| account.run(&["create", "--filename=-"], &config_map(name));
        refused(create(other), "and no other one");
        refused(create("kube-root-ca.crt"), "and no other one");
        create(own).unwrap();
    }
}

#[test]
fn accounts_create_one_lease_only() {
    let Some(release) = Release::shared() else { return };
    let own = "weft-fabric-controller";
    for account in [CONTROLLER, WITHDRAWAL] {
        let account = release.account(account);
        let create = |name: &str| account.run(&["create", "--filename=-"], &lease(name));
        release.server.kubectl(&["delete", "lease", own, "--namespace=liqo"], "").unwrap();
        release.server.wait_until("it may create Leases", || create(own));
        refused(create("other"), "make the Lease weft-fabric-controller and no other one");
    }
}

#[test]
fn older_clusters_get_no_policies() {
    let Some(helm) = Helm::find() else { return };
    let of = |version: &str| {
        let version = format!("--kube-version={version}");
        helm.with(&["template", "weft", &version], &[MIN_VALUES]).unwrap()
    };
    assert!(!of("1.29.9").contains("ValidatingAdmissionPolicy"));
    assert!(of("1.30.0").contains("kind: ValidatingAdmissionPolicyBinding"));
}
