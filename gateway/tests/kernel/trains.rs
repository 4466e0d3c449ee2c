//! A path on which segmented sends vanish: the server's host drops whatever is longer than a
//! datagram, before it is cut.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fabric_api::networking::ConnectionValue;

use crate::side::{POD, SEEN_AS, Side, in_two_hosts};
use crate::world::run_in;

const PROBLEM: &str = "UDP segmentation is off on the path to the peer";

#[test]
fn vanishing_trains_switch_segmentation_off() {
    where_trains_vanish(|rome, milan, is_active| {
        run_in(&milan.netns, "ip address del 192.0.2.2/24 dev wire");
        run_in(&milan.netns, "ip address add 192.0.2.3/24 dev wire");
        rome.until("segmented sends on another path", is_active);
    });
}

#[test]
#[ignore = "a minute long: make soak"]
fn trains_are_tried_again_after_a_minute() {
    where_trains_vanish(|rome, milan, is_active| {
        run_in(&milan.netns, "nft delete table ip path");
        let since = Instant::now();
        rome.until_within(Duration::from_secs(70), "segmented sends", is_active);
        assert!(since.elapsed() > Duration::from_secs(50), "after {:?}", since.elapsed());
    });
}

/// Runs `then` once the gateway of the first side has noticed it; its large packets go on.
fn where_trains_vanish(then: impl Fn(&Side, &Side, &dyn Fn() -> bool) + Send + Sync) {
    in_two_hosts(|rome, milan| {
        let log = tempfile::NamedTempFile::new().unwrap();
        let script = format!("exec \"$@\" 2>>{}", log.path().display());
        let (_client, _server) = (rome.start_under(&["sh", "-c", &script, "sh"]), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        let ping = ["-q", "-s", "1250", "-i", "0.1", "-c", "1000", "-I", POD, SEEN_AS];
        let large = || Command::new("ping").args(ping).stdout(Stdio::null()).spawn();
        let mut large = rome.netns.run(large).unwrap().unwrap();
        let is_active = || rome.value("weft_gateway_gso_active") == 1;
        std::thread::sleep(Duration::from_secs(3));
        assert!(is_active(), "before anything vanishes");
        run_in(&milan.netns, "nft add table ip path");
        for rule in [
            "chain ip path in { type filter hook prerouting priority -400 ; }",
            "rule ip path in udp dport 30742 meta length > 2000 drop",
        ] {
            run_in(&milan.netns, &format!("nft add {rule}"));
        }
        let limit = Duration::from_secs(20);
        rome.until_within(limit, "the end of segmented sends", || !is_active());
        let is_said = || rome.status().problems.iter().any(|line| line.starts_with(PROBLEM));
        rome.until("the problem", is_said);
        let logged = std::fs::read_to_string(log.path()).unwrap();
        assert!(
            logged.lines().any(|line| line.contains("WARN") && line.contains(PROBLEM)),
            "{logged}"
        );
        assert_eq!(rome.connection().unwrap().value, ConnectionValue::Connected);
        then(rome, milan, &is_active);
        let _ = large.kill();
        large.wait().unwrap();
    });
}
