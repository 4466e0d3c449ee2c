//! Shows other processes of the network namespace that an agent runs, which undoes a cleanup.

use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Abstract sockets belong to a network namespace, as all that an agent makes does, and end with
/// their process.
const NAME: &str = "weft-route-agent";
/// Time in which the socket of an agent that was killed goes.
const DYING: Duration = Duration::from_secs(2);
const INTERVAL: Duration = Duration::from_millis(50);

/// Socket of an agent that would make again what a cleanup takes away.
#[derive(Debug, Default)]
pub(crate) struct Presence(Option<UnixListener>);

impl Presence {
    /// Shows it or not. While the agent that this one replaces shows itself, that is tried again at
    /// the next call.
    pub(crate) fn set(&mut self, is_shown: bool) {
        if !is_shown {
            self.0 = None;
        } else if self.0.is_none() {
            self.0 = address().and_then(|address| UnixListener::bind_addr(&address)).ok();
        }
    }
}

/// Returns the process ID of an agent that runs in this network namespace and goes on running; 0 if
/// that is in another PID namespace.
pub(crate) async fn running_agent() -> io::Result<Option<i32>> {
    let deadline = Instant::now() + DYING;
    loop {
        let found = agent()?;
        if found.is_none() || Instant::now() >= deadline {
            return Ok(found);
        }
        sleep(INTERVAL).await;
    }
}

fn agent() -> io::Result<Option<i32>> {
    match UnixStream::connect_addr(&address()?) {
        Ok(stream) => {
            stream.set_nonblocking(true)?;
            let agent = tokio::net::UnixStream::from_std(stream)?.peer_cred()?;
            Ok(Some(agent.pid().unwrap_or_default()))
        }
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(None),
        Err(error) => Err(error),
    }
}

fn address() -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(NAME)
}
