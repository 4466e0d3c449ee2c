//! Manifests as people write them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;

use fabric_objects::{Kind, Object, ObjectRef};

use crate::{Place, cidr_of, network, network_ref};

/// The only problem that one file makes.
fn problem_of(text: &str) -> String {
    let place = Place::new();
    place.write("a.yaml", text);
    let problems = place.problems();
    assert_eq!(problems.len(), 1, "{problems:#?}");
    problems.into_iter().next().unwrap()
}

const SERVER: &str = "\
apiVersion: networking.liqo.io/v1beta1
kind: GatewayServer
metadata: {name: server, namespace: t, labels: {liqo.io/remote-cluster-id: rome}}
spec:
  endpoint:
    port: 51840
";

#[test]
fn wrong_type_names_file_line_and_field() {
    let found = problem_of(&SERVER.replace("51840", "many"));
    assert_eq!(
        found,
        "a.yaml:6: GatewayServer t/server: spec.endpoint.port: found the text \"many\"; expected a \
         number"
    );
    for (wrong, says) in [
        ("\"30742\"", "found the text \"30742\"; expected a number without quotes"),
        ("true", "found true; expected a number"),
        ("[1]", "found a list; expected a number"),
        ("99999999999", "found the number 99999999999; expected a smaller number"),
        ("1.5", "found the number 1.5; expected a whole number"),
    ] {
        let found = problem_of(&SERVER.replace("51840", wrong));
        assert!(found.ends_with(&format!("spec.endpoint.port: {says}")), "{wrong}: {found}");
    }
    let found = problem_of(&SERVER.replace("rome", "1"));
    let says = "found the number 1; expected a text (put it in quotes)";
    assert!(found.ends_with(says), "{found}");
}

#[test]
fn unknown_fields_are_reported_with_line() {
    let found = problem_of(&SERVER.replace("port: 51840", "port: 51840\n    nodPort: 1"));
    assert_eq!(
        found,
        "a.yaml:7: GatewayServer t/server: spec.endpoint.nodPort: no field of a GatewayServer; did \
         you mean nodePort?"
    );
    let found = problem_of(&SERVER.replace("spec:", "spec:\n  purpose: x"));
    assert_eq!(
        found,
        "a.yaml:5: GatewayServer t/server: spec.purpose: no field of a GatewayServer; expected one \
         of endpoint, mtu, secretRef, serverTemplateRef, serviceAnnotations, serviceLabels"
    );
    let found = problem_of(&SERVER.replace("metadata: {", "metadata: {nmae: x, "));
    assert!(found.contains("metadata.nmae: no field of a GatewayServer; did you mean name?"));
    let place = Place::new();
    place.write("a.yaml", &SERVER.replace("spec:", "spce:"));
    let problems = place.problems();
    assert!(problems[0].contains("a.yaml:1: GatewayServer t/server: "), "{problems:?}");
    assert!(problems[0].contains("missing field `spec`"), "{problems:?}");
}

#[test]
fn duplicate_keys_are_reported_with_line() {
    let found = problem_of(&format!("# first\n---\n{SERVER}    port: 2\n"));
    assert!(found.starts_with("a.yaml:9: "), "{found}");
    assert!(found.contains("found port twice in one object; expected it once"), "{found}");
}

#[test]
fn tab_in_the_indentation_is_named_with_its_line() {
    for tab in ["\t", "  \t"] {
        let found = problem_of(&SERVER.replace("    port", &format!("{tab}port")));
        assert!(found.ends_with("found a tab in the indentation; expected spaces"), "{found}");
        assert!(found.starts_with("a.yaml:6: GatewayServer t/server: "), "{found}");
    }
}

#[test]
fn null_in_place_of_a_name_is_named() {
    let found = problem_of(&SERVER.replace("    port: 51840", "    : 51840"));
    assert!(found.ends_with("found null; expected a text"), "{found}");
    let found = problem_of(&SERVER.replace("    port: 51840", "    ~: 51840"));
    assert!(found.ends_with("found null; expected a text"), "{found}");
}

