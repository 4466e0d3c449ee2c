//! Commands that run once and are done.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use base64::Engine as _;
use fabric_api::{PrivateKey, PublicKey};
use fabric_store::{Kind, Object, ObjectRef, Store, StoreArgs};

use crate::host::{Host, at_once, stderr, stdout};

fn weft(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    for key in ["WEFT_RUN_DIR", "WEFT_STATE_DIR", "WEFT_MANIFESTS", "WEFT_CLUSTER", "KUBECONFIG"] {
        command.env_remove(key);
    }
    command.args(args);
    command
}

fn scratch(name: &str) -> std::path::PathBuf {
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("c{}-{name}", std::process::id()));
    drop(fs::remove_dir_all(&dir));
    dir
}

fn read(manifests: &std::path::Path) -> fabric_store::Snapshot {
    let args = StoreArgs::directories(Some(manifests.to_owned()), manifests.join("run"), None);
    at_once(Store::open(&args).unwrap().read(&Kind::ALL)).unwrap()
}

#[test]
fn init_manifests_read_without_problems() {
    let dir = scratch("init");
    let out = dir.join("manifests");
    let done = weft(&[
        "init",
        "--cluster-id=rome",
        "--pod-cidr=10.200.0.0/16",
        "--pod-cidr=fd00:200::/48",
        "--service-cidr=10.96.0.0/12",
        "--external-cidr=10.71.0.0/16",
        "--reserved-cidr=10.0.0.0/16",
        "--reserved-cidr=172.20.0.0/14",
        "--node=n1=192.0.2.11,2001:db8::11=10.200.1.0/24,fd00:200:0:1::/64",
        "--node=n2=192.0.2.12=10.200.2.0/24",
        "--out",
        out.to_str().unwrap(),
    ]);
    assert!(done.status.success(), "{}", stderr(&done));
    let read = read(&out);
    assert_eq!(read.problems, []);
    let names: Vec<_> = read.objects.keys().map(ToString::to_string).collect();
    assert_eq!(
        names,
        [
            "ConfigMap liqo/liqo-clusterid-configmap",
            "Node n1",
            "Node n2",
            "Network liqo/external-cidr",
            "Network liqo/internal-cidr",
            "Network liqo/pod-cidr",
            "Network liqo/pod-cidr-2",
            "Network liqo/reserved",
            "Network liqo/reserved-2",
            "Network liqo/service-cidr",
        ]
    );
    let value =
        |kind, namespace, name| read.objects[&ObjectRef::new(kind, namespace, name)].to_value();
    let map = value(Kind::ConfigMap, "liqo", "liqo-clusterid-configmap");
    assert_eq!(map["data"]["CLUSTER_ID"], "rome");
    assert_eq!(map["metadata"]["labels"]["app.kubernetes.io/name"], "clusterid-configmap");
    let pods = value(Kind::Network, "liqo", "pod-cidr-2");
    assert_eq!(pods["spec"]["cidr"], "fd00:200::/48");
    assert_eq!(pods["metadata"]["labels"]["ipam.liqo.io/network-type"], "pod-cidr");
    assert_eq!(pods["metadata"]["labels"]["ipam.liqo.io/network-shared"], "true");
    let external = value(Kind::Network, "liqo", "external-cidr");
    assert_eq!(external["spec"]["preAllocated"], 1);
    assert_eq!(external["metadata"]["labels"]["ipam.liqo.io/network-not-remapped"], "true");
    let reserved = value(Kind::Network, "liqo", "reserved-2");
    assert_eq!(reserved["spec"]["cidr"], "172.20.0.0/14");
    let labels = &reserved["metadata"]["labels"];
    assert_eq!(labels["ipam.liqo.io/network-type"], "reserved");
    assert_eq!(labels["ipam.liqo.io/network-not-remapped"], "true");
    assert_eq!(labels["ipam.liqo.io/network-shared"], "true");
    let internal = value(Kind::Network, "liqo", "internal-cidr");
    assert!(internal["metadata"]["labels"]["ipam.liqo.io/network-not-remapped"].is_null());
    let node = value(Kind::Node, "", "n1");
    assert_eq!(node["spec"]["podCIDRs"][1], "fd00:200:0:1::/64");
    assert_eq!(node["status"]["addresses"][1]["address"], "2001:db8::11");
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn examples_read_without_problems() {
    let dir = scratch("examples");
    for (side, kind) in [("client", Kind::GatewayClient), ("server", Kind::GatewayServer)] {
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("example.yaml"), stdout(&weft(&["example", side]))).unwrap();
        let read = read(&dir);
        assert_eq!(read.problems, []);
        for kind in [Kind::Configuration, kind] {
            assert!(read.objects.keys().any(|object| object.kind == kind), "{side}: {kind}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}

#[test]
fn init_overwrites_only_when_forced() {
    let dir = scratch("force");
    let args = |id: &str| {
        vec![
            "init".to_owned(),
            format!("--cluster-id={id}"),
            "--node=n1=192.0.2.11=10.200.1.0/24".to_owned(),
            format!("--out={}", dir.display()),
        ]
    };
    let run = |args: Vec<String>| weft(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(run(args("rome")).status.success());
    let second = run(args("milan"));
    assert_eq!(second.status.code(), Some(1));
    assert!(stderr(&second).contains("--force"), "{}", stderr(&second));
    assert!(fs::read_to_string(dir.join("cluster.yaml")).unwrap().contains("\"rome\""));
    let mut forced = args("milan");
    forced.push("--force".to_owned());
    assert!(run(forced).status.success());
    assert!(fs::read_to_string(dir.join("cluster.yaml")).unwrap().contains("\"milan\""));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn init_refuses_invalid_input_with_reason() {
    let dir = scratch("refuse");
    let out = format!("--out={}", dir.display());
    let node = "--node=n1=192.0.2.11=10.200.1.0/24";
    for (args, code, says) in [
        (vec!["--cluster-id=Rome", node], 2, "expected a DNS label"),
        (vec!["--cluster-id=rome", "--pod-cidr=10.200.0.1/16"], 2, "did you mean 10.200.0.0/16"),
        (vec!["--cluster-id=rome", "--node=n1=here=10.200.1.0/24"], 2, "not an address of a node"),
        (
            vec!["--cluster-id=rome", "--external-cidr=10.200.0.0/17", node],
            1,
            "overlaps --pod-cidr",
        ),
        (
            vec!["--cluster-id=rome", "--pod-cidr=127.0.0.0/16"],
            1,
            "--pod-cidr 127.0.0.0/16: expected",
        ),
        (vec!["--cluster-id=rome", "--pod-cidr=169.254.0.0/16"], 1, "ordinary unicast addresses"),
        (
            vec!["--cluster-id=rome", "--service-cidr=224.0.0.0/16"],
            1,
            "--service-cidr 224.0.0.0/16",
        ),
        (vec!["--cluster-id=rome", "--pod-cidr=10.200.0.0/32"], 1, "expected at most /30"),
        (
            vec!["--cluster-id=rome", "--node=n1=10.200.0.5=10.200.1.0/24"],
            1,
            "address 10.200.0.5 lies in --pod-cidr 10.200.0.0/16",
        ),
        (vec!["--cluster-id=rome", "--node=n1=192.0.2.11=10.9.0.0/24"], 1, "none of the pod CIDRs"),
        (
            vec!["--cluster-id=rome", "--internal-cidr=fd00::/64", node],
            1,
            "expected an IPv4 prefix",
        ),
        (vec!["--cluster-id=rome", node, "--node=n2=192.0.2.12=10.200.1.0/25"], 1, "of node n1"),
    ] {
        let done = weft(&[&["init", &out][..], &args].concat());
        assert_eq!(done.status.code(), Some(code), "{args:?}: {}", stderr(&done));
        assert!(stderr(&done).contains(says), "{args:?}: {}", stderr(&done));
    }
    assert!(!dir.exists());
}

#[test]
fn keys_make_secret_and_labelled_public_key() {
    let dir = scratch("keys");
    let done =
        weft(&["keys", "--cluster-id=rome", "--peer=milan", &format!("--out={}", dir.display())]);
    assert!(done.status.success(), "{}", stderr(&done));
    let mode = |name: &str| fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("milan.gw-keys.secret.yaml"), 0o600);
    assert_eq!(mode("rome-for-milan.publickey.yaml"), 0o644);
    let read = read(&dir);
    assert_eq!(read.problems, []);
    let secret = &read.objects[&ObjectRef::new(Kind::Secret, "liqo-tenant-milan", "gw-keys")];
    assert_eq!(secret.label("liqo.io/remote-cluster-id"), Some("milan"));
    assert_eq!(secret.label("networking.liqo.io/gateway-resource"), Some("true"));
    let public = read.objects.values().find(|object| object.kind() == Kind::PublicKey).unwrap();
    assert_eq!(public.namespace(), Some("liqo-tenant-rome"));
    assert_eq!(public.label("liqo.io/remote-cluster-id"), Some("rome"));

    let Object::Secret(secret) = secret else { panic!("{secret:?}") };
    let private = &secret.data.as_ref().unwrap()["privateKey"].0;
    let expected = PrivateKey::from_bytes(private).unwrap().public();
    let written = public.to_value()["spec"]["publicKey"].as_str().unwrap().to_owned();
    assert_eq!(PublicKey::from_base64(&written), Ok(expected));
    let text = stdout(&done) + &stderr(&done);
    let encoded = base64::engine::general_purpose::STANDARD.encode(private);
    assert!(!text.contains(&encoded), "the private key was shown");
    assert!(
        !fs::read_to_string(dir.join("rome-for-milan.publickey.yaml")).unwrap().contains(&encoded)
    );

    let again =
        weft(&["keys", "--cluster-id=rome", "--peer=milan", &format!("--out={}", dir.display())]);
    assert!(stderr(&again).contains("--force"), "{}", stderr(&again));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn keys_of_two_peers_share_a_directory() {
    let dir = scratch("two-peers");
    let out = format!("--out={}", dir.display());
    for peer in ["--peer=milan", "--peer=paris"] {
        let done = weft(&["keys", "--cluster-id=rome", peer, &out]);
        assert!(done.status.success(), "{}", stderr(&done));
    }
    let names = || fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names().count(), 4, "{:?}", names().collect::<Vec<_>>());
    let again = weft(&["keys", "--cluster-id=rome", "--peer=milan", &out]);
    assert!(stderr(&again).contains(" are there already; give --force"), "{}", stderr(&again));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn keys_for_the_cluster_itself_are_refused() {
    let done = weft(&["keys", "--cluster-id=rome", "--peer=rome"]);
    assert_eq!((done.status.code(), stdout(&done)), (Some(1), String::new()));
    assert!(stderr(&done).contains("--peer rome: "), "{}", stderr(&done));
}

#[test]
fn status_names_a_missing_published_directory() {
    let dir = scratch("unpublished");
    fs::create_dir_all(&dir).unwrap();
    let gone = dir.join("mount");
    let record = serde_json::json!({"node": "n2", "published": gone});
    fs::write(dir.join("weft.json"), record.to_string()).unwrap();
    let status = weft(&["status", "--run-dir", dir.to_str().unwrap()]);
    assert_eq!(status.status.code(), Some(1));
    let says = format!("the published directory {} is not there", gone.display());
    let text = stderr(&status);
    assert!(text.contains(&says) && text.contains("not mounted"), "{text}");
    assert!(text.contains("run `weft up` on that host, or `weft down` on this one"), "{text}");
    // The mount point of a share that is not mounted.
    fs::create_dir(&gone).unwrap();
    let status = weft(&["status", "--run-dir", dir.to_str().unwrap()]);
    assert_eq!(status.status.code(), Some(1), "{}", stdout(&status));
    let empty = format!("the published directory {} holds no NodeConfig", gone.display());
    assert!(stderr(&status).contains(&empty), "{}", stderr(&status));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn keys_without_out_print_two_documents() {
    let done = weft(&["keys", "--cluster-id=rome", "--peer=milan", "--namespace=x", "--name=k"]);
    let text = stdout(&done);
    assert_eq!(text.matches("\n---\n").count(), 1, "{text}");
    assert!(text.contains("namespace: \"x\"") && text.contains("kind: PublicKey"), "{text}");
}

#[test]
fn get_shows_resources_and_hides_keys() {
    let host = Host::new();
    host.init();
    let manifests = host.path("manifests");
    let keys = host.weft(&[
        "keys",
        "--cluster-id=rome",
        "--peer=milan",
        "--out",
        manifests.to_str().unwrap(),
    ]);
    assert!(keys.status.success());
    host.publish("client");
    let _up = host.up(&[]);
    host.pid("ipam");
    let names = stdout(&host.weft(&["get", "all", "-o", "name"]));
    for name in
        ["network.ipam.liqo.io/liqo/pod-cidr", "node/n1", "gatewayconfig.fabric.weft.dev/t/client"]
    {
        assert!(names.lines().any(|line| line == name), "{names}");
    }
    let secret = stdout(&host.weft(&["get", "secret", "gw-keys", "-n", "liqo-tenant-milan"]));
    assert!(secret.contains("privateKey: <hidden>"), "{secret}");
    let network = stdout(&host.weft(&["get", "net", "pod-cidr", "-o", "json"]));
    let network: serde_json::Value = serde_json::from_str(&network).unwrap();
    assert_eq!(network["spec"]["cidr"], "10.200.0.0/16");
    let missing = host.weft(&["get", "gws", "nobody"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(stderr(&missing).contains("no gws named nobody"), "{}", stderr(&missing));
    let none = host.weft(&["get", "gws"]);
    assert!(none.status.success() && stdout(&none).is_empty(), "{none:?}");
    assert!(stderr(&none).contains("no GatewayServer found; looked in "), "{}", stderr(&none));
}

#[test]
fn commands_without_fabric_fail_with_remedy() {
    let dir = scratch("nothing");
    let run = format!("--run-dir={}", dir.display());
    let status = weft(&["status", &run]);
    assert_eq!(status.status.code(), Some(4), "{}", stderr(&status));
    for args in [["get", "nodes"], ["logs", "-n1"]] {
        let done = weft(&[&args[..], &[&run]].concat());
        assert_eq!(done.status.code(), Some(1));
        assert!(stderr(&done).contains("no fabric runs here"), "{}", stderr(&done));
    }
    let done = weft(&["get", "bogus", &run]);
    assert_eq!(done.status.code(), Some(2), "{}", stderr(&done));
    assert!(stderr(&done).contains("expected all or one of"), "{}", stderr(&done));
    assert!(!dir.exists(), "looking made a directory");
}

#[test]
fn status_follows_kubeconfig_where_no_fabric_runs() {
    let dir = scratch("kubeconfig");
    fs::create_dir_all(&dir).unwrap();
    let file = dir.join("config");
    let config = "{apiVersion: v1, kind: Config, current-context: c, users: [{name: u, user: {}}], \
        clusters: [{name: k, cluster: {server: 'http://127.0.0.1:1'}}], \
        contexts: [{name: c, context: {cluster: k, user: u}}]}";
    fs::write(&file, config).unwrap();
    let asked = command(&["status"]).env("KUBECONFIG", &file).output().unwrap();
    let error = stderr(&asked);
    assert!(error.contains("cannot ask the API server at http://127.0.0.1:1"), "{error}");
    // A fabric of this host that is named comes first.
    let run_dir = dir.join("none");
    let named = command(&["status", "--run-dir", run_dir.to_str().unwrap()])
        .env("KUBECONFIG", &file)
        .output()
        .unwrap();
    assert_eq!(named.status.code(), Some(4), "{}", stderr(&named));
    fs::remove_dir_all(dir).unwrap();
}

#[test]
fn up_names_missing_host_requirements() {
    let host = Host::new();
    host.init();
    let manifests = host.path("manifests");
    let run = |shell: &str| {
        let script = format!(
            "{shell}; exec {} up --manifests {}",
            host.path("bin/weft").display(),
            manifests.display()
        );
        Command::new("unshare")
            .args(["--net", "--mount", "sh", "-c", &script])
            .env("WEFT_RUN_DIR", host.path("run"))
            .output()
            .unwrap()
    };
    let lacking =
        run("echo 0 > /proc/sys/net/ipv4/ip_forward; mount -t tmpfs none /dev/net; PATH=/nowhere");
    let text = stderr(&lacking);
    assert_eq!(lacking.status.code(), Some(1));
    for says in ["/dev/net/tun", "install nftables", "sysctl -w net.ipv4.ip_forward=1"] {
        assert!(text.contains(says), "{text}");
    }
    let as_user = Command::new("setpriv")
        .args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"])
        .arg(host.path("bin/weft"))
        .args(["up", "--manifests", manifests.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(stderr(&as_user).contains("CAP_NET_ADMIN"), "{}", stderr(&as_user));
}

#[test]
fn up_names_missing_manifests() {
    let host = Host::new();
    let up = |more: &[&str]| {
        let manifests = host.path("manifests");
        stderr(&host.weft(&[&["up", "--manifests", manifests.to_str().unwrap()], more].concat()))
    };
    assert!(up(&[]).contains("weft init --out"), "{}", up(&[]));
    fs::create_dir(host.path("manifests")).unwrap();
    assert!(up(&[]).contains("no ConfigMap liqo/liqo-clusterid-configmap"), "{}", up(&[]));
    fs::remove_dir(host.path("manifests")).unwrap();
    host.init();
    assert!(up(&["--node=n9"]).contains("no such Node in the manifests (there: n1, n2)"));
    fs::remove_file(host.path("bin/gateway")).unwrap();
    assert!(up(&[]).contains("gateway not found in"), "{}", up(&[]));
}

#[test]
fn help_teaches_and_completion_completes() {
    let help = stdout(&weft(&["--help"]));
    assert!(help.contains("Examples:") && help.contains("Exit codes"), "{help}");
    assert!(stdout(&weft(&["status", "--help"])).contains("\"lastHandshake\""));
    assert!(stdout(&weft(&["--version"])).starts_with("weft "));
    for shell in ["bash", "zsh", "fish"] {
        assert!(stdout(&weft(&["completion", shell])).contains("weft"), "{shell}");
    }
    assert_eq!(weft(&["status", "--nonsense"]).status.code(), Some(2));
}
