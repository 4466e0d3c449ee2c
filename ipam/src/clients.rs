//! Clients that may request prefixes and addresses: accounts of the namespace of weft, by their tokens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fabric_store::Store;
use tokio::sync::Mutex;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

/// Audience of tokens for ipam.
const AUDIENCE: &str = "weft-ipam";
/// Time for which a token that was reviewed is not reviewed again.
const REVIEWED: Duration = Duration::from_secs(600);

#[derive(Clone)]
pub(crate) struct Clients {
    store: Store,
    is_token_required: bool,
    /// Token that was accepted last: there is one client that has one.
    accepted: Arc<Mutex<Option<(String, Instant)>>>,
}

impl Clients {
    pub(crate) fn new(store: Store, is_token_required: bool) -> Self {
        Self { store, is_token_required, accepted: Arc::default() }
    }

    /// Fails unless the call has a token of such an account, or none, where none is required. In
    /// directories there are no accounts.
    pub(crate) async fn admit<T>(&self, call: &Request<T>) -> Result<(), Status> {
        match token(call.metadata()) {
            Some(token) => self.review(token).await,
            None if self.is_token_required => Err(Status::unauthenticated(
                "no token; expected one of an account of weft's namespace, for the audience weft-ipam",
            )),
            None => Ok(()),
        }
    }

    async fn review(&self, token: &str) -> Result<(), Status> {
        let Some(server) = self.store.api_server() else { return Ok(()) };
        // Locked during the review: calls at the same time share it.
        let mut accepted = self.accepted.lock().await;
        let is_known = |(known, at): &(String, Instant)| known == token && at.elapsed() < REVIEWED;
        if accepted.as_ref().is_some_and(is_known) {
            return Ok(());
        }
        let account = server.account_of(token, AUDIENCE).await;
        let account = account
            .map_err(|error| Status::unavailable(format!("cannot review the token: {error}")))?;
        let accounts = format!("system:serviceaccount:{}:", server.namespace);
        match account {
            Some(account) if account.starts_with(&accounts) => {
                *accepted = Some((token.to_owned(), Instant::now()));
                Ok(())
            }
            other => {
                let found = other.unwrap_or_else(|| "no account".to_owned());
                Err(Status::unauthenticated(format!(
                    "found a token of {found}; expected one of {accounts}NAME, for the audience {AUDIENCE}"
                )))
            }
        }
    }
}

fn token(metadata: &MetadataMap) -> Option<&str> {
    metadata.get("authorization")?.to_str().ok()?.strip_prefix("Bearer ")
}
