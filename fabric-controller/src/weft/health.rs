//! Asks gateways whether they are well, over their Unix sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::Duration;

use futures::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::process::Role;
use super::supervisor::Report;

const INTERVAL: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(1);
/// Unanswered questions in a row that make a gateway silent. Fewer would cut a peering off whose
/// gateway merely waits for a busy processor.
const MISSES: u32 = 3;
/// The longest answer taken, in bytes.
const LONGEST_ANSWER: u64 = 4 << 20;

pub(crate) type Reports = BTreeMap<String, Report>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("no answer within {PATIENCE:?}")]
    TooSlow,
    #[error("the answer is not HTTP")]
    NotHttp,
    #[error("the answer has status {0}, expected 200")]
    Status(u16),
}

/// Tells which gateways run but do not answer, whenever that changes, and again after as many
/// questions more. Ends with its listeners.
pub(crate) async fn watch_gateways(
    reports: watch::Receiver<Reports>,
    silent: watch::Sender<BTreeSet<String>>,
) {
    let mut misses: BTreeMap<(String, i32), u32> = BTreeMap::new();
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !silent.is_closed() {
        ticks.tick().await;
        let gateways = running_gateways(&reports.borrow());
        let asked = gateways.into_iter().map(|(name, pid, http)| async move {
            let answers = get(&http, "/healthz").await.is_ok();
            ((name, pid), answers)
        });
        misses = join_all(asked)
            .await
            .into_iter()
            .map(|(who, answers)| {
                let before = misses.get(&who).copied().unwrap_or(0);
                (who, if answers { 0 } else { before.saturating_add(1) })
            })
            .collect();
        let again = misses.values().any(|misses| *misses > 0 && misses.is_multiple_of(MISSES));
        let now: BTreeSet<_> = misses
            .iter()
            .filter(|(_, misses)| **misses >= MISSES)
            .map(|((name, _), _)| name.clone())
            .collect();
        silent.send_if_modified(|before| std::mem::replace(before, now.clone()) != now || again);
    }
}

fn running_gateways(reports: &Reports) -> Vec<(String, i32, std::path::PathBuf)> {
    reports
        .iter()
        .filter(|(_, report)| matches!(report.role, Role::Gateway { .. }))
        .filter_map(|(name, report)| Some((name.clone(), report.pid?, report.http.clone())))
        .collect()
}

/// The body of the answer to a GET, if its status is 200.
pub(crate) async fn get(socket: &Path, path: &str) -> Result<String, HttpError> {
    let exchange = async {
        let mut stream = UnixStream::connect(socket).await?;
        // HTTP/1.0: the answer ends with the connection and comes in one piece.
        let request = format!("GET {path} HTTP/1.0\r\nHost: weft\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.take(LONGEST_ANSWER).read_to_end(&mut answer).await?;
        Ok::<_, io::Error>(answer)
    };
    let answer = timeout(PATIENCE, exchange).await.map_err(|_| HttpError::TooSlow)??;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(HttpError::NotHttp)?;
    let status = head.split_ascii_whitespace().nth(1).and_then(|status| status.parse().ok());
    match status.ok_or(HttpError::NotHttp)? {
        200 => Ok(body.to_owned()),
        other => Err(HttpError::Status(other)),
    }
}
