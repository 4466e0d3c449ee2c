//! Requests that RBAC allows and policies refuse, with real tokens of the accounts.

use serde_json::{Value, json};

use crate::helm::{Helm, MIN_VALUES};
use crate::life::{Release, liqos_chart};

const CONTROLLER: &str = "liqo-fabric-controller";
const WITHDRAWAL: &str = "liqo-withdrawal";
const TENANT: &str = "liqo-tenant-milan";
/// Namespace of a peering by its label alone.
const LABELLED: &str = "peering";
const OTHER: &str = "shop";

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

    fn delete(&self, kind: &str, (namespace, name): (&str, &str)) -> Result<String, String> {
        let path = match kind {
            "deployments" => "/apis/apps/v1",
            _ => "/api/v1",
        };
        let path = format!("{path}/namespaces/{namespace}/{kind}/{name}");
        self.run(&["delete", "--raw", &path], &Value::Null)
    }
}

impl Release {
    fn account(&self, name: &str) -> Account<'_> {
        let token = ["create", "token", name, "--namespace=liqo"];
        let token = self.server.kubectl(&token, "").unwrap().trim().to_owned();
        Account { release: self, token }
    }

    fn install_with_policies(&self) {
        self.helm("install", &[MIN_VALUES, "crds: {liqo: auto, weft: auto}"]).unwrap();
        let namespace = |name: &str, labels: Value| {
            json!({"apiVersion": "v1", "kind": "Namespace",
                "metadata": {"name": name, "labels": labels}})
        };
        let label = json!({"liqo.io/tenant-namespace": "true"});
        let unlabelled = [TENANT, OTHER].map(|name| namespace(name, json!({})));
        self.apply(&unlabelled);
        self.apply(&[namespace(LABELLED, label)]);
        let controller = self.account(CONTROLLER);
        self.server.wait_until("policies are in force", || {
            let probes = [
                account(OTHER, "gw-probe"),
                binding(TENANT, "gw-probe", "Role", "other"),
                deployment(TENANT, "gw-probe", "default"),
                secret(OTHER, "probe", json!({"type": "Opaque"})),
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
        "containers": [{"name": "gateway", "image": "example.org/gateway"}]});
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
    object("rbac.authorization.k8s.io/v1", "Role", namespace, name)
}

fn refused(answer: Result<String, String>, why: &str) {
    let error = answer.unwrap_err();
    assert!(error.contains(why), "expected {why:?}: {error}");
}

#[test]
fn controller_writes_gateways_in_their_namespaces() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let controller = release.account(CONTROLLER);
    for namespace in [TENANT, LABELLED, "liqo"] {
        controller.apply(&account(namespace, "gw-a")).unwrap();
        controller.apply(&role(namespace, "gw-a")).unwrap();
        controller.apply(&binding(namespace, "gw-a", "Role", "gw-a")).unwrap();
        controller.apply(&service(namespace, "gw-a")).unwrap();
        controller.apply(&deployment(namespace, "gw-a", "gw-a")).unwrap();
    }
    // A binding of no role is refused before.
    release.apply(&[role(OTHER, "gw-a")]);
    let remedy = "kubectl label namespace shop liqo.io/tenant-namespace=true";
    for object in [
        account(OTHER, "gw-a"),
        service("kube-system", "gw-a"),
        service(OTHER, "gw-a"),
        binding(OTHER, "gw-a", "Role", "gw-a"),
        deployment(OTHER, "gw-a", "gw-a"),
    ] {
        let namespace = object["metadata"]["namespace"].as_str().unwrap();
        refused(controller.apply(&object), &remedy.replace("shop", namespace));
    }
    refused(controller.apply(&role("kube-system", "gw-a")), &remedy.replace("shop", "kube-system"));
    refused(controller.apply(&account(TENANT, "other")), "named gw-NAME");
    let mut unlabelled = account(TENANT, "gw-b");
    unlabelled["metadata"]["labels"] = json!({});
    refused(controller.apply(&unlabelled), "with the label app.kubernetes.io/managed-by=weft");
    services_of_ips_are_anywhere(&controller);
    objects_of_others_stay(&release, &controller);
    pods_are_those_of_gateways(&controller);
    bindings_are_those_of_gateways(&release, &controller);
}

