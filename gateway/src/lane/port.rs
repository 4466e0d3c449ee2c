use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use tunnel::{Datagrams, Wire};

use super::socket::TunnelSocket;

/// Bytes that may wait for room in the socket's send buffer. While anything waits the TUN is not
/// read, so this need only hold what one frame and a turn of answers become: a few trains.
const BACKLOG: usize = 256 << 10;

/// Longer datagrams make it worth while to know the path. In bytes of UDP payload, and a little less
/// than the least path takes whatever its family: its flows are those that gain if it grows.
const ALWAYS_FITS: usize = crate::path_mtu::LEAST as usize - 80;

/// The lane's two descriptors, as the engine's wire.
pub(super) struct Port {
    pub(super) tun: OwnedFd,
    pub(super) socket: TunnelSocket,
    pub(super) now: Instant,
    /// Sends of datagrams that a path may be too narrow for.
    pub(super) large_sends: u64,
    backlog: Backlog,
}

/// Trains that found the socket's buffer full, in order.
#[derive(Default)]
struct Backlog {
    bytes: VecDeque<u8>,
    trains: VecDeque<Waiting>,
}

struct Waiting {
    remote: SocketAddr,
    len: usize,
    segment_size: usize,
    tos: u8,
}

impl Port {
    pub(super) fn new(tun: OwnedFd, socket: TunnelSocket, now: Instant) -> Self {
        Self { tun, socket, now, large_sends: 0, backlog: Backlog::default() }
    }

    /// Whether something waits for the socket.
    pub(super) fn is_blocked(&self) -> bool {
        !self.backlog.trains.is_empty()
    }

    /// Sends what waits, as far as there is room.
    pub(super) fn drain(&mut self) {
        let Backlog { bytes, trains } = &mut self.backlog;
        while let Some(waiting) = trains.front_mut() {
            let train = Datagrams {
                remote: waiting.remote,
                bytes: &bytes.make_contiguous()[..waiting.len],
                segment_size: waiting.segment_size,
                tos: waiting.tos,
            };
            // What fails for good is gone, as any datagram may be.
            let done = self.socket.send(train, self.now).unwrap_or(waiting.len);
            bytes.drain(..done);
            waiting.len -= done;
            if waiting.len > 0 {
                return;
            }
            trains.pop_front();
        }
    }
}

impl Backlog {
    fn push(&mut self, train: Datagrams<'_>) -> bool {
        let has_room = self.bytes.len() + train.bytes.len() <= BACKLOG;
        if has_room {
            self.bytes.extend(train.bytes);
            self.trains.push_back(Waiting {
                remote: train.remote,
                len: train.bytes.len(),
                segment_size: train.segment_size,
                tos: train.tos,
            });
        }
        has_room
    }
}

impl Wire for Port {
    fn send(&mut self, train: Datagrams<'_>) -> bool {
        self.large_sends += u64::from(train.segment_size > ALWAYS_FITS);
        if self.is_blocked() {
            return self.backlog.push(train);
        }
        match self.socket.send(train, self.now) {
            Ok(done) if done == train.bytes.len() => true,
            Ok(done) => self.backlog.push(Datagrams { bytes: &train.bytes[done..], ..train }),
            Err(error) => {
                tracing::trace!(remote = %train.remote, %error, "send");
                false
            }
        }
    }

    fn write(&mut self, frame: &[u8]) -> bool {
        loop {
            match nix::unistd::write(&self.tun, frame) {
                Ok(_) => return true,
                Err(nix::errno::Errno::EINTR) => {}
                Err(error) => {
                    tracing::trace!(error = %io::Error::from(error), "write to the TUN");
                    return false;
                }
            }
        }
    }
}
