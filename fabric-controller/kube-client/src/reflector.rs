//! Watches of an API server, several in one stream. One that fails is tried again by itself, and
//! its failure is a [`Problem`] while it lasts.

mod retry;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::pending;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fabric_objects::{ObjectRef, Problem};
use fabric_runtime::chain;
use futures::stream::{AbortHandle, BoxStream, SelectAll, StreamExt as _, abortable, unfold};
use kube::api::{ApiResource, DynamicObject, ListParams, PartialObjectMeta};
use kube::core::DynamicResourceScope;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use self::retry::{Answers, Retry};
use crate::answer::{answer, api_error};
use crate::error::ApiError;
use crate::grant::Grant;
use crate::metrics::StoreMetrics;
use crate::requests::{Name, name};

/// Time without an answer that is not reported: a server that restarts, or a connection that breaks.
const QUIET: Duration = Duration::from_secs(8);
/// Maximum wait for an API server that is away: it may be back any moment.
const RETRY_MAX: Duration = Duration::from_secs(2);
/// Maximum wait for one that refuses: a user has to change something.
const RETRY_REFUSED: Duration = Duration::from_secs(10);
/// Maximum wait for a definition that need not be installed.
const RETRY_MISSING: Duration = Duration::from_secs(30);

/// Objects of one kind that a watch reports.
#[derive(Clone, Debug)]
pub struct Selection {
    resource: ApiResource,
    namespace: Option<String>,
    labels: Option<String>,
    fields: Option<String>,
    object: Option<ObjectRef>,
    is_optional: bool,
    grant: Option<Grant>,
}

/// Object of a kind that is named at run time, whole or in parts.
pub trait Watched:
    Resource<DynamicType = ApiResource, Scope = DynamicResourceScope> + Data
{
}
impl<K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope> + Data> Watched for K {}

pub trait Data: Clone + fmt::Debug + DeserializeOwned + Send + 'static {}
impl<T: Clone + fmt::Debug + DeserializeOwned + Send + 'static> Data for T {}

/// Change of the objects of the watch `S`.
#[derive(Debug)]
pub enum Change<S, K> {
    Applied(S, K),
    Deleted(S, K),
    /// A list of all objects is complete: any other is gone.
    Listed(S, BTreeSet<Name>),
    /// [`Reflector::problems`] may be others now.
    Problems,
}

/// Watches by their keys `S`.
pub struct Reflector<S, K> {
    client: Client,
    metrics: StoreMetrics,
    /// Streams in a lock that is never contended, so that they can be shared. Only those with something to
    /// report are polled, of hundreds.
    watches: Mutex<Streams<S, K>>,
    open: BTreeMap<S, AbortHandle>,
    /// Names of the objects in the lists that have begun.
    lists: BTreeMap<S, BTreeSet<Name>>,
    /// Watches that have not listed all objects yet.
    unlisted: BTreeSet<S>,
    /// Watches of kinds without a definition.
    missing: BTreeSet<S>,
    /// Problems of watches.
    failing: BTreeMap<S, Problem>,
}

type Streams<S, K> = SelectAll<BoxStream<'static, (S, Report<K>)>>;

type Reports<K> = BoxStream<'static, Report<K>>;

/// Report of a watch.
enum Report<K> {
    Event(Event<K>),
    Failed(Failure),
    /// The watch works again, which may have no event to show for it.
    Recovered,
}

/// Failure of a watch, which is tried again.
enum Failure {
    /// The kind has no definition, which it need not have.
    Missing,
    /// The right to it is denied.
    Denied(Problem),
    /// One that is to be reported has a problem.
    Other(Option<Problem>),
}

impl Selection {
    /// All objects of a kind.
    pub fn all(resource: ApiResource) -> Self {
        let (namespace, labels, fields, object) = (None, None, None, None);
        Self { resource, namespace, labels, fields, object, is_optional: false, grant: None }
    }

    /// One object. The right to it by its name is a right to no other selection.
    pub fn one(resource: ApiResource, object: &ObjectRef) -> Self {
        let namespace = object.namespace.clone();
        let selection = Self { namespace, object: Some(object.clone()), ..Self::all(resource) };
        selection.fields(&format!("metadata.name={}", object.name))
    }

