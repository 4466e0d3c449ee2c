//! Keeps the certificate in its Secret, in what the API server trusts, and in what is served.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::http::Uri;
use fabric_api::labels;
use fabric_kube_client::reflector::{Change, Reflector, Selection};
use fabric_kube_client::requests::{Part, Requests, Target};
use fabric_kube_client::{ApiError, ApiServer};
use fabric_runtime::{Backoff, chain};
use futures::FutureExt as _;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{ApiResource, DynamicObject};
use kube::core::Resource as _;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_rustls::rustls::sign::CertifiedKey;

use super::certificate::{self, Certificate, Data, Invalid, Names};
use super::{CONFIGURATION, SECRET};

/// Minimum time between two checks, even if the objects written here are overwritten all the time.
const PACE: Duration = Duration::from_secs(1);
/// Interval of checks without an event: certificates expire without one.
const RECHECK: Duration = Duration::from_secs(600);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Time until every API server has observed the authorities to trust.
const SETTLING: Duration = Duration::from_secs(5);
/// Timeout of one check with all its writes.
const LONGEST: Duration = Duration::from_secs(30);
/// Maximum tries of a write: other replicas may write at the same moment.
const TRIES: usize = 4;

/// Field manager of the authorities.
const MANAGER: &str = "weft-webhook";

/// Certificate that is served; none before there is one.
pub(super) type Served = Option<Arc<CertifiedKey>>;

pub(super) struct CertificateManager {
    requests: Requests,
    configuration: Target,
    secret: Target,
    /// Watches of both.
    watches: Reflector<&'static str, DynamicObject>,
    serve: watch::Sender<Served>,
}

