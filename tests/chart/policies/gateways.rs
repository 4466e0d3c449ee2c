//! Parts of gateways, and Services of IP resources.

use std::fs;

use serde_json::{Value, json};

use super::*;
use crate::rights::RULES;

#[test]
fn controller_writes_gateways_in_their_namespaces() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let controller = release.account(CONTROLLER);
    objects_are_those_of_gateways(&release, &controller);
    pods_are_those_of_gateways(&controller);
}

#[test]
fn host_access_lifts_limits_of_pods_alone() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let controller = release.account(CONTROLLER);
    let unlimited =
        |namespace: &str, account: &str| with_host_access(deployment(namespace, "gw-a", account));
    let why = "spec.template.spec: a template gives pods of gateways";
    refused(controller.apply(&unlimited(TENANT, "gw-a")), why);
    let host_access = "networking: {gatewayTemplates: {hostAccess: true}}";
    release.helm("upgrade", &[MIN_VALUES, CRDS, TEMPLATES, host_access]).unwrap();
    release.server.wait_until("its pods may have all of that", || {
        controller.apply(&unlimited(TENANT, "gw-a"))
    });
    controller.apply(&unlimited(LABELLED, "gw-a")).unwrap();
    refused(controller.apply(&unlimited(TENANT, "default")), "the service account of its name");
    refused(controller.apply(&unlimited(OTHER, "gw-a")), "liqo.io/tenant-namespace");
    refused(controller.apply(&unlimited("liqo", "gw-a")), "liqo.io/tenant-namespace");
    objects_are_those_of_gateways(&release, &controller);
    release.helm("upgrade", &[MIN_VALUES, CRDS, TEMPLATES]).unwrap();
    release.server.wait_until("its pods are limited again", || {
        controller.apply(&unlimited(TENANT, "gw-a")).err().ok_or("not yet")
    });
    refused(controller.apply(&unlimited(TENANT, "gw-a")), why);
}

/// Adds one of each that a template gives to pods with `hostAccess` only.
fn with_host_access(mut deployment: Value) -> Value {
    let profile = "container.apparmor.security.beta.kubernetes.io/gateway";
    let template = &mut deployment["spec"]["template"];
    template["metadata"]["annotations"] = json!({ profile: "unconfined" });
    let exec = json!({"exec": {"command": ["nft"]}});
    let capable = json!({"name": "gateway", "image": "example.org/other:v1", "command": ["sh"],
        "args": ["--kubeconfig=/a"], "env": [{"name": "LD_PRELOAD", "value": "/a.so"}],
        "envFrom": [{"configMapRef": {"name": "c"}}], "lifecycle": {"postStart": exec},
        "livenessProbe": exec, "readinessProbe": exec, "startupProbe": exec,
        "volumeMounts": [{"name": "host", "mountPath": "/bin"}],
        "ports": [{"containerPort": 53, "hostPort": 53}],
        "securityContext": {"capabilities": {"add": ["SYS_ADMIN", "SYS_MODULE"]},
            "seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"},
            "seLinuxOptions": {"type": "spc_t"}}});
    let privileged = json!({"name": "init", "image": "example.org/other:v1",
        "securityContext": {"privileged": true}});
    template["spec"] = with(
        template["spec"].clone(),
        // Without hostPID, which the API server does not take beside shared processes.
        json!({"hostNetwork": true, "hostIPC": true, "nodeName": "rome-1",
            "shareProcessNamespace": true,
            "priorityClassName": "system-node-critical",
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
            "containers": [capable], "initContainers": [privileged]}),
    );
    deployment
}