#[test]
fn invalid_yaml_is_reported_with_line() {
    let found = problem_of(&format!("{SERVER}---\nkind: [\n"));
    assert!(found.starts_with("a.yaml:"), "{found}");
    let found = problem_of("kind: \"\n");
    assert!(found.starts_with("a.yaml:"), "{found}");
    let found = problem_of("- just\n- a list\n");
    assert!(found.contains("a.yaml:1: not an object"), "{found}");
    let found = problem_of("just text\n");
    assert!(found.contains("a.yaml:1: not an object"), "{found}");
}

#[test]
fn unknown_kinds_and_versions_are_reported() {
    let found = problem_of(&SERVER.replace("GatewayServer", "GatewaySever"));
    assert!(found.starts_with("a.yaml:2: kind: \"GatewaySever\" is none"), "{found}");
    let found = problem_of(&SERVER.replace("v1beta1", "v1alpha1"));
    assert_eq!(
        found,
        "a.yaml:1: apiVersion: found \"networking.liqo.io/v1alpha1\"; expected \
         \"networking.liqo.io/v1beta1\" for a GatewayServer"
    );
    let found = problem_of(&SERVER.replace("kind: GatewayServer\n", ""));
    assert_eq!(found, "a.yaml:1: kind: missing; expected a text");
    let found = problem_of(&SERVER.replace("kind: GatewayServer", "kind: Connection"));
    assert!(found.contains("weft itself writes every Connection"), "{found}");
}

#[test]
fn liqos_other_kinds_are_passed_over() {
    let place = Place::new();
    for kind in ["WgGatewayServerTemplate", "FirewallConfiguration", "RouteConfiguration"] {
        place.write(
            &format!("{kind}.yaml"),
            &format!("apiVersion: networking.liqo.io/v1beta1\nkind: {kind}\nmetadata: {{name: x}}"),
        );
    }
    assert_eq!(place.problems(), [""; 0]);
    assert_eq!(place.names(), [""; 0]);
}

#[test]
fn names_that_could_leave_their_folder_are_refused() {
    for name in ["../../etc/x", "a/b", "A", "", "-a", "a..b", "é", "a\\0", &"a".repeat(181)] {
        let found = problem_of(&SERVER.replace("name: server", &format!("name: \"{name}\"")));
        assert!(found.contains("metadata.name: ") || found.contains("a.yaml"), "{name}: {found}");
        assert!(Place::new().names().is_empty());
    }
    let found = problem_of(&SERVER.replace("namespace: t", "namespace: a.b"));
    assert!(found.contains("metadata.namespace: found \"a.b\"; expected 1 to 63"), "{found}");
    let found = problem_of(&SERVER.replace("name: server", "name: 17"));
    assert!(found.contains("metadata.name: found 17; expected a text"), "{found}");
}

#[test]
fn a_file_over_one_mebibyte_is_not_read() {
    let place = Place::new();
    place.write("a.yaml", &network("a", "10.0.0.0/16"));
    place.write("big.yaml", &format!("# {}\n{}", "x".repeat(1024 * 1024), network("b", "x")));
    assert_eq!(
        place.problems(),
        ["big.yaml: is 1048681 bytes long; expected at most 1048576 (1 MiB)"]
    );
    assert_eq!(place.names(), ["Network liqo/a"]);
}

#[test]
fn alias_bombs_and_deep_nesting_are_refused_quickly() {
    let mut bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for (from, to) in ["a", "b", "c", "d", "e", "f", "g", "h"]
        .iter()
        .zip(["b", "c", "d", "e", "f", "g", "h", "i"])
    {
        let list = vec![format!("*{from}"); 9].join(", ");
        bomb.push_str(&format!("{to}: &{to} [{list}]\n"));
    }
    let began = std::time::Instant::now();
    assert!(problem_of(&bomb).starts_with("a.yaml:"));
    assert!(problem_of(&"[".repeat(500_000)).starts_with("a.yaml:"));
    assert!(problem_of(&format!("a: {}", "{a: ".repeat(100_000))).starts_with("a.yaml:"));
    assert!(began.elapsed().as_secs() < 10, "{:?}", began.elapsed());
}

