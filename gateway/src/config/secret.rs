//! The gateway's private key, from the Secret that its config names.

use fabric_api::{KeyError, PrivateKey};
use k8s_openapi::api::core::v1::Secret;

/// The entry of the Secret's data: the raw 32 bytes, as Liqo has it.
const PRIVATE_KEY: &str = "privateKey";

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error("Secret {0} does not exist")]
    Missing(String),
    #[error("Secret {0} has no data.{PRIVATE_KEY}")]
    NoKey(String),
    #[error("Secret {name}, data.{PRIVATE_KEY}: {source}")]
    BadKey { name: String, source: KeyError },
}

/// The key in `secret`, which was looked up by `name`.
pub fn private_key(name: &str, secret: Option<&Secret>) -> Result<PrivateKey, SecretError> {
    let secret = secret.ok_or_else(|| SecretError::Missing(name.to_owned()))?;
    let key = secret.data.as_ref().and_then(|data| data.get(PRIVATE_KEY));
    let key = key.ok_or_else(|| SecretError::NoKey(name.to_owned()))?;
    PrivateKey::from_bytes(&key.0)
        .map_err(|source| SecretError::BadKey { name: name.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    #[test]
    fn what_is_wrong_with_a_secret_names_it_and_never_shows_it() {
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
    }
}
