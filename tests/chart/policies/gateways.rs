//! Parts of gateways, and Services of IP resources.

use std::fs;

use serde_json::{Value, json};

use super::pods::{pods_are_those_of_gateways, with_host_access};
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
    let why = "helm upgrade --reuse-values --set networking.gatewayTemplates.";
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
    // The policy's parameters are Services of others: where there are none, it refuses nothing.
    controller.apply(&self::slice(LABELLED, "gw-a", "gw-a")).unwrap();
}

fn objects_of_others_stay(release: &Release, controller: &Account<'_>) {
    let why = "the object is not weft's";
    let withdrawal = able_withdrawal(release);
    for (kind, ours) in [
        ("services", service(TENANT, "gw-foreign")),
        ("serviceaccounts", account(TENANT, "gw-foreign")),
        ("deployments", deployment(TENANT, "gw-foreign", "gw-foreign")),
        ("poddisruptionbudgets", budget(TENANT, "gw-foreign")),
        ("roles", role(TENANT, "gw-foreign")),
        ("rolebindings", binding(TENANT, "gw-foreign", "Role", "gw-foreign")),
        ("endpointslices", slice(TENANT, "gw-slice", "gw-slice")),
    ] {
        let mut foreign = ours.clone();
        foreign["metadata"]["labels"] = json!({"app": "foreign"});
        release.apply(&[foreign]);
        refused(controller.apply(&ours), why);
        let name = ours["metadata"]["name"].as_str().unwrap();
        for account in [controller, &withdrawal] {
            refused(account.delete(kind, (TENANT, name)), why);
        }
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
    for account in [controller, &withdrawal] {
        refused(account.delete("services", (OTHER, "gw-old")), "liqo.io/tenant-namespace");
        // Objects of the chart are Helm's.
        refused(account.delete("services", ("liqo", "liqo-ipam")), "named gw-NAME");
    }
    controller.delete("services", (TENANT, "gw-a")).unwrap();
}

/// Gives the withdrawal its rights.
fn able_withdrawal(release: &Release) -> Account<'_> {
    release.apply(&rights_of_withdrawal(release));
    let withdrawal = release.account(WITHDRAWAL);
    release.apply(&[service(TENANT, "gw-removed")]);
    release.server.wait_until("it may delete parts of gateways", || {
        withdrawal.delete("services", (TENANT, "gw-removed"))
    });
    withdrawal
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
    let Some(release) = Release::shared() else { return };
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
        connections_are_own(&gateway, namespace);
    }
    accounts_of_users_are_not_gateways(release, &all);
}

/// RBAC lets a gateway create Connections of any name.
fn connections_are_own(gateway: &Account<'_>, namespace: &str) {
    let connection = |name: &str, finalizers: &[&str]| {
        let spec = json!({"type": "Client", "gatewayRef": {"name": "evil"}});
        let connection = object("networking.liqo.io/v1beta1", "Connection", namespace, name);
        let mut connection = with(connection, json!({ "spec": spec }));
        connection["metadata"]["finalizers"] = json!(finalizers);
        connection
    };
    let own = "writes the Connection of its own name, in its own namespace";
    refused(gateway.apply(&connection("gw-other", &[])), own);
    let held = "accounts of gateways set no metadata.finalizers";
    refused(gateway.apply(&connection("gw-evil", &["example.org/a"])), held);
    gateway.apply(&connection("gw-evil", &[])).unwrap();
    refused(gateway.apply(&connection("gw-evil", &["example.org/a"])), held);
    let apply = ["apply", "--server-side", "--field-manager=user", "--filename=-"];
    let of_user = connection("gw-evil", &["example.org/user"]).to_string();
    gateway.release.server.kubectl(&apply, &of_user).unwrap();
    gateway.apply(&connection("gw-evil", &[])).unwrap();
}

/// The name alone makes no account a gateway's.
fn accounts_of_users_are_not_gateways(release: &Release, all: &Value) {
    let user = release.account_in(OTHER, "gw-evil");
    for namespace in [TENANT, LABELLED] {
        let mut binding = binding(namespace, "user", "Role", "user");
        binding["subjects"][0] =
            json!({"kind": "ServiceAccount", "name": "gw-evil", "namespace": OTHER});
        release.apply(&[role_of(namespace, "user", all.clone()), binding]);
        let config = object("v1", "ConfigMap", namespace, "users");
        release.server.wait_until("it may write there", || user.apply(&config));
    }
    // liqoctl's namespaces have gateways: an account of one is a gateway's in any other, too.
    let gateway = json!({"kind": "ServiceAccount", "name": "gw-evil", "namespace": TENANT});
    let mut binding = binding(LABELLED, "other", "Role", "user");
    binding["subjects"] = json!([gateway]);
    release.apply(&[binding]);
    let other = release.account_in(TENANT, "gw-evil");
    release.server.wait_until("RBAC lets it write there", || {
        let answer = other.apply(&object("v1", "ConfigMap", LABELLED, "other"));
        let error = answer.err().ok_or("it is made")?;
        if error.contains("cannot patch") { Err("not yet") } else { Ok(()) }
    });
    let answer = other.apply(&object("v1", "ConfigMap", LABELLED, "other"));
    refused(answer, "write Connections and statuses of GatewayConfigs only");
}
