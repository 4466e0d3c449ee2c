use std::fmt::Display;

use tower::BoxError;

/// Reason why there is no connection to try: no kubeconfig, or one with a fault.
#[derive(Debug, thiserror::Error)]
#[error("cannot find out how to reach the API server of a Kubernetes cluster from {of}: {why}")]
pub struct ConnectError {
    of: String,
    why: String,
}

impl ConnectError {
    /// Makes one of an error whose text has its causes, as kube's errors have.
    pub(crate) fn new(of: &str, why: impl Display) -> Self {
        Self { of: of.to_owned(), why: why.to_string() }
    }
}

/// Error answer of the API server, or the reason for no answer.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("the API server did not answer within {seconds} s")]
    Timeout { seconds: u64 },
    /// The code is HTTP's.
    #[error("the API server refused ({code}): {message}")]
    Refused { code: u16, message: String },
    #[error("the API server cannot be reached")]
    Unreachable(#[source] BoxError),
    #[error("the API server's answer is no JSON")]
    Answer(#[source] serde_json::Error),
}

impl ApiError {
    /// Remedy for a refusal to list or watch a kind that waiting does not end; none for any other
    /// error.
    pub fn refusal(&self, kind: &str, api_version: &str, plural: &str) -> Option<String> {
        let Self::Refused { code, message } = self else { return None };
        let resource = match api_version.split_once('/') {
            Some((group, _)) => format!("{plural}.{group}"),
            None => plural.to_owned(),
        };
        match code {
            401 => Some(format!(
                "the API server does not accept this program's credentials: {message}"
            )),
            // Not a right of all namespaces.
            403 if plural == "secrets" => Some(format!(
                "may not watch {kind}: {message}; the fabric-controller makes the RoleBinding \
                 weft-gateway-keys for itself, and Roles for gateways, in namespaces that are called \
                 liqo-tenant-... or have the label liqo.io/tenant-namespace=true"
            )),
            403 => Some(format!(
                "may not watch {kind}: {message}; give this program's user the verbs get, list and \
                 watch on {resource}"
            )),
            404 => Some(format!(
                "the API server knows no {kind} of {api_version}; `helm upgrade` of weft's chart installs \
                 the CustomResourceDefinition {resource}, or restores it"
            )),
            _ => None,
        }
    }
}