    pub fn inside(self, namespace: &str) -> Self {
        Self { namespace: Some(namespace.to_owned()), ..self }
    }

    pub fn labels(self, selector: &str) -> Self {
        Self { labels: Some(selector.to_owned()), ..self }
    }

    pub fn fields(self, selector: &str) -> Self {
        Self { fields: Some(selector.to_owned()), ..self }
    }

    /// A source whose kind may have no definition, without a problem.
    pub fn optional(self) -> Self {
        Self { is_optional: true, ..self }
    }

    /// A source that needs a right which the program gives itself. `object` is the one whose problem
    /// it is if that is denied, without which the watch counts as listed.
    pub fn granted(self, grant: Grant, object: &ObjectRef) -> Self {
        Self { grant: Some(grant), object: Some(object.clone()), ..self }
    }

    pub async fn list(&self, client: &Client) -> Result<Vec<DynamicObject>, ApiError> {
        let api = self.api::<DynamicObject>(client);
        Ok(answer(&self.resource.kind, api.list(&self.parameters())).await?.items)
    }

    /// Lists only their metadata.
    pub async fn list_metadata(
        &self,
        client: &Client,
        limit: Option<u32>,
    ) -> Result<Vec<PartialObjectMeta<DynamicObject>>, ApiError> {
        let api = self.api::<DynamicObject>(client);
        let parameters = ListParams { limit, ..self.parameters() };
        Ok(answer(&self.resource.kind, api.list_metadata(&parameters)).await?.items)
    }

    /// Returns why these cannot be read.
    pub async fn check(&self, client: &Client) -> Result<(), Problem> {
        self.list_metadata(client, Some(1)).await.map(drop).map_err(|error| {
            let message = self.refusal(&error).unwrap_or_else(|| chain(&error));
            Problem { source: String::new(), object: None, field: None, message }
        })
    }

    fn api<K: Watched>(&self, client: &Client) -> Api<K> {
        match &self.namespace {
            Some(inside) => Api::namespaced_with(client.clone(), inside, &self.resource),
            None => Api::all_with(client.clone(), &self.resource),
        }
    }

    fn parameters(&self) -> ListParams {
        let (label_selector, field_selector) = (self.labels.clone(), self.fields.clone());
        ListParams { label_selector, field_selector, ..ListParams::default() }
    }

    /// Remedy where waiting does not help.
    fn refusal(&self, error: &ApiError) -> Option<String> {
        error.refusal(&self.resource.kind, &self.resource.api_version, &self.resource.plural)
    }

    /// Opens the stream of reports, which does not end.
    fn watch<K: Watched>(self, client: &Client, metrics: StoreMetrics) -> Reports<K> {
        let config = watcher::Config {
            label_selector: self.labels.clone(),
            field_selector: self.fields.clone(),
            ..watcher::Config::default()
        };
        let answers = Answers::default();
        let events = watcher(self.api(&answers.observe(client)), config).boxed();
        let due = self.grant.clone();
        let state = (self, client.clone(), metrics, events, Retry::new(answers), due);
        unfold(state, |(selection, client, metrics, mut events, mut retry, mut due)| async move {
            retry.wait().await;
            if let Some(grant) = &due {
                if let Err(error) = grant.acquire(&client, &selection.resource).await {
                    let failed = Report::Failed(selection.denied(error, &mut retry));
                    return Some((failed, (selection, client, metrics, events, retry, due)));
                }
                due = None;
            }
            let report = tokio::select! {
                biased;
                event = events.next() => match event? {
                    Ok(event) => {
                        // A list that has begun may still fail.
                        if !matches!(event, Event::Init) {
                            retry.reset();
                        }
                        Report::Event(event)
                    }
                    Err(error) => {
                        due.clone_from(&selection.grant);
                        Report::Failed(selection.failure(error, &mut retry, &metrics))
                    }
                },
                () = retry.recovered() => Report::Recovered,
            };
            Some((report, (selection, client, metrics, events, retry, due)))
        })
        .boxed()
    }

