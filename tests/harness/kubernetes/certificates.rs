use std::net::IpAddr;

use anyhow::{Context, Result};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
    SanType,
};
use serde_json::{Value, json};

/// Certificate authority of one cluster.
pub(super) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// Certificate and key, in PEM.
pub(super) struct Identity {
    pub(super) certificate: String,
    pub(super) key: String,
}

/// Subject of a certificate.
#[derive(Default)]
pub(super) struct Subject<'a> {
    /// Kubernetes takes it for the user.
    pub(super) name: &'a str,
    /// Kubernetes takes it for the user's group.
    pub(super) organization: Option<&'a str>,
    pub(super) dns: &'a [&'a str],
    pub(super) addresses: &'a [IpAddr],
}

impl Authority {
    pub(super) fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = distinguished("weft-tests", None);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?);
        Ok(Self(issuer.context("making a certificate authority")?))
    }

    pub(super) fn certificate(&self) -> String {
        self.0.pem()
    }

    /// Private key, to certify in its name.
    pub(super) fn key(&self) -> String {
        self.0.key().serialize_pem()
    }

    pub(super) fn issue(&self, subject: &Subject<'_>) -> Result<Identity> {
        let dns: Vec<_> = subject.dns.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(dns)?;
        params.distinguished_name = distinguished(subject.name, subject.organization);
        params.subject_alt_names.extend(subject.addresses.iter().copied().map(SanType::IpAddress));
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.0);
        let certificate = certificate.with_context(|| format!("certifying {}", subject.name))?;
        Ok(Identity { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// A client's kubeconfig: the API server's address and the client's credentials, all in one
    /// file.
    pub(super) fn kubeconfig(&self, server: &str, subject: &Subject<'_>) -> Result<Value> {
        let identity = self.issue(subject)?;
        let encode = |pem: &str| STANDARD.encode(pem);
        Ok(json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": {
                "server": server,
                "certificate-authority-data": encode(&self.certificate()),
            }}],
            "users": [{"name": subject.name, "user": {
                "client-certificate-data": encode(&identity.certificate),
                "client-key-data": encode(&identity.key),
            }}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": subject.name}}],
            "current-context": "cluster",
        }))
    }
}

/// A key without a certificate: the private one and the public one, in PEM.
pub(super) fn key_pair() -> Result<(String, String)> {
    let key = KeyPair::generate()?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}

fn distinguished(name: &str, organization: Option<&str>) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    if let Some(organization) = organization {
        distinguished.push(DnType::OrganizationName, organization);
    }
    distinguished
}
