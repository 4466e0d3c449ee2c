//! ```text
//!   pod --- rome --------- milan --- pod        whatever is wrong with rome's manifests, packets pass
//! ```

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use weft_tests::manifests::{Peering, join};
use weft_tests::traffic::udp_flow;
use weft_tests::{Cluster, ClusterSpec, MANIFESTS, STATE, wait_until};

use crate::scene::{
    ECHO, PORT, SOON, Scene, TIMEOUT, answers, first_pod, play, rome_and_milan, serve,
};

/// Position of a document among a client's.
const CONFIGURATION: usize = 1;
const PUBLIC_KEY: usize = 3;
const GATEWAY: usize = 4;

/// One slip in one document.
struct Slip {
    document: usize,
    /// Text that is replaced, and its replacement.
    edit: (&'static str, &'static str),
    /// The object, as `weft get` and messages name it; the latter without its namespace.
    object: (&'static str, &'static str),
    /// Field, what was found, what is expected.
    reported: [&'static str; 3],
}

fn slips() -> Vec<Slip> {
    let configuration = ("configuration", "milan");
    let key = ("publickey", "gw-publickey");
    let client = ("gatewayclient", "client");
    let slip = |document, edit, object, reported| Slip { document, edit, object, reported };
    let unlabelled = ("labels: {liqo.io/remote-cluster-id: milan}", "labels: {}");
    let label = "metadata.labels.liqo.io/remote-cluster-id";
    let whose = [label, "missing", "expected the peer's cluster ID"];
    let external = ("external: [10.70.0.0/16]", "external: [10.200.128.0/17]");
    vec![
        slip(
            GATEWAY,
            ("kind: GatewayClient", "kind: GatewayCleint"),
            ("", ""),
            ["kind", "GatewayCleint", "GatewayClient or PublicKey"],
        ),
        slip(CONFIGURATION, unlabelled, configuration, whose),
        slip(GATEWAY, unlabelled, client, whose),
        slip(
            PUBLIC_KEY,
            ("publicKey: ", "publicKey: c2hvcnQ= #"),
            key,
            ["spec.publicKey", "5 bytes long", "expected 32"],
        ),
        slip(
            PUBLIC_KEY,
            ("publicKey: ", "publicKey: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA= #"),
            key,
            ["spec.publicKey", "low order", "make a new pair"],
        ),
        slip(
            CONFIGURATION,
            ("pod: [10.200.0.0/16]", "pod: [10.200.0.7/16]"),
            configuration,
            ["spec.remote.cidr.pod[0]", "10.200.0.7/16 has host bits", "10.200.0.0/16"],
        ),
        slip(
            CONFIGURATION,
            external,
            configuration,
            ["spec.remote.cidr.external[0]", "10.200.128.0/17 overlaps", "expected prefixes apart"],
        ),
        slip(
            GATEWAY,
            ("port: 30742", "port: 0"),
            client,
            ["spec.endpoint.port", "found 0", "expected a port, 1 to 65535"],
        ),
        slip(
            GATEWAY,
            ("mtu: 1340", "mtu: 10"),
            client,
            ["spec.mtu", "found 10", "expected 576 to 65535"],
        ),
        slip(
            GATEWAY,
            ("mtu: 1340", "mtu: 1340\n  mtu: 1341"),
            client,
            ["spec.mtu", "found mtu twice in one object", "remove one of the two"],
        ),
        slip(
            GATEWAY,
            ("mtu: 1340", "mtu: high"),
            client,
            ["spec.mtu", "\"high\"", "expected a number"],
        ),
    ]
}

#[test]
fn bad_edit_of_running_peering_loses_nothing() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        let mut took = Vec::new();
        for slip in slips() {
            let mut documents = peering.client_documents();
            documents[slip.document] = slip.in_(&documents[slip.document]);
            took.extend(scene.reported("milan", &join(&documents), &peering, |rome| {
                slip.is_reported(rome, "milan.yaml", "liqo-tenant-milan")
            })?);
        }
        nine_of_ten_in_time(took)
    })
}

#[test]
fn bad_new_manifest_is_reported_within_a_second() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        let mut took = Vec::new();
        for slip in slips() {
            let document = slip.in_(&peering.client_documents()[slip.document]);
            let other = document.replace("milan", "turin");
            took.extend(scene.reported("new", &other, &peering, |rome| {
                let slip = Slip { object: (slip.object.0, turin(slip.object.1)), ..slip };
                slip.is_reported(rome, "new.yaml", "liqo-tenant-turin")
            })?);
        }
        nine_of_ten_in_time(took)
    })
}

