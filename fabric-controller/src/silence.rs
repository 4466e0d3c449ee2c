//! Speaks for gateways in Kubernetes that cannot: one whose node is gone has left its Connection as
//! it was.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_api::networking::{Connection, ConnectionStatus, ConnectionValue};
use fabric_store::{Event, Kind, Object, ObjectRef, Store};
use tokio::time::Instant;

use fabric_core::index::Index;

/// A gateway that probes writes a latency every ten seconds.
const STALE: Duration = Duration::from_secs(30);

/// Gateways without a pod that is ready, and what their Connections say. What one said before its pod
/// was seen not to be ready is disclaimed. A gateway that lives all the same takes that back, and is
/// believed for as long as it keeps it up to date; without probes, for good.
#[derive(Debug, Default)]
pub(crate) struct Silence(BTreeMap<ObjectRef, Word>);

#[derive(Debug)]
struct Word {
    /// When the latency was measured that came with Connected.
    latency_at: Option<String>,
    heard: Instant,
}

impl Silence {
    /// Returns false if the store did not answer: it is to be tried again.
    pub(crate) async fn tell(&mut self, store: &Store, index: &mut Index) -> bool {
        let mut is_done = true;
        let silent = silent(index);
        self.0.retain(|gateway, _| silent.contains(gateway));
        for gateway in silent {
            let latency_at = connected(index, &gateway).and_then(latency_at);
            let is_new = !self.0.contains_key(&gateway);
            if is_new && !disclaim(store, index, &gateway).await {
                is_done = false;
                continue;
            }
            if self.hear(gateway.clone(), latency_at, Instant::now()) {
                is_done &= disclaim(store, index, &gateway).await;
            }
        }
        is_done
    }

    /// When one is to be looked at again, if nothing happens before.
    pub(crate) fn again(&self) -> Option<Instant> {
        let dated = self.0.values().filter(|word| word.latency_at.is_some());
        dated.map(|word| word.heard + STALE).min()
    }

    /// True if it says the same for too long.
    fn hear(&mut self, gateway: ObjectRef, latency_at: Option<String>, now: Instant) -> bool {
        let known = self.0.get(&gateway);
        let known = known.filter(|known| known.latency_at == latency_at);
        let stale = known.is_some_and(|known| {
            known.latency_at.is_some() && now.duration_since(known.heard) >= STALE
        });
        if known.is_none() || stale {
            self.0.insert(gateway, Word { latency_at, heard: now });
        }
        stale
    }
}

fn silent(index: &Index) -> BTreeSet<ObjectRef> {
    let kinds = [Kind::GatewayServer, Kind::GatewayClient].into_iter();
    let all = kinds.flat_map(|kind| index.of_kind(kind)).map(|(gateway, _)| gateway);
    let serves = |gateway: &ObjectRef| index.placement(gateway).is_some_and(|p| p.is_served);
    all.filter(|gateway| !serves(gateway)).cloned().collect()
}

/// False if it is to be tried again.
async fn disclaim(store: &Store, index: &mut Index, gateway: &ObjectRef) -> bool {
    let Some(mut connection) = connected(index, gateway).cloned() else { return true };
    connection.status = Some(ConnectionStatus { value: ConnectionValue::Error, latency: None });
    let connection = Object::from(connection);
    match store.put_status(&connection).await {
        Ok(_) => {
            tracing::warn!(%gateway, "no pod of it is ready: its Connection is no longer Connected");
            index.apply(Event::Applied(Box::new(connection)));
            true
        }
        Err(error) if error.is_unreachable() => false,
        Err(error) => {
            tracing::warn!(%gateway, %error, "its Connection may say Connected wrongly");
            true
        }
    }
}

/// Its Connection, if that says so.
fn connected<'a>(index: &'a Index, gateway: &ObjectRef) -> Option<&'a Connection> {
    let uid = index.get(gateway)?.uid();
    let mut all = index.connections(gateway, uid);
    all.find(|connection| {
        let status = connection.status.as_ref();
        status.is_some_and(|status| status.value == ConnectionValue::Connected)
    })
}

fn latency_at(connection: &Connection) -> Option<String> {
    connection.status.as_ref()?.latency.as_ref()?.timestamp.clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_counts_for_as_long_as_it_is_kept_up_to_date() {
        let start = Instant::now();
        let mut silence = Silence::default();
        let mut hear = |at: Option<&str>, seconds: u64| {
            let gateway = ObjectRef::new(Kind::GatewayServer, "t", "server");
            let now = start + Duration::from_secs(seconds);
            let stale = silence.hear(gateway, at.map(str::to_owned), now);
            (stale, silence.again().map(|again| (again - start).as_secs()))
        };
        assert_eq!(hear(None, 0), (false, None), "it has been disclaimed");
        assert_eq!(hear(Some("a"), 1), (false, Some(31)), "it lives");
        assert_eq!(hear(Some("b"), 11), (false, Some(41)));
        assert_eq!(hear(Some("b"), 40), (false, Some(41)));
        assert_eq!(hear(Some("b"), 41), (true, Some(71)), "it does not any more");
        assert_eq!(hear(None, 42), (false, None));
        assert_eq!(hear(None, 1000), (false, None), "there is nothing to disclaim, or no probes");
    }
}
