use fabric_api::networking::GatewayServerSpec;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::place::Place;
use crate::walk::Walk;
use crate::{GatewaySpec, Problem, RenderError, Variables};

/// Objects that run and expose one gateway. Both are named `gw-NAME` in the gateway's namespace,
/// regardless of the template, and have the labels and annotations of the template.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered {
    pub deployment: Deployment,
    /// Service of a GatewayServer, with its `spec.serviceLabels` and `spec.serviceAnnotations` over
    /// those of the template. A GatewayClient has none.
    pub service: Option<Service>,
}

impl Rendered {
    /// Renders the `spec.template` of a template.
    ///
    /// # Errors
    ///
    /// The first field that cannot be rendered, or that Kubernetes would not understand.
    pub fn new(template: &Value, variables: &Variables) -> Result<Self, RenderError> {
        let mut walk = Walk::over(template, variables)?;
        let deployment = Deployment {
            metadata: metadata(&mut walk, variables, "Deployment", "deployment")?,
            spec: decode(&mut walk, "Deployment", &["deployment", "spec"])?,
            status: None,
        };
        let service = match &variables.spec {
            GatewaySpec::Server(spec) => Some(service(&mut walk, variables, spec)?),
            GatewaySpec::Client(_) => None,
        };
        Ok(Self { deployment, service })
    }
}

fn service(
    walk: &mut Walk,
    variables: &Variables,
    gateway: &GatewayServerSpec,
) -> Result<Service, RenderError> {
    let mut metadata = metadata(walk, variables, "Service", "service")?;
    for (own, gateways) in [
        (&mut metadata.labels, &gateway.service_labels),
        (&mut metadata.annotations, &gateway.service_annotations),
    ] {
        if !gateways.is_empty() {
            own.get_or_insert_default().extend(gateways.clone());
        }
    }
    let spec = Some(decode(walk, "Service", &["service", "spec"])?);
    Ok(Service { metadata, spec, status: None })
}

/// Name and namespace of its own, labels and annotations of the template's `spec.OBJECT.metadata`.
fn metadata(
    walk: &mut Walk,
    variables: &Variables,
    kind: &'static str,
    object: &str,
) -> Result<ObjectMeta, RenderError> {
    let of_template = if walk.rendered["spec"][object]["metadata"].is_null() {
        ObjectMeta::default()
    } else {
        decode(walk, kind, &[object, "metadata"])?
    };
    Ok(ObjectMeta {
        name: Some(format!("gw-{}", variables.name)),
        namespace: Some(variables.namespace.clone()),
        labels: of_template.labels,
        annotations: of_template.annotations,
        ..ObjectMeta::default()
    })
}

/// Reads the value at `keys` of the spec. A number that should be a text becomes one.
fn decode<T: DeserializeOwned>(
    walk: &mut Walk,
    kind: &'static str,
    keys: &[&str],
) -> Result<T, RenderError> {
    let place = keys.iter().fold(Place::root().key("spec"), |place, key| place.key(key));
    loop {
        let Some(value) = walk.rendered.pointer(&place.pointer) else {
            return Err(Problem::Missing { expected: "an object" }.at(place.field));
        };
        let error = match serde_path_to_error::deserialize(value) {
            Ok(decoded) => return Ok(decoded),
            Err(error) => error,
        };
        let at = follow(&place, error.path());
        if !restore(walk, &at.pointer) {
            return Err(Problem::Object { kind, cause: error.into_inner() }.at(at.field));
        }
    }
}

fn follow(place: &Place, path: &Path) -> Place {
    path.iter().fold(place.clone(), |place, segment| match segment {
        Segment::Seq { index } => place.item(*index),
        Segment::Map { key } => place.key(key),
        Segment::Enum { .. } | Segment::Unknown => place,
    })
}

/// Makes the number there a text: the one that it was in the template, if it was one. False if there
/// is no number.
fn restore(walk: &mut Walk, pointer: &str) -> bool {
    let Some(number @ Value::Number(_)) = walk.rendered.pointer_mut(pointer) else { return false };
    let text = walk.numbers.remove(pointer).unwrap_or_else(|| number.to_string());
    *number = Value::String(text);
    true
}
