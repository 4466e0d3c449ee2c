//! Headers of a packet, and of the tunnel device's frames.
//!
//! Everything here is given bytes from the network: nothing panics, nothing reads past the end.

mod headers;
mod offload;

pub use headers::{Fragment, Headers, Version, protocol};
pub use offload::{Gso, L4Checksum, Offload};

/// Defects of a packet or of the frame it came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("the packet ends before its headers do")]
    Truncated,
    #[error("neither an IPv4 nor an IPv6 packet")]
    Version,
    #[error("the IP header's length is out of range")]
    HeaderLength,
    #[error("the IP length is out of range of the packet's")]
    TotalLength,
    #[error("more IPv6 extension headers than anyone needs")]
    ExtensionHeaders,
    #[error("the virtio header is of a kind that was not asked for")]
    OffloadKind,
    #[error("the virtio header does not fit the packet")]
    OffloadRange,
}
