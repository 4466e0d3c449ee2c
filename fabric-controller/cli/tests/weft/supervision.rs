//! `weft up`, `weft agent` and `weft down` with real child processes that stand in for the fabric's.

use std::fs;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use crate::host::{ALL, Host, at_once, eventually, is_alive, kill, running, stderr, stdout};

#[test]
fn a_dead_process_is_back_at_once() {
    let (host, _up) = running();
    let before = host.pid("gateway-t-client");
    kill(before, "-9");
    let died = Instant::now();
    eventually("another gateway runs", || host.pid("gateway-t-client") != before);
    assert!(died.elapsed() < Duration::from_secs(2), "{:?}", died.elapsed());
    eventually("it is said", || host.messages().contains("gateway-t-client ended (signal: 9"));
}

#[test]
fn crashing_process_backs_off_and_logs_its_output() {
    let host = Host::new();
    host.init();
    host.stand_in("ipam", "#!/bin/sh\necho 'pool is empty'\nexit 7\n");
    let _up = host.up(&[]);
    eventually("three deaths are reported", || host.messages().matches("ipam ended").count() >= 3);
    let messages = host.messages();
    assert!(messages.contains("exit status: 7"), "{messages}");
    assert!(messages.contains("its last words: pool is empty"), "{messages}");
    assert!(messages.contains("starting it again in "), "{messages}");
}

#[test]
fn a_gateway_comes_and_goes_with_its_config() {
    let (host, _up) = running();
    let other = host.pid("gateway-t-client");
    host.publish("second");
    let second = host.pid("gateway-t-second");
    host.unpublish("second");
    let pid_file = host.path("run/pids/gateway-t-second.pid");
    eventually("the second gateway is gone", || !is_alive(second) && !pid_file.exists());
    assert!(is_alive(other), "the other gateway was disturbed");
}

#[test]
fn sigterm_keeps_dataplane_running() {
    let (host, mut up) = running();
    let [ipam, controller, agent, gateway] = ALL.map(|process| host.pid(process));
    let line = fs::read(format!("/proc/{gateway}/cmdline")).unwrap();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    assert!(line.contains("--namespace t --name client --standalone --http unix:"), "{line}");
    kill(up.pid(), "-TERM");
    assert!(up.ended_well());
    assert!(!is_alive(ipam) && !is_alive(controller));
    assert!(is_alive(agent) && is_alive(gateway));
    let messages = host.messages();
    assert!(messages.contains("gateway-t-client, route-agent-n1 carry on"), "{messages}");
    assert!(messages.contains("weft down"), "{messages}");
}

/// n1 got another address, and n2's, which its Node still has, came to this host. Later no Node has an address of it.
#[test]
fn host_stays_its_node_when_addresses_change() {
    let (host, mut up) = running();
    host.run("ip addr add 192.0.2.12/32 dev lo; ip addr del 192.0.2.11/32 dev lo");
    up.kill();
    let mut up = host.up(&[]);
    eventually("it says which node it is", || host.messages().contains("cluster rome, node n1, "));
    up.kill();
    host.run("ip addr add 192.0.2.13/32 dev lo; ip addr del 192.0.2.12/32 dev lo");
    let down = host.weft(&["down", "--now"]);
    assert!(down.status.success(), "{}", stderr(&down));
    let _up = host.up(&[]);
    eventually("it says which node it is", || host.messages().contains("cluster rome, node n1, "));
}

#[test]
fn emptied_run_directory_is_made_again() {
    let (host, up) = running();
    let before = ALL.map(|process| host.pid(process));
    let run = host.path("run");
    let empty = format!("rm -rf {}/*", run.display());
    assert!(std::process::Command::new("sh").args(["-c", &empty]).status().unwrap().success());
    eventually("what ran there has ended", || !before.iter().any(|pid| is_alive(*pid)));
    // A controller would publish that again.
    eventually("the supervisor has begun anew", || run.join("weft.json").exists());
    host.publish("client");
    let after = ALL.map(|process| host.pid(process));
    assert!(after.iter().all(|pid| is_alive(*pid) && !before.contains(pid)), "{after:?}");
    let second = host.weft(&["up", "--manifests", host.path("manifests").to_str().unwrap()]);
    let held = format!("weft up (pid {}) is at work", up.pid());
    assert!(stderr(&second).contains(&held), "it is the same process: {}", stderr(&second));
}