/// A further peering, good but without anybody at the other end.
fn with_turin(rome: &Cluster) -> String {
    join(&Peering::new(&rome.spec, &ClusterSpec::new("turin", 3, 1), PORT).client_documents())
}

fn turin(name: &'static str) -> &'static str {
    if name == "milan" { "turin" } else { name }
}

#[test]
fn second_gateway_is_reported_and_first_runs_on() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        let second = peering.gateway_client().replace("name: client", "name: another");
        let mut took = Vec::new();
        for _ in 0..5 {
            took.extend(scene.reported("new", &second, &peering, |rome| {
                for (name, file) in [("client", "milan.yaml"), ("another", "new.yaml")] {
                    let object = format!("GatewayClient liqo-tenant-milan/{name}");
                    is_reported(rome, &[file, &object, "are for the same peer", "expected one"])?;
                    shows(rome, ["gatewayclient", name, "liqo-tenant-milan"], "expected one")?;
                }
                Ok(())
            })?);
        }
        ensure!(scene.cluster("rome").processes(0, "gateway").len() == 1, "two gateways run");
        nine_of_ten_in_time(took)
    })
}

#[test]
fn cut_or_huge_file_is_reported_and_spares_rest() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        let whole = join(&peering.client_documents());
        let mut ends = vec![0];
        for word in [
            "CLUSTER",
            "kind: Configuration",
            "pod: [10",
            "privateKey: A",
            "publicKey: ",
            "kind: PublicKey",
            "mtu: 13",
            "addresses:",
        ] {
            ends.extend(whole.find(word).map(|at| at + word.len()));
        }
        for end in ends {
            scene
                .reported("milan", &whole[..end], &peering, |rome| {
                    is_reported(rome, &["milan.yaml", "expected"])
                })
                .with_context(|| format!("cut behind {:?}", &whole[end.saturating_sub(30)..end]))?;
        }
        let long = whole + &"# x\n".repeat(2_500_000);
        let reported = ["milan.yaml", "bytes long", "expected at most 1048576"];
        scene.reported("milan", &long, &peering, |rome| is_reported(rome, &reported))?;
        Ok(())
    })
}

#[test]
fn garbage_is_reported_and_good_files_are_used() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let dir = rome.outside(MANIFESTS);
        scene.undisturbed(|| {
            fs::write(dir.join("g-bytes.yaml"), [0xff, 0xfe, 0x00, 0x41])?;
            fs::write(dir.join("g-nul.yaml"), "kind: \u{0}\u{0}\n")?;
            fs::write(dir.join("g-big.yaml"), "# ".repeat(5_000_000))?;
            fs::write(dir.join("g-bomb.yaml"), bomb())?;
            fs::write(dir.join("g-deep.yaml"), "[".repeat(100_000))?;
            fs::write(dir.join("g-empty.yaml"), "")?;
            fs::create_dir(dir.join("g-folder.yaml"))?;
            std::os::unix::fs::symlink("g-loop.yaml", dir.join("g-loop.yaml"))?;
            std::os::unix::fs::symlink("/nowhere", dir.join("g-nothing.yaml"))?;
            nix::unistd::mkfifo(&dir.join("g-pipe.yaml"), nix::sys::stat::Mode::S_IRWXU)?;
            for (file, reported) in [
                ("g-bytes", "UTF-8"),
                ("g-nul", "expected"),
                ("g-big", "10000000 bytes"),
                ("g-bomb", "expected"),
                ("g-deep", "expected"),
                ("g-folder", "a directory"),
                ("g-loop", "links"),
                ("g-nothing", "No such file"),
                ("g-pipe", "a pipe"),
            ] {
                wait_until(&format!("{file} is reported"), TIMEOUT, || {
                    is_reported(rome, &[&format!("{file}.yaml"), reported])
                })?;
            }
            Ok(())
        })?;
        scene.undisturbed(|| {
            rome.apply("turin", &with_turin(rome))?;
            wait_until("turin has its prefixes", TIMEOUT, || {
                let text =
                    rome.weft(&["get", "gatewayconfig", "-n", "liqo-tenant-turin", "-o", "json"])?;
                ensure!(text.contains("10.200.0.0/16"), "{text}");
                Ok::<_, anyhow::Error>(())
            })?;
            for entry in fs::read_dir(&dir)? {
                let path = entry?.path();
                if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("g-")) {
                    if path.is_dir() { fs::remove_dir(path)? } else { fs::remove_file(path)? }
                }
            }
            wait_until("nothing of it is reported any more", TIMEOUT, || {
                let status = rome.status()?;
                ensure!(!status["problems"].to_string().contains("g-"), "{status}");
                Ok::<_, anyhow::Error>(())
            })
        })
    })
}

