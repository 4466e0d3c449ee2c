//! The definitions before a real API server, where there is one.

use std::path::Path;

use api_server::{ApiServer, skip};
use fabric_api::crds;
use serde_json::{Value, json};

use crate::objects::{PEERING, WHOLE, bad, resources};
use crate::{liqo, same};

#[test]
fn api_server_accepts_definitions_and_objects() {
    let Some(server) = server("take") else { return };
    apply(&server, &ours());
    for object in resources(WHOLE) {
        store(&server, &object);
        assert_eq!(stored(&server, &object), content(&object));
    }
    for bad in bad() {
        let message = refused(&server, bad.was.as_ref(), &bad.object);
        assert!(message.contains(&bad.because), "expected {:?}, found {message}", bad.because);
    }
    strings_are_refused_without_admission(&server);
}

/// Without a webhook they stay strings; and server-side apply expects lists even before admission.
fn strings_are_refused_without_admission(server: &ApiServer) {
    let strings = in_default(resources(PEERING)).into_iter().find(|o| o["kind"] == "Configuration");
    let text = strings.unwrap().to_string();
    let message = server.kubectl(&["create", "-f", "-"], &text).unwrap_err();
    assert!(message.contains("spec.remote.cidr.pod in body must be of type array"), "{message}");
    let message = server.kubectl(&["apply", "--server-side", "-f", "-"], &text).unwrap_err();
    assert!(message.contains("spec.remote.cidr.pod: expected list"), "{message}");
}

#[test]
fn definitions_replace_liqos_and_keep_objects() {
    let Some(server) = server("replace") else { return };
    let liqos: Vec<_> = liqo::definitions().into_values().collect();
    let objects: Vec<_> = as_liqo_has_them(WHOLE).chain(in_default(lists(PEERING))).collect();
    let unchanged = || objects.iter().all(|object| stored(&server, object) == content(object));
    apply(&server, &liqos);
    objects.iter().for_each(|object| store(&server, object));
    assert!(unchanged());
    apply(&server, &ours());
    assert!(unchanged());
    assert_eq!(other_than_liqos(&server), Vec::<String>::new());
    objects.iter().for_each(|object| touch(&server, object));
    apply(&server, &liqos);
    assert!(unchanged());
    objects.iter().for_each(|object| touch(&server, object));
}

/// None, after reporting why, if there can't be one.
fn server(name: &str) -> Option<ApiServer> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("crds").join(name);
    ApiServer::start(dir).map_err(|why| skip(&why)).ok()
}

fn ours() -> Vec<Value> {
    let all = crds::liqo().into_iter().chain(crds::weft());
    all.map(|crd| serde_json::to_value(crd).unwrap()).collect()
}

/// Applies definitions as Liqo's own upgrade job does. A warning is an error here.
fn apply(server: &ApiServer, definitions: &[Value]) {
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": definitions }).to_string();
    let arguments = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
    server.kubectl(&arguments, &list).unwrap();
    let established = ["wait", "--for=condition=Established", "--timeout=30s", "-f", "-"];
    server.kubectl(&established, &list).unwrap();
    let served = |definition: &Value| {
        let plural = definition["metadata"]["name"].as_str().unwrap().to_owned();
        server.wait_until("it is served", || server.kubectl(&["get", &plural, "-o", "name"], ""));
    };
    definitions.iter().for_each(served);
}

/// Creates an object with its status, if it has one.
fn store(server: &ApiServer, object: &Value) {
    let text = object.to_string();
    server.kubectl(&["create", "-f", "-"], &text).unwrap();
    if object.get("status").is_some() {
        server.kubectl(&["replace", "--subresource=status", "-f", "-"], &text).unwrap();
    }
}

/// Message of the server when an object is created, or changed from what it was.
fn refused(server: &ApiServer, was: Option<&Value>, object: &Value) -> String {
    let Some(was) = was else {
        let created = server.kubectl(&["create", "-f", "-"], &object.to_string());
        return created.expect_err(&format!("it took {object}"));
    };
    store(server, was);
    let message = server.kubectl(&["replace", "-f", "-"], &object.to_string()).unwrap_err();
    server.kubectl(&["delete", "-f", "-"], &was.to_string()).unwrap();
    message
}

/// Writes it again, so that it is checked again.
fn touch(server: &ApiServer, object: &Value) {
    let arguments = ["annotate", "--overwrite", "-f", "-", "example.com/touched=yes"];
    server.kubectl(&arguments, &object.to_string()).unwrap();
}

fn stored(server: &ApiServer, object: &Value) -> Value {
    let text = server.kubectl(&["get", "-o", "json", "-f", "-"], &object.to_string()).unwrap();
    // What is named in a file comes as a list.
    let list: Value = serde_json::from_str(&text).unwrap();
    content(&list["items"][0])
}

fn content(object: &Value) -> Value {
    json!([object["kind"], object["metadata"]["name"], object["spec"], object["status"]])
}

fn other_than_liqos(server: &ApiServer) -> Vec<String> {
    let installed = |name: &str| {
        let text = server.kubectl(&["get", "crd", name, "-o", "json"], "").unwrap();
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let liqos = liqo::definitions();
    liqos.iter().flat_map(|(name, liqo)| same::differing_fields(&installed(name), liqo)).collect()
}

fn in_default(objects: Vec<Value>) -> Vec<Value> {
    let moved = objects.into_iter().map(|mut object| {
        object["metadata"]["namespace"] = json!("default");
        object
    });
    moved.collect()
}

fn lists(text: &str) -> Vec<Value> {
    let is_list = |object: &Value| !object["spec"]["remote"]["cidr"]["pod"].is_string();
    resources(text).into_iter().filter(is_list).collect()
}

/// Objects without weft's own kinds and fields, and with IPv4 addresses.
fn as_liqo_has_them(text: &str) -> impl Iterator<Item = Value> {
    let text = text.replace("fd00:a::7", "10.200.1.8").replace("fd00:e::9", "10.70.0.9");
    let liqos = |object: &Value| object["apiVersion"].as_str().is_some_and(|v| v.contains("liqo"));
    resources(&text).into_iter().filter(liqos).map(|mut object| {
        if object["spec"]["endpoint"].is_object() {
            object["status"].as_object_mut().unwrap().remove("conditions");
        }
        object
    })
}