#[test]
fn damaged_record_is_written_again() {
    let (host, mut up) = running();
    let path = host.path("run/weft.json");
    let before = fs::read(&path).unwrap();
    let pids = ALL.map(|process| host.pid(process));
    for damaged in [&b"\xff\xfe garbage"[..], b""] {
        fs::write(&path, damaged).unwrap();
        eventually("as it was", || fs::read(&path).unwrap() == before);
    }
    assert_eq!(ALL.map(|process| host.pid(process)), pids, "nothing is restarted for it");
    up.kill();
    fs::write(&path, "garbage").unwrap();
    let _up = host.up(&[]);
    eventually("as it was", || fs::read(&path).unwrap() == before);
}

#[test]
fn removed_or_replaced_files_are_written_again() {
    let (host, up) = running();
    let pids = ALL.map(|process| host.pid(process));
    let held = format!("weft up (pid {}) is at work", up.pid());
    for file in ["weft.lock", "weft.json"].map(|name| host.path(&format!("run/{name}"))) {
        let before = fs::read_to_string(&file).unwrap();
        let other = before.replace("n1", "n2").replace(&up.pid().to_string(), "1");
        for text in [None, Some(other)] {
            fs::remove_file(&file).unwrap();
            text.into_iter().for_each(|text| fs::write(&file, text).unwrap());
            let removed = Instant::now();
            eventually("as it was", || fs::read_to_string(&file).is_ok_and(|now| now == before));
            assert!(removed.elapsed() < Duration::from_secs(3), "{:?}", removed.elapsed());
            let second =
                host.weft(&["up", "--manifests", host.path("manifests").to_str().unwrap()]);
            assert!(stderr(&second).contains(&held), "{}", stderr(&second));
        }
    }
    assert_eq!(ALL.map(|process| host.pid(process)), pids, "nothing is restarted for it");
}

#[test]
fn damaged_pid_file_is_written_again() {
    let (host, _up) = running();
    let before = ALL.map(|process| host.pid(process));
    for process in ALL {
        let path = host.path(&format!("run/pids/{process}.pid"));
        let text = fs::read(&path).unwrap();
        fs::write(&path, "garbage").unwrap();
        eventually("as it was", || fs::read(&path).is_ok_and(|now| now == text));
        fs::remove_file(&path).unwrap();
        eventually("there again", || fs::read(&path).is_ok_and(|now| now == text));
    }
    assert_eq!(ALL.map(|process| host.pid(process)), before, "nothing is restarted for it");
}

#[test]
fn a_killed_supervisors_processes_are_taken_over() {
    let (host, mut up) = running();
    let before = ALL.map(|process| host.pid(process));
    up.kill();
    host.publish("late");
    let _up = host.up(&[]);
    host.pid("gateway-t-late");
    assert_eq!(ALL.map(|process| host.pid(process)), before);
    assert!(host.messages().contains("took over gateway-t-client"), "{}", host.messages());
    // They are no children of the new one, which sees them die all the same.
    kill(before[3], "-9");
    eventually("another gateway runs", || host.pid("gateway-t-client") != before[3]);
}

