//! Plain strings become lists; whatever else is wrong is left for validation.

use fabric_api::networking::CidrList;
use json_patch::jsonptr::Pointer;
use json_patch::{Patch, PatchOperation, ReplaceOperation};
use kube::core::DynamicObject;
use kube::core::admission::{
    AdmissionRequest, AdmissionResponse, AdmissionReview, META_API_VERSION_V1, META_KIND,
    SerializePatchError,
};
use serde_json::{Value, json};

const FIELDS: [&str; 4] = [
    "/spec/local/cidr/pod",
    "/spec/local/cidr/external",
    "/spec/remote/cidr/pod",
    "/spec/remote/cidr/external",
];

#[derive(Debug, thiserror::Error)]
pub(super) enum ReviewError {
    #[error("expected an AdmissionReview of {META_API_VERSION_V1} as JSON")]
    Unreadable(#[source] serde_json::Error),
    #[error("expected an AdmissionReview of {META_API_VERSION_V1}, found {0}")]
    OtherKind(String),
    #[error("expected an AdmissionReview with a request, found none")]
    NoRequest,
    #[error("cannot write the answer")]
    Patch(#[from] SerializePatchError),
    #[error("cannot write the answer")]
    Answer(#[source] serde_json::Error),
}

/// The answer to a body that the API server posted.
pub(super) fn answer(body: &[u8]) -> Result<Vec<u8>, ReviewError> {
    let request = request(body)?;
    let answer = respond(&request)?.into_review();
    serde_json::to_vec(&answer).map_err(ReviewError::Answer)
}

fn request(body: &[u8]) -> Result<AdmissionRequest<DynamicObject>, ReviewError> {
    let review: AdmissionReview<DynamicObject> =
        serde_json::from_slice(body).map_err(ReviewError::Unreadable)?;
    let types = &review.types;
    if types.api_version != META_API_VERSION_V1 || types.kind != META_KIND {
        return Err(ReviewError::OtherKind(format!("{} of {}", types.kind, types.api_version)));
    }
    review.try_into().map_err(|_| ReviewError::NoRequest)
}

fn respond(
    request: &AdmissionRequest<DynamicObject>,
) -> Result<AdmissionResponse, SerializePatchError> {
    let response = AdmissionResponse::from(request);
    let object = request.object.as_ref().filter(|_| is_configuration(request));
    let changes = object.map(|object| lists(&object.data)).unwrap_or_default();
    if changes.is_empty() { Ok(response) } else { response.with_patch(changes) }
}

fn is_configuration(request: &AdmissionRequest<DynamicObject>) -> bool {
    let kind = (request.kind.group.as_str(), request.kind.kind.as_str());
    kind == ("networking.liqo.io", "Configuration") && request.sub_resource.is_none()
}

fn lists(object: &Value) -> Patch {
    let changes = FIELDS.into_iter().filter_map(|field| {
        let string = object.pointer(field).filter(|value| value.is_string())?;
        let list: CidrList = serde_json::from_value(string.clone()).ok()?;
        let path = Pointer::from_static(field).to_buf();
        Some(PatchOperation::Replace(ReplaceOperation { path, value: json!(list) }))
    });
    Patch(changes.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn review(kind: &str, object: &Value) -> Value {
        json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": "u1",
                "kind": { "group": "networking.liqo.io", "version": "v1beta1", "kind": kind },
                "resource": {
                    "group": "networking.liqo.io", "version": "v1beta1", "resource": "x"
                },
                "operation": "CREATE",
                "userInfo": {},
                "object": object,
                "oldObject": null
            }
        })
    }

    fn configuration(spec: &Value) -> Value {
        json!({
            "apiVersion": "networking.liqo.io/v1beta1",
            "kind": "Configuration",
            "metadata": { "name": "milan" },
            "spec": spec
        })
    }

    /// The spec after admission.
    fn admitted(kind: &str, spec: &Value) -> Value {
        let mut object = configuration(spec);
        let answer = answer(review(kind, &object).to_string().as_bytes()).unwrap();
        let answer: AdmissionReview<DynamicObject> = serde_json::from_slice(&answer).unwrap();
        let response = answer.response.unwrap();
        assert!(response.allowed);
        assert_eq!(response.uid, "u1");
        if let Some(patch) = response.patch {
            let patch: Patch = serde_json::from_slice(&patch).unwrap();
            json_patch::patch(&mut object, &patch).unwrap();
        }
        object["spec"].take()
    }

    #[test]
    fn strings_become_lists_on_both_sides() {
        let spec = json!({
            "local": { "cidr": { "pod": "10.1.0.0/16", "external": ["10.70.0.0/16"] } },
            "remote": { "cidr": { "pod": ["10.2.0.0/16"], "external": "fd00::/64" } }
        });
        let expected = json!({
            "local": { "cidr": { "pod": ["10.1.0.0/16"], "external": ["10.70.0.0/16"] } },
            "remote": { "cidr": { "pod": ["10.2.0.0/16"], "external": ["fd00::/64"] } }
        });
        assert_eq!(admitted("Configuration", &spec), expected);
    }

    #[test]
    fn whatever_else_is_wrong_is_left_for_validation() {
        for cidr in [json!(7), json!(null), json!({ "a": "b" }), json!([7]), json!([["x"]])] {
            let spec = json!({ "remote": { "cidr": { "pod": cidr } } });
            assert_eq!(admitted("Configuration", &spec), spec);
        }
        for spec in [json!("x"), json!({ "remote": "x" }), json!({ "remote": { "cidr": [] } })] {
            assert_eq!(admitted("Configuration", &spec), spec);
        }
        let nonsense = json!({ "remote": { "cidr": { "pod": "nonsense" } } });
        let list = json!({ "remote": { "cidr": { "pod": ["nonsense"] } } });
        assert_eq!(admitted("Configuration", &nonsense), list);
    }

    #[test]
    fn other_kinds_and_what_is_deleted_are_let_through() {
        let spec = json!({ "remote": { "cidr": { "pod": "10.1.0.0/16" } } });
        assert_eq!(admitted("Connection", &spec), spec);
        let mut deletion = review("Configuration", &json!(null));
        deletion["request"]["operation"] = json!("DELETE");
        deletion["request"]["oldObject"] = configuration(&spec);
        let answer = answer(deletion.to_string().as_bytes()).unwrap();
        let answer: Value = serde_json::from_slice(&answer).unwrap();
        assert_eq!(answer["response"]["allowed"], json!(true));
        assert_eq!(answer["response"].get("patch"), None);
    }

    #[test]
    fn bodies_that_are_no_reviews_are_refused_with_a_sentence() {
        let mut other = review("Configuration", &configuration(&json!({})));
        other["apiVersion"] = json!("admission.k8s.io/v1beta1");
        let mut empty = other.clone();
        empty["apiVersion"] = json!("admission.k8s.io/v1");
        empty["request"] = json!(null);
        let cases = [
            ("", "as JSON"),
            ("[[[", "as JSON"),
            ("{}", "as JSON"),
            (&other.to_string(), "found AdmissionReview of admission.k8s.io/v1beta1"),
            (&empty.to_string(), "found none"),
        ];
        for (body, because) in cases {
            let error = answer(body.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(because), "{body}: {error}");
        }
        assert!(answer("[".repeat(1 << 20).as_bytes()).is_err());
    }
}
