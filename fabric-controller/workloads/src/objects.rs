//! All that a gateway consists of in Kubernetes. Pure.

use std::collections::BTreeMap;

use fabric_api::check::Fault;
use fabric_api::labels;
use gateway_templates::Rendered;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::DynamicObject;
use serde::Serialize;

use super::rights;
use fabric_index::owner::reference_to;
use fabric_index::placement::PlannedGateway;

/// Its service account with its rights, its Deployment, the Service of a server, and the disruption budget
/// of several replicas: all named `gw-NAME`, all gone when the GatewayServer or GatewayClient is. The Deployment only with
/// the account's uid.
pub(super) fn objects_of(
    gateway: &PlannedGateway,
    rendered: Rendered,
    account: Option<&str>,
) -> serde_json::Result<Vec<DynamicObject>> {
    let metadata = |own: ObjectMeta| with_labels(gateway, own);
    let name = gateway.object.name();
    let mut objects = vec![
        dynamic(&rights::account(metadata(ObjectMeta::default())))?,
        dynamic(&rights::role(metadata(ObjectMeta::default()), name, &gateway.secret_name))?,
        dynamic(&rights::binding(metadata(ObjectMeta::default())))?,
    ];
    if let Some(mut service) = rendered.service {
        service.metadata = metadata(service.metadata);
        objects.push(dynamic(&service)?);
    }
    let mut deployment = rendered.deployment;
    deployment.metadata = metadata(deployment.metadata);
    fit(gateway, &mut deployment);
    if deployment.spec.replicas.is_some_and(|replicas| replicas > 1) {
        objects.push(dynamic(&budget(metadata(ObjectMeta::default()), &deployment))?);
    }
    if let Some(account) = account {
        let pod = deployment.spec.template.metadata.get_or_insert_default();
        let annotations = pod.annotations.get_or_insert_default();
        annotations.insert(labels::SERVICE_ACCOUNT.to_owned(), account.to_owned());
        objects.push(dynamic(&deployment)?);
    }
    Ok(objects)
}

/// Fails if the name of the gateway is too long for Kubernetes: names of Services and values of labels have 63 characters.
pub(super) fn check_name(gateway: &PlannedGateway, rendered: &Rendered) -> Result<(), Fault> {
    let (prefix, what) = match rendered.service {
        Some(_) => ("gw-", "its Service is called gw-NAME"),
        None => ("", "its pods have it in the label networking.liqo.io/gateway-name"),
    };
    let (name, max) = (gateway.object.name(), 63 - prefix.len());
    if name.len() <= max {
        return Ok(());
    }
    let message = format!(
        "found {} characters; expected at most {max}, as {what}: make it anew with a shorter name",
        name.len()
    );
    Err(Fault { field: "metadata.name".to_owned(), message })
}

/// Lets no drain take two replicas at once.
fn budget(metadata: ObjectMeta, deployment: &Deployment) -> PodDisruptionBudget {
    let spec = PodDisruptionBudgetSpec {
        max_unavailable: Some(IntOrString::Int(1)),
        unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
        selector: Some(deployment.spec.selector.clone()),
        ..PodDisruptionBudgetSpec::default()
    };
    PodDisruptionBudget { metadata, spec: Some(spec), status: None }
}

/// The labels by which a gateway's objects and its pods are found.
pub(super) fn labels_of(gateway: &PlannedGateway) -> BTreeMap<String, String> {
    let namespace = gateway.object.namespace().unwrap_or_default();
    [
        (labels::MANAGED_BY, labels::WEFT),
        (labels::COMPONENT, labels::GATEWAY),
        (labels::GATEWAY_NAME, gateway.object.name()),
        (labels::GATEWAY_NAMESPACE, namespace),
        (labels::REMOTE_CLUSTER_ID, gateway.peer.as_str()),
    ]
    .map(|(key, value)| (key.to_owned(), value.to_owned()))
    .into()
}

fn with_labels(gateway: &PlannedGateway, own: ObjectMeta) -> ObjectMeta {
    let mut all = own.labels.unwrap_or_default();
    all.extend(labels_of(gateway));
    ObjectMeta {
        name: Some(format!("gw-{}", gateway.object.name())),
        namespace: gateway.object.namespace().map(str::to_owned),
        labels: Some(all),
        annotations: own.annotations,
        owner_references: Some(vec![reference_to(&gateway.object)]),
        ..ObjectMeta::default()
    }
}

/// Sets the labels and service account of a Deployment's pods, whatever the template has.
fn fit(gateway: &PlannedGateway, deployment: &mut Deployment) {
    let spec = &mut deployment.spec;
    let set = spec.template.metadata.get_or_insert_default().labels.get_or_insert_default();
    set.extend(labels_of(gateway));
    set.insert(labels::ACTIVE.to_owned(), "true".to_owned());
    if let Some(pod) = &mut spec.template.spec {
        pod.service_account_name = Some(format!("gw-{}", gateway.object.name()));
        pod.service_account = None;
    }
}