#[test]
fn other_files_are_ignored_non_files_reported() {
    let place = Place::new();
    place.write("notes.txt", "not: [yaml");
    place.write(".hidden.yaml", "not: [yaml");
    fs::create_dir(place.path("manifests/folder.yaml")).unwrap();
    std::os::unix::fs::symlink("/nowhere", place.path("manifests/dangling.yaml")).unwrap();
    std::process::Command::new("mkfifo").arg(place.path("manifests/pipe.yaml")).status().unwrap();
    fs::write(place.path("manifests/bytes.yaml"), [0xff, 0xfe, 0x00, 0x41]).unwrap();
    std::os::unix::fs::symlink("loop.yaml", place.path("manifests/loop.yaml")).unwrap();
    let problems = place.problems().join("\n");
    let expected = "bytes.yaml: is not UTF-8 text; expected YAML or JSON\n\
                    dangling.yaml: cannot be read: No such file or directory (os error 2)\n\
                    folder.yaml: is a directory; expected a file\n\
                    loop.yaml: cannot be read: Too many levels of symbolic links (os error 40)\n\
                    pipe.yaml: is a pipe, socket or device; expected a file";
    assert_eq!(problems, expected);
}

#[test]
fn duplicate_object_names_both_files() {
    let place = Place::new();
    place.write("a.yaml", &network("net", "10.1.0.0/16"));
    place.write("b.yaml", &format!("\n---\n{}", network("net", "10.2.0.0/16")));
    assert_eq!(
        place.problems(),
        ["b.yaml:2: Network liqo/net: is also in a.yaml:1, which is used; expected it once"]
    );
    let net = place.store.get(&network_ref("net")).unwrap().unwrap();
    assert_eq!(cidr_of(&net), "10.1.0.0/16");
}

#[test]
fn one_bad_document_does_not_hide_the_others() {
    let place = Place::new();
    let bad = "kind: [\n";
    let all = [&network("a", "10.1.0.0/16"), bad, &network("b", "10.2.0.0/16")].map(String::from);
    place.write("all.yaml", &all.join("---\n"));
    assert_eq!(place.names(), ["Network liqo/a", "Network liqo/b"]);
    assert_eq!(place.problems().len(), 1);
}

#[test]
fn lists_and_json_have_positions_of_faults() {
    let place = Place::new();
    place.write(
        "list.json",
        "{\"apiVersion\": \"v1\", \"kind\": \"List\", \"items\": [\n\
         {\"apiVersion\": \"v1\", \"kind\": \"Namespace\", \"metadata\": {\"name\": \"t\"}},\n\
         {\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\", \"metadata\": {\"name\": \"c\"},\n\
         \"data\": {\"a\": 1}}]}",
    );
    assert_eq!(place.names(), ["Namespace t"]);
    assert_eq!(
        place.problems(),
        [
            "list.json:4: ConfigMap default/c: data.a: found the number 1; expected a text (put it in quotes)"
        ]
    );
}

#[test]
fn alias_bombs_and_deep_nesting_fail_fast() {
    let place = Place::new();
    let level = |n: u32| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 9].join(","));
    place.write("bomb.yaml", &("a0: &a0 x\n".to_owned() + &(1..12).map(level).collect::<String>()));
    place.write("tower.yaml", &"[".repeat(1_000_000));
    place.write("braces.yaml", &"{a: ".repeat(200_000));
    place.write("dashes.yaml", &"- ".repeat(500_000));
    place.write("big.yaml", &"# ".repeat(5_000_000));
    let began = std::time::Instant::now();
    let problems = place.problems();
    assert!(began.elapsed() < std::time::Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(problems.len(), 5, "{problems:#?}");
    assert!(
        problems[0].contains("is 10000000 bytes long; expected at most 1048576"),
        "{problems:#?}"
    );
    let limits = "too deep, or too many values or aliases; expected at most 64 levels, 250000 values, \
                  those of aliases included, and 100 aliases, or more with at most 10 for each anchor";
    assert!(problems[1..].iter().all(|p| p.ends_with(limits)), "{problems:#?}");
}