fn services_of_ips_are_anywhere(controller: &Account<'_>) {
    let of = |ip: &str| {
        let mut service = service(OTHER, "database");
        service["metadata"]["ownerReferences"] = json!([{"apiVersion": "ipam.liqo.io/v1alpha1",
            "kind": "IP", "name": ip, "uid": "u"}]);
        service
    };
    let why = "liqo.io/tenant-namespace";
    refused(controller.apply(&of("other")), why);
    for (field, other) in [("kind", "Network"), ("apiVersion", "example.org/v1")] {
        let mut service = of("database");
        service["metadata"]["ownerReferences"][0][field] = json!(other);
        refused(controller.apply(&service), why);
    }
    let mut account = account(OTHER, "database");
    account["metadata"]["ownerReferences"] = of("database")["metadata"]["ownerReferences"].clone();
    refused(controller.apply(&account), why);
    let slice = object("discovery.k8s.io/v1", "EndpointSlice", OTHER, "other");
    let slice = with(slice, json!({"addressType": "IPv4", "endpoints": []}));
    refused(controller.apply(&slice), why);
    let budget = object("policy/v1", "PodDisruptionBudget", OTHER, "gw-a");
    refused(controller.apply(&with(budget, json!({"spec": {"maxUnavailable": 1}}))), why);
    controller.apply(&of("database")).unwrap();
    controller.delete("services", (OTHER, "database")).unwrap();
}

fn objects_of_others_stay(release: &Release, controller: &Account<'_>) {
    let mut foreign = [service(TENANT, "gw-foreign"), deployment(TENANT, "gw-foreign", "default")];
    for object in &mut foreign {
        object["metadata"]["labels"] = json!({"app": "foreign"});
    }
    release.apply(&foreign);
    refused(controller.apply(&service(TENANT, "gw-foreign")), "the object is not weft's");
    let deployment = deployment(TENANT, "gw-foreign", "gw-foreign");
    refused(controller.apply(&deployment), "the object is not weft's");
    for kind in ["services", "deployments"] {
        let foreign = controller.delete(kind, (TENANT, "gw-foreign"));
        refused(foreign, "the object is not weft's");
    }
    // Objects of the chart are Helm's.
    refused(controller.delete("services", ("liqo", "liqo-ipam")), "named gw-NAME");
    controller.delete("services", (TENANT, "gw-a")).unwrap();
}

fn pods_are_those_of_gateways(controller: &Account<'_>) {
    refused(controller.apply(&deployment(TENANT, "gw-b", "default")), "the service account of its");
    let of = |change: &dyn Fn(&mut Value)| {
        let mut deployment = deployment(TENANT, "gw-b", "gw-b");
        change(&mut deployment["spec"]["template"]["spec"]);
        controller.apply(&deployment)
    };
    let volume = |path: &str| json!([{"name": "v", "hostPath": {"path": path}}]);
    let why = "networking.gatewayTemplates.hostAccess=true";
    refused(of(&|pod| pod["hostNetwork"] = json!(true)), why);
    refused(of(&|pod| pod["hostPID"] = json!(true)), why);
    refused(of(&|pod| pod["hostIPC"] = json!(true)), why);
    refused(of(&|pod| pod["volumes"] = volume("/")), why);
    let privileged = json!({"privileged": true});
    refused(of(&|pod| pod["containers"][0]["securityContext"] = privileged.clone()), why);
    let capable = json!({"capabilities": {"add": ["NET_ADMIN", "SYS_MODULE"]}});
    refused(of(&|pod| pod["containers"][0]["securityContext"] = capable.clone()), why);
    let init = json!([{"name": "i", "image": "i", "securityContext": privileged}]);
    refused(of(&|pod| pod["initContainers"] = init.clone()), why);
    of(&|pod| pod["volumes"] = volume("/dev/net/tun")).unwrap();
    refused(of(&|pod| pod["hostNetwork"] = json!(true)), why);
}

