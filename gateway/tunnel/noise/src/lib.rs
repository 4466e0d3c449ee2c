//! WireGuard's handshake and transport (Donenfeld, "WireGuard: Next Generation Kernel Network
//! Tunnel", sections 5.3 and 5.4), without sockets, clock or threads.
//!
//! * [`Handshake`] makes and consumes the messages of handshakes with one peer. Each handshake ends
//!   in a [`KeyPair`].
//! * [`Sealer`] and [`Opener`] are the two directions of a key pair. They share nothing but atomic
//!   counters, so that each may run on a thread of its own, or on several.
//! * [`LocalKey`] opens initiations far enough to name their sender; [`CookieChecker`] is what a
//!   responder under load checks first.
//! * When to send what is up to the caller, who passes the time and the [`Stamper`].

mod cookie;
mod crypto;
mod error;
mod handshake;
mod key_pair;
mod message;
mod replay;
mod stamp;

pub use cookie::CookieChecker;
pub use error::HandshakeError;
pub use handshake::{Handshake, LocalKey, ReceivedInitiation};
pub use key_pair::{KeyPair, OpenError, Opener, REJECT_AFTER_MESSAGES, Sealed, Sealer};
pub use message::{
    COOKIE_REPLY_LEN, CookieReply, DATA, DATA_HEADER, DATA_OVERHEAD, INITIATION_LEN, Initiation,
    Message, RESPONSE_LEN, Response, receiver_index,
};
pub use stamp::{Stamper, Tai64n};

pub use aead::BATCH;
use rand_core::{OsRng, RngCore};

/// Returns a session index that is not `taken`, from the operating system's random numbers.
pub fn random_index(taken: impl Fn(u32) -> bool) -> u32 {
    loop {
        let index = OsRng.next_u32();
        if !taken(index) {
            return index;
        }
    }
}
