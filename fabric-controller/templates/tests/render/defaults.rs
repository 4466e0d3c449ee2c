//! weft's own templates.

use gateway_templates::{Rendered, WIREGUARD_CLIENT, WIREGUARD_SERVER};
use k8s_openapi::api::apps::v1::DeploymentSpec;
use serde_json::{Value, json};

use crate::{folder, read, variables};

fn rendered(template: &str, gateway: &str) -> Rendered {
    let template: Value = serde_saphyr::from_str(template).unwrap();
    let gateway = read(&folder().join("cases.yaml"))["gateways"][gateway].take();
    Rendered::new(&template["spec"]["template"], &variables(&gateway)).unwrap()
}

fn deployments() -> [DeploymentSpec; 2] {
    let server = rendered(WIREGUARD_SERVER, "server").deployment;
    let client = rendered(WIREGUARD_CLIENT, "client").deployment;
    [server.spec, client.spec]
}

#[test]
fn they_are_named_as_liqoctl_names_them() {
    for (text, kind) in [(WIREGUARD_SERVER, "Server"), (WIREGUARD_CLIENT, "Client")] {
        let template: Value = serde_saphyr::from_str(text).unwrap();
        assert_eq!(template["kind"], format!("WgGateway{kind}Template"));
        assert_eq!(template["metadata"]["name"], format!("wireguard-{}", kind.to_lowercase()));
        assert_eq!(template["spec"]["objectKind"]["kind"], format!("WgGateway{kind}"));
    }
}

#[test]
fn pods_and_deployments_are_found_by_liqos_labels() {
    let deployment = rendered(WIREGUARD_SERVER, "server").deployment;
    let pods = deployment.spec.template.metadata.unwrap().labels;
    for labels in [deployment.metadata.labels, pods] {
        let labels = labels.unwrap();
        assert_eq!(labels["networking.liqo.io/component"], "gateway");
        assert_eq!(labels["networking.liqo.io/gateway-name"], "milan");
        assert_eq!(labels["networking.liqo.io/gateway-namespace"], "liqo-tenant-milan");
        assert_eq!(labels["networking.liqo.io/active"], "true");
        assert_eq!(labels["liqo.io/remote-cluster-id"], "milan-id");
    }
}

#[test]
fn selectors_select_the_pods() {
    for spec in deployments() {
        let labels = spec.template.metadata.unwrap().labels.unwrap();
        let selector = spec.selector.match_labels.unwrap();
        assert!(selector.iter().all(|(key, value)| labels.get(key) == Some(value)));
        assert!(!selector.contains_key("networking.liqo.io/active"), "it moves from pod to pod");
    }
}

#[test]
fn service_selects_active_gateway_only() {
    let service = rendered(WIREGUARD_SERVER, "server").service.unwrap();
    assert_eq!(
        serde_json::to_value(service.spec).unwrap(),
        json!({
            "type": "NodePort",
            "loadBalancerIP": "192.0.2.7",
            "selector": {
                "networking.liqo.io/component": "gateway",
                "networking.liqo.io/gateway-name": "milan",
                "networking.liqo.io/gateway-namespace": "liqo-tenant-milan",
                "networking.liqo.io/active": "true",
            },
            "ports": [{
                "protocol": "UDP",
                "port": 51840,
                "targetPort": 51840,
                "nodePort": 30742,
            }],
        })
    );
    assert_eq!(rendered(WIREGUARD_CLIENT, "client").service, None);
}

#[test]
fn first_of_several_ports_is_that_of_service() {
    let spec = rendered(WIREGUARD_SERVER, "bare").service.unwrap().spec.unwrap();
    let ports = spec.ports.unwrap();
    assert_eq!((ports[0].port, ports[0].node_port), (51840, None));
    assert_eq!(spec.load_balancer_ip, None);
}

#[test]
fn default_container_has_min_rights() {
    let any = ["NET_ADMIN", "SYS_ADMIN"].as_slice();
    let with_any_port = ["NET_ADMIN", "SYS_ADMIN", "NET_BIND_SERVICE"].as_slice();
    for (spec, added) in deployments().into_iter().zip([with_any_port, any]) {
        let pod = spec.template.spec.unwrap();
        assert_eq!(pod.containers.len(), 1);
        let security = pod.containers[0].security_context.clone().unwrap();
        assert_eq!(security.read_only_root_filesystem, Some(true));
        assert_eq!(security.privileged, None);
        let capabilities = security.capabilities.unwrap();
        assert_eq!(capabilities.drop.unwrap(), ["ALL"]);
        assert_eq!(capabilities.add.unwrap(), added);
    }
}

#[test]
fn gateway_gets_its_name_as_arguments() {
    let [server, client] = deployments().map(|spec| spec.template.spec.unwrap());
    for (pod, namespace, name) in
        [(server, "liqo-tenant-milan", "milan"), (client, "liqo-tenant-rome", "rome")]
    {
        let account = format!("gw-{name}");
        let gateway = &pod.containers[0];
        assert_eq!(
            (gateway.name.as_str(), gateway.image.as_deref()),
            ("gateway", Some("weft/gateway"))
        );
        assert_eq!(gateway.command.clone().unwrap(), ["gateway"]);
        let (namespace, name) = (format!("--namespace={namespace}"), format!("--name={name}"));
        assert_eq!(
            gateway.args.clone().unwrap(),
            ["--kubernetes", &namespace, &name, "--http=[::]:8084", "--keep=/run/weft"]
        );
        let mounts = gateway.volume_mounts.iter().flatten();
        let kept = mounts.filter(|mount| mount.mount_path == "/run/weft").map(|m| &m.name);
        let kept: Vec<_> = kept.collect();
        let volumes = pod.volumes.iter().flatten().filter(|volume| kept == [&volume.name]);
        let media = volumes.map(|volume| volume.empty_dir.as_ref()?.medium.as_deref());
        assert_eq!(media.collect::<Vec<_>>(), [Some("Memory")], "no key on a disk");
        assert_eq!(pod.service_account_name, Some(account));
    }
}

#[test]
fn new_gateway_is_ready_before_old_one_ends() {
    for spec in deployments() {
        assert_eq!(spec.replicas, Some(1));
        assert_eq!(
            serde_json::to_value(spec.strategy).unwrap(),
            json!({ "type": "RollingUpdate", "rollingUpdate": { "maxSurge": 1, "maxUnavailable": 0 } })
        );
        let gateway = &spec.template.spec.unwrap().containers[0];
        let [ready, alive] = [&gateway.readiness_probe, &gateway.liveness_probe]
            .map(|probe| probe.clone().unwrap().http_get.unwrap().path.unwrap());
        assert_eq!((ready.as_str(), alive.as_str()), ("/readyz", "/healthz"));
        assert_eq!(gateway.ports.clone().unwrap()[0].container_port, 8084);
    }
}
