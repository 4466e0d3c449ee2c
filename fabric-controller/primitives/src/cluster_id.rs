use std::fmt;
use std::str::FromStr;

/// The name of a cluster, a DNS label (RFC 1123: at most 63 of `a-z 0-9 -`, none at the ends).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(String);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a cluster ID; expected a DNS label: 1 to 63 of a-z, 0-9 and -, not starting or ending with -"
)]
pub struct ParseClusterIdError(String);

impl ClusterId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ClusterId {
    type Err = ParseClusterIdError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let ok = (1..=63).contains(&s.len())
            && s.chars().all(legal)
            && !s.starts_with('-')
            && !s.ends_with('-');
        if ok { Ok(Self(s.to_owned())) } else { Err(ParseClusterIdError(s.to_owned())) }
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dns_labels_name_clusters() {
        for good in ["rome", "a", "edge-7", &"x".repeat(63)] {
            assert!(good.parse::<ClusterId>().is_ok(), "{good}");
        }
        for bad in ["", "Rome", "-a", "a-", "a.b", "a/b", "../a", &"x".repeat(64)] {
            assert!(bad.parse::<ClusterId>().is_err(), "{bad}");
        }
    }
}
