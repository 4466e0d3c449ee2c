//! One watch: of all objects of a kind, or of a single one.

use fabric_api::labels;
use futures::stream::{BoxStream, StreamExt as _, unfold};
use kube::Api;
use kube::api::{DynamicObject, ListParams};
use kube::runtime::watcher::{self, Event, watcher};

use super::access::{Access, answer, api_error};
use super::patience::Patience;
use crate::chain;
use crate::{ApiError, Kind, ObjectRef, Problem};

/// Failures that are not reported: a server that restarts, or a connection that breaks.
const QUIET_FAILURES: u32 = 3;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Source {
    All(Kind),
    /// Objects that are labelled as of gateways.
    Labelled(Kind),
    One(ObjectRef),
}

/// Event of a source, or its problem if that is to be reported. The source goes on all the same.
pub(super) type Told = Result<Event<DynamicObject>, Option<Problem>>;

impl Source {
    /// Source of the objects of a kind that weft needs: a cluster has many unrelated Secrets and
    /// ConfigMaps. `installation` is the namespace of the cluster's own objects.
    pub(super) fn of(kind: Kind, installation: &str) -> Self {
        match kind {
            Kind::Secret => Self::Labelled(kind),
            Kind::ConfigMap => {
                Self::One(ObjectRef::new(kind, installation, labels::CLUSTER_ID_CONFIGMAP))
            }
            Kind::Namespace
            | Kind::Node
            | Kind::Network
            | Kind::Ip
            | Kind::Configuration
            | Kind::Connection
            | Kind::GatewayServer
            | Kind::GatewayClient
            | Kind::PublicKey
            | Kind::GatewayConfig
            | Kind::NodeConfig => Self::All(kind),
        }
    }

    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::All(kind) | Self::Labelled(kind) => *kind,
            Self::One(object) => object.kind,
        }
    }

    fn api(&self, access: &Access) -> Api<DynamicObject> {
        match self {
            Self::All(kind) | Self::Labelled(kind) => access.all(*kind),
            Self::One(object) => access.around(object),
        }
    }

    /// Selectors by labels, and by fields.
    fn selectors(&self) -> [Option<String>; 2] {
        match self {
            Self::All(_) => [None, None],
            Self::Labelled(_) => [Some(format!("{}=true", labels::GATEWAY_RESOURCE)), None],
            // The right to one object by its name is a right to no other selection.
            Self::One(object) => [None, Some(format!("metadata.name={}", object.name))],
        }
    }

    pub(super) async fn list(&self, access: &Access) -> Result<Vec<DynamicObject>, ApiError> {
        let [label_selector, field_selector] = self.selectors();
        let selection = ListParams { label_selector, field_selector, ..ListParams::default() };
        Ok(answer(self.kind(), self.api(access).list(&selection)).await?.items)
    }

    /// Opens the stream of events, which does not end.
    pub(super) fn open(&self, access: &Access) -> BoxStream<'static, Told> {
        let [label_selector, field_selector] = self.selectors();
        let config =
            watcher::Config { label_selector, field_selector, ..watcher::Config::default() };
        let events = watcher(self.api(access), config).boxed();
        let state = (self.clone(), events, Patience::default());
        unfold(state, |(source, mut events, mut patience)| async move {
            patience.rest().await;
            let told = match events.next().await? {
                Ok(event) => {
                    // A list that has begun may still fail.
                    if !matches!(event, Event::Init) {
                        patience.succeeded();
                    }
                    Ok(event)
                }
                Err(error) => Err(source.failed(error, &mut patience)),
            };
            Some((told, (source, events, patience)))
        })
        .boxed()
    }

    fn failed(&self, error: watcher::Error, patience: &mut Patience) -> Option<Problem> {
        let Some(error) = cause(self.kind(), error) else {
            patience.failed(false);
            return None;
        };
        tracing::debug!(kind = %self.kind(), error = chain(&error), "a watch failed");
        let refusal = self.refusal(&error);
        let failures = patience.failed(refusal.is_some());
        let away = || "the API server cannot be reached; what is known stays".to_owned();
        let message = refusal.or_else(|| (failures > QUIET_FAILURES).then(away))?;
        let object = if let Self::One(object) = self { Some(object.clone()) } else { None };
        Some(Problem { source: String::new(), object, field: None, message })
    }

    /// Remedy where waiting does not help.
    fn refusal(&self, error: &ApiError) -> Option<String> {
        let kind = self.kind();
        error.refusal(kind.as_str(), kind.api_version(), kind.plural())
    }

    /// Lists one object at most. Returns why this source cannot be read.
    pub(super) async fn check(&self, access: &Access) -> Result<(), Problem> {
        let [label_selector, field_selector] = self.selectors();
        let limit = Some(1);
        let selection = ListParams { label_selector, field_selector, limit, ..Default::default() };
        let listed = answer(self.kind(), self.api(access).list_metadata(&selection)).await;
        let problem = |error: ApiError| {
            let message = self.refusal(&error).unwrap_or_else(|| chain(&error));
            Problem { source: String::new(), object: None, field: None, message }
        };
        listed.map(drop).map_err(problem)
    }
}

/// `None` if the watch merely has to begin anew.
fn cause(kind: Kind, error: watcher::Error) -> Option<ApiError> {
    match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => Some(api_error(kind, error)),
        watcher::Error::WatchError(status) if status.code == 410 => None,
        watcher::Error::WatchError(status) => Some(api_error(kind, kube::Error::Api(status))),
        watcher::Error::NoResourceVersion => Some(ApiError::Refused {
            code: 0,
            message: "an object without resourceVersion".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let refused = |code, message: &str| ApiError::Refused { code, message: message.to_owned() };
        let keys = Source::All(Kind::PublicKey);
        let missing = keys.refusal(&refused(404, "not found")).unwrap();
        assert!(missing.contains("publickeies.networking.liqo.io"), "{missing}");
        let secrets = Source::of(Kind::Secret, labels::LIQO_NAMESPACE);
        let forbidden = secrets.refusal(&refused(403, "User x cannot list")).unwrap();
        assert!(forbidden.contains("User x cannot list") && forbidden.ends_with("on secrets"));
        assert_eq!(secrets.refusal(&refused(503, "busy")), None);
        assert_eq!(secrets.refusal(&ApiError::Timeout { seconds: 5 }), None);
    }
}