/// Checks all but what is in pods.
fn objects_are_those_of_gateways(release: &Release, controller: &Account<'_>) {
    for namespace in [TENANT, LABELLED] {
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
        account("liqo", "gw-a"),
        deployment("liqo", "gw-a", "gw-a"),
        keys("liqo", CONTROLLER),
        service("kube-system", "gw-a"),
        service(OTHER, "gw-a"),
        binding(OTHER, "gw-a", "Role", "gw-a"),
        deployment(OTHER, "gw-a", "gw-a"),
    ] {
        let namespace = object["metadata"]["namespace"].as_str().unwrap();
        refused(controller.apply(&object), &remedy.replace("shop", namespace));
    }
    refused(controller.apply(&role("kube-system", "gw-a")), &remedy.replace("shop", "kube-system"));
    for object in [
        account(TENANT, "other"),
        role(TENANT, "gw-"),
        service(TENANT, "weft-gateway-keys"),
        binding(TENANT, "other", "Role", "gw-a"),
    ] {
        refused(controller.apply(&object), "named gw-NAME");
    }
    let mut unlabelled = account(TENANT, "gw-b");
    unlabelled["metadata"]["labels"] = json!({});
    refused(controller.apply(&unlabelled), "with the label app.kubernetes.io/managed-by=weft");
    services_of_ips_are_anywhere(controller);
    objects_of_others_stay(release, controller);
    slices_are_of_own_services(release, controller);
    bindings_are_those_of_gateways(release, controller);
    roles_have_rules_of_gateways(release, controller);
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
    refused(controller.apply(&slice(OTHER, "other", "other")), why);
    refused(controller.apply(&budget(OTHER, "gw-a")), why);
    let why = "no Services with spec.externalIPs or of the type ExternalName";
    let mut elsewhere = of("database");
    elsewhere["spec"]["externalIPs"] = json!(["192.0.2.200"]);
    refused(controller.apply(&elsewhere), why);
    let spec = json!({"type": "ExternalName", "externalName": "example.org"});
    refused(controller.apply(&with(of("database"), json!({ "spec": spec }))), why);
    controller.apply(&of("database")).unwrap();
    controller.delete("services", (OTHER, "database")).unwrap();
}

fn slice(namespace: &str, name: &str, service: &str) -> Value {
    let mut slice = object("discovery.k8s.io/v1", "EndpointSlice", namespace, name);
    slice["metadata"]["labels"]["kubernetes.io/service-name"] = json!(service);
    with(slice, json!({"addressType": "IPv4", "endpoints": []}))
}

fn budget(namespace: &str, name: &str) -> Value {
    let budget = object("policy/v1", "PodDisruptionBudget", namespace, name);
    with(budget, json!({"spec": {"maxUnavailable": 1}}))
}

/// kube-proxy follows the label, whatever the name of a slice.
fn slices_are_of_own_services(release: &Release, controller: &Account<'_>) {
    let slice = |name: &str, service: &str| {
        let mut slice = slice(OTHER, name, service);
        slice["metadata"]["ownerReferences"] = json!([{"apiVersion": "ipam.liqo.io/v1alpha1",
            "kind": "IP", "name": name, "uid": "u"}]);
        slice
    };
    let foreign = |name: &str| {
        let mut foreign = service(OTHER, name);
        foreign["metadata"]["labels"] = json!({});
        foreign
    };
    controller.apply(&slice("late", "late")).unwrap();
    release.apply(&["victim", "late", "probe"].map(foreign));
    release.apply(&[service(OTHER, "own")]);
    refused(controller.apply(&slice("grab", "victim")), "of the Service of their name");
    release.server.wait_until("the API server has seen the last of them", || {
        let mut probe = slice("probe", "probe");
        probe["metadata"]["annotations"] = json!({"try": "again"});
        controller.apply(&probe).err().ok_or("not yet")
    });
    let why = "the Service of that name is not weft's";
    refused(controller.apply(&slice("victim", "victim")), why);
    let changed = with(slice("late", "late"), json!({"ports": [{"port": 53}]}));
    refused(controller.apply(&changed), why);
    controller.apply(&slice("own", "own")).unwrap();
    controller.delete("endpointslices", (OTHER, "own")).unwrap();
    // Where all Services are weft's, the policy is not evaluated.
    controller.apply(&self::slice(LABELLED, "gw-a", "gw-a")).unwrap();
}

fn objects_of_others_stay(release: &Release, controller: &Account<'_>) {
    let why = "the object is not weft's";
    for (kind, ours) in [
        ("services", service(TENANT, "gw-foreign")),
        ("deployments", deployment(TENANT, "gw-foreign", "gw-foreign")),
        ("poddisruptionbudgets", budget(TENANT, "gw-foreign")),
        ("roles", role(TENANT, "gw-foreign")),
        ("endpointslices", slice(TENANT, "gw-slice", "gw-slice")),
    ] {
        let mut foreign = ours.clone();
        foreign["metadata"]["labels"] = json!({"app": "foreign"});
        release.apply(&[foreign]);
        refused(controller.apply(&ours), why);
        let name = ours["metadata"]["name"].as_str().unwrap();
        refused(controller.delete(kind, (TENANT, name)), why);
    }
    for group in ["networking.liqo.io/v1beta1", "ipam.liqo.io/v1alpha1"] {
        let mut lost = service(TENANT, "gw-lost");
        lost["metadata"]["labels"] = json!({});
        lost["metadata"]["ownerReferences"] =
            json!([{"apiVersion": group, "kind": "Any", "name": "any", "uid": "u"}]);
        release.apply(&[lost]);
        controller.apply(&service(TENANT, "gw-lost")).unwrap();
        controller.delete("services", (TENANT, "gw-lost")).unwrap();
    }
    release.apply(&[service("liqo", "gw-old"), service(OTHER, "gw-old")]);
    controller.delete("services", ("liqo", "gw-old")).unwrap();
    refused(controller.delete("services", (OTHER, "gw-old")), "liqo.io/tenant-namespace");
    // Objects of the chart are Helm's.
    refused(controller.delete("services", ("liqo", "liqo-ipam")), "named gw-NAME");
    controller.delete("services", (TENANT, "gw-a")).unwrap();
}

