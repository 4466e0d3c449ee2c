//! Liqo's probes.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use reachability::probe::{MAX_DATAGRAM, Message, MessageType, Pending, WeftField};

/// Messages that parse are encoded unchanged, and answer no probe that was not sent.
#[test]
fn probe() {
    bolero::check!().with_max_len(2048).for_each(|bytes: &[u8]| {
        let Ok(message) = Message::parse(bytes) else { return };
        assert!(bytes.len() <= MAX_DATAGRAM);
        assert_eq!(Message::parse(&message.encode()).ok().as_ref(), Some(&message));

        let pong = message.clone().pong(WeftField::new(Duration::from_secs(2), None));
        assert_eq!(pong.msg_type, MessageType::Pong);
        assert_eq!(
            (&pong.cluster_id, &pong.time_stamp),
            (&message.cluster_id, &message.time_stamp)
        );
        // A forged source must not amplify traffic.
        assert!(pong.encode().len() <= 2 * bytes.len() + 64);

        let now = Instant::now();
        let mut pending = Pending::new("milan".parse().unwrap());
        let ping = pending.ping(Timestamp::UNIX_EPOCH, now, WeftField::new(Duration::ZERO, None));
        let is_answer = message.cluster_id == "milan"
            && message.time_stamp.parse::<Timestamp>().ok() == ping.time_stamp.parse().ok();
        assert_eq!(pending.take_pong(&message, now).is_some(), is_answer);
    });
}
