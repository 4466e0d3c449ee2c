//! Gateway templates against Go's own text/template, Liqo's stock templates and weft's.

#![expect(clippy::unwrap_used, reason = "a test fails where it is")]

mod cases;
mod defaults;
mod go;
mod stock;

use std::fs;
use std::path::{Path, PathBuf};

use fabric_api::check;
use fabric_api::networking::{GatewayClient, GatewayServer};
use gateway_templates::{RenderError, Variables};
use serde_json::Value;

fn folder() -> PathBuf {
    PathBuf::from("tests")
}

fn read(file: &Path) -> Value {
    serde_saphyr::from_str(&fs::read_to_string(file).unwrap()).unwrap()
}

/// The `spec.template` of the template in a file.
fn template(file: &Path) -> Value {
    read(file)["spec"]["template"].take()
}

fn variables(gateway: &Value) -> Variables {
    if gateway["kind"] == "GatewayServer" {
        let server: GatewayServer = serde_json::from_value(gateway.clone()).unwrap();
        Variables::of_server(&server, &check::peer(&server.metadata).unwrap())
    } else {
        let client: GatewayClient = serde_json::from_value(gateway.clone()).unwrap();
        Variables::of_client(&client, &check::peer(&client.metadata).unwrap())
    }
}

/// The error and all that caused it.
fn chain(error: &RenderError) -> String {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |e| e.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
