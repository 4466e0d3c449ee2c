use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;

use super::Offloads;

/// Sets of offloads to ask for, best first: USO came with Linux 6.2, the rest is ancient.
const OFFLOAD_STEPS: [(libc::c_uint, &str); 3] = [
    (ALL_OFFLOADS & !(libc::TUN_F_USO4 | libc::TUN_F_USO6), "UDP trains"),
    (libc::TUN_F_CSUM, "TCP and UDP trains"),
    (0, "trains and checksums"),
];

const ALL_OFFLOADS: libc::c_uint = libc::TUN_F_CSUM
    | libc::TUN_F_TSO4
    | libc::TUN_F_TSO6
    | libc::TUN_F_TSO_ECN
    | libc::TUN_F_USO4
    | libc::TUN_F_USO6;

/// Packets that may wait for the lane to read them. Linux' own default for TUN is 500.
const QUEUE_PACKETS: libc::c_int = 1000;

/// An open queue of a TUN device.
#[derive(Debug)]
pub struct Tun {
    pub(super) queue: OwnedFd,
    /// The kernel takes and gives trains of UDP datagrams.
    pub(super) has_udp_trains: bool,
}

/// Opens a queue of the TUN device `name` in the current network namespace, creating the device if
/// need be. Kernels before 6.2 lack USO; the device then does without, which is logged once.
pub fn open_tun(name: &str, offloads: Offloads) -> io::Result<Tun> {
    let mut request = request_for(name)?;
    let flags = OFlag::O_RDWR | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    let queue = open("/dev/net/tun", flags, Mode::empty())?;
    request.ifr_ifru.ifru_flags =
        (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    #[allow(unsafe_code)]
    // SAFETY: the kernel reads and writes one ifreq, which lives until the call returns.
    let result = unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    nix::errno::Errno::result(result)?;
    set_queue_length(&mut request);
    let has_udp_trains = if offloads.tun {
        enable_offloads(&queue, name)?
    } else {
        set_offloads(&queue, 0)?;
        false
    };
    Ok(Tun { queue, has_udp_trains })
}

/// Returns whether USO is among the offloads that the kernel has.
fn enable_offloads(queue: &OwnedFd, name: &str) -> io::Result<bool> {
    let Err(mut error) = set_offloads(queue, ALL_OFFLOADS) else { return Ok(true) };
    for (offloads, lacking) in OFFLOAD_STEPS {
        match set_offloads(queue, offloads) {
            Ok(()) => {
                tracing::warn!(device = name, lacking, "this kernel's TUN offloads less: slower");
                return Ok(false);
            }
            Err(next) => error = next,
        }
    }
    Err(error)
}

fn set_offloads(queue: &OwnedFd, offloads: libc::c_uint) -> io::Result<()> {
    #[allow(unsafe_code)]
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    let result = unsafe {
        libc::ioctl(queue.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(offloads))
    };
    nix::errno::Errno::result(result)?;
    Ok(())
}

/// A longer queue loses less in bursts of small packets; without it things work as well.
fn set_queue_length(request: &mut libc::ifreq) {
    let Ok(socket) = std::net::UdpSocket::bind("127.0.0.1:0")
        .or_else(|_| std::net::UdpSocket::bind("0.0.0.0:0"))
    else {
        return;
    };
    // ifr_qlen shares its place with ifr_mtu.
    request.ifr_ifru.ifru_mtu = QUEUE_PACKETS;
    #[allow(unsafe_code)]
    // SAFETY: the kernel reads one ifreq, which lives until the call returns.
    let result = unsafe {
        libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFTXQLEN as libc::Ioctl, &raw mut *request)
    };
    if result < 0 {
        tracing::debug!(error = %io::Error::last_os_error(), "TUN queue length not set");
    }
}

fn request_for(name: &str) -> io::Result<libc::ifreq> {
    #[allow(unsafe_code)]
    // SAFETY: an ifreq is plain old data, valid when zeroed.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte stays for the terminating NUL.
    if name.is_empty() || name.len() >= request.ifr_name.len() || name.contains('\0') {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a name of a device"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}
