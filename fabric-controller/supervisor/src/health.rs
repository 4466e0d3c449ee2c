//! Asks gateways whether they are well, over their Unix sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::time::Duration;

use futures::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::process::Role;
use super::supervisor::Report;

const INTERVAL: Duration = Duration::from_secs(4);
/// Timeout of an answer that a user waits for.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of a probe, after which the gateway is cut off: a late one may merely wait for a
/// processor, a disk or the kernel's lock of network settings. One request that stays open, not
/// several short ones: a late answer is one.
const PROBE_TIMEOUT: Duration = Duration::from_secs(15);
/// Parts of a timeout, each counted from when the end of the one before is noticed: while the whole
/// host stands still (a virtual machine that is moved, a laptop that sleeps), no gateway times out.
const PARTS: u32 = 10;
/// Interval and number of retries of a probe that failed before its timeout: as long in all.
const AGAIN: Duration = Duration::from_millis(500);
const ATTEMPTS: u32 = 30;
/// The longest answer taken, in bytes.
const LONGEST_ANSWER: u64 = 4 << 20;

pub type Reports = BTreeMap<String, Report>;

#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("no answer within {0:?}")]
    TooSlow(Duration),
    #[error("the answer is not HTTP")]
    NotHttp,
    #[error("the answer has status {0}, expected 200")]
    Status(u16),
}

impl HttpError {
    /// Returns true if a process listens but does not answer: it hangs, or is stopped.
    pub fn is_unanswered(&self) -> bool {
        match self {
            Self::TooSlow(_) => true,
            // Requests that were given up fill the backlog.
            Self::Io(error) => error.kind() == io::ErrorKind::WouldBlock,
            Self::NotHttp | Self::Status(_) => false,
        }
    }
}

/// Socket on which the loop of a supervisor answers, as its processes do.
#[derive(Debug)]
pub(crate) struct Responder(UnixListener);

impl Responder {
    pub(crate) fn listen(socket: &Path) -> io::Result<Self> {
        // An earlier supervisor may have left it.
        drop(std::fs::remove_file(socket));
        UnixListener::bind(socket).map(Self)
    }

    /// Answers one request. To be polled by the loop itself, so that an answer shows that it runs.
    pub(crate) async fn answer(&self) {
        match self.0.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(respond(stream))),
            // Descriptors are used up.
            Err(_) => sleep(AGAIN).await,
        }
    }
}

/// Answers any request. A client that is gone needs no answer.
async fn respond(mut stream: UnixStream) {
    drop(timeout(ANSWER_TIMEOUT, stream.read(&mut [0; 256])).await);
    drop(stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nok\n").await);
}

/// Publishes which gateways run but do not answer, at every change, and again with every probe that
/// they leave unanswered. Ends with its receivers.
pub async fn watch_gateways(
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
    for _ in 0..ATTEMPTS {
        match get(http, "/healthz", PROBE_TIMEOUT).await {
            Ok(_) => return true,
            Err(HttpError::TooSlow(_)) => return false,
            Err(_) => sleep(AGAIN).await,
        }
    }
    false
}

fn running_gateways(reports: &Reports) -> Vec<(String, i32, std::path::PathBuf)> {
    reports
        .iter()
        .filter(|(_, report)| matches!(report.role, Role::Gateway { .. }))
        .filter_map(|(name, report)| Some((name.clone(), report.pid?, report.http.clone())))
        .collect()
}

/// Returns the body of the answer to a GET, if it comes within `patience` and its status is 200.
/// The timeout begins when the request has been sent: a wait for a processor on this side is no
/// fault of the gateway's.
pub async fn get(socket: &Path, path: &str, patience: Duration) -> Result<String, HttpError> {
    let mut stream = UnixStream::connect(socket).await?;
    // HTTP/1.0: the answer ends with the connection and comes in one piece.
    let request = format!("GET {path} HTTP/1.0\r\nHost: weft\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    let mut stream = stream.take(LONGEST_ANSWER);
    let read = stream.read_to_end(&mut answer);
    within(patience, read).await.ok_or(HttpError::TooSlow(patience))??;
    let answer = String::from_utf8_lossy(&answer);
    let (head, body) = answer.split_once("\r\n\r\n").ok_or(HttpError::NotHttp)?;
    let status = head.split_ascii_whitespace().nth(1).and_then(|status| status.parse().ok());
    match status.ok_or(HttpError::NotHttp)? {
        200 => Ok(body.to_owned()),
        other => Err(HttpError::Status(other)),
    }
}

/// `None` if it takes longer, by a clock that hardly goes on while this process is kept from running.
async fn within<T>(patience: Duration, answer: impl Future<Output = T>) -> Option<T> {
    tokio::pin!(answer);
    for _ in 0..PARTS {
        if let Ok(answer) = timeout(patience / PARTS, &mut answer).await {
            return Some(answer);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;
    use tokio::time::{Instant, advance};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn suspended_host_waits_for_answer_after_resume() {
        let (answer, answered) = oneshot::channel();
        let question = tokio::spawn(within(PROBE_TIMEOUT, answered));
        tokio::task::yield_now().await;
        advance(Duration::from_secs(3600)).await;
        answer.send(()).unwrap();
        assert!(question.await.unwrap().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn unanswered_start_times_out() {
        let asked = Instant::now();
        assert!(within(PROBE_TIMEOUT, std::future::pending::<()>()).await.is_none());
        assert_eq!(asked.elapsed().as_secs(), PROBE_TIMEOUT.as_secs());
    }
}
