use std::fmt;
use std::net::{AddrParseError, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use tonic::transport::{Endpoint, Error};

/// Where ipam listens. Written `unix:PATH` or `IP:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseAddressError {
    #[error("{0:?} names no socket; expected unix:PATH or IP:PORT")]
    NoPath(String),
    #[error("{found:?} is no address; expected unix:PATH or IP:PORT, such as 127.0.0.1:6000")]
    Syntax { found: String, source: AddrParseError },
}

impl Address {
    /// What to connect to, for [`crate::ipam_client::IpamClient`]. Nothing is sent yet.
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
            None => s
                .parse()
                .map(Self::Tcp)
                .map_err(|source| ParseAddressError::Syntax { found: s.to_owned(), source }),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => address.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_read_back_as_they_print() {
        for text in ["unix:/run/weft/rome/ipam.sock", "0.0.0.0:6000", "[::1]:6000"] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            address.endpoint().unwrap();
        }
        for bad in ["unix:", "localhost:6000", "10.0.0.1", ""] {
            let error = bad.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains("expected unix:PATH or IP:PORT"), "{error}");
        }
    }
}
