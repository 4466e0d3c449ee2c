use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

/// CIDRs as written. Older guides have one plain string, newer ones a list; both are read, lists
/// are written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct CidrList(pub Vec<String>);

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
