//! The tunnel's UDP socket: trains out with `UDP_SEGMENT`, in with `UDP_GRO`.
//!
//! Not quinn-udp: it hides what is needed here (the count of overflows, all eight bits of the
//! traffic class, which send failed and how), and once a segmented send failed it never segments
//! again.

use std::io;
use std::mem::{self, offset_of};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tunnel::{Datagrams, UdpPath};

use super::Offloads;

/// At 10 Gbit/s this is 6 ms of full packets: as long as the thread may be kept waiting.
const RECEIVE_BUFFER: usize = 8 << 20;
const SEND_BUFFER: usize = 2 << 20;

/// Time for which a path that refused a segmented send gets single datagrams.
const RETRY_SEGMENTS_AFTER: Duration = Duration::from_secs(300);

/// Room for the control messages of one call, in words: segment size, TOS or traffic class,
/// overflows, this host's address.
const CONTROL_WORDS: usize = 16;

/// Words in the report of SO_MEMINFO (SK_MEMINFO_VARS of linux/sock_diag.h): the first is the
/// memory in the receive queue, the second its limit.
const MEMINFO_WORDS: usize = 9;

/// Binds a UDP socket for the tunnel in the current network namespace: IPv6 that also takes IPv4,
/// or IPv4 alone where there is no IPv6. `None` takes any free port.
pub fn open_socket(port: Option<u16>, offloads: Offloads) -> io::Result<UdpSocket> {
    let port = port.unwrap_or(0);
    let socket =
        bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).or_else(|error| {
            match error.raw_os_error() {
                Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL | libc::EPROTONOSUPPORT) => {
                    bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))
                }
                _ => Err(error),
            }
        })?;
    enlarge_buffers(&socket)?;
    setsockopt(&socket, sockopt::RxqOvfl, &1)?;
    if offloads.gro
        && let Err(error) = setsockopt(&socket, sockopt::UdpGroSegment, &true)
    {
        tracing::warn!(%error, "this kernel does not join UDP datagrams: receiving is slower");
    }
    Ok(socket.into())
}

fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
        socket.set_recv_tclass_v6(true)?;
        // Reports destinations of IPv4, too, as mapped addresses.
        setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
    } else {
        setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
    }
    // On an IPv6 socket for the IPv4 that it takes.
    socket.set_recv_tos_v4(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

fn enlarge_buffers(socket: &Socket) -> io::Result<()> {
    if setsockopt(socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
        // Without CAP_NET_ADMIN only up to net.core.rmem_max.
        socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
    }
    if setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER).is_err() {
        socket.set_send_buffer_size(SEND_BUFFER)?;
    }
    Ok(())
}

/// Result of one receive. The datagrams are in the buffer that was given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub(super) path: UdpPath,
    pub(super) len: usize,
    pub(super) segment_size: usize,
    pub(super) tos: u8,
    /// Datagrams that this socket lost so far for want of buffer space; absent while none.
    pub(super) overflows: Option<u32>,
}

/// Segmented sends that the path refused.
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// Segments of this size and more, in bytes of UDP payload.
    size: usize,
    /// Time at which they may be tried again.
    until: Instant,
}

/// A socket with what is known about the path behind it.
#[derive(Debug)]
pub(super) struct TunnelSocket {
    socket: UdpSocket,
    is_ipv6: bool,
    segments_allowed: bool,
    refused: Option<Refused>,
    is_path_probing: bool,
    /// Segmented sends arrive, as far as is known.
    pub(super) is_segmenting: bool,
    /// The last destination, and its form for the kernel.
    remote: Option<(SocketAddr, SockAddr)>,
}

