//! Keeps the certificate in its Secret, in what the API server trusts, and in what is served.

use std::collections::BTreeMap;
use std::future::ready;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::BoxError;
use axum::http::Uri;
use fabric_api::labels;
use futures::{FutureExt as _, Stream, StreamExt as _, stream};
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, WebhookClientConfig,
};
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::Resource as _;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};
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
    configurations: Api<MutatingWebhookConfiguration>,
    secrets: Api<Secret>,
    serve: watch::Sender<Served>,
}

#[derive(Debug, thiserror::Error)]
enum CertificateError {
    #[error("cannot {verb} {what}")]
    Api { verb: &'static str, what: &'static str, source: BoxError },
    #[error("cannot {verb} Secret {SECRET}, {reason}; if it is immutable, delete it")]
    Secret { verb: &'static str, reason: String },
    #[error("cannot make a certificate for {names:?}")]
    Make { names: Names, source: rcgen::Error },
    #[error("Secret {SECRET} does not stay as it is written")]
    Contended,
    #[error("the API server is silent for {} s", LONGEST.as_secs())]
    Late,
}

impl CertificateManager {
    pub(super) fn new(client: Client, namespace: &str, serve: watch::Sender<Served>) -> Self {
        let secrets = Api::namespaced(client.clone(), namespace);
        Self { configurations: Api::all(client), secrets, serve }
    }

    /// Runs forever. An error is logged once, and the step is retried.
    pub(super) async fn run(self) {
        let mut news = pin!(self.news());
        let mut logged = String::new();
        let mut backoff = PACE;
        loop {
            // The step below reads the objects that these events are about.
            while news.next().now_or_never().flatten().is_some() {}
            let outcome = timeout(LONGEST, self.settle(SystemTime::now())).await;
            let outcome = outcome.unwrap_or(Err(CertificateError::Late));
            let pause = if outcome.is_ok() { RECHECK } else { backoff };
            backoff = if outcome.is_ok() { PACE } else { RETRY_MAX.min(backoff * 2) };
            log_change(&mut logged, outcome);
            sleep(PACE).await;
            let _ = timeout(pause, news.next()).await;
        }
    }

    fn news(&self) -> impl Stream<Item = ()> + use<> {
        let configuration = watch_object(self.configurations.clone(), CONFIGURATION);
        let secret = watch_object(self.secrets.clone(), SECRET);
        let configuration = configuration.default_backoff().filter_map(|e| ready(e.ok().map(drop)));
        let secret = secret.default_backoff().filter_map(|e| ready(e.ok().map(drop)));
        stream::select(configuration, secret)
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
        let found = self.configurations.get_opt(CONFIGURATION).await;
        found.map_err(|error| failed("read", "MutatingWebhookConfiguration weft-cidr-lists", error))
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
            let found = self.secrets.get_opt(SECRET).await.map_err(|e| refused("read", e))?;
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
        let created = self.secrets.create(&PostParams::default(), &secret).await;
        written("create", created)
    }

    /// Replaces the Secret in the version that was read, so that one replica wins.
    async fn replace(&self, mut secret: Secret, data: Data) -> Result<(), CertificateError> {
        secret.data.get_or_insert_default().extend(data);
        let replaced = self.secrets.replace(SECRET, &PostParams::default(), &secret).await;
        written("write", replaced)
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
        let force = PatchParams::apply(MANAGER).force();
        let patched = self.configurations.patch(CONFIGURATION, &force, &Patch::Apply(patch)).await;
        let what = "the caBundle of MutatingWebhookConfiguration weft-cidr-lists";
        patched.map_err(|error| failed("write", what, error))?;
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

/// Losing to another replica is as good as winning.
fn written(verb: &'static str, outcome: kube::Result<Secret>) -> Result<(), CertificateError> {
    match outcome {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(refused(verb, error)),
    }
}

/// Redacts errors: those of an API server about an invalid Secret may quote it.
fn refused(verb: &'static str, error: kube::Error) -> CertificateError {
    if let kube::Error::Api(status) = &error
        && status.code == 422
    {
        return CertificateError::Secret { verb, reason: status.reason.clone() };
    }
    failed(verb, "Secret weft-webhook-certificate", error)
}

/// Error without kube's frames around the cause, which print it twice.
fn failed(verb: &'static str, what: &'static str, error: kube::Error) -> CertificateError {
    if let kube::Error::Api(status) = error {
        return CertificateError::Api { verb, what, source: status.into() };
    }
    CertificateError::Api { verb, what, source: error.into() }
}

/// State changes only.
fn log_change(logged: &mut String, outcome: Result<(), CertificateError>) {
    let now = outcome.err().map(|error| format!("{:#}", anyhow::Error::new(error)));
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
