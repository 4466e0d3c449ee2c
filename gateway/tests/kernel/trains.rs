//! A path on which segmented sends vanish: the server's host drops whatever is longer than a
//! datagram, before it is cut.

use std::process::{Command, Stdio};
use std::time::Duration;

use fabric_api::networking::ConnectionValue;

use crate::side::{POD, SEEN_AS, in_two_hosts};
use crate::world::run_in;

const PROBLEM: &str = "UDP segmentation is off on the path to the peer";

#[test]
fn vanishing_trains_switch_segmentation_off() {
    in_two_hosts(|rome, milan| {
        let log = tempfile::NamedTempFile::new().unwrap();
        let script = format!("exec \"$@\" 2>>{}", log.path().display());
        let (_client, _server) = (rome.start_under(&["sh", "-c", &script, "sh"]), milan.start());
        rome.wait_for(ConnectionValue::Connected);
        milan.wait_for(ConnectionValue::Connected);
        let ping = ["-q", "-s", "1250", "-i", "0.1", "-c", "300", "-I", POD, SEEN_AS];
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
        let _ = large.kill();
        large.wait().unwrap();
    });
}
