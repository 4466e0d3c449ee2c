//! `weft down`, with stand-ins for the fabric's processes.

use std::fs;
use std::time::{Duration, Instant};

use fabric_api::fabric::{NodeConfig, NodeConfigStatus};
use fabric_store::{Kind, ObjectRef};

use crate::host::{ALL, Host, at_once, eventually, is_alive, kill, running, stderr};

#[test]
fn purge_finds_the_only_state_directory() {
    let host = Host::new();
    let printed =
        host.alone("mkdir -p /var/lib/weft/rome/notes; $weft down --purge; ls /var/lib/weft");
    assert!(printed.ends_with("removed /var/lib/weft/rome\n"), "{printed}");
    let printed = host.alone(
        "mkdir -p /var/lib/weft/rome/notes /var/lib/weft/milan/notes; $weft down --purge; ls /var/lib/weft",
    );
    assert!(printed.ends_with("with --cluster ID or --state-dir DIR\nmilan\nrome\n"), "{printed}");
}

#[test]
fn purge_of_a_named_state_spares_other_fabrics() {
    let host = Host::new();
    let printed = host.alone(
        "mkdir -p /run/weft/rome/pids /var/lib/weft/rome/notes /var/lib/weft/milan/notes
        echo '{\"clusterId\": \"rome\", \"node\": \"n1\", \"stateDir\": \"/var/lib/weft/rome\"}' >/run/weft/rome/weft.json
        $weft down --state-dir /var/lib/weft/milan; echo \"code $?\"
        $weft down --purge --state-dir /var/lib/weft/milan; echo \"code $?\"; ls /run/weft /var/lib/weft",
    );
    assert!(printed.contains("nothing was taken away; expected that one"), "{printed}");
    let rest = "code 1\nweft: removed /var/lib/weft/milan\ncode 0\n/run/weft:\nrome\n\n/var/lib/weft:\nrome\n";
    assert!(printed.ends_with(rest), "{printed}");
}

#[test]
fn down_takes_everything_away_and_keeps_the_state() {
    let (host, mut up) = running();
    let pids = ALL.map(|process| host.pid(process));
    let down = host.weft(&["down"]);
    assert!(down.status.success(), "{}", stderr(&down));
    assert!(up.ended_well());
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
    assert!(!host.path("run").exists());
    assert!(host.path("bin/cleaned").exists(), "route-agent cleanup did not run");
    assert!(host.path("state").exists());
    let kept = stderr(&down);
    assert!(kept.contains("kept") && kept.contains("Secrets"), "{kept}");
    let purge = format!("`weft down --purge --state-dir {}`", host.path("state").display());
    assert!(kept.contains(&purge), "{kept}");
    // A stand-in that is killed leaves its `sleep` for a moment.
    eventually("nothing of it runs", || {
        let again = host.weft(&["down"]);
        assert!(again.status.success(), "{again:?}");
        stderr(&again).contains("nothing runs")
    });
    assert!(host.weft(&["down", "--purge"]).status.success());
    assert!(!host.path("state").exists());
    let nothing = host.weft(&["down", "--purge"]);
    assert_eq!(nothing.status.code(), Some(1));
    for path in ["run", "state"].map(|name| host.path(name).display().to_string()) {
        assert!(stderr(&nothing).contains(&path), "{}", stderr(&nothing));
    }
}