pub(super) fn dynamic(object: &impl Serialize) -> serde_json::Result<DynamicObject> {
    serde_json::from_value(serde_json::to_value(object)?)
}

#[cfg(test)]
mod tests {
    use fabric_api::networking::GatewayServer;
    use gateway_templates::{Variables, WIREGUARD_SERVER};
    use serde_json::{Value, json};

    use super::*;

    fn gateway() -> PlannedGateway {
        let server: GatewayServer = serde_json::from_value(json!({
            "apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
            "metadata": {"name": "server", "namespace": "liqo-tenant-milan", "uid": "u"},
            "spec": {"endpoint": {"serviceType": "NodePort", "port": 51840}},
        }))
        .unwrap();
        let peer = "milan".parse().unwrap();
        PlannedGateway { object: server.into(), peer, secret_name: "gw-keys".to_owned() }
    }

    fn objects(change: impl Fn(&mut Value)) -> Vec<Value> {
        let gateway = gateway();
        let fabric_objects::Object::GatewayServer(server) = &gateway.object else { panic!() };
        let mut template: Value = serde_saphyr::from_str(WIREGUARD_SERVER).unwrap();
        change(&mut template["spec"]["template"]["spec"]["deployment"]["spec"]);
        let variables = Variables::of_server(server, &gateway.peer);
        let rendered = Rendered::new(&template["spec"]["template"], &variables).unwrap();
        let objects = objects_of(&gateway, rendered, Some("account")).unwrap();
        objects.into_iter().map(|object| serde_json::to_value(object).unwrap()).collect()
    }

    fn kinds(objects: &[Value]) -> Vec<&str> {
        objects.iter().map(|object| object["kind"].as_str().unwrap()).collect()
    }

    #[test]
    fn all_is_named_labelled_and_owned_alike() {
        let objects = objects(|_| {});
        let expected = ["ServiceAccount", "Role", "RoleBinding", "Service", "Deployment"];
        assert_eq!(kinds(&objects), expected);
        for object in &objects {
            let metadata = &object["metadata"];
            assert_eq!(metadata["name"], "gw-server");
            assert_eq!(metadata["namespace"], "liqo-tenant-milan");
            assert_eq!(
                metadata["ownerReferences"],
                json!([{"apiVersion": "networking.liqo.io/v1beta1", "kind": "GatewayServer",
                    "name": "server", "uid": "u", "controller": true}])
            );
            for (label, value) in labels_of(&gateway()) {
                assert_eq!(metadata["labels"][label], value);
            }
        }
    }

    #[test]
    fn several_replicas_have_disruption_budget() {
        let objects = objects(|deployment| deployment["replicas"] = json!(2));
        let budget = objects.iter().find(|object| object["kind"] == "PodDisruptionBudget").unwrap();
        assert_eq!(budget["metadata"]["name"], "gw-server");
        let deployment = objects.iter().find(|object| object["kind"] == "Deployment").unwrap();
        let expected = json!({"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": deployment["spec"]["selector"]});
        assert_eq!(budget["spec"], expected);
    }

    #[test]
    fn gateway_role_names_own_objects_only() {
        let objects = objects(|_| {});
        let rights = include_str!("../../tests/kubernetes/gateway-rights.yaml");
        assert_eq!(objects[1]["rules"], serde_saphyr::from_str::<Value>(rights).unwrap());
        assert_eq!(objects[2]["subjects"][0]["name"], "gw-server");
        assert_eq!(objects[2]["roleRef"]["name"], "gw-server");
    }

    #[test]
    fn pods_have_own_account_and_labels() {
        let objects = objects(|deployment| {
            let pod = &mut deployment["template"];
            pod["spec"]["serviceAccountName"] = json!("{{ .Name }}");
            pod["metadata"]["labels"] = json!({"networking.liqo.io/component": "gateway",
                "networking.liqo.io/gateway-name": "server",
                "networking.liqo.io/gateway-namespace": "liqo-tenant-milan", "mine": "too"});
        });
        let pod = &objects[4]["spec"]["template"];
        assert_eq!(pod["spec"]["serviceAccountName"], "gw-server");
        assert_eq!(pod["metadata"]["labels"]["mine"], "too");
        assert_eq!(pod["metadata"]["labels"]["networking.liqo.io/active"], "true");
        assert_eq!(pod["metadata"]["labels"]["liqo.io/remote-cluster-id"], "milan");
        assert_eq!(pod["metadata"]["annotations"]["fabric.weft.dev/service-account"], "account");
    }
}
