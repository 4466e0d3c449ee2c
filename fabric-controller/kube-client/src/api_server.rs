use std::fmt;
use std::path::Path;

use fabric_api::labels;
use fabric_objects::{Kind, ObjectRef};
use hyper_util::client::legacy::Client as Http;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::api::{ApiResource, GroupVersionKind, PostParams};
use kube::client::{Body, ConfigExt as _};
use kube::config::Kubeconfig;
use kube::{Api, Client, Config};
use tokio::sync::watch;
use tower::timeout::TimeoutLayer;
use tower::{BoxError, ServiceBuilder};

use crate::answer::{TIMEOUT, answer};
use crate::connector::Connector;
use crate::error::{ApiError, ConnectError};
use crate::metrics::StoreMetrics;
use crate::requests::{Requests, Target};

/// Connection to an API server. Cheap to clone.
#[derive(Clone)]
pub struct ApiServer {
    pub client: Client,
    /// The namespace that weft is installed in.
    pub namespace: String,
    pub url: String,
    /// No connection to its machine can be made.
    pub unreachable: watch::Receiver<bool>,
    /// Counters of all requests to it.
    pub metrics: StoreMetrics,
}

impl ApiServer {
    /// Owner of what weft writes, in `metadata.managedFields`.
    pub const MANAGER: &str = "weft";

    /// The API server of a context of a kubeconfig: of this one, or that of `KUBECONFIG`, or of the
    /// pod's service account, or of the user. Without a namespace, weft is installed in that of the
    /// pod, or in liqo. Must be called within a tokio runtime; nothing is sent yet.
    pub fn open(
        kubeconfig: Option<&Path>,
        context: Option<&str>,
        namespace: Option<String>,
    ) -> Result<Self, ConnectError> {
        let (config, own_namespace) = config(kubeconfig, context)?;
        let namespace = namespace.or(own_namespace);
        let namespace = namespace.unwrap_or_else(|| labels::LIQO_NAMESPACE.to_owned());
        let (connector, unreachable) = Connector::new();
        let client = client(&config, connector)
            .map_err(|error| ConnectError::new(&config.cluster_url.to_string(), error))?;
        tracing::debug!(server = %config.cluster_url, namespace, "using an API server");
        let (url, metrics) = (config.cluster_url.to_string(), StoreMetrics::default());
        Ok(Self { client, namespace, url, unreachable, metrics })
    }

    /// Name of the account of a token for that audience; none if the token is not valid.
    pub async fn account_of(
        &self,
        token: &str,
        audience: &str,
    ) -> Result<Option<String>, ApiError> {
        let spec =
            TokenReviewSpec { token: token.to_owned(), audiences: Some(vec![audience.to_owned()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let (api, parameters) = (Api::all(self.client.clone()), PostParams::default());
        let reviewed = answer("TokenReview", api.create(&parameters, &review)).await?;
        let status = reviewed.status.filter(|status| status.authenticated == Some(true));
        Ok(status.and_then(|status| status.user).and_then(|user| user.username))
    }

    /// Requests of the field manager [`Self::MANAGER`].
    pub fn requests(&self) -> Requests {
        Requests::new(self.client.clone(), Self::MANAGER)
    }
}

/// Names an object in requests.
pub fn target(object: &ObjectRef) -> Target {
    let namespace = object.namespace.clone().unwrap_or_default();
    Target::new(resource(object.kind), (namespace, object.name.clone()))
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiServer").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// Names a kind in requests.
pub fn resource(kind: Kind) -> ApiResource {
    let api_version = kind.api_version();
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let gvk = GroupVersionKind::gvk(group, version, kind.as_str());
    ApiResource::from_gvk_with_plural(&gvk, kind.plural())
}

/// Explicit choices come first: the file, then `KUBECONFIG`. A pod has its service account, and by
/// that a namespace; a user has `~/.kube/config`, whose namespace is the one worked in just now.
fn config(
    kubeconfig: Option<&Path>,
    context: Option<&str>,
) -> Result<(Config, Option<String>), ConnectError> {
    let (of, named) = match kubeconfig {
        Some(file) => {
            (format!("--kubeconfig={}", file.display()), Kubeconfig::read_from(file).map(Some))
        }
        None => {
            let files = std::env::var("KUBECONFIG").unwrap_or_default();
            (format!("KUBECONFIG={files}"), Kubeconfig::from_env())
        }
    };
    let in_context = |mut file: Kubeconfig| {
        file.current_context = context.map(str::to_owned).or(file.current_context);
        Config::try_from(file)
    };
    let named = named.and_then(|file| file.map(in_context).transpose());
    if let Some(config) = named.map_err(|error| ConnectError::new(&of, error))? {
        return Ok((config, None));
    }
    if context.is_none() && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
        let config = Config::incluster()
            .map_err(|error| ConnectError::new("this pod's service account", error))?;
        let namespace = config.default_namespace.clone();
        return Ok((config, Some(namespace)));
    }
    let of = "~/.kube/config, as neither --kubeconfig nor KUBECONFIG names another file";
    let own = Kubeconfig::read().and_then(in_context);
    let own = own.map_err(|error| ConnectError::new(of, error))?;
    Ok((own, None))
}

/// Replaces kube's own stack, which has no keepalive, repeats what was refused many times over, and
/// logs every failure.
fn client(config: &Config, connector: Connector) -> kube::Result<Client> {
    let https = config.rustls_https_connector_with_connector(connector)?;
    let http: Http<_, Body> = Http::builder(TokioExecutor::new()).build(https);
    let stack = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .layer(TimeoutLayer::new(TIMEOUT))
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(stack, config.default_namespace.clone()))
}
