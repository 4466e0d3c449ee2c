//! Requests as the audit log of the API server has them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::published;
use crate::users::User;

const WRITES: [&str; 5] = ["create", "update", "patch", "delete", "deletecollection"];
/// Resource of leader election and of node heartbeats: no content.
const LEASES: &str = "leases";

/// The audit log of an API server.
#[derive(Clone, Debug)]
pub struct AuditLog(PathBuf);

/// Requests that were answered in a stretch of time.
#[derive(Clone, Debug, Default)]
pub struct Window(Vec<Request>);

/// Number of equal requests of a user.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestCount {
    pub user: String,
    pub verb: String,
    /// Plural, with the subresource.
    pub resource: String,
    pub count: usize,
}

/// An event of the audit log, as far as it matters here.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    stage: String,
    verb: String,
    user: Name,
    impersonated_user: Option<Name>,
    object_ref: Option<Target>,
    response_status: Option<Status>,
}

#[derive(Clone, Debug, Deserialize)]
struct Name {
    #[serde(default)]
    username: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Target {
    api_group: String,
    resource: String,
    namespace: String,
    name: String,
    subresource: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    code: u16,
}

/// A write with what was sent.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SentWrite {
    pub(crate) verb: String,
    #[serde(rename = "requestURI")]
    pub(crate) uri: String,
    #[serde(default)]
    pub(crate) request_object: Option<Value>,
}

impl AuditLog {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Lets the log outlive its API server, as another file of the same file system.
    pub fn keep_at(&self, path: &Path) -> Result<Self> {
        std::fs::hard_link(&self.0, path).context("cannot link the audit log")?;
        Ok(Self(path.to_owned()))
    }

    /// Position of the next event, in bytes.
    pub fn position(&self) -> Result<u64> {
        Ok(self.0.metadata().context("no audit log")?.len())
    }

    /// Events between two positions.
    pub fn between(&self, from: u64, to: u64) -> Result<Window> {
        let mut requests = Vec::new();
        self.each_line(from, to, |line| {
            let request: Request = serde_json::from_str(line).context("an audit event")?;
            // A watch is one request, however long it lasts.
            let is_answered = (request.verb == "watch") == (request.stage == "ResponseStarted");
            requests.extend(is_answered.then_some(request));
            Ok(())
        })?;
        Ok(Window(requests))
    }

    /// Successful writes of content between two positions, in order, but for definitions of kinds, what
    /// the API server writes itself, and Leases.
    pub(crate) fn writes_between(&self, from: u64, to: u64) -> Result<Vec<SentWrite>> {
        let mut writes = Vec::new();
        self.each_line(from, to, |line| {
            let request: Request = serde_json::from_str(line).context("an audit event")?;
            let is_definition = request.target().is_some_and(|target| {
                target.api_group == "apiextensions.k8s.io" || target.resource == LEASES
            });
            let own = request.user() == "system:apiserver";
            if request.is_write() && request.is_taken() && !is_definition && !own {
                writes.push(serde_json::from_str(line).context("an audit event")?);
            }
            Ok(())
        })?;
        Ok(writes)
    }

    fn each_line(
        &self,
        from: u64,
        to: u64,
        mut each: impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let mut file = File::open(&self.0).context("no audit log")?;
        file.seek(SeekFrom::Start(from)).context("the audit log is too short")?;
        let lines = BufReader::new(file.take(to.saturating_sub(from))).lines();
        for line in lines {
            let line = line.context("reading the audit log")?;
            // The last one may not be whole yet.
            if line.ends_with('}') {
                each(&line)?;
            }
        }
        Ok(())
    }
}

impl Window {
    /// Requests by user, verb and resource, the most frequent first.
    pub fn counts(&self) -> Vec<RequestCount> {
        Self::count(self.0.iter())
    }

    /// Counts as [`Self::counts`] does, writes of content alone.
    pub fn write_counts(&self) -> Vec<RequestCount> {
        Self::count(self.content_writes())
    }

