//! Writes that were refused, and when they are tried again: the same write is refused as often as
//! it is sent.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::Backoff;

/// First wait after a refusal: a change by others is needed.
pub const WRITE_RETRY: Duration = Duration::from_secs(5);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// The last refused write `W` of each object `K`.
#[derive(Debug)]
pub struct WriteBackoff<K, W>(BTreeMap<K, Refusal<W>>);

#[derive(Debug)]
struct Refusal<W> {
    write: W,
    message: String,
    backoff: Backoff,
    again: Instant,
}

impl<K, W> Default for WriteBackoff<K, W> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Clone + Ord, W: PartialEq> WriteBackoff<K, W> {
    /// Reason why this need not be tried now.
    pub fn pending(&self, object: &K, is_same: impl FnOnce(&W) -> bool) -> Option<&str> {
        self.0.get(object).filter(|refusal| refusal.again > Instant::now())?;
        self.message(object, is_same)
    }

    /// Reason why it was refused last.
    pub fn message(&self, object: &K, is_same: impl FnOnce(&W) -> bool) -> Option<&str> {
        let refusal = self.0.get(object).filter(|refusal| is_same(&refusal.write))?;
        Some(&refusal.message)
    }

    /// Doubles the time to the next try if the same was refused before; else it is `first`.
    pub fn refused(&mut self, object: &K, write: W, message: &str, first: Duration) {
        let before = self.0.get(object).filter(|before| before.write == write);
        let mut backoff =
            before.map_or_else(|| Backoff::new(first, RETRY_MAX), |before| before.backoff);
        let again = Instant::now() + backoff.failed();
        let refusal = Refusal { write, message: message.to_owned(), backoff, again };
        self.0.insert(object.clone(), refusal);
    }

    pub fn clear(&mut self, object: &K) {
        self.0.remove(object);
    }

    /// Removes entries that are no longer desired.
    pub fn keep(&mut self, is_wanted: impl Fn(&K) -> bool) {
        self.0.retain(|object, _| is_wanted(object));
    }

    /// Time of the next retry. One that is due was tried if there was need.
    pub fn next_try(&self) -> Option<Instant> {
        let now = Instant::now();
        self.0.values().map(|refusal| refusal.again).filter(|again| *again > now).min()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn same_write_backs_off_and_another_is_tried_at_once() {
        let object = "server";
        let mut backoff = WriteBackoff::default();
        let pending = |backoff: &WriteBackoff<&str, char>, write| {
            backoff.pending(&object, |tried| *tried == write).map(str::to_owned)
        };
        let mut waits = Vec::new();
        for _ in 0..6 {
            assert_eq!(pending(&backoff, 'a'), None);
            backoff.refused(&object, 'a', "no", WRITE_RETRY);
            assert_eq!(pending(&backoff, 'a').as_deref(), Some("no"));
            let wait = backoff.next_try().unwrap() - Instant::now();
            waits.push(wait.as_secs());
            advance(wait).await;
        }
        assert_eq!(waits, [5, 10, 20, 40, 60, 60]);
        backoff.refused(&object, 'a', "no", WRITE_RETRY);
        assert_eq!(pending(&backoff, 'b'), None);
        backoff.refused(&object, 'b', "no", WRITE_RETRY);
        let again = backoff.next_try();
        assert_eq!(again, Some(Instant::now() + WRITE_RETRY), "it is another matter");
        advance(WRITE_RETRY).await;
        assert_eq!(backoff.next_try(), None, "nor is what need not be tried waited for");
        backoff.refused(&object, 'b', "no", WRITE_RETRY);
        backoff.keep(|_| true);
        assert!(backoff.next_try().is_some());
        backoff.clear(&object);
        assert_eq!(backoff.next_try(), None);
    }
}
