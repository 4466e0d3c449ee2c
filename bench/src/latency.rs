//! Requests and their responses, one after the other: time from one end of a path and back.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use weft_tests::traffic::UdpEcho;

use crate::flow::End;

/// Bytes of a request and of its response.
const REQUEST: usize = 64;
/// Time after which a response is lost, and which counts as its time.
const TIMEOUT: Duration = Duration::from_millis(200);

pub(crate) struct Requester {
    socket: UdpSocket,
    next: u64,
    _responder: UdpEcho,
}

impl Requester {
    pub(crate) fn open(from: &End, to: &End) -> Result<Self> {
        let responder = UdpEcho::start(&to.net, 0)?;
        let target = SocketAddr::new(to.seen, responder.port());
        let socket = from.net.run(|| UdpSocket::bind((from.address, 0))).context("binding")?;
        socket.connect(target).with_context(|| format!("connecting to {target}"))?;
        socket.set_read_timeout(Some(TIMEOUT)).context("setting a timeout")?;
        Ok(Self { socket, next: 0, _responder: responder })
    }

    /// Requests for so long, with a pause after each response. Returns seconds.
    pub(crate) fn run(&mut self, length: Duration, pause: Duration) -> Result<Vec<f64>> {
        let (start, mut latencies) = (Instant::now(), Vec::new());
        while start.elapsed() < length {
            latencies.push(self.request()?.as_secs_f64());
            std::thread::sleep(pause);
        }
        Ok(latencies)
    }

    fn request(&mut self) -> Result<Duration> {
        self.next += 1;
        let mut request = [0; REQUEST];
        request[..8].copy_from_slice(&self.next.to_be_bytes());
        let (start, mut response) = (Instant::now(), [0; REQUEST]);
        self.socket.send(&request).context("sending a request")?;
        while start.elapsed() < TIMEOUT {
            match self.socket.recv(&mut response) {
                Ok(_) if response == request => return Ok(start.elapsed()),
                // The response to an earlier request, which came too late.
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("receiving a response"),
            }
        }
        Ok(TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_tests::Netns;

    #[test]
    fn responses_are_timed_and_lost_ones_count() {
        let net = Netns::new().unwrap();
        let end =
            End { net: net.clone(), address: [127, 0, 0, 1].into(), seen: [127, 0, 0, 1].into() };
        let mut requester = Requester::open(&end, &end).unwrap();
        let pause = Duration::from_millis(1);
        let latencies = requester.run(Duration::from_millis(300), pause).unwrap();
        assert!(latencies.iter().all(|latency| *latency > 0.0), "{latencies:?}");
        assert!(latencies.iter().any(|l| *l < TIMEOUT.as_secs_f64()), "{latencies:?}");

        let unanswered = net.run(|| UdpSocket::bind("127.0.0.1:0")).unwrap();
        requester.socket.connect(unanswered.local_addr().unwrap()).unwrap();
        assert_eq!(requester.run(pause, pause).unwrap(), [TIMEOUT.as_secs_f64()]);
    }
}