fn pods_are_those_of_gateways(controller: &Account<'_>) {
    refused(controller.apply(&deployment(TENANT, "gw-b", "default")), "the service account of its");
    let of = |change: &dyn Fn(&mut Value)| {
        let mut deployment = deployment(TENANT, "gw-b", "gw-b");
        change(&mut deployment["spec"]["template"]);
        controller.apply(&deployment)
    };
    let volume = |path: &str| json!([{"name": "v", "hostPath": {"path": path}}]);
    for (found, field, value) in [
        ("namespaces of the host", "hostNetwork", json!(true)),
        ("namespaces of the host", "hostPID", json!(true)),
        ("namespaces of the host", "hostIPC", json!(true)),
        ("processes that its containers share", "shareProcessNamespace", json!(true)),
        ("a nodeName", "nodeName", json!("rome-1")),
        ("a priority class", "priorityClassName", json!("system-node-critical")),
        ("volumes other than emptyDir", "volumes", volume("/")),
        (
            "volumes other than emptyDir",
            "volumes",
            json!([{"name": "v", "configMap": {"name": "c"}}]),
        ),
        ("another seccompProfile", "securityContext", json!({})),
        ("seLinuxOptions", "securityContext", secure(json!({"seLinuxOptions": {"type": "spc_t"}}))),
    ] {
        refused(of(&|template| template["spec"][field] = value.clone()), found);
    }
    let init = |context: Value| {
        let init = json!({"name": "i", "image": SIDECAR, "command": ["gateway"]});
        json!([with(init, json!({ "securityContext": context }))])
    };
    for (found, context) in [
        ("a privileged container", json!({"privileged": true})),
        (
            "more capabilities",
            json!({"allowPrivilegeEscalation": false,
                "capabilities": {"add": ["NET_ADMIN", "SYS_MODULE"]}}),
        ),
        ("another seccompProfile", json!({"seccompProfile": {"type": "Unconfined"}})),
        ("another appArmorProfile", json!({"appArmorProfile": {"type": "Unconfined"}})),
        ("seLinuxOptions", json!({"seLinuxOptions": {"type": "spc_t"}})),
    ] {
        let set = |template: &mut Value| {
            template["spec"]["containers"][0]["securityContext"] = context.clone();
        };
        refused(of(&set), found);
        refused(of(&|template| template["spec"]["initContainers"] = init(context.clone())), found);
    }
    for way in ["httpGet", "tcpSocket"] {
        let mut elsewhere = json!({});
        elsewhere[way] = json!({"port": 80, "host": "127.0.0.1"});
        for fields in [
            json!({ "livenessProbe": elsewhere }),
            json!({ "readinessProbe": elsewhere }),
            json!({ "startupProbe": elsewhere }),
            json!({"lifecycle": { "postStart": elsewhere }}),
            json!({"lifecycle": { "preStop": elsewhere }}),
        ] {
            let set = |template: &mut Value| {
                let first = &mut template["spec"]["containers"][0];
                *first = with(with(first.take(), json!({"securityContext": {}})), fields.clone());
            };
            refused(of(&set), "hooks or probes towards another host");
        }
    }
    let ports = json!([{"containerPort": 53, "hostPort": 53}]);
    refused(
        of(&|template| template["spec"]["containers"][0]["ports"] = ports.clone()),
        "a hostPort",
    );
    let profile = json!({"container.apparmor.security.beta.kubernetes.io/gateway": "unconfined"});
    let annotate = |template: &mut Value| template["metadata"]["annotations"] = profile.clone();
    refused(of(&annotate), "another appArmorProfile");
    capabilities_are_those_of_gateways(controller);
    of(&|template| template["spec"]["volumes"] = volume("/dev/net/tun")).unwrap();
    of(&|template| template["spec"]["priorityClassName"] = json!(PRIORITY)).unwrap();
    let why = "networking.gatewayTemplates.hostAccess=true";
    refused(of(&|template| template["spec"]["hostNetwork"] = json!(true)), why);
}

