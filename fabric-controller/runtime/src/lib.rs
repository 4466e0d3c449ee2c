//! Parts that every program of weft has around its work: logs on standard error, signals that end it,
//! HTTP for metrics and probes, and the waits before a failed step is retried.

mod backoff;
mod connection_limit;
mod health;
mod http;
mod memory;
mod monitoring;
mod write_backoff;

use std::io::{self, IsTerminal as _};
use std::net::{Ipv4Addr, SocketAddr};

use clap::{Args, ValueEnum};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

pub use backoff::{Backoff, jittered, until};
pub use connection_limit::{ConnectionLimit, ConnectionPermit};
pub use health::{Heartbeat, Readiness};
pub use http::{HttpAddress, HttpListener, ListenError, OPENMETRICS, ParseHttpAddressError};
pub use memory::return_unused_memory;
pub use monitoring::{Monitoring, MonitoringError};
pub use write_backoff::{WRITE_RETRY, WriteBackoff};

/// Log options of a program.
#[derive(Clone, Debug, Args)]
pub struct LogArgs {
    /// How logs are written, on standard error.
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value_t)]
    pub log_format: LogFormat,
    /// error, warn, info, debug or trace; also per module, such as `info,gateway::liveness=debug`.
    #[arg(
        long,
        global = true,
        env = "RUST_LOG",
        value_name = "LEVEL",
        default_value = "info",
        value_parser = log_level
    )]
    pub log_level: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    #[default]
    Plain,
    Json,
}

impl LogArgs {
    /// Starts logging for the whole process; call once. Colours only on a terminal.
    pub fn start(&self) {
        // kube logs every try of a watch, or an answer as a whole, which may be a Secret; first, so that
        // the user can enable it all the same.
        let quiet = "kube_client=off,kube_runtime=off";
        let filter = EnvFilter::new(format!("{quiet},{}", self.log_level));
        let logs = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(io::stderr().is_terminal())
            // The error about a line that cannot be written would go to the same full disk, and panic.
            .log_internal_errors(false)
            .with_writer(io::stderr);
        match self.log_format {
            LogFormat::Plain => logs.init(),
            LogFormat::Json => logs.json().init(),
        }
    }
}

fn log_level(text: &str) -> Result<String, String> {
    let expected = "expected error, warn, info, debug or trace";
    EnvFilter::try_new(text).map_err(|error| format!("{error}; {expected}"))?;
    Ok(text.to_owned())
}

/// Returns an error with its causes, on one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// Request to stop the program: SIGTERM or SIGINT. Both are caught from [`Stop::listen`] on.
#[derive(Debug)]
pub struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    /// Needs a tokio runtime.
    pub fn listen() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    pub async fn requested(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Listens on a TCP port. `[::]` is all addresses of both families, or of IPv4 where the machine has
/// no IPv6. Needs a tokio runtime.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let bound = TcpListener::bind(address).await;
    if bound.is_ok() || !address.is_ipv6() || !address.ip().is_unspecified() {
        return bound;
    }
    let other = TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await;
    other.or(bound)
}
