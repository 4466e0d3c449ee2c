use std::io;
use std::time::Duration;

use netlink_sys::{Socket, SocketAddr};
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, timeout};

use crate::{NetlinkError, Netns};

/// Socket that receives the kernel's change notifications, and whether one is still to be reported.
#[derive(Debug)]
pub(crate) struct Multicast {
    socket: AsyncFd<Socket>,
    buffer: Vec<u8>,
    pending: bool,
}

/// Quiet time before a change is reported, and the longest delay of the report.
const QUIET: Duration = Duration::from_millis(20);
const LATEST: Duration = Duration::from_millis(200);
/// The kernel sends no more at once.
const BUFFER_BYTES: usize = 64 << 10;
/// Length of a netlink message's header.
const HEADER: usize = 16;

impl Multicast {
    pub(crate) fn open(
        netns: &Netns,
        protocol: isize,
        groups: &[u32],
    ) -> Result<Self, NetlinkError> {
        let socket = netns.run(|| open(protocol, groups))?.map_err(NetlinkError::Open)?;
        // SAFETY: the socket owns its descriptor, and nothing takes it out of the `AsyncFd`.
        #[allow(unsafe_code)]
        let socket = unsafe { AsyncFd::register(socket) };
        let socket = socket.map_err(|e| NetlinkError::Open(e.into()))?;
        Ok(Self { socket, buffer: Vec::with_capacity(BUFFER_BYTES), pending: false })
    }

    /// Returns once a message that matters has come and then none for a moment. Messages that
    /// the kernel could not deliver count as one that matters. Nothing is lost when cancelled.
    pub(crate) async fn changed(
        &mut self,
        matters: &mut (dyn FnMut(&[u8]) -> bool + Send),
    ) -> io::Result<()> {
        if !self.pending {
            self.wait(matters).await?;
            self.pending = true;
        }
        let latest = Instant::now() + LATEST;
        while Instant::now() < latest {
            match timeout(QUIET, self.wait(matters)).await {
                Ok(more) => more?,
                Err(_quiet) => break,
            }
        }
        self.pending = false;
        Ok(())
    }

    async fn wait(&mut self, matters: &mut (dyn FnMut(&[u8]) -> bool + Send)) -> io::Result<()> {
        loop {
            let mut ready = self.socket.readable().await?;
            self.buffer.clear();
            let buffer = &mut self.buffer;
            match ready.try_io(|socket| socket.get_ref().recv(buffer, libc::MSG_DONTWAIT)) {
                Ok(Ok(_)) if messages(&self.buffer).any(&mut *matters) => return Ok(()),
                Ok(Ok(_)) => {}
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => return Ok(()),
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}

fn open(protocol: isize, groups: &[u32]) -> io::Result<Socket> {
    let mut socket = Socket::new(protocol)?;
    socket.bind(&SocketAddr::new(0, 0))?;
    socket.set_non_blocking(true)?;
    groups.iter().try_for_each(|group| socket.add_membership(*group))?;
    Ok(socket)
}

/// The messages of a datagram, each with its header.
pub(crate) fn messages(datagram: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        let len = u32::from_ne_bytes(rest.get(..4)?.try_into().ok()?) as usize;
        let message = rest.get(..len).filter(|message| message.len() >= HEADER)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}