fn bindings_are_those_of_gateways(release: &Release, controller: &Account<'_>) {
    let why = "gives accounts of gateways";
    refused(controller.apply(&binding(TENANT, "gw-b", "ClusterRole", "liqo-gateway")), why);
    controller.apply(&role(TENANT, "gw-b")).unwrap();
    // RBAC lets it bind roles that give nothing.
    let mut empty = role("", "gw-b");
    empty["kind"] = json!("ClusterRole");
    release.apply(&[empty]);
    refused(controller.apply(&binding(TENANT, "gw-b", "ClusterRole", "gw-b")), why);
    refused(controller.apply(&binding(TENANT, "gw-b", "Role", "gw-a")), why);
    let mut other = binding(TENANT, "gw-b", "Role", "gw-b");
    controller.apply(&other).unwrap();
    for (field, value) in [("name", "gw-a"), ("namespace", LABELLED)] {
        let mut other = other.clone();
        other["subjects"][0][field] = json!(value);
        refused(controller.apply(&other), why);
    }
    other["subjects"][0]["name"] = json!("default");
    refused(controller.apply(&other), why);
    other["subjects"] =
        json!([{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "gw-b"}]);
    refused(controller.apply(&other), why);
    refused(controller.apply(&keys(OTHER, CONTROLLER)), "liqo.io/tenant-namespace");
    refused(controller.apply(&keys(TENANT, "default")), why);
    let mut elsewhere = keys(TENANT, CONTROLLER);
    elsewhere["subjects"][0]["namespace"] = json!(OTHER);
    refused(controller.apply(&elsewhere), why);
    let mut other_role = keys(TENANT, CONTROLLER);
    other_role["roleRef"]["name"] = json!("gw-b");
    refused(controller.apply(&other_role), why);
    controller.apply(&keys(TENANT, CONTROLLER)).unwrap();
    let list = |namespace: &str| {
        let path = format!("/api/v1/namespaces/{namespace}/secrets");
        controller.run(&["get", "--raw", &path], &Value::Null)
    };
    release.server.wait_until("it may read keys there", || list(TENANT));
    refused(list(OTHER), "Forbidden");
    refused(list("liqo"), "Forbidden");
    let readers = |name: &str| {
        let mut readers = binding(TENANT, name, "ClusterRole", "liqo-gateway-records");
        readers["kind"] = json!("ClusterRoleBinding");
        readers["metadata"] = json!({"name": "liqo-gateway-records"});
        readers
    };
    refused(controller.apply(&readers("default")), why);
    let mut user = readers("gw-b");
    user["subjects"] = other["subjects"].clone();
    refused(controller.apply(&user), why);
    controller.apply(&readers("gw-b")).unwrap();
}

