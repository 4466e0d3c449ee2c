//! One /metrics for all processes of the host, and for the supervisor itself.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use fabric_runtime::OPENMETRICS;
use futures::future::join_all;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::health::{self, Reports};
use super::process::Role;

/// Serves until the process ends.
pub async fn serve(address: SocketAddr, reports: watch::Receiver<Reports>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| {
        format!("cannot listen on --metrics {address}; expected a free port of this host")
    })?;
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .with_state(reports);
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(())
}

async fn metrics(State(reports): State<watch::Receiver<Reports>>) -> impl IntoResponse {
    let reports = reports.borrow().clone();
    let processes = reports.iter().map(|(process, report)| {
        let label = label(process, &report.role);
        async move {
            let text = health::get(&report.http, "/metrics", health::ANSWER_TIMEOUT).await;
            (label, text.unwrap_or_default())
        }
    });
    let mut merged = Merged::default();
    for (label, text) in join_all(processes).await {
        merged.add(&label, &text);
    }
    ([(header::CONTENT_TYPE, OPENMETRICS)], own(&reports) + &merged.text())
}

/// Label that distinguishes a process: `gateway`, as in Kubernetes, or `process`.
fn label(process: &str, role: &Role) -> String {
    match role {
        Role::Gateway { namespace, name } => format!("gateway=\"{namespace}/{name}\""),
        Role::Control | Role::Agent => format!("process=\"{process}\""),
    }
}

/// Metrics of the supervisor about its processes.
fn own(reports: &Reports) -> String {
    let mut text =
        "# HELP weft_process_up Whether the process runs.\n# TYPE weft_process_up gauge\n"
            .to_owned();
    // Writing to a String cannot fail.
    for (name, report) in reports {
        let up = u8::from(report.pid.is_some());
        let _ = writeln!(text, "weft_process_up{{process=\"{name}\"}} {up}");
    }
    text.push_str(
        "# HELP weft_process_restarts How often the process died and was started again.\n\
         # TYPE weft_process_restarts counter\n",
    );
    for (name, report) in reports {
        let _ =
            writeln!(text, "weft_process_restarts_total{{process=\"{name}\"}} {}", report.restarts);
    }
    text
}

/// Several expositions as one: each family once, with the samples of all, distinguished by a label.
#[derive(Debug, Default)]
struct Merged(BTreeMap<String, Family>);

#[derive(Debug, Default)]
struct Family {
    /// `# HELP`, `# TYPE`, `# UNIT`, by keyword: the first exposition's count.
    about: BTreeMap<String, String>,
    samples: Vec<String>,
}

impl Merged {
    fn add(&mut self, label: &str, text: &str) {
        let mut family = String::new();
        for line in text.lines().filter(|line| !line.is_empty() && *line != "# EOF") {
            if let Some(about) = line.strip_prefix("# ") {
                let mut words = about.splitn(3, ' ');
                let (Some(keyword), Some(name)) = (words.next(), words.next()) else { continue };
                name.clone_into(&mut family);
                let entry = self.0.entry(family.clone()).or_default();
                entry.about.entry(keyword.to_owned()).or_insert_with(|| line.to_owned());
            } else {
                let name = line.split(['{', ' ']).next().unwrap_or_default();
                // Samples follow their family's lines and begin with its name; a sample without
                // such lines is a family by itself.
                if family.is_empty() || !name.starts_with(&family) {
                    name.clone_into(&mut family);
                }
                let samples = &mut self.0.entry(family.clone()).or_default().samples;
                samples.push(labelled(line, label));
            }
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for family in self.0.values() {
            let order = ["TYPE", "UNIT", "HELP"];
            let about = order.iter().filter_map(|keyword| family.about.get(*keyword));
            for line in about.chain(&family.samples) {
                text.push_str(line);
                text.push('\n');
            }
        }
        text + "# EOF\n"
    }
}

fn labelled(sample: &str, label: &str) -> String {
    let brace = sample.find('{');
    let space = sample.find(' ').unwrap_or(sample.len());
    match brace.filter(|brace| *brace < space) {
        Some(brace) => {
            let (name, rest) = sample.split_at(brace);
            let rest = &rest[1..];
            let comma = if rest.starts_with('}') { "" } else { "," };
            format!("{name}{{{label}{comma}{rest}")
        }
        None => {
            let (name, rest) = sample.split_at(space);
            format!("{name}{{{label}}}{rest}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateway(name: &str) -> Role {
        Role::Gateway { namespace: "t".to_owned(), name: name.to_owned() }
    }

    #[test]
    fn processes_are_distinguished_by_name() {
        let mut merged = Merged::default();
        for process in ["ipam", "fabric-controller"] {
            let text = "# TYPE weft_store_writes counter\nweft_store_writes_total{kind=\"IP\"} 1\n";
            merged.add(&label(process, &Role::Control), text);
        }
        assert_eq!(
            merged.text(),
            "# TYPE weft_store_writes counter\n\
             weft_store_writes_total{process=\"ipam\",kind=\"IP\"} 1\n\
             weft_store_writes_total{process=\"fabric-controller\",kind=\"IP\"} 1\n# EOF\n"
        );
    }

    #[test]
    fn families_of_several_gateways_become_one() {
        let one = "# HELP liqo_peer_is_connected Connected.\n# TYPE liqo_peer_is_connected gauge\n\
                   liqo_peer_is_connected{driver=\"wireguard\",cluster_id=\"milan\"} 1\n\
                   # TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_count 2\n# EOF\n";
        let two = one.replace("milan", "paris");
        let mut merged = Merged::default();
        merged.add(&label("x", &gateway("a")), one);
        merged.add(&label("y", &gateway("b")), &two);
        assert_eq!(
            merged.text(),
            "# TYPE h histogram\n\
             h_bucket{gateway=\"t/a\",le=\"1\"} 2\nh_count{gateway=\"t/a\"} 2\n\
             h_bucket{gateway=\"t/b\",le=\"1\"} 2\nh_count{gateway=\"t/b\"} 2\n\
             # TYPE liqo_peer_is_connected gauge\n# HELP liqo_peer_is_connected Connected.\n\
             liqo_peer_is_connected{gateway=\"t/a\",driver=\"wireguard\",cluster_id=\"milan\"} 1\n\
             liqo_peer_is_connected{gateway=\"t/b\",driver=\"wireguard\",cluster_id=\"paris\"} 1\n\
             # EOF\n"
        );
    }
}
