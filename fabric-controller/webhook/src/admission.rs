//! Answers to reviews: plain strings of Configurations become lists, and whatever else is wrong is left
//! for validation; networking in the status of a ForeignCluster stays as weft has written it.

use fabric_api::labels;
use fabric_api::networking::CidrList;
use json_patch::jsonptr::Pointer;
use json_patch::{AddOperation, Patch, PatchOperation, ReplaceOperation};
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
    let Some(object) = &request.object else { return Ok(response) };
    let changes = match kind(request) {
        ("networking.liqo.io", "Configuration", None) => lists(&object.data),
        ("core.liqo.io", "ForeignCluster", Some("status")) if !is_of_weft(request) => {
            let before = request.old_object.as_ref();
            before.and_then(|before| networking(&before.data, &object.data)).unwrap_or_default()
        }
        _ => Patch::default(),
    };
    if changes.is_empty() { Ok(response) } else { response.with_patch(changes) }
}

/// Group, kind and subresource.
fn kind(request: &AdmissionRequest<DynamicObject>) -> (&str, &str, Option<&str>) {
    let subresource = request.sub_resource.as_deref();
    (request.kind.group.as_str(), request.kind.kind.as_str(), subresource)
}

/// True for a write of weft, which names itself, whatever its account is called.
fn is_of_weft(request: &AdmissionRequest<DynamicObject>) -> bool {
    let options = request.options.as_ref();
    options.is_some_and(|options| options.0["fieldManager"] == labels::CONTROLLER_MANAGER)
}

/// Puts the module `networking` back as it was. Liqo's controller clears it at every reconciliation
/// while its own networking is off.
fn networking(before: &Value, after: &Value) -> Option<Patch> {
    let (modules, networking) = ("/status/modules", "/status/modules/networking");
    let was = before.pointer(networking).filter(|was| after.pointer(networking) != Some(*was))?;
    let (path, value) = if after.pointer(modules).is_some_and(Value::is_object) {
        (networking, was)
    } else if after["status"].is_object() {
        (modules, before.pointer(modules)?)
    } else {
        ("/status", &before["status"])
    };
    let path = Pointer::from_static(path).to_buf();
    let put_back = PatchOperation::Add(AddOperation { path, value: value.clone() });
    Some(Patch(vec![put_back]))
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
    fn other_faults_are_left_to_validation() {
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
    fn other_kinds_and_deletions_pass() {
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

    /// The status of a ForeignCluster after admission.
    fn admitted_status(manager: &str, before: &Value, after: &Value) -> Value {
        let of = |status: &Value| {
            json!({"apiVersion": "core.liqo.io/v1beta1", "kind": "ForeignCluster",
                "metadata": {"name": "milan"}, "status": status})
        };
        let mut object = of(after);
        let mut review = review("ForeignCluster", &object);
        let request = &mut review["request"];
        request["kind"]["group"] = json!("core.liqo.io");
        request["subResource"] = json!("status");
        request["operation"] = json!("UPDATE");
        request["oldObject"] = of(before);
        request["options"] = json!({"kind": "UpdateOptions", "fieldManager": manager});
        let answer = answer(review.to_string().as_bytes()).unwrap();
        let answer: AdmissionReview<DynamicObject> = serde_json::from_slice(&answer).unwrap();
        if let Some(patch) = answer.response.unwrap().patch {
            let patch: Patch = serde_json::from_slice(&patch).unwrap();
            json_patch::patch(&mut object, &patch).unwrap();
        }
        object["status"].take()
    }

    #[test]
    fn cleared_networking_of_a_peer_is_put_back() {
        let on = json!({"enabled": true, "conditions": [{"type": "x"}]});
        let of = |networking: &Value, role: &str| json!({"role": role, "modules": {"networking": networking, "offloading": {}}});
        let off = json!({"enabled": false});
        let before = of(&on, "a");
        assert_eq!(admitted_status("", &before, &of(&off, "b")), of(&on, "b"));
        let weft = labels::CONTROLLER_MANAGER;
        assert_eq!(admitted_status(weft, &before, &of(&off, "b")), of(&off, "b"));
        assert_eq!(
            admitted_status("", &before, &json!({"role": "b"}))["modules"]["networking"],
            on
        );
        assert_eq!(admitted_status("", &before, &Value::Null), before);
        // A peering without networking, or of which weft has not written anything yet.
        for before in [of(&off, "a"), json!({"role": "a"}), Value::Null] {
            assert_eq!(admitted_status("", &before, &of(&off, "b")), of(&off, "b"));
        }
    }

    #[test]
    fn invalid_review_is_refused_with_message() {
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
