//! Other keys at one end or both, in any order.

use super::flow::Flow;
use super::*;

/// Changes of one end's config, one at a time.
#[derive(Clone, Copy, Debug)]
enum Change {
    Secret(usize),
    PublicKey(usize),
}

use Change::{PublicKey as Public, Secret};

const CHANGES: [Change; 4] = [Secret(0), Secret(1), Public(0), Public(1)];

impl Pair {
    /// Gives one end its part of new keys.
    fn change(&mut self, change: Change, keys: &[PrivateKey; 2]) {
        let end = match change {
            Secret(end) => {
                self.configs[end].private_key = keys[end].clone();
                end
            }
            Public(end) => {
                self.configs[end].peer_key = Some(keys[1 - end].public());
                end
            }
        };
        self.engines[end].configure(self.configs[end].clone(), self.now);
    }

    /// All at once.
    fn rotate(&mut self) {
        let keys = new_keys();
        CHANGES.into_iter().for_each(|change| self.change(change, &keys));
        self.run(|_, _| true);
    }

    /// An engine with the keys that end `end` has now.
    fn double(&self, end: usize) -> Engine {
        let endpoint = Some(self.addresses[1 - end]);
        let config = Config { endpoint, initiate: true, ..self.configs[end].clone() };
        engine(config, 4711, self.now)
    }

    /// Returns whether end 1 answers an initiation of `engine`.
    fn answers(&mut self, engine: &mut Engine) -> bool {
        let mut made = Made::default();
        engine.initiate(self.now);
        engine.handle_timeout(self.now, &mut made);
        let initiation = made.sent.pop_back().unwrap().bytes;
        self.made[1].sent.clear();
        self.deliver(1, self.addresses[0], &initiation);
        self.made[1].sent.pop_back().is_some_and(|sent| sent.bytes[0] == 2)
    }
}

fn new_keys() -> [PrivateKey; 2] {
    [PrivateKey::generate(), PrivateKey::generate()]
}

/// Returns one of all orders in which two ends can get two changes each.
fn order(number: usize) -> [Change; 4] {
    let mut left = CHANGES.to_vec();
    let mut pick = number;
    [4, 3, 2, 1].map(|count| {
        let change = left.remove(pick % count);
        pick /= count;
        change
    })
}

#[test]
fn a_hundred_rotations_in_any_order_lose_nothing() {
    let mut flow = Flow::new(3);
    for rotation in 0..100 {
        let keys = new_keys();
        for change in order(rotation) {
            flow.pair.change(change, &keys);
            flow.run_a_while();
        }
        // Longer than an attempt whose answer came too early for the other end.
        flow.run_for(if rotation % 4 == 0 { 1500 } else { 50 });
        flow.assert_nothing_lost(&format!("rotation {rotation}, {:?}", order(rotation)));
    }
}

#[test]
fn rotation_in_any_order_ends_on_new_keys() {
    for number in 0..24 {
        let mut flow = Flow::new(number as u64);
        let keys = new_keys();
        for change in order(number) {
            flow.pair.change(change, &keys);
            flow.run_a_while();
        }
        flow.run_for(1500);
        flow.assert_nothing_lost(&format!("{:?}", order(number)));
        // The old ones are gone after this, with whatever sessions they have.
        flow.pair.now += Duration::from_secs(180);
        flow.run_for(10);
        flow.assert_nothing_lost(&format!("{:?}", order(number)));
        assert!(flow.pair.engines.iter().all(|engine| engine.peer_state().has_session));
    }
}

/// Keys may differ between the ends for as long as old keys are kept.
#[test]
fn a_rotation_half_done_loses_nothing() {
    for change in CHANGES {
        let mut flow = Flow::new(5);
        flow.pair.change(change, &new_keys());
        for _ in 0..170 {
            flow.run_for(1);
            flow.pair.now += Duration::from_secs(1);
        }
        flow.assert_nothing_lost(&format!("{change:?}"));
    }
}

#[test]
fn a_rotation_that_is_undone_loses_nothing() {
    let mut flow = Flow::new(6);
    let old = [0, 1].map(|end| flow.pair.configs[end].private_key.clone());
    for change in CHANGES.into_iter().cycle().take(12) {
        flow.pair.change(change, &new_keys());
        flow.run_a_while();
        flow.pair.change(change, &old);
        flow.run_for(300);
    }
    flow.assert_nothing_lost("back and forth");
    flow.pair.now += Duration::from_secs(181);
    flow.run_for(10);
    flow.assert_nothing_lost("the old keys are in force again");
}

#[test]
fn repeated_key_changes_stay_bounded() {
    let mut flow = Flow::new(7);
    for _ in 0..50 {
        flow.pair.change(Secret(0), &new_keys());
        flow.run_for(3);
    }
    flow.assert_nothing_lost("fifty keys that the peer never learns");
    assert!(flow.pair.engines[0].peer.sessions() <= 5);
}

