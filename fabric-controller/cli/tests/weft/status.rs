//! `weft status` of a host.

use std::os::unix::net::UnixListener;

use crate::host::{Host, kill, running, stdout};

/// Has the gateway be connected, and answer.
fn connect(host: &Host) {
    host.publish_node();
    host.claim_connected("client");
    let socket = host.path("run/http/gateway-t-client.sock");
    let server = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in server.incoming().flatten() {
            let mut stream = stream;
            drop(std::io::Read::read(&mut stream, &mut [0; 256]));
            drop(std::io::Write::write_all(&mut stream, b"HTTP/1.0 200 OK\r\n\r\nok\n"));
        }
    });
}

#[test]
fn status_shows_down_and_connected_gateways() {
    let (host, mut up) = running();
    connect(&host);
    let status = host.weft(&["status"]);
    let text = stdout(&status);
    assert_eq!(status.status.code(), Some(0), "{text}");
    assert!(
        text.contains("Connected") && text.contains("10.200.0.0/16 -> 10.201.0.0/16"),
        "{text}"
    );

    up.kill();
    kill(host.pid("gateway-t-client"), "-9");
    let status = host.weft(&["status"]);
    let text = stdout(&status);
    assert_eq!(status.status.code(), Some(3), "{text}");
    assert!(text.contains("Down") && !text.contains("Connected"), "{text}");
    assert!(text.contains("no `weft up` or `weft agent` runs here"), "{text}");
    assert!(text.contains("gateway-t-client does not run"), "{text}");
}

#[test]
fn unsupervised_fabric_is_named_with_a_remedy() {
    let (host, mut up) = running();
    connect(&host);
    up.kill();
    let status = host.weft(&["status"]);
    let text = stdout(&status);
    let [manifests, run, state] = ["manifests", "run", "state"].map(|name| host.path(name));
    let remedy = format!(
        "weft up --manifests {} --run-dir {} --state-dir {}`",
        manifests.display(),
        run.display(),
        state.display()
    );
    assert!(text.contains("what dies stays dead; start it again"), "{text}");
    assert!(text.contains(&remedy), "{text}");
    assert_eq!(status.status.code(), Some(0), "every peering is Connected: {text}");
    let help = stdout(&host.weft(&["status", "--help"]));
    assert!(help.contains("0 every peering is Connected, even if no `weft up` runs"), "{help}");
}

#[test]
fn hung_supervisor_is_named_with_a_remedy() {
    let (host, up) = running();
    let problem = format!("`weft up` (pid {0}) does not answer", up.pid());
    let status = stdout(&host.weft(&["status"]));
    assert!(!status.contains(&problem), "{status}");
    kill(up.pid(), "-STOP");
    let status = stdout(&host.weft(&["status"]));
    assert!(status.contains(&problem), "{status}");
    assert!(status.contains(&format!("end it (`kill -9 {}`) and start it again", up.pid())));
    kill(up.pid(), "-CONT");
    let status = stdout(&host.weft(&["status"]));
    assert!(!status.contains(&problem), "{status}");
}

#[test]
fn full_run_directory_is_named_until_there_is_room() {
    let host = Host::new();
    host.init();
    let printed = host.alone(&format!(
        "mkdir /run/weft && mount -t tmpfs -o size=1m none /run/weft
        $weft up --manifests {} >/dev/null 2>&1 &
        until [ -e /run/weft/rome/weft.json ]; do sleep 0.1; done
        cat /dev/zero >/run/weft/filler 2>/dev/null
        echo full:; $weft status; truncate -s -64K /run/weft/filler; echo free:; $weft status
        $weft down >/dev/null",
        host.path("manifests").display()
    ));
    let (full, free) = printed.split_once("free:").unwrap();
    let problem = "the file system of /run/weft/rome is full: weft cannot write there";
    assert!(full.contains(problem) && full.contains("df -h /run/weft/rome"), "{printed}");
    assert!(!free.contains("is full"), "{printed}");
}

#[test]
fn read_only_run_directory_is_named_until_writable() {
    let host = Host::new();
    host.init();
    let printed = host.alone(&format!(
        "mkdir /run/weft && mount -t tmpfs none /run/weft
        $weft up --manifests {} >/dev/null 2>&1 &
        until [ -e /run/weft/rome/weft.json ]; do sleep 0.1; done
        # Open logs keep a mount from being made read-only, but not another one over it.
        mount --bind /run/weft /run/weft && mount -o remount,ro,bind /run/weft
        echo fixed:; $weft status; umount /run/weft; echo writable:; $weft status
        $weft down >/dev/null",
        host.path("manifests").display()
    ));
    let (fixed, writable) = printed.split_once("writable:").unwrap();
    let problem = "the file system of /run/weft/rome is read-only: changes have no effect";
    assert!(fixed.contains(problem) && fixed.contains("findmnt -T /run/weft/rome"), "{printed}");
    assert!(!writable.contains("is read-only"), "{printed}");
}

#[test]
fn empty_run_root_holds_no_fabric() {
    let host = Host::new();
    let printed = host.alone("mkdir /run/weft; $weft status; $weft down");
    assert!(printed.contains("no fabric runs here: none in /run/weft"), "{printed}");
    assert!(!printed.contains("no /run/weft"), "{printed}");
}
