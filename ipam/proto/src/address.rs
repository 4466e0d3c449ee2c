use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use tonic::transport::{Endpoint, Error};

/// Listen address of ipam. Written `unix:PATH` or `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Unix(PathBuf),
    /// An IP address or a DNS name, and a port, as they are written.
    Tcp(String),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseAddressError {
    #[error("{0:?} names no socket; expected unix:PATH or HOST:PORT")]
    NoPath(String),
    #[error("{0:?} is no address; expected unix:PATH or HOST:PORT, such as 127.0.0.1:6000")]
    Syntax(String),
}

impl Address {
    /// Endpoint to connect to, for [`crate::ipam_client::IpamClient`]. Nothing is sent yet.
    pub fn endpoint(&self) -> Result<Endpoint, Error> {
        match self {
            Self::Unix(path) => Endpoint::from_shared(format!("unix:{}", path.display())),
            Self::Tcp(address) => Endpoint::from_shared(format!("http://{address}")),
        }
    }
}

impl FromStr for Address {
    type Err = ParseAddressError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s.strip_prefix("unix:") {
            Some("") => Err(ParseAddressError::NoPath(s.to_owned())),
            Some(path) => Ok(Self::Unix(path.into())),
            None if s.parse::<SocketAddr>().is_ok() || has_name(s) => Ok(Self::Tcp(s.to_owned())),
            None => Err(ParseAddressError::Syntax(s.to_owned())),
        }
    }
}

/// A DNS name (RFC 1123) and a port. Numbers alone are an IP address with something wrong.
fn has_name(s: &str) -> bool {
    let Some((name, port)) = s.rsplit_once(':') else { return false };
    let legal = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let labels = || name.trim_end_matches('.').split('.');
    labels().all(|label| !label.is_empty() && label.chars().all(legal))
        && labels().any(|label| !label.chars().all(|c| c.is_ascii_digit()))
        && port.parse::<u16>().is_ok()
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back_as_they_print() {
        let named = "liqo-ipam.liqo.svc:6000";
        for text in ["unix:/run/weft/rome/ipam.sock", "0.0.0.0:6000", "[::1]:6000", named] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            address.endpoint().unwrap();
        }
        for bad in
            ["unix:", "localhost", "a b:6000", "10.0.0.300:6000", "10.0.0.1", ":1", "x:y", ""]
        {
            let error = bad.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("expected unix:PATH or HOST:PORT"), "{error}");
        }
    }
}