#[test]
fn state_is_not_purged_while_something_sends() {
    let (host, _up) = running();
    let script = "#!/bin/sh\n[ \"$2\" != --refuse ] || echo 10.200.1.5\n";
    host.stand_in("route-agent", script);
    let purge = host.weft(&["down", "--purge"]);
    assert_eq!(purge.status.code(), Some(1));
    assert!(stderr(&purge).contains("nothing was purged, or another peer"), "{}", stderr(&purge));
    assert!(host.path("state").exists() && !host.path("run").exists());
    let again = host.weft(&["down", "--purge"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(stderr(&again).contains("nothing was purged, or another peer"), "{}", stderr(&again));
    assert!(host.path("state").exists());
    assert!(host.weft(&["down", "--now", "--purge"]).status.success());
    assert!(!host.path("state").exists());
}

#[test]
fn down_works_after_everything_was_killed() {
    let (host, mut up) = running();
    up.kill();
    ALL.iter().for_each(|process| kill(host.pid(process), "-9"));
    let down = host.weft(&["down", "--purge"]);
    assert!(down.status.success(), "{}", stderr(&down));
    assert!(!host.path("run").exists() && !host.path("state").exists());
    assert!(host.path("bin/cleaned").exists());
}

#[test]
fn down_kills_process_without_pid_file() {
    let host = Host::new();
    host.init();
    host.stand_in(
        "route-agent",
        "#!/bin/sh
        [ \"$1\" = cleanup ] && exit 0
        trap '' TERM
        while :; do sleep 0.05; done\n",
    );
    let mut up = host.up(&[]);
    let agent = host.pid("route-agent-n1");
    up.kill();
    fs::remove_file(host.path("run/pids/route-agent-n1.pid")).unwrap();
    let down = host.weft(&["down"]);
    assert!(down.status.success(), "{}", stderr(&down));
    assert!(stderr(&down).contains(&format!("(pid {agent})")), "{}", stderr(&down));
    assert!(!is_alive(agent));
}

#[test]
fn processes_that_hang_share_one_grace() {
    let host = Host::new();
    host.init();
    let deaf = "#!/bin/sh
        [ \"$1\" = cleanup ] && exit 0
        trap '' TERM USR1
        while :; do sleep 0.05; done\n";
    for program in ["fabric-controller", "route-agent", "gateway"] {
        host.stand_in(program, deaf);
    }
    for name in ["one", "two", "three"] {
        host.publish(name);
    }
    let mut up = host.up(&[]);
    let all = [
        "fabric-controller",
        "route-agent-n1",
        "gateway-t-one",
        "gateway-t-two",
        "gateway-t-three",
    ];
    let pids = all.map(|process| host.pid(process));
    up.kill();
    let began = Instant::now();
    // Another host's agent, n2's, is waited for besides: --now does without.
    let down = host.weft(&["down", "--now"]);
    let took = began.elapsed();
    assert!(down.status.success(), "{}", stderr(&down));
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
    assert!(stderr(&down).matches("killed").count() >= pids.len(), "{}", stderr(&down));
    assert!(took < Duration::from_secs(8), "{took:?}: {}", stderr(&down));
}

#[test]
fn down_waits_for_the_agent_of_a_damaged_config() {
    let (host, mut up) = running();
    up.kill();
    let config = host.path("run/published/nodeconfigs/n2.yaml");
    fs::create_dir_all(config.parent().unwrap()).unwrap();
    fs::write(&config, "metadata: {name: n").unwrap();
    let mut down = host.background(&["down"]);
    // Its agent acknowledges.
    let reference = ObjectRef::new(Kind::NodeConfig, "", "n2");
    eventually("the agent of n2 is to take everything away", || {
        let Some(Ok(mut config)) =
            at_once(host.store().get(&reference)).unwrap().map(NodeConfig::try_from)
        else {
            return false;
        };
        let applied_generation = config.metadata.generation.unwrap_or_default();
        config.status = Some(NodeConfigStatus { applied_generation, ..Default::default() });
        config.spec.removed && at_once(host.store().put_status(&config.into())).unwrap()
    });
    assert!(down.ended_well(), "{}", host.messages());
    let messages = host.messages();
    assert!(messages.contains("waiting up to 10 s for n2 to take all away"), "{messages}");
    assert!(!messages.contains("no answer"), "{messages}");
}

#[test]
fn down_spares_another_mount_namespaces_fabric() {
    let host = Host::new();
    host.init();
    let mut up = host.up(&[]);
    host.pid("route-agent-n1");
    let mut other = host.elsewhere("exec sleep 60");
    up.kill();
    let down = host.weft(&["down"]);
    assert!(down.status.success(), "{}", stderr(&down));
    assert!(!stderr(&down).contains(&format!("(pid {})", other.id())), "{}", stderr(&down));
    assert!(other.try_wait().unwrap().is_none(), "it was stopped");
    fs::remove_dir_all(host.path("run")).ok();
    let down = host.weft(&["down"]);
    assert!(down.status.success(), "{}", stderr(&down));
    assert!(other.try_wait().unwrap().is_none(), "it was stopped once the directory was gone");
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn down_touches_no_directory_that_is_not_a_fabrics() {
    let host = Host::new();
    fs::create_dir(host.path("run")).unwrap();
    fs::write(host.path("run/precious"), "x").unwrap();
    let down = host.weft(&["down"]);
    assert_eq!(down.status.code(), Some(1));
    assert!(stderr(&down).contains("not a run directory of weft"), "{}", stderr(&down));
    host.init();
    let up = host.weft(&["up", "--manifests", host.path("manifests").to_str().unwrap()]);
    assert_eq!(up.status.code(), Some(1));
    assert!(stderr(&up).contains("it holds precious"), "{}", stderr(&up));
    assert!(host.path("run/precious").exists());
    fs::rename(host.path("run"), host.path("state")).unwrap();
    let state = host.path("state");
    let purge = host.weft(&["down", "--purge", "--state-dir", state.to_str().unwrap()]);
    assert_eq!(purge.status.code(), Some(1));
    assert!(stderr(&purge).contains("not a state directory of weft"), "{}", stderr(&purge));
    assert!(state.join("precious").exists());
}

#[test]
fn down_names_the_refusal_that_it_removes() {
    let host = Host::new();
    let file = host.path("state/refusal.nft");
    fs::create_dir(host.path("state")).unwrap();
    fs::write(&file, "").unwrap();
    host.run("nft add table inet weft_refused");
    let cleanup = format!("nft delete table inet weft_refused\nrm {}", file.display());
    host.stand_in("route-agent", &format!("#!/bin/sh\n{cleanup}\n"));
    let down = host.weft(&["down", "--now"]);
    assert!(down.status.success(), "{}", stderr(&down));
    let removed = "removed the nftables table `inet weft_refused`";
    assert!(stderr(&down).contains(removed), "{}", stderr(&down));
    let removed = format!("removed {}", file.display());
    assert!(stderr(&down).contains(&removed), "{}", stderr(&down));
    host.stand_in("route-agent", "#!/bin/sh\n");
    let again = host.weft(&["down", "--now"]);
    assert!(!stderr(&again).contains("removed"), "{}", stderr(&again));
}

#[test]
fn down_on_a_read_only_run_directory_does_the_rest() {
    let host = Host::new();
    host.init();
    let shown = host.alone(&format!(
        "$weft up --manifests {} >/dev/null 2>&1 &
        until [ -e /run/weft/rome/pids/route-agent-n1.pid ]; do sleep 0.05; done
        mount --bind /run /run; mount -o remount,bind,ro /run
        $weft down --now
        echo \"exit $?\"; pgrep -c route-agent",
        host.path("manifests").display()
    ));
    assert!(shown.contains("stopped route-agent-n1"), "{shown}");
    assert!(
        shown.contains("everything else was taken away: cannot remove /run/weft/rome"),
        "{shown}"
    );
    assert!(shown.ends_with("exit 1\n0\n"), "{shown}");
    assert!(host.path("bin/cleaned").exists(), "route-agent cleanup did not run");
}
