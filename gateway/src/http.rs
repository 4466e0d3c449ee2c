//! `/metrics`, `/healthz` and `/readyz`, on a Unix socket or a TCP port.

use std::future::Future;
use std::io;
use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::HttpAddress;
use crate::dataplane::Plane;
use crate::input::Input;
use crate::metrics::{self, Metrics, Scrape};
use crate::monitor::View;
use crate::overlay::tun_overflows;

/// What the answers are made of.
#[derive(Clone)]
pub struct Sources {
    pub inputs: watch::Receiver<Input>,
    pub planes: watch::Receiver<Plane>,
    pub views: watch::Receiver<View>,
}

struct Shared {
    sources: Sources,
    metrics: Metrics,
}

/// Serves until `stop`.
pub async fn run(
    address: HttpAddress,
    sources: Sources,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let shared = Arc::new(Shared { sources, metrics: Metrics::new() });
    let router = Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .with_state(shared);
    let stopped = stop.cancelled_owned();
    match address {
        HttpAddress::Unix(path) => {
            // Left by a gateway that was killed; a live one would be a second for one peering.
            let _ = std::fs::remove_file(&path);
            let listener = UnixListener::bind(&path)
                .with_context(|| format!("cannot listen on {}", path.display()))?;
            let served = serve(axum::serve(listener, router).with_graceful_shutdown(stopped)).await;
            let _ = std::fs::remove_file(&path);
            served
        }
        HttpAddress::Tcp(address) => {
            let listener = fabric_shell::listen(address)
                .await
                .with_context(|| format!("cannot listen on {address}"))?;
            serve(axum::serve(listener, router).with_graceful_shutdown(stopped)).await
        }
    }
}

async fn serve(
    server: impl IntoFuture<Output = io::Result<()>, IntoFuture: Future>,
) -> anyhow::Result<()> {
    server.await.context("cannot serve HTTP")
}

async fn scrape(State(shared): State<Arc<Shared>>) -> Response {
    match shared.metrics.render(shared.sources.scrape()) {
        Ok(text) => ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => {
            tracing::warn!(%error, "cannot write the metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// Ready once the store was read: passive and idle are ready, too, or a rollout would never end.
async fn ready(State(shared): State<Arc<Shared>>) -> (StatusCode, &'static str) {
    if shared.sources.inputs.borrow().synced {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the store has not been read yet\n")
    }
}

impl Sources {
    fn scrape(&self) -> Option<Scrape> {
        let desired = self.inputs.borrow().desired.clone()?;
        let running = self.planes.borrow().running.clone();
        let view = self.views.borrow().clone();
        Some(Scrape {
            peer: desired.peer.clone(),
            connected: view.is_connected(),
            latency: view.latency,
            mtu: running.as_ref().map_or(0, |running| running.mtu),
            path_mtu: running.as_ref().and_then(|running| running.path_mtu),
            tun_overflows: running.as_ref().and_then(|running| tun_overflows(&running.inner)),
            stats: running.map(|running| running.lane.snapshot()),
        })
    }
}
