//! Identity of the user's objects, whose manifests have neither uid nor generation.
//!
//! Both are derived, so that all programs of a cluster agree on them without sharing anything: the
//! uid from the name, the generation from the spec (so it is equal for equal specs, and not in
//! order).

use fabric_objects::Object;
use sha2::{Digest, Sha256};

/// Sets uid and generation.
pub(crate) fn identify(object: &mut Object) {
    let uid = uuid_of(&object.reference().to_string());
    let value = object.to_value();
    let metadata = object.metadata_mut();
    metadata.uid = Some(uid);
    metadata.generation = value.get("spec").map(|spec| {
        let digest = Sha256::digest(spec.to_string());
        let [a, b, c, d] = [digest[0], digest[1], digest[2], digest[3]];
        i64::from(u32::from_be_bytes([a & 0x7f, b, c, d])).max(1)
    });
}

/// Version 8 (RFC 9562 section 5.8): a hash, in the shape of a UUID.
fn uuid_of(text: &str) -> String {
    let digest = Sha256::digest(text);
    let mut bytes = [0_u8; 16];
    bytes.copy_from_slice(&digest[..16]);
    bytes[6] = (bytes[6] & 0x0f) | 0x80;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}
