//! What every program has around its work: logs on stderr, and signals that end it.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config::{LogArgs, LogFormat};

/// A level that cannot be understood counts as `info`, and is said.
pub fn start_logging(args: &LogArgs) {
    let (filter, complaint) = match args.log_level.parse::<EnvFilter>() {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new("info"), Some(error)),
    };
    let log = tracing_subscriber::fmt().with_writer(io::stderr).with_env_filter(filter);
    match args.log_format {
        LogFormat::Plain => log.with_ansi(false).init(),
        LogFormat::Json => log.json().init(),
    }
    if let Some(error) = complaint {
        tracing::warn!(level = args.log_level, %error, "unknown log level, using info");
    }
}

/// Returns when the program is asked to stop: SIGTERM or SIGINT.
pub async fn stop_signal() -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => tracing::info!("SIGTERM"),
        _ = interrupt.recv() => tracing::info!("SIGINT"),
    }
    Ok(())
}
