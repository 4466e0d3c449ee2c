//! Dashboard and alerts use metrics that exist.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use fabric_store::Store;
use gateway::report::metrics::{Metrics, NodeCounts, Scrape};
use gateway::state::ProbeCounts;
use lane::{Counters, PeerState, Stats};
use serde::Deserialize;
use serde_json::Value;

use crate::helm::{EVERYTHING, Helm, chart};

/// Metrics of `weft up --metrics`.
const OTHERS: [&str; 2] = ["weft_process_up", "weft_process_restarts_total"];
/// Metrics for a closer look only.
const UNWATCHED: [&str; 2] = ["weft_ipam_requests", "weft_agent_reconcile_seconds"];
const JOBS: [&str; 4] = ["weft-gateway", "weft-fabric-controller", "weft-ipam", "weft-route-agent"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "that it is there is what counts")]
struct Group {
    name: String,
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "that it is there is what counts")]
struct Rule {
    alert: String,
    expr: String,
    #[serde(default)]
    r#for: String,
    labels: Severity,
    annotations: Texts,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "that it is there is what counts")]
struct Severity {
    severity: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "that it is there is what counts")]
struct Texts {
    runbook_url: String,
    summary: String,
    description: String,
}

#[test]
fn alerts_use_existing_metrics() {
    let rules = alerts();
    let exprs = rules.groups.iter().flat_map(|group| &group.rules).map(|rule| rule.expr.as_str());
    known(exprs);
}

#[test]
fn each_alert_has_its_paragraph_in_operations() {
    let text = std::fs::read_to_string("../deploy/OPERATIONS.md").unwrap();
    assert!(text.lines().count() <= 200);
    let groups = alerts().groups;
    let rules: Vec<_> = groups.iter().flat_map(|group| &group.rules).collect();
    let headings: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    assert_eq!(headings, rules.iter().map(|rule| rule.alert.as_str()).collect::<Vec<_>>());
    for Rule { alert, annotations, .. } in rules {
        let (_, paragraph) = text.split_once(&format!("### {alert}\n")).unwrap();
        let paragraph = paragraph.lines().next().unwrap_or_default();
        assert!(!paragraph.is_empty() && !paragraph.starts_with('#'), "{alert}");
        let anchor = format!("deploy/OPERATIONS.md#{}", alert.to_lowercase());
        assert_eq!(annotations.runbook_url, anchor);
    }
}

#[test]
fn dashboard_uses_existing_metrics() {
    let dashboard = file("monitoring/dashboard.json");
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    known(targets.map(|target| target["expr"].as_str().unwrap()));
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_i64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len());
}

#[test]
fn every_metric_is_watched() {
    let alerts = alerts();
    let rules = alerts.groups.iter().flat_map(|group| &group.rules).map(|rule| rule.expr.clone());
    let used = rules.collect::<String>() + &file("monitoring/dashboard.json");
    let text = gateway_metrics() + &control_plane_metrics();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    for name in types.filter_map(|line| line.split(' ').next()) {
        // A metric that neither alert nor panel shows need not be measured.
        let seen = used.contains(name) || UNWATCHED.contains(&name);
        assert!(seen, "no alert and no panel uses {name}");
    }
}

#[test]
fn alerts_and_dashboard_are_installed_as_they_are() {
    let Some(helm) = Helm::find() else { return };
    let objects = helm.objects(&[EVERYTHING]);
    let find = |kind: &str, name: &str| {
        let is_it = |o: &&Value| o["kind"] == kind && o["metadata"]["name"] == name;
        objects.iter().find(is_it).unwrap_or_else(|| panic!("no {kind} {name}"))
    };
    let alerts: Value = serde_saphyr::from_str(&file("monitoring/alerts.yaml")).unwrap();
    assert_eq!(find("PrometheusRule", "weft")["spec"], alerts);
    let dashboard = find("ConfigMap", "weft-dashboard")["data"]["weft.json"].as_str().unwrap();
    assert_eq!(dashboard.trim(), file("monitoring/dashboard.json").trim());
}

fn alerts() -> Rules {
    serde_saphyr::from_str(&file("monitoring/alerts.yaml")).unwrap()
}

fn file(name: &str) -> String {
    std::fs::read_to_string(chart().join(name)).unwrap()
}

/// Fails at a metric, or a value of its labels, that no program of weft's has.
fn known<'a>(exprs: impl Iterator<Item = &'a str>) {
    let (names, labels) = metrics();
    for expr in exprs {
        let (words, texts) = words(expr);
        let ours = words.iter().filter(|w| w.starts_with("weft_") || w.starts_with("liqo_"));
        for name in ours {
            assert!(names.contains(*name) || OTHERS.contains(name), "{name}, in {expr}");
        }
        for text in texts.iter().flat_map(|text| text.split('|')).filter(|text| is_ours(text)) {
            assert!(labels.contains(text), "{text:?}, in {expr}");
        }
    }
}

/// True unless it is a variable of the dashboard, or a job, which Prometheus names.
fn is_ours(label: &str) -> bool {
    !label.contains('$') && !JOBS.contains(&label)
}

/// The words of an expression, and the texts in quotation marks.
fn words(expr: &str) -> (Vec<&str>, Vec<&str>) {
    let (mut words, mut texts) = (Vec::new(), Vec::new());
    for (i, part) in expr.split('"').enumerate() {
        if i % 2 == 1 {
            texts.push(part);
        } else {
            words.extend(part.split(|c: char| !c.is_ascii_alphanumeric() && c != '_'));
        }
    }
    (words, texts)
}

/// Names of metrics, and values of labels, of all programs.
fn metrics() -> (BTreeSet<String>, BTreeSet<String>) {
    let text = gateway_metrics() + &control_plane_metrics();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let (mut names, mut labels) = (BTreeSet::new(), BTreeSet::new());
    for sample in samples {
        let (words, texts) = words(sample);
        names.insert(words[0].to_owned());
        labels.extend(texts.into_iter().map(str::to_owned));
    }
    (names, labels)
}

fn control_plane_metrics() -> String {
    let store = Store::open_manifests(Path::new("."));
    let controller = fabric_controller::metrics::Metrics::default().of_kubernetes().registry();
    let ipam = crate::ipam_metrics::Metrics::default().registry(store.metrics());
    let agent = crate::agent_vitals::Vitals::new().monitoring(&store).registry;
    let mut text = String::new();
    for registry in [controller, ipam, agent] {
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    }
    text
}

fn gateway_metrics() -> String {
    let stats = Stats {
        relayed: 0,
        counters: Counters::default(),
        peer: PeerState { last_handshake: Some(Instant::now()), ..PeerState::default() },
        gso_active: true,
        socket_overflows: 0,
        turns: 1,
        full_reads: 0,
        last_stamp: Default::default(),
    };
    let scrape = Scrape {
        peer: "milan".parse().unwrap(),
        connected: true,
        latency: Some(Duration::from_millis(1)),
        stats: Some(stats),
        mtu: 1340,
        path_mtu: Some(1400),
        tun_overflows: Some(0),
        processor_time: Some(Duration::ZERO),
        probes: ProbeCounts::default(),
        faults: Vec::new(),
        paths: Some(NodeCounts::default()),
    };
    Metrics::new().render(Some(scrape)).unwrap()
}