#[test]
fn new_options_restart_all_but_gateways() {
    let (host, mut up) = running();
    let [ipam, _, _, gateway] = ALL.map(|process| host.pid(process));
    up.kill();
    let _up = host.up(&["--log-level", "debug", "--pools", "10.0.0.0/8"]);
    eventually("ipam runs with the new options", || host.pid("ipam") != ipam);
    let line = fs::read(format!("/proc/{}/cmdline", host.pid("ipam"))).unwrap();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    assert!(line.contains("--pools 10.0.0.0/8") && line.contains("--log-level debug"), "{line}");
    eventually("the gateway is taken over", || host.messages().contains("took over gateway"));
    assert_eq!(host.pid("gateway-t-client"), gateway);
}

#[test]
fn gateway_without_config_is_stopped_at_start() {
    let (host, mut up) = running();
    let gateway = host.pid("gateway-t-client");
    up.kill();
    host.unpublish("client");
    let _up = host.up(&[]);
    eventually("the gateway is gone", || !is_alive(gateway));
    assert!(is_alive(host.pid("route-agent-n1")));
}

#[test]
fn second_supervisor_names_pid_of_first() {
    let (host, up) = running();
    let second = host.weft(&["up", "--manifests", host.path("manifests").to_str().unwrap()]);
    assert_eq!(second.status.code(), Some(1));
    let held = format!("weft up (pid {}) is at work", up.pid());
    assert!(stderr(&second).contains(&held), "{}", stderr(&second));
}

#[test]
fn second_fabric_of_a_host_is_refused() {
    let (host, _up) = running();
    let manifests = host.path("manifests");
    let other = host.path("other");
    let run_dir = ["--run-dir", other.to_str().unwrap()];
    let up = ["up", "--manifests", manifests.to_str().unwrap()];
    let agent = ["agent", "--node", "n2", "--published", other.to_str().unwrap()];
    for command in [&up[..], &agent[..]] {
        let second = host.weft(&[command, &run_dir[..]].concat());
        assert_eq!(second.status.code(), Some(1), "{}", stderr(&second));
        let expected = format!("of run directory {}", host.path("run").display());
        assert!(stderr(&second).contains(&expected), "{}", stderr(&second));
    }
}

#[test]
fn directories_of_another_cluster_are_refused() {
    let (host, mut up) = running();
    let manifests = host.path("manifests");
    let file = manifests.join("cluster.yaml");
    let text = fs::read_to_string(&file).unwrap();
    let refused = |option: &str| {
        fs::write(&file, text.replace("rome", "milan")).unwrap();
        let other = host.weft(&["up", "--manifests", manifests.to_str().unwrap()]);
        assert_eq!(other.status.code(), Some(1), "{}", stderr(&other));
        fs::write(&file, &text).unwrap();
        let said = stderr(&other);
        let expected = "is of cluster rome, and the manifests are of milan";
        assert!(said.contains(expected) && said.contains(option), "{said}");
    };
    up.kill();
    refused("--run-dir");
    assert!(host.weft(&["down"]).status.success());
    refused("--state-dir");
    assert!(!host.path("run").exists());
}

#[test]
fn state_directory_has_one_supervisor() {
    let (host, _up) = running();
    let root = host.root.display();
    let said = host.run(&format!(
        "unshare --net sh -c 'sysctl -qw net.ipv4.ip_forward=1 && WEFT_RUN_DIR={root}/other \
         WEFT_STATE_DIR={root}/state {root}/bin/weft up --manifests {root}/manifests --node n1' 2>&1"
    ));
    let expected = format!("another `weft up` keeps its prefixes and keys in {root}/state already");
    assert!(said.contains(&expected), "{said}");
    assert!(!host.path("other").exists());
}

#[test]
fn refused_fabric_leaves_no_run_directory() {
    let (host, _up) = running();
    let manifests = host.path("manifests");
    let other = host.path("other");
    let run_dir = ["--run-dir", other.to_str().unwrap()];
    let up = ["up", "--manifests", manifests.to_str().unwrap()];
    let agent = ["agent", "--node", "n2", "--published", manifests.to_str().unwrap()];
    for command in [&up[..], &agent[..]] {
        let second = host.weft(&[command, &run_dir[..]].concat());
        assert!(stderr(&second).contains("another fabric runs"), "{}", stderr(&second));
        assert!(!other.exists(), "{command:?} made a run directory");
    }
}