    fn denied(&self, error: ApiError, retry: &mut Retry) -> Failure {
        let ApiError::Refused { message, .. } = error else {
            tracing::debug!(error = chain(&error), "a right cannot be acquired");
            retry.failed(RETRY_MAX);
            return Failure::Other(None);
        };
        retry.failed(RETRY_REFUSED);
        let (source, object, field) = (String::new(), self.object.clone(), None);
        let message = format!("may not watch {} of its namespace: {message}", self.resource.kind);
        Failure::Denied(Problem { source, object, field, message })
    }

    fn failure(&self, error: watcher::Error, retry: &mut Retry, metrics: &StoreMetrics) -> Failure {
        let kind = &self.resource.kind;
        let error = cause(kind, error);
        if self.is_optional && matches!(error, Some(ApiError::Refused { code: 404, .. })) {
            retry.failed(RETRY_MISSING);
            return Failure::Missing;
        }
        metrics.count_watch_restart(kind);
        let refusal = error.as_ref().and_then(|error| self.refusal(error));
        retry.failed(if refusal.is_some() { RETRY_REFUSED } else { RETRY_MAX });
        let Some(error) = error else { return Failure::Other(None) };
        tracing::debug!(kind, error = chain(&error), "a watch failed");
        let is_away = retry.first.is_some_and(|first| first.elapsed() >= QUIET);
        let away = || "the API server cannot be reached; what is known stays".to_owned();
        let message = refusal.or_else(|| is_away.then(away));
        let (source, object, field) = (String::new(), self.object.clone(), None);
        Failure::Other(message.map(|message| Problem { source, object, field, message }))
    }
}

impl<S: Clone + Ord + Send + 'static, K: Watched> Reflector<S, K> {
    /// A reflector that watches nothing yet.
    pub fn new(client: Client, metrics: StoreMetrics) -> Self {
        Self {
            client,
            metrics,
            watches: Mutex::new(SelectAll::new()),
            open: BTreeMap::new(),
            lists: BTreeMap::new(),
            unlisted: BTreeSet::new(),
            missing: BTreeSet::new(),
            failing: BTreeMap::new(),
        }
    }

    /// Must be called within a tokio runtime; nothing is sent yet.
    pub fn open(&mut self, key: S, selection: Selection) {
        let reports = selection.watch(&self.client, self.metrics.clone());
        self.insert(key.clone(), reports);
        self.unlisted.insert(key);
    }

    fn insert(&mut self, key: S, reports: Reports<K>) {
        let of = key.clone();
        let (reports, handle) = abortable(reports.map(move |report| (of.clone(), report)));
        self.watches().push(reports.boxed());
        if let Some(before) = self.open.insert(key, handle) {
            before.abort();
        }
    }

    /// Ends a watch; its objects are not reported as deleted.
    pub fn close(&mut self, key: &S) {
        if let Some(open) = self.open.remove(key) {
            open.abort();
        }
        self.lists.remove(key);
        self.unlisted.remove(key);
        self.missing.remove(key);
        self.failing.remove(key);
    }

    /// Keys of the open watches.
    pub fn keys(&self) -> impl Iterator<Item = &S> {
        self.open.keys()
    }

    /// True once every watch has listed all objects that were there when it began.
    pub fn is_synced(&self) -> bool {
        self.count_unlisted() == 0
    }

    /// Number of watches that have not listed all objects yet.
    pub fn count_unlisted(&self) -> usize {
        self.unlisted.len()
    }

    /// True once that watch has listed all objects that were there when it began, or is denied.
    pub fn is_listed(&self, key: &S) -> bool {
        !self.unlisted.contains(key)
    }

    /// True if the kind has no definition, which it need not have.
    pub fn is_missing(&self, key: &S) -> bool {
        self.missing.contains(key)
    }

    /// Reasons why not all objects can be read.
    pub fn problems(&self) -> impl Iterator<Item = &Problem> {
        self.failing.values()
    }

    /// Cancel safe: watches keep their positions themselves.
    pub async fn next(&mut self) -> Change<S, K> {
        loop {
            let Some((key, report)) = self.watches().next().await else {
                // One may be opened later.
                return pending().await;
            };
            match report {
                Report::Event(event) => {
                    if let Some(change) = self.take(key, event) {
                        return change;
                    }
                }
                Report::Failed(failure) => {
                    self.failed(key, failure);
                    return Change::Problems;
                }
                Report::Recovered => {
                    if self.failing.remove(&key).is_some() {
                        return Change::Problems;
                    }
                }
            }
        }
    }

    fn take(&mut self, key: S, event: Event<K>) -> Option<Change<S, K>> {
        if !matches!(event, Event::Init) {
            self.failing.remove(&key);
            self.missing.remove(&key);
        }
        match event {
            Event::Init => {
                self.lists.insert(key, BTreeSet::new());
                None
            }
            Event::InitApply(object) => {
                self.lists.entry(key.clone()).or_default().insert(name(object.meta()));
                Some(Change::Applied(key, object))
            }
            Event::InitDone => {
                self.unlisted.remove(&key);
                let names = self.lists.remove(&key).unwrap_or_default();
                Some(Change::Listed(key, names))
            }
            Event::Apply(object) => Some(Change::Applied(key, object)),
            Event::Delete(object) => Some(Change::Deleted(key, object)),
        }
    }

    fn failed(&mut self, key: S, failure: Failure) {
        match failure {
            Failure::Missing => {
                self.failing.remove(&key);
                self.missing.insert(key);
            }
            Failure::Other(None) => {}
            Failure::Denied(problem) => {
                self.unlisted.remove(&key);
                self.failed(key, Failure::Other(Some(problem)));
            }
            Failure::Other(Some(problem)) => {
                let before = self.failing.insert(key, problem.clone());
                if before.as_ref() != Some(&problem) {
                    tracing::warn!("{problem}");
                }
            }
        }
    }

    fn watches(&mut self) -> &mut Streams<S, K> {
        self.watches.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S, K> fmt::Debug for Reflector<S, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reflector").finish_non_exhaustive()
    }
}

