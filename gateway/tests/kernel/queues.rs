//! Queues that overflow, and a queue that is dropped from before it does, are counted apart.
//!
//! ```text
//!  pod -- VXLAN -- TUN queue -- lane rome ==== receive buffer -- lane milan
//! ```

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use fabric_api::networking::ConnectionValue;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::side::{Gateway, POD, SEEN_AS, Side, in_two_hosts};

/// Longer than the queue of a TUN, in packets.
const BURST: usize = 3000;
/// Beside other tests a flood gets little of the processors.
const LIMIT: Duration = Duration::from_secs(60);
/// Time in which a flood fills a receive buffer, and time to work that off.
const PAUSE: Duration = Duration::from_millis(100);
const WORK: Duration = Duration::from_millis(300);
/// Time in which a flood makes a receive buffer overflow.
const LONG_PAUSE: Duration = Duration::from_secs(2);

#[test]
fn full_tun_queue_has_a_counter_of_its_own() {
    in_two_hosts(|rome, milan| {
        let (client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        assert_eq!(rome.value("weft_gateway_tun_overflows_total"), 0);
        while_stopped(&client, || send(rome, || false, BURST));
        rome.until("overflows", || rome.value("weft_gateway_tun_overflows_total") > 0);
        for reason in ["tun_full", "socket_full", "early_drop"] {
            assert_eq!(
                [dropped(rome, reason, "inbound"), dropped(rome, reason, "outbound")],
                [0; 2]
            );
        }
    });
}

#[test]
fn early_drop_has_a_counter_of_its_own() {
    in_two_hosts(|rome, milan| {
        let (_client, server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        let is_over = AtomicBool::new(false);
        let dropped_early = scope(|scope| {
            scope.spawn(|| send(rome, || is_over.load(Ordering::Relaxed), usize::MAX));
            let _over = Over(&is_over);
            let (start, mut early) = (Instant::now(), 0);
            while early == 0 && start.elapsed() < LIMIT {
                while_stopped(&server, || sleep(PAUSE));
                sleep(WORK);
                early = dropped(milan, "early_drop", "inbound");
            }
            early
        });
        assert!(dropped_early > 0, "none in {LIMIT:?}");
        assert_eq!(dropped(milan, "tun_full", "inbound"), 0);
        assert_eq!(milan.value("weft_gateway_tun_overflows_total"), 0);
    });
}

#[test]
fn full_receive_buffer_has_a_counter_of_its_own() {
    const COUNTER: &str = "weft_gateway_socket_overflows_total";
    in_two_hosts(|rome, milan| {
        let (_client, server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        assert_eq!(milan.value(COUNTER), 0);
        let is_over = AtomicBool::new(false);
        scope(|scope| {
            scope.spawn(|| send(rome, || is_over.load(Ordering::Relaxed), usize::MAX));
            let _over = Over(&is_over);
            let start = Instant::now();
            while milan.value(COUNTER) == 0 {
                assert!(start.elapsed() < LIMIT, "no overflow in {LIMIT:?}");
                while_stopped(&server, || sleep(LONG_PAUSE));
                sleep(WORK);
            }
        });
        assert_eq!(milan.value("weft_gateway_tun_overflows_total"), 0);
    });
}

/// Ends a flood, whatever ends the test.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn while_stopped(gateway: &Gateway, act: impl FnOnce()) {
    let gateway = Pid::from_raw(gateway.id());
    kill(gateway, Signal::SIGSTOP).unwrap();
    act();
    kill(gateway, Signal::SIGCONT).unwrap();
}

/// Sends datagrams from a pod to one of the peer's, which nobody reads.
fn send(side: &Side, is_over: impl Fn() -> bool + Sync + Send, count: usize) {
    let send = || {
        let socket = UdpSocket::bind((POD, 0)).unwrap();
        for _ in (0..count).take_while(|_| !is_over()) {
            // Refused once the peer's host has reported that nobody listens.
            let _ = socket.send_to(&[0; 1200], (SEEN_AS, 9));
        }
    };
    side.netns.run(send).unwrap();
}

fn dropped(side: &Side, reason: &str, direction: &str) -> u64 {
    let labels = format!("{{reason=\"{reason}\",direction=\"{direction}\"}}");
    side.value(&format!("weft_gateway_dropped_packets_total{labels}"))
}
