//! Pods of gateways, as templates have them.

use api_server::ApiServer;
use serde_json::{Value, json};

use super::*;

pub(super) fn pods_are_those_of_gateways(controller: &Account<'_>) {
    refused(controller.apply(&deployment(TENANT, "gw-b", "default")), "the service account of its");
    let of = |change: &dyn Fn(&mut Value)| {
        let mut deployment = deployment(TENANT, "gw-b", "gw-b");
        change(&mut deployment["spec"]["template"]);
        controller.apply(&deployment)
    };
    let volume = |path: &str| json!([{"name": "v", "hostPath": {"path": path}}]);
    for (found, value) in [
        ("hostNetwork: expected false", json!({"hostNetwork": true})),
        ("hostPID: expected false", json!({"hostPID": true})),
        ("hostIPC: expected false", json!({"hostIPC": true})),
        ("shareProcessNamespace: expected false", json!({"shareProcessNamespace": true})),
        ("nodeName: expected none", json!({"nodeName": "rome-1"})),
        ("runtimeClassName: expected none", json!({"runtimeClassName": "kata"})),
        ("resourceClaims: expected none", resource_claims()),
        (
            "securityContext.sysctls: expected none",
            json!({"securityContext":
                secure(json!({"sysctls": [{"name": "net.ipv4.ip_forward", "value": "1"}]}))}),
        ),
        (
            "securityContext.seLinuxOptions: expected none",
            json!({"securityContext": secure(json!({"seLinuxOptions": {"type": "spc_t"}}))}),
        ),
        (
            "securityContext.appArmorProfile: expected the type RuntimeDefault",
            json!({"securityContext": secure(json!({"appArmorProfile": {"type": "Unconfined"}}))}),
        ),
        (
            "priorityClassName: expected no class of the system but that of \
             networking.gatewayTemplates.pod.priorityClassName",
            json!({"priorityClassName": "system-node-critical"}),
        ),
        ("spec.template.spec.volumes: v: expected emptyDir", json!({"volumes": volume("/")})),
        (
            "spec.template.spec.volumes: v: expected emptyDir",
            json!({"volumes": [{"name": "v", "configMap": {"name": "c"}}]}),
        ),
        (
            "securityContext.seccompProfile of container gateway: expected the type",
            json!({"securityContext": {}}),
        ),
    ] {
        if value == json!({}) {
            continue;
        }
        let set = |template: &mut Value| {
            template["spec"] = with(template["spec"].clone(), value.clone());
        };
        refused(of(&set), found);
        refused(of(&set), "networking.gatewayTemplates.");
    }
    let init = |context: Value| {
        let init = json!({"name": "i", "image": SIDECAR, "command": ["gateway"]});
        json!([with(init, json!({ "securityContext": context }))])
    };
    for (found, context) in [
        ("privileged of container", json!({"privileged": true})),
        (
            "capabilities.add of container",
            json!({"allowPrivilegeEscalation": false,
                "capabilities": {"add": ["NET_ADMIN", "SYS_MODULE"]}}),
        ),
        ("seccompProfile of container", json!({"seccompProfile": {"type": "Unconfined"}})),
        ("appArmorProfile of container", json!({"appArmorProfile": {"type": "Unconfined"}})),
        ("seLinuxOptions of container", json!({"seLinuxOptions": {"type": "spc_t"}})),
    ] {
        let set = |template: &mut Value| {
            template["spec"]["containers"][0]["securityContext"] = context.clone();
        };
        refused(
            of(&set),
            &format!("spec.template.spec: securityContext.{found} gateway: expected"),
        );
        let set = |template: &mut Value| {
            template["spec"]["initContainers"] = init(context.clone());
        };
        refused(of(&set), &format!("spec.template.spec: securityContext.{found} i: expected"));
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
            refused(of(&set), "lifecycle and probes of container gateway: expected no host");
        }
    }
    let ports = json!([{"containerPort": 53, "hostPort": 53}]);
    refused(
        of(&|template| template["spec"]["containers"][0]["ports"] = ports.clone()),
        "ports of container gateway: expected no hostPort",
    );
    annotations_are_those_of_the_chart(controller);
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
    let why = "found example.org/gateway:v2; expected example.org/gateway:v1 or one of networking.gatewayTemplates.images";
    for (container, index) in [("containers", 0), ("containers", 1), ("initContainers", 0)] {
        refused(of(container, index, json!({"image": "example.org/gateway:v2"})), why);
    }
    let added = json!({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}});
    for (container, index) in [("containers", 1), ("initContainers", 0)] {
        refused(of(container, index, added.clone()), "expected [gateway]");
    }
    let exec = json!({"exec": {"command": ["nft"]}});
    let volume = json!([{"name": "v", "mountPath": "/bin"}]);
    let config = json!([{"configMapRef": {"name": "c"}}]);
    for (found, fields) in [
        ("securityContext.allowPrivilegeEscalation", added),
        ("command", json!({"command": null, "args": ["nft"]})),
        ("command", json!({"command": ["gateway", "--kubeconfig=/a"]})),
        ("lifecycle and probes", json!({"lifecycle": {"postStart": exec}})),
        ("lifecycle and probes", json!({ "livenessProbe": exec })),
        ("lifecycle and probes", json!({ "readinessProbe": exec })),
        ("lifecycle and probes", json!({ "startupProbe": exec })),
        ("args", json!({"args": ["--kubeconfig", "/a"]})),
        ("args", json!({"args": ["--$(WEFT_A)=/a"]})),
        ("env and envFrom", json!({"env": [{"name": "LD_PRELOAD", "value": "/a.so"}]})),
        ("env and envFrom", json!({ "envFrom": config })),
        ("volumeMounts", json!({ "volumeMounts": volume })),
    ] {
        let why = format!("{found} of a container with capabilities gateway: expected");
        refused(of("containers", 0, fields), &why);
    }
    let usual = json!({"args": ["--kubernetes", "--name=$(WEFT_NAME)"],
        "env": [{"name": "RUST_LOG", "value": "debug"}, {"name": "RUST_BACKTRACE", "value": "1"},
            {"name": "WEFT_NAME", "value": "c"}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8084}}});
    of("containers", 0, usual).unwrap();
}