/// Without optimizations, as many levels as a document may have take more than the stack of a test.
#[test]
fn limits_of_a_document_are_named() {
    let stack = std::thread::Builder::new().stack_size(8 << 20);
    stack.spawn(name_limits).unwrap().join().unwrap();
}

fn name_limits() {
    let secret = |data: &str| format!("kind: Secret\ndata: {data}\n");
    let nested = |levels: usize| secret(&format!("{}{}", "[".repeat(levels), "]".repeat(levels)));
    let aliases = |count: usize| secret(&format!("[&a x{}]", ", *a".repeat(count)));
    let values = |count: usize| secret(&format!("[{}]", "x,".repeat(count)));
    for (within, beyond) in
        [(nested(63), nested(64)), (aliases(100), aliases(101)), (values(249_990), values(250_000))]
    {
        assert!(!problem_of(&within).contains("too deep"), "{}", problem_of(&within));
        let found = problem_of(&beyond);
        assert!(found.contains("at most 64 levels, 250000 values"), "{found}");
    }
}

#[test]
fn fault_of_an_object_has_its_line() {
    let found = problem_of(&SERVER.replace("51840", "0"));
    assert_eq!(
        found,
        "a.yaml:6: GatewayServer t/server: spec.endpoint.port: found 0; expected a port, 1 to 65535"
    );
    let found = problem_of(&network("net", "10.1.0.7/16"));
    assert_eq!(
        found,
        "a.yaml:7: Network liqo/net: spec.cidr: 10.1.0.7/16 has host bits set; did you mean 10.1.0.0/16?"
    );
}

#[test]
fn valid_copy_of_duplicate_object_is_used() {
    let place = Place::new();
    place.write("z.yaml", &network("net", "10.1.0.0/16"));
    place.write("a.yaml", &network("net", "10.2.0.0/33"));
    let net = place.store.get(&network_ref("net")).unwrap().unwrap();
    assert_eq!(cidr_of(&net), "10.1.0.0/16");
    assert_eq!(place.problems().len(), 2);
}

#[test]
fn a_secret_that_cannot_be_read_is_not_quoted() {
    let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: s, namespace: t}\ndata:\n  \
                  privateKey: YHztEzTrIe*SECRET*\n";
    let found = problem_of(secret);
    assert!(found.starts_with("a.yaml:5: Secret t/s: data.privateKey: "), "{found}");
    assert!(!found.contains("SECRET") && !found.contains("YHzt"), "{found}");
}

/// Parsers quote what they stumble over.
#[test]
fn secret_that_is_no_yaml_is_not_quoted() {
    let head = "apiVersion: v1\nkind: Secret\nmetadata: {name: s, namespace: t}\ndata:\n";
    for data in [
        "  privateKey: *hushhush=",
        "  privateKey: !<hushhush=",
        "  privateKey: \"\\hushhush=\"",
        "  hushhush: a\n  hushhush: b",
        "  hushhush: [",
        "  privateKey: hushhush=\n hushhush: a",
        "  privateKey: {hushhush=",
        "  privateKey: hushhush=: : a",
        "  ? [hushhush=]\n  : a",
    ] {
        let found = problem_of(&format!("{head}{data}\n"));
        assert!(!found.contains("hush"), "{data}: {found}");
        assert!(found.contains("Secret t/s") && found.contains("expected"), "{data}: {found}");
    }
}

#[test]
fn string_data_of_a_secret_becomes_data() {
    let place = Place::new();
    place.write("s.yaml", "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {a: b}");
    let secret = place.store.get(&ObjectRef::new(Kind::Secret, "default", "s")).unwrap().unwrap();
    let Object::Secret(secret) = secret else { panic!("{secret:?}") };
    assert_eq!(secret.data.as_ref().unwrap()["a"].0, b"b");
}

