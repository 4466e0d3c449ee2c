//! Layout of the four messages (whitepaper section 5.4). Numbers are little-endian.

use std::ops::Range;

/// First byte of data messages.
pub const DATA: u8 = 4;
const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const COOKIE_REPLY: u8 = 3;

/// Lengths of handshake messages in bytes.
pub const INITIATION_LEN: usize = 148;
pub const RESPONSE_LEN: usize = 92;
pub const COOKIE_REPLY_LEN: usize = 64;
/// Header and tag of a data message in bytes.
pub const DATA_OVERHEAD: usize = DATA_HEADER + TAG;
/// Bytes of a data message before its ciphertext.
pub const DATA_HEADER: usize = 16;
pub(crate) const TAG: usize = 16;

/// Length of `mac1` and of `mac2`, which end an initiation or response.
pub(crate) const MAC: usize = 16;

/// A message that is not data, by its first four bytes and its length.
#[derive(Clone, Copy, Debug)]
pub enum Message<'a> {
    Initiation(Initiation<'a>),
    Response(Response<'a>),
    CookieReply(CookieReply<'a>),
}

#[derive(Clone, Copy, Debug)]
pub struct Initiation<'a>(&'a [u8; INITIATION_LEN]);

#[derive(Clone, Copy, Debug)]
pub struct Response<'a>(&'a [u8; RESPONSE_LEN]);

#[derive(Clone, Copy, Debug)]
pub struct CookieReply<'a>(&'a [u8; COOKIE_REPLY_LEN]);

impl<'a> Message<'a> {
    /// `None` for data, and for what is no message of WireGuard's.
    pub fn parse(datagram: &'a [u8]) -> Option<Self> {
        match datagram.first_chunk()? {
            [INITIATION, 0, 0, 0] => Some(Self::Initiation(Initiation(datagram.try_into().ok()?))),
            [RESPONSE, 0, 0, 0] => Some(Self::Response(Response(datagram.try_into().ok()?))),
            [COOKIE_REPLY, 0, 0, 0] => {
                Some(Self::CookieReply(CookieReply(datagram.try_into().ok()?)))
            }
            _ => None,
        }
    }

    /// Index of the message that this one answers.
    pub fn receiver_index(&self) -> Option<u32> {
        match self {
            Self::Initiation(_) => None,
            Self::Response(response) => Some(response.receiver_index()),
            Self::CookieReply(reply) => Some(reply.receiver_index()),
        }
    }

    /// An initiation or response, with its sender's index and both its MACs; `None` for a cookie
    /// reply, which has none.
    pub(crate) fn with_macs(&self) -> Option<WithMacs<'a>> {
        match self {
            Self::Initiation(initiation) => Some(WithMacs(&initiation.0[..])),
            Self::Response(response) => Some(WithMacs(&response.0[..])),
            Self::CookieReply(_) => None,
        }
    }

    /// Returns whether it has a `mac2`, right or wrong.
    pub fn has_mac2(&self) -> bool {
        self.with_macs().is_some_and(|message| message.mac2() != [0; MAC])
    }
}

/// Bytes of a message that ends in `mac1` and `mac2`.
#[derive(Clone, Copy)]
pub(crate) struct WithMacs<'a>(&'a [u8]);

impl<'a> WithMacs<'a> {
    pub(crate) fn sender_index(self) -> [u8; 4] {
        array(self.0, 4)
    }

    /// The bytes that `mac1` is about, and `mac1`.
    pub(crate) fn mac1(self) -> (&'a [u8], &'a [u8]) {
        let (covered, macs) = self.0.split_at(self.0.len() - 2 * MAC);
        (covered, &macs[..MAC])
    }

    /// The bytes that `mac2` is about.
    pub(crate) fn covered_by_mac2(self) -> &'a [u8] {
        &self.0[..self.0.len() - MAC]
    }

    pub(crate) fn mac2(self) -> &'a [u8] {
        &self.0[self.0.len() - MAC..]
    }
}

impl Initiation<'_> {
    pub(crate) const EPHEMERAL: Range<usize> = 8..40;
    pub(crate) const STATIC: Range<usize> = 40..88;
    pub(crate) const TIMESTAMP: Range<usize> = 88..116;

    pub(crate) fn sender_index(&self) -> u32 {
        number(self.0, 4)
    }

    pub(crate) fn ephemeral(&self) -> [u8; 32] {
        array(self.0, Self::EPHEMERAL.start)
    }

    pub(crate) fn encrypted_static(&self) -> &[u8] {
        &self.0[Self::STATIC]
    }

    pub(crate) fn encrypted_timestamp(&self) -> [u8; 28] {
        array(self.0, Self::TIMESTAMP.start)
    }

    /// A message with type and sender only.
    pub(crate) fn blank(sender: u32) -> [u8; INITIATION_LEN] {
        blank(INITIATION, sender)
    }
}

impl Response<'_> {
    pub(crate) const RECEIVER: Range<usize> = 8..12;
    pub(crate) const EPHEMERAL: Range<usize> = 12..44;
    pub(crate) const NOTHING: Range<usize> = 44..60;

    pub(crate) fn sender_index(&self) -> u32 {
        number(self.0, 4)
    }

    pub fn receiver_index(&self) -> u32 {
        number(self.0, Self::RECEIVER.start)
    }

    pub(crate) fn ephemeral(&self) -> [u8; 32] {
        array(self.0, Self::EPHEMERAL.start)
    }

    pub(crate) fn encrypted_nothing(&self) -> &[u8] {
        &self.0[Self::NOTHING]
    }

    /// A message with type and sender only.
    pub(crate) fn blank(sender: u32) -> [u8; RESPONSE_LEN] {
        blank(RESPONSE, sender)
    }
}

impl CookieReply<'_> {
    pub(crate) const RECEIVER: Range<usize> = 4..8;
    pub(crate) const NONCE: Range<usize> = 8..32;
    pub(crate) const COOKIE: Range<usize> = 32..64;

    pub fn receiver_index(&self) -> u32 {
        number(self.0, Self::RECEIVER.start)
    }

    pub(crate) fn nonce(&self) -> [u8; 24] {
        array(self.0, Self::NONCE.start)
    }

    pub(crate) fn encrypted_cookie(&self) -> [u8; 32] {
        array(self.0, Self::COOKIE.start)
    }

    /// A message with nothing but its type.
    pub(crate) fn blank() -> [u8; COOKIE_REPLY_LEN] {
        blank(COOKIE_REPLY, 0)
    }
}

/// Index of the key that a data message was sealed with; 0 if it is too short to have one.
#[inline]
pub fn receiver_index(datagram: &[u8]) -> u32 {
    datagram.get(4..8).map_or(0, |bytes| number(bytes, 0))
}

fn blank<const N: usize>(kind: u8, index: u32) -> [u8; N] {
    let mut message = [0; N];
    message[0] = kind;
    message[4..8].copy_from_slice(&index.to_le_bytes());
    message
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut copy = [0; N];
    copy.copy_from_slice(&bytes[at..at + N]);
    copy
}