impl TunnelSocket {
    pub(super) fn new(socket: UdpSocket, offloads: Offloads) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            is_ipv6: socket.local_addr()?.is_ipv6(),
            socket,
            segments_allowed: offloads.gso,
            refused: None,
            is_path_probing: false,
            is_segmenting: true,
            remote: None,
        })
    }

    /// Returns whether trains leave as one segmented send.
    pub(super) fn segments(&self) -> bool {
        self.segments_allowed && self.is_segmenting && self.refused.is_none()
    }

    /// Returns what was set before.
    pub(super) fn set_segmenting(&mut self, segmenting: bool) -> bool {
        mem::replace(&mut self.is_segmenting, segmenting)
    }

    pub(super) fn is_path_probing(&self) -> bool {
        self.is_path_probing
    }

    /// With probing datagrams have DF set and are as large as the device takes; otherwise, as by
    /// default, the kernel uses the path MTU that routers report, and fragments.
    pub(super) fn set_path_probing(&mut self, probing: bool) {
        self.is_path_probing = probing;
        let (v4, v6) = match probing {
            true => (libc::IP_PMTUDISC_PROBE, libc::IPV6_PMTUDISC_PROBE),
            false => (libc::IP_PMTUDISC_WANT, libc::IPV6_PMTUDISC_WANT),
        };
        let mut done = self.set_option((libc::IPPROTO_IP, libc::IP_MTU_DISCOVER), v4);
        if self.is_ipv6 {
            let option = (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER);
            done = done.and_then(|()| self.set_option(option, v6));
        }
        if let Err(error) = done {
            tracing::warn!(%error, "cannot choose how the path's MTU is found");
        }
    }

    /// Sends `train`, and returns how many of its bytes are done with: fewer than all when the
    /// socket's buffer is full.
    pub(super) fn send(&mut self, train: Datagrams<'_>, now: Instant) -> io::Result<usize> {
        self.aim_at(train.path.remote, now);
        let len = train.bytes.len();
        let mut refusal = None;
        if len > train.segment_size && self.may_segment(train.segment_size) {
            match self.send_once(train) {
                Ok(()) => return Ok(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(error) if is_refusal(&error) => refusal = Some(error),
                Err(error) => return Err(error),
            }
        }
        let (mut done, mut last_error, mut passed) = (0, None, false);
        for bytes in train.bytes.chunks(train.segment_size.max(1)) {
            match self.send_once(Datagrams { bytes, segment_size: bytes.len(), ..train }) {
                Ok(()) => {
                    passed |= done == 0;
                    last_error = None;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // One datagram's failure does not take the rest along.
                Err(error) => last_error = Some(error),
            }
            done += bytes.len();
        }
        // If not even a single datagram of the size is taken, segmentation is not the cause.
        if let Some(error) = refusal.filter(|_| passed) {
            self.stop_segmenting(train, &error, now);
        }
        last_error.map_or(Ok(done), Err)
    }

    /// Receives into `buffer`, which should hold the longest datagram.
    pub(super) fn receive(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut control = [0u64; CONTROL_WORDS];
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        #[allow(unsafe_code)]
        // SAFETY: every pointer in the header leads to memory that outlives the call and is as long
        // as the header states; the storage is written by the kernel, which also sets its length.
        let ((len, header), address) = unsafe {
            SockAddr::try_init(|storage, length| {
                let mut header: libc::msghdr = mem::zeroed();
                header.msg_name = storage.cast();
                header.msg_namelen = *length;
                header.msg_iov = &raw mut part;
                header.msg_iovlen = 1;
                header.msg_control = control.as_mut_ptr().cast();
                header.msg_controllen = size_of_val(&control) as _;
                let len = libc::recvmsg(self.socket.as_raw_fd(), &raw mut header, 0);
                let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
                *length = header.msg_namelen;
                Ok((len, header))
            })?
        };
        let remote = address.as_socket().map(canonical).ok_or(io::ErrorKind::InvalidData)?;
        let path = UdpPath::from(remote);
        let mut received = Received { path, len, segment_size: len, tos: 0, overflows: None };
        read_control(&header, &mut received);
        Ok(received)
    }

    /// Returns whether the receive buffer is more than a quarter full, by the kernel's own count.
    pub(super) fn has_long_queue(&self) -> bool {
        let mut memory = [0u32; MEMINFO_WORDS];
        let mut length = size_of_val(&memory) as libc::socklen_t;
        #[allow(unsafe_code)]
        // SAFETY: the kernel writes at most `length` bytes, which is the array's size.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MEMINFO,
                memory.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let [queued, limit, ..] = memory;
        result == 0 && queued > limit / 4
    }

    /// Another destination is another path.
    fn aim_at(&mut self, remote: SocketAddr, now: Instant) {
        self.refused = self.refused.filter(|refused| now < refused.until);
        if self.remote.as_ref().is_some_and(|(known, _)| *known == remote) {
            return;
        }
        let address = match remote {
            SocketAddr::V4(v4) if self.is_ipv6 => {
                SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0).into()
            }
            SocketAddr::V4(_) | SocketAddr::V6(_) => remote.into(),
        };
        self.remote = Some((remote, address));
        self.refused = None;
    }

    fn may_segment(&self, size: usize) -> bool {
        self.segments_allowed
            && self.is_segmenting
            && self.refused.is_none_or(|refused| size < refused.size)
    }

    /// A size that does not fit the device proves nothing about smaller ones; EIO does.
    fn stop_segmenting(&mut self, train: Datagrams<'_>, error: &io::Error, now: Instant) {
        let is_any = error.raw_os_error() == Some(libc::EIO);
        let size = if is_any { 0 } else { train.segment_size };
        self.refused = Some(Refused { size, until: now + RETRY_SEGMENTS_AFTER });
        tracing::warn!(
            remote = %train.path.remote,
            segment_size = train.segment_size,
            %error,
            "the path refuses segmented sends: sending datagrams one by one for a while"
        );
    }

    fn set_option(
        &self,
        (level, name): (libc::c_int, libc::c_int),
        value: libc::c_int,
    ) -> io::Result<()> {
        #[allow(unsafe_code)]
        // SAFETY: the kernel reads one integer, which lives until the call returns.
        let result = unsafe {
            let value: *const libc::c_int = &raw const value;
            let length = size_of::<libc::c_int>() as libc::socklen_t;
            libc::setsockopt(self.socket.as_raw_fd(), level, name, value.cast(), length)
        };
        nix::errno::Errno::result(result)?;
        Ok(())
    }

    /// A source that the host has not any more is replaced by the kernel's choice.
    fn send_once(&self, train: Datagrams<'_>) -> io::Result<()> {
        match self.send_from(train.path.source, train) {
            Err(error) if train.path.source.is_some() && may_be_of_source(&error) => {
                self.send_from(None, train)
            }
            outcome => outcome,
        }
    }

    fn send_from(&self, source: Option<IpAddr>, train: Datagrams<'_>) -> io::Result<()> {
        let Some((_, address)) = &self.remote else { return Ok(()) };
        let mut control = [0u64; CONTROL_WORDS];
        let mut part = libc::iovec {
            iov_base: train.bytes.as_ptr().cast_mut().cast(),
            iov_len: train.bytes.len(),
        };
        #[allow(unsafe_code)]
        // SAFETY: a msghdr is plain old data, valid when zeroed.
        let mut header: libc::msghdr = unsafe { mem::zeroed() };
        header.msg_name = address.as_ptr().cast_mut().cast();
        header.msg_namelen = address.len();
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control) as _;
        let mut used = 0;
        if train.bytes.len() > train.segment_size {
            let size = (train.segment_size as u16).to_ne_bytes();
            used += put_control(&header, used, (libc::SOL_UDP, libc::UDP_SEGMENT), &size);
        }
        if train.tos != 0 {
            let kind = match train.path.remote {
                SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
                SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            };
            used += put_control(&header, used, kind, &i32::from(train.tos).to_ne_bytes());
        }
        used += source.map_or(0, |source| put_source(&header, used, source));
        header.msg_controllen = used as _;
        if used == 0 {
            header.msg_control = std::ptr::null_mut();
        }
        #[allow(unsafe_code)]
        // SAFETY: every pointer in the header leads to memory that outlives the call and has the
        // length given in the header; the kernel only reads it.
        let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const header, 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for TunnelSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Errors of segmented sends that single datagrams may not meet: EIO without checksum offload on
/// the device, EINVAL and EMSGSIZE where a segment does not fit the path.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE))
}

