//! Handling of plain strings, and of everything else.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::replica::Replica;
use crate::world::{World, configuration, until};

const CREATE: [&str; 3] = ["create", "-f", "-"];
const REPLACE: [&str; 3] = ["replace", "-f", "-"];
const APPLY: [&str; 3] = ["apply", "-f", "-"];
const SERVER_SIDE: [&str; 4] = ["apply", "--server-side", "-f", "-"];

#[test]
fn strings_are_stored_as_lists() {
    let Some(world) = World::start() else { return };
    let replica = Replica::start(&world);
    world.install(&replica);
    created(&world);
    replaced(&world);
    applied(&world);
    edited(&world);
    lists_stay(&world);
    server_side(&world);
    refused_by_validation(&world);
    refused_by_the_webhook(&world, &replica);
    world.assert_no_key_was_logged();
    gone(&world, replica);
}

fn write(world: &World, how: &[&str], name: &str, pod: &Value) -> Result<String, String> {
    world.server.kubectl(how, &configuration(name, pod).to_string())
}

fn object(world: &World, name: &str) -> Value {
    let text = world.kubectl(&["get", "configuration", name, "-o", "json"], "");
    serde_json::from_str(&text).unwrap()
}

fn stored(world: &World, name: &str) -> Value {
    object(world, name)["spec"]["remote"]["cidr"].take()
}

fn cidrs(pod: &str) -> Value {
    json!({ "pod": [pod], "external": ["10.70.0.0/16"] })
}

fn created(world: &World) {
    write(world, &CREATE, "created", &json!("10.1.0.0/16")).unwrap();
    assert_eq!(stored(world, "created"), cidrs("10.1.0.0/16"));
    let mut all = configuration("all", &json!("10.1.0.0/16"));
    let strings = json!({ "pod": "10.1.0.0/16", "external": "fd00:70::/64" });
    all["spec"] = json!({ "local": { "cidr": strings }, "remote": { "cidr": strings } });
    world.kubectl(&CREATE, &all.to_string());
    let lists = json!({ "pod": ["10.1.0.0/16"], "external": ["fd00:70::/64"] });
    let spec = json!({ "local": { "cidr": lists }, "remote": { "cidr": lists } });
    assert_eq!(object(world, "all")["spec"], spec);
}

fn replaced(world: &World) {
    write(world, &REPLACE, "created", &json!("10.2.0.0/16")).unwrap();
    assert_eq!(stored(world, "created"), cidrs("10.2.0.0/16"));
}

/// The same once more changes nothing.
fn applied(world: &World) {
    for pod in ["10.3.0.0/16", "10.3.0.0/16", "10.4.0.0/16"] {
        write(world, &APPLY, "applied", &json!(pod)).unwrap();
        assert_eq!(stored(world, "applied"), cidrs(pod));
    }
    assert_eq!(object(world, "applied")["metadata"]["generation"], json!(2));
    write(world, &APPLY, "applied", &json!(["10.4.0.0/16"])).unwrap();
    assert_eq!(object(world, "applied")["metadata"]["generation"], json!(2));
}

fn edited(world: &World) {
    let mut edit = world.server.command(&["edit", "configuration", "created"]);
    let to_string = r"sed -i '/^ *pod:$/{N;s|pod:.*|pod: 10.5.0.0/16|}'";
    let edited = edit.env("KUBE_EDITOR", to_string).output().unwrap();
    assert!(edited.status.success(), "{}", String::from_utf8_lossy(&edited.stderr));
    assert_eq!(stored(world, "created"), cidrs("10.5.0.0/16"));
    let patch = json!({ "spec": { "remote": { "cidr": { "pod": "10.6.0.0/16" } } } }).to_string();
    let arguments = ["patch", "configuration", "created", "--type=merge", "-p", &patch];
    world.kubectl(&arguments, "");
    assert_eq!(stored(world, "created"), cidrs("10.6.0.0/16"));
}

fn lists_stay(world: &World) {
    let pods = json!(["10.1.0.0/16", "fd00:1::/64"]);
    for how in [CREATE, REPLACE] {
        write(world, &how, "list", &pods).unwrap();
        assert_eq!(stored(world, "list"), json!({ "pod": pods, "external": ["10.70.0.0/16"] }));
    }
}

/// Strings are refused before admission. An object that was made of strings is no obstacle to
/// lists.
fn server_side(world: &World) {
    for name in ["new", "created"] {
        let message = write(world, &SERVER_SIDE, name, &json!("10.7.0.0/16")).unwrap_err();
        let because = format!(
            "failed to create typed patch object (default/{name}; networking.liqo.io/v1beta1, \
             Kind=Configuration): .spec.remote.cidr.pod: expected list, got &{{10.7.0.0/16}}"
        );
        assert!(message.contains(&because), "{message}");
    }
    let force = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
    write(world, &force, "created", &json!(["10.7.0.0/16"])).unwrap();
    assert_eq!(stored(world, "created"), cidrs("10.7.0.0/16"));
}

fn refused_by_validation(world: &World) {
    let cases = [
        (json!(7), "must be of type array: \"integer\""),
        (json!({}), "must be of type array: \"object\""),
        (json!("nonsense"), "must be of type cidr: \"nonsense\""),
        (json!("10.1.0.0/16,10.2.0.0/16"), "must be of type cidr"),
    ];
    for (pod, because) in cases {
        let message = write(world, &CREATE, "bad", &pod).unwrap_err();
        assert!(message.contains("spec.remote.cidr.pod") && message.contains(because), "{message}");
    }
}

fn refused_by_the_webhook(world: &World, replica: &Replica) {
    let post = "POST /cidr-lists";
    let large = vec![b' '; (4 << 20) + 1];
    let cases: [(&str, &[u8], &str, &str); 6] = [
        (post, b"", "400", "expected an AdmissionReview of admission.k8s.io/v1 as JSON"),
        (post, b"{\"a\"", "400", "expected an AdmissionReview of admission.k8s.io/v1 as JSON"),
        (post, b"\xff\xfe", "400", "expected an AdmissionReview of admission.k8s.io/v1 as JSON"),
        (post, &large, "413", "expected a body of at most 4194304 bytes"),
        ("GET /cidr-lists", b"", "405", ""),
        ("POST /", b"", "404", ""),
    ];
    for (head, body, code, because) in cases {
        let message = replica.request(world, head, body);
        assert!(message.starts_with(&format!("HTTP/1.1 {code} ")), "{head}: {message}");
        assert!(message.contains(because), "{head}: {message}");
    }
    write(world, &CREATE, "after-nonsense", &json!("10.1.0.0/16")).unwrap();
}

/// The API server goes on without it, and nothing comes back that was removed.
fn gone(world: &World, replica: Replica) {
    world.kubectl(&["delete", "mutatingwebhookconfiguration", "weft-cidr-lists"], "");
    world.delete_secret();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(world.secret(), None);
    world.install(&replica);
    replica.stop(world);
    let began = Instant::now();
    write(world, &CREATE, "alone", &json!(["10.1.0.0/16"])).unwrap();
    assert!(began.elapsed() < Duration::from_secs(3));
    let message = write(world, &CREATE, "alone-too", &json!("10.1.0.0/16")).unwrap_err();
    assert!(message.contains("must be of type array: \"string\""), "{message}");
    let replica = Replica::start(world);
    world.install(&replica);
    until("taken", || write(world, &APPLY, "alone-too", &json!("10.1.0.0/16")).is_ok());
    replica.stop(world);
}
