//! Makes certificates, and judges them as an API server would.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose, date_time_ymd,
};
use tokio_rustls::rustls;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier as _;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::sign::CertifiedKey;

/// The keys of the Secret's data.
const CHAIN: &str = "tls.crt";
const KEY: &str = "tls.key";
const AUTHORITIES: &str = "ca.crt";

/// Lifetime of an authority and of the one certificate that it signs; its key is then discarded.
const LIFE: Duration = Duration::from_secs(365 * 86_400);
/// Clocks differ.
const BEFOREHAND: Duration = Duration::from_secs(3_600);

/// A Secret's data.
pub(super) type Data = BTreeMap<String, ByteString>;

/// Names and addresses by which the API server calls.
pub(super) type Names = BTreeSet<String>;

/// A certificate that an API server accepts.
#[derive(Clone)]
pub(super) struct Certificate {
    /// PEM: the authority that signed it, and perhaps the one before.
    pub(super) authorities: ByteString,
    pub(super) key: Arc<CertifiedKey>,
}

/// Reason why a certificate is not to be used, without its content: that may be the private key.
#[derive(Debug, thiserror::Error)]
pub(super) enum Invalid {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{0} is not PEM of the kind that is expected there")]
    NotPem(&'static str),
    #[error("its private key is of no use")]
    Key(#[source] rustls::Error),
    #[error("an API server would not accept it for {name}")]
    Refused { name: String, source: rustls::Error },
    #[error("less than a third of its life is left")]
    Due,
}

/// A new authority and a certificate signed by it, valid from `now` on.
///
/// `before` is the replaced one: its authority stays trusted, for other replicas serve its
/// certificate until they observe this one.
pub(super) fn make(
    names: &Names,
    now: SystemTime,
    before: Option<&Data>,
) -> Result<Data, rcgen::Error> {
    let authority = CertifiedIssuer::self_signed(authority(now), KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let own = server(names, now)?.signed_by(&key, &authority)?;
    let before = before.and_then(first_authority).unwrap_or_default();
    let data =
        [(CHAIN, own.pem()), (KEY, key.serialize_pem()), (AUTHORITIES, authority.pem() + &before)];
    Ok(data.map(|(key, text)| (key.to_owned(), ByteString(text.into_bytes()))).into())
}

/// The certificate in a Secret, if it is good for all the names and not to be renewed yet.
pub(super) fn read(data: &Data, names: &Names, now: SystemTime) -> Result<Certificate, Invalid> {
    let part = |name| data.get(name).ok_or(Invalid::Missing(name));
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&part(CHAIN)?.0).collect();
    let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or(Invalid::NotPem(CHAIN))?;
    let key = PrivateKeyDer::from_pem_slice(&part(KEY)?.0).map_err(|_| Invalid::NotPem(KEY))?;
    let key = CertifiedKey::from_der(chain, key, &provider()).map_err(Invalid::Key)?;
    let certificate = Certificate { authorities: part(AUTHORITIES)?.clone(), key: Arc::new(key) };
    accepts(&certificate.authorities, &certificate.key, names, now)?;
    let later = accepts(&certificate.authorities, &certificate.key, names, now + LIFE / 3);
    later.map(|()| certificate).map_err(|_| Invalid::Due)
}

/// Checks a certificate as an API server that trusts these authorities does.
pub(super) fn accepts(
    authorities: &ByteString,
    key: &CertifiedKey,
    names: &Names,
    at: SystemTime,
) -> Result<(), Invalid> {
    let mut roots = RootCertStore::empty();
    let trusted: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&authorities.0).collect();
    roots.add_parsable_certificates(trusted.map_err(|_| Invalid::NotPem(AUTHORITIES))?);
    let judge = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build();
    let judge = judge.map_err(|_| Invalid::NotPem(AUTHORITIES))?;
    let at = UnixTime::since_unix_epoch(at.duration_since(UNIX_EPOCH).unwrap_or_default());
    let [own, between @ ..] = key.cert.as_slice() else { return Err(Invalid::NotPem(CHAIN)) };
    names.iter().try_for_each(|name| {
        let refused = |source| Invalid::Refused { name: name.clone(), source };
        let server = ServerName::try_from(name.as_str());
        let server = server.map_err(|error| refused(rustls::Error::General(error.to_string())))?;
        judge.verify_server_cert(own, between, &server, &[], at).map(drop).map_err(refused)
    })
}

pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn authority(now: SystemTime) -> CertificateParams {
    let mut params = lasting(CertificateParams::default(), now);
    params.distinguished_name.push(DnType::CommonName, "weft webhook authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn server(names: &Names, now: SystemTime) -> Result<CertificateParams, rcgen::Error> {
    let names: Vec<String> = names.iter().cloned().collect();
    let mut params = lasting(CertificateParams::new(names)?, now);
    params.distinguished_name.push(DnType::CommonName, "weft webhook");
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn lasting(mut params: CertificateParams, now: SystemTime) -> CertificateParams {
    let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let epoch = date_time_ymd(1970, 1, 1);
    params.not_before = epoch + now.saturating_sub(BEFOREHAND);
    params.not_after = epoch + now + LIFE;
    params
}

/// Newest of several authorities, which signed the certificate, as PEM.
fn first_authority(data: &Data) -> Option<String> {
    const END: &str = "-----END CERTIFICATE-----\n";
    let all = std::str::from_utf8(&data.get(AUTHORITIES)?.0).ok()?;
    all.split_inclusive(END).next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn names<const N: usize>(names: [&str; N]) -> Names {
        names.map(str::to_owned).into()
    }

    fn now() -> SystemTime {
        UNIX_EPOCH + 20_000 * DAY
    }

    fn made(names: &Names, before: Option<&Data>) -> Data {
        make(names, now(), before).unwrap()
    }

    fn fault(data: &Data, names: &Names, at: SystemTime) -> String {
        read(data, names, at).err().map(|unfit| unfit.to_string()).unwrap_or_default()
    }

    #[test]
    fn certificate_is_renewed_at_third_of_lifetime() {
        let names = names(["weft-webhook.liqo.svc", "127.0.0.1", "::1"]);
        let data = made(&names, None);
        for day in [0, 1, 243] {
            assert_eq!(fault(&data, &names, now() + day * DAY), "");
        }
        let due = "less than a third of its life is left";
        for day in [244, 364] {
            assert_eq!(fault(&data, &names, now() + day * DAY), due);
        }
        let refused = "an API server would not accept it for 127.0.0.1";
        for at in [now() + 366 * DAY, now() - DAY] {
            assert_eq!(fault(&data, &names, at), refused);
        }
    }

    #[test]
    fn another_name_needs_another_certificate() {
        let data = made(&names(["weft-webhook.liqo.svc"]), None);
        let fault = fault(&data, &names(["weft-webhook.weft.svc"]), now());
        assert_eq!(fault, "an API server would not accept it for weft-webhook.weft.svc");
    }

    #[test]
    fn renewed_authority_trusts_previous_one_only() {
        let names = names(["a.b.svc"]);
        let first = made(&names, None);
        let second = made(&names, Some(&first));
        let third = made(&names, Some(&second));
        let [first, second, third] =
            [first, second, third].map(|data| read(&data, &names, now()).unwrap());
        let trusts = |new: &Certificate, old: &Certificate| {
            accepts(&new.authorities, &old.key, &names, now()).is_ok()
        };
        assert!(trusts(&second, &first) && trusts(&third, &second));
        assert!(!trusts(&third, &first) && !trusts(&first, &second));
    }

    #[test]
    fn secret_fault_is_named_and_never_quoted() {
        let names = names(["a.b.svc"]);
        let data = made(&names, None);
        let other = made(&names, None);
        let one_line = String::from_utf8(data[KEY].0.clone()).unwrap().replace('\n', "");
        let cases = [
            (CHAIN, None, "tls.crt is missing"),
            (KEY, None, "tls.key is missing"),
            (AUTHORITIES, None, "ca.crt is missing"),
            (CHAIN, Some(Vec::new()), "tls.crt is not PEM"),
            (KEY, Some(one_line.into_bytes()), "tls.key is not PEM"),
            (KEY, Some(data[CHAIN].0.clone()), "tls.key is not PEM"),
            (KEY, Some(other[KEY].0.clone()), "its private key is of no use"),
            (AUTHORITIES, Some(b"nothing".into()), "ca.crt is not PEM"),
            (AUTHORITIES, Some(other[AUTHORITIES].0.clone()), "would not accept it for a.b.svc"),
        ];
        for (part, content, because) in cases {
            let mut data = data.clone();
            match content {
                Some(content) => data.insert(part.to_owned(), ByteString(content)),
                None => data.remove(part),
            };
            let error = read(&data, &names, now()).map(drop).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(text.contains(because), "{part}: {text}");
            assert!(!text.contains("MIG"), "{text}");
        }
    }
}
