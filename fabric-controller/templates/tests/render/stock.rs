//! Templates as Liqo's chart installs them, and what users make of them.

use gateway_templates::Rendered;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};

use crate::{chain, folder, read, template, variables};

fn gateway(name: &str) -> Value {
    read(&folder().join("cases.yaml"))["gateways"][name].take()
}

fn server() -> Value {
    template(&folder().join("stock/server.yaml"))
}

fn rendered(template: &Value, of: &str) -> Rendered {
    Rendered::new(template, &variables(&gateway(of))).unwrap()
}

fn refused(template: &Value) -> String {
    chain(&Rendered::new(template, &variables(&gateway("server"))).unwrap_err())
}

#[test]
fn server_has_service_on_its_ports() {
    let service = rendered(&server(), "server").service.unwrap().spec.unwrap();
    assert_eq!(service.type_.as_deref(), Some("NodePort"));
    assert_eq!(service.load_balancer_ip.as_deref(), Some("192.0.2.7"));
    let port = &service.ports.unwrap()[0];
    assert_eq!((port.port, port.node_port), (51840, Some(30742)));
    assert_eq!(port.target_port, Some(IntOrString::Int(51840)));
}

#[test]
fn unset_fields_are_absent() {
    let service = rendered(&server(), "number").service.unwrap().spec.unwrap();
    assert_eq!(service.load_balancer_ip, None);
    assert_eq!(service.ports.unwrap()[0].node_port, None);
}

#[test]
fn names_and_namespaces_are_the_gateways() {
    let Rendered { deployment, service } = rendered(&server(), "server");
    for metadata in [deployment.metadata, service.unwrap().metadata] {
        assert_eq!(metadata.name.as_deref(), Some("gw-milan"));
        assert_eq!(metadata.namespace.as_deref(), Some("liqo-tenant-milan"));
        assert_eq!(metadata.labels.unwrap()["networking.liqo.io/gateway-name"], "milan");
    }
}

#[test]
fn gateway_labels_override_template() {
    let mut template = server();
    let metadata = &mut template["spec"]["service"]["metadata"];
    metadata["annotations"] = json!({ "zone": "west", "own": "{{ .Spec.MTU }}" });
    metadata["labels"]["team"] = json!("none");
    let metadata = rendered(&template, "server").service.unwrap().metadata;
    let annotations = metadata.annotations.unwrap();
    assert_eq!(
        annotations.into_iter().collect::<Vec<_>>(),
        [("example.com/pool", "7"), ("own", "1340"), ("zone", "east")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
    );
    let labels = metadata.labels.unwrap();
    assert_eq!(labels["team"], "net");
    assert_eq!(labels["networking.liqo.io/component"], "gateway");
}

#[test]
fn labels_are_added_to_template_without_metadata() {
    let mut template = server();
    template["spec"]["service"]["metadata"].take();
    let metadata = rendered(&template, "server").service.unwrap().metadata;
    assert_eq!(metadata.annotations.unwrap()["zone"], "east");
    assert_eq!(metadata.labels.unwrap()["team"], "net");
    let metadata = rendered(&template, "bare").service.unwrap().metadata;
    assert_eq!((metadata.labels, metadata.annotations), (None, None));
}

#[test]
fn client_has_no_service() {
    let Rendered { deployment, service } =
        rendered(&template(&folder().join("stock/client.yaml")), "client");
    assert_eq!(service, None);
    let pod = deployment.spec.template.spec.unwrap();
    let args = pod.containers[0].args.as_ref().unwrap();
    assert!(args.contains(&"--endpoint-address=192.0.2.20".to_owned()), "{args:?}");
    assert!(args.contains(&"--endpoint-ports=30742".to_owned()), "{args:?}");
}

#[test]
fn gateway_name_may_be_number() {
    let Rendered { deployment, service } = rendered(&server(), "number");
    let spec = deployment.spec;
    let labels = spec.selector.match_labels.unwrap();
    assert_eq!(labels["app.kubernetes.io/name"], "0042");
    assert_eq!(spec.template.spec.unwrap().service_account_name.as_deref(), Some("0042"));
    assert_eq!(service.unwrap().spec.unwrap().selector.unwrap()["app.kubernetes.io/name"], "0042");
}

#[test]
fn environment_variable_may_be_number() {
    let mut template = server();
    let pod = &mut template["spec"]["deployment"]["spec"]["template"]["spec"];
    pod["containers"][0]["env"] = json!([
        { "name": "A", "value": "007" },
        { "name": "B", "value": "{{ .Spec.MTU }}" },
    ]);
    let pod = rendered(&template, "server").deployment.spec.template.spec.unwrap();
    let values = pod.containers[0].env.iter().flatten().map(|env| env.value.clone().unwrap());
    assert_eq!(values.collect::<Vec<_>>(), ["007", "1340"]);
}

#[test]
fn quantity_may_be_number() {
    let mut template = server();
    let pod = &mut template["spec"]["deployment"]["spec"]["template"]["spec"];
    pod["containers"][0]["resources"]["limits"] =
        json!({ "cpu": 2, "memory": "128Mi", "weft.dev/half": 0.5, "weft.dev/text": "3" });
    let pod = rendered(&template, "server").deployment.spec.template.spec.unwrap();
    let limits = pod.containers[0].resources.clone().unwrap().limits.unwrap();
    let limits: Vec<_> = limits.into_values().map(|quantity| quantity.0).collect();
    assert_eq!(limits, ["2", "128Mi", "0.5", "3"]);
}

#[test]
fn invalid_rendered_object_names_its_place() {
    let mut template = server();
    template["spec"]["deployment"]["spec"]["replicas"] = json!("{{ .Name }}");
    assert_eq!(
        refused(&template),
        "spec.template.spec.deployment.spec.replicas: expected what a Deployment of Kubernetes has \
         there: invalid type: string \"milan\", expected i32"
    );
    let mut template = server();
    template["spec"]["service"]["spec"]["ports"][0]["port"] = json!("99999999999");
    assert_eq!(
        refused(&template),
        "spec.template.spec.service.spec.ports[0].port: expected what a Service of Kubernetes has \
         there: invalid type: string \"99999999999\", expected i32"
    );
}

#[test]
fn missing_part_is_named() {
    for (part, whole) in [("service", "service.spec"), ("deployment", "deployment.spec")] {
        let mut template = server();
        template["spec"].as_object_mut().unwrap().remove(part);
        let expected = format!("spec.template.spec.{whole}: missing; expected an object");
        assert_eq!(refused(&template), expected);
    }
}
