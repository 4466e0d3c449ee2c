use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

/// CIDRs as written. Older guides have one plain string, newer ones a list; both are read, lists
/// are written.
///
/// To the API server it is a list, so that clients with types never read anything else. A string is
/// made a list by mutating admission, which comes in time: the body of a custom resource is decoded
/// without types, pruning looks into objects and lists only (`pruning/algorithm.go` of Kubernetes'
/// apiextensions-apiserver), and the schema is checked when the object is about to be stored, after
/// mutating and before validating admission (`endpoints/handlers/create.go` and
/// `registry/generic/registry/store.go` of its apiserver). Only server-side apply refuses a string
/// at once, for it merges by the schema before admission.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct CidrList(pub Vec<String>);

impl CidrList {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'de> Deserialize<'de> for CidrList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a CIDR or a list of CIDRs")]
        enum Spelling {
            One(String),
            Many(Vec<String>),
        }
        Ok(match Spelling::deserialize(deserializer)? {
            Spelling::One(cidr) if cidr.is_empty() => Self::default(),
            Spelling::One(cidr) => Self(vec![cidr]),
            Spelling::Many(cidrs) => Self(cidrs),
        })
    }
}

impl JsonSchema for CidrList {
    fn schema_name() -> Cow<'static, str> {
        "CidrList".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "array", "items": { "type": "string", "format": "cidr" } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_are_read_and_lists_are_written() {
        let one: CidrList = serde_json::from_str("\"10.0.0.0/16\"").unwrap();
        let many: CidrList = serde_json::from_str("[\"10.0.0.0/16\"]").unwrap();
        assert_eq!(one, many);
        assert_eq!(serde_json::to_string(&one).unwrap(), "[\"10.0.0.0/16\"]");
        assert!(serde_json::from_str::<CidrList>("7").is_err());
    }
}
