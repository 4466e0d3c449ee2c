//! `/healthz` and `/readyz` of a gateway whose parts fail.

use std::time::{Duration, Instant};

use fabric_api::networking::ConnectionValue;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::side::{Side, at_once, in_two_hosts};

#[test]
fn hung_lane_turns_liveness_red() {
    in_two_hosts(|rome, milan| {
        let (client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        assert_eq!(rome.probe("/healthz"), 200);
        let lane = Pid::from_raw(client.lane().unwrap());
        ptrace::seize(lane, ptrace::Options::empty()).unwrap();
        ptrace::interrupt(lane).unwrap();
        assert_eq!(rome.probe("/healthz"), 200, "not at the first probe");
        rome.until("a red probe", || rome.probe("/healthz") == 503);
        assert!(rome.http("/healthz").contains("the lane has not turned for"));
        ptrace::detach(lane, None).unwrap();
        rome.until("a green probe", || rome.probe("/healthz") == 200);
    });
}

#[test]
fn host_that_stood_still_is_no_hang() {
    in_two_hosts(|rome, milan| {
        let (client, _server) = (rome.start(), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        let pid = Pid::from_raw(client.id());
        for _ in 0..3 {
            std::thread::scope(|scope| {
                let asked = scope.spawn(|| rome.probe("/healthz"));
                kill(pid, Signal::SIGSTOP).unwrap();
                std::thread::sleep(Duration::from_secs(6));
                kill(pid, Signal::SIGCONT).unwrap();
                assert_eq!(asked.join().unwrap(), 200);
            });
            assert_eq!(rome.probe("/healthz"), 200);
        }
    });
}

#[test]
fn idle_lane_is_healthy_without_a_peer() {
    in_two_hosts(|rome, _| {
        let client = rome.start();
        rome.until("a lane", || client.lane().is_some());
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(6) {
            assert_eq!(rome.probe("/healthz"), 200);
            std::thread::sleep(Duration::from_millis(200));
        }
    });
}

/// Its image, or its node, lacks `/dev/net/tun`.
#[test]
fn gateway_without_a_tun_is_never_ready() {
    const HIDE: &str = "mount --bind /dev/null /dev/net/tun && exec \"$@\"";
    in_two_hosts(|rome, milan| {
        let _gateway = rome.start_under(&["unshare", "--mount", "sh", "-c", HIDE, "sh"]);
        rome.until("the problem", || !rome.status().problems.is_empty());
        assert_eq!(rome.probe("/readyz"), 503);
        assert!(rome.http("/readyz").contains("the dataplane is not up"));
        let _healthy = milan.start();
        milan.until("a dataplane", || milan.is_ready());
        assert_eq!(rome.probe("/readyz"), 503, "{:?}", rome.status());
    });
}

#[test]
fn gateway_is_ready_once_it_has_a_lane() {
    in_two_hosts(|rome, _| {
        let gateway = rome.start();
        rome.until("readiness", || rome.is_ready());
        assert!(gateway.lane().is_some(), "ready without a lane");
    });
}

/// Its Service would cut off a tunnel that works.
#[test]
fn restarted_gateway_is_ready_on_the_last_good_config() {
    in_two_hosts(|rome, _| {
        let gateway = rome.start();
        rome.until("readiness", || rome.is_ready());
        drop(gateway);
        put_bad(rome);
        let gateway = rome.start();
        rome.until("readiness", || rome.is_ready());
        assert!(gateway.lane().is_some(), "ready without a lane");
    });
}

#[test]
fn gateway_on_a_bad_config_alone_is_not_ready() {
    in_two_hosts(|rome, _| {
        put_bad(rome);
        let _gateway = rome.start();
        rome.until("the problem", || !rome.status().problems.is_empty());
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(2) {
            let answer = rome.http("/readyz");
            assert!(answer.contains(" 503 ") && answer.contains("not on the newest"), "{answer}");
            std::thread::sleep(Duration::from_millis(50));
        }
        at_once(rome.store.put(&rome.config.clone().into())).unwrap();
        rome.until("readiness", || rome.is_ready());
    });
}

fn put_bad(side: &Side) {
    let mut bad = side.config.clone();
    bad.spec.remaps[0].local = "no prefix".to_owned();
    at_once(side.store.put(&bad.into())).unwrap();
}