#[test]
fn superseded_keys_are_refused_after_180_seconds() {
    let mut pair = Pair::connected();
    let mut old = pair.double(0);
    let sealed = |pair: &mut Pair| {
        pair.feed(0, &udp(b"late"));
        pair.made[0].sent.pop_back().unwrap().bytes
    };
    let [in_time, late] = [sealed(&mut pair), sealed(&mut pair)];
    pair.rotate();
    let frames = pair.made[1].frames.len();
    pair.now += Duration::from_millis(179_999);
    assert!(pair.answers(&mut old), "the peer may not know of the change yet");
    pair.deliver(1, pair.addresses[0], &in_time);
    assert_eq!(pair.made[1].frames.len(), frames + 1);
    pair.now += Duration::from_millis(1);
    assert!(!pair.answers(&mut old));
    assert!(pair.dropped(1, DropReason::HandshakeRejected) > 0);
    let before = pair.dropped(1, DropReason::NoSession);
    // Even if the engine's timers have not been advanced.
    pair.tick();
    pair.deliver(1, pair.addresses[0], &late);
    assert_eq!(pair.dropped(1, DropReason::NoSession), before + 1);
    assert!(pair.passes(0) && pair.passes(1));
}

/// A stranger who knows the new public key but not a private one is no better off.
#[test]
fn new_keys_do_not_open_the_door_to_others() {
    let mut pair = Pair::connected();
    pair.rotate();
    let mut stranger = foreign_key_for(pair.configs[1].private_key.public(), &pair);
    assert!(!pair.answers(&mut stranger));
    assert!(pair.passes(0) && pair.passes(1));
}

#[test]
fn without_the_peers_key_all_keys_end_at_once() {
    let mut pair = Pair::connected();
    pair.rotate();
    let mut former = pair.double(0);
    let config = Config { peer_key: None, ..pair.configs[1].clone() };
    pair.engines[1].configure(config, pair.now);
    assert!(!pair.answers(&mut former));
    assert!(!pair.engines[1].peer_state().has_session && !pair.passes(0));
}

#[test]
fn new_keys_initiate_to_last_known_endpoint() {
    let mut pair = Pair::connected();
    pair.addresses[0] = SocketAddr::from(([203, 0, 113, 9], 4444));
    assert!(pair.passes(0), "the server has learnt the new address");
    let keys = new_keys();
    pair.change(Secret(1), &keys);
    pair.tick();
    let sent = pair.made[1].sent.pop_back().unwrap();
    assert_eq!((sent.bytes[0], sent.to), (1, pair.addresses[0]));
    // And it moves again, with only the old keys to prove so.
    pair.addresses[0].set_port(5555);
    assert!(pair.passes(0));
    pair.now += Duration::from_secs(2);
    pair.tick();
    assert_eq!(pair.made[1].sent.pop_back().unwrap().to, pair.addresses[0]);
}

/// The peer is another machine from now on, while the one before still talks.
#[test]
fn former_peer_cannot_move_endpoint_of_new_keys() {
    let mut pair = Pair::connected();
    pair.feed(1, &udp(b"from the former"));
    let former = (pair.addresses[1], pair.made[1].sent.pop_back().unwrap().bytes);
    let keys = new_keys();
    pair.addresses[1] = SocketAddr::from(([192, 0, 2, 77], 51820));
    pair.configs[0].endpoint = Some(pair.addresses[1]);
    pair.change(Public(0), &keys);
    pair.deliver(0, former.0, &former.1);
    pair.tick();
    assert_eq!(pair.made[0].sent.back().unwrap().to, pair.addresses[1]);
    let config = Config { private_key: keys[1].clone(), ..pair.configs[1].clone() };
    pair.engines[1] = engine(config, 12, pair.now);
    pair.run(|_, _| true);
    pair.deliver(0, former.0, &former.1);
    assert_eq!(pair.engines[0].peer_state().endpoint, Some(pair.addresses[1]));
    assert!(pair.passes(0) && pair.passes(1));
}

#[test]
fn superseded_keys_stop_after_new_session() {
    let mut pair = Pair::connected();
    let config = Config { keepalive: Some(Duration::from_secs(5)), ..pair.configs[0].clone() };
    pair.configs[0] = config;
    pair.rotate();
    let index = |sent: &Sent| sent.bytes[5..8].to_vec();
    let (mut count, mut seen) = (0, Vec::new());
    for _ in 0..60 {
        pair.now += Duration::from_secs(1);
        pair.run(|from, sent| {
            count += usize::from(from == 0);
            seen.push(index(sent));
            true
        });
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!((seen.len(), count), (1, 12), "keepalives of one session");
}

#[test]
fn waiting_packets_survive_key_change() {
    let mut pair = Pair::new();
    pair.feed(0, &udp(b"early"));
    pair.rotate();
    assert_eq!(pair.made[1].frames.len(), 1);
}
