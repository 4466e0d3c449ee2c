//! Datagrams from the pod to the peer, and the changes of tables that the node reports meanwhile.

use std::net::UdpSocket;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, spawn};
use std::time::Duration;

use nix::sys::socket::{setsockopt, sockopt};

use crate::node::{World, inside};

const INTERVAL: Duration = Duration::from_micros(500);
/// In bytes, so that a sink that has to wait for the processor loses nothing itself.
const SINK_BUFFER: usize = 8 << 20;

/// A datagram every half millisecond, one way: to connection tracking each is new.
pub(crate) struct Flow {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<u64>,
    sink: UdpSocket,
}

/// `ip monitor` of everything on the node.
pub(crate) struct Monitor(Child);

impl World {
    pub(crate) fn flow(&self) -> Flow {
        let (socket, sink) = self.datagrams(&self.pod);
        setsockopt(&sink, sockopt::RcvBufForce, &SINK_BUFFER).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let sender = spawn(move || {
            let mut sent = 0;
            while !stopped.load(Ordering::Relaxed) {
                socket.send(b"x").unwrap();
                sent += 1;
                std::thread::sleep(INTERVAL);
            }
            sent
        });
        Flow { stop, sender, sink }
    }

    pub(crate) fn monitor(&self) -> Monitor {
        let mut monitor = inside(&self.node, "ip");
        let monitor = monitor.args(["monitor", "all"]).stdout(Stdio::piped()).spawn().unwrap();
        // It does not report that it has begun to listen.
        std::thread::sleep(Duration::from_millis(500));
        Monitor(monitor)
    }
}

impl Flow {
    /// Returns the numbers of datagrams sent and received.
    pub(crate) fn end(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        let sent = self.sender.join().unwrap();
        let mut received = 0;
        while self.sink.recv(&mut [0; 8]).is_ok() {
            received += 1;
        }
        (sent, received)
    }
}

impl Monitor {
    /// Output so far; ends the program.
    pub(crate) fn end(mut self) -> String {
        self.0.kill().unwrap();
        let output = self.0.wait_with_output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }
}
