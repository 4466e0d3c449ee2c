//! Message between replicas, with a MAC under a key that follows from the gateway's private key: no other
//! pod can make one. It holds no secret.

use std::time::{Duration, Instant};

use blake2::Blake2sMac256;
use blake2::digest::Mac as _;
use fabric_api::PrivateKey;

use super::election::Heartbeat;

/// Version of the format.
const MAGIC: &[u8] = b"weft replica 1\n";
const MAC_LENGTH: usize = 32;
pub(super) const MAX_LENGTH: usize = 512;
/// Time for which the superseded key seals heartbeats: other replicas may not have read the new one yet.
const SWITCH: Duration = Duration::from_secs(5);

/// Keys of the MAC. Has no `Debug`: with them the tunnel can be moved.
pub(super) struct Keys {
    current: Blake2sMac256,
    public: [u8; 32],
    before: Option<(Blake2sMac256, Instant)>,
}

impl Keys {
    /// Derives the keys anew if the private key has changed.
    pub(super) fn follow(keys: &mut Option<Self>, private: &PrivateKey, gateway_uid: &str) {
        let public = *private.public().as_bytes();
        if keys.as_ref().is_some_and(|keys| keys.public == public) {
            return;
        }
        let Ok(mac) = Blake2sMac256::new_from_slice(private.expose()) else { return };
        let derived = mac.chain_update(MAGIC).chain_update(gateway_uid).finalize().into_bytes();
        let Ok(current) = Blake2sMac256::new_from_slice(&derived) else { return };
        let before = keys.take().map(|keys| (keys.current, Instant::now()));
        *keys = Some(Self { current, public, before });
    }

    pub(super) fn seal(&self, heartbeat: &Heartbeat) -> Vec<u8> {
        let mut message = MAGIC.to_vec();
        // Numbers and addresses can always be written.
        message.extend(serde_json::to_vec(heartbeat).unwrap_or_default());
        let before = self.before.as_ref().filter(|(_, since)| since.elapsed() < SWITCH);
        let mac = before.map_or(&self.current, |(mac, _)| mac).clone();
        let mac = mac.chain_update(&message).finalize().into_bytes();
        message.extend(mac);
        message
    }

    /// Returns the heartbeat of a message that was sealed with one of these keys.
    pub(super) fn open(&self, message: &[u8]) -> Option<Heartbeat> {
        let (content, mac) = message.split_at_checked(message.len().checked_sub(MAC_LENGTH)?)?;
        let before = self.before.as_ref().filter(|(_, since)| since.elapsed() < SWITCH * 2);
        let before = before.map(|(mac, _)| mac);
        let mut keys = [Some(&self.current), before].into_iter().flatten();
        let is_by =
            |key: &Blake2sMac256| key.clone().chain_update(content).verify_slice(mac).is_ok();
        if !keys.any(is_by) {
            return None;
        }
        serde_json::from_slice(content.strip_prefix(MAGIC)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use tunnel::Tai64n;

    use super::*;
    use crate::replicas::election::{Role, Tunnel};

    fn keys(private: &PrivateKey, uid: &str) -> Keys {
        let mut keys = None;
        Keys::follow(&mut keys, private, uid);
        keys.unwrap()
    }

    fn heartbeat() -> Heartbeat {
        let peer = Some("192.0.2.7:51840".parse().unwrap());
        let stamp = Tai64n::from_unix(Duration::new(9, 7));
        let unproven = Some("[2001:db8::20]:51840".parse().unwrap());
        let tunnel = Tunnel { connected: true, peer, unproven, relay: Some(40000), stamp };
        Heartbeat {
            incarnation: u64::MAX,
            sequence: 3,
            role: Role::Leaving,
            epoch: 7,
            ready: true,
            stuck: true,
            deaf: true,
            successor: Some(u64::MAX - 1),
            tunnel,
        }
    }

    #[test]
    fn heartbeat_of_same_gateway_is_opened() {
        let private = PrivateKey::generate();
        let message = keys(&private, "u").seal(&heartbeat());
        assert!(message.len() <= MAX_LENGTH);
        assert_eq!(keys(&private, "u").open(&message), Some(heartbeat()));
        for other in [keys(&PrivateKey::generate(), "u"), keys(&private, "another gateway")] {
            assert_eq!(other.open(&message), None);
        }
    }

    #[test]
    fn changed_heartbeat_is_refused() {
        let keys = keys(&PrivateKey::generate(), "u");
        let message = keys.seal(&heartbeat());
        for at in 0..message.len() {
            let mut changed = message.clone();
            changed[at] ^= 1;
            assert_eq!(keys.open(&changed), None, "byte {at}");
            assert_eq!(keys.open(&message[..at]), None);
        }
    }

    #[test]
    fn new_key_is_used_once_the_others_have_it() {
        let (old, new) = (PrivateKey::generate(), PrivateKey::generate());
        let mut own = Some(keys(&old, "u"));
        Keys::follow(&mut own, &new, "u");
        let own = own.unwrap();
        assert!(keys(&old, "u").open(&own.seal(&heartbeat())).is_some(), "has not read it yet");
        assert!(own.open(&keys(&new, "u").seal(&heartbeat())).is_some());
    }
}