#[test]
fn a_status_in_a_manifest_is_not_believed() {
    let place = Place::new();
    let text = network("a", "10.1.0.0/16") + "status: {cidr: 10.9.0.0/16}\n";
    place.write("a.yaml", &text);
    let Some(Object::Network(net)) = place.store.get(&network_ref("a")).unwrap() else { panic!() };
    assert_eq!(net.status, None);
    assert_eq!(place.problems(), [""; 0]);
}

#[test]
fn status_in_manifests_counts_for_nodes_only() {
    let of_peer = "metadata: {name: a, namespace: t, labels: {liqo.io/remote-cluster-id: rome}}";
    let endpoint = "endpoint: {addresses: [192.0.2.1], port: 1, protocol: UDP}";
    for (api, kind, spec, status) in [
        (
            "networking.liqo.io/v1beta1",
            "Configuration",
            "{remote: {cidr: {pod: [10.1.0.0/16], external: [10.2.0.0/16]}}}",
            "{remote: {cidr: {pod: [10.9.0.0/16], external: [10.8.0.0/16]}}}",
        ),
        (
            "networking.liqo.io/v1beta1",
            "GatewayServer",
            "{endpoint: {port: 51840}}",
            &*format!("{{{endpoint}}}"),
        ),
        (
            "networking.liqo.io/v1beta1",
            "GatewayClient",
            &*format!("{{{endpoint}}}"),
            "{secretRef: {name: other}}",
        ),
        ("ipam.liqo.io/v1alpha1", "IP", "{ip: 10.1.0.1}", "{ip: 10.9.0.1, cidr: 10.9.0.0/16}"),
        ("ipam.liqo.io/v1alpha1", "Network", "{cidr: 10.1.0.0/16}", "{cidr: 10.9.0.0/16}"),
        ("v1", "Namespace", "{}", "{phase: Terminating}"),
    ] {
        let place = Place::new();
        let manifest = format!("apiVersion: {api}\nkind: {kind}\n{of_peer}\nspec: {spec}\n");
        place.write("a.yaml", &format!("{manifest}status: {status}\n"));
        assert_eq!(place.problems(), [""; 0], "{kind}");
        let snapshot = place.store.read(&Kind::ALL).unwrap();
        let objects: Vec<_> = snapshot.objects.values().map(Object::to_value).collect();
        assert_eq!(objects.len(), 1, "{kind}");
        assert!(objects[0]["status"].is_null(), "{}", objects[0]);
    }
    let place = Place::new();
    let address = "{type: InternalIP, address: 192.0.2.1}";
    let node = format!("status: {{addresses: [{address}]}}");
    place.write("n.yaml", &format!("apiVersion: v1\nkind: Node\nmetadata: {{name: n}}\n{node}\n"));
    let snapshot = place.store.read(&[Kind::Node]).unwrap();
    let node = snapshot.objects.values().next().unwrap().to_value();
    assert_eq!(node["status"]["addresses"][0]["address"], "192.0.2.1");
}

#[test]
fn a_folder_that_is_missing_is_a_problem_not_an_error() {
    let place = Place::new();
    fs::remove_dir(place.path("manifests")).unwrap();
    let problems = place.problems();
    assert!(problems[0].contains("expected a directory of manifests"), "{problems:?}");
}

#[test]
fn files_that_are_not_read_are_listed() {
    let place = Place::new();
    let names: [&[u8]; 6] =
        [b"bad\xff.yaml", b"UP.YAML", b".hidden.yml", b"good.yaml", b".x.swp", b"notes.txt"];
    let manifests = place.path("manifests");
    for name in names {
        fs::write(manifests.join(OsStr::from_bytes(name)), network("a", "10.1.0.0/16")).unwrap();
    }
    let ignored = fabric_directory::ignored_manifests(&manifests);
    assert_eq!(ignored, [".hidden.yml", "UP.YAML", "bad\u{fffd}.yaml"]);
}
