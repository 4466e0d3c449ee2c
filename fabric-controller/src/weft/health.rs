//! Asks gateways whether they are well, over their Unix sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::Duration;

use futures::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::process::Role;
use super::supervisor::Report;

const INTERVAL: Duration = Duration::from_secs(2);
/// For an answer that somebody waits for.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);
/// For the answer of a gateway that would else be cut off, though it may merely wait for a busy
/// processor or disk. One question that stays open, not several short ones: a late answer is one.
const LONG_PATIENCE: Duration = Duration::from_secs(5);
/// Until one that could not even be asked is asked again.
const AGAIN: Duration = Duration::from_millis(500);
/// The longest answer taken, in bytes.
const LONGEST_ANSWER: u64 = 4 << 20;

pub(crate) type Reports = BTreeMap<String, Report>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("no answer within {0:?}")]
    TooSlow(Duration),
    #[error("the answer is not HTTP")]
    NotHttp,
    #[error("the answer has status {0}, expected 200")]
    Status(u16),
}

/// Tells which gateways run but do not answer, whenever that changes, and again with every question
/// that they leave unanswered. Ends with its listeners.
pub(crate) async fn watch_gateways(
    reports: watch::Receiver<Reports>,
    silent: watch::Sender<BTreeSet<String>>,
) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !silent.is_closed() {
        ticks.tick().await;
        let gateways = running_gateways(&reports.borrow());
        let asked = gateways
            .into_iter()
            .map(|(name, pid, http)| async move { (name, pid, answers(&http).await) });
        let answers = join_all(asked).await;
        let now: BTreeSet<_> = {
            // Another process may have taken its place meanwhile.
            let reports = reports.borrow();
            let is_same =
                |name: &String, pid| reports.get(name).is_some_and(|r| r.pid == Some(pid));
            let silent = answers.into_iter().filter(|(name, pid, ok)| !ok && is_same(name, *pid));
            silent.map(|(name, ..)| name).collect()
        };
        silent.send_if_modified(|before| {
            let again = !now.is_empty();
            std::mem::replace(before, now.clone()) != now || again
        });
    }
}

/// One that has just started may not listen yet.
async fn answers(http: &Path) -> bool {
    let give_up = Instant::now() + LONG_PATIENCE;
    loop {
        match get(http, "/healthz", LONG_PATIENCE).await {
            Ok(_) => return true,
            Err(HttpError::TooSlow(_)) => return false,
            Err(_) if Instant::now() >= give_up => return false,
            Err(_) => sleep(AGAIN).await,
        }
    }
}

fn running_gateways(reports: &Reports) -> Vec<(String, i32, std::path::PathBuf)> {
    reports
        .iter()
        .filter(|(_, report)| matches!(report.role, Role::Gateway { .. }))
        .filter_map(|(name, report)| Some((name.clone(), report.pid?, report.http.clone())))
        .collect()
}

/// The body of the answer to a GET, if it comes within `patience` and its status is 200. Patience
/// begins when the question has been put: a processor that we wait for ourselves is no fault of the
/// gateway's.
pub(crate) async fn get(
    socket: &Path,
    path: &str,
    patience: Duration,
) -> Result<String, HttpError> {
    let mut stream = UnixStream::connect(socket).await?;
    // HTTP/1.0: the answer ends with the connection and comes in one piece.
    let request = format!("GET {path} HTTP/1.0\r\nHost: weft\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    let mut stream = stream.take(LONGEST_ANSWER);
    let read = stream.read_to_end(&mut answer);
    timeout(patience, read).await.map_err(|_| HttpError::TooSlow(patience))??;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(HttpError::NotHttp)?;
    let status = head.split_ascii_whitespace().nth(1).and_then(|status| status.parse().ok());
    match status.ok_or(HttpError::NotHttp)? {
        200 => Ok(body.to_owned()),
        other => Err(HttpError::Status(other)),
    }
}
