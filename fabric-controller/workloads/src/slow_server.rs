//! API server for tests: it has no objects, and takes a second to answer.

use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use fabric_kube_client::{ApiServer, StoreMetrics};
use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::sleep;
use tower::service_fn;

pub(super) fn slow_server() -> ApiServer {
    let answer = service_fn(|request: Request<Body>| async move {
        let query = request.uri().query().unwrap_or_default().to_owned();
        if query.contains("watch=true") {
            return pending().await;
        }
        let (is_read, is_list) = (request.method() == "GET", query.contains("limit="));
        let path = request.uri().path().to_owned();
        let sent = request.into_body().collect_bytes().await.unwrap();
        sleep(Duration::from_secs(1)).await;
        let name = path.rsplit('/').next().unwrap_or_default();
        let (code, answer): (u16, Value) = match (is_read, is_list) {
            (true, true) => (200, json!({"metadata": {"resourceVersion": "1"}, "items": []})),
            (true, false) => {
                let message = format!("{name:?} not found");
                (404, json!({"code": 404, "reason": "NotFound", "message": message}))
            }
            (false, _) => (200, serde_json::from_slice(&sent).unwrap()),
        };
        let body = Body::from(answer.to_string().into_bytes());
        Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
    });
    let (namespace, url) = ("liqo".to_owned(), String::new());
    let (client, unreachable) = (Client::new(answer, "liqo"), watch::channel(false).1);
    ApiServer { client, namespace, url, unreachable, metrics: StoreMetrics::default() }
}