#[test]
fn run_directory_without_processes_does_not_count() {
    let host = Host::new();
    host.init();
    let manifests = host.path("manifests");
    let printed = host.alone(&format!(
        "mkdir -p /run/weft/zz/pids /run/weft/zz/log
        $weft up --manifests {} >/dev/null 2>&1 &
        until [ -e /run/weft/rome/pids/route-agent-n1.pid ]; do sleep 0.1; done
        $weft status
        $weft down --cluster zz
        ls /run/weft
        ls {}",
        manifests.display(),
        host.path("bin").display()
    ));
    assert!(printed.contains("cluster rome, node n1"), "{printed}");
    assert!(printed.contains("removed /run/weft/zz"), "{printed}");
    assert!(printed.contains("\nrome\n"), "the other fabric is gone: {printed}");
    assert!(!printed.contains("cleaned"), "the other fabric's state was taken away: {printed}");
}

#[test]
fn dead_or_hung_gateway_is_never_connected() {
    let host = Host::new();
    host.init();
    host.publish("client");
    host.claim_connected("client");
    // The stand-in serves nothing, so it counts as silent after some questions.
    let _up = host.up(&[]);
    eventually("it has begun", || host.path("run/weft.json").exists());
    let status = host.weft(&["status", "-o", "json"]);
    assert_eq!(status.status.code(), Some(3), "{}", stdout(&status));
    let answer: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let states: Vec<_> = answer["peerings"].as_array().unwrap().iter().collect();
    assert_eq!(states.len(), 1, "{answer}");
    assert_ne!(states[0]["state"], "Connected", "{answer}");
    // No process of it ran before this one.
    eventually("the Connection is an Error", || host.connection("client") == "Error");
    eventually("it is silent", || host.messages().contains("does not answer"));

    // One that writes is alive: its status stands until as many more health checks are unanswered.
    host.claim_connected("client");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(host.connection("client"), "Connected");
    eventually("the Connection is an Error again", || host.connection("client") == "Error");

    host.claim_connected("client");
    host.stand_in("gateway", "#!/bin/sh\nexit 1\n");
    kill(host.pid("gateway-t-client"), "-9");
    eventually("the Connection is an Error again", || host.connection("client") == "Error");
    let status = host.weft(&["status"]);
    assert_eq!(status.status.code(), Some(3), "{}", stdout(&status));
}

#[test]
fn an_agent_runs_on_a_published_directory() {
    let host = Host::new();
    fs::create_dir(host.path("published")).unwrap();
    let published = host.path("published");
    let mut agent =
        host.background(&["agent", "--node=n2", "--published", published.to_str().unwrap()]);
    let pid = host.pid("route-agent-n2");
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    assert!(line.contains(&format!("run --published {}", published.display())), "{line}");
    eventually("it says that it runs", || host.messages().contains("running"));
    kill(agent.pid(), "-INT");
    assert!(agent.ended_well());
    assert!(is_alive(pid));
    assert!(host.weft(&["down"]).status.success());
    assert!(!is_alive(pid));
}

