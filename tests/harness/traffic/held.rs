use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::connect;
use crate::Netns;

const CONNECT: Duration = Duration::from_secs(5);

/// A TCP connection to a [`super::Service::Echo`] server that is held open whatever happens.
pub struct HeldConnection {
    stream: TcpStream,
    sent: u64,
    received: u64,
}

impl HeldConnection {
    pub fn open(ns: &Netns, to: SocketAddr) -> Result<Self> {
        let stream = connect(ns, to, CONNECT).with_context(|| format!("connecting to {to}"))?;
        stream.set_nodelay(true)?;
        let mut this = Self { stream, sent: 0, received: 0 };
        this.echoes(CONNECT)?;
        Ok(this)
    }

    /// Sends some bytes and waits for nothing.
    pub fn send(&mut self) -> Result<()> {
        self.sent += 1;
        self.stream.write_all(&self.sent.to_be_bytes()).context("the connection broke")
    }

    /// Sends some more; how long it took until all that was ever sent is back.
    pub fn echoes(&mut self, within: Duration) -> Result<Duration> {
        let start = Instant::now();
        self.send()?;
        while self.received < self.sent {
            let left = within.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(left))?;
            let mut word = [0; 8];
            let read = self.stream.read_exact(&mut word);
            read.with_context(|| format!("no echo after {:?}", start.elapsed()))?;
            self.received += 1;
            ensure!(
                u64::from_be_bytes(word) == self.received,
                "received {word:?} in place {}",
                self.received
            );
        }
        Ok(start.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::traffic::{Service, TcpServer};

    #[test]
    fn echo_keeps_order_and_times_out_with_error() {
        let ns = Netns::new().unwrap();
        let echo = TcpServer::start(&ns, 0, Service::Echo).unwrap();
        let sink = TcpServer::start(&ns, 0, Service::Sink).unwrap();
        let at = |server: &TcpServer| SocketAddr::from(([127, 0, 0, 1], server.port()));
        let mut held = HeldConnection::open(&ns, at(&echo)).unwrap();
        held.send().unwrap();
        assert!(held.echoes(CONNECT).is_ok());
        let stream = connect(&ns, at(&sink), CONNECT).unwrap();
        let mut unanswered = HeldConnection { stream, sent: 0, received: 0 };
        assert!(unanswered.echoes(Duration::from_millis(50)).is_err());
    }
}