#[derive(Debug, thiserror::Error)]
enum CertificateError {
    #[error("cannot {verb} {what}")]
    Api { verb: &'static str, what: String, source: ApiError },
    #[error("cannot {verb} {what}, {reason}; if it is immutable, delete it")]
    Secret { verb: &'static str, what: String, reason: String },
    #[error("cannot make a certificate for {names:?}")]
    Make { names: Names, source: rcgen::Error },
    #[error("Secret {SECRET} does not stay as it is written")]
    Contended,
    #[error("the API server has not answered for {} s", LONGEST.as_secs())]
    Late,
}

impl CertificateManager {
    pub(super) fn new(server: &ApiServer, serve: watch::Sender<Served>) -> Self {
        let configurations = ApiResource::erase::<MutatingWebhookConfiguration>(&());
        let secrets = ApiResource::erase::<Secret>(&());
        let mut watches = Reflector::new(server.client.clone(), server.metrics.clone());
        let one = |kind: &ApiResource, name: &str| {
            Selection::all(kind.clone()).fields(&format!("metadata.name={name}"))
        };
        watches.open(CONFIGURATION, one(&configurations, CONFIGURATION));
        watches.open(SECRET, one(&secrets, SECRET).inside(&server.namespace));
        Self {
            requests: Requests::new(server.client.clone(), MANAGER),
            configuration: Target::new(configurations, (String::new(), CONFIGURATION.to_owned())),
            secret: Target::new(secrets, (server.namespace.clone(), SECRET.to_owned())),
            watches,
            serve,
        }
    }

    /// Runs forever. An error is logged once, and the step is retried.
    pub(super) async fn run(mut self) {
        let mut logged = String::new();
        let mut backoff = Backoff::new(PACE, RETRY_MAX);
        loop {
            // The step below reads the objects that these events are about.
            while self.changed().now_or_never().is_some() {}
            let outcome = timeout(LONGEST, self.settle(SystemTime::now())).await;
            let outcome = outcome.unwrap_or(Err(CertificateError::Late));
            let pause = if outcome.is_ok() { RECHECK } else { backoff.failed() };
            if outcome.is_ok() {
                backoff.reset();
            }
            log_change(&mut logged, outcome);
            sleep(PACE).await;
            let _ = timeout(pause, self.changed()).await;
        }
    }

    async fn changed(&mut self) {
        while matches!(self.watches.next().await, Change::Problems) {}
    }

    /// Registers the authorities before the certificate that needs them is served, unless the one
    /// that is served is not trusted anyway.
    async fn settle(&self, now: SystemTime) -> Result<(), CertificateError> {
        let Some(configuration) = self.configuration().await? else { return Ok(()) };
        let names = names(&configuration);
        if names.is_empty() {
            return Ok(());
        }
        let certificate = self.certificate(&configuration, &names, now).await?;
        let served = self.serve.borrow().clone();
        let trusted = served.is_some_and(|served| {
            certificate::accepts(&certificate.authorities, &served, &names, now).is_ok()
        });
        if !trusted {
            self.serve(&certificate);
        }
        self.register(&configuration, &certificate).await?;
        if !self.is_served(&certificate) {
            sleep(SETTLING).await;
            self.serve(&certificate);
        }
        Ok(())
    }

    /// Configuration to register in; none while the API server has none. Then nothing is written,
    /// so that nothing is left behind after the installation is removed.
    async fn configuration(
        &self,
    ) -> Result<Option<MutatingWebhookConfiguration>, CertificateError> {
        let found = self.requests.read(&self.configuration).await;
        found.map_err(|error| failed("read", &self.configuration, error))
    }

    /// The one in the Secret, made or renewed if need be. Of replicas at once one writes, and all use
    /// what is there afterwards.
    async fn certificate(
        &self,
        owner: &MutatingWebhookConfiguration,
        names: &Names,
        now: SystemTime,
    ) -> Result<Certificate, CertificateError> {
        for _ in 0..TRIES {
            let found = self.requests.read::<Secret>(&self.secret).await;
            let found = found.map_err(|error| failed("read", &self.secret, error))?;
            let Some(secret) = found else {
                self.create(owner, made(names, now, None)?).await?;
                continue;
            };
            let data = secret.data.clone().unwrap_or_default();
            match certificate::read(&data, names, now) {
                Ok(certificate) => return Ok(certificate),
                Err(unfit) => self.replace(secret, renewed(&unfit, &data, names, now)?).await?,
            }
        }
        Err(CertificateError::Contended)
    }

    async fn create(
        &self,
        owner: &MutatingWebhookConfiguration,
        data: Data,
    ) -> Result<(), CertificateError> {
        let metadata = ObjectMeta {
            name: Some(SECRET.to_owned()),
            labels: Some(BTreeMap::from([(
                labels::MANAGED_BY.to_owned(),
                labels::WEFT.to_owned(),
            )])),
            owner_references: owner.controller_owner_ref(&()).map(|owner| {
                vec![OwnerReference { block_owner_deletion: None, controller: None, ..owner }]
            }),
            ..ObjectMeta::default()
        };
        let secret = Secret {
            metadata,
            data: Some(data),
            type_: Some("kubernetes.io/tls".to_owned()),
            ..Secret::default()
        };
        self.written("create", self.requests.create(&self.secret, &secret).await)
    }

    /// Replaces the Secret in the version that was read, so that one replica wins.
    async fn replace(&self, mut secret: Secret, data: Data) -> Result<(), CertificateError> {
        secret.data.get_or_insert_default().extend(data);
        self.written("write", self.requests.replace(&self.secret, &secret).await)
    }

    /// Losing to another replica is as good as winning.
    fn written(
        &self,
        verb: &'static str,
        outcome: Result<DynamicObject, ApiError>,
    ) -> Result<(), CertificateError> {
        match outcome {
            Ok(_) | Err(ApiError::Refused { code: 409, .. }) => Ok(()),
            Err(ApiError::Refused { code: 422, message: reason }) => {
                Err(CertificateError::Secret { verb, what: self.secret.to_string(), reason })
            }
            Err(error) => Err(failed(verb, &self.secret, error)),
        }
    }

    /// Writes the authorities to trust into the configuration, in place of any others there. The
    /// uid keeps this from making half a configuration where one has just been deleted.
    async fn register(
        &self,
        configuration: &MutatingWebhookConfiguration,
        certificate: &Certificate,
    ) -> Result<(), CertificateError> {
        let webhooks = configuration.webhooks.iter().flatten();
        let bundle = &certificate.authorities;
        if webhooks.clone().all(|hook| hook.client_config.ca_bundle.as_ref() == Some(bundle)) {
            return Ok(());
        }
        let bundles = webhooks
            .map(|hook| json!({ "name": hook.name, "clientConfig": { "caBundle": bundle } }));
        let patch = json!({
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": { "name": CONFIGURATION, "uid": configuration.metadata.uid },
            "webhooks": bundles.collect::<Vec<_>>(),
        });
        let applied = self.requests.apply(&self.configuration, Part::AllButStatus, &patch).await;
        applied.map_err(|error| failed("write the caBundle of", &self.configuration, error))?;
        tracing::info!("the API server has the CA of the webhook");
        Ok(())
    }

    fn serve(&self, certificate: &Certificate) {
        if !self.is_served(certificate) {
            self.serve.send_replace(Some(certificate.key.clone()));
            tracing::info!("the webhook serves the certificate of Secret {SECRET}");
        }
    }

    fn is_served(&self, certificate: &Certificate) -> bool {
        self.serve.borrow().as_ref().is_some_and(|served| served.cert == certificate.key.cert)
    }
}

fn made(names: &Names, now: SystemTime, before: Option<&Data>) -> Result<Data, CertificateError> {
    let failed = |source| CertificateError::Make { names: names.clone(), source };
    certificate::make(names, now, before).map_err(failed)
}

/// Only an authority that was good until now goes on being trusted.
fn renewed(
    unfit: &Invalid,
    before: &Data,
    names: &Names,
    now: SystemTime,
) -> Result<Data, CertificateError> {
    let error = unfit as &dyn std::error::Error;
    tracing::info!(error, "the webhook's certificate is made anew");
    made(names, now, matches!(unfit, Invalid::Due).then_some(before))
}

/// Names that the API server calls: a Service's, or the host of a URL.
fn names(configuration: &MutatingWebhookConfiguration) -> Names {
    let webhooks = configuration.webhooks.iter().flatten();
    webhooks.filter_map(|webhook| name(&webhook.client_config)).collect()
}

fn name(config: &WebhookClientConfig) -> Option<String> {
    if let Some(service) = &config.service {
        return Some(format!("{}.{}.svc", service.name, service.namespace));
    }
    let url: Uri = config.url.as_ref()?.parse().ok()?;
    Some(url.host()?.trim_matches(['[', ']']).to_owned())
}

fn failed(verb: &'static str, what: &Target, source: ApiError) -> CertificateError {
    CertificateError::Api { verb, what: what.to_string(), source }
}

/// State changes only.
fn log_change(logged: &mut String, outcome: Result<(), CertificateError>) {
    let now = outcome.err().map(|error| chain(&error));
    match &now {
        Some(error) if error != logged => {
            tracing::warn!(error, "plain strings for CIDRs may be refused");
        }
        None if !logged.is_empty() => tracing::info!("the webhook's certificate is in order again"),
        Some(_) | None => {}
    }
    *logged = now.unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_the_configuration_calls() {
        let service = json!({ "service": { "name": "weft-webhook", "namespace": "liqo" } });
        let cases = [
            (service, "weft-webhook.liqo.svc"),
            (json!({ "url": "https://127.0.0.1:9443/cidr-lists" }), "127.0.0.1"),
            (json!({ "url": "https://[fd00::1]:9443/x" }), "fd00::1"),
            (json!({ "url": "https://weft.example.com/x" }), "weft.example.com"),
        ];
        for (config, expected) in cases {
            let config: WebhookClientConfig = serde_json::from_value(config).unwrap();
            assert_eq!(name(&config).as_deref(), Some(expected));
        }
        let empty: WebhookClientConfig = serde_json::from_value(json!({})).unwrap();
        assert_eq!(name(&empty), None);
    }
}
