use fabric_api::ipam::Network;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, DeploymentSpec};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reports fields of a manifest that its kind does not have, or that are missing.
pub(crate) fn check(object: &Value) -> Result<(), String> {
    read::<ObjectMeta>(&object["metadata"])?;
    match object["kind"].as_str().unwrap_or_default() {
        "ClusterRole" => read::<ClusterRole>(object),
        "ClusterRoleBinding" => read::<ClusterRoleBinding>(object),
        "ConfigMap" => read::<ConfigMap>(object),
        "CustomResourceDefinition" => read::<CustomResourceDefinition>(object),
        "DaemonSet" => read::<DaemonSet>(object),
        "Deployment" => read::<Deployment>(object),
        "Job" => read::<Job>(object),
        "Lease" => read::<Lease>(object),
        "MutatingWebhookConfiguration" => read::<MutatingWebhookConfiguration>(object),
        "Network" => read::<Network>(object),
        "NetworkPolicy" => read::<NetworkPolicy>(object),
        "PodDisruptionBudget" => read::<PodDisruptionBudget>(object),
        "Role" => read::<Role>(object),
        "RoleBinding" => read::<RoleBinding>(object),
        "Service" => read::<Service>(object),
        "ServiceAccount" => read::<ServiceAccount>(object),
        "ValidatingAdmissionPolicy" => read::<ValidatingAdmissionPolicy>(object),
        "ValidatingAdmissionPolicyBinding" => read::<ValidatingAdmissionPolicyBinding>(object),
        // The rest of a template is text until it is rendered.
        "WgGatewayClientTemplate" | "WgGatewayServerTemplate" => {
            read::<DeploymentSpec>(&object["spec"]["template"]["spec"]["deployment"]["spec"])
        }
        // Prometheus' operator checks these.
        "PodMonitor" | "PrometheusRule" => Ok(()),
        other => Err(format!("{other} is no kind that the chart has")),
    }
}

fn read<T: DeserializeOwned>(value: &Value) -> Result<(), String> {
    let mut unknown = Vec::new();
    let note = |path: serde_ignored::Path<'_>| unknown.push(path.to_string().replace(".?", ""));
    serde_ignored::deserialize::<_, _, T>(value, note).map_err(|error| error.to_string())?;
    // Which every manifest has, and not every type.
    unknown.retain(|path| path != "apiVersion" && path != "kind");
    if unknown.is_empty() { Ok(()) } else { Err(format!("unknown: {}", unknown.join(", "))) }
}

#[test]
fn misspelt_value_is_refused() {
    let wrong = |spec: &str| {
        let text = format!("{{kind: DaemonSet, metadata: {{name: x}}, spec: {spec}}}");
        check(&serde_saphyr::from_str(&text).unwrap()).unwrap_err()
    };
    let pod = "selector: {}, template: {spec: {containers: [], hostNetwrok: true}}";
    assert_eq!(wrong(&format!("{{{pod}}}")), "unknown: spec.template.spec.hostNetwrok");
    assert!(wrong("{selector: 7}").contains("expected"));
}
