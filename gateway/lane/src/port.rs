use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use nix::errno::Errno;
use tunnel::{Datagrams, DropReason, UdpPath, Wire};

use super::socket::TunnelSocket;

/// Bytes that may wait for room in the socket's send buffer. While anything waits the TUN is not
/// read, so this need only hold what one frame and a turn of answers become: a few trains.
const BACKLOG: usize = 256 << 10;

/// Longer datagrams make it worth while to know the path. In bytes of UDP payload, and a little less
/// than the usual least path takes whatever its family: its flows are those that gain if it grows. A
/// path that is smaller still is checked at rest only.
const ALWAYS_FITS: usize = reachability::path_mtu::USUAL_MIN as usize - 80;

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
    path: UdpPath,
    len: usize,
    segment_size: usize,
    tos: u8,
}

impl Port {
    pub(super) fn new(tun: OwnedFd, socket: TunnelSocket, now: Instant) -> Self {
        Self { tun, socket, now, large_sends: 0, backlog: Backlog::default() }
    }

    /// Returns whether something waits for the socket.
    pub(super) fn is_blocked(&self) -> bool {
        !self.backlog.trains.is_empty()
    }

    /// Sends what waits, as far as there is room. Calls `lost` with datagrams that fail for good.
    pub(super) fn drain(&mut self, mut lost: impl FnMut(DropReason, usize)) {
        let Backlog { bytes, trains } = &mut self.backlog;
        while let Some(waiting) = trains.front_mut() {
            let train = Datagrams {
                path: waiting.path,
                bytes: &bytes.make_contiguous()[..waiting.len],
                segment_size: waiting.segment_size,
                tos: waiting.tos,
            };
            let done = self.socket.send(train, self.now).unwrap_or_else(|error| {
                lost(send_failure(&error), waiting.len.div_ceil(waiting.segment_size.max(1)));
                waiting.len
            });
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
    fn push(&mut self, train: Datagrams<'_>) -> Result<(), DropReason> {
        if self.bytes.len() + train.bytes.len() > BACKLOG {
            return Err(DropReason::SocketFull);
        }
        self.bytes.extend(train.bytes);
        self.trains.push_back(Waiting {
            path: train.path,
            len: train.bytes.len(),
            segment_size: train.segment_size,
            tos: train.tos,
        });
        Ok(())
    }
}

impl Wire for Port {
    fn send(&mut self, train: Datagrams<'_>) -> Result<(), DropReason> {
        self.large_sends += u64::from(train.segment_size > ALWAYS_FITS);
        if self.is_blocked() {
            return self.backlog.push(train);
        }
        match self.socket.send(train, self.now) {
            Ok(done) if done == train.bytes.len() => Ok(()),
            Ok(done) => self.backlog.push(Datagrams { bytes: &train.bytes[done..], ..train }),
            Err(error) => {
                tracing::trace!(remote = %train.path.remote, %error, "send");
                Err(send_failure(&error))
            }
        }
    }

    fn write(&mut self, frame: &[u8]) -> Result<(), DropReason> {
        loop {
            match nix::unistd::write(&self.tun, frame) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => {
                    tracing::trace!(error = %io::Error::from(error), "write to the TUN");
                    return Err(write_failure(error));
                }
            }
        }
    }
}

fn send_failure(error: &io::Error) -> DropReason {
    match error.raw_os_error().unwrap_or_default() {
        libc::ENOBUFS | libc::ENOMEM => DropReason::SendNoBuffers,
        libc::ENETUNREACH
        | libc::EHOSTUNREACH
        | libc::ENETDOWN
        | libc::ENODEV
        | libc::ENXIO
        | libc::EADDRNOTAVAIL => DropReason::SendUnreachable,
        libc::EPERM | libc::EACCES => DropReason::SendNotPermitted,
        libc::EMSGSIZE => DropReason::SendTooLong,
        _ => DropReason::SendError,
    }
}

fn write_failure(error: Errno) -> DropReason {
    match error as i32 {
        libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM => DropReason::TunFull,
        _ => DropReason::TunError,
    }
}
