//! `make bench-scale`: the control plane with hundreds of simulated nodes, gateways and kubelets.

mod args;
mod cpu;
mod figures;
mod results;

use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use api_server::ApiServer;
use scale::{AuditLog, Lab, replay};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use self::args::FigureName;
pub(crate) use self::args::ScaleArgs;
use self::figures::{Applied, Bench};
use self::results::{Bar, Report, Row, seconds};

/// Longest wait for tasks that are cancelled with the run.
const END: Duration = Duration::from_secs(2);

/// Measures, prints the report, and writes it into a file if one is named.
pub(crate) fn run(args: &ScaleArgs) -> Result<()> {
    let dir = tempfile::tempdir().context("cannot make a directory")?;
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let report = runtime.block_on(async {
        tokio::select! {
            report = measure(args, dir.path()) => report,
            interrupted = interruption() => interrupted,
        }
    });
    // Servers end with the tasks that use them.
    runtime.shutdown_timeout(END);
    let Some(report) = report? else { return Ok(()) };
    write!(io::stdout().lock(), "{report}").context("writing the table")?;
    args.results.as_deref().map_or(Ok(()), |path| report.write_into(path))
}

async fn interruption() -> Result<Option<Report>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle signals")?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    bail!("interrupted")
}

/// `None` if there is no API server here, which is reported.
async fn measure(args: &ScaleArgs, dir: &Path) -> Result<Option<Report>> {
    let (size, deadline) = (args.size(), Instant::now() + args.limit);
    eprintln!("starting {} nodes", size.nodes);
    let Some(server) = start_server(dir.join("server")).await? else { return Ok(None) };
    let lab = Lab::start(server, dir, size).await?;
    let mut bench = Bench::new(lab, deadline);
    let measured = figures(&mut bench, args).await;
    let applied = measured.map_err(|error| bench.lab.explain(error))?;
    let Bench { lab, mut rows, requests, writes, controller_rss, .. } = bench;
    let megabytes = format!("{:.0} MB", controller_rss as f64 / 1e6);
    rows.push(row("RSS of the controller", megabytes, Some(Bar::Rss(controller_rss))));
    let errors = lab.board.errors().into_iter();
    rows.extend(errors.map(|(error, count)| row("errors", format!("{count} x {error}"), None)));
    let mut baseline = None;
    if let Some(applied) = applied.filter(|_| args.selects(FigureName::Apply)) {
        let log = lab.audit().keep_at(&dir.join("audit.log"))?;
        drop(lab);
        baseline = Some(same_writes(&log, applied, dir, &mut rows).await?);
    }
    Ok(Some(Report { size, rows, requests, writes, baseline }))
}

fn row(figure: &str, measured: String, bar: Option<Bar>) -> Row {
    Row { figure: figure.to_owned(), measured, bar }
}

async fn start_server(dir: std::path::PathBuf) -> Result<Option<Arc<ApiServer>>> {
    match tokio::task::spawn_blocking(|| ApiServer::start_audited(dir)).await? {
        Ok(server) => Ok(Some(Arc::new(server))),
        Err(why) => {
            eprintln!("bench: skipped: {why}; `make kubernetes` installs what is missing");
            Ok(None)
        }
    }
}

async fn figures(bench: &mut Bench, args: &ScaleArgs) -> Result<Option<Applied>> {
    let applied = bench.apply().await?;
    let all = [
        FigureName::Heartbeats,
        FigureName::Idle,
        FigureName::Pods,
        FigureName::Endpoint,
        FigureName::Peering,
    ];
    for figure in all.into_iter().filter(|figure| args.selects(*figure)) {
        if Instant::now() >= bench.deadline {
            bench.row(&format!("{figure:?}"), "not measured: --limit is over".to_owned(), None);
            continue;
        }
        match figure {
            FigureName::Apply => {}
            FigureName::Heartbeats => bench.heartbeats().await?,
            FigureName::Idle => bench.idle().await?,
            FigureName::Pods => bench.pods().await?,
            FigureName::Endpoint => bench.endpoint().await?,
            FigureName::Peering => bench.peering().await?,
        }
    }
    Ok(applied)
}

/// Time of the writes of figure `apply` without weft, and without its watches.
async fn same_writes(
    log: &AuditLog,
    applied: Applied,
    dir: &Path,
    rows: &mut Vec<Row>,
) -> Result<Duration> {
    eprintln!("the same writes without weft");
    let server = start_server(dir.join("replay")).await?.context("the API server is gone")?;
    let outcome = replay(log, applied.writes, server).await?;
    if let Some(error) = &outcome.error {
        eprintln!("  {} of {} failed: {error}", outcome.failed, outcome.writes);
    }
    let measured = format!(
        "{} ({} writes, {:.1} MB, {} failed)",
        seconds(outcome.took),
        outcome.writes,
        outcome.bytes as f64 / 1e6,
        outcome.failed
    );
    eprintln!("  {measured}");
    let figure = "the same writes without weft, 16 at a time";
    rows.insert(2, row(figure, measured, None));
    Ok(outcome.took)
}