/// Its run directory does not have the cluster's name. A state directory is left of an earlier `weft up`.
#[test]
fn agent_is_found_by_its_cluster() {
    let host = Host::new();
    let config = "{apiVersion: fabric.weft.dev/v1alpha1, kind: NodeConfig, metadata: {name: n2}, spec: {clusterId: rome, \
                  underlay: [], localPods: [], podCidrs: [], external: [], peerings: [], vxlanSources: []}}";
    let printed = host.alone(&format!(
        "mkdir -p /run/published/nodeconfigs /var/lib/weft/rome/last-good /var/lib/weft/agent-n2
        echo '{config}' >/run/published/nodeconfigs/n2.yaml
        $weft agent --node n2 --published /run/published >/dev/null 2>&1 &
        for i in $(seq 100); do [ -e /run/weft/agent/pids/route-agent-n2.pid ] && break; sleep 0.1; done
        $weft down --cluster nope; echo \"code $?\"
        $weft down --cluster rome --purge; echo \"code $?\"; ls /run/weft /var/lib/weft"
    ));
    let nope = "nothing runs here: no fabric in /run/weft/nope, but there is /run/weft/agent (cluster rome)\ncode 0\n";
    assert!(printed.contains(nope), "{printed}");
    for part in [
        "removed /run/weft/agent\n",
        "removed /var/lib/weft/agent-n2\n",
        "kept /var/lib/weft/rome (",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    assert!(printed.ends_with("/var/lib/weft:\nrome\n"), "{printed}");
}

#[test]
fn agent_saves_its_refusal_by_default() {
    let host = Host::new();
    // The route-agent saves the refusal with its first config.
    host.stand_in(
        "route-agent",
        "#!/bin/sh
        [ \"$1\" = cleanup ] && exit 0
        while [ $# -gt 0 ]; do
            [ \"$1\" = --refusal-file ] && mkdir -p \"$(dirname \"$2\")\" && touch \"$2\"
            shift
        done
        exec sleep 60\n",
    );
    let printed = host.alone(
        "mkdir /run/published; $weft agent --node n2 --published /run/published &
        for i in $(seq 100); do [ -e /run/weft/agent/pids/route-agent-n2.pid ] && break; sleep 0.1; done
        sleep 0.5; find /var/lib/weft; $weft down; echo down; find /var/lib/weft",
    );
    assert!(printed.contains("\n/var/lib/weft/agent-n2/refusal.nft\n"), "{printed}");
    assert!(printed.ends_with("down\n/var/lib/weft\n"), "its directory stays: {printed}");
}

#[test]
fn waiting_agent_refuses_what_was_saved() {
    let host = Host::new();
    let printed = host.alone(
        "mkdir -p /var/lib/weft/agent-n2
        echo 'table inet weft_refused { chain here { drop; }; }' >/var/lib/weft/agent-n2/refusal.nft
        $weft agent --node n2 --published /run/published &
        for i in $(seq 100); do nft list table inet weft_refused 2>/dev/null && break; sleep 0.1; done
        sleep 0.5",
    );
    assert!(printed.contains("chain here"), "{printed}");
    assert!(printed.contains("packets to peers are refused until then"), "{printed}");
}

#[test]
fn agent_waits_for_its_published_directory() {
    let host = Host::new();
    let published = host.path("published");
    let _agent =
        host.background(&["agent", "--node=n2", "--published", published.to_str().unwrap()]);
    let waits = format!("waiting for the published directory {}", published.display());
    eventually("it says that it waits", || host.messages().contains(&waits));
    assert!(!host.path("run/pids/route-agent-n2.pid").exists());
    fs::create_dir(&published).unwrap();
    assert!(is_alive(host.pid("route-agent-n2")));
}

#[test]
fn ending_keys_elsewhere_names_the_kubectl_command() {
    let host = Host::new();
    let done = host.weft(&["keys", "--peer=milan", "--end-superseded"]);
    let command = "kubectl delete pod --all-namespaces --selector \
                   networking.liqo.io/component=gateway,liqo.io/remote-cluster-id=milan";
    assert!(stderr(&done).contains(command), "{}", stderr(&done));
}

#[test]
fn ended_keys_restart_only_the_peers_gateway() {
    let (host, _up) = running();
    let (old, agent) = (host.pid("gateway-t-client"), host.pid("route-agent-n1"));
    let nobody = host.weft(&["keys", "--peer=nobody", "--end-superseded"]);
    assert!(stderr(&nobody).contains("no gateway of a peering with nobody"), "{nobody:?}");
    assert!(is_alive(old));
    let done = host.weft(&["keys", "--peer=milan", "--end-superseded"]);
    assert!(done.status.success(), "{done:?}");
    assert!(!is_alive(old) && is_alive(host.pid("gateway-t-client")));
    assert_eq!(host.pid("route-agent-n1"), agent);
}

#[test]
fn many_gateways_start_a_few_at_a_time() {
    const ALL: usize = 30;
    let host = Host::new();
    host.init();
    // None ever answers, so that each counts as starting.
    for number in 0..ALL {
        host.publish(&format!("g{number}"));
    }
    let _up = host.up(&[]);
    eventually("weft up says how far it is", || {
        host.messages().contains(&format!("of {ALL} gateways are started, "))
    });
    let cores = std::thread::available_parallelism().unwrap().get();
    let pids = fs::read_dir(host.path("run/pids")).unwrap();
    let gateways = pids.filter(|entry| {
        entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("gateway-")
    });
    let started = gateways.count();
    assert!(started > 0 && started <= 2 * cores && started < ALL, "{started} on {cores} cores");
}

#[test]
fn up_reports_state_of_peerings() {
    let (host, _up) = running();
    host.claim_connected("client");
    eventually("the state is reported", || {
        host.messages().contains("peering with milan: Connected")
    });
    assert!(host.messages().contains("starting gateway-t-client"), "{}", host.messages());
    let broken = host.path("manifests/broken.yaml");
    fs::write(&broken, "apiVersion: v1\nkind: Secret\nmetadata: [\n").unwrap();
    let problem = fabric_store::Problem {
        source: "broken.yaml:3".to_owned(),
        object: None,
        field: None,
        message: "not YAML".to_owned(),
    };
    at_once(host.store().put_problems(&[problem])).unwrap();
    eventually("the problem is reported", || {
        host.messages().contains("problem: broken.yaml:3: not YAML")
    });
    let status = stdout(&host.weft(&["status"]));
    assert!(status.contains("problems:") && status.contains("broken.yaml:3"), "{status}");
    at_once(host.store().put_problems(&[])).unwrap();
    eventually("its end is reported", || host.messages().contains("no problem with the manifests"));
}

#[test]
fn logs_are_shown_by_process() {
    let (host, _up) = running();
    let logs = stdout(&host.weft(&["logs"]));
    assert!(logs.contains("ipam: ipam says hello\n"), "{logs}");
    let logs = stdout(&host.weft(&["logs", "gateway"]));
    assert_eq!(logs, "gateway-t-client: gateway says hello\n");
    let wrong = host.weft(&["logs", "nobody"]);
    assert!(
        stderr(&wrong).contains("expected one of fabric-controller, gateway-t-client"),
        "{wrong:?}"
    );
}

#[test]
fn metrics_of_all_gateways_come_from_one_place() {
    let (host, mut up) = running();
    kill(up.pid(), "-TERM");
    assert!(up.ended_well());
    let server = UnixListener::bind(host.path("run/http/gateway-t-client.sock")).unwrap();
    std::thread::spawn(move || {
        for stream in server.incoming().flatten() {
            let mut stream = stream;
            drop(std::io::Read::read(&mut stream, &mut [0; 256]));
            let answer = b"HTTP/1.0 200 OK\r\n\r\n# TYPE liqo_peer_is_connected gauge\n\
                liqo_peer_is_connected{cluster_id=\"milan\"} 1\n# EOF\n";
            drop(std::io::Write::write_all(&mut stream, answer));
        }
    });
    let _up = host.up(&["--metrics", "192.0.2.11:9100"]);
    let mut text = String::new();
    eventually("metrics are served", || {
        text = host.fetch("192.0.2.11", 9100);
        text.contains("weft_process_up{process=\"gateway-t-client\"} 1")
    });
    let sample = "liqo_peer_is_connected{gateway=\"t/client\",cluster_id=\"milan\"} 1";
    assert!(text.contains(sample), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
}
