use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

/// A network prefix with no host bits set.
///
/// `10.0.0.7/24` and `10.0.0.0/24` name the same network but compare unequal, so a diff that
/// used raw prefixes would delete and re-add the same route for ever. Parsing is the only way
/// in, so every `Cidr` in the program is already canonical.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr(IpNet);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseCidrError {
    #[error("{0:?} is not a network prefix; expected ADDRESS/LENGTH such as 10.0.0.0/16")]
    Syntax(String),
    #[error("{given} has host bits set; did you mean {meant}?")]
    HostBits { given: IpNet, meant: Cidr },
    #[error(
        "{given:?} is IPv4 written as IPv6, by which no packet is routed; did you mean {meant}?"
    )]
    Mapped { given: String, meant: String },
    #[error(
        "{given:?} has leading zeros, which some programs read as octal; did you mean {meant}?"
    )]
    LeadingZeros { given: String, meant: String },
}

impl Cidr {
    /// The prefix of `len` bits around `address`, its host bits cleared. `None` if `len` is too long.
    pub fn around(address: IpAddr, len: u8) -> Option<Self> {
        IpNet::new(address, len).ok().map(|net| Self(net.trunc()))
    }

    /// The prefix that holds only `address`: a /32 or a /128.
    pub fn host(address: IpAddr) -> Self {
        Self(IpNet::from(address))
    }

    pub fn net(&self) -> IpNet {
        self.0
    }

    /// The network address, which is the first of the prefix.
    pub fn address(&self) -> IpAddr {
        self.0.addr()
    }

    /// Length in bits.
    #[expect(clippy::len_without_is_empty, reason = "a prefix is never empty")]
    pub fn len(&self) -> u8 {
        self.0.prefix_len()
    }

    /// True for 0.0.0.0/0 and ::/0.
    pub fn is_everything(&self) -> bool {
        self.len() == 0
    }

    pub fn is_ipv4(&self) -> bool {
        matches!(self.0, IpNet::V4(_))
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }

    /// Returns what both have in common: the longer one, if it lies in the other.
    pub fn and(&self, other: &Self) -> Option<Self> {
        let longer = if self.len() >= other.len() { self } else { other };
        self.overlaps(other).then_some(*longer)
    }

    pub fn overlaps(&self, other: &Self) -> bool {
        self.0.contains(&other.0) || other.0.contains(&self.0)
    }

    /// The address of `self` with the same host bits as `address` has in `from`.
    ///
    /// `None` unless `from` contains `address` and both prefixes have the same length and family.
    pub fn translate(&self, address: IpAddr, from: &Self) -> Option<IpAddr> {
        if !from.contains(address) || self.len() != from.len() || self.is_ipv4() != from.is_ipv4() {
            return None;
        }
        match (self.0, address) {
            (IpNet::V4(to), IpAddr::V4(a)) => Some((to.addr() | (a & to.hostmask())).into()),
            (IpNet::V6(to), IpAddr::V6(a)) => Some((to.addr() | (a & to.hostmask())).into()),
            (IpNet::V4(_), IpAddr::V6(_)) | (IpNet::V6(_), IpAddr::V4(_)) => None,
        }
    }
}

impl FromStr for Cidr {
    type Err = ParseCidrError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        if let Some(meant) = without_leading_zeros(s) {
            return Err(ParseCidrError::LeadingZeros { given: s.to_owned(), meant });
        }
        let given: IpNet = s.parse().map_err(|_| ParseCidrError::Syntax(s.to_owned()))?;
        if let Some(meant) = as_ipv4(&given) {
            return Err(ParseCidrError::Mapped { given: s.to_owned(), meant });
        }
        let meant = Self(given.trunc());
        if meant.0 != given {
            return Err(ParseCidrError::HostBits { given, meant });
        }
        Ok(meant)
    }
}

/// The IPv4 prefix that an IPv4-mapped IPv6 one (RFC 4291, section 2.5.5.2) stands for.
fn as_ipv4(given: &IpNet) -> Option<String> {
    const MAPPED: u8 = 96;
    let IpNet::V6(net) = given else { return None };
    let address = net.addr().to_ipv4_mapped()?;
    let len = net.prefix_len().saturating_sub(MAPPED);
    Cidr::around(address.into(), len).map(|meant| meant.to_string())
}

/// An IPv4 prefix as it would be without leading zeros, if it has some.
fn without_leading_zeros(text: &str) -> Option<String> {
    // Most have none, and are parsed by the thousand.
    let mut before = b'.';
    let has_zero = text.bytes().zip(text.bytes().skip(1)).any(|(byte, next)| {
        let leads = byte == b'0' && !before.is_ascii_digit() && next.is_ascii_digit();
        before = byte;
        leads
    });
    let (address, len) = text.split_once('/').filter(|_| has_zero)?;
    let plain = |part: &str| part.bytes().all(|b| b.is_ascii_digit()) && !part.is_empty();
    let parts: Vec<&str> = address.split('.').collect();
    if parts.len() != 4 || !parts.iter().all(|part| plain(part)) || !plain(len) {
        return None;
    }
    let trimmed = |part: &&str| match part.trim_start_matches('0') {
        "" => "0".to_owned(),
        rest => rest.to_owned(),
    };
    let octets: Vec<String> = parts.iter().map(trimmed).collect();
    let meant = format!("{}/{}", octets.join("."), trimmed(&len));
    (meant != text).then_some(meant)
}

impl From<IpAddr> for Cidr {
    fn from(address: IpAddr) -> Self {
        Self::host(address)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_bits_are_rejected_with_correction() {
        let err = "10.0.0.7/24".parse::<Cidr>().unwrap_err();
        assert_eq!(err.to_string(), "10.0.0.7/24 has host bits set; did you mean 10.0.0.0/24?");
    }

    #[test]
    fn mapped_ipv4_prefix_is_refused() {
        let refusal = |text: &str| text.parse::<Cidr>().unwrap_err().to_string();
        let found = refusal("::ffff:10.0.0.0/104");
        assert!(found.contains("IPv4 written as IPv6") && found.contains("10.0.0.0/8?"), "{found}");
        assert!(refusal("::ffff:a00:0/104").contains("did you mean 10.0.0.0/8?"));
        assert!("::ffff:0:0:0/96".parse::<Cidr>().is_ok(), "RFC 7915 translates these");
    }

    #[test]
    fn leading_zeros_are_refused() {
        for text in ["010.0.0.0/8", "10.00.0.0/8", "10.0.0.0/08"] {
            let found = text.parse::<Cidr>().unwrap_err().to_string();
            assert!(found.contains("leading zeros") && found.contains("10.0.0.0/8?"), "{found}");
        }
        assert!("0.0.0.0/0".parse::<Cidr>().is_ok());
    }

    #[test]
    fn overlap_is_containment_either_way() {
        let [a, b, c] =
            ["10.0.0.0/8", "10.1.0.0/16", "192.168.0.0/16"].map(|s| s.parse::<Cidr>().unwrap());
        assert!(a.overlaps(&b) && b.overlaps(&a) && !a.overlaps(&c));
    }

    #[test]
    fn translation_keeps_host_bits() {
        let [from, to]: [Cidr; 2] = ["10.200.0.0/15", "10.70.0.0/15"].map(|s| s.parse().unwrap());
        assert_eq!(to.translate([10, 201, 3, 4].into(), &from), Some([10, 71, 3, 4].into()));
        assert_eq!(to.translate([10, 202, 3, 4].into(), &from), None);
    }
}
