//! A raw sender on the switch: any frames, with any source address.

mod forge;

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::net::if_::if_nametoindex;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

pub use forge::{Forger, Forgery, Vxlan, in_vxlan};

use crate::{Host, Lab};

/// Frames of one call.
const BATCH: usize = 64;
/// Share of a core that the sender may use.
const SHARE: f64 = 0.5;

/// Result of a flood.
#[derive(Clone, Copy, Debug, Default)]
pub struct FloodReport {
    /// Frames that the kernel took.
    pub sent: u64,
    pub took: Duration,
    /// CPU time of the sender's thread, which includes the cost of its frames until they lie in a
    /// socket's buffer: a veth pair is crossed in the sender's time.
    pub cpu: Duration,
}

impl FloodReport {
    pub fn per_second(&self) -> f64 {
        self.sent as f64 / self.took.as_secs_f64()
    }
}

/// Sends these frames again and again from the switch, as fast as half a core can, until `during`
/// is over.
pub fn flood<T>(
    lab: &Lab,
    frames: &[Vec<u8>],
    during: impl FnOnce() -> T,
) -> Result<(FloodReport, T)> {
    ensure!(!frames.is_empty(), "nothing to flood with");
    let socket = raw_socket(lab.switch())?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| send(socket.as_raw_fd(), frames, &stop));
        let value = during();
        stop.store(true, Ordering::Relaxed);
        let report = sender.join().expect("the sender does not panic");
        Ok((report, value))
    })
}

fn send(socket: RawFd, frames: &[Vec<u8>], stop: &AtomicBool) -> FloodReport {
    let (start, mut report) = (Instant::now(), FloodReport::default());
    let mut batches = frames.chunks(BATCH).cycle();
    while !stop.load(Ordering::Relaxed) {
        let batch = batches.next().expect("there are frames");
        report.sent += send_batch(socket, batch);
        let due = thread_time().div_f64(SHARE);
        std::thread::sleep(due.saturating_sub(start.elapsed()));
    }
    (report.took, report.cpu) = (start.elapsed(), thread_time());
    report
}

/// Number of frames that were sent. One that does not fit the device is passed over.
#[allow(unsafe_code)]
fn send_batch(socket: RawFd, frames: &[Vec<u8>]) -> u64 {
    let mut parts = frames.iter().map(|frame| libc::iovec {
        iov_base: frame.as_ptr().cast_mut().cast(),
        iov_len: frame.len(),
    });
    let mut parts: [libc::iovec; BATCH] = std::array::from_fn(|_| {
        parts.next().unwrap_or(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 })
    });
    // SAFETY: an mmsghdr is plain old data, valid when zeroed.
    let mut messages: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
    for (message, part) in messages.iter_mut().zip(&mut parts) {
        message.msg_hdr.msg_iov = part;
        message.msg_hdr.msg_iovlen = 1;
    }
    let (mut next, mut sent) = (0, 0);
    while next < frames.len() {
        let left = (frames.len() - next) as libc::c_uint;
        // SAFETY: `left` messages from here on are set up, and what they point to outlives the
        // call; the kernel only reads the frames.
        let done = unsafe { libc::sendmmsg(socket, messages[next..].as_mut_ptr(), left, 0) };
        sent += u64::try_from(done).unwrap_or(0);
        next += usize::try_from(done).unwrap_or(0).max(1);
    }
    sent
}

/// CPU time that the calling thread has used.
#[allow(unsafe_code)]
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Sends whole frames through the switch's bridge, past its queueing discipline.
fn raw_socket(switch: &Host) -> Result<Socket> {
    let (socket, index) = switch.net().run(|| -> Result<_> {
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(0)))?;
        Ok((socket, if_nametoindex("br0")?))
    })?;
    #[allow(unsafe_code)]
    // SAFETY: a sockaddr_ll is smaller than any storage, and all of it is written.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            let mut link: libc::sockaddr_ll = std::mem::zeroed();
            link.sll_family = libc::AF_PACKET as u16;
            link.sll_ifindex = index.cast_signed();
            storage.cast::<libc::sockaddr_ll>().write(link);
            *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            Ok(())
        })
    }?;
    socket.bind(&address).context("binding the flood's socket to the switch")?;
    bypass_queues(&socket)?;
    Ok(socket)
}

#[allow(unsafe_code)]
fn bypass_queues(socket: &Socket) -> Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the value is an int that outlives the call, and its size is given.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_QDISC_BYPASS,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    if done == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error()).context("bypassing queues")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::on_segment;
    use fabric_api::PrivateKey;
    use std::net::{SocketAddr, UdpSocket};

    #[test]
    fn forged_flood_arrives_and_takes_half_a_core() {
        let lab = Lab::new("weft-flood-test").unwrap();
        let machine = lab.machine("a", &[on_segment([192, 0, 2, 11].into())]).unwrap();
        let socket = machine.net().run(|| UdpSocket::bind("0.0.0.0:7")).unwrap();
        let to = "192.0.2.11:7".parse().unwrap();
        let peer = "192.0.2.99:7".parse().unwrap();
        let key = PrivateKey::generate().public();
        let mut forger = Forger::new(&machine, (peer, to), &key).unwrap();
        let frames: Vec<_> =
            Forgery::ALL.iter().flat_map(|kind| forger.frames(*kind, 64)).collect();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let (mut buffer, mut from_peer, mut longest) = (vec![0; 65_535], 0, 0);
        let listen = || {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(300) {
                let Ok((len, from)) = socket.recv_from(&mut buffer) else { continue };
                from_peer += usize::from(from == SocketAddr::V4(peer));
                longest = longest.max(len);
            }
        };
        let (report, ()) = flood(&lab, &frames, listen).unwrap();

        assert!(report.sent > 1000, "{report:?}");
        assert!(report.cpu.as_secs_f64() < 0.6 * report.took.as_secs_f64(), "{report:?}");
        assert!(from_peer > 10 && longest > 9000, "{from_peer} {longest}");
    }
}
