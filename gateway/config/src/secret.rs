//! The gateway's private key, from the Secret that its config names.

use fabric_api::PrivateKey;
use fabric_api::check::{self, Fault};
use k8s_openapi::api::core::v1::Secret;

/// The entry of the Secret's data: the raw 32 bytes, as Liqo has it.
const PRIVATE_KEY: &str = "privateKey";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SecretError {
    #[error("Secret {0} does not exist")]
    Missing(String),
    #[error("Secret {0} has no data.{PRIVATE_KEY}")]
    NoKey(String),
    #[error("Secret {name}, {fault}")]
    BadKey { name: String, fault: Fault },
}

/// The key in `secret`, which was looked up by `name`.
pub(crate) fn private_key(name: &str, secret: Option<&Secret>) -> Result<PrivateKey, SecretError> {
    let secret = secret.ok_or_else(|| SecretError::Missing(name.to_owned()))?;
    if !secret.data.as_ref().is_some_and(|data| data.contains_key(PRIVATE_KEY)) {
        return Err(SecretError::NoKey(name.to_owned()));
    }
    check::private_key(secret).map_err(|fault| SecretError::BadKey { name: name.to_owned(), fault })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    #[test]
    fn secret_fault_names_it_and_hides_content() {
        let with = |bytes: Vec<u8>| {
            let data = [(PRIVATE_KEY.to_owned(), ByteString(bytes))].into();
            Secret { data: Some(data), ..Secret::default() }
        };
        assert!(private_key("s", Some(&with(vec![7; 32]))).is_ok());
        assert_eq!(private_key("s", None).unwrap_err().to_string(), "Secret s does not exist");
        let error = private_key("s", Some(&Secret::default())).unwrap_err();
        assert_eq!(error.to_string(), "Secret s has no data.privateKey");
        let error = private_key("s", Some(&with(b"hush".to_vec()))).unwrap_err().to_string();
        assert!(error.starts_with("Secret s, data.privateKey: the key is 4 bytes long"), "{error}");
        assert!(!error.contains("hush"));
        let error = private_key("s", Some(&with(vec![0; 32]))).unwrap_err().to_string();
        assert!(error.starts_with("Secret s, data.privateKey: the key is all zero"), "{error}");
    }

    #[test]
    fn public_half_of_another_key_is_refused() {
        let pair = |public: Vec<u8>| {
            let data = [("privateKey", vec![7; 32]), ("publicKey", public)];
            let data = data.map(|(key, bytes)| (key.to_owned(), ByteString(bytes))).into();
            Secret { data: Some(data), ..Secret::default() }
        };
        let own = PrivateKey::from_bytes(&[7; 32]).unwrap().public();
        for good in [own.as_bytes().to_vec(), own.to_string().into_bytes()] {
            assert!(private_key("s", Some(&pair(good))).is_ok());
        }
        let other = PrivateKey::from_bytes(&[8; 32]).unwrap().public();
        let error = private_key("s", Some(&pair(other.as_bytes().to_vec()))).unwrap_err();
        let expected = format!("does not belong to the private key; expected {own}");
        assert_eq!(error.to_string(), format!("Secret s, data.publicKey: {expected}"));
    }
}