/// Nine levels of nine references each.
fn bomb() -> String {
    let mut text = "a0: &a0 x\n".to_owned();
    for level in 1..10 {
        let before = format!("*a{}", level - 1);
        text += &format!("a{level}: &a{level} [{}]\n", vec![before; 9].join(", "));
    }
    text
}

#[test]
fn many_files_and_lost_directory_lose_nothing() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let dir = rome.outside(MANIFESTS);
        scene.undisturbed(|| {
            for i in 0..3000 {
                let text = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: n{i}}}\n");
                fs::write(dir.join(format!("n{i}.yaml")), text)?;
            }
            wait_until("all are read", TIMEOUT, || {
                let text = rome.weft(&["get", "namespace", "-o", "name"])?;
                ensure!(text.lines().count() >= 3000, "{} are", text.lines().count());
                Ok::<_, anyhow::Error>(())
            })
        })?;
        let away = dir.with_extension("away");
        scene.undisturbed(|| {
            fs::rename(&dir, &away)?;
            wait_until("it is reported", TIMEOUT, || {
                is_reported(rome, &["cannot be read", "expected a directory of manifests"])
            })?;
            fs::rename(&away, &dir)?;
            wait_until("it is well", TIMEOUT, || is_well(rome))
        })
    })
}

#[test]
fn bad_manifests_restart_on_last_good_version() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let documents = peering.client_documents();
        let config = || {
            rome.weft(&["get", "gatewayconfig", "-n", "liqo-tenant-milan", "-o", "json"])
                .map(|text| spec_of(&text))
        };
        let before = config()?;
        // All of it in one file, the key, too.
        let good = join(&documents);
        let cut = &good[..good.find("pod: [10").context("a pod CIDR")? + 6];
        for bad in [
            cut.to_owned(),
            good.replace("mtu: 1340", "mtu: 10"),
            good.replace("labels: {liqo.io/remote-cluster-id: milan}", "labels: {}"),
        ] {
            rome.apply("milan", &bad)?;
            wait_until("it is reported", TIMEOUT, || {
                is_reported(rome, &["milan.yaml", "expected"])
            })?;
            scene.undisturbed(|| {
                let old = rome.processes(0, "fabric-controller");
                kill(&old)?;
                wait_until("another controller runs", TIMEOUT, || {
                    another(rome, "fabric-controller", &old)
                })?;
                std::thread::sleep(SOON);
                is_reported(rome, &["milan.yaml", "expected"])
            })?;
            ensure!(config()? == before, "was {before}, is {}", config()?);
            let old = rome.processes(0, "gateway");
            kill(&old)?;
            wait_until("another gateway runs", TIMEOUT, || another(rome, "gateway", &old))?;
            rome.wait_connected("milan", TIMEOUT)?;
            scene.undisturbed(|| Ok(()))?;
        }
        rome.apply("milan", &good)?;
        wait_until("it is well", TIMEOUT, || is_well(rome))
    })
}

#[test]
fn cut_gateway_config_restarts_on_last_good() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let published =
            format!("{}/published/gatewayconfigs/liqo-tenant-milan.client.yaml", rome.run_dir());
        let file = rome.outside(published);
        let whole = fs::read_to_string(&file)?;
        // With a controller, it is mended at once.
        scene.undisturbed(|| {
            fs::write(&file, &whole[..whole.len() / 2])?;
            wait_until("the file is mended", TIMEOUT, || {
                ensure!(fs::read_to_string(&file)? == whole, "it is not");
                Ok::<_, anyhow::Error>(())
            })
        })?;
        // Without one, the gateway has its own copy.
        let controller = rome.processes(0, "fabric-controller");
        signal(&controller, nix::sys::signal::Signal::SIGSTOP)?;
        fs::write(&file, &whole[..whole.len() / 2])?;
        let old = rome.processes(0, "gateway");
        kill(&old)?;
        wait_until("another gateway runs", TIMEOUT, || another(rome, "gateway", &old))?;
        let (pod, target) = scene.way("rome", "milan")?;
        answers(&pod.ns, target)?;
        scene.undisturbed(|| Ok(()))?;
        signal(&controller, nix::sys::signal::Signal::SIGCONT)?;
        wait_until("it is well", TIMEOUT, || is_well(rome))?;
        let notes = files_below(&rome.outside(STATE).join("notes"))?;
        ensure!(!notes.is_empty(), "there are no notes");
        for note in notes {
            let text = fs::read_to_string(&note)?;
            ensure!(!text.contains("privateKey"), "{} holds a key", note.display());
        }
        Ok(())
    })
}

fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        match path.is_dir() {
            true => files.extend(files_below(&path)?),
            false => files.push(path),
        }
    }
    Ok(files)
}

#[test]
fn lost_secret_is_reported_and_gateway_runs_on() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        let peering = scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let documents = peering.client_documents();
        let mut without = documents.clone();
        without.remove(2);
        let garbage = documents[2].replace("privateKey: ", "privateKey: c2hvcnQ= #");
        scene.undisturbed(|| {
            rome.apply("milan", &join(&without))?;
            wait_until("it is reported", TIMEOUT, || {
                is_reported(rome, &["Secret gw-keys does not exist", "a restart would lose"])
            })
        })?;
        let old = rome.processes(0, "gateway");
        kill(&old)?;
        wait_until("the new one says what it lacks", TIMEOUT, || {
            is_reported(rome, &["Secret gw-keys does not exist", "without which nothing runs"])
        })?;
        ensure!(rome.is_connected("milan").is_err(), "connected without a key");
        rome.apply("secret", &garbage)?;
        wait_until("the garbage is reported", TIMEOUT, || {
            is_reported(
                rome,
                &[
                    "secret.yaml",
                    "Secret liqo-tenant-milan/gw-keys",
                    "data.privateKey",
                    "5 bytes long",
                    "expected 32",
                ],
            )
        })?;
        rome.apply("secret", &documents[2])?;
        rome.wait_connected("milan", TIMEOUT)?;
        scene.undisturbed(|| Ok(()))
    })
}

#[test]
fn ipam_with_bad_manifests_grants_nothing_taken() -> Result<()> {
    play(&rome_and_milan(1), |scene| {
        scene.peer("rome", "milan", PORT)?;
        let rome = scene.cluster("rome");
        let own = rome.outside(MANIFESTS).join("cluster.yaml");
        let good = fs::read_to_string(&own)?;
        rome.apply("cluster", &good[..good.len() / 3])?;
        wait_until("it is reported", TIMEOUT, || is_reported(rome, &["cluster.yaml", "expected"]))?;
        for program in ["ipam", "fabric-controller"] {
            let old = rome.processes(0, program);
            kill(&old)?;
            wait_until("another runs", TIMEOUT, || another(rome, program, &old))?;
        }
        rome.apply("turin", &with_turin(rome))?;
        wait_until("turin has its prefixes", TIMEOUT, || {
            let text = rome.weft(&[
                "get",
                "configuration",
                "turin",
                "-n",
                "liqo-tenant-turin",
                "-o",
                "json",
            ])?;
            let seen: serde_json::Value = serde_json::from_str(&text)?;
            let pod = seen["status"]["remote"]["cidr"]["pod"][0].as_str().context("none yet")?;
            ensure!(!pod.starts_with("10.200."), "{pod} is rome's own");
            Ok::<_, anyhow::Error>(())
        })?;
        scene.undisturbed(|| rome.apply("cluster", &good))
    })
}

impl Slip {
    fn in_(&self, document: &str) -> String {
        document.replacen(self.edit.0, self.edit.1, 1)
    }

    /// In `weft status`, for people and for programs, and in the object's own status.
    fn is_reported(&self, cluster: &Cluster, file: &str, namespace: &str) -> Result<()> {
        let (kind, name) = self.object;
        let [field, found, expected] = self.reported;
        let object = if kind.is_empty() { String::new() } else { format!("{namespace}/{name}: ") };
        is_reported(cluster, &[file, &object, field, found, expected])?;
        let broken = ["whole YAML", "one of the two", "expected a number"];
        let broken = broken.iter().any(|part| expected.contains(part));
        if kind.is_empty() || broken && namespace.ends_with("turin") {
            return Ok(()); // there is no such object
        }
        shows(cluster, [kind, name, namespace], found)
    }
}