/// Settings of runtimes, CNIs and AppArmor, but also what `kubectl rollout restart` sets.
fn annotations_are_those_of_the_chart(controller: &Account<'_>) {
    let apply = |name: &str, manager: &str, annotations: Value| {
        let mut deployment = deployment(TENANT, name, name);
        deployment["spec"]["template"]["metadata"]["annotations"] = annotations;
        let manager = format!("--field-manager={manager}");
        let line = ["apply", "--server-side", "--force-conflicts", &manager, "--filename=-"];
        (line.map(str::to_owned), deployment)
    };
    let by_controller = |name: &str, annotations: Value| {
        let (line, deployment) = apply(name, "weft", annotations);
        controller.run(&line.each_ref().map(String::as_str), &deployment)
    };
    let devices = "io.kubernetes.cri-o.Devices";
    let why = "expected none but those of networking.gatewayTemplates.pod.annotations";
    for (key, value) in [
        ("container.apparmor.security.beta.kubernetes.io/gateway", "unconfined"),
        ("k8s.v1.cni.cncf.io/networks", "storage"),
        (devices, "/dev/mem"),
    ] {
        let named = format!("spec.template.metadata.annotations: {key}: {why}");
        refused(by_controller("gw-d", json!({ key: value })), &named);
    }
    by_controller("gw-d", json!({ devices: "/dev/net/tun" })).unwrap();
    let restarted = "kubectl.kubernetes.io/restartedAt";
    let (line, deployment) = apply("gw-d", "user", json!({ restarted: "noon" }));
    let line = line.each_ref().map(String::as_str);
    controller.release.server.kubectl(&line, &deployment.to_string()).unwrap();
    by_controller("gw-d", json!({ devices: "/dev/net/tun" })).unwrap();
    refused(by_controller("gw-d", json!({ restarted: "night" })), why);
}

/// Part of a pod that older API servers drop, unless they are set up for it.
fn resource_claims() -> Value {
    match ApiServer::is_older_than(34) {
        true => json!({}),
        false => json!({"resourceClaims": [{"name": "card", "resourceClaimName": "card"}]}),
    }
}

fn secure(mut context: Value) -> Value {
    context["seccompProfile"] = json!({"type": "RuntimeDefault"});
    context
}

/// Adds one of each that a template gives to pods with `hostAccess` only.
pub(super) fn with_host_access(mut deployment: Value) -> Value {
    let profile = "container.apparmor.security.beta.kubernetes.io/gateway";
    let template = &mut deployment["spec"]["template"];
    template["metadata"]["annotations"] = json!({ profile: "unconfined", "a": "b" });
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
    template["spec"] = with(template["spec"].clone(), resource_claims());
    template["spec"] = with(
        template["spec"].clone(),
        // Without hostPID, which the API server does not take beside shared processes.
        json!({"hostNetwork": true, "hostIPC": true, "nodeName": "rome-1",
            "shareProcessNamespace": true,
            "priorityClassName": "system-node-critical", "runtimeClassName": "kata",
            "volumes": [{"name": "host", "hostPath": {"path": "/"}}],
            "containers": [capable], "initContainers": [privileged]}),
    );
    deployment
}
