//! Marks a Connection as `Error` when its gateway cannot any more: one whose node is gone leaves
//! `Connected` behind.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fabric_api::networking::{Connection, ConnectionStatus, ConnectionValue};
use fabric_store::{Event, Kind, Object, ObjectRef, Store};
use tokio::time::Instant;

use fabric_index::Index;

/// A gateway that probes writes a latency every ten seconds.
const STALE: Duration = Duration::from_secs(30);

/// Last reports of the Connections of gateways without a ready pod. One is marked when its pod is seen
/// not to be ready, and again once its latency is older than [`STALE`]. A gateway that is alive after
/// all writes its own status again; without probes that is never stale.
#[derive(Debug, Default)]
pub(crate) struct StaleConnections(BTreeMap<ObjectRef, LastReport>);

#[derive(Debug)]
struct LastReport {
    /// Timestamp of the latency that came with Connected.
    latency_at: Option<String>,
    since: Instant,
}

impl StaleConnections {
    /// Returns false if the store did not answer: it is to be tried again.
    pub(crate) async fn reconcile(&mut self, store: &Store, index: &mut Index) -> bool {
        let mut is_done = true;
        let unserved = unserved(index);
        self.0.retain(|gateway, _| unserved.contains(gateway));
        for gateway in unserved {
            let latency_at = connected(index, &gateway).and_then(latency_at);
            let is_new = !self.0.contains_key(&gateway);
            if is_new && !mark_error(store, index, &gateway).await {
                is_done = false;
                continue;
            }
            if self.observe(gateway.clone(), latency_at, Instant::now()) {
                is_done &= mark_error(store, index, &gateway).await;
            }
        }
        is_done
    }

    /// Time at which the first report becomes stale.
    pub(crate) fn next_check(&self) -> Option<Instant> {
        let dated = self.0.values().filter(|report| report.latency_at.is_some());
        dated.map(|report| report.since + STALE).min()
    }

    /// Records a report; returns whether it is stale.
    fn observe(&mut self, gateway: ObjectRef, latency_at: Option<String>, now: Instant) -> bool {
        let known = self.0.get(&gateway);
        let known = known.filter(|known| known.latency_at == latency_at);
        let stale = known.is_some_and(|known| {
            known.latency_at.is_some() && now.duration_since(known.since) >= STALE
        });
        if known.is_none() || stale {
            self.0.insert(gateway, LastReport { latency_at, since: now });
        }
        stale
    }
}

fn unserved(index: &Index) -> BTreeSet<ObjectRef> {
    let kinds = [Kind::GatewayServer, Kind::GatewayClient].into_iter();
    let all = kinds.flat_map(|kind| index.of_kind(kind)).map(|(gateway, _)| gateway);
    let serves = |gateway: &ObjectRef| index.placement(gateway).is_some_and(|p| p.is_served);
    all.filter(|gateway| !serves(gateway)).cloned().collect()
}

/// False if it is to be tried again.
async fn mark_error(store: &Store, index: &mut Index, gateway: &ObjectRef) -> bool {
    let Some(mut connection) = connected(index, gateway).cloned() else { return true };
    connection.status = Some(ConnectionStatus { value: ConnectionValue::Error, latency: None });
    let connection = Object::from(connection);
    match store.put_status(&connection).await {
        Ok(_) => {
            tracing::warn!(%gateway, "no pod of it is ready: marked its Connection as Error");
            index.apply(Event::Applied(connection));
            true
        }
        Err(error) if error.is_unreachable() => false,
        Err(error) => {
            tracing::warn!(%gateway, %error, "cannot mark its Connection as Error, which may be wrongly Connected");
            true
        }
    }
}

/// Its Connection, if that is Connected.
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
    fn report_is_valid_while_updated() {
        let start = Instant::now();
        let mut connections = StaleConnections::default();
        let mut observe_at = |at: Option<&str>, seconds: u64| {
            let gateway = ObjectRef::new(Kind::GatewayServer, "t", "server");
            let now = start + Duration::from_secs(seconds);
            let stale = connections.observe(gateway, at.map(str::to_owned), now);
            (stale, connections.next_check().map(|again| (again - start).as_secs()))
        };
        assert_eq!(observe_at(None, 0), (false, None), "it is marked already");
        assert_eq!(observe_at(Some("a"), 1), (false, Some(31)), "its timestamp advances");
        assert_eq!(observe_at(Some("b"), 11), (false, Some(41)));
        assert_eq!(observe_at(Some("b"), 40), (false, Some(41)));
        assert_eq!(observe_at(Some("b"), 41), (true, Some(71)), "it does not any more");
        assert_eq!(observe_at(None, 42), (false, None));
        assert_eq!(observe_at(None, 1000), (false, None), "there is nothing to mark, or no probes");
    }
}
