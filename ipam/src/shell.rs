//! What every program does: logs to stderr, stops when told to.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config::{LogArgs, LogFormat};

pub(crate) fn start_logging(args: &LogArgs) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&args.log_level).context("bad --log-level")?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Plain => logs.with_target(false).init(),
        LogFormat::Json => logs.json().init(),
    }
    Ok(())
}

/// Resolves at SIGTERM or SIGINT.
pub(crate) async fn stop_signal() -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}