impl Scene {
    /// Applies a bad file in rome and mends it again, under a stream that must lose nothing. How long
    /// it took until both were seen.
    fn reported(
        &self,
        file: &str,
        bad: &str,
        good: &Peering,
        is_reported: impl Fn(&Cluster) -> Result<()>,
    ) -> Result<[Duration; 2]> {
        let rome = self.cluster("rome");
        let mut took = [Duration::ZERO; 2];
        self.undisturbed(|| {
            let start = Instant::now();
            rome.apply(file, bad)?;
            wait_until("it is reported", TIMEOUT, || is_reported(rome))?;
            took[0] = start.elapsed();
            let start = Instant::now();
            match file {
                "milan" => rome.apply(file, &join(&good.client_documents()))?,
                _ => rome.remove(file)?,
            }
            wait_until("it is reported no more", TIMEOUT, || is_well(rome))?;
            took[1] = start.elapsed();
            Ok(())
        })
        .with_context(|| format!("{file}.yaml with\n{}", &bad[..bad.len().min(3000)]))?;
        Ok(took)
    }

    /// Fails if a numbered stream from rome to milan loses anything meanwhile.
    fn undisturbed(&self, change: impl FnOnce() -> Result<()>) -> Result<()> {
        let _servers = serve(first_pod(self.cluster("milan")))?;
        let (pod, target) = self.way("rome", "milan")?;
        let pace = (Duration::from_millis(5), Duration::from_millis(1500));
        let (report, result) = udp_flow(&pod.ns, SocketAddr::new(target, ECHO), pace, change)?;
        result?;
        ensure!(report.lost.is_empty(), "{report:?}");
        Ok(())
    }
}

/// Some problem has all of these parts, in both forms of `weft status`.
fn is_reported(cluster: &Cluster, parts: &[&str]) -> Result<()> {
    let status = cluster.status()?;
    let problems = status["problems"].as_array().cloned().unwrap_or_default();
    let has_all = |text: &str| parts.iter().all(|part| text.contains(part));
    let reported = problems.iter().filter_map(|p| p.as_str()).any(has_all);
    ensure!(reported, "no problem has all of {parts:?}: {problems:#?}");
    let weft = weft_tests::bin_dir()?.join("weft");
    let script = format!("{} status; [ $? -le 3 ]", weft.display());
    let text =
        cluster.head().command(std::process::Command::new("sh").args(["-c", &script]), "")?;
    ensure!(text.lines().any(has_all), "no line has all of {parts:?}: {text}");
    Ok(())
}

/// Checks that the object's own status reports the problem.
fn shows(cluster: &Cluster, [kind, name, namespace]: [&str; 3], what: &str) -> Result<()> {
    let text = cluster.weft(&["get", kind, name, "-n", namespace, "-o", "json"])?;
    let object: serde_json::Value = serde_json::from_str(&text)?;
    let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let message = |c: &&serde_json::Value| c["type"] == "Accepted" && c["status"] == "False";
    let reported = conditions.iter().find(message).context(text)?["message"].to_string();
    ensure!(reported.replace("\\\"", "\"").contains(what), "{reported} does not say {what:?}");
    Ok(())
}

fn is_well(cluster: &Cluster) -> Result<()> {
    let status = cluster.status()?;
    ensure!(status["problems"].as_array().is_some_and(Vec::is_empty), "{status}");
    Ok(())
}

/// On an idle machine; on any other the best it can.
fn nine_of_ten_in_time(mut took: Vec<Duration>) -> Result<()> {
    took.sort();
    eprintln!("reported, or reported no more, after {took:?}");
    let late = took.iter().filter(|took| **took > SOON).count();
    ensure!(late * 10 <= took.len(), "{late} of {} took longer than {SOON:?}", took.len());
    Ok(())
}

fn another(cluster: &Cluster, program: &str, old: &[i32]) -> Result<()> {
    let now = cluster.processes(0, program);
    ensure!(now.iter().any(|pid| !old.contains(pid)), "no new {program}: {now:?}");
    Ok(())
}

fn kill(pids: &[i32]) -> Result<()> {
    signal(pids, nix::sys::signal::Signal::SIGKILL)
}

fn signal(pids: &[i32], signal: nix::sys::signal::Signal) -> Result<()> {
    ensure!(!pids.is_empty(), "no such process");
    let send = |pid: &i32| nix::sys::signal::kill(nix::unistd::Pid::from_raw(*pid), signal);
    Ok(pids.iter().try_for_each(send)?)
}

fn spec_of(text: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    value["spec"].to_string()
}
