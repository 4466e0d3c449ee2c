//! `/metrics`, `/healthz` and `/readyz` of a program.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use tokio::runtime::Builder;

use crate::health::Watchdog;
use crate::{Heartbeat, HttpAddress, ListenError, OPENMETRICS, Readiness};

/// Sources of the answers.
#[derive(Debug)]
pub struct Monitoring {
    pub registry: Registry,
    /// Heartbeats of the loops without which the program is of no use.
    pub heartbeats: Vec<Heartbeat>,
    pub readiness: Readiness,
}

#[derive(Debug, thiserror::Error)]
pub enum MonitoringError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot start the thread that serves HTTP")]
    Thread(#[source] io::Error),
}

struct Shared {
    registry: Registry,
    watchdogs: Vec<Watchdog>,
    readiness: Readiness,
}

impl Shared {
    fn alive(&self) -> Result<(), String> {
        self.watchdogs.iter().try_for_each(Watchdog::alive)
    }
}

impl MonitoringError {
    /// True if another process does the same work.
    pub fn is_held(&self) -> bool {
        matches!(self, Self::Listen(ListenError::Held { .. }))
    }
}

impl Monitoring {
    /// Serves until the process ends, in a thread of its own: requests are answered, and the loop is
    /// watched, also while the program's own thread hangs.
    pub fn serve(self, address: HttpAddress) -> Result<(), MonitoringError> {
        let (started, start) = mpsc::channel();
        let serve = move || {
            let runtime = match Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return drop(started.send(Err(MonitoringError::Thread(error)))),
            };
            runtime.block_on(self.run(address, started));
        };
        let thread = thread::Builder::new().name("monitoring".to_owned());
        thread.spawn(serve).map_err(MonitoringError::Thread)?;
        let ended = || Err(MonitoringError::Thread(io::ErrorKind::BrokenPipe.into()));
        start.recv().unwrap_or_else(|_| ended())
    }

    async fn run(self, address: HttpAddress, started: mpsc::Sender<Result<(), MonitoringError>>) {
        let listener = match address.bind().await {
            Ok(listener) => listener,
            Err(error) => return drop(started.send(Err(error.into()))),
        };
        drop(started.send(Ok(())));
        let router = self.router();
        if let Err(error) = listener.serve(router, std::future::pending()).await {
            tracing::error!(%error, "metrics and probes are no longer served");
        }
    }

    /// Must be called within a tokio runtime.
    fn router(self) -> Router {
        let watchdogs: Vec<_> = self.heartbeats.into_iter().map(Watchdog::new).collect();
        for watchdog in &watchdogs {
            tokio::spawn(watchdog.clone().run());
        }
        let shared = Shared { registry: self.registry, watchdogs, readiness: self.readiness };
        Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(async |shared: SharedState| probe("ok", shared.alive())))
            .route(
                "/readyz",
                get(async |shared: SharedState| probe("ready", shared.readiness.state())),
            )
            .with_state(Arc::new(shared))
    }
}

type SharedState = State<Arc<Shared>>;

async fn metrics(State(shared): SharedState) -> Response {
    let mut text = String::with_capacity(8 << 10);
    match text::encode(&mut text, &shared.registry) {
        Ok(()) => ([(CONTENT_TYPE, OPENMETRICS)], text).into_response(),
        Err(error) => {
            tracing::warn!(%error, "cannot encode the metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

fn probe(good: &str, state: Result<(), String>) -> (StatusCode, String) {
    match state {
        Ok(()) => (StatusCode::OK, format!("{good}\n")),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use prometheus_client::metrics::counter::Counter;
    use tokio::time::timeout;

    use super::*;

    fn get(socket: &std::path::Path, path: &str) -> String {
        let mut stream = UnixStream::connect(socket).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn readiness_and_metrics_are_those_of_now() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("http");
        let (mut registry, turns) = (Registry::default(), Counter::<u64>::default());
        registry.register("turns", "Turns", turns.clone());
        let readiness = Readiness::default();
        readiness.missing("store", "nothing is read yet");
        let monitoring =
            Monitoring { registry, heartbeats: Vec::new(), readiness: readiness.clone() };
        monitoring.serve(HttpAddress::Unix(socket.clone())).unwrap();
        let unready = get(&socket, "/readyz");
        assert!(
            unready.contains(" 503 ") && unready.contains("store: nothing is read yet"),
            "{unready}"
        );
        turns.inc();
        readiness.fulfilled("store");
        assert!(get(&socket, "/readyz").contains(" 200 "));
        assert!(get(&socket, "/healthz").contains(" 200 "));
        assert!(get(&socket, "/metrics").contains("turns_total 1\n"));
    }

    #[tokio::test(start_paused = true)]
    async fn one_hung_loop_of_two_is_named() {
        let [main, gateways] = ["main", "gateways"].map(Heartbeat::of);
        let watchdogs = vec![Watchdog::new(main.clone()), Watchdog::new(gateways)];
        for watchdog in &watchdogs {
            tokio::spawn(watchdog.clone().run());
        }
        let readiness = Readiness::default();
        let shared = Shared { registry: Registry::default(), watchdogs, readiness };
        let minute = Duration::from_secs(60);
        timeout(minute, main.while_waiting(pending::<()>())).await.unwrap_err();
        let why = shared.alive().unwrap_err();
        assert!(why.starts_with("the gateways loop has not turned"), "{why}");
    }

    #[test]
    fn address_in_use_is_an_error_that_names_it() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let readiness = Readiness::default();
        let heartbeats = vec![Heartbeat::default()];
        let monitoring = Monitoring { registry: Registry::default(), heartbeats, readiness };
        let error = monitoring.serve(HttpAddress::Tcp(address)).unwrap_err();
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
}
