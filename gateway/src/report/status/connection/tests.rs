use api_server::{ApiServer, skip};
use fabric_store::Object;
use tokio::time::timeout;

use super::*;
use crate::test_config::config;

#[test]
fn connection_metadata_is_as_in_liqo() {
    let desired = Desired::parse(&config()).unwrap();
    let object = Object::from(connection(&desired, &name("client"))).to_value();
    assert_eq!(object["metadata"]["name"], "gw-client");
    assert_eq!(object["metadata"]["labels"][REMOTE_CLUSTER_ID], "milan");
    assert_eq!(object["spec"]["type"], "Client");
    assert_eq!(object["spec"]["gatewayRef"]["kind"], "WgGatewayClient");
    assert_eq!(object["spec"]["gatewayRef"]["name"], "client");
    assert_eq!(object["spec"]["gatewayRef"]["uid"], "7c8f4e70-0000-4000-8000-000000000001");
    let owner = &object["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["name"]), (&"GatewayClient".into(), &"client".into()));
    assert_eq!(owner["uid"], object["spec"]["gatewayRef"]["uid"]);
}

#[test]
fn connection_is_written_on_change_or_every_10_s() {
    let at = |second: i32| View {
        value: ConnectionValue::Connected,
        latency: Some(Duration::from_millis(second.unsigned_abs().into())),
        latency_at: Timestamp::from_second(second.into()).ok(),
        retries: 0,
        left: None,
        path_mtu: None,
        ..View::start()
    };
    let status = |second: i32| connection_status(&at(second));
    assert!(is_due(None, &status(0)));
    assert!(!is_due(Some(&status(0)), &status(9)));
    assert!(is_due(Some(&status(0)), &status(10)));
    let lost = connection_status(&View { value: ConnectionValue::Error, ..View::start() });
    assert!(is_due(Some(&status(0)), &lost));
    assert!(!is_due(Some(&lost), &lost));
    assert_eq!(lost.latency.unwrap().value, "N/A");
}

#[tokio::test]
async fn foreign_write_to_connection_is_reverted() {
    let dir = tempfile::tempdir().unwrap();
    let args = fabric_store::StoreArgs::directories(None, dir.path().join("run"), None);
    let here = Place { store: Store::open(&args).unwrap(), name: name("client") };
    let mut own = OwnConnection::new(here.store.clone(), here.name.clone()).unwrap();
    own.report(&desired(), &connected()).await.unwrap();
    let written = here.stored().await.unwrap();

    here.put(ConnectionValue::Error).await;
    own.report(&desired(), &connected()).await.unwrap();
    assert_ne!(here.stored().await.unwrap(), written, "not looked at with every probe");
    own.ensured_at -= COUNTERS;
    own.report(&desired(), &connected()).await.unwrap();
    assert_eq!(here.stored().await.unwrap(), written);

    here.store.delete(&own_name(&here.name)).await.unwrap();
    own.ensured_at -= COUNTERS;
    own.report(&desired(), &connected()).await.unwrap();
    assert_eq!(here.stored().await, Some(written), "its file was removed");
}

/// They share an API server.
#[tokio::test]
async fn two_writers_share_a_connection_in_kubernetes() {
    let Some(server) = server() else { return };
    end_of_gateway_keeps_successors_status(&server).await;
    what_another_writes_is_taken_back_and_what_is_removed_comes_back(&server).await;
    unconnected_gateway_keeps_live_status(&server).await;
}

async fn end_of_gateway_keeps_successors_status(server: &ApiServer) {
    let here = Place::on(server, "goodbye");
    let [mut old, mut new] = [(); 2].map(|()| here.gateway(server));
    old.report(&desired(), &connected()).await.unwrap();
    new.report(&desired(), &View::start()).await.unwrap();
    new.report(&desired(), &connected()).await.unwrap();
    old.report_end().await.unwrap();
    assert_eq!(here.value().await, ConnectionValue::Connected);

    // Even if it has observed that.
    let mut old = here.gateway(server);
    old.report(&desired(), &connected()).await.unwrap();
    here.put(ConnectionValue::Error).await;
    seen_at_last(&mut old, sees(ConnectionValue::Error)).await;
    old.report_end().await.unwrap();
    assert_eq!(here.value().await, ConnectionValue::Error);

    new.report(&desired(), &View::start()).await.unwrap();
    new.report(&desired(), &connected()).await.unwrap();
    new.report_end().await.unwrap();
    assert_eq!(here.value().await, ConnectionValue::Connecting, "there is no successor");
}

async fn what_another_writes_is_taken_back_and_what_is_removed_comes_back(server: &ApiServer) {
    let here = Place::on(server, "mended");
    let mut own = here.gateway(server);
    own.report(&desired(), &connected()).await.unwrap();
    here.put(ConnectionValue::Connecting).await;
    seen_at_last(&mut own, sees(ConnectionValue::Connecting)).await;
    own.ensured_at -= LOOK;
    own.report(&desired(), &connected()).await.unwrap();
    assert_eq!(here.value().await, ConnectionValue::Connected);

    here.store.delete(&own_name(&here.name)).await.unwrap();
    seen_at_last(&mut own, |own| own.lost_at.is_some()).await;
    own.report(&desired(), &connected()).await.unwrap();
    assert_eq!(here.stored().await, None, "perhaps the gateway is to go, too");
    own.lost_at = own.lost_at.map(|at| at - LOOK);
    own.report(&desired(), &connected()).await.unwrap();
    assert_eq!(here.value().await, ConnectionValue::Connected);
}

async fn unconnected_gateway_keeps_live_status(server: &ApiServer) {
    let here = Place::on(server, "patient");
    let [mut alive, mut lost] = [(); 2].map(|()| here.gateway(server));
    lost.report(&desired(), &View::start()).await.unwrap();
    alive.report(&desired(), &connected()).await.unwrap();
    seen_at_last(&mut lost, sees(ConnectionValue::Connected)).await;
    lost.ensured_at -= LOOK;
    lost.report(&desired(), &View::start()).await.unwrap();
    assert_eq!(here.value().await, ConnectionValue::Connected);
    lost.seen = lost.seen.map(|(value, since)| (value, since - STALE));
    lost.report(&desired(), &View::start()).await.unwrap();
    assert_eq!(here.value().await, ConnectionValue::Connecting);
}

/// Store in which others see the Connection of a gateway, and write it.
struct Place {
    store: Store,
    name: ObjectRef,
}

impl Place {
    fn on(server: &ApiServer, gateway: &str) -> Self {
        Self { store: Store::kubernetes(Some(&server.admin())).unwrap(), name: name(gateway) }
    }

    /// As a program of its own.
    fn gateway(&self, server: &ApiServer) -> OwnConnection {
        let store = Store::kubernetes(Some(&server.admin())).unwrap();
        OwnConnection::new(store, self.name.clone()).unwrap()
    }

    async fn stored(&self) -> Option<Connection> {
        let object = self.store.get(&own_name(&self.name)).await.unwrap()?;
        Connection::try_from(object).ok()
    }

    async fn value(&self) -> ConnectionValue {
        self.stored().await.unwrap().status.unwrap().value
    }

    async fn put(&self, value: ConnectionValue) {
        let mut connection = self.stored().await.unwrap();
        connection.status = Some(ConnectionStatus { value, latency: None });
        assert!(self.store.put_status(&connection.into()).await.unwrap());
    }
}

fn name(gateway: &str) -> ObjectRef {
    ObjectRef::new(Kind::GatewayConfig, "default", gateway)
}

fn desired() -> Desired {
    Desired::parse(&config()).unwrap()
}

fn connected() -> View {
    View { value: ConnectionValue::Connected, ..View::start() }
}

/// Starts a server that serves Connections. `None` if there can't be one, which has been reported.
fn server() -> Option<ApiServer> {
    let dir = tempfile::tempdir().unwrap().keep();
    let server = ApiServer::start(dir).map_err(|why| skip(&why)).ok()?;
    let mut all = fabric_api::crds::liqo().into_iter();
    let crd = all.find(|crd| crd.spec.names.kind == "Connection").unwrap();
    let crd = serde_json::to_string(&crd).unwrap();
    server.kubectl(&["apply", "--server-side", "-f", "-"], &crd).unwrap();
    server.wait_until("it is served", || {
        server.kubectl(&["get", "--raw", "/apis/networking.liqo.io/v1beta1/connections"], "")
    });
    Some(server)
}

/// Handles changes until the expected one is observed.
async fn seen_at_last(own: &mut OwnConnection, is_it: impl Fn(&OwnConnection) -> bool) {
    while !is_it(own) {
        timeout(Duration::from_secs(30), own.changed()).await.expect("it is seen in the end");
    }
}

fn sees(value: ConnectionValue) -> impl Fn(&OwnConnection) -> bool {
    move |own| own.seen.is_some_and(|(seen, _)| seen == value)
}