#[test]
fn controller_writes_own_secrets_only() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let controller = release.account(CONTROLLER);
    let key = |key: &str| json!({"data": {"privateKey": key}});
    controller.apply(&secret(TENANT, "gw-a", key("YQ=="))).unwrap();
    refused(controller.apply(&secret(OTHER, "gw-a", key("YQ=="))), "liqo.io/tenant-namespace");
    let mut token = secret("liqo", "token", json!({"type": "kubernetes.io/service-account-token"}));
    token["metadata"]["annotations"] =
        json!({"kubernetes.io/service-account.name": "liqo-route-agent"});
    refused(controller.apply(&token), "makes no tokens of accounts");
    // The certificate of the webhook is one.
    controller.apply(&secret("liqo", "typed", json!({"type": "example.org/tls"}))).unwrap();
    let mut users = secret(TENANT, "users", key("YQ=="));
    users["metadata"]["labels"] = json!({});
    refused(controller.apply(&users), "make and remove Secrets with the label");
    release.apply(&[users]);
    controller.apply(&keys(TENANT, CONTROLLER)).unwrap();
    release.server.wait_until("it may read keys there", || {
        controller.run(&["get", "secret", "users", "--namespace", TENANT], &Value::Null)
    });
    let patch = |patch: Value| {
        let patch = patch.to_string();
        let line = ["patch", "--namespace", TENANT, "secret/users", "--type=merge", "--patch"];
        controller.run(&[&line[..], &[&patch]].concat(), &Value::Null)
    };
    let labels = json!({"labels": {"networking.liqo.io/gateway-resource": "true"}});
    patch(json!({"metadata": labels, "data": {"publicKey": "Yg=="}})).unwrap();
    let why = "labels, owners and publicKey only";
    refused(patch(json!({"data": {"privateKey": "Yg=="}})), why);
    refused(patch(json!({"data": {"privateKey": null}})), why);
    refused(patch(json!({"data": {"more": "Yg=="}})), why);
    withdrawal_removes_own_secrets_only(&release);
}

/// RBAC lets it remove all Secrets.
fn withdrawal_removes_own_secrets_only(release: &Release) {
    let mut role = role(TENANT, "removal");
    role["rules"] =
        json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["deletecollection"]}]);
    let mut binding = binding(TENANT, "removal", "Role", "removal");
    binding["subjects"] =
        json!([{"kind": "ServiceAccount", "name": WITHDRAWAL, "namespace": "liqo"}]);
    release.apply(&[account("liqo", WITHDRAWAL), role, binding]);
    let withdrawal = release.account(WITHDRAWAL);
    let remove = |name: &str| {
        let path =
            format!("/api/v1/namespaces/{TENANT}/secrets?fieldSelector=metadata.name={name}");
        withdrawal.run(&["delete", "--raw", &path], &Value::Null)
    };
    release.server.wait_until("it may remove its own", || remove("gw-a"));
    refused(remove("users"), "make and remove Secrets with the label");
}

/// RBAC lets it patch all pods.
#[test]
fn controller_changes_labels_of_gateways_pods_only() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
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
    let label = || json!({"metadata": {"labels": {"networking.liqo.io/active": "true"}}});
    let image = json!({"spec": {"containers": [{"name": "c", "image": "example.org/other"}]}});
    let why = "changes nothing but labels";
    release.server.wait_until("the policy is in force", || {
        change("other", label()).err().ok_or("not yet").map(drop)
    });
    change("gw-milan-1", label()).unwrap();
    refused(change("other", label()), why);
    refused(change("gw-milan-1", image), why);
    refused(change("gw-milan-1", json!({"metadata": {"annotations": {"a": "b"}}})), why);
    let owners = json!([{"apiVersion": "v1", "kind": "Node", "name": "a", "uid": "u"}]);
    refused(change("gw-milan-1", json!({"metadata": {"ownerReferences": owners}})), why);
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
    let change = |change: &dyn Fn(&mut Value)| {
        let mut webhooks = there["webhooks"].clone();
        change(&mut webhooks);
        let patch = json!({ "webhooks": webhooks }).to_string();
        let line =
            ["patch", "mutatingwebhookconfiguration/weft-cidr-lists", "--type=merge", "--patch"];
        controller.run(&[&line[..], &[&patch]].concat(), &Value::Null)
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
        ("matchConditions", json!([{"name": "all", "expression": "true"}])),
        ("namespaceSelector", json!({"matchLabels": {"a": "b"}})),
        ("objectSelector", json!({"matchLabels": {"a": "b"}})),
    ] {
        refused(change(&|webhooks| webhooks[0][field] = value.clone()), why);
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

#[test]
fn agent_writes_status_of_its_own_node_only() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
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
    let agent = Account { release: &release, token };
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
