//! Datagrams on their way, and the network's effects on them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;

use tunnel::{Datagrams, DropReason, Wire};

use crate::plan::Link;
use crate::random::Random;

/// A UDP datagram, and what was so when it was sent.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Datagram {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) bytes: Vec<u8>,
    pub(crate) tos: u8,
    /// Number of the end that sent it.
    pub(crate) sender: usize,
    pub(crate) sent: u64,
    /// Time at which the sender had last completed a handshake.
    pub(crate) keys_made: u64,
    /// The network delivers it more than once.
    pub(crate) number: u64,
}

/// Output of an engine.
#[derive(Default)]
pub(crate) struct Made {
    pub(crate) sent: Vec<(SocketAddr, Vec<u8>, u8)>,
    pub(crate) frames: Vec<Vec<u8>>,
}

impl Wire for Made {
    fn send(&mut self, train: Datagrams<'_>) -> Result<(), DropReason> {
        for datagram in train.bytes.chunks(train.segment_size) {
            self.sent.push((train.path.remote, datagram.to_vec(), train.tos));
        }
        Ok(())
    }

    fn write(&mut self, frame: &[u8]) -> Result<(), DropReason> {
        self.frames.push(frame.to_vec());
        Ok(())
    }
}

/// Both ways.
pub(crate) struct Network {
    pub(crate) links: [Link; 2],
    random: Random,
    /// By time of arrival; the order of sending breaks ties.
    on_the_way: BinaryHeap<Reverse<(u64, u64, Datagram)>>,
    /// The rest of a burst of losses.
    burst: [u64; 2],
    count: u64,
}

/// IPv4 and UDP headers.
const HEADERS: usize = 28;

impl Network {
    pub(crate) fn new(links: [Link; 2], random: Random) -> Self {
        Self { links, random, on_the_way: BinaryHeap::new(), burst: [0; 2], count: 0 }
    }

    /// True if it is on its way.
    pub(crate) fn send(&mut self, mut datagram: Datagram) -> bool {
        let link = self.links[datagram.sender];
        self.count += 1;
        datagram.number = self.count;
        if link.is_cut || datagram.bytes.len() + HEADERS > link.mtu || self.is_lost(&datagram) {
            return false;
        }
        let copies = 1 + u64::from(self.random.is(link.duplicate_percent));
        for _ in 0..copies {
            let at = datagram.sent + link.delay + self.random.between(0, link.jitter);
            self.count += 1;
            self.on_the_way.push(Reverse((at, self.count, datagram.clone())));
        }
        true
    }

    fn is_lost(&mut self, datagram: &Datagram) -> bool {
        let (link, burst) = (self.links[datagram.sender], &mut self.burst[datagram.sender]);
        // Bursts as often as makes the share come right.
        if *burst == 0 && self.random.next() % (100 * link.burst) < link.loss_percent {
            *burst = link.burst;
        }
        let is_lost = *burst > 0 && link.loss_percent > 0;
        *burst = burst.saturating_sub(1);
        is_lost
    }

    /// Time at which the next datagram arrives.
    pub(crate) fn next_arrival(&self) -> Option<u64> {
        self.on_the_way.peek().map(|Reverse((at, ..))| *at)
    }

    pub(crate) fn arrive(&mut self) -> Option<Datagram> {
        self.on_the_way.pop().map(|Reverse((.., datagram))| datagram)
    }
}