/// A program of one's choice with SYS_ADMIN has its node.
fn capabilities_are_those_of_gateways(controller: &Account<'_>) {
    let of = |container: &str, index: usize, fields: Value| {
        let mut deployment = deployment(TENANT, "gw-c", "gw-c");
        let sidecar = json!({"name": "sidecar", "image": SIDECAR, "command": ["sh"],
            "args": ["--kubeconfig=/a"], "env": [{"name": "LD_PRELOAD", "value": "/a.so"}]});
        let pod = &mut deployment["spec"]["template"]["spec"];
        pod["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
        pod["initContainers"] = json!([with(sidecar.clone(), json!({"name": "init"}))]);
        let probe = json!({"livenessProbe": {"exec": {"command": ["sh"]}}});
        pod["containers"] = json!([pod["containers"][0], with(sidecar, probe)]);
        pod[container][index] = with(pod[container][index].clone(), fields);
        controller.apply(&deployment)
    };
    of("containers", 0, json!({})).unwrap();
    of("containers", 0, json!({ "image": SIDECAR })).unwrap();
    let why =
        "other images than example.org/gateway:v1 and those of networking.gatewayTemplates.images";
    for (container, index) in [("containers", 0), ("containers", 1), ("initContainers", 0)] {
        refused(of(container, index, json!({"image": "example.org/gateway:v2"})), why);
    }
    let added = json!({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}});
    for (container, index) in [("containers", 1), ("initContainers", 0)] {
        refused(of(container, index, added.clone()), "another command than [gateway]");
    }
    let exec = json!({"exec": {"command": ["nft"]}});
    let volume = json!([{"name": "v", "mountPath": "/bin"}]);
    let config = json!([{"configMapRef": {"name": "c"}}]);
    for (found, fields) in [
        ("that may gain more", added),
        ("another command than [gateway]", json!({"command": null, "args": ["nft"]})),
        ("another command than [gateway]", json!({"command": ["gateway", "--kubeconfig=/a"]})),
        ("hooks or probes", json!({"lifecycle": {"postStart": exec}})),
        ("hooks or probes", json!({ "livenessProbe": exec })),
        ("hooks or probes", json!({ "readinessProbe": exec })),
        ("hooks or probes", json!({ "startupProbe": exec })),
        ("the argument --kubeconfig", json!({"args": ["--kubeconfig", "/a"]})),
        ("the argument --kubeconfig", json!({"args": ["--$(WEFT_A)=/a"]})),
        ("environment variables", json!({"env": [{"name": "LD_PRELOAD", "value": "/a.so"}]})),
        ("environment variables", json!({ "envFrom": config })),
        ("mounts other", json!({ "volumeMounts": volume })),
    ] {
        refused(of("containers", 0, fields), found);
    }
    let usual = json!({"args": ["--kubernetes", "--name=$(WEFT_NAME)"],
        "env": [{"name": "RUST_LOG", "value": "debug"}, {"name": "RUST_BACKTRACE", "value": "1"},
            {"name": "WEFT_NAME", "value": "c"}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8084}}});
    of("containers", 0, usual).unwrap();
}

