use fabric_kube_client::StoreMetrics;
use serde_json::json;
use tokio::time::timeout;

use super::*;

/// One gateway that is planned, of which nothing is there yet.
fn planned(server: ApiServer) -> Gateways {
    let heartbeat = Heartbeat::of("gateways");
    let (kubernetes, _exchange) =
        Kubernetes::new(server, "test", 10, Findings::default(), heartbeat);
    let mut gateways = kubernetes.gateways;
    let server: fabric_api::networking::GatewayServer = serde_json::from_value(json!({
        "metadata": {"name": "server", "namespace": "t", "uid": "u"},
        "spec": {"endpoint": {"serviceType": "NodePort", "port": 51840}},
    }))
    .unwrap();
    let (peer, secret_name) = ("milan".parse().unwrap(), "gw-keys".to_owned());
    let gateway = PlannedGateway { object: server.into(), peer, secret_name };
    let planned = [(gateway.object.reference(), gateway)].into();
    gateways.render(&Plan { gateways: planned, ..Plan::default() });
    gateways
}

#[tokio::test(start_paused = true)]
async fn gateways_objects_are_written_in_two_steps() {
    let mut gateways = planned(slow_server::slow_server());
    let (began, mut faults) = (Instant::now(), Faults::new());
    gateways.write_all(&mut faults).await.unwrap();
    assert_eq!(faults, Faults::new());
    assert_eq!(began.elapsed().as_secs(), 4, "each reads what is there, and writes");
}

#[tokio::test(start_paused = true)]
async fn gateways_loop_beats_while_nothing_answers() {
    let url = "http://127.0.0.1:1".to_owned();
    let client = kube::Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap();
    let (namespace, metrics) = ("liqo".to_owned(), StoreMetrics::default());
    let unreachable = watch::channel(false).1;
    let server = ApiServer { client, namespace, url, unreachable, metrics };
    let heartbeat = Heartbeat::of("gateways");
    let findings = Findings::default();
    let (kubernetes, _exchange) = Kubernetes::new(server, "test", 10, findings, heartbeat.clone());
    timeout(Duration::from_secs(60), kubernetes.run()).await.unwrap_err();
    let beats = heartbeat.beats();
    assert!(beats >= 12, "{beats} beats in a minute");
}
