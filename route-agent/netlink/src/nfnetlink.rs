//! Requests to the kernel's packet filter, as raw bytes: no message of it is worth a type of its
//! own here.

use std::io;

use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST};
use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use nix::sys::socket::{setsockopt, sockopt::ReceiveTimeout};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::multicast::messages;

/// A blocking socket. The kernel answers at once, so no request takes long.
pub(crate) struct Nfnetlink {
    socket: Socket,
    /// Number of bodies after which a request fails; the socket is of no use then.
    max_bodies: usize,
}

/// A kind of message: subsystem and number.
#[derive(Clone, Copy)]
pub(crate) struct Kind(pub(crate) u8, pub(crate) u8);

/// Netlink's header, and nfnetlink's (family, version, resource id) after it.
const HEADER: usize = 16;
const NF_HEADER: usize = 4;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// Attempts at a dump that a change interrupts.
const DUMP_TRIES: usize = 5;

impl Nfnetlink {
    /// In the calling thread's namespace.
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        socket.connect(&SocketAddr::new(0, 0))?;
        setsockopt(&socket, ReceiveTimeout, &TimeVal::seconds(5))?;
        Ok(Self { socket, max_bodies: usize::MAX })
    }

    /// The bodies (attributes) of all that matches.
    pub(crate) fn dump(&self, kind: Kind, family: u8, body: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        for _ in 0..DUMP_TRIES {
            let mut found = Vec::new();
            let mut push = |body: &[u8]| found.push(body.to_vec());
            if self.request(kind, NLM_F_DUMP, (family, body), &mut push)? {
                return Ok(found);
            }
        }
        Err(io::ErrorKind::Interrupted.into())
    }

    /// Like [`Self::dump`]; `None` if there are more bodies, the rest of which is not read, or if the object that
    /// has them is gone or keeps changing.
    pub(crate) fn dump_at_most(
        max: usize,
        kind: Kind,
        family: u8,
        body: &[u8],
    ) -> io::Result<Option<Vec<Vec<u8>>>> {
        for _ in 0..DUMP_TRIES {
            let (mut socket, mut found) = (Self::open()?, Vec::new());
            socket.max_bodies = max;
            let mut push = |body: &[u8]| found.push(body.to_vec());
            let is_lost =
                |kind| matches!(kind, io::ErrorKind::FileTooLarge | io::ErrorKind::NotFound);
            match socket.request(kind, NLM_F_DUMP, (family, body), &mut push) {
                Ok(true) => return Ok(Some(found)),
                Ok(false) => {}
                Err(error) if is_lost(error.kind()) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Like [`Self::dump`], for tables too large or too busy to gather: passes each body to `take`,
    /// and tolerates entries that come and go meanwhile.
    pub(crate) fn for_each(
        &self,
        kind: Kind,
        family: u8,
        take: &mut dyn FnMut(&[u8]),
    ) -> io::Result<()> {
        self.request(kind, NLM_F_DUMP, (family, &[]), take).map(|_| ())
    }

    /// Asks for one thing, or has one changed.
    pub(crate) fn ask(&self, kind: Kind, family: u8, body: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let mut found = None;
        let mut keep = |body: &[u8]| found = Some(body.to_vec());
        self.request(kind, NLM_F_ACK, (family, body), &mut keep)?;
        Ok(found)
    }

    /// Returns false if the table changed while it was read.
    fn request(
        &self,
        Kind(subsystem, number): Kind,
        flags: u16,
        (family, body): (u8, &[u8]),
        take: &mut dyn FnMut(&[u8]),
    ) -> io::Result<bool> {
        let kind = u16::from_be_bytes([subsystem, number]);
        let mut request = Vec::with_capacity(HEADER + NF_HEADER + body.len());
        let len = (HEADER + NF_HEADER + body.len()) as u32;
        request.extend(len.to_ne_bytes());
        request.extend(kind.to_ne_bytes());
        request.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        request.extend([0; 8]);
        request.extend([family, 0, 0, 0]);
        request.extend(body);
        self.socket.send(&request, 0)?;

        let mut left = self.max_bodies;
        let (mut consistent, mut buffer) = (true, Vec::with_capacity(64 << 10));
        loop {
            buffer.clear();
            self.socket.recv(&mut buffer, 0)?;
            for message in messages(&buffer) {
                let field = |at| u16::from_ne_bytes([message[at], message[at + 1]]);
                left = left.saturating_sub(1);
                consistent &= field(6) & NLM_F_DUMP_INTR == 0;
                match field(4) {
                    NLMSG_DONE => return Ok(consistent),
                    NLMSG_ERROR => return answer(message).map(|()| consistent),
                    _ if left == 0 => return Err(io::ErrorKind::FileTooLarge.into()),
                    _ => take(message.get(HEADER + NF_HEADER..).unwrap_or_default()),
                }
            }
        }
    }
}

/// 0 acknowledges.
fn answer(message: &[u8]) -> io::Result<()> {
    let code = message.get(HEADER..HEADER + 4).and_then(|bytes| bytes.try_into().ok());
    match code.map_or(0, i32::from_ne_bytes) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(-code)),
    }
}

/// The attributes of a body: type (without flags) and value.
pub(crate) fn attributes(body: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = body;
    std::iter::from_fn(move || {
        let len = u16::from_ne_bytes(rest.get(..2)?.try_into().ok()?) as usize;
        let kind = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?);
        let value = rest.get(4..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & 0x3fff, value))
    })
}

/// The value of the first attribute of this type.
pub(crate) fn attribute(body: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(body).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// A text attribute, which ends with a zero byte.
pub(crate) fn text(body: &[u8], kind: u16) -> Option<&str> {
    let bytes = attribute(body, kind)?;
    std::str::from_utf8(bytes.strip_suffix(&[0]).unwrap_or(bytes)).ok()
}

/// A number in network order.
pub(crate) fn number(body: &[u8], kind: u16) -> Option<u32> {
    Some(u32::from_be_bytes(attribute(body, kind)?.try_into().ok()?))
}

pub(crate) fn put(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    body.extend(((value.len() + 4) as u16).to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

pub(crate) fn put_text(body: &mut Vec<u8>, kind: u16, value: &str) {
    let mut bytes = value.as_bytes().to_vec();
    bytes.push(0);
    put(body, kind, &bytes);
}