/// Errors of sends from an address that no device has, or without a route from there.
fn may_be_of_source(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::EADDRNOTAVAIL | libc::ENETUNREACH | libc::EHOSTUNREACH)
    )
}

/// IPv4 stays IPv4, even on an IPv6 socket.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

/// Writes a control message at byte `at` of the header's room, which has space for it. Returns how
/// much it took.
fn put_control(
    header: &libc::msghdr,
    at: usize,
    (level, kind): (libc::c_int, libc::c_int),
    value: &[u8],
) -> usize {
    #[allow(unsafe_code)]
    // SAFETY: the room is CONTROL_WORDS words, aligned, and all that is ever put in is two messages
    // of at most four bytes and one of a packet info.
    unsafe {
        let length = value.len() as libc::c_uint;
        let message: *mut libc::cmsghdr = header.msg_control.byte_add(at).cast();
        (*message).cmsg_level = level;
        (*message).cmsg_type = kind;
        (*message).cmsg_len = libc::CMSG_LEN(length) as _;
        libc::CMSG_DATA(message).copy_from_nonoverlapping(value.as_ptr(), value.len());
        libc::CMSG_SPACE(length) as usize
    }
}

/// Writes the address that a datagram is to leave from, as [`put_control`].
fn put_source(header: &libc::msghdr, at: usize, source: IpAddr) -> usize {
    match source {
        IpAddr::V4(source) => {
            let mut info = [0; size_of::<libc::in_pktinfo>()];
            info[offset_of!(libc::in_pktinfo, ipi_spec_dst)..][..4]
                .copy_from_slice(&source.octets());
            put_control(header, at, (libc::IPPROTO_IP, libc::IP_PKTINFO), &info)
        }
        IpAddr::V6(source) => {
            let mut info = [0; size_of::<libc::in6_pktinfo>()];
            info[offset_of!(libc::in6_pktinfo, ipi6_addr)..][..16]
                .copy_from_slice(&source.octets());
            put_control(header, at, (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO), &info)
        }
    }
}

