//! Metrics and probes: see `node` for the topology.

use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use fabric_api::fabric::{GatewayProbe, NodeConfigSpec};
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use crate::node::{PEER, World, config, connect, disconnected, eventually, sh};

/// An agent that serves HTTP, and has no config yet.
fn world() -> World {
    let mut world = World::new();
    let http = format!("--http=unix:{}", world.path("http.sock").display());
    world.start(&[&http]);
    world
}

/// Status line and body; empty if nobody listens.
fn ask(world: &World, path: &str) -> String {
    let mut answer = String::new();
    let Ok(mut stream) = UnixStream::connect(world.path("http.sock")) else { return answer };
    write!(stream, "GET {path} HTTP/1.0\r\nHost: x\r\n\r\n").unwrap();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn until(world: &World, path: &str, text: &str, patience: Duration) -> Duration {
    let began = Instant::now();
    loop {
        let answer = ask(world, path);
        if answer.contains(text) {
            return began.elapsed();
        }
        assert!(began.elapsed() < patience, "{path} never has {text:?}: {answer}");
        sleep(Duration::from_millis(100));
    }
}

const SOON: Duration = Duration::from_secs(10);

#[test]
fn agent_is_ready_once_its_config_is_applied() {
    let world = world();
    until(&world, "/readyz", "there is no NodeConfig", SOON);
    assert!(ask(&world, "/readyz").contains(" 503 "));
    world.reconfigure(config());
    until(&world, "/readyz", " 200 ", SOON);
    let metrics = ask(&world, "/metrics");
    let steps = metrics.lines().find(|line| line.starts_with("weft_agent_steps_total "));
    assert!(steps.is_some_and(|line| !line.ends_with(" 0")), "{metrics}");
    assert!(metrics.contains("weft_agent_failures_total 0\n"), "{metrics}");
}

#[test]
fn hung_agent_is_not_alive_until_it_goes_on() {
    let world = world();
    world.reconfigure(config());
    until(&world, "/healthz", " 200 ", SOON);
    let agent = Pid::from_raw(world.agent_pid().try_into().unwrap());
    // Its main thread stands still, all others go on.
    ptrace::seize(agent, ptrace::Options::empty()).unwrap();
    ptrace::interrupt(agent).unwrap();
    waitpid(agent, Some(WaitPidFlag::__WALL)).unwrap();
    let hung = until(&world, "/healthz", " 503 ", Duration::from_secs(60));
    assert!(hung > Duration::from_secs(20), "{hung:?} is no hang yet");
    ptrace::detach(agent, None).unwrap();
    until(&world, "/healthz", " 200 ", SOON);
}

#[test]
fn refused_packets_are_counted_by_reason() {
    let world = world();
    let to = SocketAddr::new(PEER.parse().unwrap(), 80);
    world.reconfigure(disconnected());
    (0..3).for_each(|_| drop(connect(&world.pod, to).unwrap_err()));
    world.reconfigure(NodeConfigSpec { peerings: vec![], ..config() });
    let counted = "weft_agent_refused_packets_total{reason=\"not_connected\"} 3\n";
    until(&world, "/metrics", counted, SOON);
    (0..2).for_each(|_| drop(connect(&world.pod, to).unwrap_err()));
    world.reconfigure(config());
    let counted = "weft_agent_refused_packets_total{reason=\"no_peering\"} 2\n";
    until(&world, "/metrics", counted, SOON);
}

/// The gateway sees both ways: the node's default route leads there, too.
#[test]
fn first_probe_leaves_by_the_overlay() {
    let mut world = World::new();
    sh(&world.node, "ip route add default via 192.0.2.7");
    sh(
        &world.gw,
        "nft -f - <<'END'
        table inet seen {
          counter clear { }
          counter wrapped { }
          chain in {
            type filter hook prerouting priority -300;
            iifname eth0 udp dport 12346 counter name clear
            iifname overlay4 udp dport 12346 counter name wrapped
          }
        }\nEND",
    );
    let mut probed = config();
    let gateway = probed.peerings[0].gateway.as_mut().unwrap();
    gateway.probe = Some(GatewayProbe { port: 12346, node: Some("n2".to_owned()) });
    world.configure(probed);
    world.start(&[]);
    let count = |name: &str| {
        let counter = sh(&world.gw, &format!("nft list counter inet seen {name}"));
        let count = counter.split("packets ").nth(1).and_then(|rest| rest.split(' ').next());
        count.and_then(|count| count.parse::<u32>().ok()).unwrap()
    };
    eventually("probes arrive by the overlay", SOON, || count("wrapped") > 0);
    assert_eq!(count("clear"), 0, "by the default route");
}