/// `None` if the watch merely has to begin anew.
fn cause(kind: &str, error: watcher::Error) -> Option<ApiError> {
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
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::Poll;

    use futures::FutureExt as _;
    use futures::stream::{poll_fn, repeat_with};
    use k8s_openapi::api::core::v1::Secret;
    use kube::core::Status;
    use tokio::time::Instant;

    use super::retry::RETRY;
    use super::*;

    fn selection() -> Selection {
        Selection::all(ApiResource::erase::<Secret>(&()))
    }

    fn refused(code: u16, message: &str) -> watcher::Error {
        let status = Status::failure(message, "reason").with_code(code);
        watcher::Error::InitialListFailed(kube::Error::Api(status.boxed()))
    }

    fn failure(selection: &Selection, error: watcher::Error, retry: &mut Retry) -> Failure {
        selection.failure(error, retry, &StoreMetrics::default())
    }

    #[test]
    fn refusal_names_the_remedy() {
        let of = |error| match failure(&selection(), error, &mut Retry::new(Answers::default())) {
            Failure::Other(problem) => problem.map(|problem| problem.message),
            Failure::Missing | Failure::Denied(_) => panic!("not optional, and by no grant"),
        };
        assert!(of(refused(404, "not found")).unwrap().contains("secrets"));
        let forbidden = of(refused(403, "User x cannot list")).unwrap();
        assert!(forbidden.contains("User x cannot list"), "{forbidden}");
        assert!(forbidden.ends_with("the label liqo.io/tenant-namespace=true"), "{forbidden}");
        assert_eq!(of(refused(503, "busy")), None);
    }

    #[tokio::test]
    async fn watch_without_events_is_not_polled_again() {
        let unreachable = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = Client::try_from(unreachable).unwrap();
        let mut reflector = Reflector::<_, DynamicObject>::new(client, StoreMetrics::default());
        let polls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&polls);
        let silent = poll_fn(move |_| {
            counted.fetch_add(1, Relaxed);
            Poll::Pending
        });
        reflector.insert("silent", silent.boxed());
        let object = DynamicObject::new("a", &ApiResource::erase::<Secret>(&()));
        let events = repeat_with(move || Event::Apply(object.clone()));
        reflector.insert("busy", events.map(Report::Event).boxed());
        for _ in 0..10 {
            assert!(matches!(reflector.next().await, Change::Applied("busy", _)));
        }
        assert_eq!(polls.load(Relaxed), 1);
        reflector.close(&"busy");
        assert!(reflector.next().now_or_never().is_none());
        assert_eq!(reflector.keys().collect::<Vec<_>>(), [&"silent"]);
    }

    #[tokio::test]
    async fn list_names_all_objects_once_it_is_complete() {
        let unreachable = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = Client::try_from(unreachable).unwrap();
        let mut reflector = Reflector::<_, DynamicObject>::new(client, StoreMetrics::default());
        reflector.open("secrets", selection());
        let named = |name: &str| DynamicObject::new(name, &ApiResource::erase::<Secret>(&()));
        for names in [vec!["a", "b"], vec!["b"]] {
            assert!(reflector.take("secrets", Event::Init).is_none());
            for name in &names {
                let change = reflector.take("secrets", Event::InitApply(named(name)));
                assert!(matches!(change, Some(Change::Applied("secrets", _))));
            }
            let change = reflector.take("secrets", Event::InitDone);
            let Some(Change::Listed("secrets", listed)) = change else { panic!("{change:?}") };
            assert!(listed.iter().map(|(_, name)| name).eq(&names), "{listed:?}");
            assert!(reflector.is_synced());
        }
        reflector.take("secrets", Event::Init);
        reflector.take("secrets", Event::InitApply(named("cut off")));
        reflector.take("secrets", Event::Init);
        let change = reflector.take("secrets", Event::InitDone);
        assert!(matches!(change, Some(Change::Listed(_, listed)) if listed.is_empty()));
    }

    #[tokio::test(start_paused = true)]
    async fn waits_grow_to_the_bound_of_their_cause() {
        for (selection, code, max) in [
            (selection(), 503, RETRY_MAX),
            (selection(), 403, RETRY_REFUSED),
            (selection().optional(), 404, RETRY_MISSING),
            (selection().optional(), 503, RETRY_MAX),
        ] {
            let mut retry = Retry::new(Answers::default());
            let mut waits = Vec::new();
            for _ in 0..12 {
                let began = Instant::now();
                let failure = failure(&selection, refused(code, ""), &mut retry);
                assert_eq!(matches!(failure, Failure::Missing), code == 404);
                retry.wait().await;
                waits.push(began.elapsed());
            }
            assert!(waits[0] <= RETRY && waits[0] >= RETRY / 2, "{waits:?}");
            assert!(waits[11] <= max && waits[11] >= max / 2, "{code}: {waits:?}");
        }
    }

    fn is_reported(retry: &mut Retry) -> bool {
        matches!(failure(&selection(), refused(503, ""), retry), Failure::Other(Some(_)))
    }

    #[tokio::test(start_paused = true)]
    async fn absent_server_is_reported_after_a_while() {
        let mut retry = Retry::new(Answers::default());
        assert!(!is_reported(&mut retry));
        tokio::time::advance(QUIET / 2).await;
        assert!(!is_reported(&mut retry), "a server that restarts");
        tokio::time::advance(QUIET / 2).await;
        assert!(is_reported(&mut retry));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_before_an_answer_do_not_count() {
        let answers = Answers::default();
        let mut retry = Retry::new(answers.clone());
        assert!(!is_reported(&mut retry));
        answers.count();
        retry.recovered().await;
        assert!(retry.recovered().now_or_never().is_none(), "once");
        tokio::time::advance(QUIET).await;
        assert!(!is_reported(&mut retry));
        assert!(retry.recovered().now_or_never().is_none(), "that one has no answer yet");
        tokio::time::advance(QUIET).await;
        assert!(is_reported(&mut retry));
    }
}