fn read_control(header: &libc::msghdr, received: &mut Received) {
    #[allow(unsafe_code)]
    // SAFETY: the kernel filled the room in and set its length; the CMSG functions stay inside, and
    // each value has the length of its type.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while let Some(current) = message.as_ref() {
            let data = libc::CMSG_DATA(message);
            match (current.cmsg_level, current.cmsg_type) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    let size = data.cast::<libc::c_int>().read_unaligned();
                    received.segment_size = usize::try_from(size).unwrap_or(received.len);
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = data.cast::<libc::in6_pktinfo>().read_unaligned();
                    let address = Ipv6Addr::from(info.ipi6_addr.s6_addr);
                    received.path.source = Some(address.to_canonical());
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = data.cast::<libc::in_pktinfo>().read_unaligned();
                    let address = Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes());
                    received.path.source = Some(address.into());
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => received.tos = *data,
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    received.tos = data.cast::<libc::c_int>().read_unaligned() as u8;
                }
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                    received.overflows = Some(data.cast::<u32>().read_unaligned());
                }
                _ => {}
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

    /// Addresses that a datagram to [`ASKED`] is received at, and its answer from.
    fn addresses(server: Socket) -> (Option<IpAddr>, IpAddr) {
        let mut server = TunnelSocket::new(server.into(), Offloads::ALL).unwrap();
        let port = server.socket.local_addr().unwrap().port();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        client.send_to(b"question", (ASKED, port)).unwrap();
        let mut buffer = [0; 64];
        let path = server.receive(&mut buffer).unwrap().path;
        assert_eq!(path.remote, client.local_addr().unwrap());
        let answer = Datagrams { path, bytes: b"answers", segment_size: 4, tos: 0x88 };
        assert_eq!(server.send(answer, Instant::now()).unwrap(), 7);
        (path.source, client.recv_from(&mut buffer).unwrap().1.ip())
    }

    #[test]
    fn answers_have_the_address_asked_in_any_socket() {
        for any in [IpAddr::from(Ipv4Addr::UNSPECIFIED), Ipv6Addr::UNSPECIFIED.into()] {
            let server = bind(SocketAddr::new(any, 0)).unwrap();
            assert_eq!(addresses(server), (Some(ASKED), ASKED), "bound to {any}");
        }
    }

    #[test]
    fn address_that_the_host_lacks_is_not_sent_from() {
        let server = bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))).unwrap();
        let mut server = TunnelSocket::new(server.into(), Offloads::ALL).unwrap();
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let source = Some([203, 0, 113, 77].into());
        let path = UdpPath { remote: client.local_addr().unwrap(), source };
        let train = Datagrams { path, bytes: b"answers", segment_size: 4, tos: 0 };
        assert_eq!(server.send(train, Instant::now()).unwrap(), 7);
        let from = client.recv_from(&mut [0; 64]).unwrap().1;
        assert_eq!(from.ip(), IpAddr::from(Ipv4Addr::LOCALHOST));
        assert!(server.segments(), "segmentation is not the cause");
    }
}
