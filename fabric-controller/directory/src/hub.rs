//! Change notifications for all programs of a run directory, from one inotify instance.
//!
//! A program connects to `changes.sock` and sends its interests, one JSON line, again whenever they
//! change. The server answers with one byte whenever something of that kind has changed, or may
//! have; the program then reads the files itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::folders::{Folders, Interest, RESCAN_UNWATCHED, Subscriber};

/// The longest line of interests, in bytes.
const MAX_LINE: u64 = 64 << 10;
/// Interests waiting to be taken over; further clients wait.
const BACKLOG: usize = 64;

/// The server; ends, with its socket, when dropped.
#[derive(Debug)]
pub struct ChangeServer {
    socket: PathBuf,
    task: JoinHandle<()>,
}

/// New interests of a client, or `None` when it is gone.
type Message = (Subscriber, Option<Vec<Interest>>);

#[derive(Debug)]
struct Hub {
    folders: Folders,
    clients: BTreeMap<Subscriber, OwnedWriteHalf>,
    rescan: Instant,
}

impl ChangeServer {
    /// Replaces a socket that a killed server has left. For the one supervisor of a run directory.
    pub(crate) fn start(socket: &Path) -> io::Result<Self> {
        let folders = Folders::new()?;
        match fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let listener = UnixListener::bind(socket)?;
        let hub = Hub { folders, clients: BTreeMap::new(), rescan: Instant::now() };
        let task = tokio::spawn(hub.run(listener));
        Ok(Self { socket: socket.to_owned(), task })
    }
}

impl Drop for ChangeServer {
    fn drop(&mut self) {
        self.task.abort();
        // Already gone after `weft down`.
        let _ = fs::remove_file(&self.socket);
    }
}

impl Hub {
    async fn run(mut self, listener: UnixListener) {
        let (sender, mut messages) = mpsc::channel(BACKLOG);
        let mut next: Subscriber = 0;
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    let Ok((stream, _)) = accepted else {
                        // Out of files: clients poll meanwhile.
                        tokio::time::sleep(RESCAN_UNWATCHED).await;
                        continue;
                    };
                    next += 1;
                    self.admit(next, stream, sender.clone());
                }
                Some(message) = messages.recv() => self.take(message),
                changed = self.folders.changed() => self.notify(&changed),
                () = sleep_until(self.rescan) => self.listen(),
            }
            if self.folders.take_lost() {
                self.rescan = self.rescan.min(Instant::now() + RESCAN_UNWATCHED);
            }
        }
    }

    fn admit(&mut self, client: Subscriber, stream: UnixStream, messages: mpsc::Sender<Message>) {
        let (reader, writer) = stream.into_split();
        self.clients.insert(client, writer);
        tokio::spawn(read_interests(client, reader, messages));
    }

    fn take(&mut self, (client, interests): Message) {
        let is_gone = interests.is_none();
        self.folders.choose(client, interests.unwrap_or_default());
        if is_gone {
            self.clients.remove(&client);
            return;
        }
        self.listen();
        // Something may have changed before it was watched.
        self.notify(&BTreeSet::from([client]));
    }

    fn listen(&mut self) {
        let (unsure, next) = self.folders.listen();
        self.rescan = Instant::now() + next;
        self.notify(&unsure);
    }

    /// A client with a full buffer has notifications to read anyway; a broken one is removed by its
    /// reader.
    fn notify(&self, clients: &BTreeSet<Subscriber>) {
        for client in clients.iter().filter_map(|client| self.clients.get(client)) {
            let _ = client.try_write(b"\n");
        }
    }
}

async fn read_interests(
    client: Subscriber,
    reader: OwnedReadHalf,
    messages: mpsc::Sender<Message>,
) {
    let mut reader = BufReader::with_capacity(1 << 10, reader);
    let mut line = String::new();
    loop {
        line.clear();
        let read = (&mut reader).take(MAX_LINE).read_line(&mut line).await;
        let interests = read.ok().filter(|_| line.ends_with('\n'));
        let interests = interests.and_then(|_| serde_json::from_str(&line).ok());
        let is_gone = interests.is_none();
        if messages.send((client, interests)).await.is_err() || is_gone {
            return;
        }
    }
}
