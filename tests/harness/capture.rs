use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use crate::Netns;

/// Size of the queue for the reader, in bytes: seconds of traffic on a busy machine.
const QUEUE: usize = 64 << 20;
/// A train of 64 KiB with its Ethernet header.
const LONGEST: usize = 66_000;

/// Sees every frame that a namespace's devices receive, while this value exists: on a switch, all that
/// its machines send.
pub struct Capture {
    socket: Arc<Socket>,
    stop: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

impl Capture {
    /// Has `look` see each frame whole, as it comes. A frame that several devices receive, such as a
    /// bridge and its port, comes several times.
    pub fn start(ns: &Netns, look: impl FnMut(&[u8]) + Send + 'static) -> Result<Self> {
        Self::filtered(ns, &[], look)
    }

    /// The same with only those frames that this program of the kernel's (bpf(4)) lets pass.
    pub fn filtered(
        ns: &Netns,
        filter: &[SockFilter],
        mut look: impl FnMut(&[u8]) + Send + 'static,
    ) -> Result<Self> {
        let every_protocol = i32::from(u16::to_be(libc::ETH_P_ALL as u16));
        let open = || Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(every_protocol)));
        let socket = Arc::new(ns.run(open).context("opening a packet socket")?);
        socket.set_read_timeout(Some(Duration::from_millis(20)))?;
        if !filter.is_empty() {
            socket.attach_filter(filter).context("filtering a capture")?;
        }
        setsockopt(&*socket, RcvBufForce, &QUEUE).context("making a capture's queue long")?;
        ignore_outgoing(&socket)?;

        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, source) = (Arc::clone(&stop), Arc::clone(&socket));
        let reader = std::thread::spawn(move || {
            let mut buffer = [MaybeUninit::<u8>::uninit(); LONGEST];
            loop {
                let was_stopped = stopped.load(Ordering::Relaxed);
                match source.recv(&mut buffer) {
                    Ok(len) => look(&initialized(&buffer[..len])),
                    Err(_) if was_stopped => return,
                    Err(_) => {}
                }
            }
        });
        Ok(Self { socket, stop, reader: Some(reader) })
    }

    /// Looks at what is still queued and ends. Fails if a frame was missed.
    pub fn finish(mut self) -> Result<()> {
        self.stop();
        let missed = missed(&self.socket)?;
        ensure!(missed == 0, "the capture missed {missed} frames");
        Ok(())
    }

    fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Ongoing traffic must not keep the reader from finding its queue empty.
        let _ = self.socket.set_nonblocking(true);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Otherwise a switch shows everything again on its way out.
#[allow(unsafe_code)]
fn ignore_outgoing(socket: &Socket) -> Result<()> {
    let (value, len) = (1, size_of::<libc::c_int>() as libc::socklen_t);
    let value: *const libc::c_int = &value;
    let (level, name) = (libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING);
    // SAFETY: `value` is an int that outlives the call, and its size is given.
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.cast(), len) };
    ensure!(done == 0, "a capture cannot leave out what is sent");
    Ok(())
}

/// Number of frames that found no room in the queue (packet(7), `PACKET_STATISTICS`).
#[allow(unsafe_code)]
fn missed(socket: &Socket) -> Result<u32> {
    // Packets, drops.
    let mut counts = [0u32; 2];
    let mut len = size_of_val(&counts) as libc::socklen_t;
    let (level, name) = (libc::SOL_PACKET, libc::PACKET_STATISTICS);
    // SAFETY: the kernel writes at most `len` bytes to `counts`, which is plain integers.
    let done = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, counts.as_mut_ptr().cast(), &mut len)
    };
    ensure!(done == 0, "the kernel does not count what a capture misses");
    Ok(counts[1])
}

/// Bytes that `recv` has filled in.
#[allow(unsafe_code)]
pub(crate) fn initialized(bytes: &[MaybeUninit<u8>]) -> Vec<u8> {
    // SAFETY: callers pass only as much as the kernel reports to have written.
    bytes.iter().map(|byte| unsafe { byte.assume_init() }).collect()
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Sends so many datagrams over loopback.
    fn send(ns: &Netns, datagrams: usize) {
        let socket = ns.run(|| UdpSocket::bind("127.0.0.1:0")).unwrap();
        let to = socket.local_addr().unwrap();
        for _ in 0..datagrams {
            socket.send_to(&[7; 1000], to).unwrap();
        }
    }

    #[test]
    fn every_frame_is_seen() {
        let (ns, seen) = (Netns::new().unwrap(), Arc::new(AtomicUsize::new(0)));
        let counter = Arc::clone(&seen);
        let look = move |frame: &[u8]| _ = counter.fetch_add(frame.len() / 1000, Ordering::Relaxed);
        let capture = Capture::start(&ns, look).unwrap();
        send(&ns, 500);
        capture.finish().unwrap();
        assert_eq!(seen.load(Ordering::Relaxed), 500);
    }

    #[test]
    fn incomplete_capture_is_an_error() {
        let ns = Netns::new().unwrap();
        let capture =
            Capture::start(&ns, |_| std::thread::sleep(Duration::from_millis(1))).unwrap();
        setsockopt(&*capture.socket, RcvBufForce, &4096).unwrap();
        send(&ns, 100);
        assert!(capture.finish().is_err());
    }
}