    fn count<'a>(requests: impl Iterator<Item = &'a Request>) -> Vec<RequestCount> {
        let mut counts: BTreeMap<(String, String, String), usize> = BTreeMap::new();
        for request in requests {
            let key = (request.program(), request.verb.clone(), request.resource());
            *counts.entry(key).or_default() += 1;
        }
        let counts = counts.into_iter();
        let mut counts: Vec<_> = counts
            .map(|((user, verb, resource), count)| RequestCount { user, verb, resource, count })
            .collect();
        counts.sort_by_key(|count| std::cmp::Reverse(count.count));
        counts
    }

    /// Writes of content that a user asked for: verb, resource and name of each.
    pub fn writes_of(&self, user: User) -> Vec<String> {
        let (program, writes) = (user.program(), self.content_writes());
        let own = writes.filter(|request| request.program() == program);
        own.map(|request| {
            let name = request.target().map(|target| target.name.as_str()).unwrap_or_default();
            format!("{} {} {name}", request.verb, request.resource())
        })
        .collect()
    }

    /// Writes by the controller of what it publishes: of all objects, and of the one that was written
    /// most often.
    pub fn published_writes(&self) -> (usize, usize) {
        let mut counts: BTreeMap<(&str, &str, &str), usize> = BTreeMap::new();
        let program = User::Controller.program();
        for request in self.content_writes().filter(|request| request.program() == program) {
            let Some(target) = request.target() else { continue };
            if target.api_group == published::GROUP {
                let key = (target.resource.as_str(), target.namespace.as_str(), &*target.name);
                *counts.entry(key).or_default() += 1;
            }
        }
        (counts.values().sum(), counts.values().max().copied().unwrap_or(0))
    }

    fn content_writes(&self) -> impl Iterator<Item = &Request> {
        self.0.iter().filter(|request| {
            request.is_write() && request.target().is_none_or(|target| target.resource != LEASES)
        })
    }
}

impl Request {
    fn is_write(&self) -> bool {
        WRITES.contains(&self.verb.as_str())
    }

    fn is_taken(&self) -> bool {
        self.response_status.as_ref().is_some_and(|status| (200..300).contains(&status.code))
    }

    fn target(&self) -> Option<&Target> {
        self.object_ref.as_ref()
    }

    fn user(&self) -> &str {
        let user = self.impersonated_user.as_ref().unwrap_or(&self.user);
        &user.username
    }

    fn program(&self) -> String {
        let user = self.user();
        match user.strip_prefix("system:serviceaccount:").and_then(|user| user.split_once(':')) {
            Some((namespace, _)) if namespace.starts_with("liqo-tenant-") => "gateways".to_owned(),
            Some((_, account)) => account.to_owned(),
            None => user.to_owned(),
        }
    }

    fn resource(&self) -> String {
        match self.target() {
            Some(target) if target.subresource.is_empty() => target.resource.clone(),
            Some(target) => format!("{}/{}", target.resource, target.subresource),
            None => "no resource".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(stage: &str, verb: &str, user: &str, resource: &str) -> String {
        json!({"stage": stage, "verb": verb, "requestURI": "/x", "user": {"username": "admin"},
            "impersonatedUser": {"username": user}, "responseStatus": {"code": 200},
            "objectRef": {"resource": resource, "name": "n1", "apiGroup": published::GROUP}})
        .to_string()
    }

    #[test]
    fn requests_are_counted_once_and_by_program() {
        let dir = tempfile::tempdir().unwrap();
        let log = AuditLog::new(dir.path().join("audit.log"));
        let controller = User::Controller.name().unwrap();
        let lines = [
            event("ResponseComplete", "patch", "before", "nodeconfigs"),
            event("ResponseComplete", "patch", &controller, "nodeconfigs"),
            event("ResponseComplete", "patch", &controller, "nodeconfigs"),
            event("ResponseComplete", "update", &controller, "leases"),
            event("ResponseStarted", "watch", &controller, "nodes"),
            event("ResponseComplete", "watch", &controller, "nodes"),
            event("ResponseComplete", "patch", &User::Gateway(Peer(1)).name().unwrap(), "x"),
            event("ResponseComplete", "patch", &User::Gateway(Peer(2)).name().unwrap(), "x"),
        ];
        std::fs::write(&log.0, lines.join("\n") + "\n{\"cut").unwrap();
        let window = log.between(lines[0].len() as u64 + 1, log.position().unwrap()).unwrap();
        let counts = window.counts();
        let text = |count: &RequestCount| {
            let RequestCount { user, verb, resource, count } = count;
            format!("{user} {verb} {resource} {count}")
        };
        let all: Vec<String> = counts.iter().map(text).collect();
        let expected = [
            "gateways patch x 2",
            "liqo-fabric-controller patch nodeconfigs 2",
            "liqo-fabric-controller update leases 1",
            "liqo-fabric-controller watch nodes 1",
        ];
        assert_eq!(all, expected);
        assert_eq!(window.published_writes(), (2, 2));
        assert_eq!(window.writes_of(User::Controller).len(), 2, "Leases have no content");
    }

    use crate::manifests::Peer;
}
