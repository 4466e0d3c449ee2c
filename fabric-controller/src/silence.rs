//! Speaks for gateways in Kubernetes that cannot: one whose node is gone has left its Connection as
//! it was.

use std::collections::BTreeSet;

use fabric_api::networking::{Connection, ConnectionStatus, ConnectionValue};
use fabric_store::{Event, Kind, Object, ObjectRef, Store};

use crate::index::Index;

/// Gateways without a pod that is ready, and of whose Connections none says otherwise. Once is
/// enough: a gateway that lives all the same takes that back, and is believed.
#[derive(Debug, Default)]
pub(crate) struct Silence(BTreeSet<ObjectRef>);

impl Silence {
    pub(crate) async fn tell(&mut self, store: &Store, index: &mut Index) {
        let silent = silent(index);
        self.0.retain(|gateway| silent.contains(gateway));
        for gateway in silent {
            if !self.0.contains(&gateway) && disclaim(store, index, &gateway).await {
                self.0.insert(gateway);
            }
        }
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
    let mut all = index.all::<Connection>(Kind::Connection);
    let found = all.find(|(reference, connection)| {
        let of = &connection.spec.gateway_ref;
        reference.namespace == gateway.namespace
            && of.name.as_ref() == Some(&gateway.name)
            && of.uid.as_deref().is_none_or(|of| of == uid)
    });
    let (_, connection) = found?;
    let value = connection.status.as_ref().map(|status| status.value);
    (value == Some(ConnectionValue::Connected)).then_some(connection)
}
