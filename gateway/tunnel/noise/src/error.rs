/// Reason for which a handshake message is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    #[error("the message was not made with the keys that it claims")]
    NotAuthentic,
    #[error("a key in the message is a point of low order, with which no secret can be agreed")]
    LowOrder,
    #[error("the initiation's timestamp is not after that of the one before")]
    Stale,
    #[error("the message answers none of ours")]
    Unexpected,
}
