//! Requests to the API server, from its audit log.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Kubernetes;
use super::machine::DIR;

pub(super) const POLICY: &str = "audit.json";
const LOG: &str = "log/audit.log";
const ACCOUNT: &str = "system:serviceaccount:";

/// A request from a program in a pod to the API server. A watch is one request, however long it
/// lasts.
#[derive(Clone, Debug)]
pub struct Request {
    /// The service account, `NAMESPACE:NAME`.
    pub account: String,
    /// Pod in which the program runs; empty if it runs in none.
    pub pod: String,
    /// `VERB RESOURCE[/SUBRESOURCE] NAMESPACE/NAME`.
    pub what: String,
    /// HTTP status code of the answer.
    pub code: u64,
}

impl Kubernetes {
    /// All requests so far by service accounts, but for those of Kubernetes' own controllers. The first
    /// ones stay the first.
    pub fn requests(&self) -> Result<Vec<Request>> {
        let log = self.head().host.outside(format!("{DIR}/{LOG}"));
        let text = std::fs::read_to_string(log).context("reading the audit log")?;
        // The last line may be half written.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(request).collect()
    }
}

/// Each request is one line: a watch when it begins, everything else when it ends.
pub(super) fn policy() -> Value {
    let rule = |level: &str, group: &str| json!({"level": level, "userGroups": [group]});
    let (all, own) = ("system:serviceaccounts", "system:serviceaccounts:kube-system");
    let mut watches = rule("Metadata", all);
    watches["verbs"] = json!(["watch"]);
    watches["omitStages"] = json!(["ResponseComplete"]);
    json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [rule("None", own), watches, rule("Metadata", all)],
    })
}

pub(super) fn flags() -> [String; 2] {
    [format!("--audit-policy-file={DIR}/{POLICY}"), format!("--audit-log-path={DIR}/{LOG}")]
}

fn request(line: &str) -> Result<Request> {
    let event: Value =
        serde_json::from_str(line).with_context(|| format!("the audit log has {line:?}"))?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (user, object) = (&event["user"], &event["objectRef"]);
    let subresource = object["subresource"].as_str().map(|name| format!("/{name}"));
    Ok(Request {
        account: text(&user["username"]).trim_start_matches(ACCOUNT).to_owned(),
        pod: text(&user["extra"]["authentication.kubernetes.io/pod-name"][0]),
        what: format!(
            "{} {}{} {}/{}",
            text(&event["verb"]),
            text(&object["resource"]),
            subresource.unwrap_or_default(),
            text(&object["namespace"]),
            text(&object["name"])
        ),
        code: event["responseStatus"]["code"].as_u64().unwrap_or_default(),
    })
}
