//! Writes that were refused, and when they are tried again: the same write is refused as often as
//! it is sent.

use std::collections::BTreeMap;
use std::time::Duration;

use fabric_store::ObjectRef;
use serde_json::Value;
use tokio::time::Instant;

const RETRY: Duration = Duration::from_secs(5);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// The last refusal of each object.
#[derive(Debug, Default)]
pub struct WriteBackoff(BTreeMap<ObjectRef, Refusal>);

#[derive(Debug)]
struct Refusal {
    want: Value,
    message: String,
    wait: Duration,
    again: Instant,
}

impl WriteBackoff {
    /// Reason why this need not be tried now.
    pub(crate) fn pending(
        &self,
        object: &ObjectRef,
        want: impl FnOnce() -> Value,
        now: Instant,
    ) -> Option<&str> {
        let refusal = self.0.get(object).filter(|refusal| refusal.again > now)?;
        (refusal.want == timeless(want())).then_some(&refusal.message)
    }

    pub(crate) fn refused(&mut self, object: &ObjectRef, want: Value, message: &str, now: Instant) {
        let want = timeless(want);
        let before = self.0.get(object).filter(|before| before.want == want);
        let wait = before.map_or(RETRY, |before| (before.wait * 2).min(RETRY_MAX));
        let refusal = Refusal { want, message: message.to_owned(), wait, again: now + wait };
        self.0.insert(object.clone(), refusal);
    }

    pub(crate) fn clear(&mut self, object: &ObjectRef) {
        self.0.remove(object);
    }

    /// Removes entries that are no longer desired.
    pub(crate) fn keep(&mut self, is_wanted: impl Fn(&ObjectRef) -> bool) {
        self.0.retain(|object, _| is_wanted(object));
    }

    /// Time of the next retry. One that is due was tried if there was need.
    pub(crate) fn next_try(&self, now: Instant) -> Option<Instant> {
        self.0.values().map(|refusal| refusal.again).filter(|again| *again > now).min()
    }
}

/// A condition that could not be written is as old as the try, every time.
fn timeless(mut want: Value) -> Value {
    let conditions = want.pointer_mut("/status/conditions").and_then(Value::as_array_mut);
    for condition in conditions.into_iter().flatten().filter_map(Value::as_object_mut) {
        condition.remove("lastTransitionTime");
    }
    want
}

#[cfg(test)]
mod tests {
    use fabric_store::Kind;
    use serde_json::json;

    use super::*;

    fn status(reason: &str, time: u32) -> Value {
        json!({"status": {"conditions": [{"reason": reason, "lastTransitionTime": time}]}})
    }

    #[test]
    fn the_same_is_tried_further_and_further_apart_and_something_else_at_once() {
        let object = ObjectRef::new(Kind::GatewayServer, "t", "server");
        let (mut backoff, mut now) = (WriteBackoff::default(), Instant::now());
        let mut waits = Vec::new();
        for time in 0..6 {
            let want = || status("a", time);
            assert_eq!(backoff.pending(&object, want, now), None);
            backoff.refused(&object, want(), "no", now);
            assert_eq!(backoff.pending(&object, || status("a", time + 1), now), Some("no"));
            let again = backoff.next_try(now).unwrap();
            waits.push((again - now).as_secs());
            now = again;
        }
        assert_eq!(waits, [5, 10, 20, 40, 60, 60]);
        backoff.refused(&object, status("a", 0), "no", now);
        assert_eq!(backoff.pending(&object, || status("b", 0), now), None);
        backoff.refused(&object, status("b", 0), "no", now);
        assert_eq!(backoff.next_try(now), Some(now + RETRY), "it is another matter");
        assert_eq!(backoff.next_try(now + RETRY), None, "nor is what need not be tried waited for");
        backoff.keep(|_| true);
        assert!(backoff.next_try(now).is_some());
        backoff.clear(&object);
        assert_eq!(backoff.next_try(now), None);
    }
}
