//! Tries of a watch that has failed.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use fabric_runtime::{Backoff, jittered};
use kube::Client;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tower::service_fn;

/// First wait for the next try.
pub(super) const RETRY: Duration = Duration::from_millis(100);
/// Longest wait of any cause; each has its own maximum.
const LONGEST: Duration = Duration::from_secs(30);
/// Time without a failure after which the next one is tried again at once.
const FORGET: Duration = Duration::from_secs(30);
/// Time after an answer to a watch's request after which it works again: one that merely says what is wrong, or
/// breaks off, has failed by then.
const SETTLED: Duration = Duration::from_millis(500);

/// Time of the next try of a watch.
pub(super) struct Retry {
    backoff: Backoff,
    answers: Answers,
    /// First failure since the watch worked, and the last one.
    pub(super) first: Option<Instant>,
    last: Option<Instant>,
    at: Option<Instant>,
}

impl Retry {
    pub(super) fn new(answers: Answers) -> Self {
        let backoff = Backoff::new(RETRY, LONGEST);
        Self { backoff, answers, first: None, last: None, at: None }
    }

    pub(super) async fn wait(&mut self) {
        if let Some(at) = self.at.take() {
            sleep_until(at).await;
        }
    }

    pub(super) fn reset(&mut self) {
        self.backoff.reset();
        self.first = None;
    }

    pub(super) fn failed(&mut self, max: Duration) {
        let now = Instant::now();
        if self.last.replace(now).is_some_and(|last| now.duration_since(last) > FORGET) {
            self.reset();
        }
        self.first.get_or_insert(now);
        self.answers.forget();
        self.at = Some(now + jittered(self.backoff.failed().min(max)));
    }

    /// Waits until a watch that has failed works again. How soon it is tried again goes by events: a connection may
    /// break again and again.
    pub(super) async fn recovered(&mut self) {
        if self.first.is_none() {
            return pending().await;
        }
        sleep_until(self.answers.first().await + SETTLED).await;
        self.first = None;
    }
}

/// Time of the first answer to a watch since its last failure.
#[derive(Clone, Default)]
pub(super) struct Answers(Arc<watch::Sender<Option<Instant>>>);

impl Answers {
    /// A client whose answers count, unless the server refuses.
    pub(super) fn observe(&self, client: &Client) -> Client {
        let (answers, sent_by) = (self.clone(), client.clone());
        let send = move |request| {
            let (answers, sent_by) = (answers.clone(), sent_by.clone());
            async move {
                let response = sent_by.send(request).await?;
                if response.status().is_success() {
                    answers.count();
                }
                Ok::<_, kube::Error>(response)
            }
        };
        Client::new(service_fn(send), client.default_namespace())
    }

    pub(super) fn count(&self) {
        let now = Instant::now();
        self.0.send_if_modified(|at| at.is_none() && at.replace(now).is_none());
    }

    fn forget(&self) {
        self.0.send_replace(None);
    }

    async fn first(&self) -> Instant {
        let answered = self.0.subscribe().wait_for(Option::is_some).await.ok().and_then(|at| *at);
        match answered {
            Some(at) => at,
            None => pending().await,
        }
    }
}
