//! Arguments of the chart's pods are accepted by their programs.

use std::process::Command;

use clap::{CommandFactory as _, Parser as _};
use serde_json::Value;

use crate::helm::{EVERYTHING, Helm, MIN_VALUES};
use crate::references::containers;

#[test]
fn programs_understand_their_arguments() {
    let Some(helm) = Helm::find() else { return };
    let dir = match weft_tests::bin_dir() {
        Ok(dir) => dir,
        Err(error) => return weft_tests::skip(&format!("{error:#}")),
    };
    // Arguments that no program has.
    let others = "common: {extraArgs: []}";
    for values in [MIN_VALUES, EVERYTHING] {
        let objects = helm.objects(&[values, others]);
        for container in containers(&objects) {
            let program = container["command"][0].as_str().unwrap();
            let arguments = texts(&container["args"]).filter(|text| !text.contains("--example"));
            // Help is given after all before it was understood.
            let mut command = Command::new(dir.join(program));
            let output = command.args(arguments).arg("--help").output().unwrap();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{program}: {errors}");
        }
    }
}

#[test]
fn offload_switches_reach_every_gateway() {
    let Some(helm) = Helm::find() else { return };
    let command = gateway::args::Args::command();
    let switches = command.get_arguments().filter_map(clap::Arg::get_long);
    let switches: Vec<_> = switches.filter(|name| name.starts_with("no-")).collect();
    assert!(switches.contains(&"no-gso"), "{switches:?}");
    let extra = switches.iter().map(|name| format!("--{name}")).collect::<Vec<_>>().join(", ");
    let values = format!(
        "networking: {{gatewayTemplates: {{container: {{gateway: {{extraArgs: [{extra}]}}}}}}}}"
    );
    let objects = helm.objects(&[MIN_VALUES, &values]);
    let gateways: Vec<_> =
        containers(&objects).filter(|container| container["command"][0] == "gateway").collect();
    assert_eq!(gateways.len(), 2, "a server's and a client's");
    for container in gateways {
        let args = texts(&container["args"]);
        let args = gateway::args::Args::try_parse_from(["gateway"].into_iter().chain(args));
        let config = gateway::args::Config::from(args.unwrap());
        let none = lane::Offloads { gso: false, gro: false, tun: false };
        assert_eq!(config.offloads, none);
    }
}

fn texts(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().unwrap().iter().map(|text| text.as_str().unwrap())
}
