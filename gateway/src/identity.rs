//! Problems of an identity that two gateways share.

use std::net::SocketAddr;

/// Problems of a gateway: endpoints of a peer that exists twice, and whether it does so itself.
pub fn problems(peer: Option<[SocketAddr; 2]>, is_duplicate: bool) -> impl Iterator<Item = String> {
    let own = is_duplicate.then(|| OWN_DUPLICATE.to_owned());
    peer.map(peer_duplicate).into_iter().chain(own)
}

/// Problem of a gateway whose peer exists twice. The text stays the same while the two change
/// their ports.
pub fn peer_duplicate([a, b]: [SocketAddr; 2]) -> String {
    let (a, b) = match a.ip() == b.ip() {
        true => (a.to_string(), b.to_string()),
        false => (a.ip().to_string(), b.ip().to_string()),
    };
    format!(
        "the peer's key is used from two endpoints, {a} and {b}, in turn: expected one gateway; \
         the peer has to stop one of the two, or give it a key of its own"
    )
}

/// Problem of a gateway that exists twice, as its peer reports it.
pub const OWN_DUPLICATE: &str = "the peer receives packets with this gateway's key from another \
     endpoint, too: expected one gateway; stop the other one, or give it a key of its own";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_names_ports_only_where_addresses_are_equal() {
        let at = |text: &str| text.parse().unwrap();
        let apart = peer_duplicate([at("192.0.2.1:1"), at("[2001:db8::1]:2")]);
        assert!(apart.contains("192.0.2.1 and 2001:db8::1, in turn"), "{apart}");
        let same = peer_duplicate([at("192.0.2.1:1"), at("192.0.2.1:2")]);
        assert!(same.contains("192.0.2.1:1 and 192.0.2.1:2, in turn"), "{same}");
    }
}