fn secure(mut context: Value) -> Value {
    context["seccompProfile"] = json!({"type": "RuntimeDefault"});
    context
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
    let mut user = keys(TENANT, CONTROLLER);
    user["subjects"][0]["apiGroup"] = json!("rbac.authorization.k8s.io");
    user["subjects"][0]["kind"] = json!("User");
    refused(controller.apply(&user), why);
    release.apply(&[role(TENANT, "liqo-gateway-keys")]);
    let mut namesake = keys(TENANT, CONTROLLER);
    namesake["roleRef"]["kind"] = json!("Role");
    refused(controller.apply(&namesake), why);
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

/// RBAC lets it pass on all that it has.
fn roles_have_rules_of_gateways(release: &Release, controller: &Account<'_>) {
    let rules = fs::read_to_string(RULES).unwrap();
    let rules: Vec<Value> = serde_saphyr::from_str(&rules).unwrap();
    let own = |rules: &[Value]| controller.apply(&role_of(TENANT, "gw-server", json!(rules)));
    let services = json!([rule("", "services", &["list"], &[])]);
    let created = controller.apply(&role_of(TENANT, "gw-new", services));
    refused(created, "by a Role of exactly these rules");
    own(&rules).unwrap();
    let read = ["get", "list", "watch"];
    let liqo = "networking.liqo.io";
    for more in [
        rule("apps", "deployments", &["create"], &[]),
        rule("", "secrets", &["create", "patch"], &[]),
        rule("", "secrets", &read, &["other"]),
        rule("fabric.weft.dev", "gatewayconfigs", &read, &["other"]),
        rule("fabric.weft.dev", "gatewayconfigs", &read, &[]),
        rule("fabric.weft.dev", "gatewayconfigs", &["patch"], &["server"]),
        rule("fabric.weft.dev", "gatewayconfigs/status", &["get", "patch"], &["other"]),
        rule(liqo, "connections", &["get", "list", "watch", "patch", "delete"], &["gw-other"]),
        rule(liqo, "connections/status", &["get", "patch"], &["gw-other"]),
    ] {
        refused(own(&[&rules[..], &[more]].concat()), "by a Role of exactly these rules");
    }
    for secrets in [
        rule("", "secrets", &read, &[]),
        rule("", "secrets", &read, &["gw-keys", "other"]),
        rule("", "secrets", &read, &[""]),
        rule("", "secrets", &["get"], &["gw-keys"]),
        rule("", "services", &read, &["gw-keys"]),
        rule("apps", "deployments", &read, &["gw-keys"]),
    ] {
        let mut rules = rules.clone();
        rules[2] = secrets;
        refused(own(&rules), "by a Role of exactly these rules");
    }
    // RBAC passes on no more than it has: a right of its own to Secrets of other API groups, too.
    let all = json!([{"apiGroups": ["*"], "resources": ["secrets"], "verbs": read}]);
    let mut more = binding(TENANT, "more", "Role", "more");
    more["subjects"][0] =
        json!({"kind": "ServiceAccount", "name": CONTROLLER, "namespace": "liqo"});
    release.apply(&[role_of(TENANT, "more", all), more]);
    let mut rules = rules;
    rules[2]["apiGroups"] = json!(["", "example.org"]);
    release.server.wait_until("RBAC lets it pass that on", || {
        let error = own(&rules).err().ok_or("it is granted")?;
        if error.contains("not currently held") { Err("not yet") } else { Ok(()) }
    });
    refused(own(&rules), "by a Role of exactly these rules");
}

/// An account may have been bound to a Role that others made.
#[test]
fn gateways_make_no_parts_of_gateways() {
    let Some(release) = Release::prepare() else { return };
    release.install_with_policies();
    let all = json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]);
    let namespaces = [TENANT, LABELLED, "liqo", OTHER];
    for namespace in namespaces {
        let role = role_of(namespace, "gw-evil", all.clone());
        let binding = binding(namespace, "gw-evil", "Role", "gw-evil");
        release.apply(&[account(namespace, "gw-evil"), role, binding]);
    }
    let why = "write Connections and statuses of GatewayConfigs only";
    for namespace in namespaces {
        let gateway = release.account_in(namespace, "gw-evil");
        let spec = json!({"serviceAccountName": "gw-evil",
            "containers": [{"name": "c", "image": "example.org/c"}]});
        let pod = with(object("v1", "Pod", namespace, "evil"), json!({ "spec": spec }));
        let parts = [
            pod,
            secret(namespace, "evil", json!({})),
            account(namespace, "evil"),
            service(namespace, "evil"),
            deployment(namespace, "gw-evil", "gw-evil"),
            role(namespace, "evil"),
            binding(namespace, "evil", "Role", "gw-evil"),
            object("v1", "ConfigMap", namespace, "evil"),
            // These are there.
            account(namespace, "gw-evil"),
            role(namespace, "gw-evil"),
        ];
        // Others may call their accounts so, too.
        if namespace == OTHER {
            parts.iter().for_each(|part| drop(gateway.apply(part).unwrap()));
            continue;
        }
        parts.iter().for_each(|part| refused(gateway.apply(part), why));
        for kind in ["serviceaccounts", "roles"] {
            refused(gateway.delete(kind, (namespace, "gw-evil")), why);
        }
        let connection = object("networking.liqo.io/v1beta1", "Connection", namespace, "gw-evil");
        let spec = json!({"type": "Client", "gatewayRef": {"name": "evil"}});
        gateway.apply(&with(connection, json!({ "spec": spec }))).unwrap();
    }
}
